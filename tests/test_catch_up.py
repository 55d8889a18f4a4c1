"""Catching up with the store: checkpoints, gaps, failures, restarts."""

import random
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import trio
from attrs import define, field
from chain_domain import Answering, Chain, Note, Notebook, Noted, Step, Stepped, Steps, Twice
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow import (
    App,
    CommandGateway,
    CommandRejectedError,
    DomainEvent,
    InMemoryCommandBus,
    InMemoryDomainEventBus,
    InMemoryEventStore,
    StateEvent,
    event_processor,
    on_event,
    on_state_event,
    projection,
    saga,
)
from trio_wow.dispatch import CommandDispatcher, _progress
from trio_wow.domain import Domain
from trio_wow.errors import (
    AdmissionClosedError,
    AppendOutcomeUnknownError,
    ConfigurationError,
    HandlerExitError,
    ShutdownDeadlineError,
    StoreLockedError,
    StoreReadOnlyError,
    WaitAbandonedError,
)
from trio_wow.eventsourcing import RecordedStream
from trio_wow.execution import KeyedExecutor
from trio_wow.messages import AggregateId, DomainEventStream, Serializer
from trio_wow.runtime import Runtime


class DurableStore(InMemoryEventStore):
    """A memory store that outlives its applications, with checkpoints."""

    transaction_type: type = object

    def __init__(self, serializer: Serializer) -> None:
        super().__init__(serializer)
        self.checkpoints: dict[str, int] = {}
        self.transaction_type: type = type(None)
        self.asked: list[int] = []

    async def read_all(self, after: int, limit: int) -> Sequence[RecordedStream]:
        self.asked.append(after)
        return await super().read_all(after, limit)

    async def load_checkpoint(self, processor: str) -> int:
        await trio.lowlevel.checkpoint()
        return self.checkpoints.get(processor, 0)

    async def save_checkpoint(self, processor: str, position: int) -> None:
        await trio.lowlevel.checkpoint()
        self.checkpoints[processor] = max(position, self.checkpoints.get(processor, 0))

    async def load_version(self, processor: str, aggregate_id: AggregateId) -> int:
        raise AssertionError("no processor of these tests takes a transaction")

    async def handle_once(
        self, processor: str, aggregate_id: AggregateId, version: int, position: int, work: Callable[[Any], object]
    ) -> bool:
        raise AssertionError("no processor of these tests takes a transaction")

    async def transact(self, work: Callable[[Any], object]) -> None:
        raise AssertionError("no processor of these tests takes a transaction")


DOMAIN = Domain([Chain, Notebook])


def chain(id: str) -> AggregateId:
    return AggregateId("chains", "chain", id)


def stepped(id: str, version: int, *numbers: int) -> DomainEventStream:
    return DomainEventStream(
        aggregate_id=chain(id),
        version=version,
        events=[Stepped(number) for number in numbers],
        command_id=f"command {version}",
        request_id=f"request {version}",
    )


async def filled(*streams: DomainEventStream) -> DurableStore:
    store = DurableStore(DOMAIN.serializer)
    for stream in streams:
        await store.append(stream)
    return store


def quick(app: App, **options: Any) -> Runtime:
    return app.runtime(**{"signals": False, "shutdown_quiet_period": 0, **options})


async def serve_until_caught_up(app: App, **options: Any) -> None:
    async with app.serving(quick(app, **options)):
        pass


