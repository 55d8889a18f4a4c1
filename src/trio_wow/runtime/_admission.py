"""What a runtime lets in: leases for running work, and the gate for work from outside."""

from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType

import trio

from trio_wow.execution import in_user_call

__all__ = ["ActivityLease", "Admission", "checkpoint_in_turn"]


class ActivityLease:
    """Says that one complete operation is running, retries and publication included. Made by `Admission`.

    As a context manager it also marks the code inside as *being handled*: what that code sends, in child tasks and
    threads too, counts as coming from inside the runtime for as long as the lease is open.

    Attributes:
        since: when the operation began, `trio.current_time()`.
    """

    __slots__ = ("_admission", "_name", "_open", "_parts", "_token", "since")

    def __init__(self, admission: "Admission", name: str, parts: tuple[object, ...]) -> None:
        self._admission = admission
        self._name = name
        self._parts = parts
        self._open = True
        self._token: Token[ActivityLease | None] | None = None
        self.since = trio.current_time()

    @property
    def name(self) -> str:
        """What the operation is called. Put together when asked for: most leases are never asked."""
        if not self._parts:
            return self._name
        try:
            return self._name % self._parts
        except Exception:  # a stop that says what it waits for must not fail by it
            return self._name

    @property
    def is_open(self) -> bool:
        """Whether the operation is still running."""
        return self._open

    def close(self) -> None:
        """Say that the operation has ended. Synchronous and idempotent."""
        if self._open:
            self._open = False
            self._admission._release(self)

    def __enter__(self) -> "ActivityLease":
        self._token = _current_lease.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()  # first, since leaving in another context than the one it was entered in is an error
        if self._token is not None:
            _current_lease.reset(self._token)
            self._token = None

    def __repr__(self) -> str:
        return f"<lease {self.name!r}: {'open' if self._open else 'closed'}>"


_current_lease: ContextVar[ActivityLease | None] = ContextVar("trio_wow_current_lease", default=None)


async def checkpoint_in_turn() -> None:
    """Execute a checkpoint, for a method that has at hand what it was asked for.

    Called by a dispatcher as it handles a message, it can be cancelled and does not give way to other tasks: the
    executor does that between turns, and the handler need not become a task of its own for nothing. For everybody else,
    and for the functions that the dispatcher calls, it is `trio.lowlevel.checkpoint`.
    """
    lease = _current_lease.get()
    if lease is not None and lease.is_open and not in_user_call():
        await trio.lowlevel.checkpoint_if_cancelled()
    else:
        await trio.lowlevel.checkpoint()


class Admission:
    """One runtime's doors. The inner one admits operations (leases), the outer one work from outside (*intake*).

    The intake opens when every component has started and closes at the stop request; what handlers send is then still
    admitted, until the inner door closes. While any receiver of the runtime holds more than its window (*overdraft*),
    nothing is taken from outside either.
    """

    def __init__(self) -> None:
        self._leases: dict[ActivityLease, None] = {}
        self._closed = False
        self._intake_open = False
        self._overdrawn = 0
        self._acquired = 0
        self._changed = trio.Event()
        self._watchers: dict[Callable[[], object], None] = {}

    def try_acquire(self, name: str | None = None, *parts: object) -> ActivityLease | None:
        """Give a lease for one operation, or `None` once admission has closed. The caller closes it.

        Args:
            name: what to call the operation when somebody asks what is running.
            parts: what the `%s` in `name` stand for, as in logging. Kept, and put in only when somebody asks.
        """
        if self._closed:
            return None
        lease = ActivityLease(self, name or "unnamed", parts)
        self._leases[lease] = None
        self._acquired += 1
        self._wake()
        return lease

    def is_inside(self) -> bool:
        """Whether the calling code runs for a message of this runtime that is still being handled."""
        lease = _current_lease.get()
        return lease is not None and lease.is_open and lease._admission is self

    @property
    def is_closed(self) -> bool:
        """Whether no further operation is admitted, from inside or outside."""
        return self._closed

    @property
    def intake_is_open(self) -> bool:
        """Whether work from outside is let in at all (it may still have to wait for an overdraft to end)."""
        return self._intake_open

    @property
    def is_overdrawn(self) -> bool:
        """Whether a receiver of this runtime holds more than it has asked for, so that work from outside has to wait.

        What has finished is asked for again in lots, so this can be up to one lot before the window itself is full.
        """
        return self._overdrawn > 0

    @property
    def leases(self) -> tuple[ActivityLease, ...]:
        """The operations that are running now, oldest first."""
        return tuple(self._leases)

    def open_intake(self) -> None:
        """Let work from outside in."""
        self._intake_open = True
        self._notify()

    def close_intake(self) -> None:
        """Let no more work from outside in. Those who wait at the door are told by their watchers."""
        self._intake_open = False
        self._notify()

    def close(self) -> None:
        """Close both doors: from now on `try_acquire` gives `None`. Leases that are open stay open."""
        self._closed = True
        self.close_intake()

    def begin_overdraft(self) -> None:
        """Say that one more receiver holds more than its window."""
        self._overdrawn += 1

    def end_overdraft(self) -> None:
        """Say that one receiver fewer holds more than its window."""
        self._overdrawn -= 1
        if not self._overdrawn:
            self._notify()

    def watch(self, callback: Callable[[], object]) -> None:
        """Call `callback`, synchronously, whenever work from outside may be let in again or is refused for good."""
        self._watchers[callback] = None

    def unwatch(self, callback: Callable[[], object]) -> None:
        """Forget a callback; one that is not known is no error."""
        self._watchers.pop(callback, None)

    async def wait_quiet(self, period: float) -> None:
        """Return when no lease has been held for `period` seconds without a break; with 0, when none is held.

        Nothing runs between the last look at the leases and the return.
        """
        while True:
            while self._leases:
                await self._wait_change()
            seen = self._acquired
            if period > 0:
                with trio.move_on_after(period):
                    while seen == self._acquired:
                        await self._wait_change()
            if seen == self._acquired:
                return

    async def _wait_change(self) -> None:
        if self._changed.is_set():
            self._changed = trio.Event()
        await self._changed.wait()

    def _release(self, lease: ActivityLease) -> None:
        del self._leases[lease]
        if not self._leases:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()

    def _notify(self) -> None:
        for callback in tuple(self._watchers):
            callback()
