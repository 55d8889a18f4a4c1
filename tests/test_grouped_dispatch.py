"""Dispatchers in groups of aggregate IDs: what is as in mailboxes, where it differs, and who stops the schedulers."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from chain_domain import Answering, Chain, Everything, Note, Notebook, Step, Stepped, Steps, registry_of
from support import collect, interleaving, task_names
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow import App, CommandGateway, StateEvent, event_processor, on_event, on_state_event, projection
from trio_wow.buses import InMemoryDomainEventBus, InMemoryStateEventBus
from trio_wow.dispatch import EventDispatcher, GroupedScheduling, Handler, Handling, ProjectionDispatcher, Retry
from trio_wow.domain import Domain
from trio_wow.errors import (
    HandlerExitError,
    SchedulerClosedError,
    ShutdownDeadlineError,
    VersionConflictError,
    WaitTimeoutError,
)
from trio_wow.eventsourcing import AggregateRepository, InMemoryEventStore
from trio_wow.execution import AggregateSchedulerSupplier, KeyedExecutor, group_key
from trio_wow.messages import AggregateId, DomainEventStream
from trio_wow.runtime import RuntimeContext

STRATEGIES: list[Callable[[], GroupedScheduling | None]] = [
    lambda: None,
    lambda: GroupedScheduling(),
    lambda: GroupedScheduling(groups=2, parallelism=1),
]
both = pytest.mark.parametrize("scheduling", STRATEGIES, ids=["keyed", "grouped", "in two groups"])

GROUPS = 8
AGGREGATE = AggregateId("chains", "chain", "a")
ONE = "chain 0"
NEIGHBOUR = next(f"chain {n}" for n in range(1, 99) if group_key(f"chain {n}", GROUPS) == group_key(ONE, GROUPS))
FAR = next(f"chain {n}" for n in range(1, 99) if group_key(f"chain {n}", GROUPS) != group_key(ONE, GROUPS))


@asynccontextmanager
async def serving(app: App, **options: Any) -> AsyncIterator[CommandGateway]:
    async with app.serving(app.runtime(**{"signals": False, "shutdown_quiet_period": 0, **options})) as gateway:
        yield gateway


class TestAsInMailboxes:
    @both
    @pytest.mark.parametrize("seed", range(5))
    async def test_windows_that_feed_each_other_do_not_lock_and_each_id_keeps_its_order(
        self, scheduling: Callable[[], GroupedScheduling | None], seed: int
    ) -> None:
        steps = Steps()
        app = App([Chain], [Answering(5), steps], scheduling=scheduling())
        with trio.fail_after(60), interleaving(seed):
            async with serving(app, executor=KeyedExecutor(max_in_flight=4)) as gateway, trio.open_nursery() as nursery:

                async def sender(which: int) -> None:
                    for n in range(which, 60, 8):
                        await gateway.send(Step(f"chain {n}"))

                for which in range(8):
                    nursery.start_soon(sender, which)
        assert steps.of == {f"chain {n}": [0, 1, 2, 3, 4, 5] for n in range(60)}

    @both
    async def test_a_stop_in_the_middle_of_chains_lets_them_end(
        self, scheduling: Callable[[], GroupedScheduling | None], autojump_clock: MockClock
    ) -> None:
        for seed in range(15):
            rng, steps = random.Random(seed), Steps()
            app = App([Chain], [Answering(5), steps], scheduling=scheduling())
            accepted = []
            async with serving(app, executor=KeyedExecutor(max_in_flight=rng.choice((1, 4, 256)))) as gateway:
                for n in range(rng.randrange(1, 6)):
                    await gateway.send(Step(str(n)))
                    accepted.append(str(n))
                for _ in range(rng.randrange(40)):
                    await trio.lowlevel.checkpoint()
            assert steps.of == {id: [0, 1, 2, 3, 4, 5] for id in accepted}, f"seed {seed}"

    @both
    async def test_what_is_stored_is_caught_up_with_in_order(
        self, scheduling: Callable[[], GroupedScheduling | None]
    ) -> None:
        domain = Domain([Chain, Notebook])
        store = InMemoryEventStore(domain.serializer)
        async with serving(App(domain, store=store)) as gateway:
            for n in range(90):
                await gateway.send(Step(f"chain {n % 9}", n))
                await gateway.send(Note("a", str(n)))
        steps = Steps()
        async with serving(App(domain, [steps, Everything()], store=store, scheduling=scheduling())):
            assert steps.of == {f"chain {n}": list(range(n, 90, 9)) for n in range(9)}

    @both
    async def test_another_writer_is_still_found_by_the_version(
        self, scheduling: Callable[[], GroupedScheduling | None]
    ) -> None:
        domain = Domain([Chain])
        store = InMemoryEventStore(domain.serializer)
        one, other = (App(domain, store=store, scheduling=scheduling()) for _ in range(2))
        async with serving(one) as first, serving(other) as second, trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(first.send_and_wait, Step("a", n))
                nursery.start_soon(second.send_and_wait, Step("a", n))
        streams = await store.load(AGGREGATE)
        assert [stream.version for stream in streams] == list(range(1, 41))

    @both
    async def test_k11_a_function_that_exits_ends_the_runtime(
        self, scheduling: Callable[[], GroupedScheduling | None]
    ) -> None:
        @event_processor
        class Exiting:
            @on_event
            def stepped(self, event: Stepped) -> None:
                raise SystemExit(0)

        with pytest.raises(ExceptionGroup) as caught:
            async with serving(App([Chain], [Exiting()], scheduling=scheduling())) as gateway:
                await gateway.send(Step("a"))
        assert [type(error) for error in caught.value.exceptions] == [HandlerExitError]

    async def test_an_application_can_be_served_again(self) -> None:
        scheduling, steps = GroupedScheduling(), Steps()
        app = App([Chain], [steps], scheduling=scheduling)
        for n in range(2):
            async with serving(app) as gateway:
                await gateway.send_and_wait(Step("a", n))
                assert len(scheduling.statistics()) == 2
            assert scheduling.statistics() == ()
        assert steps.of["a"][-1] == 1


class ConflictingStore(InMemoryEventStore):
    """Another writer was first, the first time somebody appends to chain 0."""

    conflicts = 1

    async def append(self, stream: DomainEventStream) -> None:
        if stream.aggregate_id.id == ONE and self.conflicts:
            self.conflicts -= 1
            raise VersionConflictError(stream.aggregate_id, 0, 1)
        await super().append(stream)


class TestDifferences:
    async def done_after(self, scheduling: GroupedScheduling | None) -> dict[str, float]:
        """Return when the commands of three chains are done, if that of the first meets a conflict."""
        domain = Domain([Chain])
        app = App(
            domain,
            store=ConflictingStore(domain.serializer),
            command_retry=Retry(backoff=10, jitter=0),
            scheduling=scheduling,
        )
        done: dict[str, float] = {}
        async with serving(app) as gateway:
            started = trio.current_time()

            async def send(id: str) -> None:
                (await gateway.send_and_wait(Step(id))).raise_for_error()
                done[id] = trio.current_time() - started

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, ONE)
                await wait_all_tasks_blocked()
                nursery.start_soon(send, NEIGHBOUR)
                nursery.start_soon(send, FAR)
        return done

    async def test_the_backoff_of_a_conflict_delays_its_own_mailbox(self, autojump_clock: MockClock) -> None:
        assert await self.done_after(None) == pytest.approx({ONE: 10, NEIGHBOUR: 0, FAR: 0})

    async def test_the_backoff_of_a_conflict_delays_all_of_its_group(self, autojump_clock: MockClock) -> None:
        scheduling = GroupedScheduling(groups=GROUPS)
        assert await self.done_after(scheduling) == pytest.approx({ONE: 10, NEIGHBOUR: 10, FAR: 0})

    @pytest.mark.parametrize(("groups", "seconds"), [(None, 1), (1, 5)])
    async def test_ids_that_collide_share_a_chain(
        self, autojump_clock: MockClock, groups: int | None, seconds: float
    ) -> None:
        @event_processor
        class Slow:
            @on_event
            async def stepped(self, event: Stepped) -> None:
                await trio.sleep(1)

        scheduling = None if groups is None else GroupedScheduling(groups=groups)
        app = App([Chain], [Slow()], scheduling=scheduling)
        started = trio.current_time()
        async with serving(app) as gateway:
            for n in range(5):
                await gateway.send(Step(str(n)))
        assert trio.current_time() - started == pytest.approx(seconds)

    @pytest.mark.parametrize(("groups", "error"), [(None, None), (GROUPS, WaitTimeoutError)])
    async def test_a_function_that_waits_for_an_id_of_its_group_waits_for_itself(
        self, autojump_clock: MockClock, groups: int | None, error: type[Exception] | None
    ) -> None:
        raised: list[BaseException | None] = []

        async def asking(handling: Handling, proceed: Handler) -> object:
            if handling.message.aggregate_id.id == ONE:
                await collect(partial(gateway.send_and_wait, Step(NEIGHBOUR), timeout=5), raised)
            return await proceed(handling)

        scheduling = None if groups is None else GroupedScheduling(groups=groups)
        app = App([Chain], filters=[asking], scheduling=scheduling)
        async with serving(app) as gateway:
            assert (await gateway.send_and_wait(Step(ONE))).version == 1
        assert [None if each is None else type(each) for each in raised] == [error]

    @pytest.mark.parametrize(("groups", "seconds"), [(None, 1), (1, 5)])
    async def test_catching_up_keeps_to_the_groups(
        self, autojump_clock: MockClock, groups: int | None, seconds: float
    ) -> None:
        @projection
        class Slow:
            @on_event
            async def stepped(self, event: Stepped) -> None:
                await trio.sleep(1)

        domain = Domain([Chain])
        store = InMemoryEventStore(domain.serializer)
        async with serving(App(domain, store=store)) as gateway:
            for n in range(5):
                await gateway.send(Step(str(n)))
        started = trio.current_time()
        scheduling = None if groups is None else GroupedScheduling(groups=groups)
        async with serving(App(domain, [Slow()], store=store, scheduling=scheduling)):
            assert trio.current_time() - started == pytest.approx(seconds)

    async def test_named_aggregates_share_no_chain_and_no_window(self, autojump_clock: MockClock) -> None:
        class Stuck(InMemoryEventStore):
            async def append(self, stream: DomainEventStream) -> None:
                if stream.aggregate_id.aggregate == "chain":
                    await trio.sleep(10)
                await super().append(stream)

        domain = Domain([Chain, Notebook])
        app = App(domain, store=Stuck(domain.serializer), scheduling=GroupedScheduling(groups=1))
        async with serving(app, executor=KeyedExecutor(max_in_flight=2)) as gateway:
            await gateway.send(Step("a"))
            await gateway.send(Step("b"))
            started = trio.current_time()
            await gateway.send_and_wait(Note("a", "text"))
            assert trio.current_time() == started

    async def test_there_is_one_receiver_for_each_named_aggregate(self) -> None:
        app = App([Chain, Notebook], [Everything(), Answering(0)], scheduling=GroupedScheduling())
        async with serving(app):
            await wait_all_tasks_blocked()
            receivers = sorted(name for name in task_names() if name.startswith("receiver"))
        assert receivers == ["receiver chains.chain"] * 3 + ["receiver notes.notebook"] * 2


class TestSchedulers:
    async def test_they_bear_the_names_of_dispatcher_and_aggregate(self) -> None:
        scheduling = GroupedScheduling(parallelism=3)
        app = App([Chain, Notebook], [Everything(), Answering(0)], scheduling=scheduling)
        async with serving(app):
            statistics = scheduling.statistics()
        assert [(each.name, each.parallelism) for each in statistics] == [
            ("command-dispatcher-chains.chain", 3),
            ("command-dispatcher-notes.notebook", 3),
            ("projection-dispatcher-chains.chain", 3),
            ("projection-dispatcher-notes.notebook", 3),
            ("saga-dispatcher-chains.chain", 3),
        ]

    async def test_they_have_as_many_workers_as_the_runtime_and_64_groups_for_each(self) -> None:
        scheduling = GroupedScheduling()
        app = App([Chain], scheduling=scheduling)
        async with serving(app, executor=KeyedExecutor(workers=3)):
            assert [each.parallelism for each in scheduling.statistics()] == [3]
        async with trio.open_nursery() as nursery:
            groups = scheduling.groups_for("any", RuntimeContext(nursery, KeyedExecutor(workers=3)))
            expected = f"any-chains.chain/{group_key('a', 64 * 3)}"
            assert groups.of(AGGREGATE) == expected
            await groups.schedulers.stop_gracefully()

    async def test_they_show_what_waits(self) -> None:
        gate = trio.Event()

        class Stuck(InMemoryEventStore):
            async def append(self, stream: DomainEventStream) -> None:
                await gate.wait()
                await super().append(stream)

        domain, scheduling = Domain([Chain]), GroupedScheduling(groups=1)
        app = App(domain, store=Stuck(domain.serializer), scheduling=scheduling)
        async with serving(app) as gateway:
            for n in range(3):
                await gateway.send(Step(str(n)))
            await wait_all_tasks_blocked()
            (one,) = scheduling.statistics()
            assert (one.queued, one.running, one.latency) == (2, 1, None)
            assert "mailbox command-dispatcher-chains.chain/0" in task_names()
            gate.set()
            await wait_all_tasks_blocked()
            (one,) = scheduling.statistics()
            assert (one.queued, one.running) == (0, 0)
            assert one.latency is not None
            assert one.latency > 0

    @pytest.mark.parametrize("argument", ["groups", "parallelism"])
    @pytest.mark.parametrize("value", [0, -1, True, "many"])
    def test_a_number_that_is_none_is_refused(self, argument: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"{argument} must be a positive int, not {value!r}"):
            GroupedScheduling(**{argument: value})


class TestStop:
    async def test_the_deadline_of_the_runtime_covers_them(self, autojump_clock: MockClock) -> None:
        class Stuck(InMemoryEventStore):
            async def append(self, stream: DomainEventStream) -> None:
                await trio.sleep_forever()

        domain = Domain([Chain])
        scheduling = GroupedScheduling(groups=1)
        app = App(domain, store=Stuck(domain.serializer), scheduling=scheduling)
        started = trio.current_time()
        with pytest.raises(ExceptionGroup) as caught:
            async with serving(app, shutdown_timeout=5) as gateway:
                await gateway.send(Step("a"))
                await gateway.send(Step("b"))
        assert trio.current_time() - started == pytest.approx(5)
        (error,) = caught.value.exceptions
        assert isinstance(error, ShutdownDeadlineError)
        assert error.held["command-dispatcher"] == (
            "receiver chains.chain",
            "mailbox command-dispatcher-chains.chain/0",
        )
        assert scheduling.statistics() == ()

    @pytest.mark.parametrize("passes", range(12))
    async def test_a_forced_stop_during_the_start_is_one_error(self, passes: int) -> None:
        runtime = App([Chain], [Steps()], scheduling=GroupedScheduling()).runtime(signals=False)
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                with pytest.raises(ShutdownDeadlineError):
                    await runtime.serve()

            nursery.start_soon(serve)
            for _ in range(passes):
                await trio.lowlevel.checkpoint()
            runtime.force_stop()

    async def test_components_stop_in_reverse_order(
        self, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stopped: list[str] = []
        stop = AggregateSchedulerSupplier.stop_gracefully

        async def stop_gracefully(self: AggregateSchedulerSupplier) -> None:
            await stop(self)
            stopped.append(self.name)

        monkeypatch.setattr(AggregateSchedulerSupplier, "stop_gracefully", stop_gracefully)
        async with serving(App([Chain], [Answering(2), Steps()], scheduling=GroupedScheduling())) as gateway:
            await gateway.send(Step("a"))
        assert stopped == ["saga-dispatcher", "projection-dispatcher", "command-dispatcher"]


@event_processor
class Twofold:
    """Has functions for events and for state events, so that its dispatcher is made of two."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    @on_event
    async def stepped(self, event: Stepped) -> None:
        await trio.lowlevel.checkpoint()
        self.seen.append(event.number)

    @on_state_event
    async def state(self, event: StateEvent[Chain]) -> None:
        await trio.lowlevel.checkpoint()
        self.seen.append(tuple(event.state.steps))


