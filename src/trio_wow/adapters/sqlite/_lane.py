"""Running short jobs in a thread, one after the other, without a thread hop for each."""

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Generic, TypeVar, cast

import trio

__all__ = ["Lane"]

T = TypeVar("T")

BATCH = 64
"""Jobs of one thread call. A hop costs about as much as a small write, so under load it is shared."""

PATIENCE = 0.1
"""Seconds after which a thread call begins no further job: what has not begun can still be cancelled."""


class _Job(Generic[T]):
    """One job, and what came of it."""

    __slots__ = ("done", "error", "function", "parked", "value")

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.parked: trio.lowlevel.Task | None = None
        self.done = False
        self.value: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.function()
        except BaseException as error:  # the caller's, whatever it is
            self.error = error
        self.done = True

    def wake(self) -> None:
        task, self.parked = self.parked, None
        if task is not None:
            trio.lowlevel.reschedule(task)


class Lane:
    """Runs jobs in the order in which they were given, never two at once, in Trio's worker threads.

    There is no task behind it: of the callers that wait, the first leads. It takes a batch of jobs into a thread, its
    own among them, hands the others their results, and leaves the rest to the next caller.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Job[Any]] = deque()
        self._is_led = False
        self._limiter = trio.CapacityLimiter(1)  # of its own: others' threads must not keep it waiting

    @trio.lowlevel.enable_ki_protection
    async def run(self, function: Callable[[], T]) -> T:
        """Run a job in a thread and return what it returns, or raise what it raises.

        Cancellation: a call that ends with `Cancelled` has not begun its job. One that has begun is waited for.
        Ordering: jobs run in the order of the calls.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        job = _Job(function)
        self._waiting.append(job)
        while not job.done:
            if self._is_led or self._waiting[0] is not job:
                await self._wait(job)
            else:
                await self._lead()
        if job.error is not None:
            try:
                raise job.error
            finally:
                del job  # the traceback would hold the frame that holds the error
        return cast(T, job.value)

    async def _wait(self, job: _Job[Any]) -> None:
        """Wait until the job is done, or this caller may be the one to lead."""

        def abort(_: object) -> trio.lowlevel.Abort:
            if job not in self._waiting:
                return trio.lowlevel.Abort.FAILED
            self._waiting.remove(job)
            job.parked = None
            return trio.lowlevel.Abort.SUCCEEDED

        job.parked = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _lead(self) -> None:
        """Run a batch of jobs, of which the caller's own is the first."""
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        left = batch[1:]  # what is left when this is cancelled, or interrupted, before a thread has begun
        self._is_led = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            with trio.CancelScope(shield=True):  # the others' jobs must not notice that this caller is cancelled
                await trio.to_thread.run_sync(_run_all, batch, limiter=self._limiter)
            left = [job for job in batch if not job.done]
        finally:
            self._is_led = False
            self._waiting.extendleft(reversed(left))
            for job in batch:
                job.wake()
            if self._waiting:
                self._waiting[0].wake()


def _run_all(batch: list[_Job[Any]]) -> None:
    patience = monotonic() + PATIENCE
    for job in batch:
        job.run()
        if monotonic() > patience:
            return
