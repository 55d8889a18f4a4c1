"""Telling plain functions from async ones."""

from functools import partial
from inspect import isasyncgenfunction, iscoroutine, iscoroutinefunction, isgeneratorfunction
from typing import NoReturn

__all__ = ["is_async", "name_of", "refuse_awaitable", "yields"]


def _bare(function: object) -> object:
    while isinstance(function, partial):
        function = function.func
    return function


def is_async(function: object) -> bool:
    """Whether calling it makes a coroutine: an `async def`, also in a `partial`, as a method or as `__call__`."""
    function = _bare(function)
    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)


def yields(function: object) -> bool:
    """Whether calling it makes a generator, async or not: also in a `partial`, as a method or as `__call__`."""
    function = _bare(function)
    return any(isgeneratorfunction(each) or isasyncgenfunction(each) for each in (function, type(function).__call__))


def name_of(function: object) -> str:
    """Return what to call a function in a message: its qualified name, through any `partial`."""
    function = _bare(function)
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
