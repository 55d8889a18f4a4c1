"""Workers: slots of capacity that model the cores, shared by all dispatches of an executor."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import trio

from trio_wow.execution._mailbox import Mailbox

__all__ = ["Worker", "WorkerHold", "Workers"]


class _Lane(Protocol):
    """What a worker knows of a lane: one dispatch's FIFO of mailboxes on this worker."""

    waiting: bool

    @property
    def queue(self) -> deque[Mailbox[object]]: ...

    def start_runners(self, count: int) -> None: ...


class _CancelStatus(Protocol):
    @property
    def effectively_cancelled(self) -> bool: ...


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class WorkerHold:
    """A worker in the hands of one thread, or of one mailbox's threads in a row.

    Args:
        worker: whom to hold; see `Worker.hold`.
        owner: who holds it: a mailbox, or a task.
        task: who waits for the threads, and may go on while they have the worker.
        outside: the cancel status outside the handler's own scopes.
    """

    __slots__ = ("_has_ended", "_outside", "_owner", "_worker", "task")

    def __init__(self, worker: "Worker", owner: _Named, task: trio.lowlevel.Task, outside: _CancelStatus) -> None:
        self._worker = worker
        self._owner = owner
        self._outside = outside
        self._has_ended = False
        self.task = task

    @property
    def name(self) -> str:
        """What holds it, for messages. Put together when asked for."""
        return self._owner.name

    async def acquire(self) -> None:
        """Take the worker, once nobody else's thread has it, and those whose turn it is have had that.

        Cancellation: the worker is not taken.
        """
        worker = self._worker
        if worker.lanes and not worker.taken:
            worker.start_lane()
        starting = worker.starting
        while worker.is_resuming or (starting is not None and worker.starting is starting):
            await trio.lowlevel.checkpoint()
        await self.take_back()
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            self.end()
            raise

    def end(self) -> None:
        """See `Hold`."""
        self._has_ended = True
        self._worker.release(self)

    def lend(self) -> None:
        """See `Hold`."""
        self._worker.release(self)

    def end_in_thread(self) -> None:
        """See `Hold`. Workers belong to the event loop."""

    def abandon(self) -> None:
        """See `Hold`."""
        if self._worker.holder is self:
            self._worker.abandon()

    async def take_back(self) -> None:
        """See `Hold`."""
        worker = self._worker
        while not self._has_ended and worker.holder is not self:
            if worker.holder is None:
                worker.hold(self)
                return
            if worker.abandoned or self._outside.effectively_cancelled:
                return
            await worker.wait_free(self._outside)


