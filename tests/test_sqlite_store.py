"""The SQLite store, over real files: its contracts, what other processes do to it, and what disks do."""

import contextvars
import os
import random
import resource
import signal
import sqlite3
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_eventsourcing as laws
import test_snapshots
import trio
import trio.testing
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from support import PythonProcess, collect
from test_eventsourcing import CART, A, B, Paid, Place, Placed, cancelled_at, everything, stream
from trio.testing import wait_all_tasks_blocked

from trio_wow import App, DomainEvent, on_event, projection
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.adapters.sqlite._lane import BATCH, Lane
from trio_wow.domain import Domain
from trio_wow.errors import (
    AppendOutcomeUnknownError,
    DuplicateRequestIdError,
    InvalidIdentifierError,
    SerializationError,
    ShutdownDeadlineError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreVersionError,
    VersionConflictError,
    WowError,
)
from trio_wow.eventsourcing import (
    AggregateRepository,
    CheckpointStore,
    EventStore,
    FailedExecution,
    FailureStore,
    InMemoryEventStore,
    InMemorySnapshotStore,
    Snapshot,
    SnapshotStore,
)
from trio_wow.messages import AggregateId, DomainEventStream
from trio_wow.runtime import RuntimeComponent

DOMAIN = Domain([laws.Order, laws.Cart])


@pytest.fixture
def domain() -> Domain:
    return DOMAIN


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(path, DOMAIN.serializer) as store:
        yield store


@pytest.fixture
def repository(store: SqliteStore) -> AggregateRepository:
    return AggregateRepository(DOMAIN, store)


def order(id: object) -> AggregateId:
    return AggregateId("shop", "order", str(id))


def rows(path: Path, query: str, *parameters: object) -> list[Any]:
    """Ask the file itself, beside the store."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query, parameters).fetchall()


def stored(path: Path) -> list[tuple[str, int]]:
    return rows(path, "SELECT id, version FROM wow_streams ORDER BY position")


@contextmanager
def write_lock(path: Path) -> Iterator[None]:
    """Hold the file's write lock with a connection of somebody else."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


Hook = Callable[[sqlite3.Connection, str], object]


def hook(
    monkeypatch: pytest.MonkeyPatch, *, before: Hook = lambda *_: None, after: Hook = lambda *_: None
) -> Callable[..., sqlite3.Connection]:
    """Call functions around each statement of connections opened from now on. Returns the real `connect`."""
    connect = sqlite3.connect

    class Hooked(sqlite3.Connection):
        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            before(self, sql)
            cursor = super().execute(sql, *parameters)
            after(self, sql)
            return cursor

    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Hooked))
    return connect


def is_insert(sql: str) -> bool:
    return sql.lstrip().startswith("INSERT INTO wow_streams")


def sqlite_error(name: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = name
    return error


def child(function: Callable[..., None], *arguments: object) -> PythonProcess:
    """Run a test module's function in another process."""
    module = function.__module__
    code = f"import sys, {module}; {module}.{function.__name__}(*sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONUNBUFFERED": "1"}
    return PythonProcess("-W", "error", "-c", code, *map(str, arguments), env=environment)


def succeed(process: PythonProcess) -> str:
    code, output, errors = process.finish()
    assert code == 0, errors
    return output


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class TestAppend(laws.TestAppend):
    pass


class TestLoad(laws.TestLoad):
    pass


class TestReadAll(laws.TestReadAll):
    test_store_agrees_with_a_simple_model = None  # type: ignore[assignment]  # see TestAgreement


class TestRepository(laws.TestRepository):
    pass


class TestHistory(laws.TestHistory):
    @pytest.fixture
    async def store(self, path: Path) -> AsyncIterator[Any]:
        async with SqliteStore(path, Domain([laws.aggregate_of("Some", laws.OrderPlaced)]).serializer) as store:
            for aggregate_id, version in ((A, 1), (B, 1), (A, 2), (A, 3)):
                await store.append(stream(aggregate_id, version, laws.OrderPlaced(1)))
            yield store


class TestCancelledCalls(laws.TestCancellation):
    test_cancelled_append_has_stored_the_stream_whole_or_not_at_all = None  # type: ignore[assignment]  # see below


class TestNoSharedObjects(laws.TestNoSharedObjects):
    test_two_stores_share_nothing = None  # type: ignore[assignment]


class TestFs17History(laws.TestFs17History):
    @pytest.fixture(autouse=True)
    def _in(self, path: Path) -> None:
        self.path = path

    async def migrated(self, before: Domain, after: Domain, *streams: DomainEventStream) -> EventStore:
        async with SqliteStore(self.path, before.serializer) as store:
            for each in streams:
                await store.append(each)
        return _ClosingStore(self.path, laws.Migrating(before.serializer, after.serializer))


