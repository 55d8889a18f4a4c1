"""Chains of commands and events through a saga: what a hop costs, and that memory does not grow with their number.

Commands from outside each start a chain: its event makes the saga send the next command, to another aggregate, and so
on. By default 32,000 commands and 32 hops, about a million. All that is in memory is what is under way: the store
forgets a chain that has ended, and no aggregate's ID comes again.

Two routes: `memory`, where all is sent inside the process, and `local-first`, where a second copy of every message goes
through a loopback in place of a broker and comes back to the receiver that has taken the first one.

How it measures: the clock starts inside the running loop. At each hundredth of the chains it notes the process's memory
(resident, from /proc) and what the dispatches hold. Every chain is checked: a step lost, repeated or out of order ends
the program with status 1. Run it with `--quick` to see that it works.
"""

import argparse
import gc
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import asdict, define, field, frozen

from keyed_dispatch import WrongResultError, at_least_one, check_json, write_json
from trio_wow import DomainEvent, aggregate, on_command, on_event, on_sourcing, saga
from trio_wow.buses import (
    InMemoryCommandBus,
    InMemoryDomainEventBus,
    LocalFirstCommandBus,
    LocalFirstDomainEventBus,
    MessageExchange,
    Subscription,
)
from trio_wow.dispatch import CommandDispatcher, CommandResults, FunctionRegistry, SagaDispatcher
from trio_wow.domain import Domain
from trio_wow.eventsourcing import InMemoryEventStore
from trio_wow.execution import KeyedExecutor
from trio_wow.gateway import CommandGateway
from trio_wow.messages import AggregateId, DomainEventStream
from trio_wow.runtime import Runtime

COMMANDS, HOPS, SENDERS, WINDOW = 32_000, 32, 8, 256
QUICK_COMMANDS = 300
ROUTES = ("memory", "local-first")
SAMPLES = 100


@frozen
class Step:
    id: str
    number: int = 0


@frozen
class Stepped:
    number: int


@aggregate(context="hops")
@define
class Link:
    id: str
    number: int = -1

    @on_command(exists=False)
    def step(self, command: Step) -> Stepped:
        return Stepped(command.number)

    @on_sourcing
    def stepped(self, event: Stepped) -> None:
        self.number = event.number


def link(chain: str, number: int) -> Step:
    return Step(f"{chain}/{number}", number)


def chain_of(aggregate_id: AggregateId) -> str:
    return aggregate_id.id.partition("/")[0]


@saga
class Following:
    """Answers each step with the next one, so many times."""

    def __init__(self, hops: int) -> None:
        self.hops = hops

    @on_event
    def stepped(self, event: DomainEvent[Stepped]) -> Step | None:
        number = event.body.number
        return link(chain_of(event.aggregate_id), number + 1) if number < self.hops else None


class ForgetfulStore:
    """An event store that forgets a chain when it has all of its links."""

    def __init__(self, links: int) -> None:
        self._links = links
        self._chains: dict[str, InMemoryEventStore] = {}
        self._next: dict[str, int] = {}
        self.completed = 0
        self.steps = 0
        self.on_append: Callable[[], None] | None = None

    @property
    def under_way(self) -> int:
        return len(self._chains)

    async def append(self, stream: DomainEventStream) -> None:
        chain, number = chain_of(stream.aggregate_id), stream.events[0].number
        if number != self._next.pop(chain, 0):
            raise WrongResultError(f"step {number} of chain {chain} came out of turn")
        if number == 0:
            self._chains[chain] = InMemoryEventStore(DOMAIN.serializer)
        await self._chains[chain].append(stream)
        self.steps += 1
        if number + 1 == self._links:
            del self._chains[chain]
            self.completed += 1
        else:
            self._next[chain] = number + 1
        if self.on_append is not None:
            self.on_append()

    async def load(
        self, aggregate_id: AggregateId, *, after: int = 0, until: int | None = None
    ) -> Sequence[DomainEventStream]:
        chain = self._chains.get(chain_of(aggregate_id))
        return () if chain is None else await chain.load(aggregate_id, after=after, until=until)

    async def load_request(self, aggregate_id: AggregateId, request_id: str) -> DomainEventStream | None:
        chain = self._chains.get(chain_of(aggregate_id))
        return None if chain is None else await chain.load_request(aggregate_id, request_id)

    async def read_all(self, after: int, limit: int) -> Sequence[Any]:
        raise AssertionError("nobody catches up here")

    async def version_at(self, aggregate_id: AggregateId, position: int) -> int:
        raise AssertionError("nobody catches up here")


