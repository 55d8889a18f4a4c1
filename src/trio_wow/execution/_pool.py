"""The pool: how many slow functions may be in threads at once, and how many may wait for that."""

from collections import deque
from threading import Lock
from types import TracebackType

import trio
from attrs import frozen
from trio.lowlevel import enable_ki_protection

__all__ = ["ExecPool", "ExecPoolStatistics", "PoolPlace"]


@frozen
class ExecPoolStatistics:
    """One moment of an `ExecPool`.

    Attributes:
        max_concurrency: how many tokens there are.
        queue_size: how many places its queue has.
        borrowed: tokens whose functions run, those of abandoned threads too, until they end.
        lent: functions that run and have lent their token, because they wait for something in the library.
        queued: items that wait for a token.
        submitted: items that it has taken, in all.
        refused: items that it has not, in all.
        closed: whether it refuses all.
    """

    max_concurrency: int
    queue_size: int
    borrowed: int
    lent: int
    queued: int
    submitted: int
    refused: int
    closed: bool


class PoolPlace:
    """One item in an `ExecPool`: it has a token, or waits for one in the queue. Made by `ExecPool.try_submit`."""

    __slots__ = ("_has_token", "_is_lent", "_is_over", "_pool", "_task", "_trio_token")

    def __init__(self, pool: "ExecPool") -> None:
        self._pool = pool
        self._has_token = False
        self._is_lent = False
        self._is_over = False
        self._task: trio.lowlevel.Task | None = None  # that waits
        self._trio_token: trio.lowlevel.TrioToken | None = None

    @enable_ki_protection
    async def wait(self) -> None:
        """Wait for the token. Called once.

        Cancellation: the place is given up, and a token that it was just given goes to the next.
        """
        await self._wait()
        try:
            # Who is woken with a token does not hear of a cancellation of the same moment.
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            self.release()
            raise

    @enable_ki_protection
    def release(self) -> None:
        """Give up the token, which goes to the first that waits, or the place. From any thread; idempotent."""
        pool = self._pool
        with pool._lock:
            if self._is_over:
                return
            self._is_over = True
            if self._has_token:
                self._has_token = False
                pool._give_back()
            elif self._is_lent:
                self._is_lent = False
                pool._lent -= 1
                pool._tell_if_idle()
            else:
                pool._forget(self)
                self._wake()

    end = end_in_thread = release

    def abandon(self) -> None:
        """See `Hold`: the thread gives the token back when it ends."""

    @enable_ki_protection
    def lend(self) -> None:
        """Give the token away for a while; nothing without one."""
        pool = self._pool
        with pool._lock:
            if not self._has_token:  # to take it back was cancelled before
                return
            self._has_token = False
            self._is_lent = True
            pool._lent += 1
            pool._give_back()

    @enable_ki_protection
    async def take_back(self) -> None:
        """Have the token again, before all that queue; nothing if it is not lent, or its function has ended.

        Cancellation: goes on without it.
        """
        pool = self._pool
        with pool._lock:
            if not self._is_lent:
                return
            self._is_lent = False
            pool._lent -= 1
            if pool._borrowed < pool._max_concurrency:
                pool._borrowed += 1
                self._has_token = True
            else:
                pool._queue.appendleft(self)
        await self._wait()

    async def _wait(self) -> None:
        pool = self._pool
        with pool._lock:
            if self._has_token:
                return
            self._task = trio.lowlevel.current_task()
            self._trio_token = trio.lowlevel.current_trio_token()

        def give_up(_: object) -> trio.lowlevel.Abort:
            with pool._lock:
                if self._task is None:  # from another thread: the call that wakes is on its way
                    return trio.lowlevel.Abort.FAILED
                self._is_over = True
                pool._forget(self)
            return trio.lowlevel.Abort.SUCCEEDED

        try:
            await trio.lowlevel.wait_task_rescheduled(give_up)
        finally:
            self._task = None

    def _give(self) -> bool:
        """Give it the token, if its event loop is still there."""
        self._has_token = self._wake()
        return self._has_token

    def _wake(self) -> bool:
        """Wake who waits for it, if anybody does; return whether that can still be done."""
        task, self._task = self._task, None
        if task is None or self._trio_token is None:
            return True
        try:
            here: trio.lowlevel.TrioToken | None = trio.lowlevel.current_trio_token()
        except RuntimeError:
            here = None
        if here is self._trio_token:
            trio.lowlevel.reschedule(task)
            return True
        try:
            self._trio_token.run_sync_soon(trio.lowlevel.reschedule, task)
        except trio.RunFinishedError:
            return False
        return True


