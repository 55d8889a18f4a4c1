"""Signals that end an application in a process of its own, and what its store then says of what it has told."""

import os
import signal
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest
import signal_app
from attrs import define, field
from support import PythonProcess

from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.messages import AggregateId

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends signals to a process")

PROGRAM = """
import os
from pathlib import Path
from signal_app import application

app, *_ = application(Path(os.environ["STORE"]), hold=os.environ["HOLD"], traffic=os.environ["TRAFFIC"])
"""
HOSTS = {
    "trio.run(runtime.serve)": ("-c", "import trio, served; trio.run(served.app.runtime().serve)"),
    "trio-wow run": ("-m", "trio_wow.cli", "run", "served:app"),
}
PROCESSORS = {
    "event-dispatcher": "event-dispatcher/Mails",
    "projection-dispatcher": "projection-dispatcher/Rows",
    "saga-dispatcher": "saga-dispatcher/Held",
}
WHOLE = [0, 1, 2]
INT, TERM = signal.SIGINT, signal.SIGTERM

Message = tuple[str, int]


@define
class Told:
    """What the process has written: each message by its chain and version."""

    told: set[Message] = field(factory=set)
    mailed: Counter[Message] = field(factory=Counter)
    acknowledged: dict[str, set[Message]] = field(factory=lambda: defaultdict(set))
    unfinished: dict[str, set[Message]] = field(factory=lambda: defaultdict(set))
    others: Counter[str] = field(factory=Counter)

    @classmethod
    def of(cls, output: str) -> "Told":
        found = cls()
        for line in output.splitlines():
            match line.split():
                case ["told", id, version]:
                    found.told.add((id, int(version)))
                case ["mailed", id, version]:
                    found.mailed[id, int(version)] += 1
                case ["acknowledged", dispatcher, id, version]:
                    found.acknowledged[dispatcher].add((id, int(version)))
                case ["unfinished", dispatcher, id, version]:
                    found.unfinished[dispatcher].add((id, int(version)))
                case [word, *_]:
                    found.others[word] += 1
        return found


@define
class Kept:
    """What the store holds."""

    chains: dict[str, list[int]]
    checkpoints: dict[str, int]
    effects: Counter[Message]
    last_position: int

    @property
    def messages(self) -> set[Message]:
        return {(id, version) for id, numbers in self.chains.items() for version in range(1, len(numbers) + 1)}

    @classmethod
    async def of(cls, path: Path) -> "Kept":
        chains: defaultdict[str, list[int]] = defaultdict(list)
        requests: Counter[tuple[AggregateId, str]] = Counter()
        async with SqliteStore(path, signal_app.DOMAIN.serializer) as store:
            records = await store.read_all(0, 100_000)
            for record in records:
                stream = record.stream
                requests[stream.aggregate_id, stream.request_id] += 1
                numbers = chains[stream.aggregate_id.id]
                assert stream.version == len(numbers) + 1
                numbers.extend(event.number for event in stream.events)
            checkpoints = {each: await store.load_checkpoint(each) for each in PROCESSORS.values()}
        assert set(requests.values()) <= {1}
        with closing(sqlite3.connect(path)) as connection:
            effects = Counter(connection.execute("SELECT chain, version FROM effects").fetchall())
        return cls(dict(chains), checkpoints, effects, records[-1].position)


def once(messages: Iterable[Message]) -> Counter[Message]:
    return Counter(dict.fromkeys(messages, 1))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "served.py").write_text(PROGRAM)
    signal_app.create(tmp_path / "served.db")
    return tmp_path / "served.db"


def served(host: str, store: Path, *, traffic: str, hold: str = "", quiet_period: float = 0.0) -> PythonProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WOW_")}
    environment |= {
        "STORE": str(store),
        "TRAFFIC": traffic,
        "HOLD": hold,
        "PYTHONPATH": str(Path(signal_app.__file__).parent),
        "WOW_SHUTDOWN_QUIET_PERIOD": str(quiet_period),
        "WOW_DISPATCH_MAX_IN_FLIGHT": "16",
    }
    return PythonProcess("-W", "error", *HOSTS[host], env=environment, cwd=store.parent)


def read_lines(process: PythonProcess, **counts: int) -> str:
    """Read until there are so many lines of each kind."""
    output = ""
    for word, count in counts.items():
        while output.count(f"{word} ") < count:
            output += process.read_until(f"{word} ")
    return output


async def restart(store: Path) -> tuple[signal_app.Rows, signal_app.Held]:
    app, rows, _, saga = signal_app.application(store)
    async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)):
        pass
    return rows, saga


