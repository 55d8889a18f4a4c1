"""Plain functions in threads: how a function asks for one, what it holds there, and one call in one."""

import logging
from collections.abc import Awaitable, Callable
from contextvars import Context, ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import trio

from trio_wow.errors import HandlerInterruptedError, printable
from trio_wow.execution._plain import is_async

if TYPE_CHECKING:
    from trio_wow.execution._profile import ExecProfile

__all__ = ["Hold", "ThreadCall", "Threads", "blocking", "direct", "inline", "lent", "pin_of"]

logger = logging.getLogger("trio_wow.execution")

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")
Pin = Literal["inline", "direct", "blocking"]

_ATTRIBUTE = "__trio_wow_pin__"


def inline(function: F) -> F:
    """Pin a plain function to the event loop: it never goes to a thread, however long it takes.

    For functions that are known to be quick, or that use what belongs to the event loop's thread. Source document:
    seed 004.

    Returns:
        The function itself, marked.

    Raises:
        TypeError: it is no plain function (an `async def` is on the event loop anyway), or cannot be marked.
    """
    return _pin(function, "inline")


def direct(function: F) -> F:
    """Pin a plain handler to a worker thread: it runs off the event loop and holds its worker meanwhile.

    For handlers that compute, in C code that releases the GIL or on a free-threaded interpreter: at most `workers` of
    them run at once, over all dispatches of the executor. A cancelled dispatch waits for them; they do not hear of it
    before a forced stop, from when on `trio.from_thread.check_cancelled` raises. Such a handler must not wait for
    another item of its executor, which may be queued behind it. Source documents: seeds 002 and 004.

    Returns:
        The function itself, marked.

    Raises:
        TypeError: it is no plain function (an `async def` cannot leave the event loop), or cannot be marked.
    """
    return _pin(function, "direct")


def blocking(function: F) -> F:
    """Pin a plain function to the executor's `ExecPool`: it runs off the event loop and holds no worker.

    For functions that block on I/O. When the pool is full, a call runs as that of a `@direct` function does. An item
    that is cancelled while it waits for its thread is discarded. A thread is waited for; it does not hear of a
    cancellation before a forced stop, from when on `trio.from_thread.check_cancelled` raises.

    Returns:
        The function itself, marked.

    Raises:
        TypeError: it is no plain function (an `async def` cannot leave the event loop), or cannot be marked.
    """
    return _pin(function, "blocking")


def _pin(function: F, pin: Pin) -> F:
    target: object = function
    if not callable(target) or is_async(target):
        raise TypeError(f"@{pin} is for plain functions, not {function!r}; an `async def` stays on the event loop")
    try:
        setattr(function, _ATTRIBUTE, pin)
        if isinstance(function, staticmethod):  # which hands out what is in it
            setattr(function.__func__, _ATTRIBUTE, pin)
    except AttributeError:
        raise TypeError(f"@{pin} cannot mark {function!r}: wrap it in a `partial`, or a function") from None
    return function


def pin_of(handler: Any) -> Pin | None:
    """Return where a handler asks to run: a function, a bound method, a `partial`, or an object with `__call__`.

    The outermost mark counts. An `async def` has none: a wrapper made with `functools.wraps` has only copied it.
    """
    if is_async(handler):
        return None
    pin: Pin | None = getattr(handler, _ATTRIBUTE, None)
    while pin is None and isinstance(handler, partial):
        handler = handler.func
        pin = getattr(handler, _ATTRIBUTE, None)
    return pin or getattr(type(handler).__call__, _ATTRIBUTE, None)


class _Unlimited:
    """A thread limiter that never waits, so that a thread starts in the very step in which it is called for.

    A `trio.CapacityLimiter` is a checkpoint: the dispatch could be cancelled before the thread has started, and the
    handler would start nevertheless.
    """

    async def acquire_on_behalf_of(self, _borrower: object) -> None: ...

    def release_on_behalf_of(self, _borrower: object) -> None: ...


