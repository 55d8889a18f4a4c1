"""The runtime inside programs that are not Trio's: anyio, threads, asyncio."""

import asyncio
import contextlib
import contextvars
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
from attrs import define, field, frozen
from chain_domain import Chain, Step, Steps
from support import PythonProcess, a_cancelled, collect
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow import App, Runtime, aggregate, on_command, on_sourcing
from trio_wow.app import AsyncioGuest, call_asyncio, serving_in_asyncio, serving_in_thread
from trio_wow.errors import (
    AdmissionClosedError,
    AsyncioCallCancelledError,
    HandlerExitError,
    RuntimeStateError,
    ShutdownDeadlineError,
    WaitAbandonedError,
)
from trio_wow.eventsourcing import InMemoryEventStore
from trio_wow.messages import CommandResult, DomainEventStream
from trio_wow.runtime import RuntimeState

EXAMPLES = Path(__file__).parents[1] / "examples/embedding"


class Gated(InMemoryEventStore):
    """Appends only when its gate is open, which it says."""

    def __init__(self) -> None:
        super().__init__(App([Chain]).domain.serializer)
        self.reached = trio.Event()
        self.gate = trio.Event()

    async def append(self, stream: DomainEventStream) -> None:
        self.reached.set()
        await self.gate.wait()
        await super().append(stream)


def quick(app: App, **options: Any) -> Runtime:
    return app.runtime(**{"signals": False, "shutdown_quiet_period": 0, **options})


async def asyncio_turn() -> None:
    await asyncio.sleep(0)


async def until_set(event: trio.Event) -> None:
    """Wait in asyncio for an event of a guest."""
    while not event.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def until_stopping(runtime: Runtime, turn: Callable[[], Awaitable[object]] = asyncio_turn) -> None:
    """Wait for the one step of a runtime that no event tells of from outside."""
    while runtime.state.value < RuntimeState.STOPPING.value:
        await turn()
    assert runtime.state is RuntimeState.STOPPING


