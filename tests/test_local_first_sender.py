"""The local-first sender: whatever is cut, killed or started again, both sides hold the same events, each once."""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from fleet_support import ENVIRONMENT, posix
from sender_support import SENDER, SERVER, Link, Sender, Server, changed_sender, compare, events_in, linked
from websocket_support import until

import stock_cli
import stock_compare
import stock_link
import stock_sender
import stock_server
from stock_domain import Count, Pick, Receive, Shelf, stock_domain
from stock_outbox import Entry, Outbox, State, only_sender
from trio_wow import App, CommandGateway, CommandResult, Domain, Stage
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.errors import (
    AdmissionClosedError,
    CommandFailedError,
    ConnectionLostError,
    ConnectionRefusedByServerError,
    InvalidCommandError,
    RemoteError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    WaitTimeoutError,
)
from trio_wow.messages import CommandError


@pytest.fixture
def device(tmp_path: Path) -> Path:
    return tmp_path / "device.db"


@pytest.fixture
def server(tmp_path: Path) -> Path:
    return tmp_path / "server.db"


def check_same(device: Path, server: Path, events: Sequence[tuple[str, int, str]]) -> None:
    """Both sides hold these: shelf, version, event."""
    here, there = events_in(device), events_in(server)
    assert here == there
    assert [(id, version, happened["name"]) for id, version, _, (happened,) in here] == list(events)
    requests = Counter(request_id for _, _, request_id, _ in here)
    assert set(requests.values()) == {1}
    done = compare(device, server)
    assert (done.returncode, done.stderr) == (0, "")


@posix
def test_everything_that_can_be_cut_is_cut(device: Path, server: Path) -> None:
    with linked() as link:
        # No server yet.
        with Sender(device, link.url) as sender:
            sender.read_until("ready")
            sender.write("receive tea 10")
            assert "#1 receive tea 10: 10 left" in sender.read_until("left")
            sender.write("pick coffee 1")
            assert "#2 pick coffee 1: not done: there are 0 (shelf.short)" in sender.read_until("not done")
            sender.write("receive coffee 5")
            sender.write("pick tea 3")
            sender.read_until("#4 pick tea 3: 7 left")
            sender.send(signal.SIGKILL)
        # The server has two of the three, one of each shelf, when the device dies; it does not know that.
        link.holds_answers = True
        with Server(server) as serving:
            with Sender(device, link.url) as sender:
                assert "3 to send, 0 delivered, 1 not done, 0 refused" in sender.read_until("to send")
                link.open(serving.port)
                sender.read_until("connected")
                shown = serving.read_until("left") + serving.read_until("left")
                assert sorted(shown.splitlines()) == ["coffee: received 5, 5 left", "tea: received 10, 10 left"]
                sender.send(signal.SIGKILL)
            link.cut()
            link.holds_answers = False
            with Sender(device, link.url) as sender:
                assert "3 to send" in sender.read_until("to send")
                sender.read_until("offline")
                link.open(serving.port)
                sender.read_until("connected")
                assert sorted(sender.read_until("#4 pick tea 3: delivered").splitlines()) == [
                    "#1 receive tea 10: delivered",
                    "#3 receive coffee 5: delivered",
                    "#4 pick tea 3: delivered",
                ]
                # The link is lost between the command and its answer.
                link.cut()
                link.holds_answers = True
                link.open(serving.port)
                sender.write("pick tea 2")
                serving.read_until("tea: picked 2, 5 left")
                link.cut()
                sender.read_until("offline: the connection was lost")
                sender.read_until("offline")
                link.holds_answers = False
                link.open(serving.port)
                sender.read_until("#5 pick tea 2: delivered")
                # The server dies between the command and its answer.
                link.cut()
                link.holds_answers = True
                link.open(serving.port)
                sender.write("count coffee 4")
                serving.read_until("coffee: counted 4, 4 left")
                link.refuse()
                serving.send(signal.SIGKILL)
                serving.finish()
                link.cut()
                link.holds_answers = False
                sender.write("pick coffee 1")
                sender.read_until("#7 pick coffee 1: 3 left")
                with Server(server) as restarted:
                    link.open(restarted.port)
                    sender.read_until("#6 count coffee 4: delivered")
                    sender.end_input()
                    code, output, errors = sender.finish()
                    assert (code, errors) == (0, "")
                    assert output.endswith("#7 pick coffee 1: delivered\nended: 0 left to send\n")
                    restarted.send(signal.SIGINT)
                    code, _, errors = restarted.finish()
                    assert (code, errors) == (0, "")
    check_same(
        device,
        server,
        [
            ("coffee", 1, "Received"),
            ("coffee", 2, "Counted"),
            ("coffee", 3, "Picked"),
            ("tea", 1, "Received"),
            ("tea", 2, "Picked"),
            ("tea", 3, "Picked"),
        ],
    )


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@posix
@pytest.mark.parametrize(
    ("step", "change"),
    [
        (
            "after it is kept",
            f"""
append = stock_sender.Outbox.append
async def killed(self, message):
    await append(self, message)
    {KILLED}
stock_sender.Outbox.append = killed
""",
        ),
        (
            "after it is decided here",
            f"""
async def killed(self, entry, state, *more):
    {KILLED}
stock_sender.Outbox.mark = killed
""",
        ),
        (
            "after that is marked",
            f"""
mark = stock_sender.Outbox.mark
async def killed(self, entry, state, *more):
    await mark(self, entry, state, *more)
    {KILLED}
stock_sender.Outbox.mark = killed
""",
        ),
        (
            "after the server has answered",
            f"""
mark = stock_sender.Outbox.mark
async def killed(self, entry, state, *more):
    if state is stock_sender.State.DELIVERED:
        {KILLED}
    await mark(self, entry, state, *more)
stock_sender.Outbox.mark = killed
""",
        ),
    ],
)
def test_killed_between_two_steps(step: str, change: str, device: Path, server: Path) -> None:
    with Server(server) as serving:
        url = f"ws://127.0.0.1:{serving.port}/"
        with Sender(device, url, script=changed_sender(device.parent, change)) as sender:
            sender.read_until("ready")
            sender.write("receive tea 10")
            code, _, errors = sender.finish()
            assert (code, errors) == (-signal.SIGKILL, "")
        with Sender(device, url) as sender:
            sender.write("pick tea 1")
            sender.end_input()
            code, output, errors = sender.finish()
        assert (code, errors) == (0, "")
        assert "#1 receive tea 10: delivered\n" in output
        assert output.endswith("#2 pick tea 1: delivered\nended: 0 left to send\n")
    check_same(device, server, [("tea", 1, "Received"), ("tea", 2, "Picked")])


