"""Ways to handle items in order per key and side by side across keys: trio-wow's, and what it is measured against.

All of them take the same `Load` and promise the same: the items of one key one at a time and in order, at most `WINDOW`
items unfinished, a failing handler ends the run. The hand-written ones are what one would write without a library and
then tune, for any number of keys. They bring nothing else that an executor has to have: fair turns, context variables
per item, a definite end for each item when something fails.

Two are packages. `pykka` gives every key an actor with a thread of its own, so it is asked for at most 100 keys.
`nigrains` has virtual actors for asyncio: a grain is called by its name, made at its first call, and handles one call
at a time, which is the same promise. Two differences: a caller waits for the answer, so `WINDOW` callers make the
window; and a grain outlives its calls until it has been idle for minutes, so memory grows with the number of keys.
"""

import asyncio
import math
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import trio
from attrs import frozen

from trio_wow.execution import KeyedExecutor

try:
    import pykka
except ImportError:
    HAS_PYKKA = False
else:
    HAS_PYKKA = True

try:
    import nigrains
except ImportError:
    HAS_NIGRAINS = False
else:
    HAS_NIGRAINS = True

Item = tuple[int, int]  # key, number
T = TypeVar("T")

WINDOW = 256


@frozen
class Load:
    """What each contender is given."""

    items: Sequence[Item]
    key: Callable[[Item], Hashable]
    handler: Callable[[Item], Any]
    awaits: bool
    """Whether the handler is an `async def` function."""


@frozen
class Contender:
    """Something that handles a load."""

    name: str
    run: Callable[[Load], Awaitable[None]] | Callable[[Load], None]
    library: Literal["trio", "asyncio", "none"]
    """What runs it, and so whose checkpoint a handler that waits has to use."""
    keyed: bool = True
    """Whether it promises order per key; a floor does not."""
    most_keys: float = math.inf
    installed: bool = True

    @property
    def about(self) -> str:
        """What it is, in a line."""
        return (self.run.__doc__ or "").splitlines()[0]


class Batches(Generic[T]):
    """A `BatchSource` of a sequence; a lazy one, such as a range, is made up only as it is taken."""

    def __init__(self, items: Sequence[T]) -> None:
        self._items = items
        self._taken = 0

    async def receive_batch(self, limit: int, /) -> Sequence[T]:
        await trio.lowlevel.checkpoint_if_cancelled()  # the contract of a source that has items at hand
        batch = self._items[self._taken : self._taken + limit]
        if not batch:
            raise trio.EndOfChannel
        self._taken += len(batch)
        return batch


async def executor_batches(load: Load) -> None:
    """KeyedExecutor, fed by a BatchSource."""
    async with KeyedExecutor(max_in_flight=WINDOW) as executor:
        await executor.dispatch(Batches(load.items), key=load.key, handler=load.handler)


async def executor_channel(load: Load) -> None:
    """KeyedExecutor, fed by a task through a memory channel."""
    async with trio.open_nursery() as nursery:
        send, receive = trio.open_memory_channel[Item](WINDOW)
        nursery.start_soon(_feed, send, load.items)
        async with receive, KeyedExecutor(max_in_flight=WINDOW) as executor:
            await executor.dispatch(receive, key=load.key, handler=load.handler)


async def _feed(send: trio.MemorySendChannel[Item], items: Sequence[Item]) -> None:
    async with send:
        for item in items:
            try:
                send.send_nowait(item)
            except trio.WouldBlock:
                await send.send(item)


class _Window(Protocol):
    """Room for `WINDOW` unfinished items."""

    async def acquire(self) -> object: ...

    def release(self) -> None: ...


class _Counter:
    """What an `asyncio.Semaphore` does, for one feeder and 0.3 µs less an item."""

    __slots__ = ("_free", "_room")

    def __init__(self) -> None:
        self._free = WINDOW
        self._room: asyncio.Future[None] | None = None

    async def acquire(self) -> None:
        if not self._free:
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        self._free -= 1

    def release(self) -> None:
        self._free += 1
        if self._room is not None:
            if not self._room.done():  # a failed TaskGroup may have cancelled it
                self._room.set_result(None)
            self._room = None


