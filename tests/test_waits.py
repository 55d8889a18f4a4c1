"""Functions that wait for other commands, from their threads and on the loop. FS-11 of the field cases."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio
from attrs import define, frozen
from thread_support import PATIENCE, borrowed, states, until

from trio_wow import App, Headers, KeyedExecutor, aggregate, on_command, on_sourcing
from trio_wow.buses import MessageExchange
from trio_wow.dispatch._waits import WAITS, _read
from trio_wow.errors import AdmissionClosedError, WaitAbandonedError
from trio_wow.execution import ExecPool, blocking, direct, lent
from trio_wow.messages import CommandMessage

pytestmark = pytest.mark.adaptive


@frozen
class Ask:
    """Let `id` wait for a command to each of the others in turn."""

    id: str
    others: tuple[str, ...] = ()


@frozen
class AskAsync:
    id: str
    others: tuple[str, ...] = ()


@frozen
class HandOn:
    """Send a command to `id`'s friend, with the headers of this one."""

    id: str


@frozen
class Fail:
    id: str


class Failed(BaseException):
    """Ends the runtime."""


@frozen
class Asked:
    headers: str


async def follow(command: object) -> Any:
    async with Asking.gateway.stream(command, timeout=PATIENCE / 2) as signals:
        return [result async for result in signals][-1]


async def send_and_wait(command: object) -> Any:
    return await Asking.gateway.send_and_wait(command)


class Asking:
    """Where the functions find the gateway of the test."""

    gateway: Any = None
    way: Callable[[Any], Any] = staticmethod(send_and_wait)
    barrier: threading.Barrier | None = None


def ask(command: Ask) -> None:
    if command.others:
        if Asking.barrier is not None:
            Asking.barrier.wait(PATIENCE)
        result = trio.from_thread.run(Asking.way, Ask(command.others[0], command.others[1:]))
        result.raise_for_error()


def made(pin: Callable[[Any], Any]) -> type:
    @aggregate(context="asking")
    @define
    class Asker:
        id: str

        @on_command
        @pin
        def ask(self, command: Ask, message: CommandMessage) -> Asked:
            if command.others == ("hand on",):
                trio.from_thread.run(Asking.gateway.send_and_wait, HandOn("b")).raise_for_error()
            else:
                ask(command)
            return Asked(message.headers.get(WAITS, ""))

        @on_command
        async def ask_async(self, command: AskAsync) -> Asked:
            other = AskAsync(command.others[0], command.others[1:])
            (await Asking.gateway.send_and_wait(other)).raise_for_error()
            return Asked("")

        @on_command
        async def hand_on(self, command: HandOn, headers: Headers) -> Asked:
            await Asking.gateway.send(Ask("friend", ("a",)), headers=headers)
            return Asked("")

        @on_command
        async def fail(self, command: Fail) -> Asked:
            raise Failed

        @on_sourcing
        def asked(self, event: Asked) -> None: ...

    return Asker


@pytest.mark.parametrize("pin", [direct, blocking])
class TestThreads:
    @pytest.fixture(params=[send_and_wait, follow], autouse=True)
    def way(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Asking, "way", staticmethod(request.param))

    async def test_fs11_two_that_wait_for_two_others_of_their_kind_do_not_lock(
        self, pin: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        executor = KeyedExecutor(workers=2, pool=ExecPool(2, 2))
        app = App([made(pin)])
        monkeypatch.setattr(Asking, "barrier", threading.Barrier(2))
        results: list[Any] = []

        async def send(command: Ask) -> None:
            results.append(await gateway.send_and_wait(command))

        with trio.fail_after(PATIENCE):
            async with app.serving(app.runtime(executor=executor, shutdown_quiet_period=0)) as gateway:
                Asking.gateway = gateway
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send, Ask("a", ("c",)))
                    nursery.start_soon(send, Ask("b", ("d",)))
                await until(lambda: not borrowed(executor) and {*states(executor)} == {"idle"})
        assert [result.error for result in results] == [None, None]
        seen = executor.statistics().pool
        assert seen is not None
        assert (seen.lent, seen.queued) == (0, 0)

    @pytest.mark.parametrize("others", [("a",), ("b", "a"), ("b", "c", "b")])
    async def test_fs11_a_wait_for_one_that_waits_fails_at_once_and_its_mailbox_goes_on(
        self, pin: Callable[[Any], Any], others: tuple[str, ...]
    ) -> None:
        executor = KeyedExecutor(workers=2, pool=ExecPool(2, 2))
        app = App([made(pin)])
        with trio.fail_after(PATIENCE):
            async with app.serving(app.runtime(executor=executor, shutdown_quiet_period=0)) as gateway:
                Asking.gateway = gateway
                result = await gateway.send_and_wait(Ask("a", others))
                assert result.error is not None
                assert "SelfWaitError" in str(result.error) or "would never end" in str(result.error)
                assert (await gateway.send_and_wait(Ask("a"))).error is None

    async def test_fs11_after_the_runtime_has_stopped_a_call_back_is_refused(self, pin: Callable[[Any], Any]) -> None:
        app = App([made(pin)])
        executor = KeyedExecutor(workers=1)
        async with app.serving(app.runtime(executor=executor, shutdown_quiet_period=0)) as gateway:
            Asking.gateway = gateway
        with pytest.raises(AdmissionClosedError):
            await trio.to_thread.run_sync(ask, Ask("a", ("b",)))


