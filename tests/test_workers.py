"""Workers: who gets one, holds it and waits for it. K numbers are the design's."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from support import EndlessSource, ListSource, collect, first
from thread_support import PATIENCE, Gates, borrowed, dispatches, first_of_none, queued, states, until
from trio.testing import wait_all_tasks_blocked

from trio_wow.execution import ExecPool, KeyedExecutor, PoolPlace, blocking, direct


class TestChoice:
    async def test_k5_running_comes_before_idle_before_held_before_the_next_in_rotation(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=4, throughput=1)
        seen: dict[str, tuple[list[str], list[int]]] = {}
        handled: list[str] = []

        def key(item: str) -> str:
            seen[item] = states(executor), queued(executor)
            return item

        def handler(item: str) -> None:
            if "hot" not in handled:  # its runner lets other tasks go on after each item, and stays scheduled
                for late in "abcdefg":
                    send.send_nowait(late)
            handled.append(item)

        async with dispatches(gates) as start:
            start(executor, gates.compute, "x", "y")
            await gates.arrival("x", "y")
            assert states(executor) == ["held", "held", "idle", "idle"]
            send = start(executor, handler, *["hot"] * 50, key=key)
            await until(lambda: len(seen) == 8)

            # The rotation goes on from worker 3, behind worker 2, which got the hot key.
            assert seen["a"] == (["held", "held", "running", "idle"], [0, 0, 0, 0])
            assert seen["b"][1] == [0, 0, 1, 0], "running, though worker 3 is next and idle"
            assert seen["c"][1] == [0, 0, 1, 1], "idle, as the running one has something queued"
            assert seen["d"][1] == [1, 0, 1, 1], "held, the first from worker 0 on"
            assert seen["e"][1] == [1, 1, 1, 1], "held, the other one"
            assert seen["f"][1] == [1, 1, 2, 1], "the next in rotation, when all have something queued"
            assert seen["g"][1] == [1, 1, 2, 2], "and the next"
            await until(lambda: {"a", "b", "e", "f"} <= {*handled})
            assert not {"c", "d"} & {*handled}
            gates.open("x", "y")
            await until(lambda: len(handled) == 57)

    async def test_k5_idle_comes_before_held_wherever_the_rotation_stands(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=3)
        async with dispatches(gates) as start:
            send = start(executor, gates.compute, "on 0", "on 1", "on 2")
            await gates.arrival("on 0", "on 1", "on 2")
            gates.open("on 1", "on 2")
            await until(lambda: states(executor) == ["held", "idle", "idle"])
            for late, on in (("late 1", 1), ("late 2", 2)):
                send.send_nowait(late)
                await gates.arrival(late)
                assert states(executor)[on] == "held"
            send.send_nowait("late 3")
            await until(lambda: queued(executor) == [1, 0, 0])

    async def test_k5_each_mailbox_of_a_key_goes_to_the_next_worker_and_stays_there(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=3, throughput=1)
        async with dispatches(gates) as start:
            for life in range(5):
                items = [(life, turn) for turn in range(4)]  # with a throughput of 1, queued anew after each
                send = start(executor, gates.compute, *items, key=lambda _: "key")
                for item in items:
                    await gates.arrival(item)
                    assert [n for n, state in enumerate(states(executor)) if state == "held"] == [life % 3]
                    gates.open(item)
                send.close()
                await until(lambda: not executor.statistics().dispatches)
        assert states(executor) == ["idle"] * 3

    async def test_k5_no_other_worker_helps_out(self, gates: Gates) -> None:
        """No work stealing: what is queued behind a thread waits for it, though other workers are idle."""
        executor = KeyedExecutor(workers=2)
        async with dispatches(gates) as start:
            start(executor, gates.compute, "x", "y", "behind x", "behind y")
            await gates.arrival("x", "y")
            gates.open("y", "behind y")
            await until(lambda: states(executor) == ["held", "idle"])
            assert queued(executor) == [1, 0]
            assert "behind x" not in gates.arrived

    @pytest.mark.parametrize("seed", range(10))
    async def test_k5_the_choice_follows_the_rule_at_any_moment(self, seed: int) -> None:
        """Against the rule written down plainly, with the statistics of the moment before."""
        rng = random.Random(seed)
        executor = KeyedExecutor(workers=rng.randint(1, 4), throughput=2)
        next_in_rotation = 0
        branches: Counter[str] = Counter()

        def choose(states: list[str], queued: list[int], start: int) -> tuple[int, str]:
            rotation = [(start + n) % len(states) for n in range(len(states))]
            for state in ("running", "idle", "held"):
                for n in rotation:
                    if states[n] == state and not queued[n]:
                        return n, state
            return start, "rotation"

        class OneByOne:
            """Gives some items in one step, and looks before and after each."""

            def __init__(self, name: str, count: int) -> None:
                self.rest = [(name, rng.randrange(count), n) for n in range(count)]
                self.before: tuple[list[str], list[int]] | None = None

            async def receive_batch(self, limit: int, /) -> list[Any]:
                nonlocal next_in_rotation
                if self.before is not None and (after := queued(executor)) != self.before[1]:
                    chosen, branch = choose(*self.before, next_in_rotation)
                    branches[branch] += 1
                    expected = list(self.before[1])
                    expected[chosen] += 1
                    assert after == expected, f"seed {seed}: {branch}"
                    next_in_rotation = (chosen + 1) % len(after)
                if self.before is None or rng.random() < 0.4:
                    for _ in range(rng.randrange(4)):
                        await trio.lowlevel.checkpoint()
                if not self.rest:
                    raise trio.EndOfChannel
                self.before = states(executor), queued(executor)
                return [self.rest.pop()]

        @direct
        def in_a_thread(item: object) -> None:
            trio.from_thread.run_sync(int)

        def on_the_loop(item: object) -> None: ...

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                for n, handler in enumerate((in_a_thread, on_the_loop, in_a_thread)):
                    run = partial(executor.dispatch, OneByOne(f"dispatch {n}", 60), handler=handler)
                    nursery.start_soon(partial(run, key=lambda item: item[:2]))
        assert len(branches) >= 2, "the seed shows nothing"
        assert states(executor) == ["idle"] * len(states(executor))


class TestCapacity:
    @pytest.mark.parametrize("seed", range(5))
    async def test_k2_no_more_direct_handlers_than_workers_run_over_all_dispatches(
        self, gates: Gates, seed: int
    ) -> None:
        rng = random.Random(seed)
        executor = KeyedExecutor(workers=3, throughput=rng.randint(1, 3))
        most, total = 0, 20 * 4
        async with dispatches(gates) as start:
            for n in range(20):
                start(executor, gates.compute, *((n, rng.randrange(4), item) for item in range(4)), key=lambda i: i[:2])
            while len(gates.arrived) < total or gates.inside:
                # Every worker that has work computes, and none computes twice.
                await until(lambda: len(gates.inside) == states(executor).count("held") > 0)
                await wait_all_tasks_blocked()
                assert len(gates.inside) <= 3
                most = max(most, len(gates.inside))
                done = rng.choice(gates.inside)
                gates.open(done)
                await until(lambda done=done: done not in gates.inside)  # type: ignore[misc]
                if len(gates.arrived) == total:
                    gates.open_all()
                    await until(lambda: not gates.inside)
        assert most == 3
        assert len({*gates.arrived}) == total

    async def test_k2_they_run_side_by_side_up_to_that_number(self) -> None:
        barrier = threading.Barrier(3)

        @direct
        def meet(item: int) -> None:
            barrier.wait(PATIENCE)

        executor = KeyedExecutor(workers=3)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                run = partial(executor.dispatch, key=lambda item: item, handler=meet)
                nursery.start_soon(run, ListSource(range(2)))


class TestHolding:
    @pytest.mark.parametrize("wakes", ["with a value", "with an error"])
    @pytest.mark.parametrize("one_dispatch", [True, False])
    async def test_k7_behind_a_thread_nothing_starts_or_resumes_and_then_resuming_comes_first(
        self, gates: Gates, wakes: str, one_dispatch: bool
    ) -> None:
        executor = KeyedExecutor(workers=1)
        log: list[str] = []
        wake, woken = trio.open_memory_channel[None](1)

        async def handler(item: str) -> None:
            log.append(f"{item} starts")
            if item.startswith("old"):
                try:
                    await woken.receive()
                except trio.EndOfChannel:
                    assert wakes == "with an error"
                log.append("old resumes")

        async with dispatches(gates) as start:
            fresh = start(executor, handler, "old")
            await until(lambda: log == ["old starts"])
            await wait_all_tasks_blocked()
            start(executor, gates.compute, "x", "y")
            await gates.arrival("x")
            if wakes == "with a value":
                wake.send_nowait(None)
            else:
                wake.close()
            if one_dispatch:
                fresh.send_nowait("fresh")
            else:
                start(executor, handler, "fresh")
            await wait_all_tasks_blocked()
            assert log == ["old starts"]
            assert states(executor) == ["held"]

            gates.open("x", "y")
            await until(lambda: len(log) == 3)
            assert log == ["old starts", "old resumes", "fresh starts"]
            await until(lambda: states(executor) == ["idle"])

    async def test_k7_runners_that_are_scheduled_when_a_thread_takes_the_worker_start_nothing(
        self, gates: Gates
    ) -> None:
        executor = KeyedExecutor(workers=1)
        started: list[int] = []

        async def handler(n: int) -> None:
            started.append(n)
            await trio.sleep_forever()

        async with dispatches(gates) as start:
            start(executor, handler, *range(200))
            start(executor, gates.compute, "x")
            await gates.arrival("x")
            before = len(started)
            await wait_all_tasks_blocked()
            # Twice as many runners at each pass: the thread came among the first of them, or before.
            assert len(started) == before < 10
            gates.open("x")
            await until(lambda: len(started) == 200)

    async def test_k7_who_wakes_at_the_moment_the_worker_comes_free_goes_on_too(self, gates: Gates) -> None:
        """Also between the end of the thread and the steps of those that have waited for it."""
        executor = KeyedExecutor(workers=1)
        early, late = trio.Event(), trio.Event()
        resumed: list[int] = []

        async def handler(n: int) -> None:
            await (early if n == 0 else late).wait()
            resumed.append(n)

        @direct
        def fails(item: str) -> None:
            gates.compute(item)
            raise ValueError(item)

        async with dispatches(gates) as start:
            start(executor, handler, *range(20))
            await wait_all_tasks_blocked()
            start(executor, fails, "x", on_error=lambda *_: late.set())
            await gates.arrival("x")
            early.set()
            await wait_all_tasks_blocked()
            assert resumed == []
            gates.open("x")
            await until(lambda: len(resumed) == 20)
            await until(lambda: states(executor) == ["idle"])

    async def test_k7_the_lanes_of_several_dispatches_take_turns(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=1)
        async with dispatches(gates) as start:
            for name in "abc":
                start(executor, gates.compute, f"{name}1", f"{name}2", f"{name}3")
                await gates.arrival("a1")
                await wait_all_tasks_blocked()
            for n in range(9):
                await until(lambda n=n: len(gates.arrived) > n)  # type: ignore[misc]
                gates.open(gates.arrived[n])
        # When it takes a turn, a lane lines up for its next one: a did so before the others were there.
        assert gates.arrived == ["a1", "a2", "b1", "c1", "a3", "b2", "c2", "b3", "c3"]

    async def test_k7_no_lane_loses_its_turn_to_another_one(self) -> None:
        executor = KeyedExecutor(workers=1)
        turns: list[int] = []
        count, lanes = 40, 4

        @direct
        def in_a_thread(item: tuple[int, int]) -> None:
            trio.from_thread.run_sync(turn, item[0])

        def turn(lane: int) -> None:
            turns.append(lane)
            on_the_loop.send_nowait(len(turns))  # whose lane then has its turns between theirs

        async with dispatches() as start:
            on_the_loop = start(executor, lambda _: None)
            for lane in range(lanes):
                start(executor, in_a_thread, *((lane, n) for n in range(count)))
            await until(lambda: len(turns) == lanes * count)
        so_far = Counter(turns[:lanes])
        for lane in turns[lanes : -lanes * 3]:
            so_far[lane] += 1
            assert max(so_far.values()) - min(so_far[n] for n in range(lanes)) <= 2

    async def test_k15_a_lane_whose_dispatch_ends_when_its_turn_comes_gives_it_on(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=1)
        handled: list[str] = []
        scope = trio.CancelScope()

        @direct
        def fails(item: str) -> None:
            gates.compute(item)
            raise ValueError(item)

        async def cancelled() -> None:
            with scope:
                async with trio.open_nursery() as nursery:
                    for _ in range(10):
                        run = partial(executor.dispatch, EndlessSource(["a"]), key=first, handler=lambda _: None)
                        nursery.start_soon(run)

        async with dispatches(gates) as start, trio.open_nursery() as nursery:
            start(executor, fails, "x", on_error=lambda *_: scope.cancel())
            await gates.arrival("x")
            nursery.start_soon(cancelled)
            await wait_all_tasks_blocked()
            start(executor, handled.append, "b")
            await wait_all_tasks_blocked()
            gates.open("x")
            await until(lambda: handled == ["b"])

    async def test_k7_a_blocking_handler_holds_no_worker(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=1)
        handled: list[str] = []
        async with dispatches(gates) as start:
            start(executor, gates.wait, "a", "b")
            await gates.arrival("a", "b")
            start(executor, handled.append, "on the loop")
            await until(lambda: handled)
            start(executor, gates.compute, "c")
            await gates.arrival("c")
            assert sorted(gates.inside) == ["a", "b", "c"]
            assert states(executor) == ["held"]
            gates.open("c")
            await until(lambda: states(executor) == ["idle"])

    async def test_blocking_handlers_share_the_pool_and_a_cancelled_wait_for_it_ends_at_once(
        self, gates: Gates
    ) -> None:
        pool = ExecPool(1)
        executor = KeyedExecutor(workers=2, pool=pool)
        waiting: list[BaseException | None] = []
        discarded: list[str] = []
        async with dispatches(gates) as start:
            start(executor, gates.wait, "a")
            await gates.arrival("a")
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    run = partial(executor.dispatch, ListSource(["b1", "b2"]), key=first, handler=gates.wait)
                    nursery.start_soon(collect, partial(run, on_discard=discarded.append), waiting)
                    await wait_all_tasks_blocked()
                    assert pool.statistics().queued == 1
                    assert gates.arrived == ["a"]
                    scope.cancel()
            assert gates.inside == ["a"]
            assert isinstance(waiting[0], trio.Cancelled)
            assert sorted(discarded) == ["b1", "b2"]
            start(executor, gates.wait, "c")
            gates.open("a")
            await gates.arrival("c")
            assert gates.arrived == ["a", "c"]
        assert pool.statistics().borrowed == 0

    @pytest.mark.parametrize("pin", ["compute", "wait"])
    async def test_a_cancelled_dispatch_waits_for_its_threads(self, gates: Gates, pin: str) -> None:
        executor = KeyedExecutor(workers=2)
        outcome: list[BaseException | None] = []
        states: list[tuple[str, str]] = []
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                source = EndlessSource(["a1", "a2", "b1"])
                run = partial(executor.dispatch, source, key=first, handler=getattr(gates, pin))
                run = partial(run, on_discard=lambda item: states.append((item, "discarded")))
                nursery.start_soon(collect, run, outcome)
                await gates.arrival("a1", "b1")
                scope.cancel()
                with trio.CancelScope(shield=True):
                    gates.open("b1")
                    await until(lambda: gates.inside == ["a1"])
                    await wait_all_tasks_blocked()
                    assert outcome == []
                    gates.open("a1")
                    await until(lambda: outcome)
        assert isinstance(outcome[0], trio.Cancelled)
        assert states == [("a2", "discarded")]
        assert sorted(gates.arrived) == ["a1", "b1"]

    @pytest.mark.parametrize("pin", ["compute", "wait"])
    async def test_nothing_starts_in_a_thread_once_the_dispatch_is_cancelled(self, gates: Gates, pin: str) -> None:
        """Also while the source is shielded, so that the receiver does not hear of it yet."""
        executor = KeyedExecutor(workers=1)
        source_goes_on = trio.Event()
        discarded: list[str] = []

        class Shielded(ListSource):
            async def receive_batch(self, limit: int, /) -> list[str]:
                if self.rest:
                    return await super().receive_batch(limit)
                with trio.CancelScope(shield=True):
                    await source_goes_on.wait()
                raise trio.EndOfChannel

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                source = Shielded(["a1", "a2"])
                run = partial(executor.dispatch, source, key=first, handler=getattr(gates, pin))
                nursery.start_soon(partial(run, on_discard=discarded.append))
                await gates.arrival("a1")
                running = list(gates.arrived)
                scope.cancel()
                with trio.CancelScope(shield=True):
                    gates.open_all()
                    await until(lambda: not gates.inside)
                    for _ in range(20):
                        await wait_all_tasks_blocked()
                    source_goes_on.set()
        assert gates.arrived == running
        assert "a2" in discarded

    @pytest.mark.parametrize("pin", ["compute", "wait"])
    @pytest.mark.parametrize("forced", [False, True])
    @pytest.mark.parametrize("passes", range(8))
    async def test_no_handler_starts_in_a_thread_after_the_dispatch_was_stopped(
        self, gates: Gates, pin: str, forced: bool, passes: int
    ) -> None:
        executor = KeyedExecutor(workers=1)
        outcome: list[BaseException | None] = []
        began = threading.Event()
        stopped: list[bool] = []

        def handler(item: str) -> None:
            stopped.append(stop.is_set())
            began.set()

        stop = threading.Event()
        marked = direct(handler) if pin == "compute" else blocking(handler)
        async with trio.open_nursery() as nursery:
            run = partial(executor.dispatch, EndlessSource(["a"]), key=first, handler=marked)
            nursery.start_soon(collect, run, outcome)
            for _ in range(passes):
                await trio.lowlevel.checkpoint()
            if trio.testing.active_thread_count():
                assert began.wait(PATIENCE)
            stop.set()
            if forced:
                executor.force_stop()
            else:
                nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await until(lambda: outcome)
                for _ in range(20):  # and an abandoned thread would have started by then
                    await wait_all_tasks_blocked()
        assert stopped in ([], [False])

    async def test_no_keyboard_interrupt_lands_where_a_thread_token_is_taken_and_given_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        protected: list[bool] = []

        def spied(original: Callable[..., Any]) -> Callable[..., Any]:
            def spy(*args: object) -> Any:
                if trio.lowlevel.in_trio_task():
                    protected.append(trio.lowlevel.currently_ki_protected())
                return original(*args)

            return spy

        monkeypatch.setattr(ExecPool, "try_submit", spied(ExecPool.try_submit))
        monkeypatch.setattr(PoolPlace, "end", spied(PoolPlace.end))
        await KeyedExecutor().dispatch(ListSource([1]), key=first_of_none, handler=blocking(lambda _: None))
        assert protected == [True, True]

    async def test_a_blocking_handler_keeps_no_thread_token_while_a_worker_is_held(self, gates: Gates) -> None:
        """Else the thread that holds the worker would wait for ever, if it waited for one that needs the token."""
        executor = KeyedExecutor(workers=1, pool=ExecPool(1))

        async with dispatches(gates) as start:
            start(executor, gates.wait, "a")
            await gates.arrival("a")
            start(executor, gates.wait, "b")  # waits for the token
            await wait_all_tasks_blocked()
            start(executor, gates.compute, "x")
            await gates.arrival("x")
            gates.open("a", "b")
            await until(lambda: "b" in gates.arrived and not {"a", "b"} & {*gates.inside})
            assert states(executor) == ["held"]
            assert borrowed(executor) == 0


class TestCancelledWhileItWaitsForItsWorker:
    @pytest.mark.parametrize("by", ["its own scope", "the dispatch's", "its own scope, then the dispatch's"])
    async def test_k2_only_its_dispatch_ends_the_wait_and_the_handler_gets_the_value_it_was_resumed_with(
        self, gates: Gates, by: str
    ) -> None:
        executor = KeyedExecutor(workers=1)
        send, receive = trio.open_memory_channel[str](1)
        scopes: list[trio.CancelScope] = []
        log: list[str] = []
        outcome: list[BaseException | None] = []
        discarded: list[str] = []

        async def handler(item: str) -> None:
            log.append(item)
            if item != "k1":
                return
            with trio.CancelScope() as scope:
                scopes.append(scope)
                log.append(await receive.receive())
                try:
                    await trio.lowlevel.checkpoint()
                except trio.Cancelled:
                    log.append("cancelled")
                    raise
            log.append("k1 ends")

        async with dispatches(gates) as start:
            around = trio.CancelScope()

            async def run() -> None:
                with around:
                    source = EndlessSource(["k1", "k2", "other"])
                    await executor.dispatch(source, key=first, handler=handler, on_discard=discarded.append)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(collect, run, outcome)
                await wait_all_tasks_blocked()
                assert log == ["k1", "other"], outcome
                start(executor, gates.compute, "x")
                await gates.arrival("x")
                send.send_nowait("value")
                await wait_all_tasks_blocked()
                assert log == ["k1", "other"]
                if by != "the dispatch's":
                    scopes[0].cancel()
                    await wait_all_tasks_blocked()
                    assert log == ["k1", "other"]  # it computes no sooner for that
                if by == "its own scope":
                    gates.open("x")
                    await until(lambda: log[-1] == "k2")
                    assert log == ["k1", "other", "value", "cancelled", "k1 ends", "k2"]
                    nursery.cancel_scope.cancel()
                else:
                    around.cancel()
                    await until(lambda: outcome)
                    assert log == ["k1", "other", "value", "cancelled"]
                    assert discarded == ["k2"]
                    assert gates.inside == ["x"]
