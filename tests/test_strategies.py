"""What both scheduling strategies promise, in one suite: order per ID, one at a time, window, drain, discard."""

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Protocol

import pytest
import trio
from support import EndlessSource, ListSource, collect, first, forever, interleaving, itself, task_names
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow.errors import ExecutorClosedError, SchedulerClosedError
from trio_wow.execution import AggregateScheduler, KeyedExecutor, group_key

GROUPS = 64


class Strategy(Protocol):
    async def dispatch(self, source: Any, *, key: Callable[[Any], str], **functions: Any) -> None: ...
    async def stop(self) -> None: ...
    def force_stop(self) -> None: ...
    def in_flight(self) -> int: ...


class Keyed:
    def __init__(self, nursery: trio.Nursery, **options: Any) -> None:
        self.executor = KeyedExecutor(**options)
        self.stop = self.executor.aclose
        self.force_stop = self.executor.force_stop

    async def dispatch(self, source: Any, *, key: Callable[[Any], str], **functions: Any) -> None:
        await self.executor.dispatch(source, key=key, **functions)

    def in_flight(self) -> int:
        return sum(each.in_flight for each in self.executor.statistics().dispatches)


class Grouped:
    def __init__(self, nursery: trio.Nursery, **options: Any) -> None:
        self.scheduler = AggregateScheduler("orders", nursery=nursery, like=KeyedExecutor(**options))
        self.stop = self.scheduler.stop_gracefully
        self.force_stop = self.scheduler.force_stop

    async def dispatch(self, source: Any, *, key: Callable[[Any], str], **functions: Any) -> None:
        await self.scheduler.dispatch(source, key=lambda item: group_key(key(item), GROUPS), **functions)

    def in_flight(self) -> int:
        statistics = self.scheduler.statistics()
        return statistics.queued + statistics.running


Make = Callable[..., Strategy]


@pytest.fixture(params=[Keyed, Grouped])
def make(request: pytest.FixtureRequest, nursery: trio.Nursery) -> Make:
    return partial(request.param, nursery)


def apart() -> Iterator[str]:
    """Give IDs whose groups differ."""
    seen: set[int] = set()
    for number in range(10_000):
        group = group_key(f"id {number}", GROUPS)
        if group not in seen:
            seen.add(group)
            yield f"id {number}"


ONE, TWO, *OTHERS = apart()


@pytest.mark.parametrize("seed", range(10))
async def test_items_of_one_id_run_one_at_a_time_in_order(make: Make, autojump_clock: MockClock, seed: int) -> None:
    rng = random.Random(seed)
    items = [(f"id {rng.randrange(20)}", number) for number in range(300)]
    running: set[str] = set()
    done: dict[str, list[int]] = defaultdict(list)

    async def handler(item: tuple[str, int]) -> None:
        id, number = item
        assert id not in running
        running.add(id)
        if rng.random() < 0.3:
            await trio.sleep(rng.random())
        for _ in range(rng.randrange(3)):
            await trio.lowlevel.checkpoint()
        running.remove(id)
        done[id].append(number)

    with interleaving(seed):
        await make(max_in_flight=rng.choice((1, 7, 256))).dispatch(
            ListSource(items, batch=rng.randrange(1, 9)), key=first, handler=handler
        )
    assert done == {id: [number for each, number in items if each == id] for id, _ in items}


async def test_ids_run_beside_each_other(make: Make) -> None:
    arrived = {ONE: trio.Event(), TWO: trio.Event()}

    async def meet(id: str) -> None:
        arrived[id].set()
        await arrived[TWO if id == ONE else ONE].wait()

    with trio.fail_after(5):
        await make(workers=1).dispatch(ListSource([ONE, TWO]), key=itself, handler=meet)


async def test_the_window_bounds_what_is_unfinished_and_comes_back_in_lots(make: Make) -> None:
    gates = {id: trio.Event() for id in OTHERS[:50]}

    async def handler(id: str) -> None:
        await gates[id].wait()

    source = EndlessSource(list(gates))
    strategy = make(max_in_flight=32)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(strategy.dispatch, source, key=itself, handler=handler))
        await wait_all_tasks_blocked()
        assert (source.limits, strategy.in_flight()) == ([32], 32)
        gates[OTHERS[0]].set()
        await wait_all_tasks_blocked()
        assert (source.limits, strategy.in_flight()) == ([32], 31)
        gates[OTHERS[1]].set()
        await wait_all_tasks_blocked()
        assert (source.limits, strategy.in_flight()) == ([32, 2], 32)
        nursery.cancel_scope.cancel()
    assert strategy.in_flight() == 0


async def test_what_waits_holds_no_worker(make: Make, autojump_clock: MockClock) -> None:
    done: dict[str, float] = {}

    async def handler(id: str) -> None:
        await trio.sleep(100 if id == ONE else 0.01)
        done[id] = trio.current_time()

    started = trio.current_time()
    await make(workers=1).dispatch(ListSource([ONE, TWO, *OTHERS[:20]]), key=itself, handler=handler)
    assert max(done[id] for id in done if id != ONE) - started < 0.1


