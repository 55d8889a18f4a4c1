"""Two nodes with local-first buses: each command has its effect once, whatever the network and the nodes do."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from chain_domain import Answering, Chain, Notebook, Step, Stepped, Steps, registry_of
from distributed_support import Network
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import collect, interleaving
from trio.testing import wait_all_tasks_blocked

from trio_wow import App, DomainEvent, Settings, Stage, event_processor, on_event, on_state_event, projection
from trio_wow.buses import (
    DistributedBuses,
    InMemoryCommandBus,
    InMemoryDomainEventBus,
    LocalFirstCommandBus,
    LocalFirstDomainEventBus,
    MessageExchange,
)
from trio_wow.dispatch import CommandDispatcher, CommandResults, EventDispatcher, FilterChain, Handler, Handling
from trio_wow.domain import Domain
from trio_wow.errors import ShutdownDeadlineError
from trio_wow.eventsourcing import EventStore, InMemoryEventStore
from trio_wow.execution import KeyedExecutor
from trio_wow.messages import AggregateId, CommandMessage, DomainEventStream
from trio_wow.runtime import Runtime

DOMAIN = Domain([Chain, Notebook])


@event_processor
class Log:
    """Writes down the steps that it is told of."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    @on_event
    def stepped(self, event: DomainEvent[Stepped]) -> None:
        self.steps.append(event.body.number)


@event_processor
class States:
    @on_state_event
    def stepped(self, state: Chain) -> None:
        pass


@projection
class SlowView:
    def __init__(self) -> None:
        self.steps: list[int] = []

    @on_event
    async def stepped(self, event: Stepped) -> None:
        await trio.sleep(1)
        self.steps.append(event.number)


class Gate:
    """A filter that holds the commands of one node."""

    def __init__(self) -> None:
        self.held = 0
        self.opened = trio.Event()
        self.opened.set()

    def close(self) -> None:
        if self.opened.is_set():
            self.opened = trio.Event()

    async def __call__(self, handling: Handling, proceed: Handler) -> object:
        self.held += 1
        await self.opened.wait()
        self.held -= 1
        return await proceed(handling)


class Site:
    """One node: commands, an event group that both nodes share, and one of its own."""

    def __init__(
        self,
        name: str,
        store: EventStore,
        commands: Network,
        events: Network,
        *,
        window: int = 4,
        handles: bool = True,
    ) -> None:
        self.gate = Gate()
        self.results = CommandResults()
        self.commands = LocalFirstCommandBus(InMemoryCommandBus(), commands.bus(name))
        self.events = LocalFirstDomainEventBus(InMemoryDomainEventBus(), events.bus(name))
        self.shared, self.own = Log(), Log()
        self.dispatcher = CommandDispatcher(
            DOMAIN, self.commands, store, self.events, results=self.results, filters=FilterChain([self.gate])
        )
        self.executor = KeyedExecutor(max_in_flight=window)
        parts: list[Any] = [self.dispatcher] if handles else []
        parts.append(EventDispatcher(registry_of(DOMAIN, self.shared), self.events, name="shared"))
        parts.append(EventDispatcher(registry_of(DOMAIN, self.own), self.events, name=f"group of {name}"))
        self.runtime = Runtime(
            parts, executor=self.executor, signals=False, shutdown_quiet_period=0, shutdown_timeout=1_000
        )


class World:
    """Two nodes with one store."""

    def __init__(self, nursery: trio.Nursery, *, handles: bool = True, window: int = 4, store: Any = None) -> None:
        self.nursery = nursery
        self.store = store if store is not None else InMemoryEventStore(DOMAIN.serializer)
        self.commands, self.events = Network(), Network()
        self.a = Site("A", self.store, self.commands, self.events, handles=handles, window=window)
        self.b = Site("B", self.store, self.commands, self.events)

    async def settle(self) -> None:
        """Let everything come to rest, and see that all was acknowledged."""
        for network in (self.commands, self.events, self.commands, self.events):
            network.let_go()
            await wait_all_tasks_blocked()
            network.redeliver()
            await wait_all_tasks_blocked()
        assert self.commands.is_done
        assert self.events.is_done

    async def steps(self, id: str = "a") -> list[int]:
        streams = await self.store.load(AggregateId("chains", "chain", id))
        return [event.number for each in streams for event in each.events]