async def asyncio_lock(load: Load) -> None:
    """Asyncio: a lock per key and a task per item.

    Tasks start in the order in which they are made, and the lock is fair. Locks are never removed: that is the fastest,
    and memory grows with the number of keys.
    """
    key, handler, awaits = load.key, load.handler, load.awaits
    window = asyncio.Semaphore(WINDOW)
    locks: defaultdict[Hashable, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def handle(item: Item) -> None:
        async with locks[key(item)]:
            if awaits:
                await handler(item)
            else:
                handler(item)
        window.release()

    async with asyncio.TaskGroup() as group:
        for item in load.items:
            await window.acquire()
            group.create_task(handle(item))


async def asyncio_deque(load: Load) -> None:
    """Asyncio: a deque and a task per active key.

    The `TaskGroup` makes a failing handler end the run. Bare `create_task` takes about 0.7 µs less a task, and loses
    that error.
    """
    await _asyncio_deque(load, asyncio.Semaphore(WINDOW))


async def asyncio_counter(load: Load) -> None:
    """Asyncio: the same, with a counter of its own in place of the semaphore."""
    await _asyncio_deque(load, _Counter())


async def _asyncio_deque(load: Load, window: _Window) -> None:
    key, handler, awaits = load.key, load.handler, load.awaits
    queues: dict[Hashable, deque[Item]] = {}

    async def drain(name: Hashable, queue: deque[Item]) -> None:
        while queue:
            if awaits:
                await handler(queue.popleft())
            else:
                handler(queue.popleft())
            window.release()
        del queues[name]

    async with asyncio.TaskGroup() as group:
        for item in load.items:
            await window.acquire()
            name = key(item)
            queue = queues.get(name)
            if queue is None:
                queues[name] = queue = deque((item,))
                group.create_task(drain(name, queue))
            else:
                queue.append(item)


async def trio_channel(load: Load) -> None:
    """Trio: a memory channel and a task per active key.

    A task leaves when its channel is empty. Tasks that stay and wait are faster with 100 keys, and ten times slower
    when every item has its own.
    """
    key, handler, awaits = load.key, load.handler, load.awaits
    window = trio.Semaphore(WINDOW)
    channels: dict[Hashable, trio.MemorySendChannel[Item]] = {}

    async def drain(name: Hashable, receive: trio.MemoryReceiveChannel[Item]) -> None:
        while True:
            try:
                item = receive.receive_nowait()
            except trio.WouldBlock:
                del channels[name]
                return
            if awaits:
                await handler(item)
            else:
                handler(item)
            window.release()

    async with trio.open_nursery() as nursery:
        for item in load.items:
            try:
                window.acquire_nowait()
            except trio.WouldBlock:
                await window.acquire()
            name = key(item)
            send = channels.get(name)
            if send is None:
                send, receive = trio.open_memory_channel[Item](math.inf)
                channels[name] = send
                nursery.start_soon(drain, name, receive)
            send.send_nowait(item)


async def trio_deque(load: Load) -> None:
    """Trio: a deque and a task per active key."""
    key, handler, awaits = load.key, load.handler, load.awaits
    window = trio.Semaphore(WINDOW)
    queues: dict[Hashable, deque[Item]] = {}

    async def drain(name: Hashable, queue: deque[Item]) -> None:
        while queue:
            if awaits:
                await handler(queue.popleft())
            else:
                handler(queue.popleft())
            window.release()
        del queues[name]

    async with trio.open_nursery() as nursery:
        for item in load.items:
            try:
                window.acquire_nowait()
            except trio.WouldBlock:
                await window.acquire()
            name = key(item)
            queue = queues.get(name)
            if queue is None:
                queues[name] = queue = deque((item,))
                nursery.start_soon(drain, name, queue)
            else:
                queue.append(item)


def pykka_actors(load: Load) -> None:
    """pykka: an actor with a thread per key.

    An actor calls plain functions, so it drives a coroutine by hand.
    """
    key, handler, awaits = load.key, load.handler, load.awaits
    window = threading.Semaphore(WINDOW)
    failures: list[Exception] = []

    class ItemActor(pykka.ThreadingActor):
        def on_receive(self, message: Item) -> None:
            try:
                if awaits:
                    _drive(handler(message))
                else:
                    handler(message)
            except Exception as error:
                failures.append(error)
            finally:
                window.release()

    actors: dict[Hashable, pykka.ActorRef[ItemActor]] = {}
    for item in load.items:
        window.acquire()
        if failures:
            break
        name = key(item)
        actor = actors.get(name)
        if actor is None:
            actors[name] = actor = ItemActor.start()
        actor.tell(item)
    stopping = [actor.stop(block=False) for actor in actors.values()]  # each handles what it has been told before
    pykka.get_all(stopping)
    if failures:
        raise failures[0]


async def nigrains_grains(load: Load) -> None:
    """nigrains: a grain per key, called by 256 tasks.

    Grains are called by identity, not by reference: a reference made for each item takes twice as long.
    """
    key, handler, awaits = load.key, load.handler, load.awaits

    class ItemGrain(nigrains.Grain):
        grain_type = "item"

        async def handle(self, item: Item) -> None:
            if awaits:
                await handler(item)
            else:
                handler(item)

    runtime = nigrains.Runtime()
    runtime.register(ItemGrain)
    items = iter(load.items)

    async def call() -> None:
        # Taking an item and joining the queue of its grain is one step, so the items of a key stay in order.
        for item in items:
            await runtime.call(nigrains.GrainId("item", str(key(item))), "handle", item)

    async with runtime, asyncio.TaskGroup() as group:
        for _ in range(WINDOW):
            group.create_task(call())


def call_loop(load: Load) -> None:
    """Floor: a loop that calls the handler, and drives its coroutine."""
    handler = load.handler
    if load.awaits:
        for item in load.items:
            _drive(handler(item))
    else:
        for item in load.items:
            handler(item)


def _drive(coroutine: Any) -> None:
    try:
        while True:
            coroutine.send(None)
    except StopIteration:
        pass


async def start_soon(load: Load) -> None:
    """Floor: `nursery.start_soon` for each item, a nursery for each window, no order."""
    handler = load.handler
    if load.awaits:
        run = handler
    else:

        async def run(item: Item) -> None:
            handler(item)

    for begin in range(0, len(load.items), WINDOW):
        async with trio.open_nursery() as nursery:
            for item in load.items[begin : begin + WINDOW]:
                nursery.start_soon(run, item)


CONTENDERS = (
    Contender("executor-batch", executor_batches, "trio"),
    Contender("executor-channel", executor_channel, "trio"),
    Contender("asyncio-lock", asyncio_lock, "asyncio"),
    Contender("asyncio-deque", asyncio_deque, "asyncio"),
    Contender("asyncio-counter", asyncio_counter, "asyncio"),
    Contender("trio-channel", trio_channel, "trio"),
    Contender("trio-deque", trio_deque, "trio"),
    Contender("pykka", pykka_actors, "none", most_keys=100, installed=HAS_PYKKA),
    Contender("nigrains", nigrains_grains, "asyncio", installed=HAS_NIGRAINS),
    Contender("call-loop", call_loop, "none", keyed=False),
    Contender("start-soon", start_soon, "trio", keyed=False),
)
