"""Aggregates that are deleted and recovered."""

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, evolve, frozen
from chain_domain import registry_of

from trio_wow import (
    AggregateDeleted,
    AggregateRecovered,
    App,
    CommandDispatcher,
    CommandGateway,
    DeleteAggregate,
    DomainEvent,
    EventDispatcher,
    InMemoryCommandBus,
    InMemoryDomainEventBus,
    RecoverAggregate,
    Runtime,
    StateEvent,
    aggregate,
    event_processor,
    on_command,
    on_error,
    on_event,
    on_sourcing,
    on_state_event,
    projection,
    saga,
)
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.dispatch import CommandResults
from trio_wow.domain import Domain
from trio_wow.errors import (
    AggregateDeletedError,
    AggregateExistsError,
    AggregateNotDeletedError,
    AggregateNotFoundError,
    CommandRejectedError,
    ConfigurationError,
    InvalidIdentifierError,
    UnroutableCommandError,
)
from trio_wow.eventsourcing import (
    AggregateRepository,
    EventStore,
    InMemoryEventStore,
    InMemorySnapshotStore,
    SnapshotStore,
)
from trio_wow.messages import AggregateId, CommandResult, DomainEventStream, message_type
from trio_wow.testing import given


@frozen
class Log:
    id: str


@frozen
class Register:
    id: str


@frozen
class Scrap:
    id: str


@frozen
class Logged:
    pass


@aggregate(context="fleet", snapshot_every=1)
@define
class Aircraft:
    id: str
    flights: int = 0

    @on_command
    def log(self, command: Log) -> Logged:
        return Logged()

    @on_command(exists=False)
    def register(self, command: Register) -> Logged:
        return Logged()

    @on_command
    def scrap(self, command: Scrap) -> list[object]:
        return [Logged(), AggregateDeleted()]

    @on_sourcing
    def logged(self, event: Logged) -> None:
        self.flights += 1


@frozen
class Hire:
    id: str


@frozen
class Hired:
    pass


@aggregate(context="fleet")
@define
class Pilot:
    id: str
    was_deleted: bool = False

    @on_command
    def hire(self, command: Hire) -> Hired:
        return Hired()

    @on_command
    def delete(self, command: DeleteAggregate) -> AggregateDeleted:
        if self.was_deleted:
            raise CommandRejectedError("once is enough")
        return AggregateDeleted()

    @on_sourcing
    def hired(self, event: Hired) -> None:
        pass

    @on_sourcing
    def deleted(self, event: AggregateDeleted) -> None:
        self.was_deleted = True


@aggregate(context="fleet")
@define
class Mechanic:
    id: str

    @on_command
    def delete(self, command: DeleteAggregate) -> AggregateDeleted:
        return AggregateDeleted()


DELETE, RECOVER = DeleteAggregate.of(Aircraft, "a"), RecoverAggregate.of(Aircraft, "a")
A = AggregateId("fleet", "aircraft", "a")