@asynccontextmanager
async def a_world(**options: Any) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        world = World(nursery, **options)
        for site in (world.a, world.b):
            await nursery.start(site.runtime.serve)
        yield world
        world.a.gate.opened.set()
        for site in (world.a, world.b):
            site.runtime.request_stop()


def step(number: int, id: str = "a") -> CommandMessage:
    return DOMAIN.command_message(Step(id, number))


async def send(site: Site, message: CommandMessage) -> bool:
    """Send, and once more if the network is down, as a careful sender does."""
    while True:
        try:
            return await site.commands.send_with_receipt(message)
        except OSError:
            await trio.lowlevel.checkpoint()


ROWS = ["no local receiver", "receiver present", "receiver closes meanwhile", "window 0", "quiescing"]


@pytest.mark.parametrize("network", ["plain", "fails", "delays", "duplicates", "redelivers"])
@pytest.mark.parametrize("copies_to", ["A", "B"])
@pytest.mark.parametrize("row", ROWS)
async def test_fs22_the_decision_table(row: str, copies_to: str, network: str) -> None:
    async with a_world(handles=row != "no local receiver") as world:
        a, commands = world.a, world.commands
        commands.node_of = lambda _: copies_to
        commands.failing = 3 if network == "fails" else 0
        commands.delay = 100.0 if network == "delays" else 0.0
        commands.copies = 2 if network == "duplicates" else 1
        commands.forgetting = 4 if network == "redelivers" else 0
        receipts: list[bool] = []

        async def send_ten() -> None:
            for message in map(step, range(10)):
                receipt = await send(a, message)
                receipts.append(receipt)

        if row in ("receiver closes meanwhile", "window 0", "quiescing"):
            a.gate.close()
        if row == "quiescing":
            await send(a, step(0, "holds the stop"))
            await wait_all_tasks_blocked()
            a.runtime.request_stop()
            await wait_all_tasks_blocked()
        world.nursery.start_soon(send_ten)
        await wait_all_tasks_blocked()
        if row == "receiver closes meanwhile":
            assert 0 < len(receipts) < 10
            a.dispatcher.quiesce()
        elif row == "window 0":
            assert 0 < len(receipts) < 10
        await wait_all_tasks_blocked()
        a.gate.opened.set()
        await world.settle()

        if row in ("receiver present", "window 0"):
            assert receipts == [True] * 10
        elif row in ("no local receiver", "quiescing"):
            assert receipts == [False] * 10
        else:
            assert receipts == sorted(receipts, reverse=True)
            assert set(receipts) == {True, False}
        sent = [each for each in commands.sent if each.aggregate_id.id == "a"]
        assert [each.headers["wow-local-first"] == "true" for each in sent] == receipts
        assert Counter(await world.steps()) == Counter(range(10))
        if len(set(receipts)) == 1:
            assert await world.steps() == list(range(10))
        for log in (a.own.steps + a.shared.steps + world.b.shared.steps, world.b.own.steps):
            assert set(log) >= set(range(10)) - ({0} if row == "quiescing" else set())
        # What B gets before A has stored it, both run and publish, though it is stored once.
        if row == "receiver present" and network != "duplicates" and (copies_to == "A" or network == "delays"):
            assert a.shared.steps + world.b.shared.steps == a.own.steps == world.b.own.steps == list(range(10))
        assert len(commands.group("command-dispatcher").acknowledged) >= len(sent)


