"""Calling the functions of others: naming them, and finding cancel scopes that they left open."""

from math import inf
from types import TracebackType

import trio

from trio_wow.errors import CancelScopeLeakError
from trio_wow.execution._blocking import running_function
from trio_wow.execution._errors import split_cancelled
from trio_wow.execution._lane import Lane

__all__ = ["is_in_turn", "outweighs_leak", "user_call"]


def outweighs_leak(error: BaseException, *, cancelled_outside: bool) -> bool:
    """Whether what user code raised is told rather than the scope that it left open.

    Args:
        error: what it raised.
        cancelled_outside: whether it was cancelled by more than the scopes that it entered.
    """
    cancelled, failure = split_cancelled(error)
    return (cancelled is not None and cancelled_outside) or not isinstance(failure, Exception | None)


_RUNNER = Lane._run.__code__


def is_in_turn() -> bool:
    """Whether the caller is a handler, in its own task and outside `user_call`: its executor keeps turns fair."""
    return getattr(trio.lowlevel.current_task().coro, "cr_code", None) is _RUNNER and running_function.get() is None


class user_call:  # noqa: N801 - used like a function
    """Run a function for somebody else: it is what a blocking call is reported of, and the task is left as it was.

    A cancel scope that the function left open is closed.

    Args:
        function: the function's name.
        key: what it is called for, for the error.

    Raises:
        CancelScopeLeakError: it left one open; the `Exception` it raised, if any, is the cause.
        BaseException: what it raised. What is no `Exception` outweighs a leak, which becomes a note on it.
    """

    __slots__ = ("_function", "_key", "_scope", "_token")

    def __init__(self, function: str, key: object) -> None:
        self._function = function
        self._key = key
        self._scope = trio.CancelScope()

    def __enter__(self) -> None:
        self._token = running_function.set(self._function)
        self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        running_function.reset(self._token)
        try:
            self._scope.__exit__(None, None, None)  # what was raised passes by: this scope is never cancelled
        except RuntimeError:  # Trio's complaint about a scope that is not the innermost one, which it has closed
            leak = CancelScopeLeakError(self._function, self._key)
            cancelled_outside = trio.current_effective_deadline() == -inf
            if error is None or not outweighs_leak(error, cancelled_outside=cancelled_outside):
                raise leak from error
            error.add_note(str(leak))