async def serve_until_forced(runtime: Runtime, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
    with suppress(ShutdownDeadlineError):
        await runtime.serve(task_status=task_status)


async def send_first(app: App, id: str) -> None:
    with suppress(AdmissionClosedError, WaitAbandonedError):
        await app.gateway.send_and_wait(Step(id, 0), request_id=f"first of {id}")


@event_processor
@define
class Mails:
    """Sends a mail for each step; some addresses fail."""

    sent: list[tuple[str, int]] = field(factory=list)
    failing: set[int] = field(factory=set)
    held: dict[int, trio.Event] = field(factory=dict)

    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> None:
        number = event.body.number
        if number in self.held:
            await self.held[number].wait()
        if number in self.failing:
            raise LookupError(f"no address {number}")
        self.sent.append((event.aggregate_id.id, number))


class TestMemory:
    async def test_a_view_in_memory_is_made_anew_before_anything_is_taken(self, autojump_clock: MockClock) -> None:
        held = trio.Event()

        @projection
        class Slow(Steps):
            @on_event
            async def stepped(self, event: DomainEvent[Stepped]) -> None:  # type: ignore[override]
                await held.wait()
                super().stepped(event)

        store = await filled(stepped("a", 1, 1), stepped("b", 1, 2), stepped("a", 2, 3, 4))
        slow = Slow()
        app = App(DOMAIN, [slow], store=store)
        runtime = quick(app)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.serve)
            await wait_all_tasks_blocked()
            with pytest.raises(AdmissionClosedError):
                await app.gateway.send(Step("a", 5))
            held.set()
            await wait_all_tasks_blocked()
            assert slow.of == {"a": [1, 3, 4], "b": [2]}
            await app.gateway.send_and_wait(Step("a", 5))
            runtime.request_stop()
        assert slow.of == {"a": [1, 3, 4, 5], "b": [2]}

    async def test_a_second_runtime_of_one_application_goes_on_where_the_first_was(self) -> None:
        steps = Steps()
        app = App(DOMAIN, [steps], store=await filled(stepped("a", 1, 1)))
        for number in (2, 3):
            async with app.serving(quick(app)) as gateway:
                await gateway.send_and_wait(Step("a", number))
        await app.store.append(stepped("a", 4, 4))
        await serve_until_caught_up(app)
        assert steps.of == {"a": [1, 2, 3, 4]}

    async def test_two_projections_that_stand_at_different_places_each_get_the_rest(self) -> None:
        first, second = Steps(), Steps()
        store = await filled(stepped("a", 1, 1), stepped("b", 1, 1))
        held = {1: trio.Event()}
        mails = Mails(held=held)
        app = App(DOMAIN, [first, second, mails], store=store)
        app._catch_up.progress_of(
            second, "projection-dispatcher/Steps", [("chains", "chain")], in_memory=True, in_transaction=False
        ).handled(chain("a"), 1)
        held[1].set()
        await serve_until_caught_up(app)
        assert first.of == {"a": [1], "b": [1]}
        assert second.of == {"b": [1]}

    async def test_what_is_dropped_while_catching_up_is_read(self) -> None:
        """The saga answers stored events while the projection has read to the end already."""
        gate = trio.Event()

        @saga
        class Late:
            @on_event
            async def stepped(self, event: DomainEvent[Stepped]) -> Step | None:
                await gate.wait()
                return Step("b", event.body.number + 1) if event.body.number < 3 else None

        held = trio.Event()

        @projection
        class Slow(Steps):
            @on_event
            async def stepped(self, event: DomainEvent[Stepped]) -> None:  # type: ignore[override]
                if event.body.number == 1:
                    await held.wait()
                super().stepped(event)

        slow = Slow()
        app = App(DOMAIN, [slow, Late()], store=await filled(stepped("a", 1, 1)))
        runtime = quick(app)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.serve)
            await wait_all_tasks_blocked()
            gate.set()
            await wait_all_tasks_blocked()
            held.set()
            await wait_all_tasks_blocked()
            assert slow.of == {"a": [1], "b": [2, 3]}
            runtime.request_stop()

    async def test_what_is_dropped_while_an_empty_page_is_on_its_way_is_read(self) -> None:
        class Late(DurableStore):
            between: Callable[[], Any] | None = None

            async def read_all(self, after: int, limit: int) -> Sequence[RecordedStream]:
                page = await super().read_all(after, limit)
                between, self.between = self.between, None if not page else self.between
                if not page and between is not None:
                    await between()
                return page

        store, steps = Late(DOMAIN.serializer), Steps()
        app = App(DOMAIN, [steps], store=store)
        runtime = quick(app)

        async def publish() -> None:
            await store.append(stepped("a", 1, 1))
            lease = runtime._admission.try_acquire()
            assert lease is not None
            with lease:
                await app.events.send(stepped("a", 1, 1))
            await wait_all_tasks_blocked()

        async def second_page() -> None:  # the first is the one that the checkpoints are moved over
            store.between = publish

        store.between = second_page
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.serve)
            await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()
            assert steps.of == {"a": [1]}
            runtime.request_stop()

    async def test_nothing_is_read_while_the_runtime_is_overdrawn(self) -> None:
        steps = Steps()
        store = await filled(stepped("a", 1, 1))
        runtime = quick(App(DOMAIN, [steps], store=store))
        runtime._admission.begin_overdraft()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.serve)
            await wait_all_tasks_blocked()
            assert store.asked == []
            runtime._admission.end_overdraft()
            await wait_all_tasks_blocked()
            assert steps.of == {"a": [1]}
            runtime.request_stop()

    async def test_a_stop_while_the_runtime_is_overdrawn_ends_the_reading(self) -> None:
        store = await filled(stepped("a", 1, 1))
        runtime = quick(App(DOMAIN, [Steps()], store=store))
        runtime._admission.begin_overdraft()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.serve)
            await wait_all_tasks_blocked()
            runtime.request_stop()

    async def test_an_error_of_the_store_fails_the_start(self) -> None:
        class Broken(DurableStore):
            async def read_all(self, after: int, limit: int) -> Sequence[RecordedStream]:
                raise StoreReadOnlyError("here", "cannot be read")

        app = App(DOMAIN, [Steps()], store=Broken(DOMAIN.serializer))
        with pytest.raises(StoreReadOnlyError):
            await quick(app).serve()


