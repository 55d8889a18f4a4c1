import gzip
import json
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fleet_support import BOUND, ENVIRONMENT, SCRIPT, driver, posix, run
from support import PythonProcess

import fleet_domain
import replay
from flight_data import COLUMNS
from trio_wow import CommandRejectedError, InMemoryEventStore
from trio_wow.messages import DomainEventStream


@pytest.fixture
def in_process() -> Iterator[None]:
    """Undoes what `main` changes in its process."""
    handler = signal.getsignal(signal.SIGINT)
    logger = logging.getLogger("trio_wow.runtime")
    level = logger.level
    yield
    signal.signal(signal.SIGINT, handler)
    logger.setLevel(level)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Nine flights of N1, 29 hours 15 minutes each, one of N2, and one row for each reason."""
    rows = [
        *(f"1,{day},517,830,UA,1545,N1,EWR,IAH,1170,1400" for day in range(1, 10)),
        "1,1,517,830,AA,1,N2,JFK,MIA,90,1089",
        "1,2,517,830,AA,1,NA,JFK,MIA,90,1089",
        "1,3,NA,NA,AA,1,N2,JFK,MIA,NA,1089",
        "1,4,517,NA,AA,1,N2,JFK,MIA,NA,1089",
    ]
    path = tmp_path / "small.csv.gz"
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in [",".join(COLUMNS), *rows]).encode()))
    return path


def test_a_small_file_is_replayed_and_agrees(small: Path) -> None:
    done = run(small)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in (
        "small.csv.gz: 13 rows, 10 accepted",
        "replaying 10 flights of 2 aircraft",
        "UA 175.5",
        "AA 1.5",
        "EWR 9",
        "JFK 1",
        "no tail number 1",
        "never left 1",
        "no air time 1",
        "N1 175.5",
        "N2 1.5",
        "work orders opened: 3",
        "check: 0 differences between the file and what was recorded",
    ):
        assert line in lines
    assert any(line.startswith("commands: 16 in") for line in lines)
    assert "rejected, line" not in done.stdout
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout


def test_rejected_rows_are_shown(small: Path) -> None:
    done = run(small, "--show-rejected")
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("rejected, line")] == [
        "rejected, line 12: no tail number: 1,2,517,830,AA,1,NA,JFK,MIA,90,1089",
        "rejected, line 13: never left: 1,3,NA,NA,AA,1,N2,JFK,MIA,NA,1089",
        "rejected, line 14: no air time: 1,4,517,NA,AA,1,N2,JFK,MIA,NA,1089",
    ]


@pytest.mark.parametrize("scheduling", ["keyed", "grouped"])
def test_january_is_replayed_and_agrees_under_both_strategies(scheduling: str) -> None:
    done = run("--scheduling", scheduling)
    assert (done.returncode, done.stderr) == (0, "")
    assert "flights-2013-01.csv.gz: 27,004 rows, 26,398 accepted" in done.stdout
    assert "26,398 flights of 3,140 aircraft" in done.stdout
    assert "work orders opened: 362\n" in done.stdout
    assert "commands: 27,122 in" in done.stdout
    assert "check: 0 differences" in done.stdout
    assert re.search(r"no tail number +155\b", done.stdout)
    assert re.search(r"never left +366\b", done.stdout)
    assert re.search(r"no air time +85\b", done.stdout)


def test_both_strategies_show_and_store_the_same(small: Path, tmp_path: Path) -> None:
    shown, stored = [], []
    for scheduling in ("keyed", "grouped"):
        store = tmp_path / f"{scheduling}.db"
        done = run(small, "--store", store, "--scheduling", scheduling)
        assert (done.returncode, done.stderr) == (0, "")
        shown.append([line for line in done.stdout.splitlines() if not re.match(r"commands: | *\d+ %", line)])
        with closing(sqlite3.connect(store)) as database:
            rows = database.execute("SELECT id, data FROM wow_streams ORDER BY id, version").fetchall()
        events = [(id, event["name"], str(event["body"])) for id, data in rows for event in json.loads(data)["events"]]
        # Where an answer of the saga comes between the flights of its aircraft is for nobody to say.
        stored.append(sorted(events, key=lambda event: event[:2]))
    assert shown[0] == shown[1]
    assert stored[0] == stored[1]
    assert "work orders opened: 3" in shown[0]


def test_another_strategy_is_refused(small: Path) -> None:
    done = run(small, "--scheduling", "random")
    assert (done.returncode, done.stdout) == (2, "")
    assert "argument --scheduling: invalid choice: 'random'" in done.stderr


@pytest.mark.parametrize("kind", ["missing", "plain", "cut", "columns", "fields", "number"])
def test_a_file_that_is_not_usable_gives_one_line_and_changes_nothing(small: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "bad.csv.gz"
    text = gzip.decompress(small.read_bytes()).decode()
    if kind == "plain":
        path.write_text(text)
    elif kind == "cut":
        path.write_bytes(small.read_bytes()[:-20])
    elif kind != "missing":
        changed = {
            "columns": text.replace("tailnum", "tail"),
            "fields": f"{text}1,1,517\n",
            "number": text.replace(",90,1089", ",ninety,1089", 1),
        }
        path.write_bytes(gzip.compress(changed[kind].encode()))
    done = run(path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"replay: {path}")
    assert done.stderr.count("\n") == 1
    named = {"columns": "line 1:", "fields": "line 15:", "number": "line 11:"}
    assert named.get(kind, "") in done.stderr


def test_help_names_the_exit_codes() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "--show-rejected" in done.stdout
    assert "130 interrupted" in done.stdout


@posix
def test_ctrl_c_stops_in_order_and_says_what_was_done() -> None:
    with PythonProcess(SCRIPT, env=ENVIRONMENT) as process:
        process.read_until("10 %")
        process.send(signal.SIGINT)
        code, output, errors = process.finish()
    assert (code, errors) == (130, "")
    summary = output.splitlines()[-1]
    found = re.fullmatch(
        r"interrupted: ([\d,]+) of 26,398 flights logged, [\d,]+ work orders opened; "
        r"the store is in memory, so nothing is stored yet: run it again",
        summary,
    )
    assert found, summary
    assert 2_639 <= int(found[1].replace(",", "")) < 26_398
    assert "check:" not in output


STALLED = """
import sys, trio, replay
from trio_wow import InMemoryEventStore

