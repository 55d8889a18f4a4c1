"""The guard that finds blocking calls, alone: which calls it sees, where, and what it leaves behind."""

import io
import os
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from textwrap import dedent
from time import sleep as sleep_of_before
from types import FrameType
from typing import Any

import pytest
import trio
import trio.lowlevel

from trio_wow.errors import BlockingCallError, BlockingCallWarning, CancelScopeLeakError, WowError
from trio_wow.execution._blocking import BlockingCallGuard
from trio_wow.execution._lane import run_plain as plainly
from trio_wow.execution._mailbox import Mailbox

BEFORE = {owner: dict(vars(owner)) for owner in (socket.socket, ssl.SSLSocket)}
SLEEP = time.sleep
BOX: Mailbox[Any] = Mailbox()  # empty, as it is when its last item is handled
BOX.running = False
BOX.key = 7


def wrapped() -> set[str]:
    """What is not as it was before the first guard."""
    changed = set() if time.sleep is SLEEP else {"time.sleep"}
    for owner, before in BEFORE.items():
        now = vars(owner)
        module = owner.__module__
        changed |= {f"{module}.{owner.__name__}.{n}" for n in {*before, *now} if before.get(n) is not now.get(n)}
    return changed


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert not wrapped()


@pytest.fixture
def strict() -> Iterator[BlockingCallGuard]:
    with BlockingCallGuard("raise", "pay") as guard:
        yield guard


@pytest.fixture
def lenient() -> Iterator[BlockingCallGuard]:
    with BlockingCallGuard("warn", "pay") as guard:
        yield guard


def step(guard: BlockingCallGuard, function: Callable[[], Any]) -> Any:
    """Call a function as a step of the handler `pay` for the key 7."""
    return guard.run_plain(lambda _: function(), None, BOX)


def refused_here(function: Callable[[], Any]) -> str:
    with pytest.raises(BlockingCallError) as caught:
        function()
    return caught.value.call


def refused(guard: BlockingCallGuard, function: Callable[[], Any]) -> str:
    """The name of the call for which a function is refused as a step."""
    return refused_here(lambda: step(guard, function))


def nap() -> Any:
    time.sleep(0)


def fail(error: BaseException) -> None:
    raise error


