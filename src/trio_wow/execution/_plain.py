"""What a plain function must not return."""

from inspect import iscoroutine
from typing import NoReturn

__all__ = ["refuse_awaitable"]


def refuse_awaitable(result: object, problem: str) -> NoReturn:
    """Refuse what a plain function has returned, where nobody would await it.

    Args:
        result: the awaitable; a coroutine is closed, so that Python does not complain of it too.
        problem: the text of the error: which function, and the way out.

    Raises:
        TypeError: always.
    """
    if iscoroutine(result):
        result.close()
    raise TypeError(problem)
