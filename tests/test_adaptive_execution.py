"""Plain functions that run where their speed says: on the event loop, in a thread with a worker, or in the pool."""

import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.lowlevel
from support import EndlessSource, ListSource, collect, first, task_names
from thread_support import PATIENCE, Gates, borrowed, dispatches, queued, states, until
from trio.testing import wait_all_tasks_blocked

from trio_wow.errors import ExecutorClosedError, HandlerInterruptedError
from trio_wow.execution import (
    AdaptiveSettings,
    ExecPool,
    ExecProfile,
    KeyedExecutor,
    blocking,
    direct,
    inline,
    lent,
    synchronous,
)

pytestmark = pytest.mark.adaptive


class Timed:
    """A handler that takes as long as it is told, on a clock of its own, and notes where it runs."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.takes = 0.0001
        self.wheres: list[str] = []
        self.executor = KeyedExecutor(perf_counter=lambda: self.now, **options)

    def __call__(self, item: object) -> None:
        if trio.lowlevel.in_trio_task():
            where = "inline"
        else:
            # The worker of the item, and with one worker that of the executor, is held or not.
            where = "direct" if "held" in trio.from_thread.run_sync(states, self.executor) else "pool"
        self.wheres.append(where)
        self.now += self.takes

    async def run(self, *takes: float) -> list[str]:
        self.wheres.clear()
        for self.takes in takes:
            await self.executor.dispatch(ListSource([1]), key=lambda _: "key", handler=self)
        return self.wheres


class Marked:
    """Handlers of each kind that a dispatch can be given."""

    def method(self, item: object) -> None: ...

    @classmethod
    def of_class(cls, item: object) -> None: ...

    @staticmethod
    def static(item: object) -> None: ...

    def __call__(self, item: object) -> None: ...


HANDLERS: list[Any] = [
    lambda item: None,
    Marked().method,
    Marked.of_class,
    Marked.static,
    Marked(),
    partial(Marked().method),
    [].append,
    print,
    inline(lambda item: None),
    direct(lambda item: None),
    blocking(lambda item: None),
]


class TestRawHandlers:
    @pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: getattr(handler, "__qualname__", "object"))
    async def test_every_kind_of_handler_is_classified_and_measured(self, handler: Any) -> None:
        executor = KeyedExecutor(workers=1)
        samples: list[int] = []

        async def source() -> AsyncIterator[str]:
            yield ""
            while not (seen := [each.samples for each in executor.statistics().functions]) or not seen[0]:
                await trio.lowlevel.checkpoint()
            samples.extend(seen)

        with trio.fail_after(PATIENCE):
            await executor.dispatch(source(), key=lambda item: item, handler=handler)
        assert samples == [1]

    async def test_a_new_one_begins_in_the_pool_and_comes_to_the_loop_when_it_is_known_to_be_quick(self) -> None:
        timed = Timed(workers=1)
        assert await timed.run(*[0.0001] * 34) == ["pool"] * 32 + ["inline"] * 2

    async def test_one_of_some_milliseconds_runs_directly(self) -> None:
        timed = Timed(workers=1)
        assert await timed.run(*[0.002] * 34) == ["pool"] * 32 + ["direct"] * 2

    async def test_a_slow_one_stays_in_the_pool(self) -> None:
        timed = Timed(workers=1)
        assert await timed.run(*[0.06] * 40) == ["pool"] * 40

    async def test_fs08_one_that_has_become_slow_holds_the_loop_once(self) -> None:
        timed = Timed(workers=1)
        assert await timed.run(*[0.0001] * 32) == ["pool"] * 32
        assert await timed.run(*[1.5] * 20) == ["inline"] + ["pool"] * 19

    async def test_a_pause_of_the_garbage_collector_is_not_its_own_time(self) -> None:
        settings = AdaptiveSettings(inline_limit=0.2, fast=0.2, slow=0.25, very_slow=0.3)
        executor = KeyedExecutor(adaptive=settings)
        wheres: list[bool] = []
        collecting = False

        def take_long(phase: str, _: object) -> None:
            if collecting and phase == "start":
                threading.Event().wait(settings.inline_limit + 0.1)

        def handler(n: int) -> None:
            nonlocal collecting
            wheres.append(trio.lowlevel.in_trio_task())
            if n == 32:
                collecting = True
                gc.collect()
                collecting = False

        gc.callbacks.append(take_long)
        try:
            await executor.dispatch(ListSource(range(34)), key=lambda _: "key", handler=handler)
        finally:
            gc.callbacks.remove(take_long)
        assert wheres == [False] * 32 + [True] * 2
        assert [each.promotions for each in executor.statistics().functions] == [0]

    async def test_its_class_changes_from_item_to_item_of_one_dispatch_and_the_order_is_kept(self) -> None:
        seen: list[int] = []
        timed = Timed(workers=1, throughput=4)
        plan = [0.0001] * 40 + [0.2] * 2 + [0.002] * 40 + [0.0001] * 40

        def handler(n: int) -> None:
            timed.takes = plan[n]
            timed(n)
            seen.append(n)

        await timed.executor.dispatch(ListSource(range(len(plan))), key=lambda _: "key", handler=handler)
        assert seen == list(range(len(plan)))
        # The run of 200 ms that promotes it is one on the loop; 32 of 2 ms bring it back.
        expected = ["pool"] * 32 + ["inline"] * 9 + ["pool"] * 33 + ["direct"] * 32 + ["inline"] * 16
        assert timed.wheres == expected
        assert states(timed.executor) == ["idle"]

    async def test_its_profile_outlasts_the_dispatch_and_is_seen(self) -> None:
        timed = Timed(workers=1)
        await timed.run(*[0.0001] * 32, 0.2)
        (function,) = timed.executor.statistics().functions
        assert function.name == "Timed"
        assert (function.exec_class, function.pinned) == ("pool", False)
        assert function.p50 == pytest.approx(0.0001)
        assert (function.samples, function.promotions, function.demotions) == (33, 1, 1)

    async def test_a_pool_run_is_measured_without_its_wait_for_a_token(self, gates: Gates) -> None:
        timed = Timed(workers=1, pool=ExecPool(1))
        async with dispatches(gates) as start:
            start(timed.executor, gates.wait, "a")
            await gates.arrival("a")
            start(timed.executor, timed, 1).close()
            await wait_all_tasks_blocked()
            timed.now += 100
            gates.open("a")
            await until(lambda: timed.wheres)
        by_name = {each.name: each for each in timed.executor.statistics().functions}
        assert by_name["Timed"].p50 == pytest.approx(0.0001)

    async def test_one_that_fails_is_measured_too(self) -> None:
        timed = Timed(workers=1)

        def handler(item: object) -> None:
            timed(item)
            raise ValueError(item)

        for timed.takes in [0.0001] * 34:
            await timed.executor.dispatch(
                ListSource([1]), key=lambda _: "key", handler=handler, on_error=lambda *_: None
            )
        assert timed.wheres == ["pool"] * 32 + ["inline"] * 2

    @pytest.mark.parametrize("pin", [lambda handler: handler, inline, direct, blocking])
    async def test_without_a_pool_everything_runs_on_the_loop(self, pin: Callable[[Any], Any]) -> None:
        executor = KeyedExecutor(pool=None)
        inside: list[bool] = []
        await executor.dispatch(
            ListSource(range(40)), key=lambda n: n, handler=pin(lambda _: inside.append(trio.lowlevel.in_trio_task()))
        )
        assert inside == [True] * 40
        assert executor.statistics().pool is None

    async def test_a_handler_marked_inline_never_leaves_the_loop(self) -> None:
        timed = Timed(workers=1)
        await timed.executor.dispatch(ListSource(range(3)), key=lambda n: n, handler=inline(partial(timed)))
        assert timed.wheres == ["inline"] * 3


class Calls:
    """An `async def` handler that calls a plain function through its executor."""

    def __init__(self, function: Callable[..., object], **options: Any) -> None:
        self.executor = KeyedExecutor(**options)
        self.function = function
        self.profile = ExecProfile(function)

    async def __call__(self, item: object) -> None:
        await self.executor.call(self.profile, self.function, item)


class TestCalls:
    async def test_a_function_is_called_where_its_profile_says_and_its_result_returned(self) -> None:
        timed = Timed(workers=1)
        profile = ExecProfile(timed)
        got: list[object] = []

        def add(one: int, *, other: int) -> int:
            timed(one)
            return one + other

        async def handler(n: int) -> None:
            got.append(await timed.executor.call(profile, add, n, other=1))

        await timed.executor.dispatch(ListSource(range(34)), key=lambda _: "key", handler=handler)
        assert got == list(range(1, 35))
        assert timed.wheres == ["pool"] * 32 + ["inline"] * 2
        assert [each.samples for each in timed.executor.statistics().functions] == [34]

    @pytest.mark.parametrize("pin", [inline, direct, blocking])
    async def test_what_it_raises_is_raised(self, pin: Callable[[Any], Any]) -> None:
        error = ValueError("mine")

        def fails(item: object) -> None:
            raise error

        calls = Calls(pin(fails), workers=1)
        run = partial(calls.executor.dispatch, ListSource([1]), key=lambda n: n, handler=calls)
        assert await collect(run) is error
        assert states(calls.executor) == ["idle"]
        assert borrowed(calls.executor) == 0

    async def test_an_async_function_is_called_and_its_coroutine_returned(self) -> None:
        async def function(n: int) -> int:
            await trio.lowlevel.checkpoint()
            return n

        work: Any = await KeyedExecutor().call(ExecProfile(function), function, 7)
        assert await work == 7

    async def test_outside_a_handler_it_runs_as_well(self) -> None:
        executor = KeyedExecutor(workers=1)
        for pin in (inline, direct, blocking):
            function = pin(lambda n: n + 1)
            assert await executor.call(ExecProfile(function), function, 1) == 2

    async def test_direct_holds_the_mailboxs_worker(self, gates: Gates) -> None:
        calls = Calls(gates.compute, workers=1)
        handled: list[str] = []
        async with dispatches(gates) as start:
            start(calls.executor, calls, "a", "b")
            await gates.arrival("a")
            start(calls.executor, inline(lambda item: handled.append(item)), "on the loop")
            await wait_all_tasks_blocked()
            assert states(calls.executor) == ["held"]
            assert repr(calls.executor._workers.all[0]).startswith("<worker 0 of wow-dispatch: held by mailbox a")
            assert (handled, gates.arrived) == ([], ["a"])
            assert queued(calls.executor) == [2]
            gates.open("a")
            await gates.arrival("b")
            gates.open("b")
            await until(lambda: handled and states(calls.executor) == ["idle"])

    async def test_pool_holds_no_worker(self, gates: Gates) -> None:
        calls = Calls(gates.wait, workers=1)
        handled: list[str] = []
        async with dispatches(gates) as start:
            start(calls.executor, calls, "a", "b")
            await gates.arrival("a", "b")
            start(calls.executor, inline(lambda item: handled.append(item)), "on the loop")
            await until(lambda: handled)

    async def test_a_pool_call_gives_its_token_back_while_somebody_else_holds_its_worker(self, gates: Gates) -> None:
        """Else a thread that holds the worker would wait for ever, if it waited for one that needs the token."""
        calls = Calls(gates.wait, workers=1, pool=ExecPool(1))
        async with dispatches(gates) as start:
            start(calls.executor, calls, "a")
            await gates.arrival("a")
            start(calls.executor, gates.compute, "b")
            await gates.arrival("b")
            gates.open("a")
            await until(lambda: not borrowed(calls.executor))
            assert states(calls.executor) == ["held"]

    @pytest.mark.parametrize("pin", [lambda function: function, inline, direct, blocking])
    async def test_without_a_pool_everything_is_called_on_the_loop(self, pin: Callable[[Any], Any]) -> None:
        inside: list[bool] = []
        calls = Calls(pin(lambda _: inside.append(trio.lowlevel.in_trio_task())), pool=None)
        await calls.executor.dispatch(ListSource(range(40)), key=lambda n: n, handler=calls)
        assert inside == [True] * 40
        assert not calls.executor.uses_pool(calls.profile)

    async def test_direct_functions_of_other_tasks_of_the_handler_wait_for_its_worker(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=1)
        profile = ExecProfile(gates.compute)

        async def handler(item: str) -> None:
            async with trio.open_nursery() as nursery:
                for n in range(3):
                    nursery.start_soon(executor.call, profile, gates.compute, f"{item}{n}")

        async with dispatches(gates) as start:
            start(executor, handler, "a")
            for n in range(3):
                await until(lambda n=n: len(gates.arrived) == n + 1)  # type: ignore[misc]
                await wait_all_tasks_blocked()
                assert len(gates.inside) == 1
                gates.open(gates.inside[0])
            await until(lambda: states(executor) == ["idle"])

    async def test_a_hot_key_of_direct_calls_lets_the_others_of_its_worker_in(self, gates: Gates) -> None:
        done: list[str] = []

        @direct
        def function(item: str) -> None:
            if not done:
                gates.compute(item)
            done.append(item)

        calls = Calls(function, workers=1)
        async with dispatches(gates) as start:
            start(calls.executor, calls, *["hot"] * 100)
            await gates.arrival("hot")
            start(calls.executor, calls, "cold")
            await until(lambda: queued(calls.executor) == [1])
            gates.open("hot")
            await until(lambda: len(done) == 101)
        assert done.index("cold") < 3

    @pytest.mark.parametrize("pin", ["compute", "wait"])
    async def test_a_cancelled_dispatch_waits_for_the_thread_and_runs_nothing_more(
        self, gates: Gates, pin: str
    ) -> None:
        calls = Calls(getattr(gates, pin), workers=1)
        outcome: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            run = partial(calls.executor.dispatch, EndlessSource(["a1", "a2"]), key=first, handler=calls)
            nursery.start_soon(collect, run, outcome)
            await gates.arrival("a1")
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await wait_all_tasks_blocked()
                assert outcome == []
                gates.open("a1")
                await until(lambda: outcome)
        assert isinstance(outcome[0], trio.Cancelled)
        assert gates.arrived == ["a1"]
        assert states(calls.executor) == ["idle"]
        assert borrowed(calls.executor) == 0

    @pytest.mark.parametrize("pin", [direct, blocking])
    async def test_a_call_that_is_cancelled_while_it_waits_starts_nothing(
        self, gates: Gates, pin: Callable[[Any], Any]
    ) -> None:
        executor = KeyedExecutor(workers=1, pool=ExecPool(1))
        started: list[str] = []
        calls = Calls(pin(lambda item: started.append(item)))
        calls.executor = executor
        scope = trio.CancelScope()

        async def handler(item: str) -> None:
            with scope:
                await trio.lowlevel.checkpoint()
                await calls(item)

        async with dispatches(gates) as start:
            start(executor, handler, "b")
            start(executor, gates.compute if pin is direct else gates.wait, "a")
            await gates.arrival("a")
            await wait_all_tasks_blocked()
            scope.cancel()
            gates.open("a")
            await until(lambda: states(executor) == ["idle"] and not borrowed(executor))
        assert len(started) <= 1  # `b` may have been first

    @pytest.mark.parametrize("pin", ["compute", "wait"])
    async def test_a_forced_stop_abandons_the_thread(
        self, gates: Gates, pin: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        calls = Calls(getattr(gates, pin), workers=1)
        outcome: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            run = partial(calls.executor.dispatch, EndlessSource(["a"]), key=first, handler=calls)
            nursery.start_soon(collect, run, outcome)
            await gates.arrival("a")
            calls.executor.force_stop()
        assert isinstance(outcome[0], ExecutorClosedError)
        assert caplog.records[0].getMessage().startswith(f"abandoned the thread of handler Gates.{pin} for key a, ")
        assert states(calls.executor) == ["abandoned" if pin == "compute" else "idle"]
        assert borrowed(calls.executor) == (pin == "wait")
        gates.open_all()
        await until(lambda: states(calls.executor) == ["idle"] and not borrowed(calls.executor))
        assert calls.executor.statistics().late_results == 1

    @pytest.mark.parametrize("pin", [inline, direct, blocking])
    async def test_each_call_has_context_variables_of_its_own_wherever_it_runs(self, pin: Callable[[Any], Any]) -> None:
        var = contextvars.ContextVar("var", default="unset")
        executor = KeyedExecutor(workers=1)
        seen: list[str] = []

        def function(n: int) -> None:
            seen.append(var.get())
            var.set(f"function {n}")

        profile = ExecProfile(pin(function))

        async def handler(item: int) -> None:
            var.set("handler")
            for n in range(2):
                await executor.call(profile, function, n)
            seen.append(var.get())

        await executor.dispatch(ListSource([1]), key=lambda n: n, handler=handler)
        assert seen == ["handler"] * 3

    async def test_the_context_is_copied_before_the_item_enters_the_pool(self, gates: Gates) -> None:
        """What the caller's task sets while it waits for a token is nothing of the function's."""
        var = contextvars.ContextVar("var", default="unset")
        executor = KeyedExecutor(workers=1, pool=ExecPool(1))
        seen: list[str] = []
        profile = ExecProfile(blocking(lambda: None))
        async with dispatches(gates) as start:
            start(executor, gates.wait, "a")
            await gates.arrival("a")

            async def calls() -> None:
                tasks.append(trio.lowlevel.current_task())
                await executor.call(profile, lambda: seen.append(var.get()))

            tasks: list[trio.lowlevel.Task] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(calls)
                await wait_all_tasks_blocked()
                tasks[0].context.run(var.set, "late")
                gates.open("a")
        assert seen == ["unset"]

    @pytest.mark.parametrize("pin", [direct, blocking])
    async def test_synchronous_runs_it_on_the_loop_for_one_call(self, pin: Callable[[Any], Any]) -> None:
        executor = KeyedExecutor()
        inside: list[bool] = []
        function = pin(lambda: inside.append(trio.lowlevel.in_trio_task()))
        profile = ExecProfile(function)
        with synchronous():
            await executor.call(profile, function)
        await executor.call(profile, function)
        assert inside == [True, False]


class TestStuckThreads:
    async def test_fs10_a_token_stays_borrowed_until_the_thread_really_ends(self, gates: Gates) -> None:
        pool = ExecPool(2)
        stopped, executor = KeyedExecutor(workers=2, pool=pool), KeyedExecutor(workers=2, pool=pool)
        handled: list[str] = []
        outcome: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            run = partial(stopped.dispatch, EndlessSource(["a", "b"]), key=first, handler=gates.wait)
            nursery.start_soon(collect, run, outcome)
            await gates.arrival("a", "b")
            stopped.force_stop()
        async with dispatches(gates) as start:
            start(executor, blocking(lambda item: handled.append(item)), "c", "d", "e")
            await wait_all_tasks_blocked()
            assert (pool.statistics().borrowed, pool.statistics().queued) == (2, 3)
            assert handled == []
            gates.open("a")
            await until(lambda: len(handled) == 3)
            assert stopped.statistics().threads_abandoned == 2
            await until(lambda: stopped.statistics().late_results == 1)

    async def test_fs10_a_plain_cancellation_waits_so_that_runs_of_one_key_do_not_overlap(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=1, pool=ExecPool(2))
        outcome: list[BaseException | None] = []
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                run = partial(executor.dispatch, EndlessSource(["a1"]), key=first, handler=gates.wait)
                nursery.start_soon(collect, run, outcome)
                await gates.arrival("a1")
                scope.cancel()
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                    assert outcome == []
                    gates.open("a1")
        async with dispatches(gates) as start:
            start(executor, gates.wait, "a2")
            await gates.arrival("a2")
            assert gates.inside == ["a2"]


class TestLending:
    """Threads that call back and wait for other items of the same executor."""

    @pytest.mark.parametrize("pin", [direct, blocking])
    async def test_fs11_threads_that_wait_for_one_anothers_items_do_not_lock(self, pin: Callable[[Any], Any]) -> None:
        pool = ExecPool(2, 2)
        executor = KeyedExecutor(workers=2, pool=pool)
        ended: dict[str, trio.Event] = {item: trio.Event() for item in "cd"}
        order: list[str] = []
        both = threading.Barrier(2)

        @pin
        def inner(item: str) -> None:
            order.append(item)
            trio.from_thread.run_sync(ended[item].set)

        @pin
        def outer(item: str) -> None:
            both.wait(PATIENCE)
            needs = {"a": "c", "b": "d"}[item]

            async def send_and_wait() -> None:
                send.send_nowait(needs)
                await ended[needs].wait()

            trio.from_thread.run(lent, send_and_wait)
            order.append(item)

        async with dispatches() as start:
            send = start(executor, inner)
            start(executor, outer, "a", "b")
            await until(lambda: len(order) == 4)
            assert {*order[-2:]} & {"a", "b"}
            await until(lambda: states(executor) == ["idle"] * 2)
            seen = pool.statistics()
            assert (seen.borrowed, seen.lent, seen.queued) == (0, 0, 0)

    @pytest.mark.parametrize("pin", ["compute", "wait"])
    async def test_what_is_lent_is_taken_back_before_the_thread_goes_on(self, gates: Gates, pin: str) -> None:
        executor = KeyedExecutor(workers=1, pool=ExecPool(1))
        go = trio.Event()
        gate = getattr(gates, pin)

        @(direct if pin == "compute" else blocking)
        def waits(item: str) -> None:
            gates.compute(f"{item} before")
            trio.from_thread.run(lent, go.wait)
            gates.compute(f"{item} after")

        async with dispatches(gates) as start:
            start(executor, waits, "a")
            await gates.arrival("a before")
            start(executor, gate, "b", "c")
            await wait_all_tasks_blocked()
            gates.open("a before")
            await gates.arrival("b")
            go.set()
            await wait_all_tasks_blocked()
            assert gates.inside == ["b"]
            gates.open("b")
            await gates.arrival("a after")
            await wait_all_tasks_blocked()
            assert gates.inside == ["a after"], "before c, which has waited longer"
            gates.open("a after")
            await gates.arrival("c")

    async def test_on_the_event_loop_it_just_waits(self) -> None:
        async def seven() -> int:
            await trio.lowlevel.checkpoint()
            return 7

        assert await lent(seven) == 7

    async def test_what_it_waits_for_may_fail(self) -> None:
        executor = KeyedExecutor(workers=1)

        async def fails() -> None:
            await trio.lowlevel.checkpoint()
            raise ValueError("mine")

        @direct
        def handler(item: object) -> None:
            with pytest.raises(ValueError, match="mine"):
                trio.from_thread.run(lent, fails)
            assert trio.from_thread.run_sync(states, executor) == ["held"]

        await executor.dispatch(ListSource([1]), key=lambda n: n, handler=handler)

    @pytest.mark.parametrize("pin", [direct, blocking])
    async def test_a_cancelled_dispatch_ends_the_wait_with_an_error_in_the_thread(
        self, pin: Callable[[Any], Any]
    ) -> None:
        executor = KeyedExecutor(workers=1)
        raised: list[BaseException] = []
        waiting = trio.Event()

        async def wait() -> None:
            waiting.set()
            await trio.sleep_forever()

        @pin
        def handler(item: object) -> None:
            try:
                trio.from_thread.run(lent, wait)
            except BaseException as error:
                raised.append(error)
                raise

        outcome: list[BaseException | None] = []
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                run = partial(executor.dispatch, EndlessSource(["a"]), key=first, handler=handler)
                nursery.start_soon(collect, run, outcome)
                await waiting.wait()
                nursery.cancel_scope.cancel()
        (error,) = raised
        assert isinstance(error, HandlerInterruptedError)
        assert "was cancelled while its thread waited" in str(error)
        assert error.handler.endswith("handler")
        assert states(executor) == ["idle"]
        assert borrowed(executor) == 0

    @pytest.mark.parametrize("pin", [direct, blocking])
    @pytest.mark.parametrize("grouped", [False, True])
    async def test_an_item_whose_wait_is_cancelled_was_interrupted_and_has_not_failed(
        self, pin: Callable[[Any], Any], grouped: bool
    ) -> None:
        executor = KeyedExecutor(workers=1)
        failed: list[Any] = []
        waiting = trio.Event()

        async def wait() -> None:
            waiting.set()
            await trio.sleep_forever()

        async def several() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lent, wait)
                nursery.start_soon(lent, wait)

        @pin
        def handler(item: object) -> None:
            trio.from_thread.run(several) if grouped else trio.from_thread.run(lent, wait)

        def on_error(item: object, error: Exception) -> None:
            failed.append(error)

        outcome: list[BaseException | None] = []
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                source = EndlessSource(["a"])
                run = partial(executor.dispatch, source, key=first, handler=handler, on_error=on_error)
                nursery.start_soon(collect, run, outcome)
                await waiting.wait()
                nursery.cancel_scope.cancel()
        assert isinstance(outcome[0], trio.Cancelled)
        assert failed == []
        assert states(executor) == ["idle"]
        assert borrowed(executor) == 0

    async def test_a_wait_that_begins_after_the_cancellation_ends_too(self, gates: Gates) -> None:
        raised: list[BaseException] = []

        @direct
        def handler(item: str) -> None:
            gates.compute(item)
            try:
                trio.from_thread.run(lent, trio.sleep_forever)
            except HandlerInterruptedError as error:
                raised.append(error)

        executor = KeyedExecutor(workers=1)
        outcome: list[BaseException | None] = []
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                run = partial(executor.dispatch, EndlessSource(["a"]), key=first, handler=handler)
                nursery.start_soon(collect, run, outcome)
                await gates.arrival("a")
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                    gates.open("a")
        assert len(raised) == 1

    async def test_a_task_that_outlives_the_thread_lends_nothing(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=1, pool=ExecPool(1))
        done = trio.Event()

        async def later() -> None:
            await done.wait()
            await lent(trio.lowlevel.checkpoint)

        async with dispatches(gates) as start, trio.open_nursery() as nursery:

            @blocking
            def handler(item: object) -> None:
                trio.from_thread.run_sync(nursery.start_soon, later)

            start(executor, handler, 1)
            await until(lambda: any("later" in name for name in task_names()) and not borrowed(executor))
            start(executor, gates.wait, "a")
            await gates.arrival("a")
            done.set()
            await wait_all_tasks_blocked()
            assert borrowed(executor) == 1

    @pytest.mark.parametrize("pin", [direct, blocking])
    async def test_a_wait_that_begins_while_the_thread_takes_back_what_it_lent(
        self, pin: Callable[[Any], Any], gates: Gates
    ) -> None:
        executor = KeyedExecutor(workers=1, pool=ExecPool(1))
        first_ends, second_begins, second_ends = trio.Event(), trio.Event(), trio.Event()
        waiting = trio.Event()
        ended: list[object] = []

        async def first_wait() -> None:
            waiting.set()
            await first_ends.wait()

        async def second_wait() -> None:
            await second_begins.wait()
            await lent(second_ends.wait)

        async def both() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lent, first_wait)
                nursery.start_soon(second_wait)

        @pin
        def handler(item: object) -> None:
            trio.from_thread.run(both)
            ended.append(item)

        with trio.fail_after(PATIENCE):
            async with dispatches(gates) as start:
                start(executor, handler, "a")
                await waiting.wait()
                start(executor, gates.compute if pin is direct else gates.wait, "b")
                await gates.arrival("b")
                first_ends.set()
                await wait_all_tasks_blocked()
                second_begins.set()
                await wait_all_tasks_blocked()
                assert borrowed(executor) == (0 if pin is direct else 1)
                gates.open("b")
                await until(lambda: borrowed(executor) == 0 and states(executor) == ["idle"])
                second_ends.set()
                await until(lambda: ended)
        assert states(executor) == ["idle"]
        assert borrowed(executor) == 0

    @pytest.mark.parametrize("pin", [direct, blocking])
    async def test_a_wait_that_outlasts_the_thread_takes_back_nothing(self, pin: Callable[[Any], Any]) -> None:
        executor = KeyedExecutor(workers=1, pool=ExecPool(1))
        waiting, done = trio.Event(), trio.Event()

        async def wait() -> None:
            waiting.set()
            await done.wait()

        async with trio.open_nursery() as nursery:

            @pin
            def handler(item: object) -> None:
                trio.from_thread.run_sync(partial(nursery.start_soon, lent, wait))
                trio.from_thread.run(waiting.wait)

            await executor.dispatch(ListSource([1]), key=lambda n: n, handler=handler)
            done.set()
        assert states(executor) == ["idle"]
        assert borrowed(executor) == 0
        pool = executor.statistics().pool
        assert pool is not None
        assert pool.lent == 0

    @pytest.mark.parametrize("pin", [direct, blocking])
    async def test_a_thread_that_ends_while_a_task_of_it_takes_back_what_it_lent(
        self, pin: Callable[[Any], Any], gates: Gates
    ) -> None:
        executor = KeyedExecutor(workers=1, pool=ExecPool(1))
        waiting, done, end = trio.Event(), trio.Event(), threading.Event()

        async def wait() -> None:
            waiting.set()
            await done.wait()

        async with trio.open_nursery() as nursery, dispatches(gates) as start:

            @pin
            def handler(item: object) -> None:
                trio.from_thread.run_sync(partial(nursery.start_soon, lent, wait))
                end.wait(PATIENCE)

            start(executor, handler, "a")
            await waiting.wait()
            start(executor, gates.compute if pin is direct else gates.wait, "b")
            await gates.arrival("b")
            done.set()
            await wait_all_tasks_blocked()
            end.set()
            await until(lambda: sum(each.in_flight for each in executor.statistics().dispatches) == 1)
            gates.open("b")
            with trio.fail_after(PATIENCE):
                while nursery.child_tasks:
                    await wait_all_tasks_blocked(0.001)
            await until(lambda: states(executor) == ["idle"])
        assert borrowed(executor) == 0