class Worker:
    """A slot of capacity. A mailbox computes while its worker is not held by another one's thread.

    Code on the event loop excludes itself, so only a thread *holds* a worker for longer than one step. What wants to
    compute meanwhile waits here: mailboxes that resume first, then lanes in turn. (A `trio.CapacityLimiter` cannot
    let some go before others.)

    Attributes:
        name: what task dumps call it.
        index: its place among the workers.
        queued: mailboxes in its lanes.
        runners: tasks scheduled on the loop to serve its lanes.
        holder: whose thread computes on it.
        taken: a thread holds it, or mailboxes that were let go first have not resumed yet.
        starting: the lane whose runner is scheduled and has not had its first step, in which it gives the turn on.
        abandoned: it is held by a thread that nobody waits for.
        lanes: lanes that wait for it.
    """

    __slots__ = (
        "_let_go",
        "_resuming",
        "abandoned",
        "holder",
        "index",
        "lanes",
        "name",
        "queued",
        "runners",
        "starting",
        "taken",
    )

    def __init__(self, name: str, index: int) -> None:
        self.name = f"worker {index} of {name}"
        self.index = index
        self.queued = 0
        self.runners = 0
        self.holder: WorkerHold | None = None
        self.taken = False
        self.starting: _Lane | None = None
        self.abandoned = False
        self.lanes: deque[_Lane] = deque()
        # With what is outside its handler, if one of the handler's own scopes has cancelled it.
        self._resuming: dict[trio.lowlevel.Task, _CancelStatus | None] = {}
        self._let_go: set[trio.lowlevel.Task] = set()

    def __repr__(self) -> str:
        holder = f" by {self.holder.name}" if self.holder is not None else ""
        return f"<{self.name}: {self.state}{holder}, {self.queued} mailboxes queued>"

    @property
    def state(self) -> str:
        """One of `idle`, `running`, `held` and `abandoned`."""
        if self.holder is not None:
            return "abandoned" if self.abandoned else "held"
        return "running" if self.runners or self._let_go else "idle"

    @property
    def is_resuming(self) -> bool:
        """Whether mailboxes that were let go have not resumed yet."""
        return bool(self._let_go)

    def hold(self, holder: WorkerHold) -> None:
        """Give the worker, which no thread must hold, to one."""
        self.holder = holder
        self.taken = True

    def release(self, holder: WorkerHold) -> None:
        """Take the worker back from a thread; nothing if it does not hold it."""
        if self.holder is not holder:
            return
        self.holder = None
        self.abandoned = False
        if self._resuming:
            self._let_go.update(self._resuming)
            for task in self._resuming:
                trio.lowlevel.reschedule(task)
            self._resuming.clear()
        else:
            self.taken = False
            self.start_lane()

    def abandon(self) -> None:
        """Leave the worker to the thread that holds it, which nobody waits for any more.

        Mailboxes that wait to resume go on without it: they have been cancelled too, and only a shield of their
        handlers keeps them from knowing.
        """
        self.abandoned = True
        for task in list(self._resuming):
            self._go_on(task)

    def halt(self) -> None:
        """Let go on without the worker who has been cancelled by a scope of its own and is by its dispatch now.

        Trio tells a task that waits of the first one only.
        """
        for task, outside in list(self._resuming.items()):
            if outside is not None and outside.effectively_cancelled:
                self._go_on(task)

    def _go_on(self, task: trio.lowlevel.Task) -> None:
        del self._resuming[task]
        trio.lowlevel.reschedule(task)

    def line_up(self, lane: _Lane) -> None:
        """Let a lane wait for the worker, behind those that wait already."""
        if not lane.waiting:
            lane.waiting = True
            self.lanes.append(lane)

    def start_lane(self) -> None:
        """Start the lane that has waited longest. Called when the worker is not taken.

        Its runner starts the next one, unless it gives the worker to a thread. One at a time: if two were scheduled,
        Trio could let the later one have the worker's thread, and the other one would lose its turn.
        """
        while self.lanes and self.starting is None:
            lane = self.lanes.popleft()
            lane.waiting = False
            if lane.queue:
                self.starting = lane
                lane.start_runners(1)
                return

    async def wait_free(self, outside: _CancelStatus) -> None:
        """Wait, with a mailbox's task, until the thread that holds the worker ends or is abandoned.

        Cancellation: of what is `outside` the handler, returns at once. The task's next checkpoint raises, so that
        what it was woken for is not lost. Of the handler's own scopes, which `trio.sleep` ends with too: it waits on.
        """
        if self.abandoned:
            return
        task = trio.lowlevel.current_task()
        self._resuming[task] = None

        def interrupt(_: object) -> trio.lowlevel.Abort:
            if outside.effectively_cancelled:
                self._go_on(task)
            else:
                self._resuming[task] = outside
            return trio.lowlevel.Abort.FAILED

        await trio.lowlevel.wait_task_rescheduled(interrupt)
        if task in self._let_go:
            self._let_go.remove(task)
            if not self._let_go and self.holder is None:
                self.taken = False
                self.start_lane()


class Workers(trio.abc.Instrument):
    """All workers of an executor, and how long they hold the event loop in each of its passes.

    Attributes:
        runners: tasks scheduled on the loop to serve lanes, over all workers.
        unqueued: how many workers have no mailbox queued.
        family: the same for an executor and its siblings.
    """

    __slots__ = ("_dispatches", "_next", "_pass_began", "all", "family", "runners", "unqueued")

    def __init__(self, name: str, count: int) -> None:
        self.all = tuple(Worker(name, index) for index in range(count))
        self.family = object()
        self.runners = 0
        self.unqueued = count
        self._pass_began: float | None = None
        self._dispatches = 0
        self._next = 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """See the passes of the event loop while a dispatch runs."""
        if not self._dispatches:
            trio.lowlevel.add_instrument(self)
        self._dispatches += 1
        try:
            yield
        finally:
            self._dispatches -= 1
            if not self._dispatches:
                trio.lowlevel.remove_instrument(self)

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - see `trio.abc.Instrument`
        """See `trio.abc.Instrument`: a pass has ended."""
        self._pass_began = None

    def pass_began(self, now: float) -> float:
        """Return when the first of an executor's tasks began to hold the event loop in its present pass.

        Args:
            now: from the clock that measures it; the answer for the first one that asks.
        """
        if self._pass_began is None:
            self._pass_began = now
        return self._pass_began

    def choose(self) -> Worker:
        """Choose a fresh mailbox's worker: see row K5 of the design's table."""
        workers, start = self.all, self._next
        chosen = workers[start]
        if self.unqueued:
            idle: Worker | None = None
            held: Worker | None = None
            for place in range(start - len(workers), start):
                worker = workers[place]
                if worker.queued:
                    continue
                if worker.taken:
                    held = held or worker
                elif worker.runners:
                    chosen = worker
                    break
                else:
                    idle = idle or worker
            else:
                chosen = idle or held or chosen
        self._next = (chosen.index + 1) % len(workers)
        return chosen
