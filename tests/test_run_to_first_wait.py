"""Run to the first wait: what a handler may rely on although a runner starts it, and who pays for what."""

import contextvars
import random
import signal
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import trio
from support import EndlessSource, ListSource, first, itself, task_names
from trio.testing import wait_all_tasks_blocked

from trio_wow.errors import CancelScopeLeakError
from trio_wow.execution import KeyedExecutor, user_call


class Passes(trio.abc.Instrument):
    """Counts the event loop's passes over its tasks, and the tasks that were spawned."""

    def __init__(self) -> None:
        self.passes = 0
        self.spawned: list[str] = []

    def before_io_wait(self, timeout: float) -> None:
        self.passes += 1

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.spawned.append(task.name)


@pytest.fixture
async def passes() -> AsyncIterator[Passes]:
    instrument = Passes()
    trio.lowlevel.add_instrument(instrument)
    yield instrument
    trio.lowlevel.remove_instrument(instrument)


class TestTasks:
    async def test_a_handler_that_does_not_wait_costs_no_task(self, passes: Passes) -> None:
        handled: list[int] = []

        async def handler(n: int) -> None:
            handled.append(n)

        await KeyedExecutor(workers=1).dispatch(ListSource(range(256)), key=itself, handler=handler)
        assert sorted(handled) == list(range(256))
        assert passes.spawned == ["runner of worker 0 of wow-dispatch"]

    async def test_a_handler_that_waits_has_a_task_named_after_its_mailbox_until_it_is_empty(self) -> None:
        gates = {n: trio.Event() for n in range(4)}
        tasks: dict[int, trio.lowlevel.Task] = {}

        async def handler(n: int) -> None:
            await gates[n].wait()
            tasks[n] = trio.lowlevel.current_task()

        async with trio.open_nursery() as nursery:
            executor = KeyedExecutor(workers=1)
            nursery.start_soon(
                partial(executor.dispatch, EndlessSource(range(4)), key=lambda n: n % 2, handler=handler)
            )
            await wait_all_tasks_blocked()
            assert sorted(name for name in task_names() if name.startswith("mailbox")) == ["mailbox 0", "mailbox 1"]
            for n in (0, 2):
                gates[n].set()
            await wait_all_tasks_blocked()
            assert [name for name in task_names() if name.startswith("mailbox")] == ["mailbox 1"]
            assert tasks[0] is tasks[2]
            nursery.cancel_scope.cancel()

    @pytest.mark.parametrize("workers", [1, 2, 16])
    async def test_256_waiting_mailboxes_start_within_ten_passes(self, passes: Passes, workers: int) -> None:
        started = 0
        last = 0

        async def handler(n: int) -> None:
            nonlocal started, last
            started += 1
            last = passes.passes
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            executor = KeyedExecutor(workers=workers)
            first = passes.passes
            nursery.start_soon(partial(executor.dispatch, EndlessSource(range(256)), key=itself, handler=handler))
            await wait_all_tasks_blocked()
            assert started == 256
            assert last - first <= 10
            nursery.cancel_scope.cancel()

    async def test_a_key_that_waits_now_and_then_is_not_paid_for_by_others(self, passes: Passes) -> None:
        async def handler(n: int) -> None:
            if n % 100 == 50:
                await trio.lowlevel.checkpoint()

        await KeyedExecutor(workers=1).dispatch(ListSource(range(256)), key=itself, handler=handler)
        assert passes.spawned.count("runner of worker 0 of wow-dispatch") <= 1 + 2 + 1