class TestGaps:
    async def test_a_missed_version_is_read_from_the_store_first(self) -> None:
        steps = Steps()
        app = App(DOMAIN, [steps])
        async with app.serving(quick(app)) as gateway:
            await app.store.append(stepped("a", 1, 1))
            await app.store.append(stepped("a", 2, 2))
            await gateway.send_and_wait(Step("a", 3))
        assert steps.of == {"a": [1, 2, 3]}

    @pytest.mark.parametrize("remembered", [1, 10_000])
    async def test_versions_that_are_not_remembered_are_asked_of_the_store(
        self, monkeypatch: pytest.MonkeyPatch, remembered: int, autojump_clock: MockClock
    ) -> None:
        class Asked(InMemoryEventStore):
            count = 0

            async def version_at(self, aggregate_id: AggregateId, position: int) -> int:
                self.count += 1
                return await super().version_at(aggregate_id, position)

        monkeypatch.setattr(_progress, "SETTLED", remembered)
        steps, store = Steps(), Asked(DOMAIN.serializer)
        app = App(DOMAIN, [steps], store=store)
        async with app.serving(quick(app)) as gateway:
            for number in range(3):
                for id in "abcde":
                    await gateway.send_and_wait(Step(id, number), request_id=str(number))
                await trio.sleep(2)  # the checkpoint moves
            for id in "abcde":  # published again
                await gateway.send_and_wait(Step(id), request_id="1")
        assert steps.of == {id: [0, 1, 2] for id in "abcde"}
        assert (store.count == 0) is (remembered > 5)


