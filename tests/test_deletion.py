"""Aggregates that are deleted and recovered."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from attrs import define, evolve, frozen

from trio_wow import (
    AggregateDeleted,
    AggregateRecovered,
    App,
    CommandGateway,
    DeleteAggregate,
    DomainEvent,
    RecoverAggregate,
    StateEvent,
    aggregate,
    event_processor,
    on_command,
    on_error,
    on_event,
    on_sourcing,
    on_state_event,
)
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.domain import Domain
from trio_wow.errors import (
    AggregateDeletedError,
    AggregateNotDeletedError,
    AggregateNotFoundError,
    CommandRejectedError,
    ConfigurationError,
    UnroutableCommandError,
)
from trio_wow.eventsourcing import InMemoryEventStore
from trio_wow.messages import AggregateId, CommandResult, DomainEventStream
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
