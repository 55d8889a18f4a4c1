"""Functions of aggregates and processors run where their profiles say, in the order of their priority."""

import contextvars
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, frozen
from support import collect
from thread_support import PATIENCE, Gates, borrowed, states, until
from trio.testing import wait_all_tasks_blocked

from trio_wow import (
    App,
    KeyedExecutor,
    StateEvent,
    aggregate,
    event_processor,
    on_command,
    on_error,
    on_event,
    on_sourcing,
    on_state_event,
    projection,
    saga,
)
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.buses import InMemoryCommandBus, InMemoryDomainEventBus
from trio_wow.dispatch import CommandDispatcher, FunctionRegistry, Handling
from trio_wow.domain import Domain
from trio_wow.errors import ShutdownDeadlineError, WaitAbandonedError
from trio_wow.eventsourcing import InMemoryEventStore
from trio_wow.execution import ExecPool, blocking, direct, inline, synchronous
from trio_wow.runtime import Runtime, RuntimeContext

pytestmark = pytest.mark.adaptive


@frozen
class Do:
    id: str


@frozen
class DoSlowly:
    id: str


@frozen
class Fail:
    id: str


@frozen
class Done: ...


@aggregate(context="things")
@define
class Thing:
    id: str
    times: int = 0

    @on_command
    def do(self, command: Do) -> Done:
        return Done()

    @on_command
    async def do_slowly(self, command: DoSlowly) -> Done:
        return Done()

    @on_command
    def fail(self, command: Fail) -> Done:
        raise ValueError(command)

    @on_error
    def failed(self, error: ValueError, command: Fail) -> None: ...

    @on_sourcing
    def done(self, event: Done) -> None:
        self.times += 1


@event_processor
class Mails:
    @on_event
    def on_done(self, event: Done) -> None: ...

    @on_event
    async def asynchronously(self, event: Done) -> None: ...

    @on_state_event
    def on_state(self, event: StateEvent[Thing]) -> None: ...


@projection
class View:
    def __init__(self) -> None:
        self.inside: list[bool] = []

    @on_event
    def on_done(self, event: Done) -> None:
        self.inside.append(trio.lowlevel.in_trio_task())

    @on_state_event
    @blocking
    def on_state(self, event: StateEvent[Thing]) -> None:
        self.inside.append(trio.lowlevel.in_trio_task())


@projection
class Rows:
    @on_event
    def on_done(self, event: Done, connection: sqlite3.Connection) -> None: ...


@saga
class Answers:
    @on_event
    def on_done(self, event: Done) -> None: ...

    @on_state_event
    def on_state(self, event: StateEvent[Thing]) -> None: ...


PLAIN = {
    "Thing.do",
    "Thing.fail",
    "Thing.failed",
    "Mails.on_done",
    "Mails.on_state",
    "View.on_done",
    "View.on_state",
    "Rows.on_done",
    "Answers.on_done",
    "Answers.on_state",
}
ASYNC = {"Thing.do_slowly", "Mails.asynchronously"}


def test_every_function_that_is_registered_has_a_profile() -> None:
    registry = FunctionRegistry(Domain([Thing]), transaction_type=sqlite3.Connection)
    for processor in (Mails(), View(), Rows(), Answers()):
        registry.register(processor)
    registry.seal()
    profiles = {profile.name: profile for profile in registry.profiles()}
    built_in = {"Thing.DeleteAggregate", "Thing.RecoverAggregate"}
    assert profiles.keys() == PLAIN | ASYNC | built_in
    assert {name for name, profile in profiles.items() if profile.is_async} == ASYNC
    assert {name: profile.exec_class.value for name, profile in profiles.items() if profile.pinned} == {
        "View.on_done": "inline",  # what a projection changes in memory is shared by all aggregates
        "View.on_state": "pool",
        "Rows.on_done": "pool",  # the store's own thread
        **dict.fromkeys(ASYNC | built_in, "inline"),
    }


async def test_every_function_that_runs_is_classified_and_measured(tmp_path: Path) -> None:
    domain, view = Domain([Thing]), View()
    executor = KeyedExecutor(workers=2)
    store = SqliteStore(tmp_path / "things.db", domain.serializer)
    app = App(domain, [Mails(), view, Rows(), Answers()], store=store)
    async with app.serving(app.runtime(executor=executor, shutdown_quiet_period=0)) as gateway:
        for command in (Do("a"), DoSlowly("a"), Fail("a")):
            await gateway.send_and_wait(command)
        await until(lambda: {each.name for each in measured(executor)} == PLAIN)
    assert {*view.inside} == {True, False}