class TestFailures:
    async def test_a_failed_event_holds_its_aggregate_and_is_tried_again_with_the_next(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        mails = Mails(failing={2})
        app = App(DOMAIN, [mails])
        async with app.serving(quick(app)) as gateway:
            for number in (1, 2, 3):
                await gateway.send_and_wait(Step("a", number))
            await gateway.send_and_wait(Step("b", 7))
            await wait_all_tasks_blocked()
            assert mails.sent == [("a", 1), ("b", 7)]
            mails.failing.clear()
            await gateway.send_and_wait(Step("a", 4))
        assert mails.sent == [("a", 1), ("b", 7), ("a", 2), ("a", 3), ("a", 4)]
        assert [record.getMessage().splitlines()[0] for record in caplog.records] == [
            f"event-dispatcher/Mails.stepped failed on version 2 of chains.chain/a, after {attempts} attempts: "
            "LookupError: no address 2"
            for attempts in (4, 5)  # what has failed for good is tried once more with the next, not four times
        ]

    @pytest.mark.parametrize("state_events", [False, True], ids=["events", "states"])
    async def test_each_event_behind_a_failed_one_reads_that_and_not_all_between(self, state_events: bool) -> None:
        @event_processor
        class States(Mails):
            @on_state_event
            async def stepped(self, event: StateEvent[Chain]) -> None:  # type: ignore[override]
                await super().stepped(DomainEvent(Stepped(event.state.steps[-1]), 1, event.stream))

        class Counting(DurableStore):
            read = 0

            async def load(self, *arguments: Any, **options: Any) -> Sequence[DomainEventStream]:
                streams = await super().load(*arguments, **options)
                self.read += len(streams)
                return streams

        store = await filled(*(stepped("a", number, number) for number in range(1, 101)))
        store.__class__ = Counting
        assert isinstance(store, Counting)
        mails = (States if state_events else Mails)(failing={1})
        app = App(DOMAIN, [mails], store=store)
        await serve_until_caught_up(app)
        assert store.read < 200
        mails.failing.clear()
        async with app.serving(quick(app)):
            await app.gateway.send_and_wait(Step("a", 101))
        assert mails.sent == [("a", number) for number in range(1, 102)]

    async def test_what_succeeded_of_a_failed_stream_is_not_run_again(self) -> None:
        ran: list[str] = []
        fail = True

        @projection
        class Two:
            @on_event
            def first(self, event: Stepped) -> None:
                ran.append(f"first {event.number}")

            @on_event
            def second(self, event: Stepped) -> None:
                if fail and event.number == 100:
                    raise LookupError
                ran.append(f"second {event.number}")

            @on_event
            def third(self, event: Stepped) -> None:
                ran.append(f"third {event.number}")

        app = App(DOMAIN, [Two()])
        async with app.serving(quick(app)) as gateway:
            await gateway.send_and_wait(Twice("a"))
            await wait_all_tasks_blocked()
            assert ran == ["first 100", "third 100"]
            fail = False
            await gateway.send_and_wait(Step("a", 7))
        assert ran == [
            "first 100",
            "third 100",
            "second 100",
            *(f"{which} {number}" for number in (101, 7) for which in ("first", "second", "third")),
        ]

    async def test_fs17_a_stored_event_that_cannot_be_read_holds_the_checkpoint_and_is_told(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = await filled(stepped("a", 1, 1), stepped("b", 1, 1))
        note = DOMAIN.command_message(Note("n", "x"))
        await store.append(
            DomainEventStream(
                aggregate_id=note.aggregate_id, version=1, events=[Noted("x")], command_id="c", request_id="r"
            )
        )
        await store.append(stepped("b", 2, 2))
        store._histories[chain("a")].streams[0] = store._histories[chain("a")].streams[0].replace(b"Stepped", b"Gone")
        mails = Mails()
        await serve_until_caught_up(App(DOMAIN, [mails], store=store))
        assert mails.sent == [("b", 1), ("b", 2)]
        assert store.checkpoints == {}
        (record,) = caplog.records
        assert record.getMessage() == (
            "version 1 of chains.chain/a cannot be read, and holds the checkpoints of event-dispatcher"
        )
        assert "message type 'Gone'" in caplog.text

    @pytest.mark.parametrize("while_catching_up", [True, False])
    async def test_a_store_that_does_not_say_what_is_handled_is_told_and_asked_again_with_the_next(
        self, while_catching_up: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Locked(DurableStore):
            locked = False

            async def version_at(self, aggregate_id: AggregateId, position: int) -> int:
                if self.locked and aggregate_id == chain("a"):
                    raise StoreLockedError("here", "is locked")
                return await super().version_at(aggregate_id, position)

        store = Locked(DOMAIN.serializer)
        for stream in (stepped("a", 1, 1), *([stepped("a", 2, 2), stepped("b", 1, 1)] if while_catching_up else [])):
            await store.append(stream)
        await store.save_checkpoint("event-dispatcher/Mails", 1)
        store.locked = while_catching_up
        mails = Mails()
        app = App(DOMAIN, [mails], store=store)
        async with app.serving(quick(app)) as gateway:
            if not while_catching_up:
                store.locked = True
                for command in (Step("a", 2), Step("b", 1)):
                    await gateway.send_and_wait(command)
                await wait_all_tasks_blocked()
            assert mails.sent == [("b", 1)]
            assert [record.getMessage() for record in caplog.records] == [
                "what Mails has missed of chains.chain/a before version 2 cannot be read"
            ]
            store.locked = False
            await gateway.send_and_wait(Step("a", 3))
        assert mails.sent == [("b", 1), ("a", 2), ("a", 3)]
        assert store.checkpoints == {"event-dispatcher/Mails": 4}

    async def test_a_handler_that_exits_while_catching_up_ends_the_runtime(self) -> None:
        @projection
        class Exiting:
            @on_event
            def stepped(self, event: Stepped) -> None:
                raise SystemExit(0)

        app = App(DOMAIN, [Exiting()], store=await filled(stepped("a", 1, 1)))
        with pytest.raises(HandlerExitError):
            await quick(app).serve()


class TestCheckpoints:
    async def test_fs19_a_failed_event_is_tried_again_after_a_restart(self) -> None:
        store = await filled(*(stepped("a", version, version) for version in range(1, 6)))
        mails = Mails(failing={3})
        await serve_until_caught_up(App(DOMAIN, [mails], store=store))
        assert store.checkpoints == {"event-dispatcher/Mails": 2}
        again = Mails(failing={3})
        await serve_until_caught_up(App(DOMAIN, [again], store=store))
        assert again.sent == []
        last = Mails()
        await serve_until_caught_up(App(DOMAIN, [last], store=store))
        assert [number for _, number in mails.sent + last.sent] == [1, 2, 3, 4, 5]
        assert store.checkpoints == {"event-dispatcher/Mails": 5}

    async def test_a_checkpoint_never_passes_what_is_running_or_unhandled(self, autojump_clock: MockClock) -> None:
        store = DurableStore(DOMAIN.serializer)
        mails = Mails(held={2: trio.Event()}, failing={4})
        async with App(DOMAIN, [mails], store=store).serving() as gateway:
            for number in (1, 2, 3, 4, 5):
                await gateway.send_and_wait(Step(f"{number}", number))
            await trio.sleep(5)
            assert store.checkpoints == {"event-dispatcher/Mails": 1}
            assert [number for _, number in mails.sent] == [1, 3, 5]
            mails.held[2].set()
            await trio.sleep(5)
            assert store.checkpoints == {"event-dispatcher/Mails": 3}
            mails.failing.clear()
            await gateway.send_and_wait(Step("4", 6))
            await trio.sleep(5)
            assert store.checkpoints == {"event-dispatcher/Mails": 6}

    async def test_fs19_where_nothing_matches_the_checkpoint_moves_and_a_restart_goes_on_from_it(
        self,
    ) -> None:
        seen: list[str] = []

        @event_processor
        class Notes:
            @on_event
            def noted(self, event: Noted) -> None:
                seen.append(event.text)

        store = await filled(*(stepped(str(n % 100), n // 100 + 1, n) for n in range(9_999)))
        note = AggregateId("notes", "notebook", "n")
        await store.append(
            DomainEventStream(aggregate_id=note, version=1, events=[Noted("last")], command_id="c", request_id="r")
        )
        read_all = DurableStore.read_all
        stop_at = 5_000

        class Stopping(DurableStore):
            async def read_all(self, after: int, limit: int) -> Sequence[RecordedStream]:
                if after >= stop_at:
                    raise StoreReadOnlyError("here", "gone")
                return await read_all(self, after, limit)

        store.__class__ = Stopping
        with pytest.raises(StoreReadOnlyError):
            await quick(App(DOMAIN, [Notes()], store=store)).serve()
        assert stop_at - _progress.PAGE <= store.checkpoints["event-dispatcher/Notes"] <= stop_at
        store.__class__ = DurableStore
        store.asked.clear()
        await serve_until_caught_up(App(DOMAIN, [Notes()], store=store))
        assert seen == ["last"]
        assert store.checkpoints == {"event-dispatcher/Notes": 10_000}
        assert min(store.asked) >= stop_at - _progress.PAGE

    async def test_a_checkpoint_that_cannot_be_saved_is_saved_later(
        self, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Locked(DurableStore):
            locked = True

            async def save_checkpoint(self, processor: str, position: int) -> None:
                if self.locked:
                    raise StoreLockedError("here", "is locked")
                await super().save_checkpoint(processor, position)

        store = Locked(DOMAIN.serializer)
        async with App(DOMAIN, [Mails()], store=store).serving() as gateway:
            await gateway.send_and_wait(Step("a", 1))
            await trio.sleep(2)
            assert "the checkpoints of event-dispatcher stay behind for now: here: is locked" in caplog.text
            store.locked = False
        assert store.checkpoints == {"event-dispatcher/Mails": 1}

    async def test_a_checkpoint_that_two_move_at_once_never_goes_back(self) -> None:
        class Slow(DurableStore):
            gate: trio.Event | None = None

            async def save_checkpoint(self, processor: str, position: int) -> None:
                if processor == "first" and self.gate is None:
                    self.gate = trio.Event()
                    await self.gate.wait()
                await super().save_checkpoint(processor, position)

        store = Slow(DOMAIN.serializer)
        note = AggregateId("notes", "notebook", "n")
        await store.append(
            DomainEventStream(aggregate_id=note, version=1, events=[Noted("x")], command_id="c", request_id="r")
        )
        await store.append(stepped("a", 1, 1))
        chains = ("chains", "chain")
        first = _progress.Progress("first", [chains, ("notes", "notebook")], store, store, in_transaction=False)
        second = _progress.Progress("second", [chains], store, store, in_transaction=False)
        first.handled(note, 1)
        for each in (first, second):
            each.handled(chain("a"), 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_progress.advance, store, [first, second])
            await wait_all_tasks_blocked()
            await _progress.advance(store, [first, second])
            assert store.gate is not None
            store.gate.set()
        assert (first.position, second.position) == (2, 2)

    def test_two_processors_that_would_share_a_checkpoint_are_refused(self) -> None:
        store = DurableStore(DOMAIN.serializer)
        with pytest.raises(ConfigurationError, match="several @event_processor classes are named Mails"):
            App(DOMAIN, [Mails(), Mails()], store=store)
        App(DOMAIN, [Steps(), Steps()], store=store)  # in memory each has its own

    def test_a_transaction_needs_a_store_that_has_one(self) -> None:
        @projection
        class Rows:
            @on_event
            def stepped(self, event: Stepped, connection: sqlite3.Connection) -> None: ...

        with pytest.raises(
            ConfigurationError, match="Rows.stepped takes connection: Connection, .* that has such transactions"
        ):
            App(DOMAIN, [Rows()])


class TestTurns:
    """Two applications with the same processors take turns on one store, each going on with what it had in memory."""

    @staticmethod
    async def take_turn(app: App, *commands: Step | Twice) -> None:
        async with app.serving(quick(app)) as gateway:
            for command in commands:
                await gateway.send_and_wait(command)

    async def test_what_the_other_has_handled_is_not_handled_again(self) -> None:
        store, sent = DurableStore(DOMAIN.serializer), list[tuple[str, int]]()
        first, second = (App(DOMAIN, [Mails(sent)], store=store) for _ in range(2))
        await self.take_turn(first, Step("a", 1))
        await self.take_turn(second, Step("a", 2))
        await self.take_turn(first, Step("a", 3))
        assert sent == [("a", 1), ("a", 2), ("a", 3)]

    async def test_nor_where_this_one_was_ahead_of_its_checkpoint(self) -> None:
        store, sent = DurableStore(DOMAIN.serializer), list[tuple[str, int]]()
        one, other = Mails(failing={7}), Mails(sent)
        first, second = (App(DOMAIN, [mails], store=store) for mails in (one, other))
        await self.take_turn(first, Step("bad", 7), Step("a", 1))
        await self.take_turn(second, Step("a", 2))
        assert one.sent == [("a", 1)]
        assert sorted(sent) == [("a", 1), ("a", 2), ("bad", 7)]
        await self.take_turn(first, Step("a", 3))
        assert one.sent == [("a", 1), ("a", 3)]

    async def test_what_this_one_has_handled_after_the_other_ones_checkpoint_stays_handled(self) -> None:
        store = DurableStore(DOMAIN.serializer)
        one = Mails(failing={7})
        first = App(DOMAIN, [one], store=store)
        await self.take_turn(first, Step("x", 0), Step("bad", 7), Step("y", 0), Step("a", 1))
        await store.save_checkpoint("event-dispatcher/Mails", 3)  # the other was killed here
        await self.take_turn(first, Step("a", 2))
        assert sorted(one.sent) == [("a", 1), ("a", 2), ("x", 0), ("y", 0)]
        assert store.checkpoints == {"event-dispatcher/Mails": 5}

    async def test_what_had_succeeded_of_a_stream_is_not_taken_for_a_part_of_the_next(self) -> None:
        @event_processor
        @define
        class Two:
            fails: bool
            ran: list[str] = field(factory=list)

            @on_event
            def first(self, event: Stepped) -> None:
                self.ran.append(f"first {event.number}")

            @on_event
            def second(self, event: Stepped) -> None:
                if self.fails:
                    raise LookupError
                self.ran.append(f"second {event.number}")

        store, one = DurableStore(DOMAIN.serializer), Two(fails=True)
        first = App(DOMAIN, [one], store=store)
        await self.take_turn(first, Step("a", 1))
        await self.take_turn(App(DOMAIN, [Two(fails=False)], store=store))
        one.fails = False
        await self.take_turn(first, Step("a", 2))
        assert one.ran == ["first 1", "first 2", "second 2"]

    async def test_side_by_side_each_keeps_its_checkpoint_before_what_the_other_has_appended(
        self, autojump_clock: MockClock
    ) -> None:
        """A limit, told in docs/concepts.md under "Durability"."""
        store = DurableStore(DOMAIN.serializer)
        one, other, later = Mails(), Mails(), Mails()
        first, second = (App(DOMAIN, [mails], store=store) for mails in (one, other))
        async with first.serving() as here, second.serving() as there:
            for gateway, command in ((here, Step("a", 1)), (there, Step("b", 1)), (here, Step("a", 2))):
                await gateway.send_and_wait(command)
            await trio.sleep(5)
        assert (one.sent, other.sent) == ([("a", 1), ("a", 2)], [("b", 1)])
        assert store.checkpoints == {"event-dispatcher/Mails": 1}
        await serve_until_caught_up(App(DOMAIN, [later], store=store))
        assert sorted(later.sent) == [("a", 2), ("b", 1)]
        assert store.checkpoints == {"event-dispatcher/Mails": 3}

    async def test_in_any_order_each_event_is_handled_once(self) -> None:
        for seed in range(40):
            rng = random.Random(seed)
            store, sent = DurableStore(DOMAIN.serializer), list[tuple[str, int]]()
            apps = [App(DOMAIN, [Mails(sent)], store=store) for _ in range(3)]
            commands = [Step(rng.choice("abc"), number) for number in range(12)]
            for command in commands:
                await self.take_turn(rng.choice(apps), command)
            assert sent == [(command.id, command.number) for command in commands], f"seed {seed}"


class TestSagas:
    async def test_an_event_is_finished_when_its_command_has_its_result(self, autojump_clock: MockClock) -> None:
        class Gated(DurableStore):
            gate = trio.Event()

            async def append(self, stream: DomainEventStream) -> None:
                if stream.events == (Stepped(1),):
                    await self.gate.wait()
                await super().append(stream)

        store = Gated(DOMAIN.serializer)
        async with App(DOMAIN, [Answering(1)], store=store).serving() as gateway:
            await gateway.send_and_wait(Step("a", 0))
            await trio.sleep(5)
            assert store.checkpoints == {}
            store.gate.set()
            await trio.sleep(5)
            assert store.checkpoints == {"saga-dispatcher/Answering": 2}

    async def test_killed_between_send_and_append_the_command_is_sent_again_after_the_restart(self) -> None:
        class Stuck(DurableStore):
            async def append(self, stream: DomainEventStream) -> None:
                await trio.sleep_forever()

        store = await filled(stepped("a", 1, 0))
        store.__class__ = Stuck
        runtime = quick(App(DOMAIN, [Answering(1)], store=store))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_until_forced, runtime)
            await wait_all_tasks_blocked()
            runtime.force_stop()
        assert len(await store.read_all(0, 9)) == 1
        store.__class__ = DurableStore
        for _ in range(2):
            steps = Steps()
            await serve_until_caught_up(App(DOMAIN, [Answering(1), steps], store=store))
            assert steps.of == {"a": [0, 1]}
        assert store.checkpoints == {"saga-dispatcher/Answering": 2}

    @pytest.mark.parametrize("stored", [False, True])
    async def test_a_command_whose_append_is_not_known_is_sent_once(
        self, stored: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Unknown(DurableStore):
            async def append(self, stream: DomainEventStream) -> None:
                if stored:
                    await super().append(stream)
                raise AppendOutcomeUnknownError(stream.aggregate_id, stream.version)

        store = await filled(stepped("a", 1, 0))
        store.__class__ = Unknown
        await serve_until_caught_up(App(DOMAIN, [Answering(1)], store=store))
        assert store.checkpoints == ({"saga-dispatcher/Answering": 2} if stored else {})
        assert ("whether version 2 of chains.chain/a is stored is not known" in caplog.text) is not stored
        store.__class__ = DurableStore
        steps = Steps()
        await serve_until_caught_up(App(DOMAIN, [Answering(1), steps], store=store))
        assert steps.of == {"a": [0, 1]}

    async def test_a_command_that_is_refused_by_a_rule_finishes_its_event(self) -> None:
        class Refusing(DurableStore):
            async def append(self, stream: DomainEventStream) -> None:
                raise CommandRejectedError("no")

        store = await filled(stepped("a", 1, 0))
        store.__class__ = Refusing
        await serve_until_caught_up(App(DOMAIN, [Answering(1)], store=store))
        assert store.checkpoints == {"saga-dispatcher/Answering": 1}

    async def test_who_waits_for_a_command_that_is_let_go_at_the_end_of_the_runtime_is_told(
        self, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Else the saga would wait for its command, and the command dispatcher for the saga."""

        class Gated(DurableStore):
            appended, gate = trio.Event(), trio.Event()

            async def append(self, stream: DomainEventStream) -> None:
                await super().append(stream)
                self.appended.set()
                await self.gate.wait()

        store = await filled(stepped("a", 1, 0))
        store.__class__ = Gated
        assert isinstance(store, Gated)
        runtime = quick(App(DOMAIN, [Answering(1)], store=store))
        start = trio.current_time()
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runtime.serve)
                await store.appended.wait()
                runtime._fail(OSError("disk"))
                store.gate.set()
        assert caught.group_contains(OSError, match="disk")
        assert trio.current_time() == start
        assert "Answering.stepped did not finish version 1 of chains.chain/a" in caplog.text
        assert store.checkpoints == {}

    async def test_who_waits_for_a_command_that_never_reached_its_dispatcher_is_told(self) -> None:
        commands, events = InMemoryCommandBus(), InMemoryDomainEventBus()
        gateway = CommandGateway(DOMAIN, commands)
        second = DOMAIN.command_message(Step("b"))

        class Failing(InMemoryEventStore):
            async def append(self, stream: DomainEventStream) -> None:
                await commands.send(second)
                raise SystemExit

        store = Failing(DOMAIN.serializer)
        dispatcher = CommandDispatcher(DOMAIN, commands, store, events, results=gateway.results)
        runtime = Runtime([dispatcher, gateway], signals=False)
        with pytest.raises(ExceptionGroup), trio.fail_after(5), gateway.results.expecting(second.id) as wait:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                await gateway.send(Step("a"))
                with pytest.raises(WaitAbandonedError):
                    await wait.wait()

    async def test_who_waits_for_a_command_dispatcher_that_has_failed_is_told(self) -> None:
        class Failing(DurableStore):
            async def append(self, stream: DomainEventStream) -> None:
                raise SystemExit

        store = await filled(stepped("a", 1, 0))
        store.__class__ = Failing
        with pytest.raises(HandlerExitError), trio.fail_after(5):
            await quick(App(DOMAIN, [Answering(1)], store=store)).serve()
        assert store.checkpoints == {}

    async def test_catching_up_with_sagas_in_small_windows_does_not_lock(self) -> None:
        store = await filled(*(stepped(str(n), 1, 0) for n in range(50)))

        @saga
        class Many:
            @on_event
            async def stepped(self, event: DomainEvent[Stepped]) -> list[Note]:
                return [Note(f"{event.aggregate_id.id} {n}", "x") for n in range(3)] if event.version == 1 else []

        app = App(DOMAIN, [Many(), Answering(2)], store=store)
        with trio.fail_after(10):
            await serve_until_caught_up(app, executor=KeyedExecutor(max_in_flight=2))
        steps = Steps()
        await serve_until_caught_up(App(DOMAIN, [steps], store=store))
        assert steps.of == {str(n): [0, 1, 2] for n in range(50)}


class TestStops:
    async def test_a_stop_while_catching_up_finishes_what_was_taken_and_goes_on_next_time(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = await filled(*(stepped(str(n), 1, 0) for n in range(2_000)))
        runtimes = 0
        while True:
            app = App(DOMAIN, [Answering(1)], store=store)
            runtime = quick(app)
            runtimes += 1
            before = len(await store.read_all(0, 10_000))
            stop_after = before + 300

            async def append(stream: DomainEventStream, *, stop_after: int, runtime: Runtime) -> None:
                await DurableStore.append(store, stream)
                if len(store._all) >= stop_after:
                    runtime.request_stop()

            store.append = partial(append, stop_after=stop_after, runtime=runtime)  # type: ignore[method-assign]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runtime.serve)
                await wait_all_tasks_blocked()
                runtime.request_stop()
            if len(store._all) == before:
                break
        assert 3 < runtimes < 12
        assert len(store._all) == 4_000
        assert not caplog.records

    async def test_random_kills_lose_nothing_and_repeat_nothing(self) -> None:
        for seed in range(60):
            rng = random.Random(seed)
            store = DurableStore(DOMAIN.serializer)
            wanted = {str(n): 3 for n in range(8)}
            while True:
                app = App(DOMAIN, [Answering(3), Steps()], store=store)
                runtime = quick(app, executor=KeyedExecutor(max_in_flight=rng.choice((1, 3, 256))))
                async with trio.open_nursery() as nursery:
                    await nursery.start(serve_until_forced, runtime)
                    for id in wanted:
                        nursery.start_soon(send_first, app, id)
                    for _ in range(rng.randrange(60)):
                        await trio.lowlevel.checkpoint()
                    if rng.random() < 0.7:
                        runtime.force_stop()
                    else:
                        await wait_all_tasks_blocked()
                        runtime.request_stop()
                if len(store._all) == 4 * len(wanted):
                    break
            final = Steps()
            await serve_until_caught_up(App(DOMAIN, [Answering(3), final], store=store))
            assert final.of == {id: [0, 1, 2, 3] for id in wanted}, f"seed {seed}"
