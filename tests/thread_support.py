"""What tests of workers and of threads share."""

import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar

import pytest
import trio
import trio.testing
from support import EndlessSource, collect
from trio.testing import wait_all_tasks_blocked

from trio_wow.execution import KeyedExecutor, blocking, direct

F = TypeVar("F", bound=Callable[..., object])

PATIENCE = 10  # seconds until a test or a thread that waits in vain says so


class Gates:
    """A plain handler whose items stay in their threads until they are let go."""

    def __init__(self) -> None:
        self.inside: list[Any] = []
        self.arrived: list[Any] = []
        self.all_open = False
        self._gates: dict[Any, threading.Event] = defaultdict(threading.Event)

    @direct
    def compute(self, item: Any) -> None:
        self._stay(item)

    @blocking
    def wait(self, item: Any) -> None:
        self._stay(item)

    def _stay(self, item: Any) -> None:
        gate = trio.from_thread.run_sync(self._arrive, item)
        let_go = gate.wait(PATIENCE)
        self.inside.remove(item)
        assert let_go, f"{item!r} was not let go"

    def _arrive(self, item: Any) -> threading.Event:
        self.inside.append(item)
        self.arrived.append(item)
        if self.all_open:
            self._gates[item].set()
        return self._gates[item]

    async def arrival(self, *items: Any) -> None:
        await until(lambda: set(items) <= set(self.arrived))

    def open(self, *items: Any) -> None:
        for item in items:
            self._gates[item].set()

    def open_all(self) -> None:
        self.all_open = True
        for gate in list(self._gates.values()):
            gate.set()


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop and the threads go on until a condition holds."""
    with trio.fail_after(PATIENCE):
        while not condition():
            await wait_all_tasks_blocked(0.001)  # to leave the interpreter to the threads


Start = Callable[..., "trio.MemorySendChannel[Any]"]


@asynccontextmanager
async def dispatches(gates: Gates | None = None) -> AsyncIterator[Start]:
    """Give a function that starts a dispatch, fed with some items and by the channel it returns; cancel all at the end.

    A dispatch that fails fails the test, unless there is a list for its `outcome`.
    """

    def start(
        executor: KeyedExecutor,
        handler: Callable[[Any], object],
        *items: Any,
        key: Callable[[Any], Hashable] = lambda item: item,
        outcome: list[BaseException | None] | None = None,
        **callbacks: Any,
    ) -> "trio.MemorySendChannel[Any]":
        send, receive = trio.open_memory_channel[Any](inf)
        for item in items:
            send.send_nowait(item)
        run = partial(executor.dispatch, receive, key=key, handler=handler, **callbacks)
        nursery.start_soon(run if outcome is None else partial(collect, run, outcome))
        return send

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            try:
                yield start
            finally:
                if gates is not None:
                    gates.open_all()
                nursery.cancel_scope.cancel()


def states(executor: KeyedExecutor) -> list[str]:
    return [worker.state for worker in executor.statistics().workers]


def borrowed(executor: KeyedExecutor) -> int:
    """How many tokens of its pool are borrowed."""
    pool = executor.statistics().pool
    assert pool is not None
    return pool.borrowed


def queued(executor: KeyedExecutor) -> list[int]:
    return [worker.mailboxes_queued for worker in executor.statistics().workers]


class Pin(Protocol):
    """`direct` or `blocking`."""

    __name__: str

    def __call__(self, function: F, /) -> F: ...


PINS = pytest.mark.parametrize("pin", [direct, blocking], ids=["direct", "blocking"])


def first_of_none(item: object) -> str:
    return "the only key"


class Unprintable:
    def __str__(self) -> str:
        raise LookupError("not to be printed")

    __repr__ = __str__


class Boom(BaseException):
    pass


def raiser(error: BaseException) -> Callable[[Any], None]:
    def handler(item: Any) -> None:
        raise error

    return handler


class DemandedSource(EndlessSource):
    """Waits for demand, exceeds it by up to `excess` items, and does not end."""

    def __init__(self, items: Sequence[Any], *, excess: int = 0) -> None:
        super().__init__(items)
        self.excess = excess
        self.granted = self.given = 0
        self._more = trio.Event()

    def add_demand(self, count: int, /) -> None:
        self.granted += count
        self._more.set()

    async def receive_batch(self, limit: int, /) -> list[Any]:
        while self.rest and self.granted <= self.given:
            self._more = trio.Event()
            await self._more.wait()
        batch = await super().receive_batch(self.granted - self.given + self.excess)
        self.given += len(batch)
        return batch


ERRORS: list[BaseException] = [
    ValueError("plain"),
    trio.TooSlowError("timeout"),
    trio.EndOfChannel("not of the source"),
    ExceptionGroup("group", [ValueError("leaf")]),
    ExceptionGroup("outer", [ExceptionGroup("inner", [ValueError("leaf")])]),
    ExceptionGroup("mixed", [ValueError("a"), KeyError("b")]),
]
FATAL: list[BaseException] = [
    Boom("outside Exception"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    BaseExceptionGroup("mixed", [Boom("a"), ValueError("b")]),
]