class Sockets:
    """A pair of connected sockets, `here` with three bytes to receive, and whatever else a call needs."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.here, self.there = map(self.stack.enter_context, socket.socketpair())
        self.there.send(b"abc")
        self.listener = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = self.listener.getsockname()
        self.stack.enter_context(socket.create_connection(self.address))  # somebody to accept
        self.client = self.stack.enter_context(socket.socket())
        self.datagrams = self.stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))

    def tls(self, plain: socket.socket) -> ssl.SSLSocket:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made = context.wrap_socket(plain, server_hostname="localhost", do_handshake_on_connect=False)
        return self.stack.enter_context(made)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    with made.stack:
        yield made


# What is seen: its name, a call on a line of its own, which a warning has to name, and what that returns if made.
CALLS: list[tuple[str, Callable[[Sockets], Any], Any]] = [
    ("time.sleep", lambda it: time.sleep(0), None),
    ("subprocess.Popen", lambda it: subprocess.Popen([sys.executable, "-c", ""]).wait(), 0),
    ("sqlite3.connect", lambda it: sqlite3.connect(":memory:").close(), None),
    ("socket.socket.accept", lambda it: it.listener.accept()[0].close(), None),
    ("socket.socket.connect", lambda it: it.client.connect(it.address), None),
    ("socket.socket.connect_ex", lambda it: it.client.connect_ex(it.address), 0),
    ("socket.socket.recv", lambda it: it.here.recv(3), b"abc"),
    ("socket.socket.recv_into", lambda it: it.here.recv_into(bytearray(9), nbytes=3), 3),
    ("socket.socket.recvfrom", lambda it: it.here.recvfrom(3)[0], b"abc"),
    ("socket.socket.recvfrom_into", lambda it: it.here.recvfrom_into(bytearray(3))[0], 3),
    ("socket.socket.recvmsg", lambda it: it.here.recvmsg(3)[0], b"abc"),
    ("socket.socket.recvmsg_into", lambda it: it.here.recvmsg_into([bytearray(3)])[0], 3),
    ("socket.socket.send", lambda it: it.here.send(b"abc"), 3),
    ("socket.socket.sendall", lambda it: it.here.sendall(b"abc"), None),
    ("socket.socket.sendfile", lambda it: it.here.sendfile(io.BytesIO(b"abc")), 3),  # calls `send`
    ("socket.socket.sendmsg", lambda it: it.here.sendmsg([b"abc"]), 3),
    ("socket.socket.sendto", lambda it: it.datagrams.sendto(b"abc", it.address), 3),
]
# The same through other layers.
LAYERS: list[tuple[str, Callable[[Sockets], Any], Any]] = [
    ("subprocess.Popen", lambda it: subprocess.run([sys.executable, "-c", ""], check=True).returncode, 0),
    ("sqlite3.connect", lambda it: sqlite3.Connection(":memory:").close(), None),
    ("socket.socket.recv_into", lambda it: it.stack.enter_context(it.here.makefile("rb")).read(3), b"abc"),
    ("socket.socket.send", lambda it: it.stack.enter_context(it.here.makefile("wb", 0)).write(b"abc"), 3),
    ("socket.socket.connect", lambda it: socket.create_connection(it.address).close(), None),
    ("ssl.SSLSocket.connect", lambda it: it.tls(it.client).connect(it.address), None),
]


class Unprintable:
    def __str__(self) -> str:
        time.sleep(0)
        raise ValueError("no")


class TestErrors:
    def test_they_name_the_handler_the_key_the_call_and_the_way_out(self) -> None:
        for made in (BlockingCallError("pay", 7, "time.sleep"), BlockingCallWarning("pay", 7, "time.sleep")):
            assert (made.handler, made.key, made.call) == ("pay", 7, "time.sleep")
            for part in ("handler pay", "key 7", "time.sleep", "trio.to_thread.run_sync", "@blocking", "@direct"):
                assert part in str(made)
            assert isinstance(made, WowError | RuntimeWarning)

    def test_a_key_that_refuses_to_be_printed_is_named_too(self, lenient: BlockingCallGuard) -> None:
        box: Mailbox[Any] = Mailbox()
        box.key = Unprintable()
        with pytest.warns(BlockingCallWarning, match="key <.*Unprintable object at") as caught:
            lenient.run_plain(time.sleep, 0, box)
        (warning,) = caught  # what a report does itself is not the handler's
        assert isinstance(warning.message, BlockingCallWarning)
        assert warning.message.key is box.key
        assert "Unprintable object at" in str(CancelScopeLeakError("pay", box.key))


class TestWhatIsSeen:
    @pytest.mark.parametrize(("name", "call", "result"), CALLS)
    def test_a_call_is_refused_and_not_made(
        self, name: str, call: Callable[[Sockets], Any], result: Any, strict: BlockingCallGuard, sockets: Sockets
    ) -> None:
        assert refused(strict, partial(call, sockets)) == name
        assert call(sockets) == result  # nothing has been received, and nobody is connected

    @pytest.mark.parametrize(("name", "call", "result"), [*CALLS, *LAYERS])
    def test_a_call_is_warned_of_once_and_made(
        self, name: str, call: Callable[[Sockets], Any], result: Any, lenient: BlockingCallGuard, sockets: Sockets
    ) -> None:
        with pytest.warns(BlockingCallWarning) as caught:
            assert step(lenient, partial(call, sockets)) == result
        (warning,) = caught
        assert f"handler pay called {name}," in str(warning.message)
        assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno)

    def test_nothing_else_is_wrapped(self, strict: BlockingCallGuard) -> None:
        by_audit = {"subprocess.Popen", "sqlite3.connect"} | ({"time.sleep"} if sys.version_info >= (3, 13) else set())
        ours = {name for name in wrapped() if "SSLSocket" not in name} - {"socket.socket.sendmsg_afalg"}
        assert ours == {name for name, _, _ in CALLS} - by_audit

    def test_it_is_refused_before_anything_is_done(self, strict: BlockingCallGuard) -> None:
        assert refused(strict, lambda: subprocess.Popen(["/no/such/program"])) == "subprocess.Popen"
        assert refused(strict, lambda: sqlite3.connect("/no/such/folder/file")) == "sqlite3.connect"

    def test_a_time_out_is_blocking_and_no_time_is_not(self, strict: BlockingCallGuard, sockets: Sockets) -> None:
        sockets.here.settimeout(5)
        assert refused(strict, lambda: sockets.here.recv(1)) == "socket.socket.recv"
        sockets.here.setblocking(False)
        assert step(strict, lambda: sockets.here.recv(3)) == b"abc"
        with pytest.raises(BlockingIOError):
            step(strict, lambda: sockets.here.recv(1))

    def test_tls_is_told_apart_in_the_same_way(self, strict: BlockingCallGuard, sockets: Sockets) -> None:
        sockets.here.recv(3)
        encrypted = sockets.tls(sockets.here)
        assert refused(strict, lambda: encrypted.recv(1)) == "ssl.SSLSocket.recv"
        encrypted.setblocking(False)
        with pytest.raises(ssl.SSLWantReadError):
            step(strict, lambda: encrypted.recv(1))

    def test_a_sleep_taken_out_of_its_place_before(self, strict: BlockingCallGuard) -> None:
        if sys.version_info >= (3, 13):
            assert refused(strict, lambda: sleep_of_before(0)) == "time.sleep"
        else:
            step(strict, lambda: sleep_of_before(0))


class TestWhere:
    def test_other_threads_are_not_in_the_step(self, strict: BlockingCallGuard, sockets: Sockets) -> None:
        def calls() -> bytes:
            nap()
            sqlite3.connect(":memory:").close()
            subprocess.run([sys.executable, "-c", ""], check=True)
            sockets.here.send(b"abc")
            return sockets.here.recv(3)

        with ThreadPoolExecutor(1) as other:
            assert step(strict, lambda: other.submit(calls).result()) == b"abc"

    def test_a_step_returns_and_raises_as_the_function_does(self, strict: BlockingCallGuard) -> None:
        assert strict.run_plain(str, 4, BOX) == "4"
        for error in (ValueError(), StopIteration(), KeyboardInterrupt()):
            with pytest.raises(type(error)):
                strict.run_plain(fail, error, BOX)
            nap()

    def test_the_guard_stays_on_after_a_call_was_refused(self, strict: BlockingCallGuard) -> None:
        assert step(strict, lambda: [refused_here(nap) for _ in range(2)]) == ["time.sleep", "time.sleep"]

    def test_each_thread_has_steps_of_its_own(self) -> None:
        together = threading.Barrier(2, timeout=30)
        seen: list[str] = []

        def handler() -> None:
            together.wait()
            try:
                nap()
            except BlockingCallError as error:
                together.wait()
                seen.append(error.handler)

        def run(name: str) -> None:
            for _ in range(50):
                with BlockingCallGuard("raise", name) as guard, BlockingCallGuard("raise", "idle"):
                    step(guard, handler)
                nap()

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(run, "ab"))
        assert sorted(seen) == ["a"] * 50 + ["b"] * 50

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    def test_nothing_is_seen_in_a_forked_child_and_at_the_end_of_the_process(self) -> None:
        script = """
            import os, sqlite3, sys, time
            from trio_wow.execution._blocking import BlockingCallGuard
            from trio_wow.execution._mailbox import Mailbox

            class Late:
                def __del__(self):
                    sqlite3.connect(":memory:").close()

            def handler(_):
                child = os.fork()
                if child:
                    return os.waitpid(child, 0)[1]
                time.sleep(0)
                return 0

            late, mailbox = Late(), Mailbox()
            with BlockingCallGuard("raise", "pay") as guard:
                status = guard.run_plain(handler, None, mailbox)
            guard.__enter__()
            sys.exit(status)
        """
        command = [sys.executable, "-W", "error", "-c", dedent(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class TestWarnings:
    def test_one_that_the_filters_make_an_error_stops_the_call(
        self, lenient: BlockingCallGuard, sockets: Sockets
    ) -> None:
        for call in (lambda: sockets.here.recv(3), lambda: sqlite3.connect(":memory:"), nap):
            with pytest.raises(BlockingCallWarning):  # filters are "error" in all tests
                step(lenient, call)
        assert sockets.here.recv(3) == b"abc"

    def test_each_call_has_its_own_and_no_text_is_kept(self, lenient: BlockingCallGuard) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")  # which else shows a text once
            step(lenient, lambda: [nap(), nap(), nap()])
        assert len(caught) == 3
        assert not any("blocks the event loop" in str(text) for text in globals().get("__warningregistry__", ()))


class TestWrappers:
    def test_they_are_there_only_while_a_guard_is(self) -> None:
        order = {owner: list(vars(owner)) for owner in BEFORE}
        one, two = BlockingCallGuard("raise", "pay"), BlockingCallGuard("warn", "pay")
        assert not wrapped()
        with one:
            with two:
                assert refused(one, nap) == "time.sleep"
            assert refused(one, nap) == "time.sleep"
            with two, pytest.warns(BlockingCallWarning):
                step(two, nap)
            assert refused(one, lambda: (two.__enter__(), two.__exit__(), nap())) == "time.sleep"
        assert not wrapped()
        assert {owner: list(vars(owner)) for owner in BEFORE} == order

    def test_one_that_others_have_wrapped_is_left_to_them(self, sockets: Sockets) -> None:
        guard = BlockingCallGuard("raise", "pay")
        with pytest.MonkeyPatch.context() as patch:
            with guard:
                ours = socket.socket.send
                patch.setattr(socket.socket, "send", lambda *arguments: ours(*arguments))
                theirs = socket.socket.send
                assert refused(guard, lambda: sockets.here.send(b"abc")) == "socket.socket.send"
            assert socket.socket.send is theirs
            assert step(guard, lambda: sockets.here.send(b"abc")) == 3
        # They have put back what they had found, which is ours. It does nothing now, and goes with the next guard.
        assert wrapped() == {"socket.socket.send"}
        assert step(guard, lambda: sockets.here.send(b"abc")) == 3
        with guard:
            assert refused(guard, lambda: sockets.here.send(b"abc")) == "socket.socket.send"

    def test_a_replacement_of_before_is_wrapped_too(self, monkeypatch: pytest.MonkeyPatch, sockets: Sockets) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "recv", lambda *_: b"fake")
            fake = socket.socket.recv
            with BlockingCallGuard("raise", "pay") as guard:
                assert refused(guard, lambda: sockets.here.recv(3)) == "socket.socket.recv"
                assert sockets.here.recv(3) == b"fake"
            assert socket.socket.recv is fake

    def test_what_was_taken_out_of_its_place_goes_on_working(self) -> None:
        guard = BlockingCallGuard("raise", "pay")
        with guard:
            sleep = time.sleep
        step(guard, lambda: sleep(0))
        with guard:
            assert refused(guard, lambda: sleep(0)) == "time.sleep"


class TestKeyboardInterrupt:
    def test_it_never_leaves_the_guard_on(self, strict: BlockingCallGuard) -> None:
        files = {function.__code__.co_filename for function in (BlockingCallGuard.run_plain, plainly)}
        protected: list[bool] = []
        left = 0

        def handler(_: object) -> None:
            protected.append(trio.lowlevel.currently_ki_protected())

        async def async_handler() -> None:
            handler(None)
            await trio.lowlevel.checkpoint()
            handler(None)

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in files:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left == 0:
                    signal.raise_signal(signal.SIGINT)
            return trace

        async def main() -> None:
            sys._getframe().f_trace_opcodes = True  # or Python 3.12 has none for the first frame
            work = async_handler()
            sys.settrace(trace)
            try:
                strict.run_plain(handler, None, BOX)
                await strict.run_async(work, BOX)
            finally:
                sys.settrace(None)
                work.close()
                nap()

        points = 0
        while left <= 0:  # until both steps are over before that many instructions
            points += 1
            left = points
            with suppress(KeyboardInterrupt):
                trio.run(main)
        assert set(protected) == {False}
        assert 0 < len(protected) < 3 * points  # some interrupts came before the handler's code, most could not


async def use_threads() -> None:
    for call in (nap, lambda: sqlite3.connect(":memory:").close()):
        await trio.to_thread.run_sync(call)
    await trio.to_thread.run_sync(trio.from_thread.run, trio.lowlevel.checkpoint)


async def use_processes() -> None:
    echo = [sys.executable, "-c", "import sys; print(sys.stdin.read(), end='')"]
    assert (await trio.run_process(echo, stdin=b"text", capture_stdout=True)).stdout == b"text"


async def use_streams() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with listener, await trio.open_tcp_stream("127.0.0.1", port) as client, await listener.accept() as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_all, b"text" * 100_000)
            received = 0
            while received < 400_000:
                received += len(await server.receive_some())


class TestTrio:
    @pytest.mark.parametrize("use", [use_threads, use_processes, use_streams])
    async def test_what_trio_itself_does_is_never_refused(
        self, use: Callable[[], Coroutine[Any, Any, None]], strict: BlockingCallGuard
    ) -> None:
        await strict.run_async(use(), BOX)

    async def test_a_handler_is_guarded_after_it_has_waited_too(self, strict: BlockingCallGuard) -> None:
        async def handler() -> None:
            await trio.lowlevel.checkpoint()
            assert refused_here(nap) == "time.sleep"
            with trio.CancelScope() as scope:
                scope.cancel()
                await trio.sleep_forever()
            assert refused_here(nap) == "time.sleep"

        await strict.run_async(handler(), BOX)

    async def test_the_rest_of_the_loop_is_not_guarded_while_a_handler_waits(self, strict: BlockingCallGuard) -> None:
        async def handler() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child)

        async def child() -> None:
            await trio.lowlevel.checkpoint()
            nap()

        await strict.run_async(handler(), BOX)
