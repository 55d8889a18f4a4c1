"""Snapshots and state events."""

import sqlite3
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from attrs import define, evolve, field, frozen
from trio.testing import MockClock

from trio_wow import (
    App,
    InMemoryStateEventBus,
    StateEvent,
    aggregate,
    event_processor,
    on_command,
    on_event,
    on_sourcing,
    on_state_event,
    projection,
    saga,
)
from trio_wow.dispatch import FunctionRegistry
from trio_wow.domain import Domain, aggregate_model, processor_model
from trio_wow.errors import (
    AggregateVersionError,
    ConfigurationError,
    SerializationError,
    StoreReadOnlyError,
    TenantMismatchError,
)
from trio_wow.eventsourcing import AggregateRepository, InMemoryEventStore, InMemorySnapshotStore, Snapshot
from trio_wow.messages import AggregateId, DomainEventStream
from trio_wow.runtime import Runtime


@frozen
class Add:
    id: str
    amount: int


@frozen
class Added:
    amount: int


@frozen
class Report:
    id: str
    total: int


@frozen
class Reported:
    total: int


@aggregate(context="sums", snapshot_every=2)
@define
class Sum:
    id: str
    total: int = 0
    parts: list[int] = field(factory=list)

    @on_command
    def add(self, command: Add) -> Added:
        return Added(command.amount)

    @on_sourcing
    def added(self, event: Added) -> None:
        self.total += event.amount
        self.parts.append(event.amount)


@aggregate(context="reports")
@define
class Reports:
    id: str
    last: int = 0

    @on_command
    def report(self, command: Report) -> Reported:
        return Reported(command.total)

    @on_sourcing
    def reported(self, event: Reported) -> None:
        self.last = event.total


@projection
class Totals(dict[str, list[tuple[int, int]]]):
    @on_state_event
    def of(self, event: StateEvent[Sum]) -> None:
        self.setdefault(event.aggregate_id.id, []).append((event.version, event.state.total))


@event_processor
class States:
    def __init__(self) -> None:
        self.seen: list[Sum] = []

    @on_state_event
    async def of(self, state: Sum) -> None:
        await trio.lowlevel.checkpoint()
        self.seen.append(state)


@saga
class Reporting:
    @on_state_event
    def of(self, event: StateEvent[Sum]) -> Report | None:
        return Report(f"{event.aggregate_id.id} {event.version}", event.state.total) if event.state.total > 9 else None


DOMAIN = Domain([Sum, Reports])
A = AggregateId("sums", "sum", "a")


def quick(app: App, **options: Any) -> Runtime:
    return app.runtime(**{"signals": False, "shutdown_quiet_period": 0, **options})


def added(version: int, amount: int = 1, id: str = "a") -> DomainEventStream:
    return DomainEventStream(
        aggregate_id=AggregateId("sums", "sum", id),
        version=version,
        events=[Added(amount)],
        command_id=f"c{version}",
        request_id=f"r{version}",
    )


async def filled(versions: int) -> InMemoryEventStore:
    store = InMemoryEventStore(DOMAIN.serializer)
    for version in range(1, versions + 1):
        await store.append(added(version))
    return store


class CountingStore(InMemoryEventStore):
    loaded = 0

    async def load(
        self, aggregate_id: AggregateId, *, after: int = 0, until: int | None = None
    ) -> Sequence[DomainEventStream]:
        streams = await super().load(aggregate_id, after=after, until=until)
        self.loaded += len(streams)
        return streams