_unlimited = cast("trio.CapacityLimiter", _Unlimited())


class Hold(Protocol):
    """What a thread holds. All but `end_in_thread` are called on the event loop."""

    def end(self) -> None:
        """Release it for good. Idempotent."""

    def end_in_thread(self) -> None:
        """Release it for good, if that can be done in the thread, whose function has ended."""

    def abandon(self) -> None:
        """Leave it to the thread, which nobody waits for any more."""

    def lend(self) -> None:
        """Release it until it is taken back; nothing if it is not held."""

    async def take_back(self) -> None:
        """Take it again, before all others that wait for it; go on without it if that is cancelled, or it has ended."""


_call: "ContextVar[ThreadCall | None]" = ContextVar("trio_wow.execution.thread_call", default=None)


async def lent(waits: Callable[[], Awaitable[T]]) -> T:
    """Wait on behalf of whoever has called: a function's thread lends its worker, or its place in the pool, meanwhile.

    For calls that wait for other items of the executor. When they are made from the thread of a plain function, through
    `trio.from_thread.run`, those items may need the very thing that the thread holds. It is lent before `waits` is
    called, and the thread has it again before it goes on. On the event loop, where nothing is held, it just waits.

    Args:
        waits: an async function without arguments.

    Returns:
        What `waits` does.

    Raises:
        HandlerInterruptedError: (in a thread) the dispatch of the item was cancelled.
        BaseException: what `waits` raised.
    """
    call = _call.get()
    return await (waits() if call is None or call.is_over else call.lend(waits))


