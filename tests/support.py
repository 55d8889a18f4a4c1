"""Helpers shared by the tests."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import trio


class ListSource:
    """A `BatchSource` over a list, which records each limit it was asked with."""

    def __init__(self, items: Sequence[Any], *, batch: int | None = None) -> None:
        self.rest = list(items)
        self.batch = batch
        self.limits: list[int] = []

    async def receive_batch(self, limit: int, /) -> list[Any]:
        self.limits.append(limit)
        await trio.lowlevel.checkpoint()
        if not self.rest:
            raise trio.EndOfChannel
        count = min(limit, self.batch or limit)
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken


class EndlessSource(ListSource):
    """A `ListSource` that waits for ever, instead of ending."""

    async def receive_batch(self, limit: int, /) -> list[Any]:
        if not self.rest:
            self.limits.append(limit)
            await trio.sleep_forever()
        return await super().receive_batch(limit)


def task_names() -> list[str]:
    """Names of all tasks of this run."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    return [task.name for task in _tasks(root)]


def _tasks(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _tasks(child)


async def collect(run: Callable[[], Awaitable[object]]) -> BaseException | None:
    """Return what an async call raised."""
    try:
        await run()
    except BaseException as error:
        return error
    return None
