"""Sagas whose commands fail half way, and sagas that feed themselves."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from chain_domain import Chain, Note, Notebook, Noted, Step, Stepped, registry_of
from support import collect
from test_catch_up import DurableStore
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow import App, CommandGateway, DomainEvent, on_event, saga
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.buses import InMemoryCommandBus, InMemoryDomainEventBus
from trio_wow.dispatch import CatchUp, CommandDispatcher, CommandResults, SagaDispatcher
from trio_wow.domain import Domain
from trio_wow.errors import AppendOutcomeUnknownError, HopLimitError, ShutdownDeadlineError, StoreLockedError
from trio_wow.eventsourcing import EventStore, FailedExecution, Recording
from trio_wow.execution import KeyedExecutor
from trio_wow.messages import AggregateId, CommandMessage, DomainEventStream, Serializer
from trio_wow.runtime import Runtime

DOMAIN = Domain([Chain, Notebook])
CHAIN_A = AggregateId("chains", "chain", "a")


@saga
class Three:
    """Answers each step with three notes."""

    @on_event
    def stepped(self, event: DomainEvent[Stepped]) -> list[Note]:
        return [Note(f"{event.version} {n}", event.aggregate_id.id) for n in range(3)]


def request_ids(cause: DomainEventStream) -> list[str]:
    return [f"{cause.id}/1/Three.stepped/{n}" for n in range(3)]


async def notes(store: EventStore, version: int) -> list[list[str]]:
    """Return the requests that are stored of each of the three notes of one step."""
    found = []
    for n in range(3):
        streams = await store.load(AggregateId("notes", "notebook", f"{version} {n}"))
        assert {stream.events for stream in streams} <= {(Noted("a"),)}
        found.append([stream.request_id for stream in streams])
    return found


class Failing(InMemoryCommandBus):
    """Writes down each note that is to be sent. Of the second one it does what it is told to, instead of sending it."""

    def __init__(self, failing: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self.failing = failing
        self.asked: list[str] = []

    async def send_if_subscribed(self, message: CommandMessage) -> bool:
        if isinstance(message.body, Note):
            self.asked.append(message.request_id)
            if self.failing is not None and len(self.asked) == 2:
                return self.failing()
        return await super().send_if_subscribed(message)


class FailingStore(DurableStore):
    """The first append of the second note fails; before that it is stored or not."""

    def __init__(self, serializer: Serializer, error: Callable[[DomainEventStream], Exception], stored: bool) -> None:
        super().__init__(serializer)
        self.error = error
        self.stored = stored
        self.failed = False

    async def append(self, stream: DomainEventStream) -> None:
        if stream.aggregate_id.id == "1 1" and not self.failed:
            self.failed = True
            if self.stored:
                await super().append(stream)
            raise self.error(stream)
        await super().append(stream)


def unreachable() -> bool:
    raise OSError("unreachable")


def sending(store: DurableStore, bus: InMemoryCommandBus, results: CommandResults | None) -> tuple[Any, ...]:
    """Return a runtime and its gateway; the saga waits for the results of its commands where it is given them."""
    events, told = InMemoryDomainEventBus(), CommandResults() if results is None else results
    gateway = CommandGateway(DOMAIN, bus, results=told)
    sagas = SagaDispatcher(registry_of(DOMAIN, Three()), events, bus, results=results, catch_up=CatchUp(store, store))
    dispatcher = CommandDispatcher(DOMAIN, bus, store, events, results=told)
    return Runtime([dispatcher, sagas, gateway], signals=False, shutdown_quiet_period=0), gateway


async def serve_and_collect(
    runtime: Runtime, caught: list[BaseException | None], *, task_status: trio.TaskStatus[Runtime]
) -> None:
    await collect(partial(runtime.serve, task_status=task_status), caught)


class TestPartialSends:
    @pytest.mark.parametrize("waits", [True, False], ids=["volatile bus", "durable bus"])
    async def test_after_a_send_that_fails_all_are_sent_again_under_the_same_requests(self, waits: bool) -> None:
        store, bus = DurableStore(DOMAIN.serializer), Failing(unreachable)
        runtime, gateway = sending(store, bus, CommandResults() if waits else None)
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            await gateway.send_and_wait(Step("a"))
            runtime.request_stop()
        (cause,) = await store.load(CHAIN_A)
        first, second, third = request_ids(cause)
        assert bus.asked == [first, second, first, second, third]
        assert await notes(store, 1) == [[first], [second], [third]]
        assert store.checkpoints["saga-dispatcher/Three"] == 4

    @pytest.mark.parametrize("restart", [False, True])
    async def test_a_command_that_nobody_receives_yet_is_sent_with_the_next_event_or_after_a_restart(
        self, restart: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        store, bus = DurableStore(DOMAIN.serializer), Failing(lambda: False)
        runtime, gateway = sending(store, bus, CommandResults())
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            await gateway.send_and_wait(Step("a"))
            await wait_all_tasks_blocked()
            first, second, third = request_ids((await store.load(CHAIN_A))[0])
            assert bus.asked == [first, second]
            assert await notes(store, 1) == [[first], [], []]
            assert "nobody receives commands for notes.notebook/1 1" in caplog.text
            if not restart:
                await gateway.send_and_wait(Step("a"))
            runtime.request_stop()
        if restart:
            assert store.checkpoints == {}
            runtime, gateway = sending(store, bus, CommandResults())
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                runtime.request_stop()
        assert bus.asked[2:5] == [first, second, third]
        assert await notes(store, 1) == [[first], [second], [third]]
        if not restart:
            following = request_ids((await store.load(CHAIN_A))[1])
            assert bus.asked[5:] == following
            assert await notes(store, 2) == [[each] for each in following]

    @pytest.mark.parametrize(
        ("error", "stored"),
        [
            (lambda stream: StoreLockedError("here", "locked"), False),
            (lambda stream: ExceptionGroup("nursery", [StoreLockedError("here", "locked")]), False),
            (lambda stream: AppendOutcomeUnknownError(stream.aggregate_id, stream.version), False),
            (lambda stream: AppendOutcomeUnknownError(stream.aggregate_id, stream.version), True),
        ],
        ids=["locked", "locked, told by a nursery", "unknown", "unknown, but stored"],
    )
    async def test_after_a_command_that_the_store_failed_all_are_sent_again_and_each_has_its_effect_once(
        self, error: Callable[[DomainEventStream], Exception], stored: bool
    ) -> None:
        store, bus = FailingStore(DOMAIN.serializer, error, stored), Failing()
        runtime, gateway = sending(store, bus, CommandResults())
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            await gateway.send_and_wait(Step("a"))
            runtime.request_stop()
        assert store.failed
        first, second, third = request_ids((await store.load(CHAIN_A))[0])
        assert bus.asked == ([] if stored else [first, second]) + [first, second, third]
        assert await notes(store, 1) == [[first], [second], [third]]
        assert store.checkpoints["saga-dispatcher/Three"] == 4

    @pytest.mark.parametrize("stored", [False, True], ids=["before the append", "after the append"])
    async def test_forced_to_stop_between_two_commands_a_restart_sends_the_rest_and_repeats_none(
        self, tmp_path: Path, stored: bool
    ) -> None:
        held = trio.Event()

        class Held(SqliteStore):
            async def append(self, stream: DomainEventStream) -> None:
                if stream.aggregate_id.id == "1 1":
                    if stored:
                        await super().append(stream)
                    held.set()
                    await trio.sleep_forever()
                await super().append(stream)

        path = tmp_path / "events.db"
        caught: list[BaseException | None] = []
        async with Held(path, DOMAIN.serializer) as store:  # a forced stop leaves it open
            app = App(DOMAIN, [Three()], store=store)
            runtime = app.runtime(signals=False, shutdown_quiet_period=0)
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_and_collect, runtime, caught)
                await app.gateway.send(Step("a"))
                await held.wait()
                runtime.force_stop()
        assert isinstance(caught[0], ShutdownDeadlineError)
        async with SqliteStore(path, DOMAIN.serializer) as kept:
            first, second, third = request_ids((await kept.load(CHAIN_A))[0])
            assert await notes(kept, 1) == [[first], [second] if stored else [], []]
            for _ in range(2):
                again = App(DOMAIN, [Three()], store=kept)
                async with again.serving(again.runtime(signals=False, shutdown_quiet_period=0)):
                    pass
                assert await notes(kept, 1) == [[first], [second], [third]]
                assert await kept.load_checkpoint("saga-dispatcher/Three") == 4


class Feeding:
    """Sends what keeps itself going, each link after a second, or at once."""

    def __init__(self, seconds: float | None = 1) -> None:
        self.seconds = seconds

    async def next(self, event: DomainEvent[Stepped], this: str, other: str) -> Step | None:
        if event.aggregate_id.id != this:
            return None
        if self.seconds is not None:
            await trio.sleep(self.seconds)
        return Step(other, event.body.number + 1)


@saga
class Circle(Feeding):
    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> Step | None:
        return await self.next(event, "one", "one")


@saga
class There(Feeding):
    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> Step | None:
        return await self.next(event, "one", "two")


@saga
class Back(Feeding):
    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> Step | None:
        return await self.next(event, "two", "one")


SHAPES: dict[str, tuple[type[Feeding], ...]] = {"one saga on one ID": (Circle,), "two sagas on two IDs": (There, Back)}


class Recorder:
    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.failures: list[FailedExecution] = []

    async def record(self, failure: FailedExecution, /) -> Recording:
        await trio.lowlevel.checkpoint()
        self.failures.append(failure)
        if self.fails:
            raise LookupError("no recorder either")
        return Recording.RECORDED


async def chain_of(store: EventStore) -> list[int]:
    """Return the links that are stored, in their order."""
    streams = [record.stream for record in await store.read_all(0, 10_000)]
    return [event.number for stream in streams if stream.aggregate_id.id in ("one", "two") for event in stream.events]


@pytest.mark.parametrize("shape", SHAPES)
class TestFs20Circles:
    @pytest.mark.parametrize("recorder_fails", [False, True])
    async def test_fs20_the_chain_ends_at_the_hop_limit_and_the_event_is_parked(
        self, shape: str, recorder_fails: bool, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        hops, window = 6, 4
        recorder = Recorder(recorder_fails)
        app = App(DOMAIN, [each() for each in SHAPES[shape]], failures=recorder, max_hops=hops)
        executor = KeyedExecutor(max_in_flight=window)
        ended: list[float] = []

        async def send_normal(n: int) -> None:
            result = await app.gateway.send_and_wait(Step(f"normal {n}"))
            assert result.error is None
            ended.append(trio.current_time() - start)

        async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0, executor=executor)) as gateway:
            start = trio.current_time()
            await gateway.send(Step("one"))
            for second in range(hops):
                await trio.sleep_until(start + second + 0.5)
                assert await chain_of(app.store) == list(range(second + 1))  # it is under way
                async with trio.open_nursery() as nursery:
                    for n in range(100):
                        nursery.start_soon(send_normal, n)
                assert ended == [second + 0.5] * 100  # at once
                ended.clear()
            await trio.sleep(1_000)
            assert await chain_of(app.store) == list(range(hops + 1))
            (failure,) = recorder.failures  # parked, and left alone
            assert (failure.error, failure.attempts) == (HopLimitError.__name__, 1)
            assert (failure.aggregate_id.id, failure.sequence) == ("one", 1)
            assert failure.version == (await app.store.load(failure.aggregate_id))[-1].version
            assert ("no recorder either" in caplog.text) is recorder_fails
            for dispatch in executor.statistics().dispatches:
                assert (dispatch.in_flight, dispatch.overdraft) == (0, 0)
                assert dispatch.demand_outstanding == window
            # The next event does not make it spin either: the failed one holds it back, or it leads to one more chain.
            await gateway.send(Step("one"))
            await trio.sleep(1_000)
            assert len(recorder.failures) == 2

    async def test_fs20_a_stop_lets_a_chain_end_that_reaches_its_limit_in_time(
        self, shape: str, autojump_clock: MockClock
    ) -> None:
        recorder = Recorder(fails=False)
        app = App(DOMAIN, [each() for each in SHAPES[shape]], failures=recorder, max_hops=6)
        runtime = app.runtime(signals=False, shutdown_timeout=10, shutdown_quiet_period=0)
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            await app.gateway.send(Step("one"))
            await trio.sleep(1.5)
            runtime.request_stop()
            start = trio.current_time()
        assert trio.current_time() - start == pytest.approx(5.5)  # the links that were left, and the one that fails
        assert await chain_of(app.store) == list(range(7))
        assert len(recorder.failures) == 1

    async def test_fs20_a_stop_during_a_longer_chain_meets_its_deadline(
        self, shape: str, autojump_clock: MockClock
    ) -> None:
        app = App(DOMAIN, [each() for each in SHAPES[shape]], max_hops=10**6)
        runtime = app.runtime(signals=False, shutdown_timeout=10, shutdown_quiet_period=1)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_and_collect, runtime, caught)
            await app.gateway.send(Step("one"))
            await trio.sleep(1.5)
            runtime.request_stop()
            start = trio.current_time()
        assert trio.current_time() - start == 10
        assert isinstance(caught[0], ShutdownDeadlineError)
        assert await chain_of(app.store) == list(range(12))

    async def test_fs20_so_does_one_during_a_chain_that_never_waits(self, shape: str, mock_clock: MockClock) -> None:
        app = App(DOMAIN, [each(None) for each in SHAPES[shape]], max_hops=10**6)
        runtime = app.runtime(signals=False, shutdown_timeout=10, shutdown_quiet_period=1)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_and_collect, runtime, caught)
            await app.gateway.send(Step("one"))
            runtime.request_stop()
            while len(await chain_of(app.store)) < 50:  # it goes on: nobody's wait is over by itself
                await trio.lowlevel.checkpoint()
            assert not caught
            mock_clock.jump(10)
        assert isinstance(caught[0], ShutdownDeadlineError)
        links = await chain_of(app.store)
        assert links == list(range(len(links)))
