"""Dispatchers through the end of a runtime: what a stop finishes, what it interrupts, and what it says meanwhile."""

import random
import re
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import trio
from chain_domain import Answering, Chain, Step, Stepped, Steps, registry_of
from support import collect
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow import App, CommandGateway, DomainEvent, KeyedExecutor, event_processor, on_event, projection, saga
from trio_wow.app import Settings
from trio_wow.buses import InMemoryCommandBus, InMemoryDomainEventBus
from trio_wow.dispatch import CommandDispatcher, EventDispatcher, FilterChain, Retry
from trio_wow.domain import Domain
from trio_wow.errors import AdmissionClosedError, ShutdownDeadlineError
from trio_wow.eventsourcing import InMemoryEventStore
from trio_wow.messages import AggregateId, DomainEventStream, Serializer
from trio_wow.runtime import Runtime, RuntimeContext, RuntimeState

CHAIN_A = AggregateId("chains", "chain", "a")


class StuckStore(InMemoryEventStore):
    """An append never returns."""

    async def append(self, stream: DomainEventStream) -> None:
        await trio.sleep_forever()


class BrokenStore(InMemoryEventStore):
    """An append raises what nobody expects."""

    async def append(self, stream: DomainEventStream) -> None:
        raise KeyboardInterrupt


class BrokenLaterStore(InMemoryEventStore):
    """An append for chain `0` raises what nobody expects, and only after a while; the others never return."""

    async def append(self, stream: DomainEventStream) -> None:
        await trio.sleep(1 if stream.aggregate_id.id == "0" else inf)
        raise KeyboardInterrupt