DOMAIN = Domain([Link])


class Loopback:
    """A distributed bus with one node. What is sent waits in a queue for each group, as in a broker."""

    def __init__(self) -> None:
        self._groups: dict[str, LoopbackReceiver] = {}

    @property
    def waiting(self) -> int:
        return sum(len(each.queue) for each in self._groups.values())

    async def send(self, message: Any) -> None:
        await self.send_if_subscribed(message)

    async def send_if_subscribed(self, message: Any) -> bool:
        await trio.lowlevel.checkpoint()
        for receiver in self._groups.values():
            receiver.put(message.routed())
        return bool(self._groups)

    def receiver(self, subscription: Subscription) -> "LoopbackReceiver":
        receiver = self._groups[subscription.group] = LoopbackReceiver()
        return receiver


class LoopbackReceiver:
    def __init__(self) -> None:
        self.queue: deque[Any] = deque()
        self.ready = trio.Event()
        self.ready.set()
        self._arrived = trio.Event()
        self._closed = False

    def put(self, message: Any) -> None:
        self.queue.append(message)
        self._arrived.set()

    async def receive_batch(self, limit: int, /) -> Sequence[MessageExchange[Any]]:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self.queue:
            if self._closed:
                raise trio.EndOfChannel
            self._arrived = trio.Event()
            await self._arrived.wait()
        return [MessageExchange(self.queue.popleft(), None) for _ in range(min(limit, len(self.queue)))]

    def open(self) -> None:
        pass

    def close(self) -> None:
        self._closed = True
        self._arrived.set()

    def abandon(self) -> None:
        self.close()


@frozen
class Sample:
    """One moment.

    Attributes:
        completed: chains.
        resident: memory of the process, in MiB; 0 where /proc does not tell.
        under_way: chains that have begun and not ended.
        in_flight: the most unfinished messages in one dispatch.
        overdraft: the most beyond a window in one dispatch.
        leases: open operations.
        waiting: copies in the loopback.
    """

    completed: int
    resident: float
    under_way: int
    in_flight: int
    overdraft: int
    leases: int
    waiting: int


@define
class Run:
    """What came of it.

    Attributes:
        route: one of `ROUTES`.
        steps: commands that were handled.
        seconds: how long all of them took.
        samples: at each so many completed chains.
    """

    route: str
    steps: int = 0
    seconds: float = 0.0
    samples: list[Sample] = field(factory=list)

    def most(self, name: str) -> Any:
        """Return the most that any sample has of something."""
        return max(asdict(each)[name] for each in self.samples)