@pytest.fixture(params=["memory", "sqlite"])
async def app(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[App]:
    domain = Domain([Aircraft, Pilot])
    if request.param == "memory":
        yield App(domain)
    else:
        async with SqliteStore(tmp_path / "fleet.db", domain.serializer) as store:
            yield App(domain, store=store)


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[CommandGateway]:
    async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
        yield gateway


def code(result: CommandResult) -> str | None:
    return None if result.error is None else result.error.code


async def test_a_deleted_aggregate_refuses_all_but_recover(app: App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "trio_wow.dispatch")
    async with serving(app) as gateway:
        for command in (DELETE, RECOVER):
            assert code(await gateway.send_and_wait(command)) == "AggregateNotFoundError"
        await gateway.send_and_wait(Log("a"))
        assert code(await gateway.send_and_wait(RECOVER)) == "AggregateNotDeletedError"
        assert code(await gateway.send_and_wait(DELETE, expected_version=7)) == "ExpectedVersionError"
        assert code(await gateway.send_and_wait(DELETE, tenant="other")) == "TenantMismatchError"
        assert (await gateway.send_and_wait(DELETE, request_id="r")).version == 2
        for other in (Log("a"), Register("a"), Scrap("a"), DELETE):
            assert code(await gateway.send_and_wait(other)) == "AggregateDeletedError"
        duplicate = await gateway.send_and_wait(DELETE, request_id="r")
        assert (code(duplicate), duplicate.version) == ("DuplicateRequestIdError", 2)
        assert (await app.repository.load(A)).deleted
        assert (await gateway.send_and_wait(RECOVER)).version == 3
        assert (await gateway.send_and_wait(Log("a"))).version == 4
    loaded = await app.repository.load(A)
    assert (loaded.deleted, loaded.state) == (False, Aircraft("a", 2))
    assert (await app.repository.load(A, version=2)).deleted
    refusals = [each for each in caplog.records if "refused" in each.getMessage() and "deleted" in each.getMessage()]
    assert {each.levelname for each in refusals} == {"DEBUG"}


async def test_processors_and_states_tell_of_it() -> None:
    events: list[object] = []
    states: list[object] = []

    @event_processor
    class Watch:
        @on_event
        def deleted(self, event: AggregateDeleted) -> None:
            events.append(event)

        @on_event
        def recovered(self, event: DomainEvent[AggregateRecovered]) -> None:
            events.append((event.aggregate_id.aggregate, event.version))

        @on_state_event
        def state(self, event: StateEvent[Aircraft]) -> None:
            states.append((event.version, event.deleted))

    async with serving(App([Aircraft, Pilot], [Watch()])) as gateway:
        await gateway.send_and_wait(Scrap("a"))
        await gateway.send_and_wait(RECOVER)
        await gateway.send_and_wait(Hire("p"))
        await gateway.send_and_wait(DeleteAggregate.of(Pilot, "p"))
        await gateway.send_and_wait(RecoverAggregate.of(Pilot, "p"))
        again = await gateway.send_and_wait(DeleteAggregate.of(Pilot, "p"))
        assert again.error is not None
        assert again.error.text == "once is enough"
    assert events.count(AggregateDeleted()) == 2
    assert [each for each in events if each != AggregateDeleted()] in (
        [("aircraft", 2), ("pilot", 3)],
        [("pilot", 3), ("aircraft", 2)],
    )
    assert states == [(1, True), (2, False)]


async def test_no_snapshot_is_taken_of_a_deleted_version(tmp_path: Path) -> None:
    domain = Domain([Aircraft])
    async with SqliteStore(tmp_path / "fleet.db", domain.serializer) as store:
        app = App(domain, store=store)
        async with serving(app) as gateway:
            await gateway.send_and_wait(Log("a"))
            await gateway.send_and_wait(DELETE)
        snapshot = await store.load_snapshot(A)
        assert snapshot is not None
        assert snapshot.version == 1
        loaded = await app.repository.load(A)
        assert loaded.deleted
        deleted = (await store.load(A))[-1]
        with pytest.raises(ValueError, match="is deleted at version 2"):
            await app.repository.take_snapshot(StateEvent(deleted, loaded.state, deleted=True))


async def test_states_read_from_the_store_tell_of_it_too() -> None:
    states: list[object] = []

    @event_processor
    class Watch:
        @on_state_event
        def state(self, event: StateEvent[Aircraft]) -> None:
            states.append((event.version, event.deleted, event.routed().deleted))

    domain = Domain([Aircraft])
    store = InMemoryEventStore(domain.serializer)
    async with serving(App(domain, store=store)) as gateway:
        for command in (Log("a"), DELETE, RECOVER):
            await gateway.send_and_wait(command)
    async with serving(App(domain, [Watch()], store=store)):
        pass
    assert states == [(1, False, False), (2, True, True), (3, False, False)]


class Rival(InMemoryEventStore):
    """Deletes the aggregate just before the second stream is appended."""

    async def append(self, stream: DomainEventStream) -> None:
        if stream.version == 2 and stream.events == (Logged(),):
            await super().append(evolve(stream, id="rival", request_id="rival", events=(AggregateDeleted(),)))
        await super().append(stream)


async def test_after_a_conflict_it_is_seen_that_another_writer_has_deleted() -> None:
    domain = Domain([Aircraft])
    async with serving(App(domain, store=Rival(domain.serializer))) as gateway:
        await gateway.send_and_wait(Log("a"))
        assert code(await gateway.send_and_wait(Log("a"))) == "AggregateDeletedError"


def test_a_state_beside_an_event_of_every_aggregate_is_refused_with_the_way_out() -> None:
    @event_processor
    class Watch:
        @on_event
        def deleted(self, event: AggregateDeleted, state: Aircraft) -> None: ...

    App([Aircraft], [Watch()])
    with pytest.raises(ConfigurationError, match=r"Pilot too; take DomainEvent\[AggregateDeleted\] without a state"):
        App([Aircraft, Pilot], [Watch()])


def test_two_aggregates_may_each_decide_and_an_unknown_one_is_told() -> None:
    domain = Domain([Pilot, Mechanic])
    assert domain.command_message(DeleteAggregate.of(Mechanic, "m")).aggregate_id.aggregate == "mechanic"
    with pytest.raises(UnroutableCommandError, match=r"DeleteAggregate names the aggregate 'fleet\.aircraft'"):
        domain.command_message(DELETE)
    with pytest.raises(TypeError, match="no aggregate"):
        DeleteAggregate.of(int, "a")


async def test_error_functions_are_told_of_the_built_in_commands_too() -> None:
    told: list[tuple[str, str]] = []

    @aggregate(context="fleet")
    @define
    class Hangar:
        id: str

        @on_command
        def log(self, command: Log) -> Logged:
            return Logged()

        @on_sourcing
        def logged(self, event: Logged) -> None:
            pass

        @on_error
        def failed(self, error: AggregateNotFoundError, command: DeleteAggregate) -> None:
            told.append((command.aggregate, command.id))

    async with serving(App([Hangar])) as gateway:
        await gateway.send_and_wait(DeleteAggregate.of(Hangar, "h"))
    assert told == [("hangar", "h")]


def test_given_when_expect() -> None:
    case = given(Aircraft, "a", Logged()).when(DELETE).expect_events(AggregateDeleted()).expect_state(flights=1)
    assert case.deleted
    case.when(Log("a")).expect_error(AggregateDeletedError, "fleet.aircraft/a is deleted")
    case.when(RECOVER).expect_events(AggregateRecovered()).when(RECOVER).expect_error(AggregateNotDeletedError)
    given(Aircraft, "a").when(DELETE).expect_error(AggregateNotFoundError)
    given(Pilot, "p", AggregateDeleted()).expect_state(was_deleted=True)
    with pytest.raises(ValueError, match=r"for fleet\.aircraft"):
        given(Pilot, "a").when(DELETE)


class Memory(InMemoryEventStore, InMemorySnapshotStore):
    """Outlives its programs, as a file does."""

    def __init__(self, domain: Domain) -> None:
        InMemoryEventStore.__init__(self, domain.serializer)
        InMemorySnapshotStore.__init__(self)


@frozen
class Load:
    id: str
    weight: int


@frozen
class Loaded:
    weight: int


@frozen
class Swept:
    pass


@aggregate(context="freight", snapshot_every=2)
@define
class Hold:
    """Decides itself whether it is deleted and recovered, and changes its state by it."""

    id: str
    weight: int = 0
    log: str = ""

    @on_command
    def load(self, command: Load) -> Loaded:
        loaded.append(command.weight)
        return Loaded(command.weight)

    @on_command
    async def delete(self, command: DeleteAggregate) -> list[object]:
        if self.weight > 10:
            raise CommandRejectedError("too heavy to delete")
        return [Swept(), AggregateDeleted()]

    @on_command
    def recover(self, command: RecoverAggregate) -> list[object] | None:
        return [AggregateRecovered(), Loaded(1)] if command.id != "kept" else None

    @on_sourcing
    def loaded(self, event: Loaded) -> None:
        self.weight += event.weight

    @on_sourcing
    def swept(self, event: Swept) -> None:
        self.weight = 0

    @on_sourcing
    def changed(self, event: AggregateDeleted | AggregateRecovered) -> None:
        self.log += "deleted " if isinstance(event, AggregateDeleted) else "recovered "


loaded: list[int] = []
DOMAIN = Domain([Aircraft, Hold])
DELETE_HOLD, RECOVER_HOLD = DeleteAggregate.of(Hold, "h"), RecoverAggregate.of(Hold, "h")
H = AggregateId("freight", "hold", "h")


class Programs:
    """Makes the program anew, as often as it is started, on what the last one has stored."""

    def __init__(self, store: Callable[[], EventStore]) -> None:
        self._store = store
        self.app = App(DOMAIN)

    @asynccontextmanager
    async def serving(self, *processors: object) -> AsyncIterator[CommandGateway]:
        self.app = App(DOMAIN, processors, store=self._store())
        async with serving(self.app) as gateway:
            yield gateway

    async def snapshot(self) -> int | None:
        """Return the version of the snapshot of H, after a program has ended."""
        store = self.app.store
        assert isinstance(store, SnapshotStore)
        snapshot = await store.load_snapshot(H)
        if isinstance(store, SqliteStore):
            await store.aclose()
        return None if snapshot is None else snapshot.version


@pytest.fixture(params=["memory", "sqlite"])
def programs(request: pytest.FixtureRequest, tmp_path: Path) -> Programs:
    loaded.clear()
    memory = Memory(DOMAIN)
    in_file = request.param == "sqlite"
    return Programs(lambda: SqliteStore(tmp_path / "events.db", DOMAIN.serializer) if in_file else memory)


async def outcomes(gateway: CommandGateway, *commands: object, **options: Any) -> list[int | str | None]:
    """Return the version that each command led to, or its error's class."""
    results = [await gateway.send_and_wait(command, **options) for command in commands]
    return [result.version if result.error is None else code(result) for result in results]


class TestRestarts:
    async def test_what_is_deleted_stays_deleted_and_can_be_recovered(self, programs: Programs) -> None:
        async with programs.serving() as gateway:
            assert await outcomes(gateway, Load("h", 3), Load("h", 4), DELETE_HOLD) == [1, 2, 3]
        async with programs.serving() as gateway:
            assert await outcomes(gateway, Load("h", 1), RECOVER_HOLD) == ["AggregateDeletedError", 4]
        async with programs.serving() as gateway:
            assert await outcomes(gateway, Load("h", 5), RECOVER_HOLD) == [5, "AggregateNotDeletedError"]
            found = await programs.app.repository.load(H)
        assert (found.state, found.deleted) == (Hold("h", 6, "deleted recovered "), False)
        assert loaded == [3, 4, 5]

    async def test_snapshots_are_taken_before_and_after_and_none_between(self, programs: Programs) -> None:
        async with programs.serving() as gateway:
            assert await outcomes(gateway, Load("h", 3), DELETE_HOLD) == [1, 2]
        assert await programs.snapshot() is None
        async with programs.serving() as gateway:
            assert await outcomes(gateway, Load("h", 1), RECOVER_HOLD, Load("h", 4)) == ["AggregateDeletedError", 3, 4]
        assert await programs.snapshot() == 4
        async with programs.serving() as gateway:
            assert await outcomes(gateway, Load("h", 5), DELETE_HOLD) == [5, 6]
        assert await programs.snapshot() == 4
        async with programs.serving() as gateway:
            assert await outcomes(gateway, DELETE_HOLD, RECOVER_HOLD) == ["AggregateDeletedError", 7]

    async def test_processors_get_the_same_live_and_from_the_store(self, programs: Programs) -> None:
        @projection
        class Seen(list[object]):
            @on_event
            def changed(self, event: DomainEvent[AggregateDeleted | AggregateRecovered]) -> None:
                self.append((str(event.aggregate_id), event.version, type(event.body)))

            @on_state_event
            def state(self, event: StateEvent[Hold]) -> None:
                self.append((event.version, event.state.log, event.deleted))

        live, rebuilt = Seen(), Seen()
        async with programs.serving(live) as gateway:
            await outcomes(gateway, Load("h", 5), DELETE_HOLD, RECOVER_HOLD, Scrap("a"))
        async with programs.serving(rebuilt):
            pass
        expected: list[object] = [
            ("freight.hold/h", 2, AggregateDeleted),
            ("freight.hold/h", 3, AggregateRecovered),
            ("fleet.aircraft/a", 1, AggregateDeleted),
            (1, "", False),
            (2, "deleted ", True),
            (3, "deleted recovered ", False),
        ]
        assert sorted(live, key=str) == sorted(rebuilt, key=str) == sorted(expected, key=str)


async def test_a_snapshot_from_before_is_used_with_what_has_happened_since() -> None:
    store = Memory(DOMAIN)
    repository = AggregateRepository(DOMAIN, store, store)
    for version, event in enumerate([Logged(), AggregateDeleted(), AggregateRecovered(), Logged()], 1):
        stream = DomainEventStream(
            aggregate_id=A, version=version, events=[event], command_id=f"c{version}", request_id=f"r{version}"
        )
        await store.append(stream)
        if version == 1:
            await repository.take_snapshot(StateEvent(stream, Aircraft("a", 1_000)))
        found = await repository.load(A)
        assert (found.version, found.deleted) == (version, version == 2)
    assert (await repository.load(A)).state == Aircraft("a", 1_001)


class TestOwnFunctions:
    async def test_they_decide_and_source(self, programs: Programs) -> None:
        async with programs.serving() as gateway:
            assert await outcomes(gateway, DELETE_HOLD, RECOVER_HOLD) == ["AggregateNotFoundError"] * 2
            assert await outcomes(gateway, Load("h", 11), DELETE_HOLD) == [1, "CommandRejectedError"]
            assert await outcomes(gateway, Load("h", -2), DELETE_HOLD, DELETE_HOLD) == [2, 3, "AggregateDeletedError"]
            assert await outcomes(gateway, RECOVER_HOLD, RECOVER_HOLD) == [4, "AggregateNotDeletedError"]
            assert (await programs.app.repository.load(H)).state == Hold("h", 1, "deleted recovered ")

    async def test_a_recovery_that_yields_nothing_recovers_nothing(self) -> None:
        commands = Load("kept", 1), DeleteAggregate.of(Hold, "kept"), RecoverAggregate.of(Hold, "kept"), Load("kept", 1)
        async with serving(App([Hold])) as gateway:
            assert await outcomes(gateway, *commands) == [1, 2, None, "AggregateDeletedError"]

    def test_given_asks_them(self) -> None:
        case = given(Hold, "h", Loaded(20)).when(DELETE_HOLD).expect_error(CommandRejectedError)
        case.when(Load("h", -20)).when(DELETE_HOLD).expect_events(Swept(), AggregateDeleted())
        assert case.deleted
        case.expect_state(log="deleted ")
        given(Aircraft, "a", AggregateDeleted()).when(Register("a")).expect_error(AggregateDeletedError)
        given(Aircraft, "a", AggregateRecovered()).when(Register("a")).expect_error(AggregateExistsError)


class TestCommands:
    async def test_another_id_and_another_aggregate_are_not_deleted(self, programs: Programs) -> None:
        async with programs.serving() as gateway:
            assert await outcomes(gateway, Log("a"), Log("b"), Load("a", 1), DELETE) == [1, 1, 1, 2]
            assert await outcomes(gateway, Log("b"), Load("a", 1)) == [2, 2]

    async def test_the_first_command_may_delete(self, programs: Programs) -> None:
        async with programs.serving() as gateway:
            assert await outcomes(gateway, Scrap("a"), Log("a"), RECOVER) == [1, "AggregateDeletedError", 2]

    async def test_expected_versions(self) -> None:
        async with serving(App([Aircraft])) as gateway:
            assert await outcomes(gateway, Log("a"), Log("a")) == [1, 2]
            assert await outcomes(gateway, DELETE, expected_version=1) == ["ExpectedVersionError"]
            assert await outcomes(gateway, DELETE, expected_version=2) == [3]
            # That it is deleted says more than that it is at another version.
            assert await outcomes(gateway, Log("a"), expected_version=2) == ["AggregateDeletedError"]
            assert await outcomes(gateway, RECOVER, expected_version=2) == ["ExpectedVersionError"]
            assert await outcomes(gateway, RECOVER, expected_version=3) == [4]

    async def test_tenants(self) -> None:
        async with serving(App([Aircraft])) as gateway:
            assert await outcomes(gateway, Log("a"), DELETE, tenant="acme") == [1, 2]
            assert await outcomes(gateway, Log("a"), DELETE, RECOVER, tenant="other") == ["TenantMismatchError"] * 3
            assert await outcomes(gateway, RECOVER, tenant="acme") == [3]

    async def test_a_request_that_is_stored_wins_over_the_deletion_and_is_published_again(self) -> None:
        published: list[tuple[int, object]] = []

        @event_processor
        class Published:
            @on_event
            def on(self, event: DomainEvent[Logged | AggregateDeleted]) -> None:
                published.append((event.version, event.body))

        commands, events, results = InMemoryCommandBus(), InMemoryDomainEventBus(), CommandResults()
        dispatcher = CommandDispatcher(DOMAIN, commands, Memory(DOMAIN), events, results=results)
        gateway = CommandGateway(DOMAIN, commands, results=results)
        seeing = EventDispatcher(registry_of(DOMAIN, Published()), events)
        runtime = Runtime([dispatcher, seeing, gateway], signals=False, shutdown_quiet_period=0)
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            assert await outcomes(gateway, Log("a"), request_id="log") == [1]
            assert await outcomes(gateway, DELETE, request_id="delete") == [2]
            for command, request, version in ((Log("a"), "log", 1), (DELETE, "delete", 2)):
                result = await gateway.send_and_wait(command, request_id=request)
                assert (code(result), result.version) == ("DuplicateRequestIdError", version)
            runtime.request_stop()
        assert published == [(1, Logged()), (2, AggregateDeleted())] * 2

    async def test_a_saga_deletes_in_turn(self) -> None:
        @saga
        class WithItsHold:
            @on_event
            def deleted(self, event: DomainEvent[AggregateDeleted]) -> DeleteAggregate | None:
                is_aircraft = event.aggregate_id.aggregate == "aircraft"
                return DeleteAggregate.of(Hold, event.aggregate_id.id) if is_aircraft else None

        app = App(DOMAIN, [WithItsHold()])
        async with serving(app) as gateway:
            await outcomes(gateway, Log("a"), Load("a", 1), DELETE)
        assert (await app.repository.load(AggregateId("freight", "hold", "a"))).deleted

    async def test_two_programs_that_delete_and_recover_at_once_leave_a_history_in_turns(self) -> None:
        store = InMemoryEventStore(DOMAIN.serializer)
        ended: list[int | str | None] = []

        async def send(gateway: CommandGateway, command: object) -> None:
            ended.extend(await outcomes(gateway, command))

        async with serving(App(DOMAIN, store=store)) as one, serving(App(DOMAIN, store=store)) as two:
            await one.send_and_wait(Log("a"))
            async with trio.open_nursery() as nursery:
                for command in (DELETE, Log("a"), RECOVER, Log("a"), DELETE):
                    nursery.start_soon(send, one, command)
                    nursery.start_soon(send, two, command)
        streams = await store.load(A)
        assert len(streams) == 1 + sum(type(each) is int for each in ended)
        deleted = False
        for (event,) in (stream.events for stream in streams):
            assert deleted is isinstance(event, AggregateRecovered)
            deleted = isinstance(event, AggregateDeleted)


class TestAddresses:
    def test_they_name_their_aggregate(self) -> None:
        assert DeleteAggregate("fleet", "aircraft", "a") == DELETE
        message = DOMAIN.command_message(RECOVER, tenant="acme")
        assert (message.aggregate_id, message.aggregate_id.tenant, message.body) == (A, "acme", RECOVER)
        with pytest.raises(InvalidIdentifierError):
            DOMAIN.command_message(DeleteAggregate.of(Aircraft, ""))

    @pytest.mark.parametrize("body", [AggregateDeleted(), AggregateRecovered(), DELETE, RECOVER])
    def test_every_domain_can_write_them(self, body: object) -> None:
        assert Domain([]).serializer.copy(body) == body

    def test_their_stored_names_are_theirs_alone(self) -> None:
        stream = DomainEventStream(
            aggregate_id=A, version=1, events=[AggregateDeleted(), AggregateRecovered()], command_id="c", request_id="r"
        )
        form = json.loads(DOMAIN.serializer.dump_stream(stream))
        assert [each["name"] for each in form["events"]] == ["wow.aggregate_deleted", "wow.aggregate_recovered"]

    @pytest.mark.parametrize(
        "name", ["wow.aggregate_deleted", "wow.aggregate_recovered", "wow.delete_aggregate", "wow.recover_aggregate"]
    )
    def test_a_class_with_one_of_their_names_is_refused(self, name: str) -> None:
        @message_type(name)
        @frozen
        class Mine:
            id: str

        @aggregate(context="other")
        @define
        class Other:
            id: str

            @on_command
            def mine(self, command: Mine) -> None: ...

        with pytest.raises(ConfigurationError, match=rf"both named '{name}'; give one another name"):
            Domain([Other])


@pytest.mark.parametrize("command", [DeleteAggregate, RecoverAggregate])
def test_a_function_that_could_never_be_called_is_refused(command: type) -> None:
    with pytest.raises(TypeError, match=rf"Gone.go: {command.__name__} is for what exists; leave `exists=False` out"):

        @aggregate(context="x")
        @define
        class Gone:
            id: str

            @on_command(exists=False)
            def go(self, message: command) -> None: ...  # type: ignore[valid-type]
