"""The command gateway: admission, sending, waiting."""

from functools import partial
from typing import Any

import pytest
import trio
from attrs import frozen
from chain_domain import Chain, Step, Twice
from support import collect
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow import App, CommandGateway
from trio_wow.buses import InMemoryCommandBus
from trio_wow.domain import Domain
from trio_wow.errors import (
    AdmissionClosedError,
    InvalidIdentifierError,
    NoSubscriberError,
    RuntimeStateError,
    SerializationError,
    ShutdownDeadlineError,
    UnroutableCommandError,
    WaitAbandonedError,
    WaitTimeoutError,
)
from trio_wow.eventsourcing import InMemoryEventStore
from trio_wow.execution import KeyedExecutor
from trio_wow.messages import CommandMessage, DomainEventStream, Stage
from trio_wow.runtime import Runtime


class Gated(InMemoryEventStore):
    """Appends only after `gate` was set."""

    def __init__(self, domain: Domain) -> None:
        super().__init__(domain.serializer)
        self.gate = trio.Event()

    async def append(self, stream: DomainEventStream) -> None:
        await self.gate.wait()
        await super().append(stream)


def gated() -> tuple[App, Gated]:
    domain = Domain([Chain])
    store = Gated(domain)
    return App(domain, store=store), store


def quick(app: App, **options: Any) -> Runtime:
    return app.runtime(**{"signals": False, "shutdown_quiet_period": 0, **options})


async def test_sent_says_that_the_bus_has_taken_it(autojump_clock: MockClock) -> None:
    app, store = gated()
    async with app.serving(quick(app)) as gateway:
        sent = await gateway.send(Step("a"), request_id="r")
        assert (sent.stage, sent.request_id, sent.version, sent.error) == (Stage.SENT, "r", None, None)
        assert str(sent.aggregate_id) == "chains.chain/a"
        also = await gateway.send_and_wait(Step("a"), until=Stage.SENT)
        assert also.stage is Stage.SENT
        store.gate.set()


async def test_processed_comes_with_the_version() -> None:
    app = App([Chain])
    async with app.serving(quick(app)) as gateway:
        result = await gateway.send_and_wait(Step("a"))
        assert (result.stage, result.version) == (Stage.PROCESSED, 1)
        assert result.raise_for_error() is result
    assert not gateway.results.waiting


async def test_fs21_a_wait_ends_at_its_deadline_and_the_command_goes_on(autojump_clock: MockClock) -> None:
    app, store = gated()
    async with app.serving(quick(app)) as gateway:
        start = trio.current_time()
        with pytest.raises(WaitTimeoutError, match=r"did not reach PROCESSED within 3 s; it may still be handled"):
            await gateway.send_and_wait(Step("a"), timeout=3)
        assert trio.current_time() - start == 3
        assert not gateway.results.waiting
        store.gate.set()  # a late result is dropped
        assert (await gateway.send_and_wait(Step("a"))).version == 2


async def test_fs21_the_deadline_covers_the_sending_too(autojump_clock: MockClock) -> None:
    app, store = gated()
    async with app.serving(quick(app, executor=KeyedExecutor(max_in_flight=1))) as gateway:
        await gateway.send(Step("a"))
        start = trio.current_time()
        with pytest.raises(WaitTimeoutError):
            await gateway.send_and_wait(Step("b"), timeout=2)
        assert trio.current_time() - start == 2
        store.gate.set()
    assert len(await store.read_all(0, 9)) == 1  # b was never sent


async def test_fs21_a_cancelled_wait_leaves_nothing_behind(autojump_clock: MockClock) -> None:
    app, store = gated()
    async with app.serving(quick(app)) as gateway:
        async with trio.open_nursery() as nursery:
            for n in range(100):
                nursery.start_soon(gateway.send_and_wait, Step(str(n)))
            await wait_all_tasks_blocked()
            assert gateway.results.waiting == 100
            nursery.cancel_scope.cancel()
        assert not gateway.results.waiting
        store.gate.set()


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
async def test_a_timeout_that_is_not_positive_is_refused(timeout: float) -> None:
    app = App([Chain])
    async with app.serving(quick(app)) as gateway:
        with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
            await gateway.send_and_wait(Step("a"), timeout=timeout)


@pytest.mark.parametrize("until", ["PROCESSED", None])
async def test_what_is_no_stage_is_refused(until: Any) -> None:
    app = App([Chain])
    async with app.serving(quick(app)) as gateway:
        with pytest.raises(TypeError, match="until must be a Stage, not"):
            await gateway.send_and_wait(Step("a"), until=until)


@frozen
class Unknown:
    id: str


