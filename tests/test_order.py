"""The order in which processors see what has happened to each aggregate, whatever the scheduler makes of it."""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from chain_domain import Chain, Note, Notebook, Noted, Step, Stepped, registry_of
from support import interleaving
from test_catch_up import DurableStore, chain
from trio.testing import MockClock

from trio_wow import (
    App,
    CommandGateway,
    DomainEvent,
    StateEvent,
    event_processor,
    on_event,
    on_state_event,
    projection,
    saga,
)
from trio_wow.buses import InMemoryCommandBus, InMemoryDomainEventBus, InMemoryStateEventBus
from trio_wow.dispatch import CommandDispatcher, CommandResults, EventDispatcher, ProjectionDispatcher, SagaDispatcher
from trio_wow.domain import Domain
from trio_wow.errors import AdmissionClosedError
from trio_wow.eventsourcing import AggregateRepository, InMemoryEventStore
from trio_wow.execution import KeyedExecutor
from trio_wow.messages import AggregateId
from trio_wow.runtime import Runtime

COMMANDS = 1_000
CHAINS = "abc"
SENDERS = 5
DOMAIN = Domain([Chain, Notebook])

Seen = defaultdict[tuple[str, str], list[int]]
"""The versions that each function has seen of each aggregate, in the order in which they came."""


class Watching:
    """Waits as long as chance has it, before and after it takes note of what it is called for."""

    def __init__(self, rng: random.Random, seen: Seen) -> None:
        self.rng = rng
        self.seen = seen

    async def pause(self) -> None:
        chance = self.rng.random()
        if chance < 0.04:
            await trio.sleep(self.rng.uniform(0.001, 0.1))  # never two alike: their order would be chance
        elif chance < 0.3:
            await trio.lowlevel.checkpoint()

    async def see(self, function: str, message: DomainEvent[Any] | StateEvent[Any]) -> None:
        await self.pause()
        self.seen[function, message.aggregate_id.id].append(message.version)
        await self.pause()


@projection
class View(Watching):
    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> None:
        await self.see("projection", event)

    @on_state_event
    async def of(self, event: StateEvent[Chain]) -> None:
        assert len(event.state.steps) == event.version
        await self.see("projection of states", event)


@event_processor
class Mails(Watching):
    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> None:
        await self.see("event processor", event)

    @on_state_event
    async def of(self, event: StateEvent[Chain]) -> None:
        assert len(event.state.steps) == event.version
        await self.see("event processor of states", event)


@saga
class Notes(Watching):
    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> Note | None:
        await self.see("saga", event)
        return Note(event.aggregate_id.id, str(event.version)) if event.version % 10 == 0 else None

    @on_state_event
    async def of(self, event: StateEvent[Chain]) -> None:
        await self.see("saga of states", event)


IN_MEMORY = ["projection", "projection of states"]
FUNCTIONS = [f"{kind}{what}" for kind in ("projection", "event processor", "saga") for what in ("", " of states")]


class Pausing(DurableStore):
    """A store whose appends take as long as chance has it."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(DOMAIN.serializer)
        self.watching = Watching(rng, defaultdict(list))

    async def append(self, stream: Any) -> None:
        await self.watching.pause()
        await super().append(stream)
        await self.watching.pause()


def without_checkpoints(store: InMemoryEventStore, processors: Sequence[object]) -> list[Any]:
    """Return the components of an application whose processors get what is published, and nothing else."""
    commands, events, states = InMemoryCommandBus(), InMemoryDomainEventBus(), InMemoryStateEventBus()
    results, repository = CommandResults(), AggregateRepository(DOMAIN, store)
    registry = registry_of(DOMAIN, *processors)
    options: dict[str, Any] = {"states": states, "repository": repository}
    return [
        CommandDispatcher(DOMAIN, commands, store, events, state_events=states, results=results),
        EventDispatcher(registry, events, **options),
        ProjectionDispatcher(registry, events, **options),
        SagaDispatcher(registry, events, commands, results=results, **options),
        CommandGateway(DOMAIN, commands, results=results),
    ]


async def serve_commands(runtime: Runtime, gateway: CommandGateway, rest: list[Step], until: int) -> None:
    """Serve, and send commands until so many are left; what is refused stays."""

    async def send() -> None:
        while len(rest) > until:
            command = rest.pop()
            try:
                await gateway.send(command)
            except AdmissionClosedError:
                rest.append(command)
                return
        if until:
            runtime.request_stop()

    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.serve)
        async with trio.open_nursery() as senders:
            for _ in range(SENDERS):
                senders.start_soon(send)
        runtime.request_stop()


@pytest.mark.parametrize(
    ("seed", "checkpoints", "runtimes"),
    [(0, True, 1), (1, True, 3), (2, True, 3), (3, False, 1), (4, False, 3)],
)
async def test_each_function_sees_each_aggregates_versions_in_order_in_every_interleaving(
    seed: int, checkpoints: bool, runtimes: int, autojump_clock: MockClock
) -> None:
    rng, seen = random.Random(seed), Seen(list)
    store = Pausing(rng)
    rest = [Step(rng.choice(CHAINS), number) for number in range(COMMANDS)]
    with interleaving(rng.randrange(10**9)):
        for number in range(1, runtimes + 1):
            processors = [View(rng, seen), Mails(rng, seen), Notes(rng, seen)]
            executor = KeyedExecutor(workers=(1, 2, 8)[number % 3], max_in_flight=(16, 3, 1)[(seed + number) % 3])
            options: dict[str, Any] = {"executor": executor, "signals": False, "shutdown_quiet_period": 0}
            if checkpoints:
                for function in IN_MEMORY:  # made anew from the first event
                    for id in CHAINS:
                        seen.pop((function, id), None)
                app = App(DOMAIN, processors, store=store)
                runtime, gateway = app.runtime(**options), app.gateway
            else:
                components = without_checkpoints(store, processors)
                runtime, gateway = Runtime(components, **options), components[-1]
            await serve_commands(runtime, gateway, rest, rng.randrange(1, len(rest)) if number < runtimes else 0)
    streams = [record.stream for record in await store.read_all(0, 2 * COMMANDS)]
    versions = {id: sum(stream.aggregate_id == chain(id) for stream in streams) for id in CHAINS}
    assert sum(versions.values()) == COMMANDS
    expected = {(function, id): list(range(1, versions[id] + 1)) for function in FUNCTIONS for id in CHAINS}
    assert seen == expected, f"seed {seed}"
    # The commands of a saga keep the order of the events that they answer.
    for id in CHAINS:
        notes = [stream.events[0] for stream in streams if stream.aggregate_id == AggregateId("notes", "notebook", id)]
        assert notes == [Noted(str(version)) for version in range(10, versions[id] + 1, 10)], f"seed {seed}"
