"""Dispatchers in a running runtime: the command pipeline, processors, sagas, and what happens when a part fails."""

import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from attrs import define, field, frozen
from chain_domain import (
    Answering,
    Break,
    Chain,
    Everything,
    Ignore,
    Note,
    Notebook,
    Noted,
    Refuse,
    Step,
    Stepped,
    Steps,
    Twice,
    Unwritable,
    registry_of,
)
from support import collect, task_names
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from trio_wow import (
    App,
    CommandGateway,
    DomainEvent,
    aggregate,
    event_processor,
    on_command,
    on_event,
    on_sourcing,
    projection,
    saga,
)
from trio_wow.buses import InMemoryCommandBus, InMemoryDomainEventBus
from trio_wow.dispatch import (
    CommandDispatcher,
    CommandResults,
    FunctionRegistry,
    GroupedScheduling,
    ProjectionDispatcher,
    SagaDispatcher,
)
from trio_wow.domain import Domain
from trio_wow.errors import (
    AdmissionClosedError,
    AppendOutcomeUnknownError,
    CommandFailedError,
    ConfigurationError,
    HandlerExitError,
    RuntimeStateError,
    ShutdownDeadlineError,
    StoreLockedError,
    VersionConflictError,
)
from trio_wow.eventsourcing import InMemoryEventStore
from trio_wow.execution import KeyedExecutor
from trio_wow.messages import AggregateId, CommandError, DomainEventStream, Serializer
from trio_wow.runtime import Runtime


async def stored(app: App, id: str) -> Sequence[DomainEventStream]:
    return await app.store.load(app.domain.model_of(app.domain.command_message(Step(id)).aggregate_id).aggregate_id(id))


class Jittery(InMemoryEventStore):
    def __init__(self, serializer: Serializer, rng: random.Random) -> None:
        super().__init__(serializer)
        self.rng = rng

    async def append(self, stream: DomainEventStream) -> None:
        for _ in range(self.rng.randrange(3)):
            await trio.lowlevel.checkpoint()
        await super().append(stream)


@asynccontextmanager
async def serving(app: App, **options: Any) -> AsyncIterator[CommandGateway]:
    async with app.serving(app.runtime(**{"signals": False, "shutdown_quiet_period": 0, **options})) as gateway:
        yield gateway