class TestTurns:
    @pytest.mark.parametrize("keys", [1, 2, 600])
    async def test_k6_the_loop_gets_its_turn_after_256_items(self, passes: Passes, keys: int) -> None:
        most = 0
        at, since = 0, 0

        def handler(n: int) -> None:
            nonlocal most, at, since
            if passes.passes != at:
                at, since = passes.passes, 0
            since += 1
            most = max(most, since)

        executor = KeyedExecutor(workers=1, max_in_flight=600, throughput=1_000, perf_counter=lambda: 0.0)
        await executor.dispatch(ListSource(range(600)), key=lambda n: n % keys, handler=handler)
        assert most == 256

    async def test_k6_the_loop_gets_its_turn_after_a_millisecond_of_handlers(self, passes: Passes) -> None:
        clock = 0.0
        handled_in: list[int] = []

        def handler(n: int) -> None:
            nonlocal clock
            clock += 0.000_3
            handled_in.append(passes.passes)

        executor = KeyedExecutor(workers=1, perf_counter=lambda: clock)
        await executor.dispatch(ListSource(range(40)), key=itself, handler=handler)
        assert max(handled_in.count(each) for each in handled_in) == 4

    async def test_k6_mailboxes_that_resume_together_share_one_hold_of_the_loop(self, passes: Passes) -> None:
        """Each goes on with its next items when its first one has waited, be there ever so many."""
        now, go = 0.0, trio.Event()
        held: Counter[int] = Counter()
        executor = KeyedExecutor(workers=2, perf_counter=lambda: now)

        async def handler(item: tuple[int, int]) -> None:
            nonlocal now
            if item[1] == 0:
                await go.wait()
            else:
                now += 0.0002
                held[passes.passes] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                source = ListSource([(key, n) for n in range(8) for key in range(30)])
                nursery.start_soon(partial(executor.dispatch, source, key=first, handler=handler))
            await wait_all_tasks_blocked()
            go.set()
        assert sum(held.values()) == 4 * 30 * 7
        assert max(held.values()) <= 4 / 0.2 + 2

    async def test_k6_runners_share_one_hold_of_the_loop(self, passes: Passes) -> None:
        clock = 0.0
        handled_in: list[int] = []

        def handler(n: int) -> None:
            nonlocal clock
            clock += 0.000_1
            handled_in.append(passes.passes)

        executor = KeyedExecutor(workers=16, perf_counter=lambda: clock)
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(partial(executor.dispatch, ListSource(range(256)), key=itself, handler=handler))
        # 96 runners, an item each at least; but no runner begins when they have held the loop for 4 ms.
        assert max(handled_in.count(each) for each in set(handled_in)) in (40, 41)  # they add up floats

    async def test_k7_with_one_worker_fresh_mailboxes_go_on_while_others_wait_and_resume(self) -> None:
        gate = trio.Event()
        order: list[str] = []

        async def handler(item: str) -> None:
            if item.startswith("slow"):
                await gate.wait()
            order.append(item)

        async with trio.open_nursery() as nursery:
            items = ["slow 1", "quick 1", "slow 2", "quick 2"]
            executor = KeyedExecutor(workers=1)
            nursery.start_soon(partial(executor.dispatch, ListSource(items), key=itself, handler=handler))
            await wait_all_tasks_blocked()
            assert order == ["quick 1", "quick 2"]
            gate.set()
        assert sorted(order[2:]) == ["slow 1", "slow 2"]


context_variable = contextvars.ContextVar("context_variable", default="unset")


class TestContext:
    @pytest.mark.parametrize("waits_first", [False, True])
    async def test_k16_from_thread_sees_and_sets_the_handlers_context(self, waits_first: bool) -> None:
        seen: dict[int, list[str]] = {}

        def in_thread(n: int) -> None:
            seen[n].append(trio.from_thread.run_sync(context_variable.get))
            trio.from_thread.run_sync(context_variable.set, f"set by the thread of {n}")
            seen[n].append(trio.from_thread.run(in_loop))

        async def in_loop() -> str:
            await trio.lowlevel.checkpoint()
            return context_variable.get()

        async def handler(n: int) -> None:
            seen[n] = [context_variable.get()]
            context_variable.set(f"set by handler {n}")
            if waits_first:
                await trio.lowlevel.checkpoint()
            await trio.to_thread.run_sync(in_thread, n)
            seen[n].append(context_variable.get())

        context_variable.set("outer")
        await KeyedExecutor().dispatch(ListSource(range(3)), key=lambda n: n % 2, handler=handler)
        # A thread's callbacks run in a copy of the context that it was started with: trio.to_thread says so.
        assert seen == {n: await _the_same_in_a_plain_task(n, in_thread, seen_by=seen) for n in range(3)}
        assert context_variable.get() == "outer"

    async def test_k16_the_context_of_the_task_is_that_of_the_handler_in_every_segment(self) -> None:
        same: list[bool] = []

        def look(n: int) -> None:
            task = trio.lowlevel.current_task()
            same.append(task.context[context_variable] == context_variable.get() == str(n))

        async def handler(n: int) -> None:
            context_variable.set(str(n))
            look(n)
            await trio.lowlevel.checkpoint()
            look(n)

        await KeyedExecutor().dispatch(ListSource(range(9)), key=lambda n: n % 4, handler=handler)
        assert same == [True] * 18