class TestCompositeDispatchers:
    async def test_the_two_share_the_schedulers_of_their_owner_who_alone_stops_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[str] = []
        for method in ("stop_gracefully", "force_stop"):
            original = getattr(AggregateSchedulerSupplier, method)

            def call(self: AggregateSchedulerSupplier, *, _original: Any = original, _method: str = method) -> Any:
                calls.append(f"{_method} {self.name}")
                return _original(self)

            monkeypatch.setattr(AggregateSchedulerSupplier, method, call)
        domain = Domain([Chain])
        scheduling = GroupedScheduling()
        dispatcher = EventDispatcher(
            registry_of(domain, Twofold()),
            InMemoryDomainEventBus(),
            states=InMemoryStateEventBus(),
            repository=AggregateRepository(domain, InMemoryEventStore(domain.serializer)),
            scheduling=scheduling,
        )
        async with trio.open_nursery() as nursery:
            await dispatcher.prepare(RuntimeContext(nursery))
            dispatcher.start()
            assert [each.name for each in scheduling.statistics()] == ["event-dispatcher-chains.chain"]
            one, other = dispatcher._children
            await one.stop()
            one.force_stop()
            assert calls == []
            assert len(scheduling.statistics()) == 1
            await dispatcher.stop()
            assert calls == ["stop_gracefully event-dispatcher"]
            dispatcher.force_stop()
            assert calls[1:] == ["force_stop event-dispatcher"]
            with pytest.raises(SchedulerClosedError):
                other.start()

    async def test_both_do_their_work(self) -> None:
        processor = Twofold()
        app = App([Chain], [processor], scheduling=GroupedScheduling())
        async with serving(app) as gateway:
            for n in range(3):
                await gateway.send(Step("a", n))
        assert [each for each in processor.seen if isinstance(each, int)] == [0, 1, 2]
        assert [each for each in processor.seen if isinstance(each, tuple)] == [(0,), (0, 1), (0, 1, 2)]

    async def test_it_can_be_prepared_again(self) -> None:
        domain, events = Domain([Chain]), InMemoryDomainEventBus()
        scheduling, steps = GroupedScheduling(), Steps()
        dispatcher = ProjectionDispatcher(registry_of(domain, steps), events, scheduling=scheduling)
        for version in (1, 2):
            async with trio.open_nursery() as nursery:
                await dispatcher.prepare(RuntimeContext(nursery))
                dispatcher.start()
                await events.send(
                    DomainEventStream(
                        aggregate_id=AGGREGATE,
                        version=version,
                        events=(Stepped(version),),
                        command_id="c",
                        request_id="r",
                    )
                )
                await dispatcher.stop()
        assert steps.of == {"a": [1, 2]}
