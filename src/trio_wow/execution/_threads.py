"""Plain handlers that run in threads: how a function asks for one, and one call in one."""

import logging
from collections.abc import Callable
from contextvars import Context
from functools import partial
from inspect import isawaitable
from typing import Any, Literal, TypeVar, cast

import trio

from trio_wow.execution._mailbox import Mailbox
from trio_wow.execution._plain import is_async, refuse_awaitable

__all__ = ["Threads", "blocking", "direct", "pin_of"]

logger = logging.getLogger("trio_wow.execution")

F = TypeVar("F", bound=Callable[..., object])
Pin = Literal["direct", "blocking"]

_ATTRIBUTE = "__trio_wow_pin__"


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
    """Pin a plain handler to a Trio thread: it runs off the event loop and holds no worker.

    For handlers that block on I/O. How many run at once is for Trio's default thread limiter to say
    (`trio.to_thread.current_default_thread_limiter`, 40 threads). An item that is cancelled while it waits for a thread
    is discarded. A thread is waited for; it does not hear of a cancellation before a forced stop, from when on
    `trio.from_thread.check_cancelled` raises.

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


class ThreadCall:
    """One call of a plain handler in a thread.

    It is shielded: a handler cannot be interrupted in a thread, so a cancelled dispatch waits for it. Only `abandon`
    opens the shield, after which a cancellation leaves the thread to itself.

    Attributes:
        abandoned: whether the thread was left to itself.
    """

    def __init__(self, threads: "Threads", mailbox: Mailbox[Any], item: object, ended: Callable[[], object]) -> None:
        self._threads = threads
        self._mailbox = mailbox
        self._item = item
        self._ended = ended
        self._shield = trio.CancelScope(shield=True)
        self._token = trio.lowlevel.current_trio_token()
        self._error: BaseException | None = None
        self._over = False
        self.abandoned = False

    def abandon(self) -> None:
        """Let the next cancellation leave the thread to itself."""
        self._shield.shield = False

    async def run(self) -> None:
        """Run the handler in a thread, and raise what it raised. Called once.

        Cancellation: `Cancelled` only after `abandon`. If the thread still runs then, `ended` is called on the event
        loop once it has ended, unless the loop has gone before; an error of its handler goes to the log.
        """
        threads = self._threads
        started = threads.perf_counter()
        threads.calls.add(self)
        try:
            with self._shield:
                await trio.to_thread.run_sync(
                    self._work, thread_name=self._mailbox.name, abandon_on_cancel=True, limiter=_unlimited
                )
        except trio.Cancelled:
            self.abandoned = True
            if self._over:  # and the thread may have seen it abandoned, or not
                self.abandoned = False
                if self._error is not None:
                    raise self._error from None
                return
            logger.warning(
                "abandoned the thread of handler %s for key %s, which has run for %.1f s",
                threads.handler,
                self._mailbox.label,
                threads.perf_counter() - started,
            )
            raise
        finally:
            threads.calls.remove(self)

    def _work(self) -> None:
        try:
            # Not the caller's: what `on_error` sets there is nothing of this item's.
            result = self._threads.context.copy().run(self._threads.function, self._item)
            if result is not None and isawaitable(result):
                refuse_awaitable(result, self._threads.awaitable_returned)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._over = True
            if self.abandoned:
                try:
                    self._token.run_sync_soon(self._end_late)
                except trio.RunFinishedError:
                    self._report_late()

    def _end_late(self) -> None:
        if self.abandoned:
            self._report_late()
            self._ended()

    def _report_late(self) -> None:
        # `Cancelled` is what `trio.from_thread.check_cancelled` raises in a handler that asks how it stands.
        if self._error is not None and not isinstance(self._error, trio.Cancelled):
            logger.error(
                "abandoned handler %s failed for key %s",
                self._threads.handler,
                self._mailbox.label,
                exc_info=self._error,
            )


class Threads:
    """The calls in threads of one dispatch.

    Args:
        function: takes an item.
        handler: its name.
        awaitable_returned: what is wrong if it returns an awaitable.
        perf_counter: seconds, to measure how long a thread has run.
        context: copied for each call.
    """

    def __init__(
        self,
        function: Callable[[Any], object],
        handler: str,
        awaitable_returned: str,
        perf_counter: Callable[[], float],
        context: Context,
    ) -> None:
        self.context = context
        self.function = function
        self.handler = handler
        self.awaitable_returned = awaitable_returned
        self.perf_counter = perf_counter
        self.calls: set[ThreadCall] = set()

    def prepare(self, mailbox: Mailbox[Any], item: object, ended: Callable[[], object]) -> ThreadCall:
        """Prepare a call; `ended` is told if its thread is abandoned and ends later."""
        return ThreadCall(self, mailbox, item, ended)

    async def call_blocking(self, mailbox: Mailbox[Any], item: Any, discard: Callable[[Any], object]) -> None:
        """Call the function in a thread that counts against Trio's default thread limiter.

        Cancellation: until the thread starts, at once; the item goes to `discard`.
        """
        limiter = trio.to_thread.current_default_thread_limiter()
        borrower = object()
        release = partial(limiter.release_on_behalf_of, borrower)
        try:
            await limiter.acquire_on_behalf_of(borrower)
            try:
                # The limiter does not look once it has given a token, and a call is shielded from its start.
                await trio.lowlevel.checkpoint_if_cancelled()
            except trio.Cancelled:
                release()
                raise
        except trio.Cancelled:
            discard(item)
            raise
        call = self.prepare(mailbox, item, release)
        try:
            await call.run()
        finally:
            if not call.abandoned:
                release()

    def abandon(self) -> None:
        """Let the next cancellation leave all threads to themselves."""
        for call in self.calls:
            call.abandon()