def measured(executor: KeyedExecutor) -> list[Any]:
    return [each for each in executor.statistics().functions if each.samples]


@asynccontextmanager
async def one_event(processor: object, executor: KeyedExecutor) -> AsyncIterator[App]:
    """Let an event happen, and the processor handle it until the block is left."""
    app = App([Thing], [processor])
    with trio.fail_after(PATIENCE):
        async with app.serving(app.runtime(executor=executor, shutdown_quiet_period=0)) as gateway:
            await gateway.send_and_wait(DoSlowly("a"))
            yield app


async def test_fs10_a_stop_does_not_wait_for_a_thread_and_its_late_event_is_not_stored(
    gates: Gates, caplog: pytest.LogCaptureFixture
) -> None:
    @aggregate(context="stuck")
    @define
    class Stuck:
        id: str

        @on_command
        @blocking
        def do(self, command: Do) -> Done:
            gates.compute(command.id)
            return Done()

        @on_sourcing
        def done(self, event: Done) -> None: ...

    domain = Domain([Stuck])
    store, executor = InMemoryEventStore(domain.serializer), KeyedExecutor(workers=1)
    app = App(domain, store=store)
    runtime = app.runtime(executor=executor, signals=False, shutdown_timeout=0.1, shutdown_quiet_period=0)
    outcome: list[BaseException | None] = []
    waited: list[BaseException | None] = []
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime_started, runtime, outcome)
            nursery.start_soon(collect, partial(app.gateway.send_and_wait, Do("a")), waited)
            await gates.arrival("a")
            runtime.request_stop()
    assert isinstance(outcome[0], ShutdownDeadlineError)
    assert isinstance(waited[0], WaitAbandonedError)
    assert any("abandoned the thread of handler Stuck.do for key stuck.stuck/a" in line for line in caplog.messages)
    assert (borrowed(executor), gates.inside) == (1, ["a"])
    gates.open("a")
    await until(lambda: not borrowed(executor))
    await until(lambda: executor.statistics().late_results == 1)
    assert await store.read_all(0, 10) == []


async def runtime_started(
    runtime: Runtime, outcome: list[BaseException | None], *, task_status: trio.TaskStatus[Any]
) -> None:
    await collect(partial(runtime.serve, task_status=task_status), outcome)


