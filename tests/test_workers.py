"""Workers and threads: what `@direct` and `@blocking` handlers hold, and for how long. K numbers are the design's."""

import contextvars
import gc
import logging
import random
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial, partialmethod, wraps
from math import inf
from typing import Any, Protocol, TypeVar

import pytest
import trio
import trio.testing
from support import EndlessSource, ListSource, a_cancelled, collect, first, task_names
from trio.testing import wait_all_tasks_blocked

from trio_wow.errors import ExecutorClosedError
from trio_wow.execution import KeyedExecutor, blocking, direct

F = TypeVar("F", bound=Callable[..., object])

PATIENCE = 10  # seconds until a test or a thread that waits in vain says so


class Gates:
    """A plain handler whose items stay in their threads until they are let go."""

    def __init__(self) -> None:
        self.inside: list[Any] = []
        self.arrived: list[Any] = []
        self.all_open = False
        self._gates: dict[Any, threading.Event] = defaultdict(threading.Event)

    @direct
    def compute(self, item: Any) -> None:
        self._stay(item)

    @blocking
    def wait(self, item: Any) -> None:
        self._stay(item)

    def _stay(self, item: Any) -> None:
        gate = trio.from_thread.run_sync(self._arrive, item)
        let_go = gate.wait(PATIENCE)
        self.inside.remove(item)
        assert let_go, f"{item!r} was not let go"

    def _arrive(self, item: Any) -> threading.Event:
        self.inside.append(item)
        self.arrived.append(item)
        if self.all_open:
            self._gates[item].set()
        return self._gates[item]

    async def arrival(self, *items: Any) -> None:
        await until(lambda: set(items) <= set(self.arrived))

    def open(self, *items: Any) -> None:
        for item in items:
            self._gates[item].set()

    def open_all(self) -> None:
        self.all_open = True
        for gate in list(self._gates.values()):
            gate.set()


