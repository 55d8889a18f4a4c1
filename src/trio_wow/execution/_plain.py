"""Telling plain functions from async ones."""

from functools import partial
from inspect import iscoroutine, iscoroutinefunction
from typing import NoReturn

__all__ = ["is_async", "name_of", "refuse_awaitable"]


def is_async(function: object) -> bool:
    """Whether calling it makes a coroutine: an `async def`, also in a `partial`, as a method or as `__call__`."""
    while isinstance(function, partial):
        function = function.func
    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)


def name_of(function: object) -> str:
    """Return what to call a function in a message: its qualified name, through any `partial`."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else type(function).__qualname__


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