class TestOrder:
    @pytest.mark.parametrize("pin", [inline, direct, blocking])
    async def test_functions_start_in_the_order_of_their_priority(self, pin: Callable[[Any], Any]) -> None:
        started: list[str] = []

        def note(name: str) -> Callable[[Any, Done], None]:
            def function(self: object, event: Done) -> None:
                started.append(name)

            return pin(function)  # type: ignore[no-any-return]

        @event_processor
        class Ordered:
            lowest = on_event(priority=-1)(note("lowest"))
            first_of_two = on_event(note("first of two"))
            second_of_two = on_event(note("second of two"))
            highest = on_event(priority=7)(note("highest"))
            high = on_event(priority=3)(note("high"))

        # One token: what has entered the pool first starts first.
        async with one_event(Ordered(), KeyedExecutor(workers=1, pool=ExecPool(1))):
            await until(lambda: len(started) == 5)
        assert started == ["highest", "high", "first of two", "second of two", "lowest"]

    async def test_pooled_ones_run_beside_the_others_and_the_event_is_finished_when_all_have(
        self, gates: Gates
    ) -> None:
        ended: list[str] = []

        @event_processor
        class Mixed:
            @on_event(priority=3)
            @blocking
            def slow(self, event: Done) -> None:
                gates.compute("slow")
                ended.append("slow")

            @on_event(priority=2)
            @inline
            def quick(self, event: Done) -> None:
                ended.append("quick")

            @on_event(priority=1)
            async def waits(self, event: Done) -> None:
                await trio.lowlevel.checkpoint()
                ended.append("waits")

        executor = KeyedExecutor(workers=1)
        async with one_event(Mixed(), executor):
            await gates.arrival("slow")
            await until(lambda: len(ended) == 2)
            await wait_all_tasks_blocked()
            in_flight = [each.in_flight for each in executor.statistics().dispatches]
            gates.open("slow")
            assert max(in_flight) == 1
            await until(lambda: len(ended) == 3)
            assert ended == ["quick", "waits", "slow"]
            await until(lambda: not any(each.in_flight for each in executor.statistics().dispatches))

    @pytest.mark.parametrize("pin", [inline, direct, blocking])
    @pytest.mark.parametrize("full", [False, True])
    @pytest.mark.parametrize("fails", [False, True])
    async def test_one_that_blocks_keeps_lower_ones_out_wherever_it_runs_and_however_it_ends(
        self, pin: Callable[[Any], Any], full: bool, fails: bool
    ) -> None:
        called: list[str] = []

        def blocks(self: object, event: Done) -> None:
            called.append("blocks")
            if fails:
                raise ValueError("mine")

        @event_processor
        class Blocking:
            above = on_event(priority=2)(inline(lambda_of(called, "above")))
            blocks_the_rest = on_event(priority=1, block=True)(pin(blocks))
            beside = on_event(priority=1)(inline(lambda_of(called, "beside")))
            below = on_event(inline(lambda_of(called, "below")))

        pool = ExecPool(1, 0)
        if full:
            pool.try_submit()
        async with one_event(Blocking(), KeyedExecutor(workers=1, pool=pool)):
            await until(lambda: "beside" in called)
        assert called[0] == "above"
        assert {*called} == {"above", "blocks", "beside"}

    async def test_two_in_the_pool_have_contexts_of_their_own(self) -> None:
        var = contextvars.ContextVar("var", default="unset")
        both = threading.Barrier(2)
        seen: dict[str, tuple[str, str]] = {}

        def note(name: str) -> None:
            before = var.get()
            var.set(name)
            both.wait(PATIENCE)
            seen[name] = before, var.get()

        @event_processor
        class Two:
            @on_event(priority=2)
            @inline
            def sets(self, event: Done) -> None:
                var.set("by another function")

            @on_event
            @blocking
            def one(self, event: Done) -> None:
                note("one")

            @on_event
            @blocking
            def other(self, event: Done) -> None:
                note("other")

        async with one_event(Two(), KeyedExecutor(workers=1)):
            await until(lambda: len(seen) == 2)
        assert seen == {"one": ("unset", "one"), "other": ("unset", "other")}

    async def test_what_the_pool_has_no_room_for_runs_directly_beside_it(self) -> None:
        both = threading.Barrier(2)
        seen: list[tuple[int, list[str]]] = []
        executor = KeyedExecutor(workers=1, pool=ExecPool(1, 0))

        def look() -> None:
            both.wait(PATIENCE)
            seen.append((borrowed(executor), trio.from_thread.run_sync(states, executor)))
            both.wait(PATIENCE)

        @event_processor
        class Two:
            @on_event
            @blocking
            def one(self, event: Done) -> None:
                look()

            @on_event
            @blocking
            def other(self, event: Done) -> None:
                look()

        async with one_event(Two(), executor):
            await until(lambda: len(seen) == 2)
        assert seen == [(1, ["held"])] * 2

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"priority": 1.5}, "priority must be an int, not 1.5"),
            ({"priority": True}, "priority must be an int, not True"),
            ({"block": 1}, "block must be True or False, not 1"),
        ],
    )
    @pytest.mark.parametrize("decorator", [on_event, on_state_event])
    def test_what_is_no_priority_is_refused(self, decorator: Any, wrong: dict[str, Any], said: str) -> None:
        with pytest.raises(TypeError, match=said):
            decorator(**wrong)


def lambda_of(called: list[str], name: str) -> Callable[[object, Done], None]:
    def function(self: object, event: Done) -> None:
        called.append(name)

    return function


@pytest.mark.parametrize("pin", [lambda function: function, direct, blocking])
async def test_one_message_can_be_handled_on_the_loop_alone(pin: Callable[[Any], Any]) -> None:
    on_the_loop: list[bool] = []

    def decide(self: object, command: Do) -> Done:
        on_the_loop.append(trio.lowlevel.in_trio_task())
        return Done()

    @aggregate(context="here")
    @define
    class Here:
        id: str
        do = on_command(pin(decide))

        @on_sourcing
        def done(self, event: Done) -> None: ...

    domain = Domain([Here])
    store = InMemoryEventStore(domain.serializer)
    dispatcher = CommandDispatcher(domain, InMemoryCommandBus(), store, InMemoryDomainEventBus())
    async with trio.open_nursery() as nursery:
        await dispatcher.prepare(RuntimeContext(nursery))
        with synchronous():
            assert await dispatcher.handle(Handling(dispatcher.name, domain.command_message(Do("a"))))
        assert await dispatcher.handle(Handling(dispatcher.name, domain.command_message(Do("a"))))
    assert on_the_loop == [True, False]
    assert len(await store.read_all(0, 9)) == 2