class StopsAtAppend(InMemoryEventStore):
    """Holds who appends, before or after it is done."""

    def __init__(self, after: bool) -> None:
        super().__init__(DOMAIN.serializer)
        self.after = after
        self.holding = True
        self.released = trio.Event()

    async def append(self, stream: DomainEventStream) -> None:
        if self.after:
            await super().append(stream)
        if self.holding:
            self.holding = False
            await self.released.wait()
        if not self.after:
            await super().append(stream)


class TestACopyOfItsOwn:
    async def test_is_acknowledged_only_when_the_local_run_has_ended(self) -> None:
        async with a_world() as world:
            world.commands.node_of = lambda _: "A"
            world.a.gate.close()
            assert await send(world.a, step(1))
            await wait_all_tasks_blocked()
            group = world.commands.group("command-dispatcher")
            assert (len(group.unacknowledged), group.acknowledged, world.a.gate.held) == (1, [], 1)
            world.a.gate.opened.set()
            await wait_all_tasks_blocked()
            assert len(group.acknowledged) == 1
            assert await world.steps() == [1]

    async def test_is_handled_where_the_local_run_was_not_finished(self) -> None:
        async with a_world() as world:
            world.commands.node_of = lambda _: "A"
            handle, failing = world.a.dispatcher.handle, [True]

            async def fail_once(handling: Handling, /) -> bool:
                return not failing.pop() if failing else await handle(handling)

            world.a.dispatcher.handle = fail_once  # type: ignore[method-assign]
            assert await send(world.a, step(1))
            await world.settle()
            assert await world.steps() == [1]

    @pytest.mark.parametrize("settled", [True, False])
    async def test_that_is_let_go_ends_a_wait_only_if_it_had_still_to_be_handled(self, settled: bool) -> None:
        async with a_world() as world:
            message = step(1)

            class Copy(MessageExchange[CommandMessage]):
                def is_settled(self) -> bool:
                    return settled

            exchange = Copy(message, None)
            with world.a.results.expecting(message.id) as wait:
                world.a.dispatcher._discard(exchange)
                assert wait._ended is not settled


class TestAnotherNode:
    async def test_runs_a_marked_command_that_is_not_stored_and_its_sender_is_told_of_success(self) -> None:
        async with a_world() as world:
            world.commands.node_of = lambda _: "B"
            world.a.gate.close()
            outcomes: list[Any] = []

            async def note(handling: Handling, proceed: Handler) -> object:
                await proceed(handling)
                outcomes.append(handling.result)
                return None

            world.a.dispatcher.filters.append(note)
            assert await send(world.a, step(1))
            await wait_all_tasks_blocked()
            assert await world.steps() == [1]  # by B
            world.a.gate.opened.set()
            await world.settle()
            assert await world.steps() == [1]
            (result,) = outcomes
            assert (result.error, result.version) == (None, 1)

    async def test_leaves_a_marked_command_that_is_stored(self) -> None:
        async with a_world() as world:
            world.commands.node_of = lambda _: "B"
            world.commands.delay = 100.0
            published: list[DomainEventStream] = []
            publish = world.b.events.send

            async def note(stream: DomainEventStream) -> None:
                published.append(stream)
                await publish(stream)

            world.b.events.send = note  # type: ignore[method-assign, assignment]
            assert await send(world.a, step(1))
            await wait_all_tasks_blocked()
            assert await world.steps() == [1]
            await world.settle()
            assert published == []

    async def test_publishes_nothing_when_the_other_was_first_after_all(self) -> None:
        store = StopsAtAppend(after=False)
        async with a_world(store=store) as world:
            world.commands.node_of = lambda _: "B"
            world.a.gate.close()
            assert await send(world.a, step(1))
            await wait_all_tasks_blocked()  # B is about to append
            world.a.gate.opened.set()
            await wait_all_tasks_blocked()
            assert await world.steps() == [1]
            store.released.set()
            await world.settle()
            assert await world.steps() == world.b.own.steps == [1]
            assert len(world.events.sent) == 1

    async def test_leaves_a_void_command_and_so_does_everybody(self) -> None:
        async with a_world() as world:
            message = step(1)
            message = CommandMessage(aggregate_id=message.aggregate_id, body=message.body, is_void=True)
            assert not await send(world.a, message)
            await world.settle()
            assert await world.steps() == []
            assert len(world.commands.group("command-dispatcher").acknowledged) == 1
            assert not await InMemoryCommandBus().send_if_subscribed(message)


