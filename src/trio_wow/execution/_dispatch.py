"""One dispatch: a receiver with a bounded window, a table of mailboxes, and a lane of them on each worker."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from inspect import isawaitable
from types import CoroutineType
from typing import Any, Generic, Literal, TypeVar, cast

import trio
from trio.lowlevel import enable_ki_protection

from trio_wow.errors import CancelScopeLeakError, ExecutorClosedError
from trio_wow.execution._blocking import BlockingCallGuard
from trio_wow.execution._errors import split_cancelled
from trio_wow.execution._lane import Lane, RunAsync, RunPlain, run_async, run_plain
from trio_wow.execution._mailbox import Mailbox
from trio_wow.execution._plain import is_async, name_of, refuse_awaitable
from trio_wow.execution._source import BatchSource, DemandSource, IterableSource
from trio_wow.execution._threads import Threads, pin_of
from trio_wow.execution._user_call import outweighs_leak
from trio_wow.execution._worker import Workers

__all__ = ["Dispatch"]

T = TypeVar("T")


class Dispatch(Generic[T]):
    """Feeds one source to one handler. `run` is called once.

    The order of a key is fixed in `_accept`, synchronously, never by the order in which Trio starts tasks. A mailbox
    leaves the table in the same synchronous step in which its last item ends, so an item either joins it or opens a
    fresh one.

    Attributes:
        accepted: how many items the source has returned.
        finished: how many of them have ended, in whatever way.
        returned: how many of those have been returned to the source as demand.
        mark: at how many finished items `return_demand` has something to do.
        mailboxes: by key.
        active: the mailbox whose handler is being run by a runner in this step.
    """

    def __init__(
        self,
        *,
        executor: str,
        workers: Workers,
        max_in_flight: int,
        throughput: int,
        blocking_calls: Literal["raise", "warn", "allow"],
        perf_counter: Callable[[], float],
        source: BatchSource[T],
        key: Callable[[T], Hashable],
        handler: Callable[[T], object],
        on_error: Callable[[T, Exception], object] | None,
        on_discard: Callable[[T], object] | None,
    ) -> None:
        self._executor = executor
        self._workers = workers
        self.max_in_flight = max_in_flight
        self.lot = max(1, max_in_flight // 16)
        self.throughput = throughput
        self.perf_counter = perf_counter
        self._source = source
        self._demand_source = source if isinstance(source, DemandSource) else None
        self._key = key
        self.handler: Callable[[T], object] = handler
        self.handler_name = name_of(handler)
        self.handler_is_async = is_async(handler)
        self.awaitable_returned = (
            f"handler {self.handler_name} is a plain function but returned an awaitable; declare it `async def`"
        )
        self.pin = pin_of(handler)
        self.context = copy_context()
        self.threads = Threads(handler, self.handler_name, self.awaitable_returned, perf_counter, self.context)
        if self.pin == "blocking":
            self.handler = self._call_blocking
            self.handler_is_async = True
        self._guard = None if blocking_calls == "allow" else BlockingCallGuard(blocking_calls, self.handler_name)
        self.run_plain: RunPlain = run_plain if self._guard is None else self._guard.run_plain
        self.run_async: RunAsync = run_async if self._guard is None else self._guard.run_async
        self._on_error = on_error
        self._on_discard = on_discard
        self.mailboxes: dict[Hashable, Mailbox[T]] = {}
        self._lanes = [Lane(self, worker, workers) for worker in workers.all]
        self.active: Mailbox[T] | None = None
        self.accepted = self.finished = self.returned = 0
        self.mark = self.lot
        self._parked: trio.lowlevel.Task | None = None
        self._scope = trio.CancelScope()
        self._halted = False
        self._forced = False
        self._lost = False  # an item was discarded or interrupted
        self._complete = False  # the source has ended and every item was handled or reported
        self._errors: list[BaseException] = []

    @property
    def demand(self) -> int:
        """How many items are asked of the source and not yet given; below zero, the window's overdraft."""
        return self.max_in_flight + self.returned - self.accepted

    async def run(self) -> None:
        """Run until the source has ended and every item has finished; see `KeyedExecutor.dispatch`."""
        cancelled: BaseException | None = None
        try:
            with self._guard or nullcontext(), self._workers.in_use(), self._scope:
                async with trio.open_nursery() as self.nursery:
                    await self._receive()
        except BaseException as error:
            # Mailboxes and receiver record their failures, so this is the caller's cancellation (or a defect here).
            cancelled, defect = split_cancelled(error)
            self.halt()
            if defect is not None:
                self._errors.append(defect)
        if cancelled is not None and not self._errors:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise cancelled
        if cancelled is not None:
            self._errors.append(cancelled)
        if len(self._errors) > 1:
            raise BaseExceptionGroup(f"errors in a dispatch of executor {self._executor!r}", self._errors)
        if self._errors:
            raise self._errors[0]
        if not self._complete:
            # A cancelled caller gets `Cancelled`, even if no task of the dispatch came past a checkpoint.
            await trio.lowlevel.checkpoint_if_cancelled()
            if self._forced:
                raise ExecutorClosedError(self._executor, "a forced stop ended this dispatch")
            raise RuntimeError(
                f"{self.handler_name}, or the source, raised trio.Cancelled although nothing had been cancelled"
            )

    def force_stop(self) -> None:
        """Cancel the dispatch, and leave its threads; `run` then raises `ExecutorClosedError`."""
        self._forced = True
        self.threads.abandon()
        self.halt()

    async def _receive(self) -> None:
        cancelled: BaseException | None = None
        try:
            await self._receive_all()
        except BaseException as error:
            cancelled = self._stop(error)
        if isinstance(self._source, IterableSource):
            try:
                await self._source.aclose()
            except BaseException as error:
                cancelled = self._stop(error) or cancelled
        if cancelled is not None:
            raise cancelled from None

    async def _receive_all(self) -> None:
        if self._demand_source is not None:
            self._demand_source.add_demand(self.max_in_flight)
        ended = False
        while not self._halted:
            limit = self.max_in_flight if self._demand_source is not None else self.demand
            if limit < 1:
                await self._park()
                continue
            try:
                batch = await self._source.receive_batch(limit)
            except trio.EndOfChannel:
                ended = True
                break
            self._accept(batch, limit)
        while self.finished < self.accepted:
            self.mark = self.accepted
            await self._park()
        self._complete = ended and not self._lost

    def _stop(self, error: BaseException) -> BaseException | None:
        """End the dispatch because of what the source raised; return the cancellation in it."""
        cancelled, failure = split_cancelled(error)
        if failure is not None:
            self._fail(failure)
        self.halt()
        return cancelled

    async def _park(self) -> None:
        """Wait until `return_demand` is called."""
        self._parked = trio.lowlevel.current_task()

        def stop_waiting(_: object) -> trio.lowlevel.Abort:
            self._parked = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(stop_waiting)

    def _accept(self, batch: Sequence[T], limit: int) -> None:
        items = tuple(batch)
        self.accepted += len(items)
        if not items or (len(items) > limit and self._demand_source is None):
            self._fail(
                ValueError(
                    f"{type(self._source).__name__}.receive_batch({limit}) returned {len(items)} items; "
                    f"return 1 to {limit}, or raise trio.EndOfChannel"
                )
            )
        key_of, mailboxes, lanes, choose = self._key, self.mailboxes, self._lanes, self._workers.choose
        rest = iter(items)
        if not self._halted:
            for item in rest:
                try:
                    key = key_of(item)
                    mailbox = mailboxes.get(key)
                    if mailbox is None:
                        if type(key) is CoroutineType:
                            refuse_awaitable(key, f"key returned a coroutine for {type(item).__name__}; make it plain")
                        mailboxes[key] = mailbox = Mailbox((item,))
                        mailbox.key = key
                        mailbox.running = False
                        lanes[choose().index].put(mailbox)
                    else:
                        mailbox.append(item)
                except BaseException as error:
                    self._fail(error)
                    self._discard(item)
                    break
        if self._halted:  # by now, or by `key`
            self._discard_queued()
            for item in rest:
                self._discard(item)

    def return_demand(self) -> None:
        """Return whole lots of finished items to the source, and let the receiver look."""
        count = (self.finished - self.returned) // self.lot * self.lot
        self.returned += count
        self.mark = self.returned + self.lot
        if count and self._demand_source is not None and not self._halted:
            active, self.active = self.active, None  # its item has finished
            try:
                self._demand_source.add_demand(count)
            except BaseException as broken:
                self._fail(broken)
            self.active = active
        if self._parked is not None:
            trio.lowlevel.reschedule(self._parked)
            self._parked = None

    def settle(self, mailbox: Mailbox[T], item: T, error: BaseException | None, leaked: Any) -> None:
        """Take note of how the handler of an item ended, unless it just returned.

        Args:
            mailbox: whose item it was.
            item: the item.
            error: what the handler raised.
            leaked: if the handler left a cancel scope open, the task's cancel status from before.

        Raises:
            trio.Cancelled: the handler was interrupted; alone or in a group, as it came.
        """
        self.active = None
        self.finished += 1
        cancelled, failure = (None, None) if error is None else split_cancelled(error)
        if leaked is not None:
            leak = CancelScopeLeakError(self.handler_name, mailbox.key)
            if error is not None and outweighs_leak(error, cancelled_outside=leaked.effectively_cancelled):
                error.add_note(str(leak))
            else:
                leak.__cause__ = error
                cancelled, failure = None, leak
        if failure is not None:
            self._report(item, failure)
        if cancelled is not None:
            self._lost = True
            self.halt()
        if self.finished >= self.mark:
            self.return_demand()
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                del error, cancelled, failure  # they refer to this frame

    def _report(self, item: T, failure: BaseException) -> None:
        if self._on_error is None or not isinstance(failure, Exception):
            self._fail(failure)
            return
        try:
            _refuse_if_awaitable(self._on_error(item, failure), "on_error")
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._errors.append(error)
        self.halt()

    @enable_ki_protection
    def halt(self) -> None:
        """Cancel every task of the dispatch and discard what has not been started. Synchronous and idempotent."""
        if self._halted:
            return
        self._halted = True
        self._scope.cancel()
        for worker in self._workers.all:
            worker.halt()
        self._discard_queued()

    def forget(self, mailbox: Mailbox[T]) -> None:
        """Take a mailbox that is empty out of the table; a key that cannot be looked up any more is an error."""
        try:
            self.mailboxes.pop(mailbox.key, None)
        except BaseException as error:
            self._fail(error)

    def _discard_queued(self) -> None:
        """Discard what is in mailboxes. Those of a task leave the table with it, the others now."""
        for mailbox in list(self.mailboxes.values()):
            while mailbox:
                self._discard(mailbox.popleft())
        for lane in self._lanes:
            lane.clear()

    def _discard(self, item: T) -> None:
        self.finished += 1
        self._lost = True
        self._hand_back(item)

    def _hand_back(self, item: T) -> None:
        if self._on_discard is not None:
            try:
                _refuse_if_awaitable(self._on_discard(item), "on_discard")
            except BaseException as error:
                self._fail(error)

    @enable_ki_protection
    async def _call_blocking(self, item: T) -> None:
        # A runner enters each handler, and says first whose it is.
        await self.threads.call_blocking(cast("Mailbox[T]", self.active), item, self._hand_back)


def _refuse_if_awaitable(result: object, callback: str) -> None:
    if result is not None and isawaitable(result):
        refuse_awaitable(result, f"{callback} returned an awaitable, which nobody awaits; make it a plain function")