class TestTaking:
    async def test_a_snapshot_is_taken_every_n_versions_and_loading_begins_there(self) -> None:
        store = CountingStore(DOMAIN.serializer)
        app = App(DOMAIN, store=store)
        async with app.serving(quick(app)) as gateway:
            for amount in range(1, 8):
                await gateway.send_and_wait(Add("a", amount))
        store.loaded = 0
        loaded = await app.repository.load(A)
        assert (loaded.version, loaded.state) == (7, Sum("a", 28, [1, 2, 3, 4, 5, 6, 7]))
        assert store.loaded == 2  # the one that the snapshot ends with, and the one after it

    async def test_without_a_number_there_are_none(self) -> None:
        class Untouched(InMemorySnapshotStore):
            async def save_snapshot(self, snapshot: Snapshot) -> None:
                raise AssertionError("not wanted")

            async def load_snapshot(self, aggregate_id: AggregateId) -> Snapshot | None:
                raise AssertionError("not wanted")

        repository = AggregateRepository(DOMAIN, InMemoryEventStore(DOMAIN.serializer), Untouched())
        assert (await repository.load(AggregateId("reports", "reports", "a"))).version == 0

    @pytest.mark.parametrize("options", [{"snapshot_every": 0}, {"snapshot_every": True}, {"revision": 0}])
    def test_a_number_that_is_none_is_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"of Sum must be a positive int, not"):
            aggregate(context="sums", **options)(Sum)
        assert aggregate_model(Sum).snapshot_every == 2

    async def test_a_state_that_cannot_be_kept_costs_a_warning_and_nothing_else(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        @frozen
        class Mark:
            id: str

        @frozen
        class Marked:
            pass

        @aggregate(context="marks", snapshot_every=1)
        @define
        class Marks:
            id: str
            seen: Any = field(factory=set)

            @on_command
            def mark(self, command: Mark) -> Marked:
                return Marked()

            @on_sourcing
            def marked(self, event: Marked) -> None:
                self.seen.add(len(self.seen))

        app = App([Marks])
        async with app.serving(quick(app)) as gateway:
            for version in (1, 2):
                assert (await gateway.send_and_wait(Mark("a"))).version == version
        assert [record.getMessage() for record in caplog.records] == [
            f"no snapshot of version {version} of marks.marks/a: it cannot be taken" for version in (1, 2)
        ]

    async def test_a_state_that_would_lose_what_no_field_holds_is_not_kept(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        @aggregate(context="tallies", snapshot_every=1)
        @define(slots=False)
        class Tally:
            id: str

            @on_command
            def add(self, command: Add) -> Added:
                return Added(getattr(self, "count", 0) + 1)

            @on_sourcing
            def added(self, event: Added) -> None:
                self.count = event.amount

        app = App([Tally])
        async with app.serving(quick(app)) as gateway:
            for _ in range(3):
                await gateway.send_and_wait(Add("a", 0))
        assert (await app.repository.load(AggregateId("tallies", "tally", "a"))).state.count == 3
        assert "no snapshot of version 3 of tallies.tally/a: it cannot be taken" in caplog.text
        assert "Tally does not come back from JSON as it was: count=3 comes back as NOTHING" in caplog.text

    async def test_fs18_b_an_older_snapshot_does_not_replace_a_newer_one(self) -> None:
        snapshots = InMemorySnapshotStore()
        newer = Snapshot(A, 10, "s10", 1, b"{}")
        await snapshots.save_snapshot(newer)
        await snapshots.save_snapshot(evolve(newer, version=9, stream_id="s9"))
        await snapshots.save_snapshot(evolve(newer, data=b"[]"))
        assert await snapshots.load_snapshot(A) == newer
        await snapshots.discard_snapshot(evolve(newer, version=9))
        assert await snapshots.load_snapshot(A) == newer
        await snapshots.discard_snapshot(newer)
        assert await snapshots.load_snapshot(A) is None


class TestLoading:
    @pytest.fixture
    async def store(self) -> InMemoryEventStore:
        return await filled(5)

    @staticmethod
    async def snapshot_of(store: InMemoryEventStore, version: int) -> Snapshot:
        loaded = await AggregateRepository(DOMAIN, store).load(A, version=version)
        (stream,) = await store.load(A, after=version - 1, until=version)
        return Snapshot(A, version, stream.id, 1, DOMAIN.serializer.dump_state(loaded.state))

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"version": 8}, "it is ahead of the events"),
            ({"stream_id": "another"}, "it was made from other events"),
            ({"revision": 2}, "it has revision 2, and the aggregate 1"),
            ({"revision": 0}, "it has revision 0, and the aggregate 1"),
            ({"data": b'{"id": "a", "total": 4'}, "it does not fit Sum"),
            ({"data": b'{"id": "a", "total": 4}'}, "it does not fit Sum, which differs in parts"),
            ({"data": b'{"id": "a", "total": "?", "parts": []}'}, "it does not fit Sum"),
            (
                {"data": b'{"id": "a", "total": 4, "parts": [], "x": 1}'},
                "it does not fit Sum, which differs in x",
            ),
            ({"data": b"[]"}, "it does not fit Sum"),
        ],
    )
    async def test_fs18_a_c_one_that_is_of_no_use_is_told_once_and_the_state_made_from_the_events(
        self, store: InMemoryEventStore, changes: dict[str, Any], problem: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        snapshots = InMemorySnapshotStore()
        await snapshots.save_snapshot(evolve(await self.snapshot_of(store, 4), **changes))
        repository = AggregateRepository(DOMAIN, store, snapshots)
        for _ in range(2):
            loaded = await repository.load(A)
            assert (loaded.version, loaded.state) == (5, Sum("a", 5, [1] * 5))
        (record,) = caplog.records
        assert record.getMessage().startswith(
            f"the snapshot of version {changes.get('version', 4)} of sums.sum/a is of no use: {problem}"
        )
        app = App(DOMAIN, store=store)
        app.repository._snapshots = snapshots
        async with app.serving(quick(app)) as gateway:
            assert (await gateway.send_and_wait(Add("a", 1))).version == 6
        replaced = await snapshots.load_snapshot(A)
        assert replaced is not None
        assert replaced.version == 6

    @pytest.mark.parametrize(("reads", "writes"), [(False, True), (True, False), (False, False)])
    async def test_fs18_d_a_snapshot_store_that_raises_fails_no_command(
        self, store: InMemoryEventStore, reads: bool, writes: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken(InMemorySnapshotStore):
            async def save_snapshot(self, snapshot: Snapshot) -> None:
                if not writes:
                    raise StoreReadOnlyError("here", "cannot be written")
                await super().save_snapshot(snapshot)

            async def load_snapshot(self, aggregate_id: AggregateId) -> Snapshot | None:
                if not reads:
                    raise OSError("cannot be read")
                return await super().load_snapshot(aggregate_id)

        app = App(DOMAIN, store=store)
        app.repository._snapshots = snapshots = Broken()
        await InMemorySnapshotStore.save_snapshot(snapshots, await self.snapshot_of(store, 4))
        async with app.serving(quick(app)) as gateway:
            result = await gateway.send_and_wait(Add("a", 1))
        assert (result.version, result.error) == (6, None)
        assert (await AggregateRepository(DOMAIN, store).load(A)).state == Sum("a", 6, [1] * 6)
        kept = await InMemorySnapshotStore.load_snapshot(snapshots, A)
        assert kept is not None
        assert kept.version == (6 if writes else 4)
        assert [record.getMessage() for record in caplog.records] == [
            *(["the snapshot of sums.sum/a cannot be loaded; using its events"] if not reads else []),
            *(["no snapshot of version 6 of sums.sum/a: it cannot be taken"] if not writes else []),
        ]

    async def test_one_that_cannot_be_discarded_is_told(
        self, store: InMemoryEventStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Sticky(InMemorySnapshotStore):
            async def discard_snapshot(self, snapshot: Snapshot) -> None:
                raise StoreReadOnlyError("here", "cannot be written")

        snapshots = Sticky()
        await snapshots.save_snapshot(evolve(await self.snapshot_of(store, 4), revision=7))
        assert (await AggregateRepository(DOMAIN, store, snapshots).load(A)).version == 5
        assert "the snapshot of version 4 of sums.sum/a cannot be discarded" in caplog.text

    @pytest.mark.parametrize("with_snapshot", [False, True])
    async def test_a_version_is_loaded_as_it_was(self, store: InMemoryEventStore, with_snapshot: bool) -> None:
        snapshots = InMemorySnapshotStore()
        if with_snapshot:
            await snapshots.save_snapshot(await self.snapshot_of(store, 3))
        repository = AggregateRepository(DOMAIN, store, snapshots)
        for version in range(6):
            loaded = await repository.load(A, version=version)
            assert (loaded.version, loaded.state) == (version, Sum("a", version, [1] * version))
        for version in (6, -1):
            with pytest.raises(AggregateVersionError, match=f"sums.sum/a has no version {version}; its last one is"):
                await repository.load(A, version=version)

    async def test_a_snapshot_hides_no_tenant(self, store: InMemoryEventStore) -> None:
        snapshots = InMemorySnapshotStore()
        await snapshots.save_snapshot(await self.snapshot_of(store, 5))
        with pytest.raises(TenantMismatchError):
            await AggregateRepository(DOMAIN, store, snapshots).load(evolve(A, tenant="other"))

    async def test_an_event_that_cannot_be_read_is_no_fault_of_the_snapshot(self, store: InMemoryEventStore) -> None:
        snapshots = InMemorySnapshotStore()
        snapshot = await self.snapshot_of(store, 4)
        await snapshots.save_snapshot(snapshot)
        store._histories[A].streams[4] = b"{"
        with pytest.raises(SerializationError, match="version 5 of sums.sum/a"):
            await AggregateRepository(DOMAIN, store, snapshots).load(A)
        assert await snapshots.load_snapshot(A) == snapshot


class TestStateEvents:
    async def test_each_version_comes_with_its_state(self) -> None:
        totals, states = Totals(), States()
        app = App(DOMAIN, [totals, states])
        async with app.serving(quick(app)) as gateway:
            for amount in (1, 2, 3):
                await gateway.send_and_wait(Add("a", amount))
            await gateway.send_and_wait(Add("b", 7))
        assert totals == {"a": [(1, 1), (2, 3), (3, 6)], "b": [(1, 7)]}
        assert states.seen[-2:] == [Sum("a", 6, [1, 2, 3]), Sum("b", 7, [7])]

    @pytest.mark.parametrize("kept", [1, 1_000])
    async def test_what_is_read_from_the_store_gets_its_state_rebuilt(
        self, monkeypatch: pytest.MonkeyPatch, kept: int
    ) -> None:
        monkeypatch.setattr("trio_wow.dispatch._event.REBUILT", kept)
        store = InMemoryEventStore(DOMAIN.serializer)
        for version in range(1, 6):
            for id in "ab":
                await store.append(added(version, version, id))
        totals, states = Totals(), States()
        app = App(DOMAIN, [totals, states], store=store)
        async with app.serving(quick(app)) as gateway:
            assert totals == {id: [(1, 1), (2, 3), (3, 6), (4, 10), (5, 15)] for id in "ab"}
            await store.append(added(6, 10))
            await gateway.send_and_wait(Add("a", 100))
        assert totals["a"][5:] == [(6, 25), (7, 125)]
        assert [state.parts for state in states.seen if state.id == "a"][:5] == [
            list(range(1, version + 1)) for version in range(1, 6)
        ]

    async def test_a_saga_answers_states_with_commands(self) -> None:
        app = App(DOMAIN, [Reporting()])
        async with app.serving(quick(app)) as gateway:
            for amount in (9, 1, 1):
                await gateway.send_and_wait(Add("a", amount))
        reports = [
            recorded.stream
            for recorded in await app.store.read_all(0, 99)
            if recorded.aggregate_id.context == "reports"
        ]
        assert sorted((stream.aggregate_id.id, stream.events) for stream in reports) == [
            ("a 2", (Reported(10),)),
            ("a 3", (Reported(11),)),
        ]
        again = App(DOMAIN, [Reporting()], store=app.store)
        async with again.serving(quick(again)):
            pass
        assert len(await app.store.read_all(0, 99)) == 5

    async def test_two_dispatchers_of_states_share_no_state(self) -> None:
        @projection
        class Greedy:
            @on_state_event
            def of(self, state: Sum) -> None:
                state.parts.clear()

        app = App(DOMAIN, [Greedy()])
        async with app.serving(quick(app)) as gateway:
            for _ in range(2):
                await gateway.send_and_wait(Add("a", 1))
        assert (await app.repository.load(A)).state.parts == [1, 1]

    async def test_a_state_that_cannot_be_published_is_logged_and_read_later(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Failing(InMemoryStateEventBus):
            failing = True

            async def send(self, message: StateEvent[Any]) -> None:
                if self.failing:
                    raise OSError("no way")
                await super().send(message)

        totals = Totals()
        app = App(DOMAIN, [totals])
        app._state_events = bus = Failing()
        async with app.serving(quick(app)) as gateway:
            result = await gateway.send_and_wait(Add("a", 1))
            assert (result.version, result.error) == (1, None)
            (record,) = caplog.records
            assert record.getMessage() == "the state of sums.sum/a at version 1 is not published"
            bus.failing = False
            await gateway.send_and_wait(Add("a", 2))
        assert totals == {"a": [(1, 1), (2, 3)]}

    async def test_both_kinds_of_functions_in_one_class(self, autojump_clock: MockClock) -> None:
        @projection
        class Both(Totals):
            amounts = 0

            @on_event
            def added(self, event: Added) -> None:
                self.amounts += event.amount

        both = Both()
        app = App(DOMAIN, [both])
        for _ in range(2):
            async with app.serving(quick(app)) as gateway:
                await gateway.send_and_wait(Add("a", 2))
                await trio.sleep(3)
        assert both.amounts == 4
        assert both == {"a": [(1, 2), (2, 4)]}

    def test_what_does_not_fit_is_refused(self) -> None:
        @define
        class Other:
            id: str

        @projection
        class Foreign:
            @on_state_event
            def of(self, event: StateEvent[Other]) -> None: ...

        with pytest.raises(ConfigurationError, match="Foreign.of handles Other, which is no aggregate of the domain"):
            App(DOMAIN, [Foreign()])
        assert processor_model(Foreign()).event_functions == ()

        with pytest.raises(TypeError, match=r"Bare.of: write StateEvent\[...\] with the class of what it handles"):

            @projection
            class Bare:
                @on_state_event
                def of(self, event: StateEvent) -> None: ...  # type: ignore[type-arg]

        with pytest.raises(ConfigurationError, match="several @saga classes are named Reporting"):
            App(DOMAIN, [Reporting(), Reporting()])


def problems_of(processor: object) -> str:
    registry = FunctionRegistry(DOMAIN, transaction_type=sqlite3.Connection)
    registry.register(processor)
    with pytest.raises(ConfigurationError) as caught:
        registry.seal()
    return str(caught.value)


class TestTransactionFunctions:
    def test_all_functions_take_the_transaction_or_none(self) -> None:
        @projection
        class Mixed:
            @on_event
            def added(self, event: Added, connection: sqlite3.Connection) -> None: ...

            @on_event
            def also(self, event: Added) -> None: ...

        assert problems_of(Mixed()).startswith("Mixed: also must take the transaction too, as its other functions do")

        @projection
        class Apart:
            @on_event
            def added(self, event: Added, connection: sqlite3.Connection) -> None: ...

            @on_state_event
            def of(self, state: Sum) -> None: ...

        assert problems_of(Apart()) == "either all functions of Apart take the transaction, or none"

    def test_they_are_plain(self) -> None:
        @projection
        class Waiting:
            @on_event
            async def added(self, event: Added, connection: sqlite3.Connection) -> None: ...

        assert "Waiting.added takes a transaction" in problems_of(Waiting())
        assert "make it a plain function" in problems_of(Waiting())

    @pytest.mark.parametrize("decorator", [event_processor, saga])
    def test_only_projections_take_it(self, decorator: Any) -> None:
        @decorator
        class Other:
            @on_event
            def added(self, event: Added, connection: sqlite3.Connection) -> None: ...

        assert problems_of(Other()) == "Other.added takes a transaction, which only the functions of a projection may"


async def test_a_repository_without_snapshots_takes_none() -> None:
    repository = AggregateRepository(DOMAIN, InMemoryEventStore(DOMAIN.serializer))
    with pytest.raises(RuntimeError, match="has no snapshot store"):
        await repository.take_snapshot(StateEvent(added(1), Sum("a")))
