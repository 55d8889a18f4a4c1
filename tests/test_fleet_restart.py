"""The durable replay: whatever ends it, the same command again finishes the job."""

import gzip
import json
import os
import random
import re
import signal
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_support import ENVIRONMENT, driver, posix, run
from support import PythonProcess

import fleet_domain
import replay
from flight_data import COLUMNS
from trio_wow.domain import aggregate_model

AIRCRAFT, FLIGHTS, MINUTES = 30, 40, 170
ROWS, ORDERS = AIRCRAFT * FLIGHTS, AIRCRAFT * (FLIGHTS * MINUTES // fleet_domain.CHECK_INTERVAL)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty flights of each of thirty aircraft, in turn."""
    rows = [
        f"{1 + n // 28},{1 + n % 28},517,830,UA,{tail + 1},N{tail},EWR,IAH,{MINUTES},1400"
        for n in range(FLIGHTS)
        for tail in range(AIRCRAFT)
    ]
    path = tmp_path_factory.mktemp("flights") / "some.csv.gz"
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in [",".join(COLUMNS), *rows]).encode()))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "fleet.db"


def run_changed(text: str, store: Path, *arguments: str | Path) -> tuple[int, str, str]:
    """Run the replay as a program changes it, to its end. Returns the exit code, the output, and the errors."""
    with PythonProcess(driver(store.parent, text), *arguments, "--store", store, env=ENVIRONMENT) as process:
        return process.finish()


def tables(output: str) -> str:
    """Return what a complete replay prints of its totals."""
    return output[output.index("Carriers by hours flown") : output.index("work orders opened:")]


def check_complete(store: Path, output: str, clean: str) -> None:
    """Compare with a run without interruption, and look into the file without the help of the example."""
    assert f"work orders opened: {ORDERS}\n" in output
    assert "check: 0 differences" in output
    assert tables(output) == tables(clean)
    flights: defaultdict[str, list[str]] = defaultdict(list)
    orders: Counter[str] = Counter()
    scheduled: Counter[str] = Counter()
    with sqlite3.connect(store) as connection:
        rows = connection.execute("SELECT id, version, request_id, data FROM wow_streams ORDER BY position").fetchall()
    connection.close()
    last: Counter[str] = Counter()
    for id, version, request_id, data in rows:
        last[id] += 1
        assert version == last[id]
        for event in json.loads(data)["events"]:
            if event["name"] == "FlightLogged":
                flights[id].append(request_id)
            elif event["name"] == "WorkOrderOpened":
                orders[id] += 1
            elif event["name"] == "CheckScheduled":
                scheduled[f"{id}-{event['body']['number']}"] += 1
    for tail in range(AIRCRAFT):
        assert flights[f"N{tail}"] == [
            f"UA-{tail + 1}-2013-{1 + n // 28:02}-{1 + n % 28:02}-EWR" for n in range(FLIGHTS)
        ]
    assert len(orders) == ORDERS
    assert orders == scheduled
    assert set(orders.values()) == {1}


