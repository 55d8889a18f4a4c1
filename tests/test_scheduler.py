"""The aggregate scheduler and its suppliers; source document: seed 003."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from support import ListSource, collect, forever, itself, task_names
from thread_support import Gates, borrowed, until
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow.errors import BlockingCallError, ExecutorClosedError, SchedulerClosedError
from trio_wow.execution import (
    AggregateScheduler,
    AggregateSchedulerSupplier,
    BorrowedAggregateSchedulerSupplier,
    ExecProfile,
    KeyedExecutor,
    group_key,
    inline,
)


class TestGroupKey:
    @given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 10_000))
    def test_it_is_one_of_the_groups_and_always_the_same(self, id: str, parallelism: int) -> None:
        group = group_key(id, parallelism)
        assert 0 <= group < parallelism
        assert group_key(id, parallelism) == group

    def test_it_is_the_same_in_every_process(self) -> None:
        ids = [f"N{number}" for number in range(100)]
        program = "import sys; from trio_wow.execution import group_key as g; print([g(i, 128) for i in sys.argv[1:]])"
        done = subprocess.run([sys.executable, "-c", program, *ids], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == str([group_key(id, 128) for id in ids])
        assert group_key("N14228", 128) == 110  # and in every version

    def test_different_ids_may_share_a_group_and_spread_over_all_of_them(self) -> None:
        groups = [group_key(f"order-{number}", 128) for number in range(12_800)]
        counts = [groups.count(group) for group in range(128)]
        assert min(counts) > 50
        assert max(counts) < 200

    @pytest.mark.parametrize("parallelism", [0, -1, True, 1.5, None])
    def test_a_number_of_groups_that_is_none_is_refused(self, parallelism: int) -> None:
        with pytest.raises(ValueError, match=f"parallelism must be a positive int, not {parallelism!r}"):
            group_key("a", parallelism)


class TestSchedule:
    async def test_work_of_one_group_runs_in_order_one_at_a_time_and_groups_beside_each_other(
        self, nursery: trio.Nursery, autojump_clock: MockClock
    ) -> None:
        scheduler = AggregateScheduler("orders", 1, nursery=nursery)
        log: list[tuple[float, str, int]] = []

        async def work(group: str, number: int) -> None:
            await trio.sleep(1)
            log.append((trio.current_time(), group, number))

        started = trio.current_time()
        for number in range(3):
            for group in ("a", "b"):
                scheduler.schedule(group, partial(work, group, number))
        await scheduler.stop_gracefully()
        assert [(round(at - started), number) for at, group, number in sorted(log) if group == "a"] == [
            (1, 0),
            (2, 1),
            (3, 2),
        ]
        assert len(log) == 6
        assert trio.current_time() - started == pytest.approx(3)

    async def test_plain_work_runs_where_its_mark_says_and_direct_work_holds_a_worker_of_the_scheduler(
        self, nursery: trio.Nursery, gates: Gates
    ) -> None:
        origin = KeyedExecutor(workers=1)
        scheduler = AggregateScheduler("orders", 1, nursery=nursery, like=origin)
        handled: list[str] = []
        scheduler.schedule("a", partial(gates.compute, "direct"))
        await gates.arrival("direct")
        scheduler.schedule("b", inline(lambda: handled.append("b")))
        await wait_all_tasks_blocked()
        assert handled == []  # its only worker is held
        gates.open("direct")
        await until(lambda: handled)
        scheduler.schedule("a", partial(gates.wait, "pool"))
        await gates.arrival("pool")
        assert borrowed(origin) == 1  # it has no pool of its own
        scheduler.schedule("b", inline(lambda: handled.append("b")))
        await until(lambda: handled == ["b", "b"])
        gates.open_all()
        await scheduler.stop_gracefully()
        pool = origin.statistics().pool
        assert pool is not None
        assert not pool.closed

    async def test_what_its_handlers_call_by_the_executor_like_which_it_is_holds_its_own_workers(
        self, nursery: trio.Nursery, gates: Gates
    ) -> None:
        origin = KeyedExecutor(workers=2)
        scheduler = AggregateScheduler("orders", 1, nursery=nursery, like=origin)
        profile = ExecProfile(gates.compute)

        async def handler(item: str) -> None:
            await origin.call(profile, gates.compute, item)

        nursery.start_soon(partial(scheduler.dispatch, ListSource(["a", "b"]), key=itself, handler=handler))
        for n in (1, 2):
            await until(lambda n=n: len(gates.arrived) == n)  # type: ignore[misc]
            await wait_all_tasks_blocked()
            assert len(gates.inside) == 1
            gates.open(gates.inside[0])
        await scheduler.stop_gracefully()

    async def test_a_long_queue_of_one_group_delays_no_other(self, nursery: trio.Nursery) -> None:
        scheduler = AggregateScheduler("orders", 1, nursery=nursery, like=KeyedExecutor(max_in_flight=4))
        ran = trio.Event()
        for _ in range(1_000):
            scheduler.schedule("long", trio.sleep_forever)
        scheduler.schedule("other", ran.set)
        with trio.fail_after(5):
            await ran.wait()
        assert (scheduler.statistics().queued, scheduler.statistics().running) == (999, 1)
        scheduler.force_stop()

    async def test_it_is_synchronous_and_starts_nothing_by_itself(self, nursery: trio.Nursery) -> None:
        scheduler = AggregateScheduler("orders", nursery=nursery)
        assert not nursery.child_tasks
        ran: list[int] = []
        scheduler.schedule("a", partial(ran.append, 1))
        assert (ran, scheduler.statistics().queued) == ([], 1)
        await scheduler.stop_gracefully()
        assert ran == [1]
        await wait_all_tasks_blocked()
        assert not nursery.child_tasks

    async def test_one_whose_nursery_has_closed_refuses_and_can_be_stopped(self) -> None:
        async with trio.open_nursery() as nursery:
            scheduler = AggregateSchedulerSupplier("shop", nursery=nursery).get_or_initialize("order")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="closed"):
                scheduler.schedule(1, trio.lowlevel.checkpoint)
        assert scheduler.statistics().queued == 0
        with trio.fail_after(1):
            await scheduler.stop_gracefully()

    async def test_tasks_bear_the_schedulers_name(self, nursery: trio.Nursery) -> None:
        scheduler = AggregateSchedulerSupplier("command-dispatcher", nursery=nursery).get_or_initialize("order")
        scheduler.schedule(7, trio.sleep_forever)
        await wait_all_tasks_blocked()
        names = set(task_names())
        assert {"scheduler command-dispatcher-order", "mailbox command-dispatcher-order/7"} <= names
        scheduler.force_stop()

    async def test_what_work_raises_comes_from_the_nursery_and_ends_the_scheduler(self) -> None:
        error = ValueError("broken")
        ended: list[str] = []

        async def fail() -> None:
            await wait_all_tasks_blocked()
            raise error

        async def wait() -> None:
            try:
                await trio.sleep_forever()
            finally:
                ended.append("interrupted")

        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                scheduler = AggregateScheduler("orders", nursery=nursery)
                scheduler.schedule("a", fail)
                scheduler.schedule("a", partial(ended.append, "ran"))
                scheduler.schedule("b", wait)
        assert caught.value.exceptions == (error,)
        assert ended == ["interrupted"]
        with pytest.raises(SchedulerClosedError, match="scheduler 'orders' is closed: it takes no further work"):
            scheduler.schedule("a", wait)

    async def test_context_variables_are_those_in_which_the_scheduler_was_made(self, nursery: trio.Nursery) -> None:
        variable = ContextVar("variable", default="none")
        seen: list[str] = []
        variable.set("made")
        scheduler = AggregateScheduler("orders", nursery=nursery)
        variable.set("scheduled")
        scheduler.schedule("a", lambda: variable.set("work"))
        scheduler.schedule("a", lambda: seen.append(variable.get()))
        await scheduler.stop_gracefully()
        assert seen == ["made"]

    async def test_a_blocking_call_names_the_work(self) -> None:
        def sleeps() -> None:
            time.sleep(0)

        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                AggregateScheduler("orders", nursery=nursery).schedule("a", sleeps)
        (error,) = caught.value.exceptions
        assert isinstance(error, BlockingCallError)
        assert error.handler.endswith("sleeps")
        assert str(error.key) == "orders/a"


class TestParallelism:
    @pytest.mark.parametrize(("parallelism", "computing"), [(1, 1), (3, 3), (None, 2)])
    async def test_no_more_groups_compute_at_once(
        self, nursery: trio.Nursery, gates: Gates, parallelism: int | None, computing: int
    ) -> None:
        like = KeyedExecutor(workers=2)
        scheduler = AggregateScheduler("orders", parallelism, nursery=nursery, like=like)
        nursery.start_soon(partial(scheduler.dispatch, ListSource(range(8)), key=itself, handler=gates.compute))
        await until(lambda: len(gates.inside) >= computing)
        await wait_all_tasks_blocked()
        assert (len(gates.inside), scheduler.statistics().running) == (computing, computing)
        gates.open_all()
        await scheduler.stop_gracefully()
        assert sorted(gates.arrived) == list(range(8))

    @pytest.mark.parametrize("make", [AggregateScheduler, AggregateSchedulerSupplier])
    @pytest.mark.parametrize("parallelism", [0, -1, True, "4"])
    async def test_a_number_that_is_none_is_refused(
        self, nursery: trio.Nursery, make: Callable[..., object], parallelism: object
    ) -> None:
        with pytest.raises(ValueError, match=f"parallelism must be a positive int, not {parallelism!r}"):
            make("orders", parallelism, nursery=nursery)


class TestStatistics:
    async def test_they_show_queue_and_latency(self, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
        like = KeyedExecutor(workers=3, perf_counter=trio.current_time)
        supplier = AggregateSchedulerSupplier("events", nursery=nursery, like=like)
        orders, carts = supplier.get_or_initialize("order"), supplier.get_or_initialize("cart")
        for seconds in (1, 5, 3):
            orders.schedule("a", partial(trio.sleep, seconds))
        await wait_all_tasks_blocked()
        (one, other) = supplier.statistics()
        assert (one.name, one.parallelism, one.queued, one.running, one.latency) == ("events-order", 3, 2, 1, None)
        assert (other.name, other.queued, other.running, other.latency) == ("events-cart", 0, 0, None)
        await orders.stop_gracefully()
        assert (orders.statistics().queued, orders.statistics().running) == (0, 0)
        assert orders.statistics().latency == pytest.approx(3)

        async def handler(seconds: int) -> None:
            await trio.sleep(seconds)

        await carts.dispatch(ListSource([7]), key=itself, handler=handler)
        assert carts.statistics().latency == pytest.approx(7)

    async def test_a_schedulers_executor_has_the_settings_of_its_model(self, nursery: trio.Nursery) -> None:
        like = KeyedExecutor(workers=3, max_in_flight=5, throughput=7, blocking_calls="allow")
        assert repr(like.sibling("a")) == repr(like).replace("wow-dispatch", "a")
        assert repr(like.sibling("a", 2)) == repr(like).replace("wow-dispatch", "a").replace("workers=3", "workers=2")
        scheduler = AggregateScheduler("orders", nursery=nursery, like=like)
        assert repr(scheduler) == "<AggregateScheduler 'orders'>"
        scheduler.schedule("a", partial(time.sleep, 0))
        await scheduler.stop_gracefully()
        assert repr(scheduler) == "<AggregateScheduler 'orders': closed>"

    async def test_a_handler_keeps_its_name(self, nursery: trio.Nursery) -> None:
        executor = KeyedExecutor()
        scheduler = AggregateScheduler("orders", nursery=nursery, like=executor)
        with trio.move_on_after(0):
            await scheduler.dispatch(ListSource([1]), key=itself, handler=partial(forever))
        nursery.start_soon(partial(scheduler.dispatch, ListSource([1]), key=itself, handler=partial(forever)))
        await wait_all_tasks_blocked()
        (dispatch,) = scheduler._executor.statistics().dispatches
        assert (dispatch.handler, dispatch.running) == ("forever", 1)
        nursery.cancel_scope.cancel()


class TestSupplier:
    async def test_one_scheduler_for_each_named_aggregate_also_for_concurrent_callers(
        self, nursery: trio.Nursery
    ) -> None:
        supplier = AggregateSchedulerSupplier("commands", 2, nursery=nursery)
        got: list[AggregateScheduler] = []

        async def get() -> None:
            await trio.lowlevel.checkpoint()
            got.append(supplier.get_or_initialize("fleet.aircraft"))

        async with trio.open_nursery() as callers:
            for _ in range(50):
                callers.start_soon(get)
        assert len(set(map(id, got))) == 1
        assert got[0].name == "commands-fleet.aircraft"
        assert supplier.get_or_initialize("fleet.order") is not got[0]

    async def test_a_stop_refuses_drains_once_and_every_caller_waits_for_it(
        self, nursery: trio.Nursery, autojump_clock: MockClock
    ) -> None:
        supplier = AggregateSchedulerSupplier("commands", nursery=nursery)
        ran: list[str] = []

        async def work(name: str) -> None:
            await trio.sleep(1)
            ran.append(name)

        schedulers = [supplier.get_or_initialize(aggregate) for aggregate in ("order", "cart")]
        for scheduler in schedulers:
            scheduler.schedule("a", partial(work, f"{scheduler.name} 1"))
            scheduler.schedule("a", partial(work, f"{scheduler.name} 2"))
        ended: list[float] = []

        async def stop() -> None:
            await supplier.stop_gracefully()
            ended.append(trio.current_time())

        started = trio.current_time()
        async with trio.open_nursery() as callers:
            for _ in range(3):
                callers.start_soon(stop)
            with trio.move_on_after(0.5) as impatient:
                await supplier.stop_gracefully()
            assert impatient.cancelled_caught
            assert supplier.is_closed
            for aggregate in ("order", "new"):
                refusal = f"scheduler 'commands' is closed: it supplies no scheduler for {aggregate}"
                with pytest.raises(SchedulerClosedError, match=refusal):
                    supplier.get_or_initialize(aggregate)
            with pytest.raises(SchedulerClosedError, match="scheduler 'commands-cart' is closed: it takes no further"):
                schedulers[1].schedule("a", trio.sleep_forever)
        assert sorted(ran) == [f"commands-{each}" for each in ("cart 1", "cart 2", "order 1", "order 2")]
        assert [at - started for at in ended] == pytest.approx([2, 2, 2])
        await supplier.stop_gracefully()

    async def test_force_overtakes_a_graceful_stop_and_leaves_the_door_closed(self, nursery: trio.Nursery) -> None:
        supplier = AggregateSchedulerSupplier("commands", nursery=nursery)
        log: list[str] = []

        async def work() -> None:
            try:
                await trio.sleep_forever()
            finally:
                log.append("interrupted")

        supplier.get_or_initialize("order").schedule("a", work)
        supplier.get_or_initialize("order").schedule("a", partial(log.append, "ran"))
        raised: list[BaseException | None] = []
        carts = supplier.get_or_initialize("cart")
        nursery.start_soon(collect, partial(carts.dispatch, ListSource([1]), key=itself, handler=forever), raised)
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as callers:
            callers.start_soon(supplier.stop_gracefully)
            callers.start_soon(supplier.stop_gracefully)
            await wait_all_tasks_blocked()
            assert log == []
            supplier.force_stop()
            supplier.force_stop()
        assert log == ["interrupted"]
        assert [type(error) for error in raised] == [ExecutorClosedError]
        with pytest.raises(SchedulerClosedError):
            supplier.get_or_initialize("order")
        await supplier.stop_gracefully()

    async def test_a_forced_stop_before_the_first_step_of_scheduled_work(self, nursery: trio.Nursery) -> None:
        supplier = AggregateSchedulerSupplier("commands", nursery=nursery)
        supplier.get_or_initialize("order").schedule("a", trio.sleep_forever)
        supplier.force_stop()
        with trio.fail_after(5):
            await supplier.stop_gracefully()

    async def test_a_forced_stop_tells_what_the_work_raised_all_the_same(self) -> None:
        async def work() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("on the way out")

        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                scheduler = AggregateScheduler("orders", nursery=nursery)
                scheduler.schedule("a", work)
                await wait_all_tasks_blocked()
                scheduler.force_stop()
        assert repr(caught.value.exceptions) == "(ValueError('on the way out'),)"

    @pytest.mark.parametrize(("forced", "executor"), [(True, "another"), (False, "orders")])
    async def test_an_error_of_work_that_looks_like_a_forced_stop_is_not_lost(
        self, forced: bool, executor: str
    ) -> None:
        async def work() -> None:
            try:
                if forced:
                    await trio.sleep_forever()
            finally:
                raise ExecutorClosedError(executor, "it refuses new dispatches")

        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                scheduler = AggregateScheduler("orders", nursery=nursery)
                scheduler.schedule("a", work)
                await wait_all_tasks_blocked()
                if forced:
                    scheduler.force_stop()
        assert caught.group_contains(ExecutorClosedError, match=f"{executor!r} is closed")

    async def test_a_scheduler_that_was_forced_refuses(self, nursery: trio.Nursery) -> None:
        scheduler = AggregateScheduler("orders", nursery=nursery)
        scheduler.force_stop()
        with pytest.raises(SchedulerClosedError):
            scheduler.schedule("a", trio.sleep_forever)
        with pytest.raises(SchedulerClosedError):
            await scheduler.dispatch(ListSource([1]), key=itself, handler=forever)

    async def test_who_was_cancelled_hears_of_that_and_not_of_a_stop(self, nursery: trio.Nursery) -> None:
        scheduler = AggregateScheduler("orders", nursery=nursery)
        scheduler.force_stop()
        with trio.CancelScope() as scope:
            scope.cancel()
            await scheduler.dispatch(ListSource([1]), key=itself, handler=forever)
        assert scope.cancelled_caught

    async def test_an_executor_that_work_found_closed_is_an_error(self) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:

                async def work() -> None:
                    async with KeyedExecutor(name="another") as executor:
                        executor.force_stop()
                        await executor.dispatch(ListSource([1]), key=itself, handler=forever)

                AggregateScheduler("orders", nursery=nursery).schedule("a", work)
        assert caught.group_contains(ExecutorClosedError, match="'another' is closed")

    async def test_to_stop_what_is_borrowed_does_nothing(self, nursery: trio.Nursery) -> None:
        supplier = AggregateSchedulerSupplier("events", nursery=nursery)
        borrowed = BorrowedAggregateSchedulerSupplier(BorrowedAggregateSchedulerSupplier(supplier))
        scheduler = borrowed.get_or_initialize("order")
        assert scheduler is supplier.get_or_initialize("order")
        gate = trio.Event()
        scheduler.schedule("a", gate.wait)
        await borrowed.stop_gracefully()
        borrowed.force_stop()
        assert not supplier.is_closed
        ran: list[int] = []
        borrowed.get_or_initialize("order").schedule("a", partial(ran.append, 1))
        gate.set()
        await supplier.stop_gracefully()
        assert ran == [1]
        with pytest.raises(SchedulerClosedError):
            borrowed.get_or_initialize("order")


def test_the_program_of_the_docs_runs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "scheduling.md").read_text()
    program = re.findall(r"```python\n(import trio\n.*?)```", page, re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for order in ("tea", "cup"):
        assert [line for line in lines if line.startswith(order)] == [f"{order} {step}" for step in range(3)]
