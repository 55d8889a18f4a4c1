"""The benchmarks run, check what they measure, and say what is missing. How fast anything is is not tested."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import pytest

from contenders import CONTENDERS, Contender, Item, Load
from keyed_dispatch import WrongResultError, verify

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROGRAM = BENCHMARKS / "keyed_dispatch.py"
ADAPTIVE = BENCHMARKS / "adaptive.py"
TINY = ("--items", "40", "--rounds", "1")


def keyed_dispatch(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) if path is None else {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=100, env=environment
    )


def test_a_run_shows_every_contender_and_writes_what_it_measured(tmp_path: Path) -> None:
    done = keyed_dispatch(*TINY, "--json", str(tmp_path / "report.json"))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["machine"].keys() >= {"cores", "python", "trio", "platform"}
    assert (report["items"], report["rounds"]) == (40, 1)
    assert {(cost["handler"], cost["keys"], cost["contender"]) for cost in report["costs"]} == {
        (handler, keys, contender.name)
        for handler in ("noop", "yield", "plain")
        for keys in (1, 40)
        for contender in CONTENDERS
        if contender.installed
    }
    assert all(len(cost["samples"]) == 1 and cost["ratio"] > 0 for cost in report["costs"])
    assert [cost["keys"] for cost in report["memory"]["costs"]] == [2, 20, 200]
    assert report["memory"]["peak"]["keys"] == 200
    assert [late["load"] for late in report["ticker"]] == ["none", "async", "plain"]
    for contender in CONTENDERS:
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"  {contender.name} ")]
        assert len(lines) == 6
        assert contender.installed is not any("missing" in line for line in lines)


def test_a_package_that_is_not_there_is_reported_and_the_others_run(tmp_path: Path) -> None:
    for package in ("pykka", "nigrains"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('blocked by a test')")
    done = keyed_dispatch("--cost", *TINY, "--handler", "noop", "--json", str(tmp_path / "r.json"), path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "missing: pykka, nigrains" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["missing"] == ["pykka", "nigrains"]
    measured = {cost["contender"] for cost in report["costs"]}
    assert measured == {contender.name for contender in CONTENDERS} - {"pykka", "nigrains"}
    assert report.keys().isdisjoint({"memory", "ticker"})


def test_a_contender_alone_has_no_ratio(tmp_path: Path) -> None:
    done = keyed_dispatch(
        "--cost", *TINY, "--contender", "trio-deque", "--keys", "3", "--json", str(tmp_path / "report.json")
    )
    assert done.returncode == 0, done.stderr
    costs = json.loads((tmp_path / "report.json").read_text())["costs"]
    assert [(cost["keys"], cost["ratio"]) for cost in costs] == [(3, None)] * 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--items", "0"), "argument --items: must be at least 1, not 0"),
        (("--rounds", "many"), "argument --rounds: invalid"),
        (("--contender", "nobody"), "argument --contender: invalid choice: 'nobody'"),
        (("--handler", "slow"), "argument --handler: invalid choice: 'slow'"),
        (("--items", "10", "--keys", "11"), "--keys 11 is more than the 10 items"),
        (("--json", "/nowhere/report.json"), "--json /nowhere/report.json is in no folder that exists"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = keyed_dispatch(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_the_benchmark_of_adaptive_execution_shows_every_way_and_writes_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(ADAPTIVE), "--quick", "--items", "40", "--json", str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(each["load"], each["way"], len(each["runs"])) for each in report["loads"]] == [
        (load, way, 1) for load in ("two", "mixed") for way in ("adaptive", "inline", "threads", "oracle")
    ]
    assert all(each["total"] > 0 for each in report["loads"])
    assert report["known"]["median"] > 0
    # A thing kept for each decision would be a hundred thousand.
    assert report["allocation"]["deciding"] < 10_000
    assert report["allocation"]["deciding and taking note, peak"] < 10_000


def test_the_benchmark_of_adaptive_execution_refuses_wrong_arguments() -> None:
    for arguments, said in (
        (("--items", "0"), "argument --items: must be at least 1, not 0"),
        (("--json", "/nowhere/report.json"), "--json /nowhere/report.json is in no folder that exists"),
    ):
        done = subprocess.run([sys.executable, str(ADAPTIVE), *arguments], capture_output=True, text=True, timeout=100)
        assert done.returncode == 2
        assert said in done.stderr


def test_a_hop_through_a_saga_is_measured_on_both_routes(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "local_first.py"),
        "--commands",
        "20",
        "--hops",
        "3",
        "--json",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert [(run["route"], run["steps"]) for run in json.loads(path.read_text())] == [
        ("memory", 80),
        ("local-first", 80),
    ]
    done = subprocess.run([*command[:2], "--hops", "0"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "argument --hops: must be at least 1, not 0" in done.stderr


def scheduling(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "scheduling.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_the_scheduling_strategies_are_shown_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = scheduling("--quick", "--items", "200", "--ids", "64", "--rounds", "1", "--json", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(path.read_text())
    assert [(cost["handler"], cost["keys"], cost["contender"]) for cost in report["costs"]] == [
        (handler, keys, strategy)
        for handler in ("noop", "yield")
        for keys in (1, 100, 200)
        for strategy in ("keyed", "grouped")
    ]
    keyed, _, few = report["retries"]
    assert (keyed["strategy"], keyed["groups"], keyed["ids"], keyed["sharing"]) == ("keyed", None, 64, 0)
    assert (few["strategy"], few["groups"], few["ids"]) == ("grouped", 16, 64)
    assert few["sharing"] > 0
    assert done.stdout.count("µs/item") == len(report["costs"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--items", "0"), "argument --items: must be at least 1, not 0"),
        (("--json", "/nowhere/report.json"), "--json /nowhere/report.json is in no folder that exists"),
    ],
)
def test_a_wrong_argument_of_the_scheduling_benchmark_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = scheduling(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


ITEMS = [(number % 2, number) for number in range(6)]


def loses_one(load: Load) -> None:
    for item in load.items[:-1]:
        load.handler(item)


def repeats_one(load: Load) -> None:
    for item in [*load.items[:-1], load.items[0]]:
        load.handler(item)


def turns_one_key_round(load: Load) -> None:
    for item in [*load.items[::2], *reversed(load.items[1::2])]:
        load.handler(item)


def runs_all_at_once(load: Load) -> None:
    coroutines = [load.handler(item) for item in load.items]
    for coroutine in coroutines:
        coroutine.send(None)
    for coroutine in coroutines:
        with pytest.raises(StopIteration):
            coroutine.send(None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (loses_one, "handled 5 of 6 items"),
        (repeats_one, "or not each once"),
        (turns_one_key_round, "out of order"),
    ],
)
def test_a_contender_that_does_not_keep_its_promise_is_found(wrong: Callable[[Load], None], said: str) -> None:
    with pytest.raises(WrongResultError, match=said):
        verify(Contender("wrong", wrong, "none"), Load(ITEMS, itemgetter(0), lambda item: None, awaits=False))


def test_a_contender_that_overlaps_the_items_of_a_key_is_found() -> None:
    async def waits(item: Item) -> None:
        await asyncio.sleep(0)

    with pytest.raises(WrongResultError, match="beside another item of its key"):
        verify(Contender("wrong", runs_all_at_once, "none"), Load(ITEMS, itemgetter(0), waits, awaits=True))


# The packages stay out of this process: protean warns of whoever looks at its objects.
PACKAGES = ("eventsourcing", "eventsourcing-fastest", "protean", "event-sourcery")
CONCURRENT = ("trio-wow", "floor-json", "floor")
FEW = ("--commands", "6", "--rounds", "1", "--accounts", "1", "3", "--senders", "1", "2")


def command_path(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) if path is None else {**os.environ, "PYTHONPATH": str(path)}
    program = [sys.executable, str(BENCHMARKS / "command_path.py"), *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=100, env=environment)


def test_the_command_path_shows_every_contender_and_writes_what_it_measured(tmp_path: Path) -> None:
    done = command_path(*FEW, "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["commands"], report["machine"].keys() >= {"cores", "python", "trio"}) == (6, True)
    assert [(rate["accounts"], rate["contender"], rate["load"]["senders"]) for rate in report["rates"]] == [
        (accounts, name, senders)
        for accounts in (1, 3)
        for name in (*CONCURRENT, *PACKAGES)
        if name not in report["missing"]
        for senders in ((1, 2) if name in CONCURRENT else (1,))
    ]
    for name in (*CONCURRENT, *PACKAGES):
        assert f"  {name} " in done.stdout


def test_the_command_path_reports_packages_that_are_not_there(tmp_path: Path) -> None:
    for package in ("eventsourcing", "protean", "event_sourcery"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('blocked by a test')")
    done = command_path(*FEW, "--json", str(tmp_path / "report.json"), path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["missing"] == [*PACKAGES]
    assert {rate["contender"] for rate in report["rates"]} == {*CONCURRENT}
    assert all(rate["of_floor"] > 0 and rate["of_defaults"] is None for rate in report["rates"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--commands", "0"), "argument --commands: must be at least 1, not 0"),
        (("--contender", "nobody"), "argument --contender: invalid choice: 'nobody'"),
        (("--json", "/nowhere/report.json"), "--json /nowhere/report.json is in no folder that exists"),
    ],
)
def test_a_wrong_argument_of_the_command_path_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = command_path(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("balances", "refused", "said"),
    [
        ([999_997, 999_997], True, ""),
        ([999_997, 999_998], True, "wrong has other balances than the commands lead to"),
        ([999_997, 999_997], False, "wrong has overdrawn an account"),
    ],
)
def test_a_contender_that_loses_a_command_or_overdraws_is_found(balances: list[int], refused: bool, said: str) -> None:
    code = f"""
import command_path
from command_contenders import CommandContender, Outcome

def wrong(load):
    "Wrong."
    return Outcome(1.0, {balances}, refused={refused})

command_path.COMMAND_CONTENDERS = [CommandContender("wrong", wrong, concurrent=False)]
raise SystemExit(command_path.main(["--commands", "6", "--accounts", "2"]))
"""
    program = [sys.executable, "-c", code]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, cwd=BENCHMARKS)
    assert (done.returncode, done.stderr.strip()) == (1 if said else 0, said)
