"""What an executor says of itself when asked."""

from collections.abc import Hashable
from heapq import nlargest

from attrs import frozen

from trio_wow.execution._dispatch import Dispatch
from trio_wow.execution._pool import ExecPoolStatistics
from trio_wow.execution._profile import FunctionStatistics
from trio_wow.execution._worker import Worker

__all__ = [
    "Backlog",
    "DispatchStatistics",
    "KeyedExecutorStatistics",
    "WorkerStatistics",
    "statistics_of_dispatch",
    "statistics_of_worker",
]

# How many keys a dispatch names.
BACKLOGS = 10


@frozen
class WorkerStatistics:
    """One worker.

    Attributes:
        index: its place among the workers, from 0.
        state: `idle`; `running`, a task is scheduled to start handlers on it; `held`, the thread of a `@direct` handler
            computes on it; `abandoned`, a forced stop has left that thread to itself, and nobody else computes here
            until it ends.
        mailboxes_queued: mailboxes that wait here for their turn, over all dispatches. Not those whose handler runs or
            waits.
    """

    index: int
    state: str
    mailboxes_queued: int


@frozen
class Backlog:
    """One key.

    Attributes:
        key: the key itself, not a copy.
        unfinished: its items that are queued or run.
    """

    key: Hashable
    unfinished: int


@frozen
class DispatchStatistics:
    """One dispatch that runs.

    Attributes:
        handler: the handler's qualified name.
        in_flight: unfinished items, running or queued.
        running: items that have been started, also while they wait; at most one of each key.
        max_in_flight: how many the window allows.
        demand_outstanding: items that the source was asked for and has not given.
        overdraft: items beyond the window, from a `DemandSource`; else 0.
        stalled: whether a single key holds so much of the window that no lot can be returned until it moves on.
        mailboxes: how many keys have items.
        backlogs: the keys with the most unfinished items, at most ten, longest first.
    """

    handler: str
    in_flight: int
    running: int
    max_in_flight: int
    demand_outstanding: int
    overdraft: int
    stalled: bool
    mailboxes: int
    backlogs: tuple[Backlog, ...]


@frozen
class KeyedExecutorStatistics:
    """One moment of an executor. All numbers are of that moment: it is taken in one step of the event loop.

    Attributes:
        workers: by index.
        dispatches: those that run, in no order.
        functions: the plain functions that it has run or runs, as long as somebody has them, by name.
        pool: the `ExecPool`, which other executors may share; `None` without one.
        threads_abandoned: how many threads forced stops have left to themselves, in all.
        late_results: how many of those have ended since. Their results were dropped.
        closed: whether it refuses new dispatches.
    """

    workers: tuple[WorkerStatistics, ...]
    dispatches: tuple[DispatchStatistics, ...]
    functions: tuple[FunctionStatistics, ...]
    pool: ExecPoolStatistics | None
    threads_abandoned: int
    late_results: int
    closed: bool


def statistics_of_worker(worker: Worker) -> WorkerStatistics:
    """Look at a worker."""
    return WorkerStatistics(worker.index, worker.state, worker.queued)


def statistics_of_dispatch(dispatch: Dispatch[object]) -> DispatchStatistics:
    """Look at a dispatch, in time proportional to its active keys."""
    active = dispatch.active
    unfinished = ((box.key, len(box) + (box.running or box is active)) for box in dispatch.mailboxes.values())
    mailboxes = [Backlog(key, count) for key, count in unfinished if count]  # one that leaves now has none
    backlogs = nlargest(BACKLOGS, mailboxes, key=lambda backlog: backlog.unfinished)
    in_flight = dispatch.accepted - dispatch.finished
    return DispatchStatistics(
        handler=dispatch.handler_name,
        in_flight=in_flight,
        running=sum(box.running or box is active for box in dispatch.mailboxes.values()),
        max_in_flight=dispatch.max_in_flight,
        demand_outstanding=max(0, dispatch.demand),
        overdraft=max(0, -dispatch.demand),
        stalled=bool(backlogs) and backlogs[0].unfinished > dispatch.max_in_flight - dispatch.lot,
        mailboxes=len(mailboxes),
        backlogs=tuple(backlogs),
    )