class TestProgram:
    @posix
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_it_in_order_and_nothing_is_lost(self, device: Path, number: signal.Signals) -> None:
        with Sender(device, Link().url) as sender:
            sender.read_until("ready")
            sender.write("receive tea 10")
            sender.read_until("10 left")
            sender.send(number)
            code, output, errors = sender.finish()
        assert (code, errors) == (0, "")
        assert output.endswith("ended: 1 left to send\n")

    @posix
    def test_a_server_that_is_not_there_is_told_once(self, device: Path) -> None:
        """Each line has its result, however often it tries to connect in between."""
        with Sender(device, Link().url) as sender:
            sender.read_until("offline: ws://127.0.0.1:")
            for number in range(10):
                sender.write("receive tea 1")
                assert "offline" not in sender.read_until(f"{number + 1} left")
            sender.end_input()
            sender.read_until("the input has ended; 10 to send, then this ends too")
            sender.send(signal.SIGINT)
            assert sender.finish()[0] == 0

    def test_a_wrong_line_is_told_and_not_kept(self, device: Path) -> None:
        wrong = "|tea|steal tea 1|pick tea|pick tea x|pick tea -1|pick tea 1.5|pick tea 0|receive tea 0|pick tea 1 2"
        lines = [
            *wrong.split("|"),
            f"receive {'x' * 65} 1",
            f"receive tea {10**30}",
            "receive t\0 1",
            "receive t\udcff 1",
        ]
        done = subprocess.run(
            [sys.executable, SENDER, "--db", device, "--url", Link().url],
            input="\n".join([*lines, "status"]).encode(errors="surrogateescape"),
            capture_output=True,
            env=ENVIRONMENT,
            timeout=60,
        )
        output = done.stdout.decode()
        assert output.count("not kept: ") == len(lines)
        assert f"not kept: {stock_sender.USAGE}\n" in output
        assert "not kept: 'quantity' must be > 0: 0\n" in output
        assert "0 to send, 0 delivered, 0 not done, 0 refused by the server\nended: 0 left to send\n" in output
        assert done.stderr == b""

    @pytest.mark.parametrize(
        ("program", "arguments", "error"),
        [
            (
                stock_sender,
                ["--url", "http://x/"],
                "argument --url: must be like wss://host:port/path, not 'http://x/'",
            ),
            (stock_sender, ["--url", "ws://x:99999/"], "argument --url: must be like"),
            (stock_sender, ["--url", "ws://x:y/"], "argument --url: must be like"),
            (stock_sender, ["--url", "ws:///"], "argument --url: must be like"),
            (stock_sender, ["--backoff-max", "0"], "argument --backoff-max: must be a positive number of seconds"),
            (stock_sender, ["--backoff-max", "nan"], "argument --backoff-max: must be"),
            (stock_sender, ["--db", "."], "it is a folder, not a file"),
            (stock_sender, ["--db", "missing/device.db"], "cannot be taken (unable to open database file)"),
            (stock_server, ["--db", "."], "it is a folder, not a file"),
            (stock_server, ["--port", "65536"], "argument --port: must be 0 to 65535, not 65536"),
            (stock_compare, ["missing", "missing"], "missing is no file"),
        ],
    )
    def test_what_cannot_be_used_is_told_in_one_line(
        self,
        program: ModuleType,
        arguments: list[str],
        error: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            sys.exit(program.main(arguments))
        assert ended.value.code == 2
        assert error in capsys.readouterr().err.splitlines()[-1]

    def test_what_a_server_says_does_nothing_to_the_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        stock_cli.say("  offline: 502 \x1b[31mBad\r")
        assert capsys.readouterr().out == "  offline: 502  [31mBad \n"

    def test_a_second_sender_is_kept_off(self, device: Path) -> None:
        with only_sender(device):
            with Sender(device, Link().url) as sender:
                code, output, errors = sender.finish()
        assert (code, output) == (2, "")
        assert errors == f"stock_sender: {device}: another sender uses it; end that one first\n"
        with only_sender(device):
            pass

    def test_a_port_that_is_taken(self, server: Path) -> None:
        with Server(server) as serving:
            done = subprocess.run(
                [sys.executable, SERVER, "--db", server.with_name("other.db"), "--port", str(serving.port)],
                capture_output=True,
                text=True,
                env=ENVIRONMENT,
                timeout=60,
            )
        assert done.returncode == 2
        assert "Address already in use" in done.stderr
        assert done.stderr.count("\n") == 1


class Remote:
    """A server that answers as a test wants."""

    def __init__(self) -> None:
        self.answers: list[CommandError | Exception] = []
        self.sent: list[Any] = []
        self.hands_on: CommandGateway | None = None
        self.gate = trio.Event()
        self.gate.set()
        self.in_hand = 0
        self.connections = 0

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[stock_link.Gateway]:
        self.connections += 1
        yield self

    async def send_and_wait(self, command: Any, *, request_id: str, timeout: float = 30.0) -> CommandResult:
        self.sent.append(command)
        self.in_hand += 1
        try:
            await self.gate.wait()
        finally:
            self.in_hand -= 1
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if answer is None and self.hands_on is not None:
            return await self.hands_on.send_and_wait(command, request_id=request_id)
        id = stock_domain().aggregates[0].aggregate_id(command.id)
        return CommandResult(
            command_id="c", request_id=request_id, aggregate_id=id, stage=Stage.PROCESSED, error=answer, version=1
        )


class Device:
    """A device in this process."""

    def __init__(self, path: Path, connect: Callable[[], AbstractAsyncContextManager[stock_link.Gateway]]) -> None:
        self.domain: Domain = stock_domain()
        self.store = SqliteStore(path, self.domain.serializer)
        self.app = App(self.domain, store=self.store)
        self.outbox = Outbox(self.store, self.domain.serializer)
        self.lines: list[str] = []
        self.sender = stock_link.Sender(
            self.domain, self.outbox, self.app.gateway, connect, backoff_max=0.01, say=self.lines.append
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Device"]:
        async with self.app.serving(self.app.runtime(signals=False, shutdown_quiet_period=0)):
            await self.outbox.open()
            yield self

    @asynccontextmanager
    async def linked(self) -> AsyncIterator["Device"]:
        async with self.serving(), trio.open_nursery() as nursery:
            await self.sender.recover()
            nursery.start_soon(self.sender.keep_sending)
            yield self
            nursery.cancel_scope.cancel()

    async def submit(self, *commands: Any) -> None:
        for command in commands:
            await self.sender.submit(self.sender.checked(command))

    async def counts(self) -> dict[State, int]:
        return dict(await self.outbox.counts())

    async def streams(self, id: str = "tea") -> list[Any]:
        return list(await self.store.load(self.domain.aggregates[0].aggregate_id(id)))


@asynccontextmanager
async def served() -> AsyncIterator[tuple[App, Remote]]:
    """A server in this process, with its events in memory."""
    app = App(stock_domain())
    remote = Remote()
    async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)):
        remote.hands_on = app.gateway
        yield app, remote


