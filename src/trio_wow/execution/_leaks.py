"""Finding cancel scopes that a function left open."""

from collections.abc import Iterator
from contextlib import contextmanager

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
        CancelScopeLeakError: it left one open; what it raised, if anything, is the cause.
        BaseException: what it raised.
    """
    raised: BaseException | None = None
    try:
        with trio.CancelScope():
            try:
                yield
            except BaseException as error:
                raised = error
    except RuntimeError:  # Trio's complaint about a scope that is not the innermost one, which it has closed
        raise CancelScopeLeakError(function, key) from raised
    if raised is not None:
        try:
            raise raised
        finally:
            del raised  # it refers to this frame
