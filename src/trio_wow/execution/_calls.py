"""One call of a plain function, wherever its profile says."""

import trio
from trio.lowlevel import enable_ki_protection

from trio_wow.execution._lane import Lane
from trio_wow.execution._pool import ExecPool
from trio_wow.execution._profile import POOL, ExecClass
from trio_wow.execution._threads import Hold
from trio_wow.execution._worker import WorkerHold

__all__ = ["enter"]


@enable_ki_protection
async def enter(pool: ExecPool, exec_class: ExecClass, lane: Lane | None) -> Hold | None:
    """Take what a function's thread is to hold: a token of the pool, or else, when that is full, the lane's worker.

    Returns:
        What is held; `None` for a function that runs directly where there is no lane.

    Cancellation: nothing is held. A call that returns at once is no checkpoint, but raises if it is cancelled.
    """
    place = pool.try_submit() if exec_class is POOL else None
    if place is not None:
        await place.wait()
        return place
    if lane is None:
        await trio.lowlevel.checkpoint_if_cancelled()
        return None
    task = trio.lowlevel.current_task()
    hold = WorkerHold(lane.worker, task, task, lane.outside)
    await hold.acquire()
    return hold