@pytest.mark.parametrize(
    ("command", "options", "error"),
    [
        (Unknown("a"), {}, UnroutableCommandError),
        ("text", {}, UnroutableCommandError),
        (Step(""), {}, InvalidIdentifierError),
        (Step("a"), {"request_id": "a\0b"}, InvalidIdentifierError),
        (Step("a"), {"tenant": " "}, InvalidIdentifierError),
        (Step("a", 2**64), {}, SerializationError),
    ],
)
async def test_a_bad_command_is_refused_before_anything_is_sent(
    command: object, options: dict[str, str], error: type[Exception]
) -> None:
    app = App([Chain])
    async with app.serving(quick(app)) as gateway:
        with pytest.raises(error):
            await gateway.send(command, **options)  # type: ignore[arg-type]
        with pytest.raises(error):
            await gateway.send_and_wait(command, **options)  # type: ignore[arg-type]
        assert not gateway.results.waiting
    assert list(await app.store.read_all(0, 9)) == []


async def test_it_refuses_before_the_runtime_runs_and_after_its_stop_was_requested() -> None:
    app, store = gated()
    with pytest.raises(AdmissionClosedError, match="command-gateway takes nothing"):
        await app.gateway.send(Step("a"))
    runtime = quick(app)
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.serve)
        await app.gateway.send(Step("a"))
        runtime.request_stop()
        with pytest.raises(AdmissionClosedError):
            await app.gateway.send(Step("b"))
        store.gate.set()
    with pytest.raises(AdmissionClosedError):
        await app.gateway.send(Step("c"))
    assert len(await store.read_all(0, 9)) == 1


async def test_a_send_that_waits_for_room_when_the_stop_is_requested_is_refused() -> None:
    app, store = gated()
    runtime = quick(app, executor=KeyedExecutor(max_in_flight=1))
    caught: list[BaseException | None] = []

    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.serve)
        await app.gateway.send(Step("a"))
        nursery.start_soon(collect, partial(app.gateway.send, Step("b")), caught)
        await wait_all_tasks_blocked()
        runtime.request_stop()
        await wait_all_tasks_blocked()
        store.gate.set()
    assert isinstance(caught[0], AdmissionClosedError)
    assert len(await store.read_all(0, 9)) == 1


async def test_a_send_whose_receivers_leave_at_the_stop_is_refused_not_unreceived() -> None:
    app = App([Chain])
    runtime = quick(app)
    caught: list[BaseException | None] = []

    class Leaving(InMemoryCommandBus):
        async def send_if_subscribed(self, message: CommandMessage) -> bool:
            runtime.request_stop()
            await runtime.wait_stopped()
            return await super().send_if_subscribed(message)

    app._commands = app.gateway._bus = Leaving()
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.serve)
        nursery.start_soon(collect, partial(app.gateway.send, Step("a")), caught)
    assert isinstance(caught[0], AdmissionClosedError)


async def test_results_still_arrive_while_the_runtime_stops() -> None:
    app, store = gated()
    runtime = quick(app)
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.serve)
        versions: list[int | None] = []

        async def wait() -> None:
            versions.append((await app.gateway.send_and_wait(Twice("a"))).version)

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        runtime.request_stop()
        await wait_all_tasks_blocked()
        store.gate.set()
    assert versions == [1]


async def test_whoever_still_waits_at_a_forced_stop_is_told(autojump_clock: MockClock) -> None:
    app, _ = gated()
    runtime = quick(app, shutdown_timeout=1)
    caught: list[BaseException | None] = []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(collect, runtime.serve, caught)
        await wait_all_tasks_blocked()
        nursery.start_soon(collect, partial(app.gateway.send_and_wait, Step("a")), caught)
        await wait_all_tasks_blocked()
        runtime.request_stop()
    assert {type(error) for error in caught} == {WaitAbandonedError, ShutdownDeadlineError}


async def test_a_command_that_nobody_receives_is_an_error() -> None:
    gateway = CommandGateway(Domain([Chain]), InMemoryCommandBus())
    runtime = Runtime([gateway], signals=False, shutdown_quiet_period=0)
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.serve)
        with pytest.raises(NoSubscriberError, match="nobody receives commands for chains.chain/a"):
            await gateway.send(Step("a"))
        runtime.request_stop()


async def test_a_gateway_belongs_to_one_runtime_at_a_time() -> None:
    gateway = CommandGateway(Domain([Chain]), InMemoryCommandBus())
    first, second = (Runtime([gateway], signals=False, shutdown_quiet_period=0) for _ in range(2))
    async with trio.open_nursery() as nursery:
        await nursery.start(first.serve)
        with pytest.raises(
            RuntimeStateError, match="command-gateway belongs to another runtime until that has stopped"
        ):
            await second.serve()
        with pytest.raises(NoSubscriberError):
            await gateway.send(Step("a"))  # still the first one's
        first.request_stop()
