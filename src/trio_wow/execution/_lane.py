"""Run to the first wait: how handlers are started, and when a mailbox gets a task of its own."""

from collections import deque
from collections.abc import Callable, Generator
from contextvars import ContextVar
from functools import partial
from inspect import isawaitable
from types import coroutine
from typing import TYPE_CHECKING, Any

import trio
from trio.lowlevel import current_task, disable_ki_protection, enable_ki_protection

from trio_wow.execution._mailbox import Mailbox
from trio_wow.execution._plain import refuse_awaitable
from trio_wow.execution._profile import DIRECT, INLINE
from trio_wow.execution._worker import Worker, WorkerHold, Workers

if TYPE_CHECKING:
    from trio_wow.execution._dispatch import Dispatch
    from trio_wow.execution._threads import ThreadCall

__all__ = ["Lane", "RunAsync", "RunPlain", "current_lane", "run_async", "run_plain"]

RunPlain = Callable[[Callable[[Any], object], Any, Mailbox[Any]], object]
RunAsync = Callable[[Any, Mailbox[Any]], Generator[Any, Any, None]]

# How long the runners of an executor hold the event loop together before they let other tasks run.
HOLD_ITEMS = 256
HOLD_SECONDS = 0.001
# And how long all of an executor's tasks may in one pass of the event loop, when there are so many, or so many resume,
# that an item each takes longer.
PASS_SECONDS = 0.004


@disable_ki_protection
def run_plain(function: Callable[[Any], object], item: object, _mailbox: Mailbox[Any]) -> object:
    """Call a plain handler from the protected bookkeeping: in it a `KeyboardInterrupt` may strike again."""
    return function(item)


@disable_ki_protection
@coroutine
def run_async(work: Any, _mailbox: Mailbox[Any]) -> Generator[Any, Any, None]:
    """Await a handler's coroutine; see `run_plain`.

    A generator, because Python looks for signals when functions are called and have returned, and not when control
    passes through a `yield from`. So an interrupt strikes before the handler starts or in the handler's own code. It
    never takes away what a handler asks of the event loop, or is given by it, such as a lock.
    """
    yield from work


# In whose mailbox a handler is. In the context of the lane's runners, so that it costs an item nothing.
current_lane: "ContextVar[Lane | None]" = ContextVar("trio_wow.execution.lane", default=None)


@coroutine
def _rest(
    handling: Generator[Any, Any, None], trap: object, worker: Worker | None, task: trio.lowlevel.Task, outside: Any
) -> Generator[Any, Any, None]:
    """Await the rest of a handler.

    Args:
        handling: its steps; it has stopped at its first wait.
        trap: what it asked of the event loop there.
        worker: whom to take again before each further step, if any, unless the handler itself has put it in the hands
            of a thread.
        task: the handler's.
        outside: the cancel status of the task outside the handler's own scopes.
    """
    while True:
        step: Callable[[Any], object] = handling.send
        value: Any
        try:
            value = yield trap
        except BaseException as error:  # such as Trio's complaint about an awaitable that is not its own
            step, value = handling.throw, error
        else:
            # Not `taken`: beside mailboxes that have just been let go, this one is another.
            if worker is not None and worker.holder is not None and worker.holder.task is not task:
                yield from worker.wait_free(outside)
        try:
            trap = step(value)
        except StopIteration:
            return