@pytest.fixture(scope="module")
def clean(data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run without interruption prints."""
    store = tmp_path_factory.mktemp("clean") / "fleet.db"
    done = run(data, "--store", store)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"commands: {ROWS + 2 * ORDERS:,} in" in done.stdout
    assert "already logged" not in done.stdout
    check_complete(store, done.stdout, done.stdout)
    return done.stdout


def test_the_same_file_again_stores_nothing_and_says_so(data: Path, store: Path, clean: str) -> None:
    assert run(data, "--store", store).returncode == 0
    before = streams(store)
    done = run(data, "--store", store)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"already logged: {ROWS:,} of {ROWS:,} flights; nothing was stored twice\n" in done.stdout
    assert streams(store) == before
    check_complete(store, done.stdout, clean)


def streams(store: Path) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(store)
    try:
        return connection.execute("SELECT * FROM wow_streams ORDER BY position").fetchall()
    finally:
        connection.close()


def test_what_is_stored_is_the_same_as_in_memory(data: Path, clean: str) -> None:
    assert tables(run(data).stdout) == tables(clean)


SIGNALLED = """
import os, sys, trio, replay

number, steps = int(sys.argv.pop(1)), int(sys.argv.pop(1))

class Signalling(trio.abc.Instrument):
    def before_task_step(self, task):
        global steps
        steps -= 1
        if steps == 0:
            os.kill(os.getpid(), number)

run = trio.run
trio.run = lambda *arguments: run(*arguments, instruments=[Signalling()])
sys.exit(replay.main(sys.argv[1:]))
"""
"""Sends itself a signal at a step of the scheduler: a point in the run that no speed of a machine moves much."""


@pytest.mark.parametrize("seed", range(3))
@posix
def test_ctrl_c_in_the_middle(data: Path, store: Path, clean: str, seed: int) -> None:
    steps = random.Random(seed).randrange(3_000, 10_000)
    code, output, errors = run_changed(SIGNALLED, store, str(int(signal.SIGINT)), str(steps), data)
    assert (code, errors) == (130, ""), f"{steps} steps"
    summary = output.splitlines()[-1]
    found = re.fullmatch(
        rf"interrupted: ([\d,]+) of {ROWS:,} flights logged, [\d,]+ work orders opened; "
        r"run the same command again to finish",
        summary,
    )
    assert found, summary
    logged = int(found[1].replace(",", ""))
    assert 0 < logged < ROWS, f"{steps} steps"
    done = run(data, "--store", store)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"already logged: {logged:,} of {ROWS:,} flights" in done.stdout
    check_complete(store, done.stdout, clean)


HELD = """
import os, sys, trio, replay
from trio_wow.adapters.sqlite import SqliteStore

append = SqliteStore.append

async def held(self, stream):
    if stream.aggregate_id.id == "N7":
        await trio.sleep_forever()
    await append(self, stream)

SqliteStore.append = held
sys.exit(replay.main(sys.argv[1:]))
"""

KILLED_BEFORE_APPEND = """
import os, signal, sys, replay
from trio_wow.adapters.sqlite import SqliteStore

append = SqliteStore.append
orders = 0

async def killed(self, stream):
    global orders
    if stream.aggregate_id.context == "maintenance":
        orders += 1
        if orders == 5:  # the saga has sent the command; nothing of it is stored
            os.kill(os.getpid(), signal.SIGKILL)
    await append(self, stream)

SqliteStore.append = killed
sys.exit(replay.main(sys.argv[1:]))
"""


@posix
def test_a_second_ctrl_c_forces_and_nothing_is_lost(data: Path, store: Path, clean: str) -> None:
    with PythonProcess(driver(store.parent, HELD), data, "--store", store, env=ENVIRONMENT) as process:
        process.read_until(" %")  # it cannot end: one aircraft is held
        process.send(signal.SIGINT)
        process.read_until("stopping:")
        process.send(signal.SIGINT)
        code, output, errors = process.finish()
    # On a slow machine the second one also finds flights of other aircraft between their append and their publication.
    torn = r"version \d+ of \S+ is stored but not published, and its command not acknowledged: the runtime is ending"
    assert (code, [line for line in errors.splitlines() if not re.fullmatch(torn, line)]) == (130, [])
    assert output.startswith("forced to stop: ")
    assert output.endswith("; run the same command again to finish\n")
    done = run(data, "--store", store)
    assert (done.returncode, done.stderr) == (0, "")
    check_complete(store, done.stdout, clean)


@posix
def test_killed_between_a_sagas_send_and_the_append_of_its_command(data: Path, store: Path, clean: str) -> None:
    code, _, errors = run_changed(KILLED_BEFORE_APPEND, store, data)
    assert (code, errors) == (-signal.SIGKILL, "")
    events = [json.loads(str(data, "utf-8"))["events"] for *_, data in streams(store) if isinstance(data, bytes)]
    due = sum(event["name"] == "CheckDue" for each in events for event in each)
    opened = sum(event["name"] == "WorkOrderOpened" for each in events for event in each)
    assert opened < 5
    assert due > opened
    done = run(data, "--store", store)
    assert (done.returncode, done.stderr) == (0, "")
    check_complete(store, done.stdout, clean)


@posix
def test_sigkill_at_random_points(data: Path, store: Path, clean: str) -> None:
    """Twenty-five times in one store, from the opening of the store on."""
    seed = int(os.environ.get("FLEET_SEED", "0"))
    rng = random.Random(seed)
    sizes = []
    for _ in range(25):
        steps = rng.choice((rng.randrange(1, 300), rng.randrange(300, 4_000)))
        code, _, errors = run_changed(SIGNALLED, store, str(int(signal.SIGKILL)), str(steps), data)
        assert (code, errors) == (-signal.SIGKILL, ""), f"seed {seed}, {steps} steps"
        sizes.append(len(streams(store)) if has_streams(store) else 0)
    assert sizes == sorted(sizes), f"seed {seed}"
    assert sizes[-1] > 0, f"seed {seed}"
    done = run(data, "--store", store)
    assert (done.returncode, done.stderr) == (0, ""), f"seed {seed}"
    check_complete(store, done.stdout, clean)


def has_streams(store: Path) -> bool:
    connection = sqlite3.connect(store)
    try:
        return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'wow_streams'").fetchall())
    finally:
        connection.close()


def histories(store: Path) -> dict[str, tuple[list[object], list[int]]]:
    """Return each aggregate's events in order, and apart from them the checks scheduled: when they come is chance."""
    found: defaultdict[str, tuple[list[object], list[int]]] = defaultdict(lambda: ([], []))
    for *_, data in streams(store):
        assert isinstance(data, bytes)
        stream = json.loads(data)
        events, checks = found[f"{stream['context']}/{stream['aggregate_id']}"]
        for event in stream["events"]:
            if event["name"] == "CheckScheduled":
                checks.append(event["body"]["number"])
            else:
                events.append(event)
    return {id: (events, sorted(checks)) for id, (events, checks) in found.items()}


@pytest.fixture
def no_snapshots() -> Iterator[None]:
    model = aggregate_model(fleet_domain.Aircraft)
    every, model.snapshot_every = model.snapshot_every, None
    yield
    model.snapshot_every = every


def test_a_run_with_snapshots_equals_one_without(
    data: Path, store: Path, clean: str, no_snapshots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([str(data), "--store", str(store)]) == 0
    with_them = store.with_name("with.db")
    assert run(data, "--store", with_them).returncode == 0
    check_complete(store, capsys.readouterr().out, clean)

    def snapshots(path: Path) -> int:
        connection = sqlite3.connect(path)
        try:
            (count,) = connection.execute("SELECT count(*) FROM wow_snapshots").fetchone()
            return int(count)
        finally:
            connection.close()

    assert (snapshots(store), snapshots(with_them)) == (0, AIRCRAFT)
    assert histories(store) == histories(with_them)


class TestStores:
    """Files that cannot be the store."""

    def complain(self, data: Path, store: Path) -> str:
        done = run(data, "--store", store)
        assert done.returncode == 2
        assert done.stderr.startswith(f"replay: {store}: ")
        assert done.stderr.count("\n") == 1
        return done.stderr

    def test_a_text_file(self, data: Path, store: Path) -> None:
        store.write_text("this is no database, though it is long enough to be one\n" * 100)
        assert "it is no SQLite database" in self.complain(data, store)
        assert store.read_text().startswith("this is no database")

    def test_a_folder(self, data: Path, store: Path) -> None:
        store.mkdir()
        assert "it is a folder, not a file" in self.complain(data, store)

    def test_a_file_in_no_folder(self, data: Path, store: Path) -> None:
        assert "make it first" in self.complain(data, store / "none" / "fleet.db")

    def test_a_newer_store(self, data: Path, store: Path) -> None:
        connection = sqlite3.connect(store)
        connection.executescript("CREATE TABLE wow_schema (version INTEGER); INSERT INTO wow_schema VALUES (99)")
        connection.close()
        assert "its schema has version 99" in self.complain(data, store)

    @posix
    def test_a_store_that_is_locked_in_the_middle_is_finished_later(self, data: Path, store: Path, clean: str) -> None:
        locking = """
import functools, sqlite3, sys, replay, trio
from trio_wow.adapters import sqlite

append, appended, locks = sqlite.SqliteStore.append, 0, []

class Impatient(sqlite.SqliteStore):
    def __init__(self, path, serializer):
        super().__init__(path, serializer, busy_timeout=0.2)

    async def append(self, stream):
        global appended
        appended += 1
        if appended == 500:  # from here on somebody else holds the lock
            connect = functools.partial(
                sqlite3.connect, self.path, isolation_level=None, timeout=60, check_same_thread=False
            )
            locks.append(await trio.to_thread.run_sync(connect))
            locks[0].execute("BEGIN IMMEDIATE")
        await append(self, stream)

replay.SqliteStore = Impatient
code = replay.main(sys.argv[1:])
locks[0].close()
sys.exit(code)
"""
        code, _, errors = run_changed(locking, store, data)
        assert code == 2
        assert errors.startswith(f"replay: {store}: somebody else has held its lock for longer than 0.2 s; try again; ")
        self.is_finished_later(data, store, clean, errors)

    def test_a_disk_that_is_full_in_the_middle_is_finished_later(self, data: Path, store: Path, clean: str) -> None:
        """A limit of SQLite's own stands for the disk."""
        limited = """
import sqlite3, sys, replay

connect = sqlite3.connect

def limited(database, *arguments, **options):
    connection = connect(database, *arguments, **options)
    if database:
        connection.execute("PRAGMA max_page_count = 100")
    return connection

sqlite3.connect = limited
sys.exit(replay.main(sys.argv[1:]))
"""
        code, output, errors = run_changed(limited, store, data)
        assert code == 2
        assert errors.startswith(f"replay: {store}: there is no room left on its disk; ")
        assert "refused" not in output
        self.is_finished_later(data, store, clean, errors)

    def test_a_sagas_command_that_the_store_fails_is_sent_again_later(
        self, data: Path, store: Path, clean: str
    ) -> None:
        """Every flight has its result; what is left undone is the saga's, which the feed does not see."""
        failing = """
import sys, replay
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.errors import StoreLockedError

append = SqliteStore.append

async def failing(self, stream):
    if stream.aggregate_id.id == "N7-2":
        raise StoreLockedError(str(self.path), "locked")
    await append(self, stream)

SqliteStore.append = failing
sys.exit(replay.main(sys.argv[1:]))
"""
        code, _, errors = run_changed(failing, store, data)
        assert code == 2
        assert f"{ROWS:,} of {ROWS:,} flights logged, {ORDERS - 1} work orders opened; " in errors
        self.is_finished_later(data, store, clean, errors)

    def test_a_flight_that_the_store_failed_once_is_not_overtaken(self, data: Path, store: Path, clean: str) -> None:
        failing_once = """
import sys, replay
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.errors import StoreLockedError

append = SqliteStore.append
failed = False

async def failing_once(self, stream):
    global failed
    is_flight = type(stream.events[0]).__name__ == "FlightLogged"
    if stream.aggregate_id.id == "N7" and stream.version >= 21 and is_flight and not failed:
        failed = True
        raise StoreLockedError(str(self.path), "locked")
    await append(self, stream)

SqliteStore.append = failing_once
sys.exit(replay.main(sys.argv[1:]))
"""
        code, _, errors = run_changed(failing_once, store, data)
        assert code == 2
        self.is_finished_later(data, store, clean, errors)

    def is_finished_later(self, data: Path, store: Path, clean: str, errors: str) -> None:
        assert errors.endswith("; run the same command again to finish\n")
        assert errors.count("\n") == 1
        done = run(data, "--store", store)
        assert (done.returncode, done.stderr) == (0, "")
        check_complete(store, done.stdout, clean)

    def test_a_damaged_store(self, data: Path, store: Path) -> None:
        assert run(data, "--store", store).returncode == 0
        with store.open("r+b") as file:
            file.seek(store.stat().st_size // 3)
            file.write(b"\xa5" * (store.stat().st_size // 3))
        assert "or a damaged one" in self.complain(data, store)

    def test_a_stream_that_cannot_be_read(self, data: Path, store: Path) -> None:
        assert run(data, "--store", store).returncode == 0
        connection = sqlite3.connect(store, isolation_level=None)
        connection.execute(
            "UPDATE wow_streams SET data = CAST(replace(CAST(data AS TEXT), 'FlightLogged', 'FlightNoted') AS BLOB) "
            "WHERE position = (SELECT min(position) FROM wow_streams "
            "WHERE position >= 500 AND CAST(data AS TEXT) LIKE '%FlightLogged%')"  # others are of work orders
        )
        connection.close()
        done = run(data, "--store", store)
        assert done.returncode == 2
        assert done.stderr.startswith("replay: message type 'FlightNoted' (version ")
        assert done.stderr.count("\n") == 1

    def test_flights_of_another_file_are_a_difference(self, data: Path, store: Path) -> None:
        assert run(data, "--store", store).returncode == 0
        rows = gzip.decompress(data.read_bytes()).decode().splitlines(keepends=True)
        half = store.with_name("half.csv.gz")
        half.write_bytes(gzip.compress("".join(rows[: 1 + ROWS // 2]).encode()))
        done = run(half, "--store", store)
        assert (done.returncode, done.stderr) == (1, "")
        assert f"already logged: {ROWS // 2:,} of {ROWS // 2:,} flights; nothing was stored twice\n" in done.stdout
        assert f"the store holds {ROWS // 2:,} flights that are not in this file\n" in done.stdout
        assert "commands:" not in done.stdout