async def _the_same_in_a_plain_task(n: int, in_thread: Callable[[int], None], *, seen_by: dict[int, Any]) -> list[str]:
    """What the handler would have seen, had it been the body of an ordinary task."""
    kept = seen_by[n]
    seen_by[n] = []
    context_variable.set(f"set by handler {n}")
    await trio.to_thread.run_sync(in_thread, n)
    expected, seen_by[n] = ["outer", *seen_by[n], context_variable.get()], kept
    context_variable.set("outer")
    return expected


class TestTraps:
    async def test_an_awaitable_that_is_not_trios_is_complained_of_in_the_handler(self) -> None:
        class Foreign:
            def __await__(self) -> Any:
                yield "not for Trio"

        caught: list[tuple[int, str]] = []
        handled: list[int] = []

        async def handler(n: int) -> None:
            if n == 1:
                await trio.lowlevel.checkpoint()
            try:
                if n < 2:
                    await Foreign()
            except TypeError as error:
                caught.append((n, str(error)[:30]))
            handled.append(n)

        await KeyedExecutor().dispatch(ListSource(range(4)), key=lambda _: 0, handler=handler)
        assert [n for n, _ in caught] == [0, 1]
        assert handled == [0, 1, 2, 3]

    async def test_a_handler_may_swallow_its_own_cancellation_and_go_on(self, autojump_clock: object) -> None:
        handled: list[int] = []

        async def handler(n: int) -> None:
            with trio.move_on_after(1):
                await trio.sleep_forever()
            with trio.CancelScope() as scope:
                scope.cancel()
                await trio.lowlevel.checkpoint()
            handled.append(n)

        await KeyedExecutor().dispatch(ListSource(range(3)), key=lambda _: 0, handler=handler)
        assert handled == [0, 1, 2]


class TestLeaks:
    @pytest.mark.parametrize("waits_first", [False, True])
    async def test_a_scope_left_open_and_cancelled_later_does_not_reach_the_next_item(self, waits_first: bool) -> None:
        left = trio.CancelScope()
        tasks: dict[int, trio.lowlevel.Task] = {}
        handled: list[int] = []

        async def handler(n: int) -> None:
            tasks[n] = trio.lowlevel.current_task()
            if n == 0:
                if waits_first:
                    await trio.lowlevel.checkpoint()
                left.__enter__()
                return
            left.cancel()
            await trio.lowlevel.checkpoint()
            handled.append(n)

        failed: dict[int, Exception] = {}
        await KeyedExecutor().dispatch(
            ListSource(range(3)), key=lambda _: 0, handler=handler, on_error=failed.__setitem__
        )
        assert handled == [1, 2]
        assert isinstance(failed.pop(0), CancelScopeLeakError)
        assert not failed
        assert tasks[0] is not tasks[1]

    async def test_a_plain_handler_that_leaves_a_scope_open_fails_its_own_item_only(self) -> None:
        handled: list[int] = []

        def handler(n: int) -> None:
            if n == 1:
                trio.CancelScope().__enter__()
            handled.append(n)

        failed: dict[int, Exception] = {}
        await KeyedExecutor().dispatch(
            ListSource(range(4)), key=lambda _: 0, handler=handler, on_error=failed.__setitem__
        )
        assert handled == [0, 1, 2, 3]
        assert list(failed) == [1]