class _ClosingStore(SqliteStore):
    """Closes its file after each call, as those who are given it do not."""

    async def append(self, stream: DomainEventStream) -> None:
        async with self:
            await super().append(stream)

    async def _fetch(self, query: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        async with self:
            return await super()._fetch(query, parameters)


class TestContracts:
    async def test_it_is_all_kinds_of_store_and_a_component(self, store: SqliteStore) -> None:
        def is_event_store(_: EventStore) -> None: ...

        is_event_store(store)
        assert isinstance(store, SnapshotStore)
        assert isinstance(store, CheckpointStore)
        assert isinstance(store, FailureStore)
        assert isinstance(store, RuntimeComponent)

    @pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
    def test_busy_timeout_out_of_range_is_refused(self, path: Path, timeout: float) -> None:
        with pytest.raises(ValueError, match="busy_timeout must be"):
            SqliteStore(path, DOMAIN.serializer, busy_timeout=timeout)

    @pytest.mark.parametrize("name", ["", ":memory:", "a\0b"])
    def test_path_that_names_no_file_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="must name a file"):
            SqliteStore(name, DOMAIN.serializer)

    async def test_what_is_stored_is_there_after_reopening(self, path: Path) -> None:
        first = stream(evolve(A, tenant="acme"), 1, headers={"user": "ann"})
        async with SqliteStore(path, DOMAIN.serializer) as one:
            await one.append(first)
        async with SqliteStore(path, DOMAIN.serializer) as other:
            assert await other.load(A) == [first]
            assert (await other.load(A))[0].aggregate_id.tenant == "acme"
            with pytest.raises(DuplicateRequestIdError):
                await other.append(first)

    async def test_the_file_is_in_wal_mode_and_each_commit_is_synced(self, store: SqliteStore, path: Path) -> None:
        assert rows(path, "PRAGMA journal_mode") == [("wal",)]
        assert store._writer.open().execute("PRAGMA synchronous").fetchone() == (2,)

    async def test_a_store_that_was_taken_out_of_wal_mode_is_put_back(self, path: Path) -> None:
        async with SqliteStore(path, DOMAIN.serializer) as store:
            await store.append(stream(A, 1))
        assert rows(path, "PRAGMA journal_mode = DELETE") == [("delete",)]
        async with SqliteStore(path, DOMAIN.serializer) as store:
            assert len(await store.load(A)) == 1
            assert rows(path, "PRAGMA journal_mode") == [("wal",)]

    async def test_versions_of_one_position(self, store: SqliteStore) -> None:
        for each in (stream(A, 1), stream(B, 1), stream(A, 2)):
            await store.append(each)
        assert [await store.version_at(A, position) for position in range(5)] == [0, 1, 1, 2, 2]
        assert await store.version_at(CART, 3) == 0

    @pytest.mark.parametrize("number", [2**63 - 1, 2**63, 10**30, -(2**63), -(2**63) - 1, -(10**30)])
    async def test_bounds_beyond_every_history(self, store: SqliteStore, number: int) -> None:
        await store.append(stream(A, 1))
        count = int(number < 0)
        assert len(await store.load(A, after=number)) == count
        assert len(await store.load(A, until=number)) == 1 - count
        assert len(await store.read_all(number, 10)) == count
        assert await store.version_at(A, number) == 1 - count
        if number > 0:
            assert len(await store.read_all(0, number)) == 1

    async def test_fs18_newer_snapshot_remains(self, store: SqliteStore) -> None:
        def at(version: int, data: bytes = b"{}") -> Snapshot:
            return Snapshot(A, version, f"stream {version}", 3, data)

        assert await store.load_snapshot(A) is None
        await store.save_snapshot(at(10))
        await store.save_snapshot(at(9))
        await store.save_snapshot(at(10, b"other"))
        assert await store.load_snapshot(A) == at(10)
        await store.save_snapshot(at(11))
        assert await store.load_snapshot(A) == at(11)
        assert await store.load_snapshot(B) is None
        await store.discard_snapshot(at(10))
        assert await store.load_snapshot(A) == at(11)
        await store.discard_snapshot(at(11))
        assert await store.load_snapshot(A) is None
        await store.discard_snapshot(at(11))

    async def test_checkpoint_never_goes_back(self, store: SqliteStore) -> None:
        assert await store.load_checkpoint("mails") == 0
        for position, kept in ((5, 5), (3, 5), (5, 5), (9, 9)):
            await store.save_checkpoint("mails", position)
            assert await store.load_checkpoint("mails") == kept
        assert await store.load_checkpoint("Mails") == 0

    async def test_users_own_tables_may_be_in_the_file(self, path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript("CREATE TABLE streams (id); INSERT INTO streams VALUES ('mine')")
        async with SqliteStore(path, DOMAIN.serializer) as store:
            await store.append(stream(A, 1))
            assert await everything(store) == await store.load(A)
        assert rows(path, "SELECT id FROM streams") == [("mine",)]
        tables = [name for (name,) in rows(path, "SELECT tbl_name FROM sqlite_master WHERE type = 'table'")]
        assert all(name.startswith(("wow_", "sqlite_")) for name in tables if name != "streams")

    async def test_fs15_one_scope_for_request_ids_and_duplicates_win(self, store: SqliteStore) -> None:
        for each in (A, B, CART):
            await store.append(stream(each, 1, Paid(1), request_id="r1"))
        for version in (1, 2, 7):
            with pytest.raises(DuplicateRequestIdError) as caught:
                await store.append(stream(A, version, Paid(1), request_id="r1"))
            assert caught.value.version == 1

    async def test_fs15_two_processes_worth_of_writers_at_one_version(self, path: Path) -> None:
        async with SqliteStore(path, DOMAIN.serializer) as one, SqliteStore(path, DOMAIN.serializer) as other:
            outcomes: list[BaseException | None] = []
            async with trio.open_nursery() as nursery:
                for n, each in enumerate((one, other)):
                    nursery.start_soon(collect, partial(each.append, stream(A, 1, request_id=f"r{n}")), outcomes)
            (conflict,) = filter(None, outcomes)
            assert isinstance(conflict, VersionConflictError)
            assert (conflict.aggregate_id, conflict.expected, conflict.actual) == (A, 0, 1)

    ODD = ("a/b", "..", "%2F", "a:b", "1", "01", "A", "a", "\u00e9", "e\u0301", "\U0001f600" * 50, "x" * 512, "'; --")

    async def test_fs16_odd_ids_and_requests_stay_apart(self, store: SqliteStore) -> None:
        ids = [AggregateId("shop", name, id) for name in ("order", "cart", "order-a") for id in self.ODD]
        for n, each in enumerate(ids):
            await store.append(stream(each, 1, Placed(each.id), id=str(n), request_id=each.id))
        for n, each in enumerate(ids):
            (loaded,) = await store.load(each)
            assert (loaded.aggregate_id, loaded.id, loaded.events) == (each, str(n), (Placed(each.id),))
            assert await store.load_request(each, each.id) == loaded
        for refused in ("", " ", "a\x00b", "\ud800", "x" * 6000):
            with pytest.raises(InvalidIdentifierError):
                order(refused)

    @pytest.mark.parametrize("value", ["\x00", 2**63, 2**64 - 1, -(2**63), "\u00e9", "e\u0301", 1e308, None], ids=ascii)
    async def test_fs16_odd_values_come_back(self, store: SqliteStore, value: Any) -> None:
        await store.append(stream(A, 1, Placed(value)))
        assert (await store.load(A))[0].events == (Placed(value),)


class TestFs18Snapshots:
    @pytest.mark.parametrize(
        "harm",
        [
            "version = 8",
            "stream_id = 'of another log'",
            "revision = 9",
            "data = CAST(substr(data, 1, 7) AS BLOB)",
            "data = CAST('{}' AS BLOB)",
        ],
    )
    async def test_snapshot_of_no_use_is_reported_once_and_replaced(
        self, path: Path, caplog: pytest.LogCaptureFixture, harm: str
    ) -> None:
        a, domain = test_snapshots.A, test_snapshots.DOMAIN
        async with SqliteStore(path, domain.serializer) as store:
            app = App(domain, store=store)
            async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
                for amount in range(1, 6):
                    (await gateway.send_and_wait(test_snapshots.Add("a", amount))).raise_for_error()
            assert rows(path, "SELECT version FROM wow_snapshots") == [(4,)]
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute(f"UPDATE wow_snapshots SET {harm}")
            for _ in range(2):
                loaded = await app.repository.load(a)
                assert (loaded.version, loaded.state.parts) == (5, [1, 2, 3, 4, 5])
            assert len(caplog.records) == 1
            async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
                (await gateway.send_and_wait(test_snapshots.Add("a", 6))).raise_for_error()
            assert rows(path, "SELECT version FROM wow_snapshots") == [(6,)]
            assert rows(path, "SELECT version FROM wow_streams ORDER BY position") == [(n,) for n in range(1, 7)]
            loaded = await app.repository.load(a)
            assert (loaded.version, loaded.state.parts) == (6, [1, 2, 3, 4, 5, 6])
            assert len(caplog.records) == 1

    @pytest.mark.parametrize(
        ("harm", "warnings"),
        [
            ("ALTER TABLE wow_snapshots RENAME COLUMN data TO gone", {"cannot be loaded", "cannot be taken"}),
            (
                "CREATE TRIGGER no_writing BEFORE INSERT ON wow_snapshots "
                "BEGIN SELECT RAISE(ABORT, 'cannot be written'); END",
                {"cannot be taken"},
            ),
        ],
        ids=["on read and write", "on write"],
    )
    async def test_fs18_d_a_snapshot_table_that_cannot_be_used_fails_no_command(
        self, path: Path, harm: str, warnings: set[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        domain = test_snapshots.DOMAIN
        async with SqliteStore(path, domain.serializer) as store:
            app = App(domain, store=store)
            async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
                for amount in range(1, 6):
                    (await gateway.send_and_wait(test_snapshots.Add("a", amount))).raise_for_error()
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute(harm)
            again = App(domain, store=store)  # which keeps no state of the aggregate yet
            async with again.serving(again.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
                result = await gateway.send_and_wait(test_snapshots.Add("a", 6))
            assert (result.version, result.error) == (6, None)
        assert rows(path, "SELECT version FROM wow_streams ORDER BY position") == [(n,) for n in range(1, 7)]
        assert rows(path, "SELECT version FROM wow_snapshots") == [(4,)]
        assert len(caplog.records) == len(warnings)
        assert all(any(words in record.getMessage() for record in caplog.records) for words in warnings)


class TestAgreement:
    NAMES = st.sampled_from("AB")
    SMALL = st.integers(0, 4)
    OPERATIONS = st.one_of(
        st.tuples(st.just("append"), NAMES, st.integers(1, 5), st.integers(0, 6)),
        st.tuples(st.just("load"), NAMES, st.integers(-1, 4), st.none() | st.integers(-1, 5)),
        st.tuples(st.just("load_request"), NAMES, st.integers(0, 6)),
        st.tuples(st.just("read_all"), st.integers(-1, 6), st.integers(0, 4)),
        st.tuples(st.just("version_at"), NAMES, st.integers(-1, 8)),
        st.tuples(st.sampled_from(["save_snapshot", "discard_snapshot"]), NAMES, SMALL, SMALL),
        st.tuples(st.just("load_snapshot"), NAMES),
        st.tuples(st.just("reopen")),
    )

    @settings(derandomize=True, deadline=None, max_examples=60)
    @given(st.lists(OPERATIONS, max_size=25))
    def test_it_agrees_with_the_memory_store(self, operations: list[tuple[Any, ...]]) -> None:
        async def call(store: Any, snapshots: Any, operation: tuple[Any, ...]) -> object:
            match operation:
                case "append", name, version, request:
                    same = {"id": str(version), "created_at": datetime(2026, 1, 1, tzinfo=UTC)}
                    await store.append(stream(order(name), version, request_id=f"r{request}", **same))
                case "load", name, after, until:
                    return await store.load(order(name), after=after, until=until)
                case "load_request", name, request:
                    return await store.load_request(order(name), f"r{request}")
                case "read_all", after, limit:
                    return [
                        (each.position, each.aggregate_id, each.version, each.stream)
                        for each in await store.read_all(after, limit)
                    ]
                case "version_at", name, position:
                    return await store.version_at(order(name), position)
                case "load_snapshot", name:
                    return await snapshots.load_snapshot(order(name))
                case method, name, version, revision:
                    await getattr(snapshots, method)(Snapshot(order(name), version, f"s{version}", revision, b"{}"))
            return None

        async def outcome(*arguments: Any) -> object:
            try:
                return await call(*arguments)
            except WowError as error:
                return type(error), str(error)

        async def run(path: Path) -> None:
            memory, snapshots = InMemoryEventStore(DOMAIN.serializer), InMemorySnapshotStore()
            async with SqliteStore(path, DOMAIN.serializer) as store:
                for operation in operations:
                    if operation == ("reopen",):
                        await store.aclose()
                        continue
                    told = await outcome(store, store, operation)
                    expected = await outcome(memory, snapshots, operation)
                    assert told == expected, operation
                assert await everything(store) == await everything(memory)

        with tempfile.TemporaryDirectory() as folder:
            trio.run(run, Path(folder) / "events.db")


def append_fifty(path: str, id: str) -> None:
    """In a child: append 50 streams, and see before each insert that nobody else could get between."""

    async def run() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:

            def nobody_else_can_commit(_: sqlite3.Connection, sql: str) -> None:
                if is_insert(sql):
                    with closing(connect(path, timeout=0)) as foreign:
                        with pytest.raises(sqlite3.OperationalError, match="locked"):
                            foreign.execute("BEGIN IMMEDIATE")

            connect = hook(monkeypatch, before=nobody_else_can_commit)
            async with SqliteStore(path, DOMAIN.serializer, busy_timeout=60) as store:
                print("ready")
                for version in range(1, 51):
                    await store.append(stream(order(id), version))

    trio.run(run)


def create(folder: str, id: str) -> None:
    """In a child: create a file, which another process does too, again and again."""

    async def run() -> None:
        for n in range(10):
            async with SqliteStore(Path(folder) / f"{n}.db", DOMAIN.serializer, busy_timeout=60) as store:
                await store.append(stream(order(id), 1))

    with (Path(folder) / "gate").open() as gate:
        print("ready")
        gate.read()
    trio.run(run)


def append_for_ever(path: str) -> None:
    """In a child: append to some aggregates at once, and say what is stored."""

    async def append(store: SqliteStore, id: str) -> None:
        version = len(await store.load(order(id)))
        while True:
            version += 1
            await store.append(stream(order(id), version, *map(Paid, range(20))))
            print("stored", id, version)

    async def run() -> None:
        async with SqliteStore(path, DOMAIN.serializer) as store, trio.open_nursery() as nursery:
            for id in "abcd":
                nursery.start_soon(append, store, id)

    trio.run(run)


class TestProcesses:
    async def test_fs14a_two_processes_append_without_a_lock_error(self, store: SqliteStore, path: Path) -> None:
        with child(append_fifty, path, "a") as one, child(append_fifty, path, "b") as other:
            with write_lock(path):
                one.read_until("ready")
                other.read_until("ready")
            succeed(one)
            succeed(other)
        assert len(await everything(store)) == 100
        for id in "ab":
            assert [each.version for each in await store.load(order(id))] == list(range(1, 51))

    async def test_two_processes_create_the_file_at_once(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "gate")
        gate = os.open(tmp_path / "gate", os.O_RDWR)
        with child(create, tmp_path, "a") as one, child(create, tmp_path, "b") as other:
            one.read_until("ready")
            other.read_until("ready")
            os.close(gate)
            succeed(one)
            succeed(other)
        for n in range(10):
            assert sorted(stored(tmp_path / f"{n}.db")) == [("a", 1), ("b", 1)]

    async def test_sigkill_leaves_whole_streams_without_a_gap(self, path: Path) -> None:
        for lines in (1, 7, 40):
            with child(append_for_ever, path) as process:
                seen = [process.read_until("stored").split() for _ in range(lines)]
                process.send(signal.SIGKILL)
                assert process.finish()[0] == -signal.SIGKILL
            async with SqliteStore(path, DOMAIN.serializer) as store:
                for id in "abcd":
                    streams = await store.load(order(id))
                    assert [each.version for each in streams] == list(range(1, len(streams) + 1))
                    assert all(len(each.events) == 20 for each in streams)
                    assert len(streams) >= max((int(line[2]) for line in seen if line[1] == id), default=0)
                assert rows(path, "PRAGMA integrity_check") == [("ok",)]


class TestLocks:
    async def test_fs14b_lock_that_is_held_too_long_is_a_typed_error(self, path: Path) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await trio.sleep(0.005)
                ticks += 1

        async with SqliteStore(path, DOMAIN.serializer, busy_timeout=0.5) as store, trio.open_nursery() as nursery:
            await store.append(stream(A, 1))
            nursery.start_soon(tick)
            with write_lock(path):
                with pytest.raises(StoreLockedError, match=r"events\.db: somebody else") as caught:
                    await store.append(stream(A, 2))
                assert len(await store.load(A)) == 1
            nursery.cancel_scope.cancel()
            assert ticks >= 10
            assert caught.value.retryable
            assert caught.value.store == str(path)
            with trio.CancelScope(shield=True):
                await store.append(stream(A, 2))

    async def test_those_who_wait_behind_one_that_gives_up_do_not_begin_anew(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits: list[int] = []

        def note(connection: sqlite3.Connection, sql: str) -> None:
            if sql == "BEGIN IMMEDIATE":
                (milliseconds,) = sqlite3.Connection.execute(connection, "PRAGMA busy_timeout").fetchone()
                waits.append(milliseconds)

        outcomes: list[BaseException | None] = []
        async with SqliteStore(path, DOMAIN.serializer, busy_timeout=0.2) as store:
            await store.aclose()
            hook(monkeypatch, before=note)
            await store.open()
            with write_lock(path):
                waits.clear()
                async with trio.open_nursery() as nursery:
                    for n in range(20):
                        nursery.start_soon(collect, partial(store.append, stream(order(n), 1)), outcomes)
            assert [type(each) for each in outcomes] == [StoreLockedError] * 20
            assert (waits[0], max(waits[1:])) == (200, 0)
            for version in (1, 2):
                await store.append(stream(A, version))
            assert waits[-1] == 200

    async def test_forced_stop_behind_a_lock_leaves_a_usable_store(self, path: Path) -> None:
        async with SqliteStore(path, DOMAIN.serializer, busy_timeout=0.3) as store:
            app = App(DOMAIN, store=store)
            runtime = app.runtime(signals=False, shutdown_quiet_period=0)
            outcomes: list[BaseException | None] = []
            with write_lock(path):
                async with trio.open_nursery() as nursery:

                    async def serve(*, task_status: trio.TaskStatus[Any]) -> None:
                        with pytest.raises(ShutdownDeadlineError):
                            await runtime.serve(task_status=task_status)

                    await nursery.start(serve)
                    for n in range(50):
                        nursery.start_soon(collect, partial(app.gateway.send_and_wait, Place(str(n))), outcomes)
                    await wait_all_tasks_blocked()
                    runtime.force_stop()
            assert len(outcomes) == 50
            assert stored(path) == []
            await store.append(stream(A, 1))

    async def test_a_lock_keeps_no_reader_waiting(self, path: Path) -> None:
        async with SqliteStore(path, DOMAIN.serializer) as store:
            await store.append(stream(A, 1))
            await store.aclose()
            with write_lock(path):
                assert len(await store.load(A)) == 1
                await store.aclose()

    @pytest.mark.parametrize("moment", ["before the insert", "before the commit", "after the commit"])
    async def test_fs14c_cancelled_caller_is_told_what_the_file_says(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
    ) -> None:
        held, going_on = trio.Event(), threading.Event()
        token = trio.lowlevel.current_trio_token()
        armed = False

        def hold() -> None:
            nonlocal armed
            if armed:
                armed = False
                token.run_sync_soon(held.set)
                going_on.wait()

        def before(_: sqlite3.Connection, sql: str) -> None:
            if (is_insert(sql) and moment == "before the insert") or (
                sql == "COMMIT" and moment == "before the commit"
            ):
                hold()

        def after(_: sqlite3.Connection, sql: str) -> None:
            if sql == "COMMIT" and moment == "after the commit":
                hold()

        hook(monkeypatch, before=before, after=after)
        async with SqliteStore(path, DOMAIN.serializer) as store:
            armed = True
            returned = False
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:

                    async def append() -> None:
                        nonlocal returned
                        await store.append(stream(A, 1))
                        returned = True

                    nursery.start_soon(append)
                    await held.wait()
                    scope.cancel()
                    with trio.CancelScope(shield=True):
                        await wait_all_tasks_blocked()
                        assert stored(path) == ([("A", 1)] if moment == "after the commit" else [])
                    going_on.set()
            assert returned
            assert stored(path) == [("A", 1)]
            with pytest.raises(DuplicateRequestIdError):
                await store.append(stream(A, 1))
            assert stored(path) == [("A", 1)]

    @pytest.mark.parametrize("committed", [False, True])
    async def test_error_at_the_commit(self, path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool) -> None:
        armed = False

        def fail(connection: sqlite3.Connection, sql: str) -> None:
            nonlocal armed
            if armed and sql == "COMMIT":
                armed = False
                # SQLite has ended the transaction by itself, one way or the other.
                connection.cursor().execute("COMMIT" if committed else "ROLLBACK")
                raise sqlite_error("SQLITE_IOERR_FSYNC")

        hook(monkeypatch, before=fail)
        async with SqliteStore(path, DOMAIN.serializer) as store:
            await store.append(stream(A, 1))
            armed = True
            with pytest.raises(AppendOutcomeUnknownError, match=r"version 2 of shop\.order/A") as caught:
                await store.append(stream(A, 2))
            assert (caught.value.aggregate_id, caught.value.version) == (A, 2)
            assert isinstance(caught.value.__cause__, StoreError)
            assert (await store.load_request(A, "request 2") is not None) is committed
            raised = await collect(partial(store.append, stream(A, 2)))
            assert isinstance(raised, DuplicateRequestIdError) is committed
            assert stored(path) == [("A", 1), ("A", 2)]

    async def test_error_at_the_commit_with_the_transaction_still_open_has_stored_nothing(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        armed = False

        def fail(_: sqlite3.Connection, sql: str) -> None:
            nonlocal armed
            if armed and sql == "COMMIT":
                armed = False
                raise sqlite_error("SQLITE_BUSY")

        hook(monkeypatch, before=fail)
        async with SqliteStore(path, DOMAIN.serializer) as store:
            armed = True
            with pytest.raises(StoreLockedError):
                await store.append(stream(A, 1))
            assert stored(path) == []
            await store.append(stream(A, 1))

    async def test_connection_that_cannot_roll_back_is_replaced(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        armed = False

        def fail(_: sqlite3.Connection, sql: str) -> None:
            if armed and (sql == "ROLLBACK" or is_insert(sql)):
                raise sqlite_error("SQLITE_IOERR")

        hook(monkeypatch, before=fail)
        async with SqliteStore(path, DOMAIN.serializer) as store:
            armed = True
            with pytest.raises(StoreError, match="SQLITE_IOERR"):
                await store.append(stream(A, 1))
            armed = False
            await store.append(stream(A, 1))


def meet_a_full_file(path: str) -> None:
    """In a child: let the system refuse to make the file beside the store any longer (a real I/O error)."""

    async def run() -> None:
        async with SqliteStore(path, DOMAIN.serializer) as store:
            await store.append(stream(A, 1))
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (Path(path + "-wal").stat().st_size + 100, hard))
            with pytest.raises(AppendOutcomeUnknownError):
                await store.append(stream(A, 2))
            with pytest.raises(StoreError):
                await store.save_checkpoint("mails", 1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            with suppress(DuplicateRequestIdError):
                await store.append(stream(A, 2))
            await store.append(stream(A, 3))
            assert [each.version for each in await store.load(A)] == [1, 2, 3]

    trio.run(run)


def use_what_cannot_be_written(folder: str) -> None:
    """In a child, as somebody whom permissions bind: use stores that cannot be written."""

    async def run() -> None:
        for name in ("old.db", "new.db"):
            store = SqliteStore(Path(folder) / name, DOMAIN.serializer)
            with pytest.raises(StoreReadOnlyError, match=name):
                await store.append(stream(A, 1))
            await store.aclose()
        print("refused")

    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    trio.run(run)


FAILURE = FailedExecution.of(
    ValueError("no"), function="mails/Mailer.paid", aggregate_id=A, version=1, sequence=1, attempts=3
)
METHODS: Mapping[str, Callable[[SqliteStore], Coroutine[Any, Any, object]]] = {
    "open": lambda store: store.open(),
    "append": lambda store: store.append(stream(A, 1)),
    "load": lambda store: store.load(A),
    "load_request": lambda store: store.load_request(A, "request 1"),
    "read_all": lambda store: store.read_all(0, 10),
    "version_at": lambda store: store.version_at(A, 1),
    "save_snapshot": lambda store: store.save_snapshot(Snapshot(A, 1, "s", 1, b"{}")),
    "load_snapshot": lambda store: store.load_snapshot(A),
    "discard_snapshot": lambda store: store.discard_snapshot(Snapshot(A, 1, "s", 1, b"{}")),
    "load_checkpoint": lambda store: store.load_checkpoint("mails"),
    "save_checkpoint": lambda store: store.save_checkpoint("mails", 1),
    "load_version": lambda store: store.load_version("mails", A),
    "handle_once": lambda store: store.handle_once("mails", A, 1, 1, lambda _: None),
    "transact": lambda store: store.transact(lambda _: None),
    "record": lambda store: store.record(FAILURE),
    "failures": lambda store: store.failures(),
    "failure": lambda store: store.failure(FAILURE.id),
    "resolve_failure": lambda store: store.resolve_failure(FAILURE.id),
}


@pytest.mark.parametrize("call", METHODS.values(), ids=METHODS)
class TestUnusableFiles:
    async def check(self, path: Path, call: Callable[[SqliteStore], Any], error: type[StoreError], text: str) -> None:
        store = SqliteStore(path, DOMAIN.serializer)
        for _ in range(2):
            with pytest.raises(StoreError, match=text) as caught:
                await call(store)
            assert type(caught.value) is error
            assert caught.value.store == str(path)
            assert not caught.value.retryable
        await store.aclose()

    async def test_text_file(self, path: Path, call: Any) -> None:
        path.write_text("Dear diary, this is no database at all.\n" * 100)
        before = path.read_bytes()
        await self.check(path, call, StoreFormatError, r"events\.db: it is no SQLite database")
        assert path.read_bytes() == before

    async def test_truncated_database(self, path: Path, call: Any) -> None:
        async with SqliteStore(path, DOMAIN.serializer) as store:
            for n in range(100):
                await store.append(stream(order(n), 1))
        path.write_bytes(path.read_bytes()[:6000])
        await self.check(path, call, StoreFormatError, "it is no SQLite database, or a damaged one")

    async def test_folder(self, path: Path, call: Any) -> None:
        path.mkdir()
        await self.check(path, call, StoreFormatError, "it is a folder, not a file")

    async def test_missing_folder(self, path: Path, call: Any) -> None:
        await self.check(path / "events.db", call, StoreError, "there is no folder .*; make it first")
        path.mkdir()
        store = SqliteStore(path / "events.db", DOMAIN.serializer)
        await call(store)
        await store.aclose()

    async def test_newer_schema(self, path: Path, call: Any) -> None:
        async with SqliteStore(path, DOMAIN.serializer):
            pass
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE wow_schema SET version = 3")
        await self.check(path, call, StoreVersionError, r"has version 3; .* reads up to 2: install a newer one")

    async def test_schema_of_no_version(self, path: Path, call: Any) -> None:
        async with SqliteStore(path, DOMAIN.serializer):
            pass
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE wow_schema SET version = 0")
        await self.check(path, call, StoreFormatError, "its schema version is 0; this is no store")

    async def test_schema_without_a_version(self, path: Path, call: Any) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE wow_schema (version)")
        await self.check(path, call, StoreFormatError, "its schema version is None")


class TestDamage:
    async def test_whatever_is_damaged_the_error_is_one_of_the_contract(self, path: Path, tmp_path: Path) -> None:
        async with SqliteStore(path, DOMAIN.serializer) as store:
            for version in range(1, 20):
                await store.append(stream(A, version))
                await store.append(stream(order(version), 1))
            await store.save_checkpoint("mails", 3)
        whole = path.read_bytes()
        raised: set[type] = set()
        for seed in range(300):
            numbers = random.Random(seed)
            data = bytearray(whole[: numbers.choice([len(whole), numbers.randrange(1, len(whole))])])
            for _ in range(numbers.choice([1, 5, 50, 500])):
                data[numbers.randrange(len(data))] = numbers.randrange(256)
            damaged = tmp_path / f"{seed}.db"
            damaged.write_bytes(data)
            store = SqliteStore(damaged, DOMAIN.serializer)
            for call in METHODS.values():
                try:
                    await call(store)
                except (StoreError, SerializationError, DuplicateRequestIdError, VersionConflictError) as error:
                    raised.add(type(error))
            await store.aclose()
        assert StoreFormatError in raised

    @pytest.mark.parametrize("column", ["context", "aggregate", "id"])
    async def test_stream_that_names_no_aggregate(self, store: SqliteStore, path: Path, column: str) -> None:
        await store.append(stream(A, 1))
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"UPDATE wow_streams SET {column} = ' '")
        with pytest.raises(StoreFormatError, match="it is damaged at position 1"):
            await store.read_all(0, 10)

    async def test_words_of_sqlite_that_cannot_be_read(self, store: SqliteStore, path: Path) -> None:
        await store.aclose()
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute("UPDATE sqlite_master SET sql = CAST(x'ff' AS TEXT) WHERE name = 'wow_streams'")
        with pytest.raises(StoreFormatError, match="damaged"):
            await store.load(A)


class TestDisk:
    async def test_tables_that_are_not_what_they_should_be(self, store: SqliteStore, path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("DROP TABLE wow_streams")
        with pytest.raises(StoreFormatError, match="its tables are not what they should be"):
            await store.append(stream(A, 1))
        with pytest.raises(StoreFormatError):
            await store.load(A)
        await store.save_checkpoint("mails", 1)

    def test_what_cannot_be_written_is_read_only(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)

            async def fill() -> None:
                async with SqliteStore(folder / "old.db", DOMAIN.serializer) as store:
                    await store.append(stream(A, 1))

            trio.run(fill)
            (folder / "old.db").chmod(0o444)
            folder.chmod(0o555)
            try:
                with child(use_what_cannot_be_written, folder) as process:
                    assert succeed(process) == "refused\n"
            finally:
                folder.chmod(0o755)

    async def test_full_disk(self, store: SqliteStore, path: Path) -> None:
        await store.append(stream(A, 1))
        connection = store._writer.open()
        (most,) = connection.execute("PRAGMA max_page_count").fetchone()
        connection.execute("PRAGMA max_page_count = 1")  # as small as it may be by now
        with pytest.raises(StoreFullError, match="there is no room left"):
            await store.append(stream(A, 2, Placed("x" * 100_000)))
        assert stored(path) == [("A", 1)]
        connection.execute(f"PRAGMA max_page_count = {most}")
        await store.append(stream(A, 2, Placed("x" * 100_000)))
        assert stored(path) == [("A", 1), ("A", 2)]

    def test_io_error_at_the_commit_leaves_the_outcome_unknown(self, path: Path) -> None:
        with child(meet_a_full_file, path) as process:
            succeed(process)
        assert stored(path) == [("A", 1), ("A", 2), ("A", 3)]


def insert(value: object) -> Callable[[sqlite3.Connection], object]:
    return lambda connection: connection.execute("INSERT INTO views VALUES (?)", (value,))


class TestHandleOnce:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "events.db"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE views (value UNIQUE)")
        return path

    def views(self, path: Path) -> list[object]:
        return [value for (value,) in rows(path, "SELECT value FROM views ORDER BY rowid")]

    async def test_each_version_once(self, store: SqliteStore, path: Path) -> None:
        assert await store.handle_once("p", A, 1, 0, insert("A1"))
        assert not await store.handle_once("p", A, 1, 0, insert("again"))
        assert await store.handle_once("p", B, 1, 7, insert("B1"))
        assert await store.handle_once("p", A, 3, 5, insert("A3"))
        assert not await store.handle_once("p", A, 2, 9, insert("late"))
        assert await store.handle_once("q", A, 1, 0, insert("q"))
        assert self.views(path) == ["A1", "B1", "A3", "q"]
        assert (await store.load_version("p", A), await store.load_version("p", B)) == (3, 1)
        assert (await store.load_version("q", A), await store.load_version("q", B)) == (1, 0)
        assert (await store.load_checkpoint("p"), await store.load_checkpoint("q")) == (7, 0)

    @pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt, SystemExit, GeneratorExit])
    async def test_error_rolls_back(self, store: SqliteStore, path: Path, error: type[BaseException]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            insert(1)(connection)
            raise error("no")

        with pytest.raises(error, match="no"):
            await store.handle_once("p", A, 1, 1, work)
        assert self.views(path) == []
        assert (await store.load_version("p", A), await store.load_checkpoint("p")) == (0, 0)
        assert await store.handle_once("p", A, 1, 1, insert(1))

    @pytest.mark.parametrize(
        "leave",
        [
            lambda connection: connection.commit(),
            lambda connection: connection.rollback(),
            lambda connection: connection.execute("COMMIT"),
            lambda connection: connection.execute("END"),
            lambda connection: connection.execute("ROLLBACK"),
            lambda connection: connection.executescript("INSERT INTO views VALUES (2)"),
            lambda connection: connection.cursor().executescript("COMMIT; INSERT INTO views VALUES (2)"),
            lambda connection: connection.__exit__(None, None, None),
        ],
        ids=["commit", "rollback", "COMMIT", "END", "ROLLBACK", "executescript", "cursor", "with"],
    )
    async def test_leaving_the_transaction_is_refused_and_nothing_is_kept(
        self, store: SqliteStore, path: Path, leave: Callable[[sqlite3.Connection], object]
    ) -> None:
        await store.append(stream(A, 1))

        def work(connection: sqlite3.Connection) -> None:
            insert(1)(connection)
            leave(connection)

        with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
            await store.handle_once("p", A, 1, 1, work)
        assert self.views(path) == []
        assert await store.load_version("p", A) == 0
        await store.append(stream(A, 2))
        assert await store.handle_once("p", A, 1, 1, insert(1))

    @pytest.mark.parametrize(
        "statement",
        [
            "ATTACH ':memory:' AS other",
            "DETACH main",
            "PRAGMA query_only = ON",
            "PRAGMA Query_Only(1)",
            "PRAGMA busy_timeout = 0",
            "PRAGMA locking_mode = EXCLUSIVE",
            "PRAGMA main.locking_mode = EXCLUSIVE",
        ],
    )
    @pytest.mark.parametrize("goes_on", [False, True])
    async def test_changing_the_connection_is_refused(
        self, store: SqliteStore, path: Path, statement: str, goes_on: bool
    ) -> None:
        def work(connection: sqlite3.Connection) -> None:
            insert(1)(connection)
            try:
                connection.execute(statement)
            except sqlite3.DatabaseError:
                if not goes_on:
                    raise

        if goes_on:
            assert await store.handle_once("p", A, 1, 1, work)
        else:
            with pytest.raises(sqlite3.DatabaseError, match="not authorized") as caught:
                await store.handle_once("p", A, 1, 1, work)
            assert "lent" in caught.value.__notes__[0]
        assert self.views(path) == [1] * goes_on
        connection = store._writer.open()
        assert [name for _, name, _ in connection.execute("PRAGMA database_list")] == ["main"]
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (5000,)
        await store.append(stream(A, 1))
        assert len(await store.load(A)) == 1

    async def test_pragmas_that_change_nothing_of_the_connection_are_allowed(self, store: SqliteStore) -> None:
        def work(connection: sqlite3.Connection) -> None:
            assert connection.execute("PRAGMA Table_Info(views)").fetchall()
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            connection.execute("PRAGMA user_version = 7")

        assert await store.handle_once("p", A, 1, 1, work)
        assert store._writer.open().execute("PRAGMA user_version").fetchone() == (7,)

    async def test_unfinished_cursor_keeps_no_later_write_out(self, store: SqliteStore, path: Path) -> None:
        kept: list[sqlite3.Cursor] = []

        def work(connection: sqlite3.Connection) -> None:
            kept.append(connection.execute("SELECT version FROM wow_streams"))
            kept[0].fetchone()

        for version in (1, 2, 3):
            await store.append(stream(A, version))
        assert await store.handle_once("p", A, 1, 1, work)
        async with SqliteStore(path, DOMAIN.serializer) as other:
            await other.append(stream(B, 1))
        await store.append(stream(A, 4))
        assert await store.handle_once("p", A, 2, 2, insert(1))
        assert stored(path) == [("A", 1), ("A", 2), ("A", 3), ("B", 1), ("A", 4)]
        del kept[:]

    async def test_work_that_would_have_to_be_awaited_is_refused(self, store: SqliteStore, path: Path) -> None:
        async def coroutine(_: sqlite3.Connection) -> None: ...

        class Awaitable:
            def __await__(self) -> Iterator[None]:
                return iter(())

        def late(connection: sqlite3.Connection) -> object:
            insert(1)(connection)
            return Awaitable()

        for work in (coroutine, late):
            with pytest.raises(TypeError, match="the work of p returned an awaitable; make it a plain function"):
                await store.handle_once("p", A, 1, 1, work)
        assert self.views(path) == []
        assert await store.handle_once("p", A, 1, 1, insert(1))

    async def test_transaction_of_its_own(self, store: SqliteStore, path: Path) -> None:
        for _ in range(2):  # whatever was done before
            await store.transact(lambda connection: connection.execute("INSERT INTO views VALUES (NULL)"))
        assert self.views(path) == [None, None]
        seen: list[object] = []
        mark = contextvars.ContextVar("mark", default="none")
        mark.set("the caller's")
        await store.transact(lambda connection: seen.extend([type(connection), mark.get()]))
        assert seen == [store.transaction_type, "the caller's"]

        def failing(connection: sqlite3.Connection) -> None:
            insert(1)(connection)
            raise LookupError("no such row")

        async def coroutine(_: sqlite3.Connection) -> None: ...

        with pytest.raises(LookupError, match="no such row"):
            await store.transact(failing)
        with pytest.raises(TypeError, match="returned an awaitable; make it a plain function"):
            await store.transact(coroutine)
        with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
            await store.transact(lambda connection: connection.execute("COMMIT"))
        assert self.views(path) == [None, None]
        assert rows(path, "SELECT * FROM wow_versions") == rows(path, "SELECT * FROM wow_checkpoints") == []

    async def test_savepoints_are_the_functions_own(self, store: SqliteStore, path: Path) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.execute("SAVEPOINT mine")
            insert(1)(connection)
            connection.execute("ROLLBACK TO mine")
            insert(2)(connection)
            connection.execute("RELEASE mine")

        assert await store.handle_once("p", A, 1, 1, work)
        assert self.views(path) == [2]

    async def test_violated_index_is_raised_unchanged(self, store: SqliteStore, path: Path) -> None:
        assert await store.handle_once("p", A, 1, 1, insert(1))
        with pytest.raises(sqlite3.IntegrityError, match=r"UNIQUE constraint failed: views\.value") as caught:
            await store.handle_once("p", A, 2, 2, insert(1))
        assert caught.value.sqlite_errorname == "SQLITE_CONSTRAINT_UNIQUE"
        assert (await store.load_version("p", A), await store.load_checkpoint("p")) == (1, 1)

    @pytest.mark.parametrize("goes_on", [False, True])
    async def test_statement_that_rolls_everything_back_is_an_error(
        self, store: SqliteStore, path: Path, goes_on: bool
    ) -> None:
        assert await store.handle_once("p", A, 1, 1, insert(1))

        def work(connection: sqlite3.Connection) -> None:
            insert(2)(connection)
            try:
                connection.execute("INSERT OR ROLLBACK INTO views VALUES (1)")
            except sqlite3.IntegrityError:
                if not goes_on:
                    raise

        with pytest.raises((sqlite3.IntegrityError, StoreError), match="UNIQUE constraint|use no OR ROLLBACK"):
            await store.handle_once("p", A, 2, 2, work)
        assert self.views(path) == [1]
        assert await store.load_version("p", A) == 1
        await store.append(stream(A, 1))

    async def test_closed_connection_is_replaced(self, store: SqliteStore, path: Path) -> None:
        def work(connection: sqlite3.Connection) -> None:
            insert(1)(connection)
            connection.close()

        with pytest.raises(sqlite3.ProgrammingError):
            await store.handle_once("p", A, 1, 1, work)
        assert self.views(path) == []
        await store.append(stream(A, 1))

    async def test_factories_are_put_back(self, store: SqliteStore) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.row_factory = sqlite3.Row
            connection.text_factory = bytes

        await store.handle_once("p", A, 1, 1, work)
        await store.append(stream(A, 1))
        with pytest.raises(DuplicateRequestIdError):
            await store.append(stream(A, 1))

    async def test_work_has_the_context_of_its_caller(self, store: SqliteStore) -> None:
        who = contextvars.ContextVar[str]("who", default="nobody")
        seen: list[tuple[str, str]] = []

        async def handle(name: str) -> None:
            def work(_: sqlite3.Connection) -> None:
                seen.append((name, who.get()))
                who.set("somebody else")

            who.set(name)
            await store.handle_once("p", order(name), 1, 0, work)
            assert who.get() == name

        async with trio.open_nursery() as nursery:
            for n in range(10):
                nursery.start_soon(handle, f"caller {n}")
        assert [context for _, context in seen] == [name for name, _ in seen]
        assert len(seen) == 10

    async def test_error_of_one_work_does_not_harm_others_of_its_batch(self, store: SqliteStore, path: Path) -> None:
        outcomes: list[BaseException | None] = []

        def fail(connection: sqlite3.Connection) -> None:
            insert("failed")(connection)
            raise LookupError

        async with trio.open_nursery() as nursery:
            for n in range(20):
                work = fail if n % 3 == 0 else insert(n)
                nursery.start_soon(collect, partial(store.handle_once, "p", order(n), 1, 0, work), outcomes)
        assert sorted(type(each).__name__ for each in outcomes) == ["LookupError"] * 7 + ["NoneType"] * 13
        assert sorted(map(str, self.views(path))) == sorted(str(n) for n in range(20) if n % 3)


@projection
class Rows:
    """Writes a row for each order, and dies where it is told to."""

    def __init__(self, dies: str = "") -> None:
        self.dies = dies
        self.is_at_five = False

    @on_event
    def placed(self, event: DomainEvent[Placed], connection: sqlite3.Connection) -> None:
        self.is_at_five = event.body.value == 5
        if self.is_at_five and self.dies == "before the row":
            kill_self()
        connection.execute("INSERT INTO views VALUES (?)", (event.body.value,))
        if self.is_at_five and self.dies == "after the row":
            kill_self()


def project(path: str, dies: str) -> None:
    """In a child: handle what is stored, and die at the fifth event."""
    projected = Rows(dies)

    def before(_: sqlite3.Connection, sql: str) -> None:
        if sql == "COMMIT" and projected.is_at_five and dies == "before the commit":
            kill_self()

    def after(_: sqlite3.Connection, sql: str) -> None:
        if sql == "COMMIT" and projected.is_at_five and dies == "after the commit":
            kill_self()

    async def run() -> None:
        app = App(DOMAIN, [projected], store=SqliteStore(path, DOMAIN.serializer))
        async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)):
            pass

    with pytest.MonkeyPatch.context() as monkeypatch:
        hook(monkeypatch, before=before, after=after)
        trio.run(run)


class TestFs19Projection:
    @pytest.fixture
    async def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "events.db"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE views (value)")
        return path

    def views(self, path: Path) -> list[int]:
        return [value for (value,) in rows(path, "SELECT value FROM views ORDER BY rowid")]

    @pytest.mark.parametrize("spread", [False, True], ids=["one aggregate", "ten aggregates"])
    @pytest.mark.parametrize("dies", ["before the row", "after the row", "before the commit", "after the commit"])
    async def test_each_effect_once_whenever_the_process_dies(self, path: Path, dies: str, spread: bool) -> None:
        async with SqliteStore(path, DOMAIN.serializer) as store:
            for n in range(1, 11):
                aggregate_id, version = (order(n), 1) if spread else (A, n)
                await store.append(stream(aggregate_id, version, Placed(n), request_id=str(n)))
        with child(project, path, dies) as process:
            code, _, errors = process.finish()
            assert code == -signal.SIGKILL, errors
        views = self.views(path)
        assert len(views) == len(set(views)) <= 10
        assert (5 in views) is (dies == "after the commit")
        handled = rows(path, "SELECT sum(version) FROM wow_versions")[0][0] or 0
        assert handled == len(views)
        assert all(position < 5 for (position,) in rows(path, "SELECT position FROM wow_checkpoints"))
        for _ in range(2):
            app = App(DOMAIN, [Rows()], store=SqliteStore(path, DOMAIN.serializer))
            async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)):
                pass
            assert sorted(self.views(path)) == list(range(1, 11))
        assert rows(path, "SELECT position FROM wow_checkpoints") == [(10,)]

    async def test_live_events_and_a_restart(self, path: Path) -> None:
        for n in range(2):
            app = App(DOMAIN, [Rows()], store=SqliteStore(path, DOMAIN.serializer))
            async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
                for id in ("a", "b"):
                    (await gateway.send_and_wait(Place(id))).raise_for_error()
            assert sorted(map(str, self.views(path))) == sorted(["a", "b"] * (n + 1))
        assert not Path(f"{path}-wal").exists(), "the store was not closed"


class TestOpenAndClose:
    async def test_it_opens_when_it_is_first_used(self, path: Path) -> None:
        store = SqliteStore(path, DOMAIN.serializer)
        assert not path.exists()
        assert await store.load(A) == []
        assert path.exists()
        await store.aclose()

    async def test_closing_is_idempotent_and_a_later_use_opens_again(self, path: Path) -> None:
        store = SqliteStore(path, DOMAIN.serializer)
        await store.aclose()
        assert not path.exists()
        for version in (1, 2, 3):
            await store.append(stream(A, version))
            assert len(await store.load(A)) == version
            await store.aclose()
            await store.aclose()
            assert not Path(f"{path}-wal").exists()

    async def test_closing_waits_for_what_was_asked_for_before(self, path: Path) -> None:
        store = SqliteStore(path, DOMAIN.serializer)
        async with trio.open_nursery() as nursery:
            for n in range(2 * BATCH):
                nursery.start_soon(store.append, stream(order(n), 1))
            await wait_all_tasks_blocked()
            await store.aclose()
            assert not Path(f"{path}-wal").exists()
        assert len(stored(path)) == 2 * BATCH

    async def test_it_is_closed_when_cancelled(self, path: Path) -> None:
        with trio.CancelScope() as scope:
            async with SqliteStore(path, DOMAIN.serializer) as store:
                await store.append(stream(A, 1))
                await store.load(A)
                scope.cancel()
        assert scope.cancelled_caught
        assert not Path(f"{path}-wal").exists()

    async def test_no_connection_is_left_open(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[sqlite3.Connection] = []
        hook(monkeypatch, before=lambda connection, _: opened.append(connection))
        path.write_text("Dear diary\n" * 1000)
        store = SqliteStore(path, DOMAIN.serializer)
        with pytest.raises(StoreFormatError):
            await store.open()
        path.unlink()
        async with store:
            await store.append(stream(A, 1))
            await store.load(A)
        assert len(set(map(id, opened))) == 3
        for connection in opened:
            with pytest.raises(sqlite3.ProgrammingError, match="closed"):
                connection.cursor()

    def test_one_store_in_two_runs(self, path: Path) -> None:
        store = SqliteStore(path, DOMAIN.serializer)
        for version in (1, 2):
            trio.run(store.append, stream(A, version))
        trio.run(store.aclose)
        assert stored(path) == [("A", 1), ("A", 2)]

    async def test_the_working_folder_may_change(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)
        async with SqliteStore("events.db", DOMAIN.serializer) as store:
            await store.append(stream(A, 1))
            await store.aclose()
            monkeypatch.chdir(tmp_path / "elsewhere")
            assert len(await store.load(A)) == 1


class TestCancellation:
    @pytest.mark.parametrize("call", METHODS.values(), ids=METHODS)
    async def test_at_each_wait_of_each_method(self, tmp_path: Path, call: Callable[[SqliteStore], Any]) -> None:
        caught: list[bool] = []
        for step in range(100):
            async with SqliteStore(tmp_path / f"{step}.db", DOMAIN.serializer) as store:
                with trio.CancelScope() as scope:
                    await cancelled_at(call(store), step, scope)
                caught.append(scope.cancelled_caught)
                written = len(await everything(store)), await store.load_checkpoint("mails")
                if scope.cancelled_caught:
                    assert written == (0, 0)
                with trio.fail_after(30):
                    try:
                        await call(store)
                    except DuplicateRequestIdError:
                        assert written == (1, 0)
                    await store.append(stream(B, 1))
            if not scope.cancel_called:
                break
        assert not caught[-1]

    async def test_of_one_of_several_at_each_wait(self, path: Path) -> None:
        for step in range(100):
            outcomes: list[BaseException | None] = []
            async with SqliteStore(path, DOMAIN.serializer) as store:
                scope = trio.CancelScope()

                async def victim(step: int, scope: trio.CancelScope, store: SqliteStore) -> None:
                    with scope:
                        await cancelled_at(store.append(stream(order(f"victim {step}"), 1)), step, scope)

                async with trio.open_nursery() as nursery:
                    for n in range(5):
                        nursery.start_soon(collect, partial(store.append, stream(order(f"{step} {n}"), 1)), outcomes)
                    nursery.start_soon(victim, step, scope, store)
                assert outcomes == [None] * 5
                kept = bool(await store.load(order(f"victim {step}")))
                assert kept is not scope.cancelled_caught
            if not scope.cancel_called:
                break
        else:
            pytest.fail("it never ended")


class Gate:
    """A job that waits in its thread until it is let go."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        self._open = threading.Event()

    def __call__(self) -> None:
        self._token.run_sync_soon(self.begun.set)
        self._open.wait()

    def open(self) -> None:
        self._open.set()


class TestLane:
    async def test_order_and_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hops = 0
        real = trio.to_thread.run_sync

        async def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal hops
            hops += 1
            return await real(*arguments, **options)

        monkeypatch.setattr(trio.to_thread, "run_sync", counted)
        lane, done, results = Lane(), list[int](), list[int]()
        gate = Gate()

        async def ask(n: int) -> None:
            def job() -> int:
                done.append(n)
                return n

            assert await lane.run(job) == n
            results.append(n)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lane.run, gate)
            await gate.begun.wait()
            for n in range(3 * BATCH):
                nursery.start_soon(ask, n)
                await wait_all_tasks_blocked()
            gate.open()
        assert done == list(range(3 * BATCH))
        assert sorted(results) == done
        assert hops == 4

    async def test_cancelled_call_in_the_queue_is_never_begun(self) -> None:
        lane, gate, done, outcomes = Lane(), Gate(), list[int](), list[BaseException | None]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lane.run, gate)
            await gate.begun.wait()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as cancelled:
                    for n in range(5):
                        where = cancelled if n % 2 else nursery
                        where.start_soon(collect, partial(lane.run, partial(done.append, n)), outcomes)
                        await wait_all_tasks_blocked()
                    scope.cancel()
            assert [type(each) for each in outcomes] == [trio.Cancelled] * 2
            gate.open()
        assert done == [0, 2, 4]

    async def test_cancelled_leader_finishes_and_hands_on(self) -> None:
        lane, gate, done = Lane(), Gate(), list[int]()
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as cancelled:
                    cancelled.start_soon(lane.run, gate)
                    await gate.begun.wait()
                    for n in range(3):
                        nursery.start_soon(lane.run, partial(done.append, n))
                        await wait_all_tasks_blocked()
                    scope.cancel()
                    gate.open()
        assert done == [0, 1, 2]
        assert await lane.run(lambda: "usable") == "usable"

    async def test_a_leader_cancelled_before_its_thread_hands_on(self) -> None:
        lane, gate, done, outcomes = Lane(), Gate(), list[int](), list[BaseException | None]()
        scope = trio.CancelScope()

        async def first() -> None:
            await lane.run(gate)
            scope.cancel()  # the next one is woken to lead, and has not run yet

        async def next_one() -> None:
            with scope:
                await collect(partial(lane.run, partial(done.append, -1)), outcomes)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await gate.begun.wait()
            nursery.start_soon(next_one)
            await wait_all_tasks_blocked()
            for n in range(3):
                nursery.start_soon(lane.run, partial(done.append, n))
                await wait_all_tasks_blocked()
            gate.open()
        assert [type(each) for each in outcomes] == [trio.Cancelled]
        assert done == [0, 1, 2]

    async def test_job_does_not_notice_that_its_leader_is_cancelled(self) -> None:
        lane, gate, outcomes = Lane(), Gate(), list[BaseException | None]()
        scope = trio.CancelScope()

        def cancel() -> None:
            trio.from_thread.run_sync(scope.cancel)

        async def lead() -> None:
            with scope:
                await lane.run(cancel)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lane.run, gate)
            await gate.begun.wait()
            nursery.start_soon(lead)
            await wait_all_tasks_blocked()
            nursery.start_soon(collect, partial(lane.run, trio.from_thread.check_cancelled), outcomes)
            await wait_all_tasks_blocked()
            gate.open()
        assert scope.cancel_called
        assert outcomes == [None]

    async def test_error_is_only_its_own_callers(self) -> None:
        lane, gate, done, outcomes = Lane(), Gate(), list[int](), list[BaseException | None]()

        def fail() -> None:
            raise LookupError

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lane.run, gate)
            await gate.begun.wait()
            for n in range(6):
                job = fail if n % 2 else partial(done.append, n)
                nursery.start_soon(collect, partial(lane.run, job), outcomes)
                await wait_all_tasks_blocked()
            gate.open()
        assert done == [0, 2, 4]
        assert sorted(type(each).__name__ for each in outcomes) == ["LookupError"] * 3 + ["NoneType"] * 3

    async def test_thread_that_cannot_be_made_fails_one_call_and_no_other(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lane, gate, done, outcomes = Lane(), Gate(), list[int](), list[BaseException | None]()
        real = trio.to_thread.run_sync
        failures = iter([True])

        async def failing(*arguments: Any, **options: Any) -> Any:
            if next(failures, False):
                raise RuntimeError("can't start new thread")
            return await real(*arguments, **options)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lane.run, gate)
            await gate.begun.wait()
            monkeypatch.setattr(trio.to_thread, "run_sync", failing)
            for n in range(4):
                nursery.start_soon(collect, partial(lane.run, partial(done.append, n)), outcomes)
                await wait_all_tasks_blocked()
            gate.open()
        assert sorted(type(each).__name__ for each in outcomes) == ["NoneType"] * 3 + ["RuntimeError"]
        assert done == [1, 2, 3]

    @pytest.mark.parametrize("moment", ["while it waits", "when it is to lead"])
    def test_keyboard_interrupt_reaches_the_main_task_alone(self, moment: str) -> None:
        done: list[int] = []
        outcomes: list[BaseException | None] = []

        async def run() -> None:
            lane, gate = Lane(), Gate()

            @trio.lowlevel.enable_ki_protection
            async def first() -> None:
                await lane.run(gate)
                if moment == "when it is to lead":
                    signal.raise_signal(signal.SIGINT)

            @trio.lowlevel.enable_ki_protection
            async def others() -> None:
                await wait_all_tasks_blocked()
                async with trio.open_nursery() as waiting:
                    for n in range(3):
                        waiting.start_soon(collect, partial(lane.run, partial(done.append, n)), outcomes)
                        await wait_all_tasks_blocked()
                    if moment == "while it waits":
                        signal.raise_signal(signal.SIGINT)
                        await wait_all_tasks_blocked()
                    gate.open()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(first)
                await gate.begun.wait()
                nursery.start_soon(others)
                interrupted = await collect(partial(lane.run, partial(done.append, -1)))
            assert isinstance(interrupted, KeyboardInterrupt)

        trio.run(run)
        assert outcomes == [None] * 3
        assert done == [0, 1, 2]


async def test_a_function_that_returns_an_awaitable_is_an_error_and_handles_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def later() -> None: ...

    @projection
    class Lazy:
        @on_event
        def placed(self, event: Placed, connection: sqlite3.Connection) -> object:
            return later()

    store = SqliteStore(path, DOMAIN.serializer)
    await store.append(stream(A, 1))
    app = App(DOMAIN, [Lazy()], store=store)
    async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)):
        pass
    assert "Lazy.placed returned an awaitable, which no thread awaits" in caplog.text
    assert await store.load_checkpoint("projection-dispatcher/Lazy") == 0
    await store.aclose()