class TestDeath:
    @pytest.mark.parametrize("at", ["mailbox", "before append", "after append"])
    @pytest.mark.parametrize("copies_to", ["A", "B"])
    async def test_of_the_node_that_took_a_command(self, at: str, copies_to: str) -> None:
        store = None if at == "mailbox" else StopsAtAppend(at == "after append")
        async with trio.open_nursery() as nursery:
            world = World(nursery, store=store)
            world.commands.node_of = lambda _: copies_to
            world.commands.delay = 100.0
            ended: list[BaseException | None] = []
            task = world.a.runtime.serve
            nursery.start_soon(collect, task, ended)
            await nursery.start(world.b.runtime.serve)
            await wait_all_tasks_blocked()
            if at == "mailbox":
                world.a.gate.close()
            assert await send(world.a, step(1))
            await wait_all_tasks_blocked()
            if copies_to == "A":
                world.commands.let_go()
                await wait_all_tasks_blocked()
                assert len(world.commands.group("command-dispatcher").unacknowledged) == 1
            world.a.runtime.force_stop()
            await wait_all_tasks_blocked()
            assert [type(error) for error in ended] == [ShutdownDeadlineError]
            await world.settle()
            assert await world.steps() == [1]
            # What was stored, not published, and left by B is for processors with a checkpoint, which read the store.
            assert world.b.own.steps == ([] if (at, copies_to) == ("after append", "B") else [1])
            world.b.runtime.request_stop()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    window=st.integers(1, 4),
    copies=st.integers(1, 2),
    node_of=st.lists(st.sampled_from(["A", "B", None]), min_size=1, max_size=5),
    moves=st.lists(
        st.sampled_from(["send", "send", "send", "fail", "forget", "redeliver", "hold", "let go", "gate", "open"]),
        max_size=30,
    ),
)
def test_whatever_happens_every_command_has_its_effect_once(
    seed: int, window: int, copies: int, node_of: list[str | None], moves: list[str]
) -> None:
    async def main() -> None:
        async with a_world(window=window) as world:
            commands = world.commands
            commands.copies = copies
            commands.node_of = lambda message: node_of[message.body.number % len(node_of)]
            number = 0
            for move in moves:
                if move == "send":
                    world.nursery.start_soon(send, world.a, step(number, str(number % 3)))
                    number += 1
                elif move == "fail":
                    commands.failing += 1
                elif move == "forget":
                    commands.forgetting += 1
                elif move == "redeliver":
                    commands.redeliver()
                elif move == "hold":
                    commands.delay = 100.0
                elif move == "let go":
                    commands.let_go()
                elif move == "gate":
                    world.a.gate.close()
                else:
                    world.a.gate.opened.set()
                await wait_all_tasks_blocked()
            world.a.gate.opened.set()
            await wait_all_tasks_blocked()
            commands.forgetting = 0
            await world.settle()
            done = [number for id in "012" for number in await world.steps(id)]
            assert sorted(done) == list(range(number))
            for site in (world.a, world.b):
                for dispatch in site.executor.statistics().dispatches:
                    assert (dispatch.in_flight, dispatch.overdraft) == (0, 0)
            assert not world.a.commands._to_be_sent_on
            for receiver in world.a.commands._receivers.values():
                assert not receiver.runs.unfinished

    with interleaving(seed):
        trio.run(main)


