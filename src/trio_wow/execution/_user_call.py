"""Calling the functions of others: naming them, and finding cancel scopes that they left open."""

from math import inf
from types import TracebackType
from typing import Any

import trio

from trio_wow.errors import CancelScopeLeakError
from trio_wow.execution._blocking import running_function
from trio_wow.execution._errors import split_cancelled

__all__ = ["in_user_call", "outweighs_leak", "user_call"]


def outweighs_leak(error: BaseException, *, cancelled_outside: bool) -> bool:
    """Whether what user code raised is told rather than the scope that it left open.

    Args:
        error: what it raised.
        cancelled_outside: whether it was cancelled by more than the scopes that it entered.
    """
    cancelled, failure = split_cancelled(error)
    return (cancelled is not None and cancelled_outside) or not isinstance(failure, Exception | None)


def in_user_call() -> bool:
    """Whether the calling code is, or was started by, a function that `user_call` runs."""
    return running_function.get() is not None


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

    __slots__ = ("_function", "_key", "_status", "_token")

    def __init__(self, function: str, key: object) -> None:
        self._function = function
        self._key = key

    def __enter__(self) -> None:
        # Private to Trio; see `Lane._run`.
        self._status = trio.lowlevel.current_task()._cancel_status
        self._token = running_function.set(self._function)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        running_function.reset(self._token)
        task = trio.lowlevel.current_task()
        left: Any = task._cancel_status
        if left is self._status:
            return
        while left is not None and left._parent is not self._status:
            left = left._parent
        if left is not None:  # as Trio does when a scope is left before those inside it
            task._activate_cancel_status(self._status)
            left._mark_abandoned()
            left.close()
        leak = CancelScopeLeakError(self._function, self._key)
        cancelled_outside = trio.current_effective_deadline() == -inf
        if error is None or not outweighs_leak(error, cancelled_outside=cancelled_outside):
            raise leak from error
        error.add_note(str(leak))