def run_example(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", EXAMPLES / name], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def in_process(program: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> PythonProcess:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(EXAMPLES)]))
    return PythonProcess("-X", "dev", "-W", "error", "-c", program, *arguments)


# anyio, on the trio backend


def test_the_anyio_example_runs() -> None:
    assert run_example("anyio_program.py") == "{'tea': 2, 'coffee': 1}\n"


ANYIO_INTERRUPTED = """
import anyio, trio
from anyio_program import cancel_at_signal
from trio_wow import App
from chain_domain import Chain, Step
from trio_wow.eventsourcing import InMemoryEventStore
class Slow(InMemoryEventStore):
    async def append(self, stream):
        print("appending", flush=True)
        while runtime.state.name == "RUNNING":
            await trio.sleep(0.01)
        await super().append(stream)
        print("appended", flush=True)
app = App([Chain], store=Slow(App([Chain]).domain.serializer))
runtime = app.runtime(signals=False, shutdown_quiet_period=0)
async def main():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_at_signal, tasks.cancel_scope)
        await tasks.start(runtime.serve)
        await app.gateway.send(Step("a"))
        await anyio.sleep_forever()
    print(runtime.state.name)
anyio.run(main, backend="trio")
"""


def test_ctrl_c_in_an_anyio_program_stops_the_runtime_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_process(ANYIO_INTERRUPTED, monkeypatch) as process:
        process.read_until("appending")
        process.send(signal.SIGINT)
        assert process.finish() == (0, "appended\nSTOPPED\n", "")


async def test_an_anyio_task_group_that_is_cancelled_stops_the_runtime_in_order_and_the_cancellation_passes_on(
    autojump_clock: MockClock,
) -> None:
    app = App([Chain], store=(store := Gated()))
    runtime = quick(app)
    results: list[CommandResult] = []
    states: list[RuntimeState] = []

    async def send() -> None:
        with anyio.CancelScope(shield=True):
            results.append(await app.gateway.send_and_wait(Step("a")))

    with anyio.CancelScope() as outer:
        async with anyio.create_task_group() as tasks:
            await tasks.start(runtime.serve)
            tasks.start_soon(send)
            await store.reached.wait()
            outer.cancel()
            with anyio.CancelScope(shield=True):
                await wait_all_tasks_blocked()
                states.append(runtime.state)
                store.gate.set()
    assert outer.cancelled_caught
    assert states == [RuntimeState.STOPPING]
    assert [result.version for result in results] == [1]
    assert runtime.state is RuntimeState.STOPPED


async def test_an_error_in_an_anyio_host_stops_the_runtime_in_order() -> None:
    app = App([Chain], store=(store := Gated()))
    runtime = quick(app)
    results: list[CommandResult] = []

    async def send() -> None:
        with anyio.CancelScope(shield=True):
            results.append(await app.gateway.send_and_wait(Step("a")))

    async def host() -> None:
        async with anyio.create_task_group() as tasks:
            await tasks.start(runtime.serve)
            tasks.start_soon(send)
            await store.reached.wait()
            tasks.start_soon(open_gate)
            raise ValueError("the host's")

    async def open_gate() -> None:
        with anyio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            store.gate.set()

    raised = await collect(host)
    assert isinstance(raised, ExceptionGroup)
    assert [str(error) for error in raised.exceptions] == ["the host's"]
    assert [result.version for result in results] == [1]
    assert runtime.state is RuntimeState.STOPPED


async def test_a_failing_runtime_fails_the_anyio_task_group() -> None:
    async def host() -> None:
        async with anyio.create_task_group() as tasks:
            runtime = quick(App([Chain]))
            await tasks.start(runtime.serve)
            await tasks.start(runtime.serve)

    raised = await collect(host)
    assert isinstance(raised, ExceptionGroup)
    assert [type(error) for error in raised.exceptions] == [RuntimeStateError]


# A blocking portal, for threads


@frozen
class Exit:
    id: str


@aggregate(context="exits")
@define
class Exiting:
    """Ends the runtime: what is no `Exception` is a failure of the runtime, not a command's result."""

    id: str

    @on_command
    def exit(self, command: Exit) -> None:
        raise SystemExit(3)


def raised_by(run: Callable[[], object]) -> BaseException | None:
    try:
        run()
    except BaseException as error:
        return error
    return None


async def fail(error: BaseException) -> None:
    await trio.lowlevel.checkpoint()
    raise error


def leaves(error: BaseException | None) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [] if error is None else [error]


def test_threads_send_commands_through_a_portal() -> None:
    app = App([Chain], [steps := Steps()])
    with serving_in_thread(quick(app)) as portal, ThreadPoolExecutor(32) as pool:

        def send(number: int) -> int | None:
            result: CommandResult = portal.call(app.gateway.send_and_wait, Step(f"c{number % 10}", number))
            return result.version

        versions = list(pool.map(send, range(400)))
    assert sorted(version or 0 for version in versions) == sorted(list(range(1, 41)) * 10)
    assert {chain: sorted(numbers) for chain, numbers in steps.of.items()} == {
        f"c{chain}": list(range(chain, 400, 10)) for chain in range(10)
    }


def test_a_call_has_the_callers_context() -> None:
    """So that what a handler's thread sends through the portal counts as sent by the handler."""
    variable = contextvars.ContextVar("variable", default="unset")

    async def show() -> str:
        return variable.get()

    with serving_in_thread(quick(App([Chain]))) as portal:
        variable.set("the caller's")
        assert portal.call(show) == "the caller's"


@pytest.mark.parametrize("serving", [serving_in_thread, serving_in_asyncio])
async def test_an_app_is_no_runtime(serving: Any) -> None:
    async def enter() -> None:
        with serving(App([Chain])):
            pass

    async def aenter() -> None:
        async with serving(App([Chain])):
            pass

    with pytest.raises(TypeError, match=r"only a Runtime can be served, not .*; an App makes one: app.runtime()"):
        await (enter if serving is serving_in_thread else aenter)()


def test_a_portal_refuses_calls_in_its_own_thread_and_after_the_block() -> None:
    with serving_in_thread(quick(App([Chain]))) as portal:

        async def wrong() -> None:
            portal.call(trio.sleep, 0)

        with pytest.raises(RuntimeError, match="event loop thread"):
            portal.call(wrong)
    with pytest.raises(RuntimeError, match="not running"):
        portal.call(trio.sleep, 0)


def test_leaving_the_block_finishes_what_was_taken_and_cancels_other_calls() -> None:
    app = App([Chain], store=(store := Gated()))
    runtime = quick(app)
    with serving_in_thread(runtime) as portal:
        sent = portal.start_task_soon(app.gateway.send_and_wait, Step("a"))
        portal.call(store.reached.wait)

        async def open_gate_when_it_stops() -> None:
            await until_stopping(runtime, trio.lowlevel.checkpoint)
            with pytest.raises(AdmissionClosedError):
                await app.gateway.send(Step("b"))
            store.gate.set()

        gate = portal.start_task_soon(open_gate_when_it_stops)
        asleep = portal.start_task_soon(trio.sleep_forever)
    gate.result()
    assert sent.result().version == 1
    assert asleep.cancelled()


def test_a_block_that_fails_stops_the_runtime_in_order() -> None:
    runtime = quick(App([Chain]))
    error = ValueError("the host's")

    def host() -> None:
        with serving_in_thread(runtime):
            raise error

    assert raised_by(host) is error
    assert runtime.state is RuntimeState.STOPPED


def test_a_runtime_that_stops_by_itself_leaves_the_block_alone_and_its_gateway_refuses() -> None:
    app = App([Chain])
    runtime = quick(app)
    with serving_in_thread(runtime) as portal:
        runtime.request_stop()
        portal.call(runtime.wait_stopped)
        with pytest.raises(AdmissionClosedError):
            portal.call(app.gateway.send_and_wait, Step("a"))


def test_what_the_runtime_fails_with_is_raised_at_the_end_of_the_block() -> None:
    app = App([Exiting])
    runtime = quick(app)

    def host() -> None:
        with serving_in_thread(runtime) as portal:
            with pytest.raises(WaitAbandonedError):
                portal.call(app.gateway.send_and_wait, Exit("a"))
            portal.call(runtime.wait_stopped)
            with pytest.raises(AdmissionClosedError):
                portal.call(app.gateway.send_and_wait, Exit("a"))

    assert type(raised_by(host)) is HandlerExitError


def test_what_the_block_and_the_runtime_raise_come_as_a_group() -> None:
    app = App([Exiting])

    def host() -> None:
        with serving_in_thread(quick(app)) as portal:
            portal.call(app.gateway.send_and_wait, Exit("a"))

    raised = raised_by(host)
    assert isinstance(raised, ExceptionGroup)
    assert [type(error) for error in raised.exceptions] == [WaitAbandonedError, HandlerExitError]


def test_a_block_whose_runtime_cannot_start_raises_why() -> None:
    runtime = quick(App([Chain]))
    runtime.request_stop()
    for why in ("a stop was requested before it could serve", "serve can be called only once"):
        with pytest.raises(RuntimeStateError, match=why):
            with serving_in_thread(runtime):
                pass


def test_a_forced_stop_reaches_the_block() -> None:
    app = App([Chain], store=(store := Gated()))
    runtime = quick(app)

    def host() -> None:
        with serving_in_thread(runtime) as portal:
            sent = portal.start_task_soon(app.gateway.send_and_wait, Step("a"))
            portal.call(store.reached.wait)
            runtime.force_stop()
            assert isinstance(sent.exception(), WaitAbandonedError)

    assert isinstance(raised_by(host), ShutdownDeadlineError)


async def break_the_run() -> None:
    """Crash Trio itself: it cancels everything, this call included, and ends."""
    trio.lowlevel.spawn_system_task(fail, ValueError("in a system task"))
    await trio.sleep_forever()


def test_a_trio_run_that_breaks_ends_its_calls_and_is_raised_at_the_end_of_the_block() -> None:
    def host() -> None:
        with serving_in_thread(quick(App([Chain]))) as portal:
            with pytest.raises(CancelledError):
                portal.call(break_the_run)

    assert isinstance(raised_by(host), trio.TrioInternalError)


def test_a_call_that_raises_no_exception_stops_the_runtime_in_order_and_is_raised_again() -> None:
    app = App([Chain], store=(store := Gated()))
    error = SystemExit(3)

    async def open_gate() -> None:
        await wait_all_tasks_blocked()
        store.gate.set()
        raise error

    def host() -> None:
        with serving_in_thread(quick(app)) as portal:
            portal.call(app.gateway.send, Step("a"))
            portal.call(store.reached.wait)
            assert raised_by(lambda: portal.call(open_gate)) is error

    assert leaves(raised_by(host)) == [error]
    assert len(trio.run(app.store.read_all, 0, 10)) == 1


def test_a_runtime_that_is_cancelled_and_forced_raises_no_cancellation_of_trio() -> None:
    app = App([Chain], store=(store := Gated()))

    def host() -> None:
        runtime = quick(app)
        with serving_in_thread(runtime) as portal:
            portal.call(app.gateway.send, Step("a"))
            portal.call(store.reached.wait)
            portal.call(portal.stop, True)  # cancels the runtime too, which begins to stop in order
            runtime.force_stop()

    assert [type(error) for error in leaves(raised_by(host))] == [ShutdownDeadlineError]


FORGOTTEN = """
from trio_wow import App
from trio_wow.app import serving_in_thread
from chain_domain import Chain
def forget():
    with serving_in_thread(App([Chain]).runtime()) as portal:
        yield portal
forgotten = serving_in_thread(App([Chain]).runtime()), forget()
print(forgotten[0].__enter__() is next(forgotten[1]))
"""


def test_a_program_that_forgets_to_leave_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_process(FORGOTTEN, monkeypatch) as process:
        assert process.finish() == (0, "False\n", "")


INTERRUPTED = """
import os, signal, trio
from trio_wow import App
from trio_wow.app import serving_in_thread
from chain_domain import Chain, Step
from trio_wow.eventsourcing import InMemoryEventStore
class Slow(InMemoryEventStore):
    async def append(self, stream):
        os.kill(os.getpid(), signal.SIGINT)
        while runtime.state.name == "RUNNING":
            await trio.sleep(0.01)
        await super().append(stream)
        print("appended", flush=True)
app = App([Chain], store=Slow(App([Chain]).domain.serializer))
runtime = app.runtime(shutdown_quiet_period=0)
try:
    with serving_in_thread(runtime) as portal:
        portal.call(app.gateway.send_and_wait, Step("a"))
except KeyboardInterrupt:
    print("interrupted", runtime.state.name)
"""


def test_ctrl_c_in_a_waiting_thread_stops_the_runtime_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_process(INTERRUPTED, monkeypatch) as process:
        assert process.finish() == (0, "appended\ninterrupted STOPPED\n", "")


FORCED = """
import os, signal, trio
from trio_wow import App
from trio_wow.app import serving_in_thread
from chain_domain import Chain, Step
from trio_wow.eventsourcing import InMemoryEventStore
class Stuck(InMemoryEventStore):
    async def append(self, stream):
        while runtime.state.name == "RUNNING":
            await trio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        await trio.sleep_forever()
app = App([Chain], store=Stuck(App([Chain]).domain.serializer))
runtime = app.runtime()
try:
    with serving_in_thread(runtime) as portal:
        portal.call(app.gateway.send, Step("a"))
        raise ValueError("the host's")
except BaseExceptionGroup as group:
    print([type(error).__name__ for error in group.exceptions], runtime.state.name)
"""


def test_ctrl_c_while_it_stops_forces_the_stop_and_loses_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_process(FORCED, monkeypatch) as process:
        code, output, errors = process.finish()
    assert (code, output) == (0, "['ValueError', 'KeyboardInterrupt', 'ShutdownDeadlineError'] STOPPED\n")
    assert "the stop was forced by force_stop()" in errors


def post(url: str) -> int:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60) as answer:
        (version,) = json.load(answer).values()
    return int(version)