async def test_dispatch_returns_when_all_that_was_accepted_has_finished(make: Make, autojump_clock: MockClock) -> None:
    done: list[int] = []

    async def handler(item: tuple[str, int]) -> None:
        await trio.sleep(item[1])
        done.append(item[1])

    await make().dispatch(ListSource([(f"id {n}", n) for n in range(30)]), key=first, handler=handler)
    assert sorted(done) == list(range(30))


async def test_a_stop_waits_for_what_runs_and_refuses_the_next(make: Make) -> None:
    gate = trio.Event()
    handled: list[str] = []

    async def handler(id: str) -> None:
        await gate.wait()
        handled.append(id)

    strategy = make()
    log: list[str] = []

    async def stop() -> None:
        await strategy.stop()
        log.append("stopped")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(strategy.dispatch, ListSource([ONE, ONE, TWO]), key=itself, handler=handler))
        await wait_all_tasks_blocked()
        nursery.start_soon(stop)
        nursery.start_soon(stop)
        await wait_all_tasks_blocked()
        source = ListSource([ONE])
        with pytest.raises((ExecutorClosedError, SchedulerClosedError), match="closed: it refuses new dispatches"):
            await strategy.dispatch(source, key=itself, handler=handler)
        assert (source.rest, log) == ([ONE], [])
        gate.set()
    assert (sorted(handled), log) == (sorted([ONE, ONE, TWO]), ["stopped", "stopped"])


@pytest.mark.parametrize("end", ["failure", "cancellation", "force"])
async def test_every_item_ends_in_one_way_when_a_dispatch_is_ended(make: Make, end: str) -> None:
    states: dict[tuple[str, int], str] = {}

    async def handler(item: tuple[str, int]) -> None:
        try:
            if item == (ONE, 1) and end == "failure":
                await wait_all_tasks_blocked()
                states[item] = "failed"
                raise ValueError(item)
            if item[1]:
                await trio.sleep_forever()
        except trio.Cancelled:
            states[item] = "interrupted"
            raise
        states[item] = "handled"

    def discard(item: tuple[str, int]) -> None:
        assert item not in states
        states[item] = "discarded"

    items = [(id, number) for number in range(3) for id in (ONE, TWO)]
    source = EndlessSource(items)
    strategy = make(max_in_flight=6)
    raised: list[BaseException | None] = []
    dispatch = partial(strategy.dispatch, source, key=first, handler=handler, on_discard=discard)
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:

            async def act() -> None:
                await wait_all_tasks_blocked()
                if end == "cancellation":
                    scope.cancel()
                elif end == "force":
                    strategy.force_stop()

            nursery.start_soon(act)
            await collect(dispatch, raised)
    expected = {"failure": ValueError, "cancellation": trio.Cancelled, "force": ExecutorClosedError}
    assert isinstance(raised[0], expected[end])
    assert states == {
        (ONE, 0): "handled",
        (TWO, 0): "handled",
        (ONE, 1): "failed" if end == "failure" else "interrupted",
        (TWO, 1): "interrupted",
        (ONE, 2): "discarded",
        (TWO, 2): "discarded",
    }
    assert strategy.in_flight() == 0
    assert not [name for name in task_names() if name.startswith("mailbox")]


async def test_a_failure_that_is_reported_ends_nothing(make: Make) -> None:
    failed: list[tuple[int, str]] = []
    handled: list[int] = []

    async def handler(number: int) -> None:
        await trio.lowlevel.checkpoint()
        if number % 3 == 0:
            raise ValueError(number)
        handled.append(number)

    await make().dispatch(
        ListSource(range(30)),
        key=lambda number: f"id {number % 5}",
        handler=handler,
        on_error=lambda number, error: failed.append((number, repr(error))),
    )
    assert sorted(failed) == [(number, f"ValueError({number})") for number in range(0, 30, 3)]
    assert sorted(handled) == [number for number in range(30) if number % 3]


async def test_one_id_with_nearly_the_whole_window_stalls_its_own_dispatch_only(make: Make) -> None:
    source = EndlessSource([ONE] * 31 + [TWO] + [ONE])
    strategy = make(max_in_flight=32)
    async with trio.open_nursery() as nursery:
        handle: Callable[[str], Awaitable[None]] = forever
        nursery.start_soon(partial(strategy.dispatch, source, key=itself, handler=handle))
        await wait_all_tasks_blocked()
        assert source.rest == [ONE]
        with trio.fail_after(5):
            await strategy.dispatch(ListSource([ONE, TWO]), key=itself, handler=lambda _: None)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("handler", [None, 5])
async def test_what_is_no_handler_is_refused(make: Make, handler: Any) -> None:
    with pytest.raises(TypeError, match="handler must be a function"):
        await make().dispatch(ListSource([ONE]), key=itself, handler=handler)


async def test_a_handler_that_yields_is_refused(make: Make) -> None:
    async def yields(id: str) -> Any:
        yield id

    with pytest.raises(TypeError, match="handler must be a function"):
        await make().dispatch(ListSource([ONE]), key=itself, handler=yields)
