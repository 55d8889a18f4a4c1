"""`blocking_calls`: what an executor's handlers are told of their blocking calls."""

import socket
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import trio
from support import EndlessSource, ListSource, itself
from trio.testing import wait_all_tasks_blocked

from trio_wow.errors import BlockingCallError, BlockingCallWarning
from trio_wow.execution import KeyedExecutor, blocking, direct


def connect() -> None:
    with socket.socket() as one:
        one.connect_ex(("127.0.0.1", 1))


CALLS: dict[str, Callable[[], object]] = {
    "time.sleep": lambda: time.sleep(0),
    "socket.socket.connect_ex": connect,
    "subprocess.Popen": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "sqlite3.connect": lambda: sqlite3.connect(":memory:").close(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("when", ["plain", "before a wait", "after a wait"])
async def test_k13_a_blocking_call_is_refused_and_handler_key_and_call_are_named(call: str, when: str) -> None:
    def pay(n: int) -> None:
        CALLS[call]()

    async def pay_later(n: int) -> None:
        if when == "after a wait":
            await trio.lowlevel.checkpoint()
        CALLS[call]()

    failed: dict[int, Exception] = {}
    executor = KeyedExecutor(blocking_calls="raise")
    await executor.dispatch(
        ListSource([1, 2]),
        key=lambda n: f"k{n}",
        handler=pay if when == "plain" else pay_later,
        on_error=failed.__setitem__,
    )
    for n in (1, 2):
        error = failed[n]
        assert isinstance(error, BlockingCallError)
        assert error.handler.endswith("pay" if when == "plain" else "pay_later")
        assert (error.key, error.call) == (f"k{n}", call)


async def test_k13_warn_warns_of_the_line_and_lets_the_call_pass() -> None:
    def pay(n: int) -> None:
        time.sleep(0)
        handled.append(n)

    handled: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await KeyedExecutor(blocking_calls="warn").dispatch(ListSource([1, 2]), key=itself, handler=pay)
    assert sorted(handled) == [1, 2]
    assert [each.category for each in caught] == [BlockingCallWarning] * 2
    assert {each.filename for each in caught} == {__file__}


async def test_k13_allow_changes_nothing() -> None:
    sleep, recv = time.sleep, socket.socket.recv
    kept: list[bool] = []
    await KeyedExecutor(blocking_calls="allow").dispatch(
        ListSource([1]), key=itself, handler=lambda _: kept.append(time.sleep is sleep and socket.socket.recv is recv)
    )
    assert kept == [True]


async def test_k13_threads_trios_sockets_callbacks_and_other_dispatches_are_never_refused() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    finished: list[str] = []

    async def echo(stream: trio.SocketStream) -> None:
        await stream.send_all(await stream.receive_some())

    @direct
    def in_a_workers_thread(n: int) -> None:
        time.sleep(0)
        finished.append("direct")

    @blocking
    def in_a_thread(n: int) -> None:
        time.sleep(0)
        finished.append("blocking")

    async def over_the_network(n: int) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(b"ping")
        assert await stream.receive_some() == b"ping"
        await stream.aclose()
        await trio.to_thread.run_sync(time.sleep, 0)
        finished.append("network")

    def key(n: int) -> int:
        time.sleep(0)
        return n

    def fails(n: int) -> None:
        raise ValueError(n)

    executor = KeyedExecutor(blocking_calls="raise")
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, echo, listeners)
        for handler in (in_a_workers_thread, in_a_thread, over_the_network):
            await executor.dispatch(ListSource([1]), key=key, handler=handler)
        await executor.dispatch(ListSource([1]), key=key, handler=fails, on_error=lambda *_: time.sleep(0))
        other = KeyedExecutor(blocking_calls="allow")
        await other.dispatch(ListSource([1]), key=key, handler=lambda _: time.sleep(0))
        nursery.cancel_scope.cancel()
    assert finished == ["direct", "blocking", "network"]


async def test_k13_calls_are_wrapped_only_while_a_dispatch_runs() -> None:
    recv = socket.socket.__dict__.get("recv")
    executor = KeyedExecutor(blocking_calls="raise")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(executor.dispatch, EndlessSource([]), key=itself, handler=itself))
        await wait_all_tasks_blocked()
        assert socket.socket.__dict__.get("recv") is not recv
        nursery.cancel_scope.cancel()
    assert socket.socket.__dict__.get("recv") is recv