class ExecPool:
    """Bounds the plain functions that are in threads without holding a worker, and those that wait for it.

    It holds no thread and no task: each item's own task takes a token, or waits for one in the queue's order, and makes
    a call in one of Trio's threads, which come when needed and go when idle. A token is back when the function has
    really ended, also in a thread that was abandoned. What does not fit is refused at once, and is then run directly,
    holding its worker: never lost, never on the event loop.

    Executors may share one, in different threads too. Who has made it closes it; an executor closes only its own.
    Source document: seed 004.

    Args:
        max_concurrency: how many functions run at once; a positive int.
        queue_size: how many more may wait; an int, at least 0.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(self, max_concurrency: int = 64, queue_size: int = 128) -> None:
        for argument, value, least in (("max_concurrency", max_concurrency, 1), ("queue_size", queue_size, 0)):
            if type(value) is not int or value < least:
                raise ValueError(f"{argument} must be an int, at least {least}, not {value!r}")
        self._max_concurrency = max_concurrency
        self._queue_size = queue_size
        # Functions end in threads. Who has it does not wait, calls nothing that is not ours, and is not interrupted.
        self._lock = Lock()
        self._borrowed = self._lent = 0
        self._queue: deque[PoolPlace] = deque()
        self._drains: list[tuple[trio.lowlevel.TrioToken, trio.Event]] = []
        self._submitted = self._refused = 0
        self._closed = False

    def __repr__(self) -> str:
        return (
            f"<ExecPool: {self._borrowed} of {self._max_concurrency} tokens borrowed, "
            f"{len(self._queue)} of {self._queue_size} queued{', closed' if self._closed else ''}>"
        )

    @enable_ki_protection
    def statistics(self) -> ExecPoolStatistics:
        """Return what it does at this moment."""
        with self._lock:
            return ExecPoolStatistics(
                max_concurrency=self._max_concurrency,
                queue_size=self._queue_size,
                borrowed=self._borrowed,
                lent=self._lent,
                queued=len(self._queue),
                submitted=self._submitted,
                refused=self._refused,
                closed=self._closed,
            )

    @enable_ki_protection
    def try_submit(self) -> PoolPlace | None:
        """Take a token, else a place in the queue. Never waits.

        Returns:
            A place, to be waited for and to be released; `None` if there is none, or the pool is closed.
        """
        with self._lock:
            free = self._borrowed < self._max_concurrency
            if self._closed or not (free or len(self._queue) < self._queue_size):
                self._refused += 1
                return None
            self._submitted += 1
            place = PoolPlace(self)
            if free:  # then nobody waits
                self._borrowed += 1
                place._has_token = True
            else:
                self._queue.append(place)
            return place

    def close(self) -> None:
        """Refuse all further items; those in it go on. Idempotent."""
        self._closed = True

    @enable_ki_protection
    async def drain(self) -> None:
        """Wait until no item is left, for as long as the caller's cancel scopes allow. It stays open if it was.

        Cancellation: changes nothing.
        """
        event = trio.Event()
        drain = (trio.lowlevel.current_trio_token(), event)
        with self._lock:
            if self._is_idle():
                event.set()
            self._drains.append(drain)
        try:
            await event.wait()
        finally:
            with self._lock:
                if drain in self._drains:
                    self._drains.remove(drain)

    async def aclose(self) -> None:
        """Refuse all further items, and wait until no item is left. Idempotent.

        Cancellation: the pool stays closed; items in it go on.
        """
        self.close()
        await self.drain()

    async def __aenter__(self) -> "ExecPool":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # All below with the lock.

    def _is_idle(self) -> bool:
        return not (self._borrowed or self._lent or self._queue)

    def _give_back(self) -> None:
        """Let the first that waits have the token, in this very step."""
        while self._queue:
            if self._queue.popleft()._give():
                return
        self._borrowed -= 1
        self._tell_if_idle()

    def _forget(self, place: PoolPlace) -> None:
        if place in self._queue:
            self._queue.remove(place)
            self._tell_if_idle()

    def _tell_if_idle(self) -> None:
        if self._is_idle():
            for token, event in self._drains:
                try:
                    token.run_sync_soon(event.set)
                except trio.RunFinishedError:
                    continue
            self._drains.clear()