append = InMemoryEventStore.append

async def stalling(self, stream):
    if stream.aggregate_id.id == "N2":
        await trio.sleep_forever()
    await append(self, stream)

InMemoryEventStore.append = stalling
sys.exit(replay.main(sys.argv[1:]))
"""


@posix
def test_a_second_ctrl_c_forces_the_stop(small: Path, tmp_path: Path) -> None:
    with PythonProcess(driver(tmp_path, STALLED), small, env=ENVIRONMENT) as process:
        process.read_until("90 %")
        process.send(signal.SIGINT)
        process.read_until("stopping:")
        process.send(signal.SIGINT)
        code, output, errors = process.finish()
    assert (code, errors) == (130, "")
    assert output == (
        "forced to stop: 9 of 10 flights logged, 3 work orders opened; "
        "the store is in memory, so nothing is stored yet: run it again\n"
    )


@posix
def test_a_reader_that_has_gone_leaves_no_traceback(small: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    process = subprocess.Popen(
        [sys.executable, SCRIPT, small], stdout=theirs, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    os.close(theirs)
    _, errors = process.communicate(timeout=BOUND)
    assert (process.returncode, errors) == (1, "")


def test_ctrl_c_outside_the_runtime_gives_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_process: None
) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(replay, "survey_flights", interrupted)
    assert replay.main([]) == 130
    captured = capsys.readouterr()
    assert captured.err == "replay: interrupted; run it again\n"
    assert captured.out == ""


def test_a_difference_is_printed_and_ends_with_1(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_process: None
) -> None:
    monkeypatch.setattr(fleet_domain.DeparturesByAirport, "flight_logged", lambda self, event: None)
    assert replay.main([str(small)]) == 1
    output = capsys.readouterr().out
    assert "check: 2 differences between the file and what was recorded\n" in output
    assert "departures from EWR: recorded 0, but the file says 9\n" in output


def test_a_refused_flight_is_counted_and_is_a_difference(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_process: None
) -> None:
    append = InMemoryEventStore.append

    async def refusing(self: InMemoryEventStore, stream: DomainEventStream) -> None:
        if stream.aggregate_id.id == "N2":
            raise CommandRejectedError("grounded")
        await append(self, stream)

    monkeypatch.setattr(InMemoryEventStore, "append", refusing)
    assert replay.main([str(small)]) == 1
    output = capsys.readouterr().out
    assert "flights that the aircraft refused: 1\n  line 11: CommandRejectedError: grounded\n" in output
    assert "flight of N2, AA-1-2013-01-01-JFK (AA from JFK, 90 minutes): recorded 0, but the file says 1" in output


def test_without_rich_it_says_what_to_install(tmp_path: Path) -> None:
    text = f"import runpy\nsys.modules['rich'] = None\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    with PythonProcess(driver(tmp_path, text), env=ENVIRONMENT) as process:
        code, output, errors = process.finish()
    assert (code, output) == (1, "")
    assert errors.count("\n") == 1
    assert 'pip install "trio-wow[examples]"' in errors