class TestCommands:
    async def test_a_command_becomes_a_stored_and_published_stream(self) -> None:
        steps = Steps()
        app = App([Chain], [steps])
        async with serving(app) as gateway:
            result = await gateway.send_and_wait(Step("a", 7), request_id="r1", headers={"trace": "t"})
            assert (result.version, result.error) == (1, None)
            assert (await gateway.send_and_wait(Twice("a"))).version == 2
        first, second = await stored(app, "a")
        assert first.events == (Stepped(7),)
        assert (first.version, first.request_id, first.headers) == (1, "r1", {"trace": "t"})
        assert first.command_id == result.command_id
        assert second.events == (Stepped(100), Stepped(101))
        assert steps.of == {"a": [7, 100, 101]}
        assert steps.versions == {"a": [1, 2, 2]}

    @pytest.mark.parametrize(
        ("command", "error"),
        [
            (Refuse("a", "no more"), CommandError("CommandRejectedError", "no more")),
            (Break("a"), CommandError("ZeroDivisionError", "cannot be applied")),
        ],
    )
    async def test_a_failing_command_is_a_result_and_stores_and_publishes_nothing(
        self, command: object, error: CommandError
    ) -> None:
        steps = Steps()
        app = App([Chain], [steps])
        async with serving(app) as gateway:
            result = await gateway.send_and_wait(command)
            assert (result.version, result.error) == (None, error)
            with pytest.raises(CommandFailedError, match=f"{error.code}: {error.text}"):
                result.raise_for_error()
            assert (await gateway.send_and_wait(Step("a"))).version == 1
        assert len(await stored(app, "a")) == 1
        assert steps.of == {"a": [0]}

    async def test_an_event_that_cannot_be_written_fails_its_command(self) -> None:
        app = App([Chain])
        async with serving(app) as gateway:
            result = await gateway.send_and_wait(Unwritable("a"))
            assert result.error is not None
            assert result.error.code == "SerializationError"
        assert await stored(app, "a") == []

    async def test_a_rule_that_refuses_is_no_fault_and_a_bug_is_logged_with_its_traceback(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving(App([Chain])) as gateway:
            await gateway.send_and_wait(Refuse("a"))
            assert not caplog.records
            await gateway.send_and_wait(Break("a"))
        (record,) = caplog.records
        assert record.getMessage() == "Break for chains.chain/a failed"
        assert record.exc_info

    async def test_a_command_without_events_stores_nothing_and_is_not_remembered(self) -> None:
        app = App([Chain])
        async with serving(app) as gateway:
            for _ in range(2):
                result = await gateway.send_and_wait(Ignore("a"), request_id="same")
                assert (result.version, result.error) == (None, None)
        assert await stored(app, "a") == []

    async def test_a_request_is_stored_once_and_its_stream_published_again(self) -> None:
        steps = Steps()
        app = App([Chain], [steps])
        async with serving(app) as gateway:
            await gateway.send_and_wait(Step("a", 1), request_id="r")
            await gateway.send_and_wait(Step("a", 2))
            again = await gateway.send_and_wait(Step("a", 3), request_id="r")
            assert again.version == 1
            assert again.error is not None
            assert again.error.code == "DuplicateRequestIdError"
            other = await gateway.send_and_wait(Step("b", 4), request_id="r")
            assert other.error is None
        assert [stream.events[0] for stream in await stored(app, "a")] == [Stepped(1), Stepped(2)]
        assert steps.of["a"] == [1, 2]  # what is handled already is skipped

    async def test_a_duplicate_is_found_before_the_aggregate_decides(self) -> None:
        app = App([Chain])
        async with serving(app) as gateway:
            await gateway.send_and_wait(Step("a", 1), request_id="r")
            again = await gateway.send_and_wait(Refuse("a"), request_id="r")
            assert again.error is not None
            assert again.error.code == "DuplicateRequestIdError"

    async def test_a_request_that_another_process_stores_meanwhile_is_a_duplicate(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Late(InMemoryEventStore):
            asked = 0

            async def load_request(self, aggregate_id: AggregateId, request_id: str) -> DomainEventStream | None:
                self.asked += 1
                return await super().load_request(aggregate_id, request_id) if self.asked > 1 else None

        domain, steps = Domain([Chain]), Steps()
        app = App(domain, [steps], store=Late(domain.serializer))
        message = domain.command_message(Step("a"))
        async with serving(app) as gateway:
            await app.store.append(
                DomainEventStream(
                    aggregate_id=message.aggregate_id, version=1, events=[Stepped(7)], command_id="c", request_id="r"
                )
            )
            result = await gateway.send_and_wait(Step("a", 8), request_id="r")
        assert result.version == 1
        assert result.error is not None
        assert result.error.code == "DuplicateRequestIdError"
        assert steps.of == {"a": [7]}
        assert not caplog.records

    async def test_an_append_that_is_not_known_stays_so_when_the_store_cannot_be_asked_either(self) -> None:
        class CutOff(InMemoryEventStore):
            appended = False

            async def append(self, stream: DomainEventStream) -> None:
                await super().append(stream)
                self.appended = True
                raise AppendOutcomeUnknownError(stream.aggregate_id, stream.version)

            async def load_request(self, aggregate_id: AggregateId, request_id: str) -> DomainEventStream | None:
                if self.appended:
                    raise StoreLockedError("here", "locked")
                return await super().load_request(aggregate_id, request_id)

        domain = Domain([Chain])
        async with serving(App(domain, store=CutOff(domain.serializer))) as gateway:
            result = await gateway.send_and_wait(Step("a"))
        assert result.error is not None
        assert (result.error.code, result.error.undecided) == ("AppendOutcomeUnknownError", True)

    async def test_a_store_that_cannot_be_used_is_told_without_a_traceback(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Locked(InMemoryEventStore):
            async def append(self, stream: DomainEventStream) -> None:
                raise StoreLockedError("here", "is locked")

        domain = Domain([Chain])
        async with serving(App(domain, store=Locked(domain.serializer))) as gateway:
            result = await gateway.send_and_wait(Step("a"))
        assert result.error is not None
        assert result.error.undecided
        (record,) = caplog.records
        assert record.getMessage() == "Step for chains.chain/a failed: here: is locked"
        assert not record.exc_info

    async def test_another_tenant_is_refused(self) -> None:
        app = App([Chain])
        async with serving(app) as gateway:
            await gateway.send_and_wait(Step("a"), tenant="mine", request_id="r")
            for request_id in ("other", "r"):
                result = await gateway.send_and_wait(Step("a"), tenant="yours", request_id=request_id)
                assert result.error is not None
                assert result.error.code == "TenantMismatchError"
        assert len(await stored(app, "a")) == 1

    async def test_when_the_append_fails_nothing_is_published(self) -> None:
        class Conflicting(InMemoryEventStore):
            async def append(self, stream: DomainEventStream) -> None:
                raise VersionConflictError(stream.aggregate_id, 0, 1)

        steps = Steps()
        domain = Domain([Chain])
        async with serving(App(domain, [steps], store=Conflicting(domain.serializer))) as gateway:
            result = await gateway.send_and_wait(Step("a"))
            assert result.error is not None
            assert result.error.code == "VersionConflictError"
        assert steps.of == {}

    async def test_one_aggregates_commands_run_in_the_order_sent_and_others_beside_them(
        self, autojump_clock: MockClock
    ) -> None:
        class Slow(InMemoryEventStore):
            async def append(self, stream: DomainEventStream) -> None:
                await trio.sleep(1)
                await super().append(stream)

        domain = Domain([Chain])
        app = App(domain, store=Slow(domain.serializer))
        start = trio.current_time()
        async with serving(app) as gateway:
            for number in range(5):
                for id in "abcd":
                    await gateway.send(Step(id, number))
        assert trio.current_time() - start == pytest.approx(5)
        for id in "abcd":
            assert [stream.events[0] for stream in await stored(app, id)] == [Stepped(number) for number in range(5)]

    async def test_the_steps_of_a_command_happen_in_the_order_of_the_design(self) -> None:
        log: list[str] = []

        class Store(InMemoryEventStore):
            async def append(self, stream: DomainEventStream) -> None:
                await super().append(stream)
                log.append("append")

        class Events(InMemoryDomainEventBus):
            async def send(self, message: DomainEventStream) -> None:
                log.append("publish")
                await super().send(message)

        class Results(CommandResults):
            def processed(self, result: object, stored: object = None, /) -> None:
                log.append("processed")

        domain = Domain([Chain])
        commands = InMemoryCommandBus()
        gateway = CommandGateway(domain, commands)
        dispatcher = CommandDispatcher(domain, commands, Store(domain.serializer), Events(), results=Results())
        runtime = Runtime([dispatcher, gateway], signals=False, shutdown_quiet_period=0)
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            await gateway.send(Step("a"))
            runtime.request_stop()
        assert log == ["append", "publish", "processed"]

    @pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
    async def test_a_function_that_leaves_a_scope_open_fails_its_command_before_anything_is_stored(
        self, is_async: bool
    ) -> None:
        @frozen
        class Leak:
            id: str

        @frozen
        class Leaked:
            pass

        @aggregate(context="leaks")
        @define
        class Leaky:
            id: str

            if is_async:

                @on_command
                async def leak(self, command: Leak) -> Leaked:
                    trio.CancelScope().__enter__()
                    await trio.lowlevel.checkpoint()
                    return Leaked()

            else:

                @on_command
                def leak(self, command: Leak) -> Leaked:  # type: ignore[misc]
                    trio.CancelScope().__enter__()
                    return Leaked()

            @on_sourcing
            def leaked(self, event: Leaked) -> None: ...

        app = App([Leaky])
        async with serving(app) as gateway:
            result = await gateway.send_and_wait(Leak("a"))
            assert result.error is not None
            assert result.error.code == "CancelScopeLeakError"
            assert "Leaky.leak left a cancel scope open" in result.error.text
        assert not await app.store.read_all(0, 9)

    @pytest.mark.parametrize("in_child", [False, True], ids=["itself", "child task"])
    async def test_a_function_that_reads_the_memory_store_lets_others_run(self, in_child: bool) -> None:
        @frozen
        class Look:
            id: str

        @aggregate(context="looking")
        @define
        class Looking:
            id: str

            @on_command
            async def look(self, _command: Look, store: InMemoryEventStore) -> None:
                async def load() -> None:
                    with assert_checkpoints():
                        await store.load(AggregateId("looking", "looking", "a"))

                if in_child:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(load)
                else:
                    await load()

        domain = Domain([Looking])
        store = InMemoryEventStore(domain.serializer)
        async with serving(App(domain, store=store, services={InMemoryEventStore: store})) as gateway:
            (await gateway.send_and_wait(Look("a"))).raise_for_error()

    async def test_an_error_that_cannot_be_shown_is_a_result_all_the_same(self) -> None:
        class UnshowableError(Exception):
            def __str__(self) -> str:
                raise LookupError

        class Failing(InMemoryEventStore):
            async def append(self, stream: DomainEventStream) -> None:
                raise UnshowableError

        domain = Domain([Chain])
        async with serving(App(domain, store=Failing(domain.serializer))) as gateway:
            result = await gateway.send_and_wait(Step("a"))
        assert result.error == CommandError("UnshowableError", "its text cannot be shown: LookupError")

    async def test_a_command_that_fails_by_mistake_is_logged_though_nobody_waits(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving(App([Chain])) as gateway:
            await gateway.send(Unwritable("a"))
        (record,) = caplog.records
        assert record.getMessage() == "Unwritable for chains.chain/a failed"
        assert record.exc_info
        assert "Measured cannot be kept as JSON" in str(record.exc_info[1])

    async def test_history_that_cannot_be_applied_says_why(self) -> None:
        app = App([Chain])
        chain = app.domain.command_message(Step("a")).aggregate_id
        await app.store.append(
            DomainEventStream(aggregate_id=chain, version=1, events=[Stepped(-1)], command_id="c", request_id="r")
        )
        async with serving(app) as gateway:
            result = await gateway.send_and_wait(Step("a"))
        assert result.error == CommandError(
            "AggregateNotReadableError",
            "version 1 of chains.chain/a cannot be applied any more: ZeroDivisionError('cannot be applied')",
        )

    async def test_what_a_state_makes_of_an_event_does_not_change_what_is_stored(self) -> None:
        @frozen
        class Add:
            id: str

        @frozen
        class Added:
            items: list[int]

        @aggregate(context="lists")
        @define
        class Adding:
            id: str
            items: list[int] = field(factory=list)

            @on_command
            def add(self, command: Add) -> list[Added]:
                return [Added([1]), Added([9])]

            @on_sourcing
            def added(self, event: Added) -> None:
                if self.items:
                    self.items += event.items
                else:
                    self.items = event.items

        app = App([Adding])
        async with serving(app) as gateway:
            await gateway.send_and_wait(Add("a"))
        (recorded,) = await app.store.read_all(0, 9)
        assert recorded.stream.events == (Added([1]), Added([9]))

    async def test_a_command_belongs_to_the_message_once_it_is_sent(self) -> None:
        @define
        class Mutable:
            id: str
            items: list[int]

        @frozen
        class Kept:
            items: list[int]

        @aggregate(context="lists")
        @define
        class Keeping:
            id: str

            @on_command
            def keep(self, command: Mutable) -> Kept:
                return Kept(command.items)

            @on_sourcing
            def kept(self, event: Kept) -> None: ...

        app = App([Keeping])
        command = Mutable("a", [1])
        async with serving(app) as gateway:
            await gateway.send(command)
            command.items.append(2)
        (recorded,) = await app.store.read_all(0, 9)
        assert recorded.stream.events == (Kept([1]),)


class TestProcessors:
    @pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
    async def test_a_function_that_leaves_a_scope_open_fails_alone(
        self, caplog: pytest.LogCaptureFixture, is_async: bool
    ) -> None:
        @event_processor
        class Leaky:
            if is_async:

                @on_event
                async def stepped(self, event: Stepped) -> None:
                    trio.CancelScope().__enter__()
                    await trio.lowlevel.checkpoint()

            else:

                @on_event
                def stepped(self, event: Stepped) -> None:  # type: ignore[misc]
                    trio.CancelScope().__enter__()

        steps = Steps()
        async with serving(App([Chain], [Leaky(), steps])) as gateway:
            await gateway.send_and_wait(Twice("a"))
        assert steps.of == {"a": [100, 101]}
        assert len(caplog.records) == 1  # the second event waits until the first is handled
        assert "Leaky.stepped left a cancel scope open" in caplog.text

    def test_a_processor_given_twice_is_refused(self) -> None:
        steps = Steps()
        with pytest.raises(ConfigurationError, match="Steps object .* is given twice; give it once"):
            App([Chain], [steps, steps])
        App([Chain], [Steps(), Steps()])

    async def test_every_function_of_an_event_runs_and_one_that_fails_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        seen: list[object] = []

        @event_processor
        class Bad:
            @on_event
            def stepped(self, event: Stepped) -> None:
                raise LookupError("no such thing")

        @event_processor
        class Good:
            @on_event
            async def stepped(self, event: Stepped) -> None:
                await trio.lowlevel.checkpoint()
                seen.append(event)

            @on_event
            def envelope(self, event: DomainEvent[Stepped]) -> None:
                seen.append((str(event.aggregate_id), event.version, event.sequence, event.headers))

        async with serving(App([Chain], [Bad(), Good()])) as gateway:
            await gateway.send_and_wait(Twice("a"), headers={"h": "1"})
        assert seen == [
            Stepped(100),
            ("chains.chain/a", 1, 1, {"h": "1"}),
            Stepped(101),
            ("chains.chain/a", 1, 2, {"h": "1"}),
        ]
        (record,) = caplog.records  # for this function the second event waits until the first is handled
        assert record.getMessage().startswith(
            "event-dispatcher/Bad.stepped failed on version 1 of chains.chain/a, after 4 attempts: "
            "LookupError: no such thing\nTraceback"
        )

    async def test_k1_one_receiver_for_each_bounded_context_in_the_group_of_the_dispatcher(self) -> None:
        app = App([Chain, Notebook], [Everything(), Answering(0)])
        async with serving(app):
            await wait_all_tasks_blocked()
            receivers = sorted(name for name in task_names() if name.startswith("receiver"))
            assert receivers == ["receiver chains"] * 3 + ["receiver notes"] * 2
            components = [name for name in task_names() if name.startswith("component")]
            assert sorted(components) == [
                "component command-dispatcher",
                "component command-gateway",
                "component projection-dispatcher",
                "component saga-dispatcher",
            ]
            topics = app.events._topics  # type: ignore[attr-defined]
            assert set(topics["chains"].groups) == {"projection-dispatcher", "saga-dispatcher"}

    async def test_a_projection_sees_each_aggregates_events_in_version_order(self, autojump_clock: MockClock) -> None:
        for seed in range(20):
            rng = random.Random(seed)
            steps = Steps()

            domain = Domain([Chain])
            store = Jittery(domain.serializer, rng)
            async with serving(App(domain, [steps], store=store), executor=KeyedExecutor(max_in_flight=8)) as gateway:
                async with trio.open_nursery() as nursery:
                    for number in range(50):
                        nursery.start_soon(gateway.send, Step(rng.choice("abc"), number))
            assert {id: list(range(1, len(v) + 1)) for id, v in steps.versions.items()} == steps.versions, seed

    def test_all_that_does_not_fit_is_told_together(self) -> None:
        class Clock:
            pass

        @frozen
        class Foreign:
            pass

        @projection
        class Wrong:
            @on_event
            def foreign(self, event: Foreign) -> None: ...

        @event_processor
        class Taking:
            @on_event
            def stepped(self, event: Stepped, clock: Clock) -> None: ...

        domain = Domain([Chain])
        registry = FunctionRegistry(domain)
        for processor in (Wrong(), Taking()):
            registry.register(processor)
        with pytest.raises(ConfigurationError) as caught:
            registry.seal()
        assert caught.value.problems == (
            "Wrong.foreign handles Foreign, which no aggregate of the domain sources",
            "Taking.stepped takes clock: Clock, which is neither a registered service nor the store's transaction; "
            "give the App services={Clock: ...}, or a store that has such transactions",
        )
        with pytest.raises(ConfigurationError, match="no aggregate of the domain sources"):
            App([Chain], [Wrong()])
        with pytest.raises(TypeError, match="is no processor"):
            App([Chain], [object()])


class TestSagas:
    def test_two_sagas_of_one_name_are_refused(self) -> None:
        """The request IDs of their commands would be the same."""
        with pytest.raises(ConfigurationError, match="several @saga classes are named Answering, .*; give one another"):
            App([Chain], [Answering(1), Answering(2)])

    async def test_commands_go_out_with_request_ids_of_their_event_and_role(self) -> None:
        @saga
        class Notes:
            @on_event
            def stepped(self, event: DomainEvent[Stepped]) -> list[Note]:
                return [Note("book", f"{event.aggregate_id.id}{n}") for n in range(2)]

        app = App([Chain, Notebook], [Notes()])
        async with serving(app) as gateway:
            await gateway.send_and_wait(Step("a"), request_id="r", tenant="mine")
            await gateway.send_and_wait(Step("a"), request_id="r", tenant="mine")  # published again, sent again
        (cause,) = await stored(app, "a")
        notes = await app.store.load(app.domain.command_message(Note("book", "")).aggregate_id)
        assert [stream.events[0] for stream in notes] == [Noted("a0"), Noted("a1")]
        assert [stream.request_id for stream in notes] == [f"{cause.id}/1/Notes.stepped/{n}" for n in range(2)]
        assert {stream.aggregate_id.tenant for stream in notes} == {"mine"}

    async def test_a_command_that_cannot_go_out_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        @frozen
        class Nowhere:
            id: str

        @saga
        class Lost:
            @on_event
            def stepped(self, event: Stepped) -> Nowhere:
                return Nowhere("x")

        async with serving(App([Chain], [Lost()])) as gateway:
            await gateway.send_and_wait(Step("a"))
        (record,) = caplog.records
        assert record.getMessage().startswith(
            "saga-dispatcher/Lost.stepped failed on version 1 of chains.chain/a, after 1 "
        )
        assert "UnroutableCommandError: no aggregate handles Nowhere" in record.getMessage()

    async def test_a_command_that_nobody_receives_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        domain = Domain([Chain])
        commands, events = InMemoryCommandBus(), InMemoryDomainEventBus()
        gateway = CommandGateway(domain, commands)
        dispatcher = CommandDispatcher(
            domain, commands, InMemoryEventStore(domain.serializer), events, results=gateway.results
        )
        lost = SagaDispatcher(registry_of(domain, Answering(1)), events, InMemoryCommandBus())
        runtime = Runtime([dispatcher, lost, gateway], signals=False, shutdown_quiet_period=0)
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            await gateway.send_and_wait(Step("a"))
            runtime.request_stop()
        assert "nobody receives commands for chains.chain/a" in caplog.text

    @pytest.mark.parametrize("seed", range(5))
    async def test_two_windows_that_feed_each_other_do_not_lock(self, seed: int) -> None:
        """A window of 4, 8 senders, 100 commands, and a saga that answers the first 5 events of each chain."""
        steps = Steps()
        app = App([Chain], [Answering(5), steps])
        with trio.fail_after(60):
            async with serving(app, executor=KeyedExecutor(max_in_flight=4)) as gateway:

                async def sender(which: int) -> None:
                    for n in range(which, 100, 8):
                        await gateway.send(Step(f"chain {n}"))

                async with trio.open_nursery() as nursery:
                    for which in range(8):
                        nursery.start_soon(sender, which)
        assert steps.of == {f"chain {n}": [0, 1, 2, 3, 4, 5] for n in range(100)}

    async def test_commands_that_wait_for_one_another_do_not_lock(self) -> None:
        """Every place of the window is held by a handler that sends a command and waits for its result."""

        @event_processor
        class Waiting:
            @on_event
            async def stepped(self, event: DomainEvent[Stepped]) -> None:
                if event.body.number < 3:
                    (await gateway.send_and_wait(Step(event.aggregate_id.id, event.body.number + 1))).raise_for_error()

        steps = Steps()
        with trio.fail_after(60):
            async with serving(App([Chain], [Waiting(), steps]), executor=KeyedExecutor(max_in_flight=2)) as gateway:
                async with trio.open_nursery() as nursery:
                    for n in range(10):
                        nursery.start_soon(gateway.send, Step(str(n)))
        assert steps.of == {str(n): [0, 1, 2, 3] for n in range(10)}


class TestStop:
    @pytest.mark.parametrize("period", [0, 0.5])
    async def test_a_stop_in_the_middle_of_chains_lets_them_end(self, autojump_clock: MockClock, period: float) -> None:
        for seed in range(30):
            rng = random.Random(seed)
            steps = Steps()
            app = App([Chain], [Answering(5), steps])
            runtime = app.runtime(
                signals=False,
                shutdown_quiet_period=period,
                executor=KeyedExecutor(max_in_flight=rng.choice((1, 4, 256))),
            )
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                accepted = []
                for n in range(rng.randrange(1, 6)):
                    await app.gateway.send(Step(str(n)))
                    accepted.append(str(n))
                for _ in range(rng.randrange(40)):
                    await trio.lowlevel.checkpoint()
                runtime.request_stop()
            assert steps.of == {id: [0, 1, 2, 3, 4, 5] for id in accepted}, f"seed {seed}"

    async def test_a_forced_stop_leaves_the_command_unfinished(self, autojump_clock: MockClock) -> None:
        class Stuck(InMemoryEventStore):
            async def append(self, stream: DomainEventStream) -> None:
                await trio.sleep_forever()

        domain = Domain([Chain])
        app = App(domain, store=Stuck(domain.serializer))
        with pytest.raises(ExceptionGroup) as caught:
            async with serving(app, shutdown_timeout=5) as gateway:
                await gateway.send(Step("a"))
        error = caught.value.exceptions[0]
        assert isinstance(error, ShutdownDeadlineError)
        assert error.held["command-dispatcher"] == ("receiver chains", "mailbox chains.chain/a")
        assert await stored(app, "a") == []

    @pytest.mark.parametrize("scheduling", [None, GroupedScheduling()], ids=["keyed", "grouped"])
    async def test_a_forced_stop_of_idle_receivers_is_one_error(
        self, scheduling: GroupedScheduling | None, autojump_clock: MockClock
    ) -> None:
        app = App([Chain, Notebook], [Answering(1), Steps()], scheduling=scheduling)
        runtime = app.runtime(signals=False)
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                with pytest.raises(ShutdownDeadlineError):
                    await runtime.serve()

            nursery.start_soon(serve)
            await wait_all_tasks_blocked()
            runtime.force_stop()

    async def test_a_stop_before_the_start_is_told_by_serving(self) -> None:
        app = App([Chain])
        runtime = app.runtime(signals=False)
        runtime.request_stop()
        with pytest.raises(ExceptionGroup) as caught:
            async with app.serving(runtime):
                raise AssertionError("must not get here")
        assert caught.group_contains(RuntimeStateError, match="a stop was requested before it could serve")

    async def test_a_subscription_that_fails_gives_back_those_before_it(self) -> None:
        class Second(InMemoryDomainEventBus):
            subscribed = 0

            def receiver(self, subscription: Any) -> Any:
                self.subscribed += 1
                if self.subscribed == 2:
                    raise OSError("no more")
                return super().receiver(subscription)

        domain, bus = Domain([Chain, Notebook]), Second()
        dispatcher = ProjectionDispatcher(registry_of(domain, Everything()), bus)
        with pytest.raises(OSError, match="no more"):
            await Runtime([dispatcher], signals=False).serve()
        stream = DomainEventStream(
            aggregate_id=domain.command_message(Step("a")).aggregate_id,
            version=1,
            events=[Stepped(0)],
            command_id="c",
            request_id="r",
        )
        assert not await bus.send_if_subscribed(stream)

    async def test_an_error_of_the_start_comes_through_serving(self) -> None:
        class Failing(InMemoryDomainEventBus):
            def receiver(self, subscription: Any) -> Any:
                raise RuntimeError("no bus")

        app = App([Chain], [Steps()])
        app.events = Failing()
        with pytest.raises(ExceptionGroup) as caught:
            async with app.serving(app.runtime(signals=False)):
                raise AssertionError("must not get here")
        assert caught.group_contains(RuntimeError, match="no bus")

    async def test_k11_a_handler_that_exits_ends_the_runtime_with_an_error(self) -> None:
        @event_processor
        class Exiting:
            @on_event
            def stepped(self, event: Stepped) -> None:
                raise SystemExit(0)

        steps = Steps()
        app = App([Chain], [Exiting(), steps])
        error = await collect(partial(_serve_and_send, app, Step("a")))
        assert isinstance(error, ExceptionGroup)
        (exit_error,) = error.exceptions
        assert isinstance(exit_error, HandlerExitError)
        assert exit_error.code == 0
        assert isinstance(exit_error.__cause__, SystemExit)
        assert exit_error.__cause__.__notes__ == ["while event-dispatcher handled a message for chains.chain/a"]

    async def test_k11_admission_closes_when_a_handler_fails_though_others_still_run(
        self, autojump_clock: MockClock
    ) -> None:
        @event_processor
        class Mixed:
            @on_event
            async def stepped(self, event: Stepped) -> None:
                if event.number == 0:
                    with trio.CancelScope(shield=True):
                        await trio.sleep(2)
                elif event.number == 1:
                    raise SystemExit(1)

        app = App([Chain], [Mixed()])
        runtime = app.runtime(signals=False)
        start = trio.current_time()
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                await app.gateway.send_and_wait(Step("a", 0))
                await app.gateway.send(Step("b", 1))
                with pytest.raises(AdmissionClosedError):
                    while True:
                        await app.gateway.send(Step("c", 2))
                assert trio.current_time() == start
        (error,) = caught.value.exceptions
        assert isinstance(error, HandlerExitError)
        assert trio.current_time() == start + 2

    async def test_a_stored_stream_that_a_failing_runtime_does_not_publish_is_not_acknowledged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        appended, failed = trio.Event(), trio.Event()

        class Waiting(InMemoryEventStore):
            async def append(self, stream: DomainEventStream) -> None:
                await super().append(stream)
                appended.set()
                await failed.wait()

        class Failing:
            name = "failing"

            async def prepare(self, context: Any, /) -> None:
                self.context = context

            def start(self) -> None: ...

            def quiesce(self) -> None: ...

            async def stop(self) -> None: ...

            def force_stop(self) -> None: ...

        domain, failing, steps = Domain([Chain]), Failing(), Steps()
        commands, events = InMemoryCommandBus(), InMemoryDomainEventBus()
        gateway = CommandGateway(domain, commands)
        store = Waiting(domain.serializer)
        dispatcher = CommandDispatcher(domain, commands, store, events, results=gateway.results)
        projections = ProjectionDispatcher(registry_of(domain, steps), events)
        runtime = Runtime([dispatcher, projections, failing, gateway], signals=False)
        with pytest.raises(ExceptionGroup) as caught, caplog.at_level(logging.WARNING):
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                await gateway.send(Step("a"))
                await appended.wait()
                failing.context.report_failure(OSError("disk"))
                failed.set()
        assert [type(error) for error in caught.value.exceptions] == [OSError]
        assert "version 1 of chains.chain/a is stored but not published" in caplog.text
        assert steps.of == {}

    async def test_two_runtimes_of_one_application_at_once_are_refused(self) -> None:
        app = App([Chain])
        async with serving(app) as gateway:
            with pytest.raises(
                RuntimeStateError, match="command-gateway belongs to another runtime until that has stopped"
            ):
                await app.runtime(signals=False).serve()
            assert (await gateway.send_and_wait(Step("a"))).version == 1

    async def test_an_application_can_be_served_again(self) -> None:
        steps = Steps()
        app = App([Chain], [steps])
        for number in range(2):
            async with serving(app) as gateway:
                assert (await gateway.send_and_wait(Step("a", number))).version == number + 1
        assert steps.of == {"a": [0, 1]}


async def _serve_and_send(app: App, command: object) -> None:
    runtime = app.runtime(signals=False)
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.serve)
        await app.gateway.send(command)
