"""The pool: tokens, queue, hand-over, closing. Source document: seed 004."""

import random
import sys
import threading
from functools import partial
from typing import Any

import pytest
import trio
import trio.lowlevel
from support import EndlessSource, ListSource, collect, first, interleaving
from thread_support import ERRORS, FATAL, PATIENCE, Gates, dispatches, queued, raiser, states, until
from trio.testing import wait_all_tasks_blocked

from trio_wow.execution import ExecPool, KeyedExecutor, PoolPlace, blocking

pytestmark = pytest.mark.adaptive


def counts(pool: ExecPool) -> tuple[int, int]:
    seen = pool.statistics()
    return seen.borrowed, seen.queued


def taken(pool: ExecPool) -> PoolPlace:
    place = pool.try_submit()
    assert place is not None
    return place


class TestPlaces:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"max_concurrency": 0}, "max_concurrency must be an int, at least 1, not 0"),
            ({"max_concurrency": True}, "max_concurrency must be an int, at least 1, not True"),
            ({"queue_size": -1}, "queue_size must be an int, at least 0, not -1"),
            ({"queue_size": 1.0}, "queue_size must be an int, at least 0, not 1.0"),
        ],
    )
    def test_wrong_sizes_are_refused(self, arguments: Any, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            ExecPool(**arguments)

    async def test_a_token_else_a_place_in_the_queue_else_nothing(self) -> None:
        pool = ExecPool(2, 1)
        places = [pool.try_submit() for _ in range(4)]
        assert [place is None for place in places] == [False, False, False, True]
        seen = pool.statistics()
        assert (seen.max_concurrency, seen.queue_size) == (2, 1)
        assert (seen.borrowed, seen.queued, seen.submitted, seen.refused) == (2, 1, 3, 1)
        assert repr(pool) == "<ExecPool: 2 of 2 tokens borrowed, 1 of 1 queued>"

    async def test_without_a_queue_what_is_no_token_is_refused(self) -> None:
        pool = ExecPool(1, 0)
        assert pool.try_submit() is not None
        assert pool.try_submit() is None

    async def test_a_token_given_back_is_the_first_waiters_in_that_step(self) -> None:
        pool = ExecPool(1, 3)
        order: list[int] = []
        running, *waiting = [taken(pool) for _ in range(3)]

        async def wait(number: int) -> None:
            await waiting[number].wait()
            order.append(number)

        async with trio.open_nursery() as nursery:
            for number in (1, 0):  # the queue's order counts, not that of the tasks
                nursery.start_soon(wait, number)
                await wait_all_tasks_blocked()
            running.release()
            running.release()
            assert counts(pool) == (1, 1)
            assert taken(pool).release() is None, "behind those that wait"
            await wait_all_tasks_blocked()
            assert order == [0]
            waiting[0].release()
            await wait_all_tasks_blocked()
            assert order == [0, 1]
            waiting[1].release()
        assert counts(pool) == (0, 0)

    async def test_a_waiter_cancelled_in_the_step_in_which_it_is_given_the_token_passes_it_on(self) -> None:
        pool = ExecPool(1, 2)
        running, one, two = [taken(pool) for _ in range(3)]
        scope = trio.CancelScope()

        async def wait() -> None:
            with scope:
                await one.wait()
                raise AssertionError("was cancelled")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(two.wait)
            await wait_all_tasks_blocked()
            running.release()
            scope.cancel()
        assert counts(pool) == (1, 0)
        two.release()
        assert counts(pool) == (0, 0)

    async def test_a_place_that_is_given_up_before_anybody_waits_on_it(self) -> None:
        pool = ExecPool(1, 1)
        running, queued = taken(pool), taken(pool)
        queued.release()
        assert counts(pool) == (1, 0)
        running.release()
        assert counts(pool) == (0, 0)

    @pytest.mark.parametrize("block", range(20))
    def test_no_schedule_loses_a_token_or_leaves_a_waiter_behind(self, block: int) -> None:
        """A token given back, a waiter cancelled and an item queued in one pass, in thousands of orders."""
        for seed in range(block * 150, (block + 1) * 150):
            with interleaving(seed):
                trio.run(self._race, random.Random(seed))

    async def _race(self, rng: random.Random) -> None:
        tokens, places = rng.randint(1, 3), rng.randint(1, 4)
        pool = ExecPool(tokens, places)
        running = most = 0
        go, scopes = trio.Event(), [trio.CancelScope() for _ in range(10)]
        ended: list[str] = []

        async def item(number: int) -> None:
            nonlocal running, most
            if number >= tokens + places:
                await go.wait()  # comes in the pass in which tokens are given back
            place = pool.try_submit()
            if place is None:
                ended.append("refused")
                return
            with scopes[number]:
                await place.wait()
                running += 1
                most = max(most, running)
                try:
                    await go.wait()
                    for _ in range(rng.randrange(2)):
                        await trio.lowlevel.checkpoint()
                finally:
                    running -= 1
                    place.release()
                ended.append("ran")
            if scopes[number].cancelled_caught:
                ended.append("cancelled")

        async def cancel(number: int) -> None:
            await go.wait()
            scopes[number].cancel()

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(item, number)
                for number in rng.sample(range(10), rng.randint(1, 5)):
                    nursery.start_soon(cancel, number)
                await wait_all_tasks_blocked()
                go.set()
        assert len(ended) == 10
        assert most <= tokens
        seen = pool.statistics()
        assert (seen.borrowed, seen.queued) == (0, 0)


class TestLending:
    async def test_a_token_that_was_lent_comes_back_before_the_queue(self) -> None:
        pool = ExecPool(1, 2)
        lender, one, two = [taken(pool) for _ in range(3)]
        lender.lend()
        assert counts(pool) == (1, 1), "one has it now"
        assert pool.statistics().lent == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lender.take_back)
            await wait_all_tasks_blocked()
            assert counts(pool) == (1, 2)
            one.release()
        assert counts(pool) == (1, 1)
        assert pool.statistics().lent == 0
        lender.release()
        await two.wait()
        two.release()
        assert counts(pool) == (0, 0)

    async def test_a_free_token_is_taken_back_at_once(self) -> None:
        pool = ExecPool(2)
        lender = taken(pool)
        lender.lend()
        assert counts(pool) == (0, 0)
        await lender.take_back()
        assert counts(pool) == (1, 0)

    async def test_who_is_cancelled_while_it_takes_the_token_back_goes_on_without(self) -> None:
        pool = ExecPool(1)
        lender = taken(pool)
        lender.lend()
        other = taken(pool)
        with trio.move_on_after(0):
            await lender.take_back()
        lender.release()
        assert counts(pool) == (1, 0)
        other.release()
        assert counts(pool) == (0, 0)

    async def test_what_ends_while_its_token_is_lent_takes_none_back(self) -> None:
        pool = ExecPool(1)
        lender = taken(pool)
        lender.lend()
        lender.release()
        await lender.take_back()
        await pool.drain()
        assert counts(pool) == (0, 0)

    async def test_a_pool_with_a_lent_token_is_not_idle(self) -> None:
        pool = ExecPool(1)
        lender = taken(pool)
        lender.lend()
        with trio.move_on_after(0) as scope:
            await pool.drain()
        assert scope.cancelled_caught

    async def test_who_did_not_get_its_token_back_has_none_to_lend(self) -> None:
        pool = ExecPool(1, 1)
        lender = taken(pool)
        lender.lend()
        running = taken(pool)
        with trio.move_on_after(0) as scope:
            await lender.take_back()
        assert scope.cancelled_caught
        lender.lend()
        assert counts(pool) == (1, 0)
        await lender.take_back()
        running.release()
        lender.release()
        assert counts(pool) == (0, 0)
        with trio.fail_after(PATIENCE):
            await pool.drain()