@pytest.fixture
def gates() -> Iterator[Gates]:
    gates = Gates()
    yield gates
    gates.open_all()


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop and the threads go on until a condition holds."""
    with trio.fail_after(PATIENCE):
        while not condition():
            await wait_all_tasks_blocked(0.001)  # to leave the interpreter to the threads


Start = Callable[..., "trio.MemorySendChannel[Any]"]


@asynccontextmanager
async def dispatches(gates: Gates | None = None) -> AsyncIterator[Start]:
    """Give a function that starts a dispatch, fed with some items and by the channel it returns; cancel all at the end.

    A dispatch that fails fails the test, unless there is a list for its `outcome`.
    """

    def start(
        executor: KeyedExecutor,
        handler: Callable[[Any], object],
        *items: Any,
        key: Callable[[Any], Hashable] = lambda item: item,
        outcome: list[BaseException | None] | None = None,
        **callbacks: Any,
    ) -> "trio.MemorySendChannel[Any]":
        send, receive = trio.open_memory_channel[Any](inf)
        for item in items:
            send.send_nowait(item)
        run = partial(executor.dispatch, receive, key=key, handler=handler, **callbacks)
        nursery.start_soon(run if outcome is None else partial(collect, run, outcome))
        return send

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            try:
                yield start
            finally:
                if gates is not None:
                    gates.open_all()
                nursery.cancel_scope.cancel()


def states(executor: KeyedExecutor) -> list[str]:
    return [worker.state for worker in executor.statistics().workers]


def queued(executor: KeyedExecutor) -> list[int]:
    return [worker.mailboxes_queued for worker in executor.statistics().workers]


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

    async def test_blocking_handlers_share_trios_thread_limiter_and_a_cancelled_wait_for_it_ends_at_once(
        self, gates: Gates
    ) -> None:
        limiter = trio.to_thread.current_default_thread_limiter()
        limiter.total_tokens = 1
        executor = KeyedExecutor(workers=2)
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
                    assert limiter.statistics().tasks_waiting == 1
                    assert gates.arrived == ["a"]
                    scope.cancel()
            assert gates.inside == ["a"]
            assert isinstance(waiting[0], trio.Cancelled)
            assert discarded == ["b2"]
            start(executor, gates.wait, "c")
            gates.open("a")
            await gates.arrival("c")
            assert gates.arrived == ["a", "c"]
        assert limiter.borrowed_tokens == 0

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
        assert ("a2" in discarded) == (pin == "compute"), "it is interrupted if it waited for Trio's limiter"

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
        limiter = trio.to_thread.current_default_thread_limiter()
        protected: list[bool] = []

        class Spy:
            async def acquire_on_behalf_of(self, borrower: object) -> None:
                protected.append(trio.lowlevel.currently_ki_protected())
                await limiter.acquire_on_behalf_of(borrower)

            def release_on_behalf_of(self, borrower: object) -> None:
                protected.append(trio.lowlevel.currently_ki_protected())
                limiter.release_on_behalf_of(borrower)

        monkeypatch.setattr(trio.to_thread, "current_default_thread_limiter", Spy)
        await KeyedExecutor().dispatch(ListSource([1]), key=first_of_none, handler=blocking(lambda _: None))
        assert protected == [True, True]

    async def test_a_blocking_handler_keeps_no_thread_token_while_a_worker_is_held(self, gates: Gates) -> None:
        """Else the thread that holds the worker, and needs a token itself, would wait for it for ever."""
        trio.to_thread.current_default_thread_limiter().total_tokens = 1
        executor = KeyedExecutor(workers=1)
        got: list[str] = []

        async def in_another_thread() -> None:
            with trio.fail_after(PATIENCE / 2):
                await trio.to_thread.run_sync(got.append, "token")

        @direct
        def needs_a_token(item: str) -> None:
            gates.compute(item)
            trio.from_thread.run(in_another_thread)

        async with dispatches(gates) as start:
            start(executor, gates.wait, "a")
            await gates.arrival("a")
            start(executor, gates.wait, "b")  # waits for the token
            await wait_all_tasks_blocked()
            start(executor, needs_a_token, "x")
            await gates.arrival("x")
            gates.open("a", "b")
            await until(lambda: "b" in gates.arrived and not {"a", "b"} & {*gates.inside})
            gates.open("x")
            await until(lambda: got)
            await until(lambda: states(executor) == ["idle"])


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


class Pin(Protocol):
    """`direct` or `blocking`."""

    __name__: str

    def __call__(self, function: F, /) -> F: ...


PINS = pytest.mark.parametrize("pin", [direct, blocking], ids=["direct", "blocking"])


class TestThreads:
    async def test_k6_a_hot_key_lets_the_others_in_after_its_turn(self) -> None:
        order: list[str] = []
        await KeyedExecutor(workers=1, throughput=3).dispatch(
            ListSource(["hot"] * 7 + ["cold"]), key=lambda item: item, handler=direct(lambda item: order.append(item))
        )
        assert order == ["hot"] * 3 + ["cold"] + ["hot"] * 4

    @PINS
    @pytest.mark.parametrize("seed", range(5))
    async def test_k3_items_of_one_key_run_one_at_a_time_in_order(self, pin: Pin, seed: int) -> None:
        rng = random.Random(seed)
        items = [(rng.randrange(4), n) for n in range(80)]
        inside: set[int] = set()
        done: dict[int, list[int]] = defaultdict(list)

        @pin
        def handler(item: tuple[int, int]) -> None:
            key, n = item
            assert key not in inside
            inside.add(key)
            if n % 5 == 0:
                trio.from_thread.run_sync(int)
            inside.remove(key)
            done[key].append(n)

        executor = KeyedExecutor(workers=3, max_in_flight=rng.randint(1, 16), throughput=rng.randint(1, 4))
        await executor.dispatch(ListSource(items, batch=5), key=first, handler=handler)
        assert done == {key: [n for k, n in items if k == key] for key in done}
        assert sum(map(len, done.values())) == 80

    @PINS
    async def test_k4_memory_follows_active_items(self, pin: Pin) -> None:
        class Item:
            def __init__(self, n: int) -> None:
                self.n = n

        def count() -> None:
            gc.collect()
            alive.append(sum(isinstance(each, Item) for each in gc.get_objects()))

        @pin
        def handler(item: Item) -> None:
            if item.n == 300:
                trio.from_thread.run_sync(count)
            if item.n % 3 == 0:
                raise ValueError(item)

        async def items() -> AsyncIterator[Item]:
            for n in range(310):
                yield Item(n)

        alive: list[int] = []
        await KeyedExecutor(workers=2, max_in_flight=8).dispatch(
            items(), key=lambda item: item, handler=handler, on_error=lambda *_: None
        )
        assert 0 < alive[0] <= 2 * 8

    @PINS
    async def test_k16_context_variables_are_the_handlers_own(self, pin: Pin) -> None:
        var = contextvars.ContextVar("var", default="unset")
        var.set("outer")
        seen: list[tuple[object, ...]] = []

        async def look(n: int) -> tuple[int, str]:
            await trio.lowlevel.checkpoint()
            return n, var.get()

        @pin
        def handler(n: int) -> None:
            before = var.get()
            var.set(f"item {n}")
            seen.append((before, var.get(), trio.from_thread.run_sync(var.get), trio.from_thread.run(look, n)))

        await KeyedExecutor(workers=1).dispatch(ListSource(range(3)), key=lambda _: 0, handler=handler)
        assert seen == [("outer", f"item {n}", f"item {n}", (n, f"item {n}")) for n in range(3)]
        assert var.get() == "outer"

    @PINS
    async def test_a_thread_and_its_task_bear_the_mailboxs_name(self, pin: Pin) -> None:
        names: list[str] = []

        @pin
        def handler(key: object) -> None:
            names.append(threading.current_thread().name)
            names.extend(name for name in trio.from_thread.run_sync(task_names) if name.startswith("mailbox"))

        key = Unprintable()
        await KeyedExecutor().dispatch(ListSource([7, key]), key=lambda item: item, handler=handler)
        assert sorted({*names}) == sorted({"mailbox 7", f"mailbox {object.__repr__(key)}"})


class Unprintable:
    def __str__(self) -> str:
        raise LookupError("not to be printed")

    __repr__ = __str__


class Boom(BaseException):
    pass


def raiser(error: BaseException) -> Callable[[Any], None]:
    def handler(item: Any) -> None:
        raise error

    return handler


class DemandedSource(EndlessSource):
    """Waits for demand, exceeds it by up to `excess` items, and does not end."""

    def __init__(self, items: Sequence[Any], *, excess: int = 0) -> None:
        super().__init__(items)
        self.excess = excess
        self.granted = self.given = 0
        self._more = trio.Event()

    def add_demand(self, count: int, /) -> None:
        self.granted += count
        self._more.set()

    async def receive_batch(self, limit: int, /) -> list[Any]:
        while self.rest and self.granted <= self.given:
            self._more = trio.Event()
            await self._more.wait()
        batch = await super().receive_batch(self.granted - self.given + self.excess)
        self.given += len(batch)
        return batch


ERRORS: list[BaseException] = [
    ValueError("plain"),
    trio.TooSlowError("timeout"),
    trio.EndOfChannel("not of the source"),
    ExceptionGroup("group", [ValueError("leaf")]),
    ExceptionGroup("outer", [ExceptionGroup("inner", [ValueError("leaf")])]),
    ExceptionGroup("mixed", [ValueError("a"), KeyError("b")]),
]
FATAL: list[BaseException] = [
    Boom("outside Exception"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    BaseExceptionGroup("mixed", [Boom("a"), ValueError("b")]),
]


class TestOutcomes:
    @PINS
    async def test_fs03_the_window_is_whole_after_every_reported_outcome(self, pin: Pin) -> None:
        executor = KeyedExecutor(workers=2, max_in_flight=4)
        source = DemandedSource(range(64))
        ended: list[int] = []
        expected = [*ERRORS, None]

        @pin
        def handler(n: int) -> None:
            error = expected[n % len(expected)]
            if error is not None:
                raise error
            ended.append(n)

        def on_error(n: int, error: Exception) -> None:
            assert error is expected[n % len(expected)]
            ended.append(n)

        async with trio.open_nursery() as nursery:
            run = partial(executor.dispatch, source, key=lambda n: n, handler=handler)
            nursery.start_soon(partial(run, on_error=on_error))
            await until(lambda: len(ended) == 64)
            await until(lambda: not executor.statistics().dispatches[0].in_flight)
            (dispatch,) = executor.statistics().dispatches
            assert (dispatch.demand_outstanding, dispatch.overdraft) == (4, 0)
            assert source.granted == 64 + 4
            assert states(executor) == ["idle", "idle"]
            nursery.cancel_scope.cancel()
        assert sorted(ended) == list(range(64))
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0

    @PINS
    @pytest.mark.parametrize("error", ERRORS + FATAL, ids=repr)
    async def test_fs03_what_ends_a_dispatch_is_raised_as_it_is_and_frees_the_worker(
        self, pin: Pin, error: BaseException
    ) -> None:
        executor = KeyedExecutor(workers=1, max_in_flight=4)
        discarded: list[int] = []
        reported: list[object] = []
        source = ListSource(range(8))
        run = partial(executor.dispatch, source, key=lambda _: "one", handler=pin(raiser(error)))
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - identity is asserted
            await run(
                on_discard=discarded.append,
                on_error=None if isinstance(error, Exception) else lambda *args: reported.append(args),
            )
        assert caught.value is error
        assert (discarded, reported, source.rest) == ([1, 2, 3], [], [4, 5, 6, 7])
        assert states(executor) == ["idle"]
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
        done: list[int] = []
        with trio.fail_after(PATIENCE):
            await executor.dispatch(ListSource([1]), key=first_of_none, handler=pin(lambda n: done.append(n)))
        assert done == [1]

    @PINS
    async def test_fs03_a_cancelled_that_is_not_ours_is_no_success(self, pin: Pin) -> None:
        executor = KeyedExecutor(workers=1)
        reported: list[object] = []
        handler = pin(raiser(await a_cancelled()))
        with pytest.raises(RuntimeError, match=r"handler, or the source, raised trio.Cancelled although nothing had"):
            await executor.dispatch(
                ListSource([1, 2]), key=first_of_none, handler=handler, on_error=lambda *args: reported.append(args)
            )
        assert reported == []
        assert states(executor) == ["idle"]

    @PINS
    async def test_fs03_a_group_with_a_cancelled_that_is_not_ours_keeps_its_error(self, pin: Pin) -> None:
        reported: list[Exception] = []
        error = BaseExceptionGroup("both", [await a_cancelled(), ValueError(1)])
        with pytest.raises(RuntimeError, match=r"raised trio.Cancelled although nothing had"):
            await KeyedExecutor(workers=1).dispatch(
                ListSource([1, 2]),
                key=first_of_none,
                handler=pin(raiser(error)),
                on_error=lambda _, error: reported.append(error),
            )
        (group,) = reported
        assert isinstance(group, ExceptionGroup)
        assert repr(group.exceptions) == "(ValueError(1),)"

    @PINS
    async def test_fs03_stop_iteration_is_an_error_like_others(self, pin: Pin) -> None:
        """Python lets none out of a coroutine: it comes as the cause of a `RuntimeError`."""
        reported: list[Exception] = []
        await KeyedExecutor(workers=1).dispatch(
            ListSource([1, 2]),
            key=first_of_none,
            handler=pin(raiser(StopIteration())),
            on_error=lambda _, error: reported.append(error),
        )
        assert [repr(error.__cause__) for error in reported] == ["StopIteration()"] * 2

    @PINS
    async def test_fs03_an_awaitable_returned_by_a_plain_function_is_refused(self, pin: Pin) -> None:
        async def work(n: int) -> None:
            raise AssertionError("must not run")

        with pytest.raises(TypeError, match=r"<lambda> is a plain function but returned an awaitable; declare it"):
            await KeyedExecutor().dispatch(ListSource([1]), key=first_of_none, handler=pin(lambda n: work(n)))

    @PINS
    async def test_fs03_an_error_while_the_dispatch_is_cancelled_is_not_lost(self, gates: Gates, pin: Pin) -> None:
        @pin
        def handler(item: str) -> None:
            gates.compute(item)
            trio.from_thread.check_cancelled()  # a plain cancellation does not reach a thread
            raise ValueError(item)

        failed: list[BaseException | None] = []
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                run = partial(KeyedExecutor(workers=1).dispatch, EndlessSource(["a"]), key=first, handler=handler)
                nursery.start_soon(collect, run, failed)
                await gates.arrival("a")
                scope.cancel()
                gates.open("a")
        (group,) = failed
        assert isinstance(group, BaseExceptionGroup)
        assert repr(group.exceptions[0]) == "ValueError('a')"
        assert group.subgroup(trio.Cancelled)


def first_of_none(item: object) -> str:
    return "the only key"


class TestForcedStop:
    @pytest.mark.parametrize("pin", ["compute", "wait"])
    async def test_abandons_threads_and_names_them(
        self, gates: Gates, pin: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        now = 100.0
        limiter = trio.to_thread.current_default_thread_limiter()
        executor = KeyedExecutor(workers=1, perf_counter=lambda: now, name="mine")
        discarded: list[str] = []
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                with pytest.raises(ExecutorClosedError, match="forced stop"):
                    await executor.dispatch(
                        EndlessSource(["a1", "a2"]), key=first, handler=getattr(gates, pin), on_discard=discarded.append
                    )

            nursery.start_soon(run)
            await gates.arrival("a1")
            now = 107.5
            executor.force_stop()
            executor.force_stop()
        executor.force_stop()
        assert gates.inside == ["a1"]
        assert discarded == ["a2"]
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("trio_wow.execution", "WARNING")
        assert record.getMessage() == f"abandoned the thread of handler Gates.{pin} for key a, which has run for 7.5 s"
        assert states(executor) == ["abandoned" if pin == "compute" else "idle"]
        assert limiter.borrowed_tokens == (pin == "wait")
        with trio.fail_after(PATIENCE):
            await executor.aclose()
        with pytest.raises(ExecutorClosedError):
            await executor.dispatch(ListSource(["b"]), key=first, handler=gates.wait)

        gates.open_all()
        await until(lambda: states(executor) == ["idle"] and not limiter.borrowed_tokens)
        assert len(caplog.records) == 1
        assert gates.arrived == ["a1"]

    @PINS
    @pytest.mark.parametrize("error", [ValueError("late"), SystemExit(3), Boom("late")], ids=repr)
    async def test_the_late_error_of_an_abandoned_thread_is_logged(
        self, gates: Gates, pin: Pin, error: BaseException, caplog: pytest.LogCaptureFixture
    ) -> None:
        executor = KeyedExecutor(workers=1)

        @pin
        def fails_late(item: str) -> None:
            gates.compute(item)
            raise error

        async with trio.open_nursery() as nursery:
            outcome: list[BaseException | None] = []
            run = partial(executor.dispatch, EndlessSource(["a"]), key=first, handler=fails_late)
            nursery.start_soon(collect, run, outcome)
            await gates.arrival("a")
            executor.force_stop()
        assert isinstance(outcome[0], ExecutorClosedError)
        gates.open("a")
        await until(lambda: len(caplog.records) == 2)
        record = caplog.records[1]
        assert record.levelname == "ERROR"
        assert record.getMessage().startswith("abandoned handler TestForcedStop.")
        assert record.getMessage().endswith("fails_late failed for key a")
        assert record.exc_info is not None
        assert record.exc_info[1] is error

    @PINS
    async def test_an_abandoned_thread_that_asks_whether_it_is_cancelled_ends_without_an_error(
        self, gates: Gates, pin: Pin, caplog: pytest.LogCaptureFixture
    ) -> None:
        executor = KeyedExecutor(workers=1)
        ended: list[str] = []
        limiter = trio.to_thread.current_default_thread_limiter()

        @pin
        def asks(item: str) -> None:
            gates.compute(item)
            try:
                trio.from_thread.check_cancelled()
            except trio.Cancelled:
                ended.append(item)
                raise

        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, partial(executor.dispatch, EndlessSource(["a"]), key=first, handler=asks))
            await gates.arrival("a")
            executor.force_stop()
        gates.open("a")
        await until(lambda: ended and states(executor) == ["idle"] and not limiter.borrowed_tokens)
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    @PINS
    async def test_a_thread_that_ends_at_that_moment_tells_its_error_exactly_once(
        self, pin: Pin, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(30):
            caplog.clear()
            executor = KeyedExecutor(workers=1)
            go, gone, inside = threading.Event(), threading.Event(), threading.Event()
            reported: list[object] = []

            @pin
            def handler(item: str, go: Any = go, gone: Any = gone, inside: Any = inside) -> None:
                inside.set()
                assert go.wait(PATIENCE)
                gone.set()
                raise ValueError(item)

            async with trio.open_nursery() as nursery:
                run = partial(executor.dispatch, EndlessSource(["a"]), key=first, handler=handler)
                run = partial(run, on_error=lambda *args: reported.append(args))  # noqa: B023
                nursery.start_soon(collect, run)
                await until(inside.is_set)
                go.set()
                assert gone.wait(PATIENCE)  # holds the event loop, so that nobody hears of the thread's end
                executor.force_stop()
            await until(lambda: states(executor) == ["idle"])  # noqa: B023
            await until(lambda: len(reported) + sum(r.levelname == "ERROR" for r in caplog.records) == 1)  # noqa: B023
            await wait_all_tasks_blocked()
            assert len(reported) + sum(r.levelname == "ERROR" for r in caplog.records) == 1
            assert len(reported) + sum(r.levelname == "WARNING" for r in caplog.records) == 1

    @PINS
    def test_an_abandoned_thread_may_outlive_the_trio_run(self, pin: Pin, caplog: pytest.LogCaptureFixture) -> None:
        go, inside, logged = threading.Event(), threading.Event(), threading.Event()

        class Tell(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if record.levelname == "ERROR":
                    logged.set()

        @pin
        def handler(key: object) -> None:
            inside.set()
            assert go.wait(PATIENCE)
            raise ValueError("late")

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                executor = KeyedExecutor(workers=1)
                run = partial(executor.dispatch, EndlessSource([Unprintable()]), key=lambda item: item, handler=handler)
                nursery.start_soon(collect, run)
                await until(inside.is_set)
                executor.force_stop()

        tell = Tell()
        logger = logging.getLogger()
        logger.addHandler(tell)  # behind caplog's
        try:
            trio.run(main)
            assert not logged.is_set()
            go.set()
            assert logged.wait(PATIENCE)
        finally:
            go.set()
            logger.removeHandler(tell)
        assert "Unprintable object at" in caplog.records[0].getMessage()

    async def test_ends_all_dispatches_and_an_aclose_that_waits_for_them(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=1)
        outcomes: list[BaseException | None] = []
        closed: list[BaseException | None] = []

        async def forever(item: str) -> None:
            await trio.sleep_forever()

        async with dispatches(gates) as start:
            for handler in (forever, gates.wait, gates.compute):
                start(executor, handler, "a1", "a2", "b1", key=first, outcome=outcomes)
                await wait_all_tasks_blocked()
            await gates.arrival("a1")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(collect, executor.aclose, closed)
                await wait_all_tasks_blocked()
                executor.force_stop()
            assert closed == [None]
            assert [type(outcome) for outcome in outcomes] == [ExecutorClosedError] * 3
            assert gates.inside

    @PINS
    async def test_may_come_from_a_handlers_own_thread(self, pin: Pin, caplog: pytest.LogCaptureFixture) -> None:
        executor = KeyedExecutor(workers=1)
        went_on = threading.Event()

        @pin
        def handler(n: int) -> None:
            trio.from_thread.run_sync(executor.force_stop)
            went_on.set()

        with trio.fail_after(PATIENCE):
            with pytest.raises(ExecutorClosedError):
                await executor.dispatch(EndlessSource([1]), key=first_of_none, handler=handler)
            await until(went_on.is_set)
            await until(lambda: states(executor) == ["idle"])

    @PINS
    async def test_ends_a_cancelled_dispatch_that_waits_for_its_thread(
        self, gates: Gates, pin: Pin, caplog: pytest.LogCaptureFixture
    ) -> None:
        executor = KeyedExecutor(workers=1)
        outcome: list[BaseException | None] = []
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                handler = pin(lambda item: gates.compute(item))
                run = partial(executor.dispatch, EndlessSource(["a"]), key=first, handler=handler)
                nursery.start_soon(collect, run, outcome)
                await gates.arrival("a")
                scope.cancel()
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                    assert outcome == []
                    executor.force_stop()
                    await until(lambda: outcome)
        assert isinstance(outcome[0], trio.Cancelled)
        assert gates.inside == ["a"]
        assert len(caplog.records) == 1

    @pytest.mark.parametrize("waits", ["before", "after"])
    async def test_a_shielded_handler_does_not_wait_for_a_worker_with_an_abandoned_thread(
        self, gates: Gates, waits: str
    ) -> None:
        executor = KeyedExecutor(workers=1)
        outcomes: list[BaseException | None] = []
        wake = trio.Event()
        cleaned: list[str] = []

        async def cleans_up(item: str) -> None:
            with trio.CancelScope(shield=True):
                await wake.wait()
                cleaned.append(item)

        async with dispatches(gates) as start:
            start(executor, cleans_up, "c", outcome=outcomes)
            await wait_all_tasks_blocked()
            start(executor, gates.compute, "x", outcome=outcomes)
            await gates.arrival("x")
            if waits == "before":
                wake.set()
                await wait_all_tasks_blocked()
                assert cleaned == []
            executor.force_stop()
            await wait_all_tasks_blocked()
            wake.set()
            await until(lambda: len(outcomes) == 2)
            assert cleaned == ["c"]
            assert gates.inside == ["x"]
            assert states(executor) == ["abandoned"]
            gates.open("x")
            await until(lambda: states(executor) == ["idle"])


class TestStatistics:
    async def test_k14_every_number_agrees_with_the_others_at_any_moment(self) -> None:
        executor = KeyedExecutor(workers=2, max_in_flight=20, throughput=2)
        looked: Counter[str] = Counter()
        rng = random.Random(14)
        stopping = False

        def look(moment: str, of: str = "") -> None:
            looked[moment] += 1
            statistics = executor.statistics()
            for each in statistics.dispatches:
                here = f"{each} at {moment}"
                total = sum(backlog.unfinished for backlog in each.backlogs)
                # What has just arrived and has no key yet is in no key's backlog.
                arriving = (moment, of) == ("in key", each.handler)
                assert total <= each.in_flight if arriving else total == each.in_flight, here
                unreturned = each.max_in_flight - (each.in_flight + each.demand_outstanding - each.overdraft)
                ended = (moment, of) == ("on_error", each.handler)  # and its lot of 1 follows
                assert unreturned == ended or stopping, here
                assert len(each.backlogs) == each.mailboxes, here
                assert all(backlog.unfinished > 0 for backlog in each.backlogs), here
                assert each.stalled == any(backlog.unfinished >= 20 for backlog in each.backlogs), here
            mailboxes = sum(each.mailboxes for each in statistics.dispatches)
            assert sum(worker.mailboxes_queued for worker in statistics.workers) <= mailboxes or stopping

        class Source(DemandedSource):
            def add_demand(self, count: int, /) -> None:
                super().add_demand(count)
                look("demand arises")

            async def receive_batch(self, limit: int, /) -> list[Any]:
                look("between batches")
                self.excess = rng.randrange(3)
                batch = await super().receive_batch(limit)
                look("a batch arrives")
                return batch

        @direct
        def in_a_worker(n: int) -> None:
            trio.from_thread.run_sync(look, "in a worker's thread")
            if n % 7 == 0:
                raise ValueError(n)

        @blocking
        def in_a_thread(n: int) -> None:
            trio.from_thread.run_sync(look, "in a thread")
            if n % 7 == 0:
                raise ValueError(n)

        def on_the_loop(n: int) -> None:
            look("in a plain handler")
            if n % 7 == 0:
                raise ValueError(n)

        async def waits(n: int) -> None:
            look("in a first segment")
            for _ in range(n % 3):
                await trio.lowlevel.checkpoint()
                look("after a wait")
            if n % 7 == 0:
                raise ValueError(n)

        def key(handler: str, n: int) -> int:
            look("in key", handler)
            return n % 5

        async with dispatches():
            async with trio.open_nursery() as nursery:
                for handler in (in_a_worker, in_a_thread, on_the_loop, waits):
                    source, name = Source(range(60)), handler.__qualname__
                    run = partial(executor.dispatch, source, key=partial(key, name), handler=handler)
                    run = partial(run, on_error=lambda n, error, name=name: look("on_error", name))
                    nursery.start_soon(partial(run, on_discard=lambda n: look("on_discard")))
                await until(lambda: looked["on_error"] == 4 * 9)
                await until(lambda: not any(each.in_flight for each in executor.statistics().dispatches))
                nursery.cancel_scope.cancel()

            def fails(n: int) -> None:
                nonlocal stopping
                stopping = True
                raise ValueError(n)

            with pytest.raises(ValueError, match=r"^\d+$"):
                await executor.dispatch(
                    ListSource(range(20)), key=lambda n: n % 5, handler=fails, on_discard=lambda n: look("on_discard")
                )
        assert looked["on_discard"] >= 18
        assert len(looked) == 11
        assert executor.statistics().dispatches == ()

    @pytest.mark.parametrize("pin", ["compute", "wait"])
    async def test_k14_overdraft_and_demand_of_a_demand_source(self, gates: Gates, pin: str) -> None:
        def numbers() -> tuple[int, int, int]:
            (each,) = executor.statistics().dispatches
            return each.in_flight, each.demand_outstanding, each.overdraft

        executor = KeyedExecutor(workers=1, max_in_flight=4)
        async with trio.open_nursery() as nursery:
            source = DemandedSource(range(6), excess=2)
            nursery.start_soon(partial(executor.dispatch, source, key=lambda _: "k", handler=getattr(gates, pin)))
            await gates.arrival(0)
            await wait_all_tasks_blocked()
            assert numbers() == (6, 0, 2)
            for n in range(6):
                gates.open(n)
                await until(lambda n=n: numbers() == (5 - n, max(0, n - 1), max(0, 1 - n)))  # type: ignore[misc]
            assert source.granted == 4 + 6
            nursery.cancel_scope.cancel()

    @pytest.mark.parametrize("pin", ["compute", "wait"])
    async def test_k14_stalled_when_one_key_holds_all_but_less_than_a_lot(self, gates: Gates, pin: str) -> None:
        executor = KeyedExecutor(workers=1)
        hot = 241
        items = [("hot", n) for n in range(hot - 1)]
        async with dispatches(gates) as start:
            send = start(executor, getattr(gates, pin), *items, key=first)
            await gates.arrival(items[0])
            await wait_all_tasks_blocked()
            (each,) = executor.statistics().dispatches
            assert (each.backlogs[0].key, each.backlogs[0].unfinished, each.stalled) == ("hot", 240, False)
            send.send_nowait(("hot", hot))
            send.send_nowait(("cold", 0))
            await wait_all_tasks_blocked()
            (each,) = executor.statistics().dispatches
            assert [(backlog.key, backlog.unfinished) for backlog in each.backlogs] == [("hot", 241), ("cold", 1)]
            assert each.stalled
            gates.open(items[0])
            await until(lambda: not executor.statistics().dispatches[0].stalled)

    async def test_k14_the_ten_longest_backlogs_come_first(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=1)
        items = [(key, n) for key in range(12) for n in range(key + 1)]
        async with dispatches(gates) as start:
            start(executor, gates.compute, *items, key=first)
            await gates.arrival((0, 0))
            await wait_all_tasks_blocked()
            (each,) = executor.statistics().dispatches
            assert [(b.key, b.unfinished) for b in each.backlogs] == [(key, key + 1) for key in range(11, 1, -1)]
            assert (each.mailboxes, each.in_flight) == (12, len(items))
            assert [worker.mailboxes_queued for worker in executor.statistics().workers] == [11]

    async def test_what_is_at_work_shows_itself_also_with_keys_that_cannot_be_printed(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=1, max_in_flight=8, throughput=4, name="shown")
        key = Unprintable()
        async with dispatches(gates) as start:
            start(executor, gates.compute, 1, 2, 3, 4, key=lambda n: key if n < 4 else "other")
            await gates.arrival(1)
            await wait_all_tasks_blocked()
            assert repr(executor) == ("<KeyedExecutor 'shown': workers=1, max_in_flight=8, throughput=4, 1 dispatches>")
            inside = {
                repr(each) for each in gc.get_objects() if type(each).__module__.startswith("trio_wow.execution.")
            }
            label = object.__repr__(key)
            assert f"<worker 0 of shown: held by mailbox {label}, 1 mailboxes queued>" in inside
            assert {f"<mailbox {label}: 2 queued, 1 running>", "<mailbox other: 1 queued>"} <= inside
            assert f"mailbox {label}" in task_names()


class TestLife:
    def test_shared_is_one_per_trio_run(self) -> None:
        with pytest.raises(RuntimeError):
            KeyedExecutor.shared()
        both = threading.Barrier(2)
        found: list[KeyedExecutor] = []

        async def main() -> None:
            executor = KeyedExecutor.shared()
            both.wait(PATIENCE)  # while the other run has its own
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def elsewhere() -> None:
                    assert KeyedExecutor.shared() is executor

            found.append(executor)
            await executor.dispatch(ListSource([1]), key=first_of_none, handler=direct(lambda _: None))
            await executor.aclose()
            fresh = KeyedExecutor.shared()
            assert fresh is not executor
            assert fresh is KeyedExecutor.shared()
            fresh.force_stop()
            assert KeyedExecutor.shared() is not fresh

        other = threading.Thread(target=trio.run, args=(main,), daemon=True)
        other.start()
        trio.run(main)
        other.join(PATIENCE)
        assert len({*map(id, found)}) == 2

    def test_an_executor_serves_one_trio_run_after_another(self) -> None:
        executor = KeyedExecutor(workers=2)
        done: list[tuple[int, int]] = []

        @direct
        def in_a_thread(item: tuple[int, int]) -> None:
            trio.from_thread.run_sync(done.append, item)

        async def main(run: int) -> None:
            for handler in (in_a_thread, blocking(lambda item: done.append(item))):
                with trio.move_on_after(0):  # and one that leaves in the middle
                    await executor.dispatch(EndlessSource([(run, 0)]), key=first_of_none, handler=handler)
                items = [(run, n) for n in range(20)]
                await executor.dispatch(ListSource(items), key=lambda item: item[1] % 3, handler=handler)

        for run in range(3):
            trio.run(main, run)
        assert sorted(done) == sorted([(run, n) for run in range(3) for n in range(20)] * 2)

    @PINS
    async def test_between_dispatches_there_is_no_task_and_no_thread(self, pin: Pin) -> None:
        executor = KeyedExecutor(workers=2)
        before = sorted(task_names())
        inside: list[int] = []

        @pin
        def handler(n: int) -> None:
            inside.append(trio.from_thread.run_sync(trio.testing.active_thread_count))
            assert threading.current_thread().name.startswith("mailbox ")

        for _ in range(3):
            await executor.dispatch(ListSource(range(20)), key=lambda n: n % 4, handler=handler)
            assert sorted(task_names()) == before
            assert trio.testing.active_thread_count() == 0
            assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("mailbox")]
            assert executor.statistics().dispatches == ()
            assert queued(executor) == [0, 0]
            assert states(executor) == ["idle", "idle"]
        assert min(inside) >= 1

    @pytest.mark.parametrize("kind", ["direct", "blocking", "async", "plain"])
    @pytest.mark.parametrize("outcome", ["handled", "failed", "leaves a scope"])
    async def test_keys_that_cannot_be_printed_are_keys(self, kind: str, outcome: str) -> None:
        keys = [Unprintable() for _ in range(3)]
        ended: list[object] = []

        def end(key: object) -> None:
            ended.append(key)
            if outcome == "failed":
                raise ValueError("no key")
            if outcome == "leaves a scope" and kind in ("async", "plain"):
                trio.CancelScope().__enter__()

        async def waits(key: object) -> None:
            await trio.lowlevel.checkpoint()
            end(key)

        handlers = {"direct": direct(lambda key: end(key)), "blocking": blocking(lambda key: end(key))}
        handler = handlers.get(kind) or (waits if kind == "async" else end)
        failed: list[Exception] = []
        await KeyedExecutor(workers=1).dispatch(
            ListSource(keys * 2), key=lambda key: key, handler=handler, on_error=lambda _, error: failed.append(error)
        )
        assert Counter(map(id, ended)) == dict.fromkeys(map(id, keys), 2)
        assert len(failed) == (6 if outcome == "failed" or (outcome != "handled" and kind in ("async", "plain")) else 0)

    @pytest.mark.parametrize("kind", ["direct", "blocking", "async", "plain"])
    async def test_k15_a_key_that_changes_its_hash_fails_its_own_dispatch_only(self, kind: str) -> None:
        class Key:
            hash = 0

            def __hash__(self) -> int:
                return self.hash

        def change(key: Key) -> None:
            key.hash += 1

        async def change_later(key: Key) -> None:
            await trio.lowlevel.checkpoint()
            change(key)

        handlers = {"direct": direct(lambda key: change(key)), "blocking": blocking(lambda key: change(key))}
        handler = handlers.get(kind) or (change_later if kind == "async" else change)
        executor = KeyedExecutor(workers=1)
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked into below
            await executor.dispatch(ListSource([Key()]), key=lambda key: key, handler=handler)
        assert isinstance(caught.value, KeyError) or caught.group_contains(KeyError)
        assert states(executor) == ["idle"]
        done: list[int] = []
        with trio.fail_after(PATIENCE):
            await executor.dispatch(ListSource([1]), key=first_of_none, handler=direct(lambda n: done.append(n)))
        assert done == [1]


class Marked:
    """Marked functions of each kind."""

    @direct
    def __call__(self, item: object) -> None: ...

    @blocking
    def method(self, item: object) -> None: ...

    @staticmethod
    @direct
    def static(item: object) -> None: ...

    @direct
    @staticmethod
    def marked_static(item: object) -> None: ...

    @classmethod
    @blocking
    def of_class(cls, item: object) -> None: ...

    bound_later = partialmethod(direct(lambda self, extra, item: None), "extra")


class AsyncCallable:
    async def __call__(self, item: object) -> None: ...

    async def method(self, item: object) -> None: ...


async def async_function(item: object) -> None: ...


def plain_function(item: object) -> None: ...


def a_wrapper() -> Callable[[object], None]:
    @wraps(Marked.static)
    def wrapper(item: object) -> None:
        Marked.static(item)

    return wrapper


class TestDecorators:
    @pytest.mark.parametrize("pin", [direct, blocking])
    @pytest.mark.parametrize(
        "handler",
        [
            async_function,
            partial(async_function),
            partial(partial(async_function)),
            AsyncCallable(),
            AsyncCallable().method,
            partial(AsyncCallable()),
            partial(AsyncCallable().method),
            7,
            classmethod(plain_function),
        ],
        ids=lambda handler: getattr(handler, "__qualname__", type(handler).__name__),
    )
    def test_what_is_no_plain_function_is_refused(self, pin: Pin, handler: Any) -> None:
        with pytest.raises(TypeError, match=rf"@{pin.__name__} is for plain functions, not "):
            pin(handler)

    @pytest.mark.parametrize("handler", [[].append, print, Marked().method], ids=["method", "builtin", "bound"])
    def test_what_cannot_be_marked_is_refused(self, handler: Any) -> None:
        with pytest.raises(TypeError, match=r"@blocking cannot mark .*: wrap it in a `partial`, or a function"):
            blocking(handler)

    def test_they_return_the_function_itself(self) -> None:
        assert direct(plain_function) is plain_function
        assert blocking(plain_function) is plain_function
        del plain_function.__dict__["__trio_wow_pin__"]

    @pytest.mark.parametrize(
        ("handler", "thread", "holds"),
        [
            (direct(lambda _: None), True, True),
            (blocking(lambda _: None), True, False),
            (blocking(direct(lambda _: None)), True, False),
            (partial(direct(lambda *_: None), 1), True, True),
            (partial(partial(blocking(lambda *_: None), 1), 2), True, False),
            (direct(partial(lambda *_: None, 1)), True, True),
            (partial(direct(partial(lambda *_: None, 1)), 2), True, True),
            (blocking(partial(direct(lambda *_: None), 1)), True, False),
            (Marked(), True, True),
            (partial(Marked()), True, True),
            (Marked().method, True, False),
            (Marked.static, True, True),
            (Marked.marked_static, True, True),
            (Marked.of_class, True, False),
            (Marked().bound_later, True, True),
            (a_wrapper(), True, True),
            (blocking(partial([].append)), True, False),
            (plain_function, False, False),
        ],
    )
    async def test_the_mark_is_seen(
        self, handler: Any, thread: bool, holds: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        executor = KeyedExecutor(workers=1)
        seen: list[tuple[bool, bool]] = []

        class Key:
            """The handlers do nothing, so a thread's name, made of its key, tells where they run."""

            def __str__(self) -> str:
                seen.append((trio.lowlevel.in_trio_task(), states(executor) == ["held"]))
                return "key"

        await executor.dispatch(ListSource([Key()]), key=lambda key: key, handler=handler)
        # A task's name is made of it too, for a handler that holds its worker or has its first wait.
        assert [holds for _, holds in seen] == ([holds] * 2 if thread else [])

    async def test_an_async_wrapper_of_a_marked_function_is_an_async_handler(self) -> None:
        handled: list[int] = []

        @direct
        def marked(n: int) -> None:
            handled.append(n)

        @wraps(marked)
        async def retries(n: int) -> None:
            await trio.lowlevel.checkpoint()
            marked(n)

        await KeyedExecutor().dispatch(ListSource([1]), key=first_of_none, handler=retries)
        assert handled == [1]

    async def test_called_elsewhere_a_marked_function_is_just_a_function(self) -> None:
        @direct
        def handler(n: int) -> int:
            return n + 1

        assert handler(1) == 2