class Lane:
    """One dispatch's FIFO of mailboxes on one worker, and the tasks that serve it.

    A *runner* takes a mailbox and starts its handlers itself, in its own task: a handler that returns without waiting
    costs no task. At a handler's first wait the runner's task becomes the mailbox's: it leaves the worker to fresh
    runners, takes the mailbox's name and stays with it. Nothing here is shared between threads.

    Attributes:
        worker: the worker whose lane it is.
        context: of its runners: the dispatch's, and in it the lane.
        queue: mailboxes that wait for their turn.
        waiting: whether it is lined up at its worker.
    """

    __slots__ = ("_dispatch", "_ramp", "_runner_name", "_runners", "_workers", "context", "queue", "waiting", "worker")

    def __init__(self, dispatch: "Dispatch[Any]", worker: Worker, workers: Workers) -> None:
        self._dispatch = dispatch
        self.context = dispatch.context.copy()
        self.context.run(current_lane.set, self)
        self._runner_name = f"runner of {worker.name}"
        self._workers = workers
        self._runners = 0
        self._ramp = 1
        self.worker = worker
        self.queue: deque[Mailbox[Any]] = deque()
        self.waiting = False

    @property
    def outside(self) -> Any:
        """The cancel status outside all handlers of the dispatch. Private to Trio; see `_run`."""
        return self._dispatch.nursery._cancel_status

    @property
    def calls(self) -> "set[ThreadCall]":
        """The calls in threads of the dispatch."""
        return self._dispatch.calls

    @property
    def workers(self) -> Workers:
        """All workers of the executor whose lane it is."""
        return self._workers

    def name_of(self, task: trio.lowlevel.Task) -> str:
        """Return the name of a handler's task: its mailbox's, also before its first wait."""
        active = self._dispatch.active
        return task.name if active is None or task.name != self._runner_name else active.name

    def put(self, mailbox: Mailbox[Any], *, first: bool = False) -> None:
        """Queue a mailbox, behind the others unless it is to be `first`, and see that somebody takes it."""
        worker = self.worker
        if not worker.queued:
            self._workers.unqueued -= 1
        worker.queued += 1
        if first:
            self.queue.appendleft(mailbox)
        else:
            self.queue.append(mailbox)
        if not self._runners:
            self._wake()

    def clear(self) -> None:
        """Forget the mailboxes that are queued, which are empty."""
        if self.queue:
            self.worker.queued -= len(self.queue)
            if not self.worker.queued:
                self._workers.unqueued += 1
            forgotten = [*self.queue]
            self.queue.clear()
            for mailbox in forgotten:
                self._dispatch.forget(mailbox)

    def start_runners(self, count: int) -> None:
        """Start runners, in a copy of the context in which `dispatch` was called."""
        dispatch = self._dispatch
        run = self._run_direct if dispatch.leaves_loop and dispatch.profile.exec_class is DIRECT else self._run
        start_soon = partial(dispatch.nursery.start_soon, run, name=self._runner_name)
        for _ in range(count):
            self._runners += 1
            self.worker.runners += 1
            self._workers.runners += 1
            self.context.run(start_soon)

    def _wake(self) -> None:
        worker = self.worker
        if worker.taken or worker.starting is not None or worker.lanes:
            worker.line_up(self)
        else:
            worker.starting = self
            self.start_runners(1)

    def _take(self) -> Mailbox[Any]:
        mailbox = self.queue.popleft()
        worker = self.worker
        worker.queued -= 1
        if not worker.queued:
            self._workers.unqueued += 1
        return mailbox

    def _end_runner(self) -> None:
        """Count a runner out: its task ends, or has become a mailbox's."""
        self._runners -= 1
        self.worker.runners -= 1
        self._workers.runners -= 1

    def _leave(self, mailbox: Mailbox[Any] | None, *, owner: bool) -> None:
        """See that the worker goes on when a task ends: with the mailbox that it has not finished, if any, first."""
        if not owner:
            self._end_runner()
        if mailbox is not None:
            self.put(mailbox, first=True)
        elif self.queue and not self._runners:
            self._wake()
        if self.worker.lanes and not self.worker.taken:
            self.worker.start_lane()

    def _follow(self) -> None:
        """Start fresh runners at a first wait: one, and twice as many at each further one in a row."""
        count = min(self._ramp, len(self.queue) - self._runners)
        self._ramp = min(2 * self._ramp, HOLD_ITEMS)
        self.start_runners(count)

    def _hold(self) -> tuple[int, float]:
        """Return how many items, and until when, a task may go on before other tasks get the event loop."""
        workers, now = self._workers, self._dispatch.perf_counter()
        runners = workers.runners or 1
        return HOLD_ITEMS // runners or 1, min(now + HOLD_SECONDS / runners, workers.pass_began(now) + PASS_SECONDS)

    def _has_held(self) -> bool:
        now = self._dispatch.perf_counter()
        return now - self._workers.pass_began(now) >= PASS_SECONDS

    async def _pause(self) -> None:
        """Let other tasks run until the executor has not yet held the event loop for long in a pass."""
        try:
            await trio.lowlevel.checkpoint()
            while self._has_held():
                await trio.lowlevel.checkpoint()
        except trio.Cancelled:
            self._dispatch.halt()
            raise

    @enable_ki_protection
    async def _run(self) -> None:
        dispatch, worker, queue = self._dispatch, self.worker, self.queue
        if worker.starting is self:
            worker.starting = None
        handler, is_async, leaves_loop = dispatch.handler, dispatch.handler_is_async, dispatch.leaves_loop
        profile, in_thread = dispatch.profile, False
        run_plain, run_async = dispatch.run_plain, dispatch.run_async
        mailboxes, base, throughput = dispatch.mailboxes, self.context, dispatch.throughput
        perf_counter = dispatch.perf_counter
        taken_again = worker if is_async else None  # a plain handler that comes back from its thread is at its end
        task = current_task()
        # Private to Trio, and the only way to see a scope that was left open without opening one for every item.
        status = task._cancel_status
        owner = False  # whether this task has become a mailbox's own
        mailbox: Mailbox[Any] | None = None
        turn = passed = 0
        now = 0.0  # when the handler of the item before has ended, if that is known
        raised: BaseException | None = None
        try:
            if self._has_held():
                await self._pause()
            limit, deadline = self._hold()
            while True:
                if mailbox is None:
                    if not queue or worker.taken:
                        return
                    if worker.lanes:
                        worker.start_lane()
                    mailbox = dispatch.active = self._take()
                    turn = 0

                if leaves_loop:
                    in_thread = profile.exec_class is not INLINE
                    if in_thread and profile.exec_class is DIRECT:
                        return  # and leaves the mailbox to a runner of that kind
                item = mailbox.popleft()
                task.context = context = base.copy()
                raised = None
                if is_async or in_thread:
                    waits, now = False, 0.0
                    work: Any = None
                    handling: Any = None
                    trap: object = None
                    try:
                        work = handler(item) if is_async else dispatch.call_in_thread(self, mailbox, item)
                        handling = run_async(work, mailbox)
                        trap = context.run(handling.send, None)
                        waits = True
                    except StopIteration:
                        self._ramp = 1
                    except BaseException as error:
                        raised = error
                        if work is not None:
                            work.close()  # if an interrupt has struck before it started
                    if waits:
                        if not owner:
                            owner = True
                            self._end_runner()
                            task.name = mailbox.name
                            if not worker.taken:
                                self._follow()
                            elif queue and not self._runners:  # the handler has put the worker in a thread's hands
                                self._wake()
                        mailbox.running = True
                        try:
                            await _rest(handling, trap, taken_again, task, status)
                        except BaseException as error:
                            raised = error
                        mailbox.running = False
                        dispatch.active = mailbox
                        turn = passed = 0
                        if mailbox:
                            limit, deadline = self._hold()
                        if worker.holder is not None:  # the handler went on without it: cancelled, or in a thread
                            limit = 0
                else:
                    began = now or perf_counter()
                    try:
                        result = context.run(run_plain, handler, item, mailbox)
                        if result is not None and isawaitable(result):
                            refuse_awaitable(result, dispatch.awaitable_returned)
                    except BaseException as error:
                        raised = error
                    now = perf_counter()
                    if leaves_loop:
                        profile.record(now - began)

                if raised is None and task._cancel_status is status:
                    dispatch.finished += 1
                    if dispatch.finished >= dispatch.mark:
                        dispatch.return_demand()
                else:
                    leaked = task._cancel_status is not status
                    dispatch.settle(mailbox, item, raised, status if leaked else None)
                    if leaked:
                        return  # and the scope goes with the task
                    dispatch.active = mailbox

                turn += 1
                passed += 1
                alone = False
                if not mailbox:
                    del mailboxes[mailbox.key]
                    mailbox = None
                    if owner:
                        return
                elif turn >= throughput:
                    turn = 0
                    if queue:
                        self.put(mailbox)
                        mailbox = None
                        if owner:
                            return
                    else:
                        alone = True
                if (mailbox is not None or queue) and (alone or passed >= limit or (now or perf_counter()) >= deadline):
                    dispatch.active, now = None, 0.0
                    await self._pause()
                    limit, deadline = self._hold()
                    passed = 0
                    if mailbox is not None:
                        if worker.taken or not mailbox:
                            return
                        dispatch.active = mailbox
        finally:
            raised = None  # it refers to this frame
            dispatch.active = None
            if mailbox is not None and not mailbox:
                self._leave(None, owner=owner)
                del mailboxes[mailbox.key]
            else:
                self._leave(mailbox, owner=owner)

    @enable_ki_protection
    async def _run_direct(self) -> None:
        """Give one mailbox a turn of its handlers in threads, in which it holds the worker."""
        dispatch, worker = self._dispatch, self.worker
        if worker.starting is self:
            worker.starting = None
        if not self.queue or worker.taken:
            self._leave(None, owner=False)
            return
        mailbox = self._take()
        self._end_runner()
        task = current_task()
        hold = WorkerHold(worker, mailbox, task, task._cancel_status)
        worker.hold(hold)
        if self.queue:
            self._wake()
        abandoned = False
        raised: BaseException | None = None
        try:
            task.name = mailbox.name
            for _ in range(min(dispatch.throughput, len(mailbox))):
                if dispatch.profile.exec_class is not DIRECT:
                    break
                try:
                    await trio.lowlevel.checkpoint_if_cancelled()
                except trio.Cancelled:
                    dispatch.halt()
                    raise
                item = mailbox.popleft()
                raised = None
                mailbox.running = True
                call = dispatch.thread_call(mailbox, item, hold, self.context.copy())
                try:
                    await dispatch.finish(call, mailbox)
                except BaseException as error:
                    raised = error
                mailbox.running = False
                abandoned = call.abandoned
                dispatch.settle(mailbox, item, raised, None)
                if not mailbox:  # a failure has discarded the rest
                    break
        finally:
            raised = None  # it refers to this frame
            if mailbox:
                self.put(mailbox)
            if not abandoned:
                hold.end()
            if not mailbox:
                del dispatch.mailboxes[mailbox.key]  # last, as a key that has changed is not found