class TestClosing:
    async def test_a_closed_pool_refuses_and_lets_go_on_what_is_in_it(self) -> None:
        pool = ExecPool(1, 1)
        running, queued = taken(pool), taken(pool)
        pool.close()
        pool.close()
        assert pool.try_submit() is None
        assert pool.statistics().closed
        running.release()
        await queued.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.aclose)
            await wait_all_tasks_blocked()
            queued.release()
        assert pool.statistics().refused == 1

    async def test_drain_waits_within_its_callers_deadline(self, autojump_clock: object) -> None:
        pool = ExecPool(1, 1)
        running, queued = taken(pool), taken(pool)
        with trio.move_on_after(5) as scope:
            await pool.drain()
        assert scope.cancelled_caught
        assert trio.current_time() == 5
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(pool.drain)
            await wait_all_tasks_blocked()
            running.release()
            await wait_all_tasks_blocked()
            assert len(nursery.child_tasks) == 2
            queued.release()
        taken(pool)  # as it is still open

    async def test_a_pool_is_closed_at_the_end_of_its_block(self) -> None:
        async with ExecPool() as pool:
            await pool.drain()
        assert pool.try_submit() is None

    async def test_drain_waits_for_an_abandoned_thread(self, gates: Gates) -> None:
        pool = ExecPool()
        executor = KeyedExecutor(pool=pool)
        outcome: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            run = partial(executor.dispatch, EndlessSource(["a"]), key=first, handler=gates.wait)
            nursery.start_soon(collect, run, outcome)
            await gates.arrival("a")
            executor.force_stop()
        with trio.move_on_after(0.01) as scope:
            await pool.drain()
        assert scope.cancelled_caught
        gates.open("a")
        with trio.fail_after(PATIENCE):
            await pool.drain()


