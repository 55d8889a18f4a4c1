"""Running a coroutine inside the current task, in a context of its own."""

from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any

import trio

__all__ = ["Isolated"]


class Isolated:
    """Awaits a coroutine in the current task, with `context` as its context variables.

    The first segment runs in `Context.run`. After that the task's own context *is* `context` and the coroutine is
    stepped plainly, because Trio itself enters a task's context at each step (and `trio.from_thread` relies on it).

    Attributes:
        waited: whether the coroutine gave control to the event loop.
    """

    __slots__ = ("_context", "_coroutine", "waited")

    def __init__(self, coroutine: Coroutine[Any, Any, object], context: Context) -> None:
        self._coroutine = coroutine
        self._context = context
        self.waited = False

    def __await__(self) -> Generator[Any, Any, None]:
        coroutine, task = self._coroutine, trio.lowlevel.current_task()
        outer, task.context = task.context, self._context
        try:
            trap = self._context.run(coroutine.send, None)
            self.waited = True
            while True:
                try:
                    value = yield trap
                except BaseException as error:
                    trap = coroutine.throw(error)
                else:
                    trap = coroutine.send(value)
        except StopIteration:
            return
        finally:
            task.context = outer
