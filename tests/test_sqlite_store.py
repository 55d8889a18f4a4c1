"""The SQLite store on real files: what it promises beyond the laws of every event store."""

import os
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from chain_domain import Chain, Step, Stepped
from support import PythonProcess
from trio.testing import wait_all_tasks_blocked

from trio_wow import App, DomainEvent, on_event, projection
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.adapters.sqlite._lane import BATCH, Lane
from trio_wow.domain import Domain
from trio_wow.errors import (
    AppendOutcomeUnknownError,
    DuplicateRequestIdError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreLockedError,
    StoreVersionError,
    VersionConflictError,
)
from trio_wow.eventsourcing import CheckpointStore, Snapshot, SnapshotStore
from trio_wow.messages import AggregateId, DomainEventStream
from trio_wow.runtime import RuntimeComponent

DOMAIN = Domain([Chain])
TESTS = Path(__file__).parent

posix = pytest.mark.skipif(os.name != "posix", reason="needs signals, users and permissions as POSIX has them")


def chain(id: str = "a") -> AggregateId:
    return AggregateId("chains", "chain", id)


def stepped(version: int, id: str = "a", *, request: str | None = None, number: int = 0) -> DomainEventStream:
    return DomainEventStream(
        aggregate_id=chain(id),
        version=version,
        events=[Stepped(number)],
        command_id="c",
        request_id=request or f"request {version}",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(path, DOMAIN.serializer) as store:
        yield store


def query(path: Path, statement: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


class Hooked(sqlite3.Connection):
    """A connection that calls `hook` with each statement before it runs it."""

    hook: Callable[["Hooked", str], object] | None = None

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        if Hooked.hook is not None:
            Hooked.hook(self, sql)
        return super().execute(sql, *arguments)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hooked]]:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Hooked))
    yield Hooked
    Hooked.hook = None


class TestFile:
    async def test_it_is_all_three_stores_and_a_component(self, store: SqliteStore) -> None:
        assert isinstance(store, SnapshotStore)
        assert isinstance(store, CheckpointStore)
        assert isinstance(store, RuntimeComponent)

    async def test_the_file_is_in_wal_mode_and_every_commit_is_on_the_disk(
        self, path: Path, hooked: type[Hooked]
    ) -> None:
        connections: list[sqlite3.Connection] = []
        hooked.hook = lambda connection, _: connections.append(connection)
        async with SqliteStore(path, DOMAIN.serializer) as store:
            await store.append(stepped(1))
            hooked.hook = None
            for connection in dict.fromkeys(connections):
                assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
                assert connection.execute("PRAGMA synchronous").fetchone() == (2,)

    async def test_nothing_happens_before_it_is_used(self, path: Path) -> None:
        store = SqliteStore(path, DOMAIN.serializer)
        assert repr(store) == f"<SqliteStore {str(path)!r}>"
        await store.aclose()
        assert not path.exists()

    async def test_closing_is_idempotent_and_a_later_use_opens_again(self, path: Path) -> None:
        store = SqliteStore(str(path), DOMAIN.serializer)
        await store.append(stepped(1))
        for _ in range(2):
            await store.aclose()
        assert sorted(each.name for each in path.parent.iterdir()) == ["events.db"]
        await store.append(stepped(2))
        assert [each.version for each in await store.load(chain())] == [1, 2]
        await store.aclose()

    async def test_a_runtime_opens_and_closes_it(self, path: Path) -> None:
        store = SqliteStore(path, DOMAIN.serializer)
        app = App(DOMAIN, store=store)
        async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
            assert path.exists()
            await gateway.send_and_wait(Step("a"))
        assert not path.with_name("events.db-wal").exists()

    async def test_a_file_that_is_no_store_fails_the_start(self, path: Path) -> None:
        path.write_text("no database\n" * 100)
        app = App(DOMAIN, store=SqliteStore(path, DOMAIN.serializer))
        with pytest.raises(StoreFormatError):
            await app.runtime(signals=False).serve()

    async def test_a_program_has_tables_of_its_own_in_the_file(self, path: Path) -> None:
        connection = sqlite3.connect(path)
        connection.executescript("CREATE TABLE mine (id); INSERT INTO mine VALUES (1); PRAGMA user_version = 7")
        connection.close()
        async with SqliteStore(path, DOMAIN.serializer) as store:
            await store.append(stepped(1))
        assert query(path, "SELECT id FROM mine") == [(1,)]
        assert query(path, "PRAGMA user_version") == [(7,)]

    @pytest.mark.parametrize("path", ["", ":memory:", "a\0b"])
    def test_a_path_that_names_no_file_is_refused(self, path: str) -> None:
        with pytest.raises(ValueError, match="path must name a file"):
            SqliteStore(path, DOMAIN.serializer)

    @pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
    def test_a_busy_timeout_out_of_its_range_is_refused(self, path: Path, timeout: float) -> None:
        with pytest.raises(ValueError, match="busy_timeout must be a positive number of seconds"):
            SqliteStore(path, DOMAIN.serializer, busy_timeout=timeout)

    async def test_positions_are_never_given_again(self, path: Path) -> None:
        async with SqliteStore(path, DOMAIN.serializer) as store:
            for version in (1, 2):
                await store.append(stepped(version))
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("DELETE FROM wow_streams WHERE version = 2")
        connection.close()
        async with SqliteStore(path, DOMAIN.serializer) as store:
            await store.append(stepped(2))
            assert [each.position for each in await store.read_all(0, 9)] == [1, 3]