async def test_on_the_loop_it_fails_at_once_as_well() -> None:
    app = App([made(blocking)])
    async with app.serving(app.runtime(shutdown_quiet_period=0)) as gateway:
        Asking.gateway = gateway
        result = await gateway.send_and_wait(AskAsync("a", ("a",)))
        assert "asking.asker/a waits" in str(result.error) or "asking/asker/a" in str(result.error)


async def test_a_task_that_outlives_its_function_may_wait_for_its_aggregate() -> None:
    app = App([made(blocking)])
    done: list[Any] = []

    class Later:
        async def send_and_wait(self, command: AskAsync) -> Any:
            nursery.start_soon(self.later)  # in the context of the function
            return await gateway.send_and_wait(Ask("b"))

        async def later(self) -> None:
            await go.wait()
            done.append(await gateway.send_and_wait(Ask("a")))

    go = trio.Event()
    async with app.serving(app.runtime(shutdown_quiet_period=0)) as gateway, trio.open_nursery() as nursery:
        Asking.gateway = Later()
        assert (await gateway.send_and_wait(AskAsync("a", ("x",)))).error is None
        go.set()
    assert done[0].error is None


@pytest.mark.parametrize("pin", [direct, blocking])
async def test_a_command_whose_function_is_interrupted_is_not_acknowledged(
    pin: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledged: list[Any] = []
    waiting, ended = trio.Event(), trio.Event()

    class Waiting:
        async def send_and_wait(self, command: Ask) -> Any:
            waiting.set()
            await lent(trio.sleep_forever)

    async def acknowledge(exchange: MessageExchange[Any]) -> None:
        acknowledged.append(exchange.message.aggregate_id.id)

    async def send_and_wait() -> None:
        with pytest.raises(WaitAbandonedError):
            await gateway.send_and_wait(Ask("a", ("b",)))
        ended.set()

    monkeypatch.setattr(MessageExchange, "acknowledge", acknowledge)
    monkeypatch.setattr(Asking, "gateway", Waiting())
    app = App([made(pin)])

    with trio.fail_after(PATIENCE), pytest.RaisesGroup(Failed, flatten_subgroups=True, allow_unwrapped=True):
        async with (
            app.serving(app.runtime(executor=KeyedExecutor(workers=2), shutdown_quiet_period=0)) as gateway,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(send_and_wait)
            await waiting.wait()
            await gateway.send(Fail("c"))
    assert ended.is_set()
    assert acknowledged == []


@pytest.mark.parametrize("text", [None, "", "{}", "7", "nonsense", '["a"]', "[[1, []]]", "[" * 100_000])
def test_headers_that_make_no_sense_are_no_chain(text: str | None) -> None:
    assert _read(text) == ()


async def test_a_header_that_makes_no_sense_does_not_end_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App([made(blocking)])
    monkeypatch.setattr("trio_wow.gateway._gateway.WAITS", "none")  # as another program may send it
    async with app.serving(app.runtime(shutdown_quiet_period=0)) as gateway:
        result = await gateway.send_and_wait(Ask("a"), headers={WAITS: "[" * 100_000})
        assert result.error is None


async def test_who_is_sent_a_command_with_the_headers_of_another_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App([made(blocking)])
    async with app.serving(app.runtime(shutdown_quiet_period=0)) as gateway:
        Asking.gateway = gateway
        assert (await gateway.send_and_wait(Ask("a", ("hand on",)))).error is None
    assert "SelfWaitError" not in caplog.text