@pytest.mark.parametrize("seed", range(40))
async def test_every_item_ends_in_exactly_one_state_and_every_worker_idle(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Dispatches of all kinds on one executor, of which some fail, are cancelled or stopped by force."""
    rng = random.Random(seed)
    forced = seed % 5 == 4
    limiter = trio.to_thread.current_default_thread_limiter()
    limiter.total_tokens = rng.randint(1, 3)
    executor = KeyedExecutor(
        workers=rng.randint(1, 3), max_in_flight=rng.randint(1, 12), throughput=rng.choice((1, 2, 16))
    )

    async def run(number: int, kind: str) -> None:
        source = ListSource([(number, rng.randrange(5), n) for n in range(40)], batch=rng.randint(1, 6))
        ended: dict[Any, list[str]] = {item: [] for item in source.rest}
        plans = {item: (rng.randrange(3), rng.random()) for item in source.rest}
        started: dict[int, list[int]] = defaultdict(list)
        fatal = rng.random() < 0.3

        def end(item: Any) -> None:
            if plans[item][1] < 0.02:
                if fatal:
                    ended[item].append("raised")
                raise ValueError(item)
            ended[item].append("handled")

        async def on_the_loop(item: Any) -> None:
            started[item[1]].append(item[2])
            waits, chance = plans[item]
            try:
                with trio.CancelScope(shield=chance > 0.9):
                    for _ in range(waits):
                        if chance < 0.5:
                            await trio.lowlevel.checkpoint()
                        else:
                            await trio.to_thread.run_sync(int)
            except trio.Cancelled:
                ended[item].append("interrupted")
                raise
            end(item)

        def in_a_thread(item: Any) -> None:
            started[item[1]].append(item[2])
            if plans[item][0]:
                trio.from_thread.run_sync(int)
            end(item)

        handler: Callable[[Any], object] = on_the_loop
        if kind == "plain":
            handler = end
        elif kind != "async":
            handler = {"direct": direct, "blocking": blocking}[kind](in_a_thread)
        cancelled = False
        with trio.CancelScope() as scope:
            scopes.append(scope)
            try:
                await executor.dispatch(
                    source,
                    key=lambda item: item[1],
                    handler=handler,
                    on_error=None if fatal else lambda item, _: ended[item].append("failed"),
                    on_discard=lambda item: ended[item].append("discarded"),
                )
            except* ValueError:
                assert fatal
            except* (trio.Cancelled, ExecutorClosedError):
                cancelled = True
        await until(lambda: not limiter.borrowed_tokens)
        for item in source.rest:
            ended[item].append("in the source")
        # A handler does not hear of it when it waits for a thread in vain, or is abandoned in one.
        stopped = cancelled or scope.cancelled_caught or fatal
        unheard = (kind == "blocking" and stopped) or (kind == "direct" and forced)
        states = Counter(len(states) for states in ended.values())
        assert {*states} <= ({0, 1} if unheard else {1}), (ended, seed)
        assert states[0] <= 5
        for key, order in started.items():
            assert order == [n for _, k, n in ended if k == key][: len(order)]

    scopes: list[trio.CancelScope] = []
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(run, number, rng.choice(("direct", "blocking", "async", "plain")))
            for _ in range(rng.randrange(3)):
                for _ in range(rng.randrange(30)):
                    await trio.lowlevel.checkpoint()
                if scopes:
                    rng.choice(scopes).cancel()
            if forced:
                executor.force_stop()
    await until(lambda: {*states(executor)} == {"idle"})
    assert not any(queued(executor))
    assert not executor.statistics().dispatches