def resident() -> float:
    """Return the memory of this process in MiB."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if statm.exists() else 0.0


async def run_chains(route: str, commands: int, hops: int, *, senders: int, window: int, every: int) -> Run:
    """Run all chains; take a sample at each `every` steps."""
    run = Run(route)
    store = ForgetfulStore(hops + 1)
    loopbacks = [Loopback(), Loopback()] if route == "local-first" else []
    command_bus: Any = InMemoryCommandBus()
    event_bus: Any = InMemoryDomainEventBus()
    if loopbacks:
        command_bus = LocalFirstCommandBus(command_bus, loopbacks[0])
        event_bus = LocalFirstDomainEventBus(event_bus, loopbacks[1])
    results = CommandResults()
    registry = FunctionRegistry(DOMAIN)
    registry.register(Following(hops))
    executor = KeyedExecutor(max_in_flight=window)
    gateway = CommandGateway(DOMAIN, command_bus, results=results)
    runtime = Runtime(
        [
            CommandDispatcher(DOMAIN, command_bus, store, event_bus, results=results),
            SagaDispatcher(registry, event_bus, command_bus, results=results, max_hops=hops),
            gateway,
        ],
        executor=executor,
        signals=False,
        shutdown_quiet_period=0,
    )

    def sample() -> None:
        if store.steps % every:
            return
        dispatches = executor.statistics().dispatches
        run.samples.append(
            Sample(
                completed=store.completed,
                resident=resident(),
                under_way=store.under_way,
                in_flight=max(each.in_flight for each in dispatches),
                overdraft=max(each.overdraft for each in dispatches),
                leases=len(runtime.statistics().leases),
                waiting=sum(each.waiting for each in loopbacks),
            )
        )

    numbers = iter(range(commands))

    async def send() -> None:
        for number in numbers:
            await gateway.send(link(str(number), 0))

    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.serve)
        gc.collect()
        store.on_append = sample
        started = time.perf_counter()
        async with trio.open_nursery() as sending:
            for _ in range(senders):
                sending.start_soon(send)
        runtime.request_stop()
    run.seconds = time.perf_counter() - started
    run.steps = store.steps
    if (store.completed, store.under_way, store.steps) != (commands, 0, commands * (hops + 1)):
        raise WrongResultError(f"{store.completed} of {commands} chains were completed, in {store.steps} steps")
    return run


def show(run: Run, window: int) -> None:
    first, last = run.samples[len(run.samples) // 10], run.samples[-1]
    print(f"  {run.route}: {run.steps:,} commands in {run.seconds:.1f} s, {run.seconds / run.steps * 1e6:.0f} µs each")
    print(
        f"    resident {first.resident:.0f} MiB after {first.completed:,} chains, {last.resident:.0f} MiB at the end, "
        f"{run.most('resident'):.0f} MiB at most"
    )
    print(
        f"    at most, with a window of {window}: {run.most('in_flight')} in flight in a dispatch, "
        f"{run.most('overdraft')} of them overdraft; {run.most('under_way')} chains under way; "
        f"{run.most('leases')} open operations; {run.most('waiting')} copies in the loopback"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--commands", type=at_least_one, help=f"from outside ({COMMANDS}; with --quick {QUICK_COMMANDS})"
    )
    parser.add_argument("--hops", type=at_least_one, default=HOPS, help=f"of each chain, through the saga ({HOPS})")
    parser.add_argument("--senders", type=at_least_one, default=SENDERS, help=f"tasks that send ({SENDERS})")
    parser.add_argument("--window", type=at_least_one, default=WINDOW, help=f"of each dispatch ({WINDOW})")
    parser.add_argument("--route", choices=ROUTES, action="append", help="one of the two alone")
    parser.add_argument("--quick", action="store_true", help="few commands")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples too")
    options = parser.parse_args(arguments)
    check_json(parser, options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    commands = options.commands or (QUICK_COMMANDS if options.quick else COMMANDS)
    every = max(1, commands * (options.hops + 1) // SAMPLES)
    print(f"{commands:,} chains of {options.hops} hops; Python {platform.python_version()}, Trio {trio.__version__}")
    runs = []
    for route in options.route or ROUTES:
        try:
            how = {"senders": options.senders, "window": options.window, "every": every}
            run = trio.run(partial(run_chains, route, commands, options.hops, **how))
        except WrongResultError as wrong:
            print(f"wrong: {wrong}", file=sys.stderr)
            return 1
        show(run, options.window)
        runs.append(run)
    write_json(options, [asdict(run) for run in runs])
    return 0


if __name__ == "__main__":
    sys.exit(main())