class TestErrors:
    """Each leaves the file as it was, and the store usable."""

    async def raises(self, path: Path, error: type[StoreError], match: str) -> StoreError:
        raised: list[StoreError] = []
        store = SqliteStore(path, DOMAIN.serializer, busy_timeout=0.05)
        calls: list[Callable[[], Any]] = [
            store.open,
            partial(store.append, stepped(1)),
            partial(store.load, chain()),
            partial(store.read_all, 0, 9),
            partial(store.load_snapshot, chain()),
            partial(store.save_checkpoint, "p", 1),
        ]
        for call in calls:
            with pytest.raises(error, match=match) as caught:
                await call()
            raised.append(caught.value)
        await store.aclose()
        for each in raised:
            assert type(each) is error
            assert each.store == str(path)
            assert str(path) in str(each)
            assert each.retryable is (error is StoreLockedError)
        return raised[0]

    async def test_a_text_file(self, path: Path) -> None:
        path.write_text("no database\n" * 100)
        await self.raises(path, StoreFormatError, "it is no SQLite database, or a damaged one")
        assert path.read_text() == "no database\n" * 100

    async def test_a_folder(self, path: Path) -> None:
        path.mkdir()
        await self.raises(path, StoreFormatError, "it is a folder, not a file")

    async def test_a_folder_that_is_not_there(self, path: Path) -> None:
        await self.raises(path / "none" / "x.db", StoreError, "there is no folder .*; make it first")

    async def test_a_newer_schema(self, path: Path) -> None:
        async with SqliteStore(path, DOMAIN.serializer):
            pass
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("UPDATE wow_schema SET version = 2")
        connection.close()
        error = await self.raises(
            path, StoreVersionError, "its schema has version 2; .* reads up to 1: install a newer"
        )
        assert isinstance(error, StoreVersionError)
        assert (error.found, error.known) == (2, 1)

    @pytest.mark.parametrize("version", ["NULL", "'x'"])
    async def test_a_schema_table_of_somebody_else(self, path: Path, version: str) -> None:
        connection = sqlite3.connect(path)
        connection.executescript(f"CREATE TABLE wow_schema (version); INSERT INTO wow_schema VALUES ({version})")
        connection.close()
        await self.raises(path, StoreFormatError, "its schema version is .*; this is no store")

    async def test_tables_that_are_gone(self, path: Path) -> None:
        async with SqliteStore(path, DOMAIN.serializer) as store:
            connection = sqlite3.connect(path)
            connection.executescript("DROP TABLE wow_streams; DROP TABLE wow_snapshots")
            connection.close()
            for call in (store.append(stepped(1)), store.load(chain()), store.load_snapshot(chain())):
                with pytest.raises(StoreFormatError, match="its tables are not what they should be"):
                    await call

    async def test_a_damaged_file(self, path: Path) -> None:
        async with SqliteStore(path, DOMAIN.serializer) as store:
            for version in range(1, 200):
                await store.append(stepped(version))
        data = bytearray(path.read_bytes())
        data[4096:-4096] = b"\xa5" * (len(data) - 8192)
        path.write_bytes(data)
        damaged = SqliteStore(path, DOMAIN.serializer)
        with pytest.raises(StoreFormatError, match="it is no SQLite database, or a damaged one"):
            await damaged.read_all(0, 1000)
        await damaged.aclose()

    async def test_a_disk_that_is_full(self, path: Path, hooked: type[Hooked]) -> None:
        writers: list[sqlite3.Connection] = []
        hooked.hook = lambda connection, sql: writers.append(connection) if sql == "BEGIN IMMEDIATE" else None
        async with SqliteStore(path, DOMAIN.serializer) as store:
            await store.append(stepped(1))
            hooked.hook = None
            writer = writers[-1]
            (pages,) = writer.execute("PRAGMA page_count").fetchone()
            writer.execute(f"PRAGMA max_page_count = {pages}")
            version = 1
            with pytest.raises(StoreFullError, match="there is no room left on its disk"):
                while True:
                    await store.append(stepped(version + 1))
                    version += 1
            assert len(await store.load(chain())) == version
            assert not writer.in_transaction
            writer.execute("PRAGMA max_page_count = 100000")
            await store.append(stepped(version + 1))
            assert len(await store.load(chain())) == version + 1

    @posix
    @pytest.mark.parametrize("which", ["file", "folder"])
    def test_what_may_not_be_written(self, path: Path, which: str) -> None:
        """In a process that is not root, for whom nothing is read-only."""
        program = """
import os, sys, trio
path, which = sys.argv[1:]
from chain_domain import Chain
from test_sqlite_store import DOMAIN, chain, stepped
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.errors import StoreReadOnlyError

async def main():
    store = SqliteStore(path, DOMAIN.serializer)
    if which == "file":
        print(len(await store.load(chain())))
    try:
        await store.append(stepped(2))
    except StoreReadOnlyError as error:
        print("read-only", error)
    await store.aclose()

if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
trio.run(main)
"""
        folder = path.parent
        if which == "file":

            async def fill() -> None:
                async with SqliteStore(path, DOMAIN.serializer) as store:
                    await store.append(stepped(1))

            trio.run(fill)
            path.chmod(0o444)
            folder.chmod(0o777)
        else:
            folder.chmod(0o555)
        # Every folder above must let that user through.
        opened = [each for each in folder.parents if each.stat().st_mode & 0o005 != 0o005]
        modes = {each: each.stat().st_mode for each in opened}
        for each in opened:
            each.chmod(modes[each] | 0o005)
        try:
            driver = folder / "driver.py" if which == "file" else folder.parent / "driver.py"
            driver.write_text(program)
            driver.chmod(0o644)
            environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONDONTWRITEBYTECODE": "1"}
            with PythonProcess(driver, path, which, env=environment) as process:
                code, output, errors = process.finish()
        finally:
            folder.chmod(0o755)
            for each, mode in modes.items():
                each.chmod(mode)
        assert (code, errors) == (0, "")
        lines = output.splitlines()
        if which == "file":
            assert lines.pop(0) == "1"
        assert lines[0].startswith(f"read-only {path}: it cannot be ")

    async def test_an_error_at_the_commit_leaves_the_outcome_open(self, path: Path, hooked: type[Hooked]) -> None:
        def fail(connection: Hooked, sql: str) -> None:
            if sql == "COMMIT" and Hooked.hook is not None:
                Hooked.hook = None
                if stored:
                    connection.execute("COMMIT")
                else:
                    connection.execute("ROLLBACK")
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
                error.sqlite_errorcode = 1034
                raise error

        async with SqliteStore(path, DOMAIN.serializer) as store:
            for version, stored in ((1, True), (2, False)):
                hooked.hook = fail
                with pytest.raises(AppendOutcomeUnknownError, match=f"whether version {version} of chains.chain/a"):
                    await store.append(stepped(version))
                hooked.hook = None
                assert (await store.load_request(chain(), f"request {version}") is not None) is stored
            await store.append(stepped(2))

    async def test_a_commit_that_has_certainly_failed_is_no_open_outcome(
        self, path: Path, hooked: type[Hooked]
    ) -> None:
        def full(connection: Hooked, sql: str) -> None:
            if sql == "COMMIT":
                Hooked.hook = None
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorname = "SQLITE_FULL"
                error.sqlite_errorcode = 13
                raise error

        async with SqliteStore(path, DOMAIN.serializer) as store:
            hooked.hook = full
            with pytest.raises(StoreFullError):
                await store.append(stepped(1))
            assert await store.load(chain()) == []
            await store.append(stepped(1))