async def test_a_scope_left_open_and_cancelled_around_a_nursery_is_a_leak_too() -> None:
    """Trio raises the cancellation as a group then."""

    async def scopes() -> AsyncGenerator[trio.CancelScope, None]:
        with trio.CancelScope() as scope:
            yield scope

    left = scopes()
    with pytest.raises(CancelScopeLeakError, match="function left a cancel scope open"):
        with user_call("function", "key"):
            (await anext(left)).cancel()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                await trio.sleep_forever()
    await left.aclose()


async def test_scopes_left_open_in_one_another_are_all_closed_and_can_be_left_later() -> None:
    outer, inner = trio.CancelScope(), trio.CancelScope()
    for number in range(2):
        with pytest.raises(CancelScopeLeakError):
            with user_call("function", number):
                if not number:
                    outer.__enter__()
                    inner.__enter__()
                else:  # by now this is the task's own affair
                    trio.CancelScope().__enter__()
        outer.cancel()
        await trio.lowlevel.checkpoint()
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    await trio.lowlevel.checkpoint()


class Stopped:
    """Raises SIGINT at the n-th of the places that ask it to."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.raised = False

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.at + 1:
            self.raised = True
            signal.raise_signal(signal.SIGINT)


class TestSignals:
    def test_a_sigint_at_each_step_of_handlers_and_loop_loses_no_item(self) -> None:
        at = 0
        while self.one_run(at):
            at += 1
        assert at > 60

    @staticmethod
    def one_run(at: int) -> bool:
        stopped = Stopped(at)
        states: dict[int, list[str]] = {n: [] for n in range(12)}
        source = ListSource(range(12), batch=5)

        class Steps(trio.abc.Instrument):
            def before_task_step(self, task: trio.lowlevel.Task) -> None:
                stopped()

            def after_task_step(self, task: trio.lowlevel.Task) -> None:
                stopped()

        async def handler(n: int) -> None:
            try:
                stopped()
                for _ in range(n % 3):
                    await trio.lowlevel.checkpoint()
                    stopped()
            except BaseException:
                states[n].append("interrupted")
                raise
            states[n].append("handled")

        async def main() -> None:
            await KeyedExecutor(max_in_flight=6, throughput=2).dispatch(
                source, key=lambda n: n % 4, handler=handler, on_discard=lambda n: states[n].append("discarded")
            )

        try:
            trio.run(main, instruments=[Steps()])
        except BaseException as error:
            leaves = [error]
            while isinstance(leaves[0], BaseExceptionGroup):
                leaves = [*leaves[0].exceptions, *leaves[1:]]
            assert all(isinstance(each, KeyboardInterrupt) for each in leaves), leaves
            assert stopped.raised
        for n in source.rest:
            states[n].append("in the source")
        assert all(len(state) == 1 for state in states.values()), (at, states)
        return stopped.raised


@pytest.mark.parametrize("seed", range(10))
async def test_k3_handlers_that_wait_return_and_fail_at_random_keep_the_order(seed: int) -> None:
    rng = random.Random(seed)
    items = [(rng.randrange(7), n) for n in range(400)]
    waits = {item: rng.choice((0, 0, 0, 1, 3)) for item in items}
    done: list[tuple[int, int]] = []

    async def handler(item: tuple[int, int]) -> None:
        for _ in range(waits[item]):
            await trio.lowlevel.checkpoint()
        done.append(item)
        if item[1] % 11 == 0:
            raise ValueError(item)

    failed: list[tuple[int, int]] = []
    executor = KeyedExecutor(workers=3, max_in_flight=rng.choice((1, 5, 64)), throughput=rng.choice((1, 3, 16)))
    await executor.dispatch(
        ListSource(items, batch=rng.choice((1, 9, 100))),
        key=lambda item: item[0],
        handler=handler,
        on_error=lambda item, _: failed.append(item),
    )
    for key in range(7):
        assert [item for item in done if item[0] == key] == [item for item in items if item[0] == key]
    assert sorted(failed) == sorted(item for item in items if item[1] % 11 == 0)