class TestWithoutARuntime:
    async def test_a_dispatcher_works_in_a_context_of_its_own_on_the_shared_executor(self) -> None:
        domain, bus, events = Domain([Chain]), InMemoryCommandBus(), InMemoryDomainEventBus()
        store = InMemoryEventStore(domain.serializer)
        dispatcher = CommandDispatcher(domain, bus, store, events)
        async with trio.open_nursery() as nursery:
            context = RuntimeContext(nursery)
            assert context.executor is KeyedExecutor.shared()
            assert not context.stop_requested.is_set()
            await dispatcher.prepare(context)
            dispatcher.start()
            await bus.send(domain.command_message(Step("a", 1)))
            await bus.send(domain.command_message(Step("a", 2)))
            assert len(context.executor.statistics().dispatches) <= 1
            await dispatcher.stop()
            assert not nursery.child_tasks
            assert context.admission.leases == ()
        assert [stream.events for stream in await store.load(CHAIN_A)] == [(Stepped(1),), (Stepped(2),)]
        assert not context.executor.statistics().closed

    async def test_two_contexts_share_nothing_but_the_executor(self) -> None:
        async with trio.open_nursery() as nursery:
            one, other = RuntimeContext(nursery), RuntimeContext(nursery)
            one.admission.close()
            one.stop_requested.set()
            assert one.try_acquire() is None
            assert other.admission.intake_is_open
            assert not other.stop_requested.is_set()
            assert one.executor is other.executor

    async def test_a_reported_failure_makes_the_nursery_raise(self) -> None:
        error = ValueError("broken")
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                RuntimeContext(nursery).report_failure(error)
        assert caught.value.exceptions == (error,)

    async def test_a_dispatcher_that_breaks_ends_the_nursery_with_its_error(self) -> None:
        domain, bus = Domain([Chain]), InMemoryCommandBus()
        dispatcher = CommandDispatcher(domain, bus, BrokenStore(domain.serializer), InMemoryDomainEventBus())
        with pytest.raises(BaseExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                await dispatcher.prepare(RuntimeContext(nursery))
                dispatcher.start()
                await bus.send(domain.command_message(Step("a")))
                await trio.sleep_forever()
        broken, other = caught.value.split(KeyboardInterrupt)
        assert broken is not None
        assert other is None

    async def test_an_event_dispatcher_finishes_what_it_has_when_it_is_stopped(self, autojump_clock: MockClock) -> None:
        seen: list[int] = []

        @event_processor
        class Slow:
            @on_event
            async def stepped(self, event: DomainEvent[Stepped]) -> None:
                await trio.sleep(1)
                seen.append(event.body.number)

        domain, bus = Domain([Chain]), InMemoryDomainEventBus()
        dispatcher = EventDispatcher(registry_of(domain, Slow()), bus)
        async with trio.open_nursery() as nursery:
            context = RuntimeContext(nursery)
            await dispatcher.prepare(context)
            dispatcher.start()
            for version in (1, 2):
                await bus.send(
                    DomainEventStream(
                        aggregate_id=CHAIN_A,
                        version=version,
                        events=[Stepped(version)] * version,
                        command_id="c",
                        request_id="r",
                    )
                )
            assert [lease.name for lease in context.admission.leases] == [
                "Stepped of chains.chain/a, version 1, in event-dispatcher",
                "Stepped and 1 more of chains.chain/a, version 2, in event-dispatcher",
            ]
            await dispatcher.stop()
        assert seen == [1, 2, 2]


class Marks:
    """Points in the middle of a chain: each takes a few checkpoints, and one of them asks for a stop."""

    def __init__(self, rng: random.Random, stop_at: int) -> None:
        self.rng = rng
        self.stop_at = stop_at
        self.passed: list[str] = []
        self.stop: Callable[[], object] = lambda: None
        self.stopped_at = ""

    async def mark(self, point: str) -> None:
        if len(self.passed) == self.stop_at:
            self.stopped_at = point
            self.stop()
        self.passed.append(point)
        for _ in range(self.rng.randrange(4)):
            await trio.lowlevel.checkpoint()


class MarkedStore(InMemoryEventStore):
    def __init__(self, serializer: Serializer, marks: Marks) -> None:
        super().__init__(serializer)
        self.marks = marks

    async def append(self, stream: DomainEventStream) -> None:
        await self.marks.mark("before append")
        await super().append(stream)
        await self.marks.mark("before publication")


@saga
class MarkedAnswering:
    """Answers the first events of each chain with the next step."""

    def __init__(self, answers: int, marks: Marks) -> None:
        self.answers = answers
        self.marks = marks

    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> Step | None:
        await self.marks.mark("in the saga")
        number = event.body.number
        return Step(event.aggregate_id.id, number + 1) if number < self.answers else None


@projection
class MarkedSteps:
    def __init__(self, marks: Marks) -> None:
        self.of: dict[str, list[int]] = {}
        self.marks = marks

    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> None:
        await self.marks.mark("in the projection")
        self.of.setdefault(event.aggregate_id.id, []).append(event.body.number)


@event_processor
class Failing:
    """Fails for so many times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.calls = 0

    @on_event
    async def stepped(self, event: Stepped) -> None:
        self.calls += 1
        if self.calls <= self.times:
            raise OSError("unreachable")


class TestStop:
    async def test_a_thousand_seeded_stops_in_the_middle_of_chains_lose_nothing(self) -> None:
        answers, chains = 2, 3
        everything = list(range(answers + 1))
        stopped_at: set[str] = set()
        settings = Settings()  # reading the environment a thousand times takes longer than all the rest
        for seed in range(1000):
            rng = random.Random(seed)
            marks = Marks(rng, stop_at=rng.randrange(4 * chains * (answers + 1)))
            domain = Domain([Chain])
            store, steps = MarkedStore(domain.serializer, marks), MarkedSteps(marks)
            app = App(domain, [MarkedAnswering(answers, marks), steps], store=store, settings=settings)
            window = rng.choice((1, 2, 256))
            runtime = app.runtime(signals=False, shutdown_quiet_period=0, executor=KeyedExecutor(max_in_flight=window))
            marks.stop = runtime.request_stop
            accepted: list[str] = []
            refused: list[str] = []

            async def send(
                id: str, app: App = app, accepted: list[str] = accepted, refused: list[str] = refused
            ) -> None:
                try:
                    await app.gateway.send(Step(id))
                    accepted.append(id)
                except AdmissionClosedError:
                    refused.append(id)

            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                for n in range(chains):
                    nursery.start_soon(send, str(n))
            assert len(accepted) + len(refused) == chains
            assert steps.of == dict.fromkeys(accepted, everything), f"seed {seed}"
            for id in map(str, range(chains)):
                streams = await store.load(AggregateId("chains", "chain", id))
                numbers = [event.number for stream in streams for event in stream.events]
                assert numbers == (everything if id in accepted else []), f"seed {seed}"
            assert runtime.statistics().leases == ()
            stopped_at.add(marks.stopped_at)
        assert stopped_at == {"before append", "before publication", "in the saga", "in the projection"}

    async def test_events_that_keep_arriving_from_inside_cannot_move_the_deadline(
        self, autojump_clock: MockClock
    ) -> None:
        @saga
        class Endless:
            @on_event
            async def stepped(self, event: DomainEvent[Stepped]) -> Step:
                await trio.sleep(0.5)
                return Step(event.aggregate_id.id, event.body.number + 1)

        steps = Steps()
        app = App([Chain], [Endless(), steps])
        runtime = app.runtime(signals=False, shutdown_timeout=10, shutdown_quiet_period=1)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            await app.gateway.send(Step("a"))
            runtime.request_stop()
            start = trio.current_time()
            await runtime.wait_stopped()
            assert trio.current_time() - start == 10
        (error,) = caught
        assert isinstance(error, ShutdownDeadlineError)
        assert any(name == "Stepped of chains.chain/a, version 20, in saga-dispatcher" for name, _ in error.operations)
        streams = await app.store.load(CHAIN_A)
        assert steps.of["a"] == [event.number for stream in streams for event in stream.events]
        assert len(steps.of["a"]) >= 20  # the chain went on until then

    async def test_one_lease_covers_an_operation_with_its_retries_and_its_publication(
        self, autojump_clock: MockClock
    ) -> None:
        class Unreachable(InMemoryDomainEventBus):
            failures = 2

            async def send(self, message: DomainEventStream) -> None:
                if self.failures:
                    self.failures -= 1
                    raise OSError("unreachable")
                await super().send(message)

        failing = Failing(times=2)
        domain, commands, events = Domain([Chain]), InMemoryCommandBus(), Unreachable()
        gateway = CommandGateway(domain, commands)
        store = InMemoryEventStore(domain.serializer)
        components: list[Any] = [
            CommandDispatcher(domain, commands, store, events, results=gateway.results),
            EventDispatcher(
                registry_of(domain, failing), events, function_filters=FilterChain([Retry(backoff=2, jitter=0)])
            ),
            gateway,
        ]
        runtime = Runtime(components, signals=False, shutdown_quiet_period=0)
        seen: dict[str, list[float]] = {}
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            await gateway.send(Step("a"))
            runtime.request_stop()
            await trio.sleep(0.05)
            while runtime.state is RuntimeState.STOPPING:
                (lease,) = runtime.statistics().leases
                seen.setdefault(lease.name, []).append(trio.current_time() - lease.age)
                await trio.sleep(0.1)
        assert list(seen) == [
            "Step for chains.chain/a, in command-dispatcher",
            "Stepped of chains.chain/a, version 1, in event-dispatcher",
        ]
        # Each is one operation, which began once.
        assert all(len(began) > 2 and max(began) == pytest.approx(min(began)) for began in seen.values())
        assert failing.calls == 3

    async def test_retries_cannot_move_the_deadline(self, autojump_clock: MockClock) -> None:
        failing = Failing(times=10**6)
        app = App([Chain], [failing], event_retry=Retry(retries=None, backoff=0.3, max_backoff=0.3, jitter=0))
        runtime = app.runtime(signals=False, shutdown_timeout=10, shutdown_quiet_period=0)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            await app.gateway.send(Step("a"))
            runtime.request_stop()
            start = trio.current_time()
            await runtime.wait_stopped()
            assert trio.current_time() - start == 10
        (error,) = caught
        assert isinstance(error, ShutdownDeadlineError)
        assert error.operations == (("Stepped of chains.chain/a, version 1, in event-dispatcher", 10.0),)
        assert failing.calls > 30

    @pytest.mark.parametrize("how", ["force", "fail"])
    async def test_no_lease_stays_open_when_queued_messages_are_discarded(
        self, how: str, autojump_clock: MockClock
    ) -> None:
        domain = Domain([Chain])
        store: InMemoryEventStore = StuckStore(domain.serializer)
        if how == "fail":
            store = BrokenLaterStore(domain.serializer)
        app = App(domain, [Steps()], store=store)
        runtime = app.runtime(signals=False)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            for n in range(100):
                await app.gateway.send(Step(str(n % 5), n))
            assert len(runtime.statistics().leases) == 100
            if how == "force":
                runtime.force_stop()
        assert isinstance(caught[0], ShutdownDeadlineError if how == "force" else KeyboardInterrupt)
        assert runtime.statistics().leases == ()


class TestDocs:
    async def test_the_report_of_the_docs_tells_what_a_stop_waits_for(
        self, autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
    ) -> None:
        page = (Path(__file__).parents[1] / "docs/lifecycle.md").read_text()
        program, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        names: dict[str, Any] = {}
        exec(program, names)
        domain = Domain([Chain])
        app = App(domain, store=StuckStore(domain.serializer))
        runtime = app.runtime(signals=False, shutdown_timeout=4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve)
            await wait_all_tasks_blocked()
            await app.gateway.send(Step("a"))
            runtime.request_stop()
            await trio.sleep(0.5)
            nursery.start_soon(names["report"], runtime)
        assert capsys.readouterr().out.splitlines() == [
            f"STOPPING, {left} s left: Step for chains.chain/a, in command-dispatcher ({age} s)"
            for left, age in [("4", "0"), ("2", "2"), ("2", "2"), ("0", "4")]
        ]


class TestStatistics:
    async def test_a_lease_tells_the_class_of_the_body_and_the_aggregate(self, autojump_clock: MockClock) -> None:
        domain = Domain([Chain])
        app = App(domain, [Answering(2), Steps()], store=StuckStore(domain.serializer))
        runtime = app.runtime(signals=False, shutdown_timeout=5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve)
            await wait_all_tasks_blocked()
            await app.gateway.send(Step("a"))
            await trio.sleep(2)
            statistics = runtime.statistics()
            assert [(lease.name, lease.age) for lease in statistics.leases] == [
                ("Step for chains.chain/a, in command-dispatcher", 2.0)
            ]
            assert {each.name: each.tasks for each in statistics.components} == {
                "command-dispatcher": ("receiver chains", "mailbox chains.chain/a"),
                "projection-dispatcher": ("checkpoints of projection-dispatcher", "receiver chains"),
                "saga-dispatcher": ("checkpoints of saga-dispatcher", "receiver chains"),
                "command-gateway": (),
            }
            runtime.request_stop()