APPENDING = """
import sqlite3, sys, trio
path, id, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
from test_sqlite_store import DOMAIN, stepped
from trio_wow.adapters.sqlite import SqliteStore

async def main():
    async with SqliteStore(path, DOMAIN.serializer) as store:
        print("open", flush=True)
        sys.stdin.readline()
        for version in range(1, count + 1):
            await store.append(stepped(version, id))
            print(version, flush=True)

trio.run(main)
"""


class TestLocks:
    """FS-14."""

    async def test_fs14_a_between_looking_and_writing_nobody_else_can_commit(
        self, path: Path, hooked: type[Hooked]
    ) -> None:
        """Another writer tries at each step of an append, and gets its turn before or after, never in between."""
        async with SqliteStore(path, DOMAIN.serializer) as store:
            other = SqliteStore(path, DOMAIN.serializer, busy_timeout=0.01)
            await other.open()
            outcomes = []

            def try_too(connection: Hooked, sql: str) -> None:
                if sql.lstrip().startswith("INSERT INTO wow_streams"):
                    Hooked.hook = None
                    try:
                        trio.from_thread.run(other.append, stepped(1, "a", request="theirs"))
                    except StoreLockedError:
                        outcomes.append("locked")

            hooked.hook = try_too
            await store.append(stepped(1, "a", request="ours"))
            assert outcomes == ["locked"]
            with pytest.raises(VersionConflictError):
                await other.append(stepped(1, "a", request="theirs"))
            await other.aclose()

    @posix
    def test_fs14_a_two_processes_append_fifty_each(self, path: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        driver = path.with_name("driver.py")
        driver.write_text(APPENDING.replace("sys.stdin.readline()", "pass"))
        with (
            PythonProcess(driver, path, "a", "50", env=environment) as first,
            PythonProcess(driver, path, "b", "50", env=environment) as second,
        ):
            assert (first.finish()[0], second.finish()[0]) == (0, 0)
        assert query(path, "SELECT id, count(*), max(version) FROM wow_streams GROUP BY id ORDER BY id") == [
            ("a", 50, 50),
            ("b", 50, 50),
        ]

    async def test_fs14_b_a_lock_that_is_held_too_long_is_a_typed_error_and_the_loop_goes_on(self, path: Path) -> None:
        async with SqliteStore(path, DOMAIN.serializer, busy_timeout=0.3) as store:
            foreign = sqlite3.connect(path, isolation_level=None)
            foreign.execute("BEGIN IMMEDIATE")
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await trio.sleep(0.005)
                    ticks += 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(tick)
                with pytest.raises(StoreLockedError, match=r"for longer than 0.3 s; try again") as caught:
                    await store.append(stepped(1))
                nursery.cancel_scope.cancel()
            # A loop that waits with the thread would not tick at all; how many ticks it gets is the machine's affair.
            assert ticks > 5
            assert caught.value.retryable
            assert await store.load(chain()) == []  # reading needs no lock
            foreign.execute("ROLLBACK")
            foreign.close()
            await store.append(stepped(1))

    async def test_those_who_wait_behind_one_that_gives_up_do_not_begin_anew(
        self, path: Path, hooked: type[Hooked]
    ) -> None:
        waits: list[float] = []

        def note(connection: Hooked, sql: str) -> None:
            if sql == "BEGIN IMMEDIATE":
                Hooked.hook = None
                (milliseconds,) = connection.execute("PRAGMA busy_timeout").fetchone()
                waits.append(milliseconds)
                Hooked.hook = note

        async with SqliteStore(path, DOMAIN.serializer, busy_timeout=0.2) as store:
            foreign = sqlite3.connect(path, isolation_level=None)
            foreign.execute("BEGIN IMMEDIATE")
            hooked.hook = note
            async with trio.open_nursery() as nursery:
                for n in range(20):
                    nursery.start_soon(self.is_locked, store, str(n))
            foreign.execute("ROLLBACK")
            foreign.close()
            assert waits[0] == 200
            assert max(waits[1:]) <= 0
            await store.append(stepped(1))
            await store.append(stepped(2))
            assert waits[-1] == 200

    async def is_locked(self, store: SqliteStore, id: str) -> None:
        with pytest.raises(StoreLockedError):
            await store.append(stepped(1, id))

    async def test_fs14_c_a_caller_that_is_cancelled_between_insert_and_commit_learns_what_came_of_it(
        self, path: Path, hooked: type[Hooked]
    ) -> None:
        reached, go_on = trio.Event(), threading.Event()

        def wait(connection: Hooked, sql: str) -> None:
            if sql == "COMMIT":
                Hooked.hook = None
                trio.from_thread.run_sync(reached.set)
                assert go_on.wait(30)

        async with SqliteStore(path, DOMAIN.serializer) as store:
            hooked.hook = wait
            applied = None
            async with trio.open_nursery() as nursery:

                async def append() -> None:
                    nonlocal applied
                    await store.append(stepped(1))
                    applied = True

                nursery.start_soon(append)
                await reached.wait()
                nursery.cancel_scope.cancel()
                go_on.set()
            assert applied
            assert len(await store.load(chain())) == 1
            with pytest.raises(DuplicateRequestIdError):
                await store.append(stepped(2, request="request 1"))

    @posix
    @pytest.mark.parametrize("after", [1, 7, 40])
    def test_a_process_that_is_killed_leaves_whole_streams(self, path: Path, after: int) -> None:
        driver = path.with_name("driver.py")
        driver.write_text(APPENDING.replace("sys.stdin.readline()", "pass"))
        with PythonProcess(driver, path, "a", "100000", env={**os.environ, "PYTHONPATH": str(TESTS)}) as process:
            process.read_until(f"{after}\n")
            process.send(signal.SIGKILL)
            _, output, _ = process.finish()
        told = max([after, *map(int, output.split())])
        (versions,) = [[version for (version,) in query(path, "SELECT version FROM wow_streams ORDER BY position")]]
        assert versions == list(range(1, len(versions) + 1))
        assert len(versions) >= told

    async def test_many_open_a_new_file_at_once(self, path: Path) -> None:
        stores = [SqliteStore(path, DOMAIN.serializer) for _ in range(8)]
        async with trio.open_nursery() as nursery:
            for n, store in enumerate(stores):
                nursery.start_soon(store.append, stepped(1, str(n)))
        for store in stores:
            await store.aclose()
        assert query(path, "SELECT count(*) FROM wow_streams") == [(8,)]
        assert query(path, "SELECT version FROM wow_schema") == [(1,)]


class TestSnapshotsAndCheckpoints:
    async def test_fs18_b_the_newer_snapshot_is_kept(self, store: SqliteStore) -> None:
        assert await store.load_snapshot(chain()) is None
        newer = Snapshot(chain(), 10, "s10", 1, b'{"id":"a"}')
        await store.save_snapshot(newer)
        await store.save_snapshot(Snapshot(chain(), 9, "s9", 1, b"{}"))
        await store.save_snapshot(Snapshot(chain(), 10, "other", 1, b"{}"))
        assert await store.load_snapshot(chain()) == newer
        await store.discard_snapshot(Snapshot(chain(), 9, "s9", 1, b"{}"))
        assert await store.load_snapshot(chain()) == newer
        await store.discard_snapshot(newer)
        assert await store.load_snapshot(chain()) is None

    async def test_a_checkpoint_never_moves_back(self, store: SqliteStore) -> None:
        assert await store.load_checkpoint("p") == 0
        for position in (3, 2):
            await store.save_checkpoint("p", position)
        assert await store.load_checkpoint("p") == 3
        assert await store.load_checkpoint("q") == 0


def insert(connection: sqlite3.Connection, number: int = 1) -> None:
    connection.execute("INSERT INTO mine VALUES (?)", (number,))


class TestHandleOnce:
    @pytest.fixture
    async def store(self, path: Path) -> AsyncIterator[SqliteStore]:
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE mine (number UNIQUE)")
        connection.close()
        async with SqliteStore(path, DOMAIN.serializer) as store:
            yield store

    async def test_work_is_done_once_for_each_version(self, store: SqliteStore, path: Path) -> None:
        assert await store.load_version("p", chain()) == 0
        assert await store.handle_once("p", chain(), 1, 5, insert)
        assert not await store.handle_once("p", chain(), 1, 6, insert)
        assert await store.handle_once("p", chain(), 3, 6, partial(insert, number=3))
        assert not await store.handle_once("p", chain(), 2, 6, insert)
        assert await store.handle_once("q", chain(), 1, 0, partial(insert, number=7))
        assert query(path, "SELECT number FROM mine ORDER BY 1") == [(1,), (3,), (7,)]
        assert (await store.load_version("p", chain()), await store.load_checkpoint("p")) == (3, 6)
        assert (await store.load_version("q", chain()), await store.load_checkpoint("q")) == (1, 0)

    @pytest.mark.parametrize("error", [LookupError("no"), SystemExit(3), KeyboardInterrupt()])
    async def test_what_it_raises_undoes_it_all(self, store: SqliteStore, path: Path, error: BaseException) -> None:
        def work(connection: sqlite3.Connection) -> None:
            insert(connection)
            raise error

        with pytest.raises(type(error)) as caught:
            await store.handle_once("p", chain(), 1, 5, work)
        assert caught.value is error
        assert query(path, "SELECT * FROM mine") == []
        assert (await store.load_version("p", chain()), await store.load_checkpoint("p")) == (0, 0)
        assert await store.handle_once("p", chain(), 1, 5, insert)

    async def test_fs15_a_violated_index_of_the_program_is_its_own_error(self, store: SqliteStore, path: Path) -> None:
        assert await store.handle_once("p", chain(), 1, 0, insert)
        with pytest.raises(sqlite3.IntegrityError, match=r"UNIQUE constraint failed: mine\.number"):
            await store.handle_once("p", chain(), 2, 0, insert)
        assert await store.load_version("p", chain()) == 1

    @pytest.mark.parametrize(
        "end",
        [
            lambda connection: connection.commit(),
            lambda connection: connection.rollback(),
            lambda connection: connection.execute("COMMIT"),
            lambda connection: connection.execute("ROLLBACK"),
            lambda connection: connection.executescript("DELETE FROM mine"),
            lambda connection: connection.__exit__(None, None, None),
        ],
        ids=["commit", "rollback", "COMMIT", "ROLLBACK", "executescript", "with"],
    )
    async def test_it_cannot_end_the_transaction(
        self, store: SqliteStore, path: Path, end: Callable[[sqlite3.Connection], object]
    ) -> None:
        def work(connection: sqlite3.Connection) -> None:
            insert(connection)
            end(connection)

        with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
            await store.handle_once("p", chain(), 1, 5, work)
        assert query(path, "SELECT * FROM mine") == []
        assert await store.load_version("p", chain()) == 0

    async def test_what_it_changes_of_the_connection_is_put_back(self, store: SqliteStore) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.row_factory = sqlite3.Row
            connection.text_factory = bytes

        assert await store.handle_once("p", chain(), 1, 5, work)
        assert not await store.handle_once("p", chain(), 1, 5, work)
        with pytest.raises(DuplicateRequestIdError):
            for _ in range(2):
                await store.append(stepped(1))


@projection
class Rows:
    """Keeps each step as a row; `between` is called when it has been written."""

    def __init__(self, before: Callable[[int], object], after: Callable[[int], object]) -> None:
        self.before = before
        self.after = after

    @on_event
    def stepped(self, event: DomainEvent[Stepped], connection: sqlite3.Connection) -> None:
        self.before(event.body.number)
        connection.execute("CREATE TABLE IF NOT EXISTS steps (id, number)")
        connection.execute("INSERT INTO steps VALUES (?, ?)", (event.aggregate_id.id, event.body.number))
        self.after(event.body.number)


CRASHING = """
import os, signal, sys, trio
from chain_domain import Step
from test_sqlite_store import DOMAIN, Rows
from trio_wow import App
from trio_wow.adapters.sqlite import SqliteStore

path, where = sys.argv[1:]

def crash(number):
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)

def nothing(number):
    pass

if where == "after the commit":
    handle_once = SqliteStore.handle_once

    async def crashing(self, *arguments):
        done = await handle_once(self, *arguments)
        crash(arguments[2])
        return done

    SqliteStore.handle_once = crashing

async def main():
    rows = Rows(crash if where == "before the row" else nothing, crash if where == "after the row" else nothing)
    async with SqliteStore(path, DOMAIN.serializer) as store:
        app = App(DOMAIN, [rows], store=store)
        async with app.serving(app.runtime(signals=False)) as gateway:
            for number in range(1, 11):
                await gateway.send_and_wait(Step("a", number), request_id=str(number))

trio.run(main)
"""


class TestTransactionalProjection:
    """FS-19 (a)."""

    @posix
    @pytest.mark.parametrize("where", ["before the row", "after the row", "after the commit"])
    def test_fs19_a_each_effect_is_there_once_after_a_crash(self, path: Path, where: str) -> None:
        driver = path.with_name("driver.py")
        driver.write_text(CRASHING)
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        with PythonProcess(driver, path, where, env=environment) as process:
            code, _, errors = process.finish()
        assert (code, errors) == (-signal.SIGKILL, "")
        assert len(query(path, "SELECT * FROM steps")) == (5 if where == "after the commit" else 4)
        (checkpoint,) = query(path, "SELECT coalesce(max(position), 0) FROM wow_checkpoints")[0]
        assert checkpoint <= 5
        with PythonProcess(driver, path, "nowhere", env=environment) as process:
            code, _, errors = process.finish()
        assert (code, errors) == (0, "")
        assert query(path, "SELECT id, number FROM steps ORDER BY rowid") == [("a", number) for number in range(1, 11)]
        assert query(path, "SELECT processor, position FROM wow_checkpoints") == [("projection-dispatcher/Rows", 10)]

    async def test_a_failing_function_writes_nothing_and_is_tried_again(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        failing = {2}
        failed = trio.Event()

        def fail(number: int) -> None:
            if number in failing:
                trio.from_thread.run_sync(failed.set)
                raise LookupError("not now")

        async with SqliteStore(path, DOMAIN.serializer) as store:
            app = App(DOMAIN, [Rows(lambda _: None, fail)], store=store)
            async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
                for number in (1, 2):
                    await gateway.send_and_wait(Step("a", number))
                await failed.wait()
                failing.clear()
                await gateway.send_and_wait(Step("a", 3))
        assert query(path, "SELECT number FROM steps ORDER BY rowid") == [(1,), (2,), (3,)]
        assert "Rows failed on version 2 of chains.chain/a" in caplog.text


class TestLane:
    @pytest.fixture
    def lane(self) -> Lane:
        return Lane()

    async def test_jobs_run_in_order_in_few_hops(self, lane: Lane) -> None:
        gate = threading.Event()
        ran: list[int] = []
        threads: list[int] = []

        def job(n: int) -> int:
            if n == 0:
                assert gate.wait(30)
            ran.append(n)
            threads.append(threading.get_ident())
            return n

        results: list[int] = []

        async def call(n: int) -> None:
            results.append(await lane.run(partial(job, n)))

        async with trio.open_nursery() as nursery:
            for n in range(2 * BATCH):
                nursery.start_soon(call, n)
                await wait_all_tasks_blocked()
            gate.set()
        assert ran == list(range(2 * BATCH))
        assert sorted(results) == ran
        assert threading.get_ident() not in threads

    async def test_a_failing_job_harms_no_other(self, lane: Lane) -> None:
        async def fails(error: BaseException) -> None:
            def job() -> None:
                raise error

            with pytest.raises(type(error)) as caught:
                await lane.run(job)
            assert caught.value is error

        done = []

        async def call(n: int) -> None:
            done.append(await lane.run(lambda: n))

        async with trio.open_nursery() as nursery:
            for n in range(5):
                nursery.start_soon(fails, LookupError(n))
                nursery.start_soon(call, n)
                nursery.start_soon(fails, SystemExit(n))
        assert sorted(done) == list(range(5))

    async def test_who_is_cancelled_while_waiting_has_not_begun(self, lane: Lane) -> None:
        gate = threading.Event()
        ran = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lane.run, partial(gate.wait, 30))
            await wait_all_tasks_blocked()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    inner.start_soon(lane.run, lambda: ran.append("cancelled"))
                    await wait_all_tasks_blocked()
                    scope.cancel()
            assert scope.cancelled_caught
            nursery.start_soon(lane.run, lambda: ran.append("later"))
            await wait_all_tasks_blocked()
            gate.set()
        assert ran == ["later"]

    async def test_a_cancelled_leader_finishes_its_batch_and_passes_on(self, lane: Lane) -> None:
        """Everybody else gets a result, whoever is cancelled, and the lane can be used again."""
        for cancelled in range(4):
            gate = threading.Event()
            results: list[int] = []

            async def call(
                n: int, gate: threading.Event, results: list[int], *, task_status: trio.TaskStatus[trio.CancelScope]
            ) -> None:
                with trio.CancelScope() as scope:
                    task_status.started(scope)
                    results.append(await lane.run(partial(gate.wait, 30) if n == 0 else lambda: n))

            async with trio.open_nursery() as nursery:
                scopes = []
                for n in range(4):
                    scopes.append(await nursery.start(call, n, gate, results))
                    await wait_all_tasks_blocked()
                scopes[cancelled].cancel()
                gate.set()
            if cancelled == 0:
                assert sorted(map(int, results)) == [1, 1, 2, 3]
            else:
                assert len(results) == 3
            assert await lane.run(lambda: "usable") == "usable"

    async def test_a_cancelled_scope_begins_nothing(self, lane: Lane) -> None:
        ran: list[int] = []
        with trio.CancelScope() as scope:
            scope.cancel()
            await lane.run(lambda: ran.append(1))
        assert (scope.cancelled_caught, ran) == (True, [])

    async def test_a_thread_that_cannot_be_started_fails_its_jobs_and_no_more(
        self, lane: Lane, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:

            async def none(*_: object, **__: object) -> None:
                await trio.lowlevel.checkpoint()
                raise RuntimeError("can't start new thread")

            patch.setattr(trio.to_thread, "run_sync", none)
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(self.cannot, lane)
        assert await lane.run(lambda: 1) == 1

    async def cannot(self, lane: Lane) -> None:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await lane.run(lambda: 1)


def test_two_trio_runs_use_one_store(path: Path) -> None:
    store = SqliteStore(path, DOMAIN.serializer)
    trio.run(store.append, stepped(1))
    trio.run(store.append, stepped(2))
    assert [each.version for each in trio.run(store.load, chain())] == [1, 2]
    trio.run(store.aclose)