class TestOwners:
    async def test_a_shared_pool_is_the_one_that_runs_and_closing_an_executor_does_not_end_it(
        self, gates: Gates
    ) -> None:
        pool = ExecPool(3)
        one, other = KeyedExecutor(pool=pool), KeyedExecutor(pool=pool)
        async with dispatches(gates) as start:
            start(one, gates.wait, "a").close()
            start(other, gates.wait, "b")
            await gates.arrival("a", "b")
            assert counts(pool) == (2, 0)
            gates.open("a")
            await one.aclose()
            one.force_stop()
            assert not pool.statistics().closed
            start(other, gates.wait, "c")
            await gates.arrival("c")
            assert counts(pool) == (2, 0)

    @pytest.mark.parametrize("how", ["aclose", "force_stop"])
    async def test_an_executors_own_pool_ends_with_it(self, how: str) -> None:
        executor = KeyedExecutor()
        if how == "aclose":
            await executor.aclose()
        else:
            executor.force_stop()
        seen = executor.statistics().pool
        assert seen is not None
        assert (seen.max_concurrency, seen.queue_size, seen.closed) == (64, 128, True)

    def test_what_is_no_pool_is_refused(self) -> None:
        with pytest.raises(TypeError, match="pool must be an ExecPool, or None for the event loop alone, not 64"):
            KeyedExecutor(pool=64)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="adaptive must be AdaptiveSettings, not 7"):
            KeyedExecutor(adaptive=7)  # type: ignore[arg-type]

    async def test_of_two_dispatches_the_cancelled_one_leaves_as_soon_as_its_own_items_have(self, gates: Gates) -> None:
        pool = ExecPool(2, 2)
        executor = KeyedExecutor(workers=2, pool=pool)
        outcome: list[BaseException | None] = []
        async with dispatches(gates) as start:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    run = partial(executor.dispatch, EndlessSource(["a", "b"]), key=first, handler=gates.wait)
                    nursery.start_soon(collect, run, outcome)
                    await gates.arrival("a", "b")
                    start(executor, gates.wait, "c", "d", "e", "f")
                    await until(lambda: counts(pool) == (2, 2))
                    scope.cancel()
                    with trio.CancelScope(shield=True):
                        gates.open("a", "b")
                        await until(lambda: outcome)
            await until(lambda: len(gates.arrived) == 6)
            assert counts(pool)[0] == 2

    @pytest.mark.parametrize("error", ERRORS + FATAL, ids=repr)
    async def test_an_item_that_raises_anything_ends_alone(self, gates: Gates, error: BaseException) -> None:
        pool = ExecPool(2)
        executor, other = KeyedExecutor(pool=pool), KeyedExecutor(pool=pool)
        async with dispatches(gates) as start:
            start(other, gates.wait, "a")
            await gates.arrival("a")
            run = partial(executor.dispatch, ListSource([1]), key=lambda n: n, handler=blocking(raiser(error)))
            assert await collect(run) is error
            assert counts(pool) == (1, 0)
            start(other, gates.wait, "b")
            await gates.arrival("b")