def in_threads(count: int, run: Callable[[int], Any]) -> Iterable[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_the_wsgi_example_serves_many_threads_and_stops_in_order_at_ctrl_c() -> None:
    with PythonProcess("-X", "dev", "-W", "error", EXAMPLES / "wsgi_server.py", "0") as process:
        url = process.read_until("http").strip()
        versions = in_threads(40, lambda number: post(f"{url}{'tea' if number % 2 else 'coffee'}"))
        assert sorted(versions) == sorted([*range(1, 21), *range(1, 21)])
        process.send(signal.SIGINT)
        code, output, errors = process.finish()
    assert (code, errors) == (0, "")
    assert output in {
        "stopping\n{'tea': 20, 'coffee': 20}\n",
        "stopping\n{'coffee': 20, 'tea': 20}\n",
    }


# Guest mode, in an asyncio loop


def in_asyncio(main: Callable[[], Coroutine[Any, Any, Any]], caplog: pytest.LogCaptureFixture) -> None:
    """Run it in debug mode. Nothing is left in the loop at its end, nothing was complained of, and Trio is gone."""

    async def checked() -> None:
        asyncio.get_running_loop().slow_callback_duration = 1e6  # nothing fails on speed
        await main()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not trio.lowlevel.in_trio_run()

    asyncio.run(checked(), debug=True)
    assert [record for record in caplog.records if record.name == "asyncio" and record.levelno > logging.INFO] == []


def guest_in(app: App) -> AbstractAsyncContextManager[AsyncioGuest]:
    return serving_in_asyncio(quick(app))


@frozen
class Ask:
    id: str


@frozen
class Answered:
    answer: str


class Question:
    """What the handlers of `Asking` ask an asyncio function."""

    ask: Callable[[], Coroutine[Any, Any, str]]


@aggregate(context="questions")
@define
class Asking:
    id: str
    answers: list[str] = field(factory=list)

    @on_command
    async def ask(self, command: Ask) -> Answered:
        return Answered(await call_asyncio(Question.ask))

    @on_sourcing
    def answered(self, event: Answered) -> None:
        self.answers.append(event.answer)


def test_asyncio_tasks_send_commands_side_by_side(caplog: pytest.LogCaptureFixture) -> None:
    app = App([Chain], [steps := Steps()])

    async def main() -> None:
        async with guest_in(app) as guest:

            async def send(number: int) -> int | None:
                return (await guest.call(app.gateway.send_and_wait, Step(f"c{number % 5}", number))).version

            versions = await asyncio.gather(*(send(number) for number in range(50)))
        assert sorted(version or 0 for version in versions) == sorted(list(range(1, 11)) * 5)

    in_asyncio(main, caplog)
    assert {chain: sorted(numbers) for chain, numbers in steps.of.items()} == {
        f"c{chain}": list(range(chain, 50, 5)) for chain in range(5)
    }


def test_a_guests_call_takes_arguments_keywords_and_the_callers_context(caplog: pytest.LogCaptureFixture) -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    async def show(*args: int, **kwargs: int) -> tuple[tuple[int, ...], dict[str, int], str, str]:
        seen = variable.get()
        variable.set("set in the call")
        return args, kwargs, seen, trio.lowlevel.current_task().name

    async def main() -> None:
        async with guest_in(App([Chain])) as guest:
            variable.set("the caller's")
            args, kwargs, seen, name = await guest.call(show, 1, 2, a=3)
        assert (args, kwargs, seen, variable.get()) == ((1, 2), {"a": 3}, "the caller's", "the caller's")
        assert name.endswith("show")

    in_asyncio(main, caplog)


@pytest.mark.parametrize(
    "error", [ValueError("x"), SystemExit(3), KeyboardInterrupt(), ExceptionGroup("g", [OSError()])]
)
def test_what_a_guests_call_raises_is_raised_in_its_asyncio_task_with_its_traceback(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with guest_in(App([Chain])) as guest:
            raised = await collect(lambda: guest.call(fail, error))
            await guest.call(trio.lowlevel.checkpoint)
        assert raised is error
        assert "fail" in [frame.name for frame in traceback.extract_tb(raised.__traceback__)]

    in_asyncio(main, caplog)


def test_an_asyncio_task_that_is_cancelled_cancels_its_trio_call_and_waits_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    async def main() -> None:
        async with guest_in(App([Chain])) as guest:
            asleep = asyncio.Event()

            async def sleep() -> None:
                asleep.set()
                try:
                    await trio.sleep_forever()
                finally:
                    with trio.CancelScope(shield=True):
                        await trio.lowlevel.checkpoint()
                    seen.append("cleaned up")

            task = asyncio.create_task(guest.call(sleep))
            await asleep.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert seen == ["cleaned up"]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await guest.call(trio.sleep_forever)
            await guest.call(trio.lowlevel.checkpoint)

    in_asyncio(main, caplog)


def test_a_cancelled_call_that_returns_all_the_same_is_cancelled_and_one_that_fails_raises_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with guest_in(App([Chain])) as guest:

            async def end(error: BaseException | None, started: asyncio.Event) -> str:
                started.set()
                with trio.CancelScope() as scope:
                    scope.shield = True
                    await go_on.wait()
                if error is not None:
                    raise error
                return "result"

            for error in (None, ValueError("x")):
                go_on, started = trio.Event(), asyncio.Event()
                task = asyncio.create_task(guest.call(end, error, started))
                await started.wait()
                task.cancel()
                await asyncio.sleep(0)
                go_on.set()
                with pytest.raises(asyncio.CancelledError if error is None else ValueError):
                    await task

    in_asyncio(main, caplog)


def test_a_host_cancelled_in_the_middle_of_a_command_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    app = App([Chain], [steps := Steps()], store=(store := Gated()))
    runtime = quick(app)

    async def main() -> None:
        async def host() -> None:
            async with serving_in_asyncio(runtime) as guest:
                await guest.call(app.gateway.send_and_wait, Step("a", 7))

        task = asyncio.create_task(host())
        await until_set(store.reached)
        task.cancel()
        await until_stopping(runtime)
        assert not task.done()
        store.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_asyncio(main, caplog)
    assert runtime.state is RuntimeState.STOPPED
    assert steps.of == {"a": [7]}


def test_leaving_the_guests_block_finishes_what_was_taken_and_cancels_other_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App([Chain], store=(store := Gated()))
    runtime = quick(app)

    async def main() -> None:
        async with serving_in_asyncio(runtime) as guest:
            sent = asyncio.create_task(guest.call(app.gateway.send_and_wait, Step("a")))
            asleep = asyncio.create_task(guest.call(trio.sleep_forever))
            await guest.call(store.reached.wait)

            async def open_gate() -> None:
                await until_stopping(runtime)
                with pytest.raises(AdmissionClosedError):
                    await guest.call(app.gateway.send, Step("b"))
                store.gate.set()

            gate = asyncio.create_task(open_gate())
        await gate
        assert (await sent).version == 1
        with pytest.raises(RuntimeStateError, match="the runtime is STOPPED"):
            await asleep

    in_asyncio(main, caplog)


def test_a_guests_calls_after_its_block_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with guest_in(App([Chain])) as guest:
            pass
        with pytest.raises(RuntimeStateError, match=r"only while its runtime is served \(the runtime is STOPPED\)"):
            await guest.call(trio.sleep, 0)

    in_asyncio(main, caplog)


def test_a_guest_is_called_from_asyncio_code_of_its_own_loop_only(caplog: pytest.LogCaptureFixture) -> None:
    wrong: Any = "no function"

    async def main() -> None:
        async with guest_in(App([Chain])) as guest:

            async def from_trio() -> None:
                await guest.call(trio.lowlevel.checkpoint)

            def from_thread() -> BaseException | None:
                return raised_by(lambda: asyncio.run(guest.call(trio.lowlevel.checkpoint)))

            with pytest.raises(RuntimeError, match="in Trio code await the function itself"):
                await guest.call(from_trio)
            assert "asyncio.run_coroutine_threadsafe" in str(await asyncio.to_thread(from_thread))
            with pytest.raises(TypeError, match="callable"):
                await guest.call(wrong)
            with pytest.raises(TypeError, match="await"):
                await guest.call(wrong.upper)
            await guest.call(trio.lowlevel.checkpoint)

    in_asyncio(main, caplog)


def test_a_loop_has_one_guest_at_a_time_and_another_after_it(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with guest_in(App([Chain])):
            with pytest.raises(RuntimeError, match="inside a run"):
                async with guest_in(App([Chain])):
                    pass
        async with guest_in(App([Chain])) as guest:
            await guest.call(trio.lowlevel.checkpoint)

    in_asyncio(main, caplog)


def test_a_guest_whose_runtime_cannot_start_raises_why(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        runtime = quick(App([Chain]))
        runtime.request_stop()
        with pytest.raises(RuntimeStateError, match="a stop was requested before it could serve"):
            async with serving_in_asyncio(runtime):
                pass
        with pytest.raises(RuntimeStateError, match="serve can be called only once"):
            async with serving_in_asyncio(runtime):
                pass

    in_asyncio(main, caplog)


class Slow(InMemoryEventStore):
    """Keeps an application from catching up, and so its runtime from serving, until its gate is open."""

    def __init__(self) -> None:
        super().__init__(App([Chain]).domain.serializer)
        self.reached = asyncio.Event()
        self.gate = trio.Event()

    async def read_all(self, after: int, limit: int) -> Any:
        self.reached.set()
        await self.gate.wait()
        return await super().read_all(after, limit)


def test_a_host_cancelled_while_its_guest_starts_stops_it_again(caplog: pytest.LogCaptureFixture) -> None:
    runtime = quick(App([Chain], [Steps()], store=(store := Slow())))
    entered: list[str] = []

    async def main() -> None:
        async def host() -> None:
            async with serving_in_asyncio(runtime):
                entered.append("the block")

        task = asyncio.create_task(host())
        await store.reached.wait()
        task.cancel()
        await until_stopping(runtime)
        store.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runtime.state is RuntimeState.STOPPED

    in_asyncio(main, caplog)
    assert entered == []


def test_a_guests_block_that_fails_stops_the_runtime_in_order(caplog: pytest.LogCaptureFixture) -> None:
    runtime = quick(App([Chain]))
    error = ValueError("the host's")

    async def main() -> None:
        async def host() -> None:
            async with serving_in_asyncio(runtime):
                raise error

        assert await collect(host) is error

    in_asyncio(main, caplog)
    assert runtime.state is RuntimeState.STOPPED


def test_a_failing_runtime_cancels_the_guests_block_which_raises_why(caplog: pytest.LogCaptureFixture) -> None:
    app = App([Exiting])

    async def main() -> None:
        guests: list[AsyncioGuest] = []

        async def host() -> None:
            async with guest_in(app) as guest:
                guests.append(guest)
                await guest.call(app.gateway.send, Exit("a"))
                await asyncio.Event().wait()

        current = asyncio.current_task()
        assert current is not None
        raised = await collect(host)
        assert isinstance(raised, HandlerExitError)
        assert current.cancelling() == 0
        await asyncio.sleep(0)
        refused = await collect(lambda: guests[0].call(trio.sleep, 0))
        assert isinstance(refused, RuntimeStateError)
        assert refused.__cause__ is raised

    in_asyncio(main, caplog)


def test_what_the_guests_block_and_the_runtime_raise_come_as_a_group(caplog: pytest.LogCaptureFixture) -> None:
    app = App([Exiting])

    async def main() -> None:
        async def host() -> None:
            async with guest_in(app) as guest:
                await guest.call(app.gateway.send_and_wait, Exit("a"))

        raised = await collect(host)
        assert [type(error) for error in leaves(raised)] == [WaitAbandonedError, HandlerExitError]

    in_asyncio(main, caplog)


def test_a_guest_whose_trio_run_breaks_ends_its_calls_and_tells_its_owner(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[BaseException | None] = []

    async def main() -> None:
        async def host() -> None:
            async with guest_in(App([Chain])) as guest:
                calls.append(await collect(lambda: guest.call(break_the_run)))

        assert isinstance(await collect(host), trio.TrioInternalError)

    in_asyncio(main, caplog)
    assert [type(error) for error in calls] == [RuntimeStateError]


def test_a_guests_call_that_raises_a_stale_cancellation_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def raise_stale() -> None:
        raise await a_cancelled()

    async def main() -> None:
        async with guest_in(App([Chain])) as guest:
            with pytest.raises(RuntimeStateError):
                await guest.call(raise_stale)
            await guest.call(trio.lowlevel.checkpoint)

    in_asyncio(main, caplog)


def test_a_runtime_that_stops_by_itself_leaves_the_guests_block_alone(caplog: pytest.LogCaptureFixture) -> None:
    app = App([Chain])
    runtime = quick(app)

    async def main() -> None:
        async with serving_in_asyncio(runtime) as guest:
            await asyncio.to_thread(runtime.request_stop)
            await guest.call(runtime.wait_stopped)
            with pytest.raises(AdmissionClosedError):
                await guest.call(app.gateway.send_and_wait, Step("a"))

    in_asyncio(main, caplog)


def test_a_second_cancellation_while_the_guest_stops_forces_the_stop(caplog: pytest.LogCaptureFixture) -> None:
    app = App([Chain], store=(store := Gated()))
    runtime = quick(app)

    async def main() -> None:
        async def host() -> None:
            async with serving_in_asyncio(runtime) as guest:
                guests.append(guest)
                await guest.call(app.gateway.send, Step("a"))
                await guest.call(store.reached.wait)

        guests: list[AsyncioGuest] = []
        task = asyncio.create_task(host())
        await until_stopping(runtime)
        task.cancel()
        await guests[0].call(wait_all_tasks_blocked)
        assert runtime.state is RuntimeState.STOPPING
        task.cancel()
        with pytest.raises(ShutdownDeadlineError):
            await task

    in_asyncio(main, caplog)


def test_a_handler_awaits_an_asyncio_function(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> str:
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert not trio.lowlevel.in_trio_task()
        return task.get_name()

    async def main() -> None:
        app = App([Asking])
        Question.ask = staticmethod(ask)
        async with guest_in(app) as guest:
            result = await guest.call(app.gateway.send_and_wait, Ask("a"))
            state = await guest.call(app.repository.load, result.aggregate_id)
        assert result.error is None
        assert state.state.answers[0].startswith("call test_a_handler_awaits")

    in_asyncio(main, caplog)


def test_an_asyncio_function_of_a_handler_sends_from_inside_the_runtime(caplog: pytest.LogCaptureFixture) -> None:
    """Else the stop, which takes nothing from outside any more, would refuse what a handler that still runs sends."""
    app = App([Asking, Chain])
    runtime = quick(app)

    async def main() -> None:
        asked = asyncio.Event()
        async with serving_in_asyncio(runtime) as guest:

            async def ask() -> str:
                asked.set()
                await until_stopping(runtime)
                return str((await guest.call(app.gateway.send_and_wait, Step("a"))).version)

            Question.ask = staticmethod(ask)
            sent = asyncio.create_task(guest.call(app.gateway.send_and_wait, Ask("a")))
            await asked.wait()
        assert (await sent).error is None

    in_asyncio(main, caplog)


@pytest.mark.parametrize("eager", [False, True])
def test_a_trio_cancellation_cancels_the_asyncio_task_and_waits_for_it(
    eager: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if eager and sys.version_info < (3, 12):
        pytest.skip("eager tasks came with Python 3.12")
    seen: list[str] = []

    async def main() -> None:
        if eager:
            asyncio.get_running_loop().set_task_factory(vars(asyncio)["eager_task_factory"])
        async with guest_in(App([Chain])) as guest:
            asleep = trio.Event()

            async def sleep() -> None:
                assert not trio.lowlevel.in_trio_task()
                asleep.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0)
                    seen.append("cleaned up")

            async def cancel() -> str:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(call_asyncio, sleep)
                    await asleep.wait()
                    nursery.cancel_scope.cancel()
                assert seen == ["cleaned up"]
                with trio.move_on_after(0) as scope:
                    await call_asyncio(sleep)
                return f"cancelled {scope.cancelled_caught}"

            assert await guest.call(cancel) == "cancelled True"

    in_asyncio(main, caplog)
    assert seen == ["cleaned up"]


def test_an_asyncio_task_cancelled_before_its_first_step_calls_nothing(caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []

    async def main() -> None:
        async with guest_in(App([Chain])) as guest:

            async def note() -> None:
                called.append("it")

            async def cancel() -> None:
                async def cancel_it() -> None:
                    nursery.cancel_scope.cancel()

                for _ in range(20):  # Trio runs the two in one step of the loop, in an order that it draws
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(call_asyncio, note)
                        nursery.start_soon(cancel_it)

            await guest.call(cancel)

    in_asyncio(main, caplog)
    assert called == []


def test_what_an_asyncio_function_does_with_its_cancellation_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with guest_in(App([Chain])) as guest:

            async def stubborn(error: Exception | None, scope: trio.CancelScope) -> str:
                scope.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                if error is not None:
                    raise error
                return "result"

            async def call(error: Exception | None) -> str:
                with trio.CancelScope() as scope:
                    return await call_asyncio(stubborn, error, scope)
                return "cancelled"

            assert await guest.call(call, None) == "result"
            with pytest.raises(ValueError, match="x"):
                await guest.call(call, ValueError("x"))

    in_asyncio(main, caplog)


@pytest.mark.parametrize("error", [ValueError("x"), ExceptionGroup("g", [OSError()])])
def test_what_an_asyncio_function_raises_is_raised_in_trio_with_its_traceback(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def asyncio_fail() -> None:
        await asyncio.sleep(0)
        raise error

    async def main() -> None:
        async with guest_in(App([Chain])) as guest:
            raised = await collect(lambda: guest.call(call_asyncio, asyncio_fail))
        assert raised is error
        assert "asyncio_fail" in [frame.name for frame in traceback.extract_tb(raised.__traceback__)]

    in_asyncio(main, caplog)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_asyncio_function_that_ends_its_loop_stops_the_runtime_in_order(error: BaseException) -> None:
    runtime = quick(App([Chain]))
    raised: list[BaseException | None] = []

    async def end_the_loop() -> None:
        raise error

    async def main() -> None:
        async with serving_in_asyncio(runtime) as guest:
            raised.append(await collect(lambda: guest.call(call_asyncio, end_the_loop)))

    assert raised_by(lambda: asyncio.run(main())) is error
    assert raised == [error]
    assert runtime.state is RuntimeState.STOPPED


def test_asyncios_own_cancellation_fails_the_command_and_not_the_runtime(caplog: pytest.LogCaptureFixture) -> None:
    async def cancel_itself() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return "never"

    async def raise_it() -> str:
        raise asyncio.CancelledError

    async def main() -> None:
        app = App([Asking])
        async with guest_in(app) as guest:
            for ask in (cancel_itself, raise_it):
                Question.ask = staticmethod(ask)
                error = (await guest.call(app.gateway.send_and_wait, Ask("a"))).error
                assert error is not None
                assert error.code == "AsyncioCallCancelledError"
                assert ask.__name__ in error.text
            with pytest.raises(AsyncioCallCancelledError) as caught:
                await guest.call(call_asyncio, raise_it)
            assert caught.value.function.endswith("raise_it")
            assert isinstance(caught.value.__cause__, asyncio.CancelledError)

    in_asyncio(main, caplog)


def test_call_asyncio_is_refused_where_there_is_no_guest(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with guest_in(App([Chain])):
            with pytest.raises(RuntimeError, match="await sleep itself"):
                await call_asyncio(asyncio.sleep, 0)

    in_asyncio(main, caplog)
    with pytest.raises(RuntimeError, match="is for Trio code inside serving_in_asyncio"):
        trio.run(call_asyncio, asyncio.sleep, 0)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs SIGUSR1")
def test_the_loops_own_signal_handlers_go_on_beside_a_guest(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        received = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, received.set)
        async with guest_in(App([Chain])) as guest:
            await guest.call(trio.lowlevel.checkpoint)
            signal.raise_signal(signal.SIGUSR1)
            await received.wait()

    in_asyncio(main, caplog)


ASYNCIO_INTERRUPTED = """
import asyncio, signal, sys, trio
from functools import partial
from trio_wow import App
from trio_wow.app import serving_in_asyncio
from chain_domain import Chain, Step
from trio_wow.eventsourcing import InMemoryEventStore
class Slow(InMemoryEventStore):
    async def append(self, stream):
        # From a callback of the loop, so that it is known where Python is when the signal arrives.
        interrupt = partial(asyncio.get_running_loop().call_soon, signal.raise_signal, signal.SIGINT)
        interrupt()
        while runtime.state.name == "RUNNING":
            await trio.sleep(0.01)
        if sys.argv[1] == "twice":
            interrupt()
            await trio.sleep_forever()
        await super().append(stream)
        print("appended", flush=True)
app = App([Chain], store=Slow(App([Chain]).domain.serializer))
runtime = app.runtime(signals=False, shutdown_quiet_period=0)
async def main():
    asyncio.get_running_loop().slow_callback_duration = 1e6
    try:
        async with serving_in_asyncio(runtime) as guest:
            await guest.call(app.gateway.send, Step("a"))
            await asyncio.Event().wait()
    finally:
        print(type(sys.exc_info()[1]).__name__, runtime.state.name, len(asyncio.all_tasks()))
try:
    if sys.argv[2] == "run":
        asyncio.run(main())
    else:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(main())
        finally:
            loop.close()
except* KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(("host", "raised"), [("run", "CancelledError"), ("loop", "BaseExceptionGroup")])
def test_ctrl_c_in_an_asyncio_program_stops_the_runtime_in_order(
    host: str, raised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_process(ASYNCIO_INTERRUPTED, monkeypatch, "once", host) as process:
        assert process.finish() == (0, f"appended\n{raised} STOPPED 1\ninterrupted\n", "")


def test_a_second_ctrl_c_in_an_asyncio_program_forces_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_process(ASYNCIO_INTERRUPTED, monkeypatch, "twice", "run") as process:
        code, output, errors = process.finish()
    assert (code, output) == (0, "ShutdownDeadlineError STOPPED 1\ninterrupted\n")
    assert "the stop was forced by force_stop()" in errors


def vote(port: int, option: str) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(f"{option}\n".encode())
        with client.makefile() as lines:
            return int(lines.readline())


def test_the_asyncio_example_serves_many_clients_and_stops_in_order_at_ctrl_c() -> None:
    # Not in development mode: there asyncio complains of what is slow, and nothing may fail on speed.
    with PythonProcess("-W", "error", EXAMPLES / "asyncio_server.py", "0") as process:
        port = int(process.read_until("port").split()[1])
        versions = in_threads(40, lambda number: vote(port, "tea" if number % 2 else "coffee"))
        assert sorted(versions) == sorted([*range(1, 21), *range(1, 21)])
        process.send(signal.SIGINT)
        code, output, errors = process.finish()
    *announced, results = output.splitlines()
    assert (code, errors) == (0, "")
    assert sorted(announced) == ["a vote for coffee"] * 20 + ["a vote for tea"] * 20
    assert results in {"{'tea': 20, 'coffee': 20}", "{'coffee': 20, 'tea': 20}"}


# The page


PAGE = (EXAMPLES.parents[1] / "docs/embedding.md").read_text()


@pytest.mark.parametrize("shown", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_the_page_shows_what_the_examples_say(shown: str) -> None:
    assert any(shown in example.read_text() for example in EXAMPLES.glob("*.py"))
