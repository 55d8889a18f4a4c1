"""One dispatch: a window, a table of mailboxes, and a task for each mailbox that has items."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextvars import copy_context
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import Generic, TypeVar

import trio

from trio_wow.errors import ExecutorClosedError
from trio_wow.execution._errors import split_cancelled
from trio_wow.execution._isolation import Isolated
from trio_wow.execution._leaks import no_leaked_scope
from trio_wow.execution._plain import refuse_awaitable
from trio_wow.execution._source import BatchSource, DemandSource

__all__ = ["Dispatch"]

T = TypeVar("T")


class Mailbox(Generic[T]):
    """The items of one key that have not been started, in the order received. Exists only while it has work."""

    __slots__ = ("key", "name", "queue")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.name = f"mailbox {key}"
        self.queue: deque[T] = deque()

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.queue)} queued>"


class Dispatch(Generic[T]):
    """Feeds one source to one handler. `run` is called once.

    The order of a key is fixed in `_accept`, synchronously, never by the order in which Trio starts tasks. A mailbox
    leaves the table in the same synchronous step in which its task finds it empty, so an item either joins it or
    opens a fresh one.
    """

    def __init__(
        self,
        *,
        executor: str,
        max_in_flight: int,
        throughput: int,
        source: BatchSource[T],
        key: Callable[[T], Hashable],
        handler: Callable[[T], object],
        on_error: Callable[[T, Exception], object] | None,
        on_discard: Callable[[T], object] | None,
    ) -> None:
        self._executor = executor
        self._max_in_flight = max_in_flight
        self._lot = max(1, max_in_flight // 16)
        self._throughput = throughput
        self._source = source
        self._demand_source = source if isinstance(source, DemandSource) else None
        self._key = key
        self._handler = handler
        self._handler_is_async = iscoroutinefunction(handler) or iscoroutinefunction(type(handler).__call__)
        self._handler_name: str = getattr(handler, "__qualname__", None) or repr(handler)
        self._on_error = on_error
        self._on_discard = on_discard
        self._context = copy_context()
        self._mailboxes: dict[Hashable, Mailbox[T]] = {}
        self._demand = max_in_flight  # asked of the source, not yet answered
        self._returned = 0  # finished, not yet asked for again
        self._unfinished = 0
        self._progress = trio.Event()
        self._scope = trio.CancelScope()
        self._halted = False
        self._forced = False
        self._lost = False  # an item was discarded or interrupted
        self._complete = False  # the source has ended and every item was handled or reported
        self._errors: list[BaseException] = []

    async def run(self) -> None:
        """Run until the source has ended and every item has finished; see `KeyedExecutor.dispatch`."""
        cancelled: BaseException | None = None
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    await self._receive()
        except BaseException as error:
            # Mailboxes and receiver record their failures, so this is the caller's cancellation (or a defect here).
            cancelled, defect = split_cancelled(error)
            self._halt()
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
                f"{self._handler_name}, or the source, raised trio.Cancelled although nothing had been cancelled"
            )

    def force_stop(self) -> None:
        """Cancel the dispatch; `run` then raises `ExecutorClosedError`, unless everything was finished already."""
        self._forced = True
        self._halt()

    async def _receive(self) -> None:
        try:
            if self._demand_source is not None:
                self._demand_source.add_demand(self._max_in_flight)
            ended = False
            while not self._halted:
                while self._demand < 1:
                    await self._wait_progress()
                limit = self._demand
                try:
                    batch = await self._source.receive_batch(limit)
                except trio.EndOfChannel:
                    ended = True
                    break
                self._accept(batch, limit)
            while self._unfinished:
                await self._wait_progress()
            self._complete = ended and not self._lost
        except BaseException as error:
            cancelled, failure = split_cancelled(error)
            if failure is not None:
                self._fail(failure)
            self._halt()
            if cancelled is not None:
                raise cancelled from None

    async def _wait_progress(self) -> None:
        self._progress = trio.Event()
        await self._progress.wait()

    def _accept(self, batch: Sequence[T], limit: int) -> None:
        count = len(batch)
        self._unfinished += count
        if self._demand_source is None:
            self._demand -= count
        if count < 1 or (self._demand_source is None and count > limit):
            self._fail(
                ValueError(
                    f"{type(self._source).__name__}.receive_batch({limit}) returned {count} items; "
                    f"return 1 to {limit}, or raise trio.EndOfChannel"
                )
            )
        for item in batch:
            mailbox = None if self._halted else self._mailbox_of(item)
            if mailbox is None or self._halted:  # `key` may have stopped the executor
                self._discard(item)
            else:
                mailbox.queue.append(item)

    def _mailbox_of(self, item: T) -> Mailbox[T] | None:
        """Return the mailbox of an item's key, a fresh one if there is none; `None` if that failed the dispatch."""
        try:
            key = self._key(item)
            mailbox = self._mailboxes.get(key)
            if mailbox is None:
                self._mailboxes[key] = mailbox = Mailbox(key)
                self._context.run(partial(self._nursery.start_soon, self._run_mailbox, mailbox, name=mailbox.name))
        except BaseException as error:
            self._fail(error)
            return None
        return mailbox

    async def _run_mailbox(self, mailbox: Mailbox[T]) -> None:
        queue = mailbox.queue
        turn = 0
        while queue:
            waited = await self._handle(mailbox.key, queue.popleft())
            turn = 0 if waited else turn + 1
            if turn == self._throughput and queue:
                turn = 0
                try:
                    await trio.lowlevel.checkpoint()
                except trio.Cancelled:
                    self._halt()
                    raise
        del self._mailboxes[mailbox.key]

    async def _handle(self, key: Hashable, item: T) -> bool:
        """Run the handler for one item, and settle how it ended. Returns whether it waited."""
        error: BaseException | None = None
        waited = False
        try:
            try:
                with no_leaked_scope(self._handler_name, key):
                    waited = await self._call(item)
            except BaseException as raised:
                error = raised
            self._finish(item, error)
        finally:
            del error  # it refers to this frame
        return waited

    async def _call(self, item: T) -> bool:
        context = self._context.copy()
        if self._handler_is_async:
            run = Isolated(self._handler(item), context)  # type: ignore[arg-type]
            await run
            return run.waited
        result = context.run(self._handler, item)
        if isawaitable(result):
            refuse_awaitable(
                result,
                f"handler {self._handler_name} is a plain function but returned an awaitable; declare it `async def`",
            )
        return False

    def _finish(self, item: T, error: BaseException | None) -> None:
        self._unfinished -= 1
        if error is not None:
            cancelled, failure = split_cancelled(error)
            if failure is not None:
                self._report(item, failure)
            if cancelled is not None:
                self._lost = True
                self._halt()
                raise cancelled
        if self._halted:
            return
        self._returned += 1
        if self._returned >= self._lot:
            count, self._returned = self._returned, 0
            if self._demand_source is None:
                self._demand += count
            else:
                try:
                    self._demand_source.add_demand(count)
                except BaseException as broken:
                    self._fail(broken)
            self._progress.set()
        elif not self._unfinished:
            self._progress.set()

    def _report(self, item: T, failure: BaseException) -> None:
        if self._on_error is None or not isinstance(failure, Exception):
            self._fail(failure)
            return
        try:
            self._on_error(item, failure)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._errors.append(error)
        self._halt()

    def _halt(self) -> None:
        """Cancel every task of the dispatch and discard what has not been started. Synchronous and idempotent."""
        if self._halted:
            return
        self._halted = True
        self._scope.cancel()
        for mailbox in self._mailboxes.values():
            while mailbox.queue:
                self._discard(mailbox.queue.popleft())

    def _discard(self, item: T) -> None:
        self._unfinished -= 1
        self._lost = True
        if self._on_discard is not None:
            try:
                self._on_discard(item)
            except BaseException as error:
                self._fail(error)