class TestFullPool:
    async def test_what_does_not_fit_runs_directly_and_holds_its_worker(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=1, pool=ExecPool(1, 0))
        async with dispatches(gates) as start:
            start(executor, gates.wait, "a", "b", "c")
            await gates.arrival("a", "b")
            await wait_all_tasks_blocked()
            assert sorted(gates.inside) == ["a", "b"]
            assert states(executor) == ["held"]
            assert queued(executor) == [1]
            gates.open("b")
            await gates.arrival("c")
            assert states(executor) == ["held"]
            gates.open("c")
            await until(lambda: states(executor) == ["idle"])
            assert gates.inside == ["a"]

    async def test_a_closed_pool_is_a_full_one(self, gates: Gates) -> None:
        pool = ExecPool()
        pool.close()
        executor = KeyedExecutor(workers=2, pool=pool)
        async with dispatches(gates) as start:
            start(executor, gates.wait, "a")
            await gates.arrival("a")
            assert states(executor).count("held") == 1

    async def test_a_hot_key_in_a_full_pool_lets_the_others_of_its_worker_in(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=1, pool=ExecPool(1, 0))
        done: list[str] = []

        @blocking
        def handler(item: str) -> None:
            if item == "block":
                gates.compute(item)
            done.append(item)

        async with dispatches(gates) as start:
            start(executor, handler, "block")
            await gates.arrival("block")
            start(executor, handler, *["hot"] * 50)
            start(executor, handler, *["cold"] * 2)
            await until(lambda: len(done) == 52)
            assert done.index("cold") < 20


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_shared_by_event_loops_in_several_threads_loses_no_token(seed: int) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        hammer(seed)
    finally:
        sys.setswitchinterval(interval)


def hammer(seed: int, loops: int = 3, items: int = 60) -> None:
    """Several event loops on one small pool: at most so many functions run at once, each item once."""
    pool = ExecPool(2, 3)
    lock = threading.Lock()
    inside = most = 0
    done: list[tuple[int, int]] = []
    errors: list[BaseException] = []

    def run(number: int) -> None:
        rng = random.Random(f"{seed} {number}")

        nursery: Any = None

        async def item(n: int) -> None:
            nonlocal inside, most
            while (place := pool.try_submit()) is None:
                await trio.lowlevel.checkpoint()
            with trio.CancelScope(shield=rng.random() < 0.8) as scope:
                if not scope.shield:
                    nursery.start_soon(cancel, scope)
                await place.wait()
                with lock:
                    inside += 1
                    most = max(most, inside)
                try:
                    await trio.lowlevel.checkpoint()
                finally:
                    with lock:
                        inside -= 1
                    place.release()
            done.append((number, n))

        async def cancel(scope: trio.CancelScope) -> None:
            scope.cancel()

        async def main() -> None:
            nonlocal nursery
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for n in range(items):
                        nursery.start_soon(item, n)
                await pool.drain()

        try:
            trio.run(main)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(loops)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(90)
    assert errors == []
    assert most <= 2
    assert sorted(done) == [(number, n) for number in range(loops) for n in range(items)]
    assert counts(pool) == (0, 0)
