"""The aggregate scheduler: a fixed number of serial groups, the strategy that one mailbox per key has replaced."""

from collections import deque
from collections.abc import AsyncIterable, Callable, Hashable
from contextvars import copy_context
from functools import partial
from inspect import isawaitable
from math import inf
from statistics import median
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import trio
from attrs import frozen

from trio_wow.errors import ExecutorClosedError, SchedulerClosedError, printable
from trio_wow.execution._blocking import running_function
from trio_wow.execution._executor import KeyedExecutor
from trio_wow.execution._plain import is_async, name_of
from trio_wow.execution._source import BatchSource, ChannelSource

__all__ = [
    "AggregateScheduler",
    "AggregateSchedulerStatistics",
    "AggregateSchedulerSupplier",
    "BorrowedAggregateSchedulerSupplier",
    "group_key",
]

T = TypeVar("T")

LATENCIES = 128
"""How many of the last latencies a scheduler knows."""


def _check_parallelism(parallelism: object) -> None:
    if type(parallelism) is not int or parallelism < 1:
        raise ValueError(f"parallelism must be a positive int, not {parallelism!r}")


def group_key(aggregate_id: str, parallelism: int) -> int:
    """Return the group of an aggregate ID: the same in every process, on every machine, for the same `parallelism`.

    Different IDs may have one group.

    Args:
        aggregate_id: the ID as text.
        parallelism: how many groups there are; a positive int.

    Returns:
        A number from 0 to `parallelism - 1`.

    Raises:
        ValueError: `parallelism` is out of its range, or the text cannot be encoded.
    """
    _check_parallelism(parallelism)
    return crc32(aggregate_id.encode()) % parallelism


@frozen
class AggregateSchedulerStatistics:
    """One moment of a scheduler.

    Attributes:
        name: the scheduler's.
        parallelism: how many of its groups may compute at once.
        queued: what has not been started.
        running: what has, and has not ended, also while it waits.
        latency: seconds from start to end, the median of the last 128 `async def` handlers and pieces of scheduled
            work; `None` before the first has ended. Plain handlers of a dispatch are not measured.
    """

    name: str
    parallelism: int
    queued: int
    running: int
    latency: float | None


class _Group(NamedTuple):
    """The key of a group: tasks bear its text."""

    scheduler: str
    group: Hashable

    def __str__(self) -> str:
        return f"{self.scheduler}/{printable(self.group)}"


class _Scheduled(NamedTuple):
    group: _Group
    work: Callable[[], object]


class _Schedule(ChannelSource[_Scheduled]):
    """A `DemandSource` that does not wait for demand: a group with a long queue must not keep the others waiting."""

    def add_demand(self, count: int, /) -> None:
        """See `DemandSource.add_demand`."""