class TestSending:
    async def test_in_order_for_a_shelf_and_side_by_side_for_several(self, device: Path) -> None:
        remote = Remote()
        remote.gate = trio.Event()
        async with Device(device, remote.connect).linked() as each:
            await each.submit(*(Receive(id, n) for n in (1, 2, 3) for id in ("tea", "coffee", "salt")))
            with trio.move_on_after(5):  # too few, or too many, shows below
                await until(lambda: remote.in_hand >= 3)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert sorted(command.id for command in remote.sent) == ["coffee", "salt", "tea"]
            remote.gate.set()
            await each.sender.wait_sent()
        for id in ("tea", "coffee", "salt"):
            assert [command.quantity for command in remote.sent if command.id == id] == [1, 2, 3]

    async def test_no_more_than_a_window_is_in_hand(self, device: Path) -> None:
        remote = Remote()
        remote.gate = trio.Event()
        shelves = stock_link.IN_FLIGHT + 10
        async with Device(device, remote.connect).linked() as each:
            await each.submit(*(Receive(f"shelf-{n}", 1) for n in range(shelves)))
            await until(lambda: remote.in_hand >= stock_link.IN_FLIGHT)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert remote.in_hand == stock_link.IN_FLIGHT
            remote.gate.set()
            await each.sender.wait_sent()
        assert len(remote.sent) == shelves

    async def test_what_the_server_has_already_is_delivered(self, device: Path) -> None:
        async with served() as (app, remote), Device(device, remote.connect).serving() as each:
            message = each.sender.checked(Receive("tea", 10))
            await each.sender.submit(message)
            await app.gateway.send_and_wait(Receive("tea", 10), request_id=message.request_id)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(each.sender.keep_sending)
                await each.sender.wait_sent()
                nursery.cancel_scope.cancel()
            assert await each.counts() == {State.DELIVERED: 1}
            assert each.lines[-1] == "#1 receive tea 10: delivered"
            assert len(await app.store.load(message.aggregate_id)) == 1

    async def test_what_the_local_model_refuses_is_not_sent(self, device: Path) -> None:
        remote = Remote()
        async with Device(device, remote.connect).linked() as each:
            await each.submit(Pick("tea", 1), Receive("tea", 2))
            await each.sender.wait_sent()
            assert "#1 pick tea 1: not done: there are 0 (shelf.short)" in each.lines
            assert await each.counts() == {State.REJECTED: 1, State.DELIVERED: 1}
        assert remote.sent == [Receive("tea", 2)]

    async def test_what_the_server_refuses_is_final_and_what_follows_is_sent(self, tmp_path: Path) -> None:
        """Two devices have picked from what was there for one. A count brings the record back to the truth."""
        async with served() as (app, remote), Device(tmp_path / "other.db", remote.connect).linked() as other:
            async with Device(tmp_path / "device.db", remote.connect).serving() as each:
                await each.submit(Receive("tea", 10), Pick("tea", 6), Pick("tea", 1), Count("tea", 5))
                await app.gateway.send_and_wait(Receive("tea", 10), request_id=(await pending(each))[0].request_id)
                await other.submit(Receive("tea", 1), Count("tea", 5))
                await other.sender.wait_sent()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(each.sender.keep_sending)
                    await each.sender.wait_sent()
                    nursery.cancel_scope.cancel()
                (refused,) = await each.outbox.entries(State.REFUSED)
                assert (refused.command, refused.code, refused.text) == (Pick("tea", 6), "shelf.short", "there are 5")
                assert await each.counts() == {State.REFUSED: 1, State.DELIVERED: 3}
                told = "#2 pick tea 6: refused by the server: there are 5 (shelf.short); the record here differs now"
                assert told in each.lines
                id = each.domain.aggregates[0].aggregate_id("tea")
                states = [(await repository.load(id)).state for repository in (each.app.repository, app.repository)]
                assert states == [Shelf("tea", 5), Shelf("tea", 5)]

    @pytest.mark.parametrize(
        "trouble",
        [
            CommandError("StoreLockedError", "somebody else", undecided=True),
            RemoteError("UnknownMessageTypeError", "not known here", "command.name"),
        ],
    )
    async def test_what_the_server_cannot_decide_waits_and_is_not_overtaken(
        self, device: Path, trouble: CommandError | Exception
    ) -> None:
        async with served() as (_, remote):
            remote.answers = [trouble, trouble]
            async with Device(device, remote.connect).linked() as each:
                await each.submit(Receive("tea", 1), Pick("tea", 1))
                await each.sender.wait_sent()
                assert await each.counts() == {State.DELIVERED: 2}
            assert remote.sent == [Receive("tea", 1)] * 3 + [Pick("tea", 1)]
            assert remote.connections == 1
            assert sum("cannot decide it now" in line for line in each.lines) == 1

    async def test_a_command_that_the_server_holds_for_illegal_is_refused(self, device: Path) -> None:
        remote = Remote()
        remote.answers = [InvalidCommandError(Receive, "at most 5")]
        async with Device(device, remote.connect).linked() as each:
            await each.submit(Receive("tea", 6))
            await each.sender.wait_sent()
            (refused,) = await each.outbox.entries(State.REFUSED)
        assert refused.code == "InvalidCommandError"

    @pytest.mark.parametrize(
        "trouble",
        [
            ConnectionLostError("c", "r", "SENT", "gone"),
            AdmissionClosedError("ws://x/"),
            WaitTimeoutError("c", "PROCESSED", 30, "SENT"),
        ],
    )
    async def test_a_connection_of_no_use_is_followed_by_another(self, device: Path, trouble: Exception) -> None:
        async with served() as (_, remote):
            remote.answers = [trouble, trouble]
            async with Device(device, remote.connect).linked() as each:
                await each.submit(Receive("tea", 1), Receive("coffee", 1))
                await each.sender.wait_sent()
                assert await each.counts() == {State.DELIVERED: 2}
            assert remote.connections >= 2

    async def test_what_is_no_trouble_of_the_link_ends_it(self, device: Path) -> None:
        remote = Remote()
        remote.answers = [ZeroDivisionError("a fault")]
        with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
            async with Device(device, remote.connect).linked() as each:
                await each.submit(Receive("tea", 1))
                await trio.sleep_forever()