class ThreadCall:
    """One call of a plain function in a thread.

    It is shielded: a function cannot be interrupted in a thread, so a cancelled dispatch waits for it. Only `abandon`
    opens the shield, after which a cancellation leaves the thread to itself.

    Args:
        threads: those that it is one of.
        group: of calls that are interrupted together; it is in it while it is waited for.
        profile: the function's.
        key: of the item, for the log.
        hold: what the thread holds while it runs, which it can lend. The caller ends it, unless the call is abandoned.
        context: what the function runs in; nobody else does meanwhile.
        function: takes nothing.

    Attributes:
        abandoned: whether the thread was left to itself.
        seconds: how long the function has taken.
    """

    def __init__(
        self,
        threads: "Threads",
        group: "set[ThreadCall]",
        profile: "ExecProfile",
        key: object,
        hold: "Hold | None",
        context: Context,
        function: Callable[[], object],
    ) -> None:
        self._threads = threads
        self._group = group
        self._profile = profile
        self._key = key
        self._hold = hold
        self._context = context
        self._function = function
        self._shield = trio.CancelScope(shield=True)
        self._token = trio.lowlevel.current_trio_token()
        self._error: BaseException | None = None
        self._result: object = None
        self._over = False
        self._scopes: set[trio.CancelScope] = set()
        self._interrupted = False
        self._is_taking_back = False
        self.abandoned = False
        self.seconds = 0.0

    def record(self) -> None:
        """Tell the profile how long the function has taken."""
        self._profile.record(self.seconds, self._threads.perf_counter())

    @property
    def is_over(self) -> bool:
        """Whether the function has ended."""
        return self._over

    def abandon(self) -> None:
        """Let the next cancellation leave the thread to itself."""
        self._shield.shield = False

    async def run(self, name: str) -> object:
        """Run the function in a thread of that name; return and raise what it does. Called once.

        Cancellation: `Cancelled` only after `abandon`, or when the function lets a `HandlerInterruptedError` pass. If
            the thread still runs then, what it holds is released when it has ended, unless the event loop has gone
            before; its result is dropped, an error of it goes to the log.
        """
        threads = self._threads
        started = threads.perf_counter()
        threads.calls.add(self)
        self._group.add(self)
        try:
            with self._shield:
                await trio.to_thread.run_sync(self._work, thread_name=name, abandon_on_cancel=True, limiter=_unlimited)
        except trio.Cancelled:
            self.abandoned = True
            if self._over:  # and the thread may have seen it abandoned, or not
                self.abandoned = False
                if self._error is not None:
                    if self._is_interruption(self._error):
                        raise
                    raise self._error from None
            else:
                threads.abandoned += 1
                logger.warning(
                    "abandoned the thread of handler %s for key %s, which has run for %.1f s",
                    self._profile.name,
                    printable(self._key),
                    threads.perf_counter() - started,
                )
                raise
        except Exception as error:
            if self._is_interruption(error):
                await trio.lowlevel.checkpoint_if_cancelled()
            raise
        finally:
            threads.calls.remove(self)
            self._group.remove(self)
            if self.abandoned and self._hold is not None:
                self._hold.abandon()
        return self._result

    def interrupt(self) -> None:
        """Cancel what the thread waits for in the library, now and later."""
        self._interrupted = True
        for scope in self._scopes:
            scope.cancel()

    def _is_interruption(self, error: BaseException) -> bool:
        """Whether it has let pass what the thread got in place of the cancellation, and nothing else."""
        if isinstance(error, BaseExceptionGroup):
            return all(map(self._is_interruption, error.exceptions))
        return self._interrupted and isinstance(error, HandlerInterruptedError)

    async def lend(self, waits: Callable[[], Awaitable[T]]) -> T:
        """Await what the thread waits for, while it lends what it holds."""
        hold, scope = self._hold, trio.CancelScope()
        if self._interrupted:
            scope.cancel()
        self._scopes.add(scope)
        if len(self._scopes) == 1 and not self._is_taking_back and hold is not None:
            hold.lend()
        try:
            with scope:
                return await waits()
        finally:
            self._scopes.remove(scope)
            if not self._scopes and not self._is_taking_back and hold is not None:
                await self._take_back(hold)
        raise HandlerInterruptedError(self._profile.name)

    async def _take_back(self, hold: Hold) -> None:
        self._is_taking_back = True
        try:
            await hold.take_back()
        finally:
            self._is_taking_back = False
            if self._scopes:  # of a wait that has begun meanwhile, beside this one
                hold.lend()

    def _work(self) -> None:
        threads, context, function = self._threads, self._context, self._function
        del self._context, self._function  # the context refers to this call
        context.run(_call.set, self)
        started = threads.perf_counter()
        self._profile.begin(self, started)
        try:
            self._result = context.run(function)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self.seconds = threads.perf_counter() - started
            self._profile.end(self)
            self._over = True
            if self._hold is not None:
                self._hold.end_in_thread()
            if self.abandoned:
                try:
                    self._token.run_sync_soon(self._end_late)
                except trio.RunFinishedError:
                    self._report_late()

    def _end_late(self) -> None:
        if self.abandoned:
            self._threads.late += 1
            self._report_late()
            if self._hold is not None:
                self._hold.end()

    def _report_late(self) -> None:
        # `Cancelled` is what `trio.from_thread.check_cancelled` raises in a handler that asks how it stands.
        if self._error is not None and not isinstance(self._error, trio.Cancelled):
            key = printable(self._key)
            logger.error("abandoned handler %s failed for key %s", self._profile.name, key, exc_info=self._error)


class Threads:
    """The calls in threads of one executor.

    Args:
        perf_counter: seconds, to measure how long functions take.

    Attributes:
        calls: those that run and are waited for.
        abandoned: how many were left to themselves, in all.
        late: how many of those have ended since; their results were dropped.
    """

    def __init__(self, perf_counter: Callable[[], float]) -> None:
        self.perf_counter = perf_counter
        self.calls: set[ThreadCall] = set()
        self.abandoned = 0
        self.late = 0

    def abandon(self) -> None:
        """Let the next cancellation leave all threads to themselves."""
        for call in self.calls:
            call.abandon()