class AggregateScheduler:
    """Runs the work of one named aggregate: that of one group in order, one at a time, and groups beside each other.

    At most `parallelism` groups compute at once. Work that waits lets another group compute, and keeps its own group's
    place: the next work of the group starts when it has returned. Made by an `AggregateSchedulerSupplier`. Source
    document: seed 003.

    Args:
        name: what errors, tasks and statistics call it.
        parallelism: how many groups compute at once; a positive int, or `None` for as many as `like` has workers.
        nursery: where scheduled work runs. What work raises, it raises.
        like: the executor whose settings it takes; by default one with all defaults.

    Attributes:
        name: as given.

    Raises:
        ValueError: `parallelism` is out of its range.
    """

    def __init__(
        self,
        name: str,
        parallelism: int | None = None,
        *,
        nursery: trio.Nursery,
        like: KeyedExecutor | None = None,
    ) -> None:
        if parallelism is not None:
            _check_parallelism(parallelism)
        self.name = name
        self._executor = (like if like is not None else KeyedExecutor()).sibling(name, parallelism)
        self._nursery = nursery
        self._context = copy_context()
        self._send, self._receive = trio.open_memory_channel[_Scheduled](inf)
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._closed = False
        self._forced = False
        self._ended: trio.Event | None = None

    def __repr__(self) -> str:
        return f"<AggregateScheduler {self.name!r}{': closed' if self._closed else ''}>"

    def schedule(self, group: Hashable, work: Callable[[], object]) -> None:
        """Queue work behind all that was scheduled for its group before. Synchronous; there is no bound.

        Args:
            group: by equality; any number of them.
            work: an `async def` function without arguments, or a plain one, which runs where its profile says; see
                `KeyedExecutor.call`. A function made anew each time is never known: use a `functools.partial` of one.
                Its context variables are a copy of those in which the scheduler was made. What it raises ends the
                scheduler: what runs is cancelled, what has not been started is dropped, and the nursery raises it.

        Raises:
            SchedulerClosedError: the scheduler has been stopped, or has ended by an error.

        Ordering: per group, as scheduled; none between groups, nor to what `dispatch` runs.
        """
        if self._closed:
            raise SchedulerClosedError(self.name, "it takes no further work")
        if self._ended is None:
            ended = trio.Event()
            self._context.run(partial(self._nursery.start_soon, self._run, ended, name=f"scheduler {self.name}"))
            self._ended = ended  # not before: a nursery that has closed refuses
        self._send.send_nowait(_Scheduled(_Group(self.name, group), work))

    async def dispatch(
        self,
        source: trio.MemoryReceiveChannel[T] | AsyncIterable[T] | BatchSource[T],
        *,
        key: Callable[[T], Hashable],
        handler: Callable[[T], object],
        on_error: Callable[[T, Exception], object] | None = None,
        on_discard: Callable[[T], object] | None = None,
    ) -> None:
        """Handle all items of `source` with a bounded window; see `KeyedExecutor.dispatch`. `key` gives the group.

        Its groups are its own: they have nothing to do with those of another dispatch, or of scheduled work. All of
        them share the `parallelism`.

        Raises:
            SchedulerClosedError: the scheduler has been stopped. Nothing was taken from the source.
            ExecutorClosedError: a forced stop ended the dispatch.
            BaseException: see `KeyedExecutor.dispatch`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise SchedulerClosedError(self.name, "it refuses new dispatches")
        if is_async(handler):
            handler = self._measured(handler)
        await self._executor.dispatch(source, key=key, handler=handler, on_error=on_error, on_discard=on_discard)

    def statistics(self) -> AggregateSchedulerStatistics:
        """Return what it does at this moment. Costs time for each active group."""
        executor = self._executor.statistics()
        running = sum(dispatch.running for dispatch in executor.dispatches)
        in_flight = sum(dispatch.in_flight for dispatch in executor.dispatches)
        return AggregateSchedulerStatistics(
            name=self.name,
            parallelism=len(executor.workers),
            queued=in_flight - running + self._receive.statistics().current_buffer_used,
            running=running,
            latency=median(self._latencies) if self._latencies else None,
        )

    def close(self) -> None:
        """Take no further work and refuse new dispatches; what was taken goes on. Synchronous and idempotent."""
        self._closed = True
        self._send.close()

    async def stop_gracefully(self) -> None:
        """Close, and wait until all work has ended, and every dispatch. Any number of tasks may wait.

        Not for work of this scheduler, which would wait for itself.

        Cancellation: the scheduler stays closed; what runs goes on.
        """
        self.close()
        if self._ended is not None:
            await self._ended.wait()
        await self._executor.aclose()

    def force_stop(self) -> None:
        """Close, drop work that has not been started, and cancel what runs. Synchronous and idempotent.

        Dispatches raise `ExecutorClosedError`. Threads are left to themselves; see `KeyedExecutor.force_stop`.
        """
        self.close()
        self._forced = True
        self._executor.force_stop()

    async def _run(self, ended: trio.Event) -> None:
        try:
            await self._executor.dispatch(
                _Schedule(self._receive), key=lambda scheduled: scheduled.group, handler=self._measured(self._work)
            )
        except ExecutorClosedError as error:
            if not (self._forced and error.executor == self.name):
                raise
        finally:
            self.close()
            ended.set()

    async def _work(self, scheduled: _Scheduled) -> None:
        work = scheduled.work
        running_function.set(name_of(work))
        result = await self._executor.call(self._executor.profile_of(work), work)
        if isawaitable(result):
            await result

    def _measured(self, handler: Callable[[T], Any]) -> Callable[[T], object]:
        perf_counter, latencies = self._executor.perf_counter, self._latencies

        async def measured(item: T) -> None:
            started = perf_counter()
            try:
                await handler(item)
            finally:
                latencies.append(perf_counter() - started)

        measured.__qualname__ = name_of(handler)
        return measured


class AggregateSchedulerSupplier:
    """Makes one scheduler for each named aggregate, named `<supplier name>-<aggregate name>`, and owns them all.

    Args:
        name: the first part of its schedulers' names.
        parallelism: how many groups of each named aggregate compute at once; a positive int, or `None` for as many as
            `like` has workers.
        nursery: where its schedulers' work runs.
        like: the executor whose settings they take; by default one with all defaults.

    Attributes:
        name: as given.

    Raises:
        ValueError: `parallelism` is out of its range.
    """

    def __init__(
        self,
        name: str,
        parallelism: int | None = None,
        *,
        nursery: trio.Nursery,
        like: KeyedExecutor | None = None,
    ) -> None:
        if parallelism is not None:
            _check_parallelism(parallelism)
        self.name = name
        self._parallelism = parallelism
        self._nursery = nursery
        self._like = like
        self._schedulers: dict[Hashable, AggregateScheduler] = {}
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether it has been stopped."""
        return self._closed

    def get_or_initialize(self, named_aggregate: Hashable) -> AggregateScheduler:
        """Return the scheduler of a named aggregate: made at the first call, and the same from then on.

        Raises:
            SchedulerClosedError: the supplier has been stopped.
        """
        if self._closed:
            raise SchedulerClosedError(self.name, f"it supplies no scheduler for {printable(named_aggregate)}")
        scheduler = self._schedulers.get(named_aggregate)
        if scheduler is None:
            name = f"{self.name}-{printable(named_aggregate)}"
            scheduler = AggregateScheduler(name, self._parallelism, nursery=self._nursery, like=self._like)
            self._schedulers[named_aggregate] = scheduler
        return scheduler

    def statistics(self) -> tuple[AggregateSchedulerStatistics, ...]:
        """Return what each of its schedulers does at this moment, in the order in which they were made."""
        return tuple(scheduler.statistics() for scheduler in self._schedulers.values())

    async def stop_gracefully(self) -> None:
        """Supply nothing more, and wait until all schedulers have ended; see `AggregateScheduler.stop_gracefully`.

        All callers wait for the same end, also for one that `force_stop` has hastened.
        """
        self._closed = True
        for scheduler in self._schedulers.values():
            scheduler.close()
        for scheduler in self._schedulers.values():
            await scheduler.stop_gracefully()
        await trio.lowlevel.checkpoint()

    def force_stop(self) -> None:
        """Supply nothing more, and force all schedulers to stop; see `AggregateScheduler.force_stop`.

        Also while a graceful stop is in progress. Synchronous and idempotent.
        """
        self._closed = True
        for scheduler in self._schedulers.values():
            scheduler.force_stop()


class BorrowedAggregateSchedulerSupplier:
    """A supplier as its owner lends it: to stop it does nothing, so that only the owner does.

    Args:
        lender: the supplier, or one that is itself borrowed.
    """

    def __init__(self, lender: "AggregateSchedulerSupplier | BorrowedAggregateSchedulerSupplier") -> None:
        self._lender = lender

    def get_or_initialize(self, named_aggregate: Hashable) -> AggregateScheduler:
        """See `AggregateSchedulerSupplier.get_or_initialize`."""
        return self._lender.get_or_initialize(named_aggregate)

    async def stop_gracefully(self) -> None:
        """Do nothing."""
        await trio.lowlevel.checkpoint()

    def force_stop(self) -> None:
        """Do nothing."""