class TestApp:
    @pytest.mark.parametrize("kind", ["commands", "events", "state_events"])
    async def test_each_bus_that_is_given_becomes_a_local_first_one(self, kind: str) -> None:
        network = Network()
        distributed = DistributedBuses(**{kind: network.bus("A")})
        steps = Steps()
        app = App(DOMAIN, [Answering(2), steps, States()], distributed=distributed, settings=Settings())
        async with app.serving() as gateway:
            assert (await gateway.send_and_wait(Step("a"))).version == 1
            await wait_all_tasks_blocked()
            assert steps.of == {"a": [0, 1, 2]}
            assert [each.headers["wow-local-first"] for each in network.sent] == ["true"] * 3
            assert network.is_done

    async def test_two_of_them_share_the_work_and_do_none_of_it_twice(self) -> None:
        store = InMemoryEventStore(DOMAIN.serializer)
        commands, events = Network(node_of=lambda _: "B"), Network(node_of=lambda _: "B")
        apps = [
            App(
                DOMAIN,
                [Answering(2)],
                store=store,
                distributed=DistributedBuses(commands=commands.bus(name), events=events.bus(name)),
                settings=Settings(),
            )
            for name in ("A", "B")
        ]
        async with apps[0].serving() as a, apps[1].serving() as b:
            for gateway, id in ((a, "a"), (b, "b")):
                assert (await gateway.send_and_wait(Step(id))).version == 1
            await wait_all_tasks_blocked()
            for id in ("a", "b"):
                streams = await store.load(AggregateId("chains", "chain", id))
                assert [event.number for each in streams for event in each.events] == [0, 1, 2]
            assert commands.is_done
            assert events.is_done

    async def test_a_wait_for_a_projection_is_for_this_nodes_though_the_other_was_first(
        self, autojump_clock: trio.testing.MockClock
    ) -> None:
        store = InMemoryEventStore(DOMAIN.serializer)
        commands, events = Network(node_of=lambda _: "B"), Network(node_of=lambda _: "A")
        gate, shown = Gate(), SlowView()
        gate.close()

        async def hold(handling: Handling, proceed: Handler) -> object:
            return await (gate(handling, proceed) if handling.dispatcher == "command-dispatcher" else proceed(handling))

        def app(name: str, view: SlowView, *filters: Any) -> App:
            buses = DistributedBuses(commands=commands.bus(name), events=events.bus(name))
            return App(DOMAIN, [view], store=store, filters=filters, distributed=buses, settings=Settings())

        async with app("A", shown, hold).serving() as a, app("B", SlowView()).serving():
            async with trio.open_nursery() as nursery:

                async def send_and_look() -> None:
                    result = await a.send_and_wait(Step("a"), until=Stage.PROJECTED)
                    assert (result.stage, result.error) == (Stage.PROJECTED, None)
                    assert shown.steps == [0]

                nursery.start_soon(send_and_look)
                await trio.sleep(5)
                assert len(await store.load(AggregateId("chains", "chain", "a"))) == 1  # by B
                gate.opened.set()

    async def test_a_sagas_event_does_not_wait_for_results_that_another_node_may_have(self) -> None:
        commands = Network()
        app = App(
            DOMAIN,
            [Answering(1)],
            distributed=DistributedBuses(commands=commands.bus("A")),
            settings=Settings(),
        )
        async with app.serving() as gateway:
            admit = app._commands._local.admit  # type: ignore[attr-defined]

            async def only_from_outside(message: CommandMessage) -> Any:
                return () if message.body.number else await admit(message)

            app._commands._local.admit = only_from_outside  # type: ignore[attr-defined]
            commands.delay = 100.0  # another node takes its time
            await gateway.send(Step("a"))
            await wait_all_tasks_blocked()
            assert [each.headers["wow-local-first"] for each in commands.sent] == ["true", "false"]
            assert app._results.waiting == 0
            commands.let_go()
            await wait_all_tasks_blocked()
            assert commands.is_done