def check_whole(kept: Kept) -> None:
    """Every chain that was begun is finished, in order, with each effect once, and every processor knows."""
    assert kept.chains == dict.fromkeys(kept.chains, WHOLE)
    assert kept.effects == once(kept.messages)
    assert kept.checkpoints == dict.fromkeys(PROCESSORS.values(), kept.last_position)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("traffic", ["idle", "load"])
@pytest.mark.parametrize("number", [INT, TERM], ids=lambda number: number.name)
async def test_the_first_signal_finishes_and_acknowledges_whatever_was_begun(
    store: Path, host: str, traffic: str, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(host, store, traffic=traffic) as process:
        output = process.read_until("idle\n") if traffic == "idle" else read_lines(process, told=40)
        process.send(number)
        code, rest, errors = process.finish()
    assert code == 0, errors
    assert "Traceback" not in errors
    told, kept = Told.of(output + rest), await Kept.of(store)
    check_whole(kept)
    # Each client's command was either told or refused, and none that was refused is stored.
    assert told.told == {(id, 1) for id in kept.chains if not id.startswith("held")}
    assert told.others["refused"] == (0 if traffic == "idle" else signal_app.SENDERS)
    assert told.others["abandoned"] == 0
    # Nothing acknowledged is unfinished, and nothing finished is unacknowledged.
    assert not any(told.unfinished.values())
    assert told.acknowledged == dict.fromkeys(("command-dispatcher", *PROCESSORS), kept.messages)
    assert told.mailed == once(kept.messages)
    rows, saga = await restart(store)
    assert (rows.calls, saga.calls, capsys.readouterr().out) == (0, 0, "")
    assert await Kept.of(store) == kept


PLACES = {
    "before the append": ([0], "command-dispatcher"),
    "after the append": ([0, 1], "command-dispatcher"),
    "in the saga": ([0, 1], "saga-dispatcher"),
    "in the event processor": (WHOLE, "event-dispatcher"),
}
"""Where chains are held: what is stored of them then, and who does not finish the second step."""


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("first", "second", "place"),
    [
        (INT, INT, "before the append"),
        (TERM, TERM, "after the append"),
        (INT, TERM, "in the saga"),
        (TERM, INT, "in the event processor"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
async def test_the_second_signal_under_load_forces_the_stop_and_a_restart_completes_the_rest(
    store: Path,
    host: str,
    first: signal.Signals,
    second: signal.Signals,
    place: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with served(host, store, traffic="load", hold=place) as process:
        output = read_lines(process, told=40, held=signal_app.HELD)
        process.send(first)
        output += process.read_until("asked to stop")
        process.send(second)
        code, rest, errors = process.finish()
    assert code == 1
    assert f"the stop was forced by a second signal ({second.name}): " in errors
    told, kept = Told.of(output + rest), await Kept.of(store)
    # Nothing acknowledged is unfinished.
    assert told.told <= kept.messages
    assert told.acknowledged["command-dispatcher"] <= kept.messages
    assert told.acknowledged["projection-dispatcher"] <= kept.effects.keys()
    assert told.acknowledged["event-dispatcher"] <= told.mailed.keys()
    answered = {(id, version) for id, version in told.acknowledged["saga-dispatcher"] if version <= signal_app.ANSWERS}
    assert {(id, version + 1) for id, version in answered} <= told.acknowledged["command-dispatcher"]
    assert kept.effects <= once(kept.messages)
    # What is unfinished is not acknowledged, and comes again.
    numbers, dispatcher = PLACES[place]
    for n in range(signal_app.HELD):
        assert kept.chains[f"held-{n}"] == numbers
        assert (f"held-{n}", 2) in told.unfinished[dispatcher] - told.acknowledged[dispatcher]
    await restart(store)
    again = Told.of(capsys.readouterr().out)
    completed = await Kept.of(store)
    check_whole(completed)
    assert kept.chains.keys() == completed.chains.keys()
    assert (told.mailed | again.mailed).keys() == completed.messages


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("number", [INT, TERM], ids=lambda number: number.name)
async def test_the_second_signal_while_idle_forces_the_stop_and_nothing_is_lost_or_done_twice(
    store: Path, host: str, number: signal.Signals
) -> None:
    with served(host, store, traffic="idle", quiet_period=50) as process:
        output = process.read_until("idle\n")
        process.send(number)
        output += process.read_until("asked to stop")
        process.send(number)
        code, rest, errors = process.finish()
    assert code == 1
    assert f"the stop was forced by a second signal ({number.name})" in errors
    told, kept = Told.of(output + rest), await Kept.of(store)
    assert kept.chains == {"only": WHOLE}
    assert told.told == {("only", 1)}
    assert not any(told.unfinished.values())
    assert told.acknowledged == dict.fromkeys(("command-dispatcher", *PROCESSORS), kept.messages)
    await restart(store)
    completed = await Kept.of(store)
    check_whole(completed)
    assert completed.chains == kept.chains
