"""Finding cancel scopes that a function left open."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import trio

from trio_wow.errors import CancelScopeLeakError

__all__ = ["no_leaked_scope"]


@contextmanager
def no_leaked_scope(function: str, key: object) -> Iterator[None]:
    """Run user code, and leave the task as it was before: a cancel scope that the code left open is closed.

    Args:
        function: the name of what is run, for the error.
        key: what it is run for, for the error.

    Raises:
        CancelScopeLeakError: it left one open; the `Exception` it raised, if any, is the cause.
        BaseException: what it raised. What is no `Exception` outweighs a leak, which becomes a note on it.
    """
    raised: BaseException | None = None
    try:
        with trio.CancelScope():
            try:
                yield
            except BaseException as error:
                raised = error
    except RuntimeError:  # Trio's complaint about a scope that is not the innermost one, which it has closed
        leak = CancelScopeLeakError(function, key)
        by_the_leak = isinstance(raised, trio.Cancelled) and trio.current_effective_deadline() > -inf
        if raised is None or isinstance(raised, Exception) or by_the_leak:
            raise leak from raised
        raised.add_note(str(leak))
    if raised is not None:
        try:
            raise raised
        finally:
            del raised  # it refers to this frame
