"""Components and runtimes for tests of the lifecycle."""

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from trio_wow.runtime import Runtime, RuntimeContext


class Part:
    """A component that writes down each step, and does in it what the test says."""

    def __init__(self, name: str, log: list[str], **steps: Callable[..., Any]) -> None:
        self.name = name
        self.log = log
        self.steps = steps
        self.context: RuntimeContext | None = None

    async def _step(self, step: str) -> None:
        self.log.append(f"{step} {self.name}")
        if step in self.steps:
            result = self.steps[step](self)
            if isinstance(result, Awaitable):
                await result

    def _plain(self, step: str) -> None:
        self.log.append(f"{step} {self.name}")
        if step in self.steps:
            self.steps[step](self)

    async def prepare(self, context: RuntimeContext, /) -> None:
        self.context = context
        await self._step("prepare")

    def start(self) -> None:
        self._plain("start")

    def quiesce(self) -> None:
        self._plain("quiesce")

    async def stop(self) -> None:
        await self._step("stop")

    def force_stop(self) -> None:
        self._plain("force_stop")

    def spawn(self, work: Callable[..., Awaitable[object]], name: str | None = None) -> None:
        assert self.context is not None
        self.context.nursery.start_soon(work, name=name)


class CatchingUp(Part):
    async def caught_up(self) -> None:
        await self._step("caught_up")


def raising(error: BaseException) -> Callable[..., None]:
    def step(part: Part) -> None:
        raise error

    return step


async def sleeping(part: object) -> None:
    await trio.sleep_forever()


async def shielded(seconds: float) -> None:
    with trio.CancelScope(shield=True):
        await trio.sleep(seconds)


def quick(components: list[Any], **options: Any) -> Runtime:
    return Runtime(components, **{"signals": False, "shutdown_timeout": 10, "shutdown_quiet_period": 0, **options})