async def pending(device: Device) -> Sequence[Entry]:
    return await device.outbox.entries(State.PENDING)


class TestResuming:
    """What a crash can leave behind, step by step; the process of each is gone."""

    async def check(self, device: Path, server: tuple[App, Remote], lines: list[str]) -> None:
        app, remote = server
        async with Device(device, remote.connect).linked() as each:
            await each.submit(Pick("tea", 1))
            await each.sender.wait_sent()
            assert await each.counts() == {State.DELIVERED: 2}
            told = [line for line in each.lines if line.startswith("#1") and not line.endswith("delivered")]
            assert told == lines
            here = await each.streams()
            there = await app.store.load(here[0].aggregate_id)
        assert [stream.version for stream in here] == [1, 2]
        same = [(stream.version, stream.request_id, stream.events) for stream in here]
        assert [(stream.version, stream.request_id, stream.events) for stream in there] == same

    async def test_kept(self, device: Path) -> None:
        async with served() as server:
            async with Device(device, server[1].connect).serving() as each:
                await each.outbox.append(each.sender.checked(Receive("tea", 10)))
            await self.check(device, server, ["#1 receive tea 10: 10 left"])

    async def test_decided_here_and_not_marked(self, device: Path) -> None:
        async with served() as server:
            async with Device(device, server[1].connect).serving() as each:
                entry = await each.outbox.append(each.sender.checked(Receive("tea", 10)))
                await each.app.gateway.send_and_wait(entry.command, request_id=entry.request_id)
            await self.check(device, server, ["#1 receive tea 10: decided before"])

    async def test_marked_and_not_sent(self, device: Path) -> None:
        async with served() as server:
            async with Device(device, server[1].connect).serving() as each:
                await each.submit(Receive("tea", 10))
            await self.check(device, server, [])

    async def test_sent_and_not_marked(self, device: Path) -> None:
        async with served() as server:
            async with Device(device, server[1].connect).serving() as each:
                await each.submit(Receive("tea", 10))
                (entry,) = await pending(each)
                await server[0].gateway.send_and_wait(entry.command, request_id=entry.request_id)
            await self.check(device, server, [])

    async def test_more_than_a_page_is_decided_in_order(self, device: Path) -> None:
        async with Device(device, Remote().connect).serving() as each:
            for _ in range(120):
                await each.outbox.append(each.sender.checked(Receive("tea", 1)))
            await each.sender.recover()
            assert each.lines == [f"#{n} receive tea 1: {n} left" for n in range(1, 121)]

    async def test_what_the_disk_refuses_to_decide_is_kept(self, device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def full(*_: object) -> None:
            raise StoreFullError("device.db", "there is no room left on its disk")

        async with Device(device, Remote().connect).serving() as each:
            with monkeypatch.context() as patch:
                patch.setattr(SqliteStore, "append", full)
                with pytest.raises(CommandFailedError, match="no room left"):
                    await each.submit(Receive("tea", 1))
            assert await each.counts() == {State.NEW: 1}
            await each.sender.recover()
            assert await each.counts() == {State.PENDING: 1}


async def test_the_status_lists_all_that_was_refused(device: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with Device(device, Remote().connect).serving() as each:
        for _ in range(101):
            entry = await each.outbox.append(each.sender.checked(Receive("tea", 1)))
            await each.outbox.mark(entry, State.REFUSED, "c", "no")
        await stock_sender.show_status(each.outbox)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 to send, 0 delivered, 0 not done, 101 refused by the server"
    assert lines[-1] == "  #101 receive tea 1: no (c)"
    assert len(lines) == 102


class InMemoryOutbox:
    """Stands for an outbox where the clock jumps: threads would not be waited for."""

    def __init__(self) -> None:
        self.pending: list[Entry] = []
        self.marked: list[State] = []

    async def entries(self, state: State, *, after: int = 0, limit: int = 100) -> list[Entry]:
        return [entry for entry in self.pending if entry.ordinal > after][:limit]

    async def mark(self, entry: Entry, state: State, *_: object) -> None:
        self.pending.remove(entry)
        self.marked.append(state)


class Losing(Remote):
    """Answers one command, and is lost with the next."""

    async def send_and_wait(self, command: Any, *, request_id: str, timeout: float = 30.0) -> CommandResult:
        if self.sent:
            raise ConnectionLostError("c", "r", "SENT", "gone")
        return await super().send_and_wait(command, request_id=request_id)


class TestBackoff:
    def sender(self, outbox: InMemoryOutbox, connect: Any, lines: list[str]) -> stock_link.Sender:
        made: Any = outbox
        remote: Any = None
        return stock_link.Sender(stock_domain(), made, remote, connect, backoff_max=5, say=lines.append)

    async def test_pauses_grow_up_to_the_longest_and_it_is_told_once(self, autojump_clock: object) -> None:
        times: list[float] = []
        lines: list[str] = []

        def refuse() -> Any:
            times.append(trio.current_time())
            raise ConnectionRefusedByServerError("ws://x/", "nobody there")

        with trio.move_on_after(60):
            await self.sender(InMemoryOutbox(), refuse, lines).keep_sending()
        pauses = [later - sooner for sooner, later in pairwise(times)]
        for number, pause in enumerate(pauses):
            assert min(5, 0.1 * 2**number) <= pause + 1e-6
            assert pause <= min(5, 0.1 * 2**number + 0.1) + 1e-6
        assert pauses[-1] == pytest.approx(5)
        assert lines == ["offline: ws://x/ cannot be connected to: nobody there"]

    async def test_a_page_for_an_answer_is_told_in_one_line(self, autojump_clock: object) -> None:
        lines: list[str] = []

        def refuse() -> Any:
            raise ConnectionRefusedByServerError("ws://x/", f"502 {'<b>' * 1_000}\n<p>", 502)

        with trio.move_on_after(1):
            await self.sender(InMemoryOutbox(), refuse, lines).keep_sending()
        (line,) = lines
        assert line.startswith("offline: ws://x/ cannot be connected to: 502 <b><b>")
        assert "\n" not in line
        assert len(line) < 400

    async def test_a_connection_that_worked_begins_anew(self, autojump_clock: object) -> None:
        """Seven attempts fail, one gets a command delivered and is lost, the next ones fail."""
        outbox, remote = InMemoryOutbox(), Losing()
        times: list[float] = []
        lines: list[str] = []
        entry = Entry(1, "r", "stock.shelf/tea", Receive("tea", 1))
        outbox.pending = [entry, evolve(entry, ordinal=2)]

        def connect() -> Any:
            times.append(trio.current_time())
            if len(times) != 8:
                raise ConnectionRefusedByServerError("ws://x/", "nobody there")
            return remote.connect()

        with trio.move_on_after(60):
            await self.sender(outbox, connect, lines).keep_sending()
        pauses = [later - sooner for sooner, later in pairwise(times)]
        assert pauses[6] >= 5 - 1e-6  # before the one that worked
        assert pauses[7] == pytest.approx(0)  # after it
        assert pauses[8] <= 0.2 + 1e-6
        assert outbox.marked == [State.DELIVERED]
        refused = "offline: ws://x/ cannot be connected to: nobody there"
        assert lines == [
            refused, "connected", "#1 receive tea 1: delivered", "offline: the connection was lost: gone", refused,
        ]  # fmt: skip

    async def test_a_connection_that_is_lost_at_once_does_not(self, autojump_clock: object) -> None:
        outbox, remote = InMemoryOutbox(), Remote()
        lines: list[str] = []
        outbox.pending = [Entry(1, "r", "stock.shelf/tea", Receive("tea", 1))]
        remote.answers = [ConnectionLostError("c", "r", "SENT", "gone")] * 1_000
        with trio.move_on_after(60):
            await self.sender(outbox, remote.connect, lines).keep_sending()
        assert remote.connections < 30
        assert outbox.marked == []


class TestOutbox:
    async def test_only_one_sender_has_a_file(self, device: Path) -> None:
        with only_sender(device), pytest.raises(StoreLockedError, match="another sender"), only_sender(device):
            raise AssertionError("both have it")
        with pytest.raises(StoreError, match="cannot be taken"), only_sender(device / "no" / "folder"):
            raise AssertionError("there is no such folder")

    @posix
    async def test_a_link_to_the_file_is_the_same_file(self, device: Path) -> None:
        link = device.with_name("link.db")
        link.symlink_to(device)
        with only_sender(device), pytest.raises(StoreLockedError), only_sender(link):
            raise AssertionError("both have it")

    @posix
    def test_links_in_a_circle_are_told_in_one_line(self, device: Path, capsys: pytest.CaptureFixture[str]) -> None:
        device.symlink_to(device)
        assert stock_sender.main(["--db", str(device)]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    async def test_a_command_of_an_unknown_class_says_so(self, device: Path) -> None:
        """An older version of the program has the file."""
        async with Device(device, Remote().connect).serving() as each:
            await each.outbox.append(each.sender.checked(Receive("tea", 1)))
            other = Outbox(each.store, Domain([]).serializer)
            with pytest.raises(Exception, match="'Receive'"):
                await other.entries(State.NEW)
            assert each.sender.checked(Count("tea", 0)).body == Count("tea", 0)
