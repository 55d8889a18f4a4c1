"""An executor from its first dispatch to a forced stop, and what it tells meanwhile."""

import gc
import logging
import random
import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from support import EndlessSource, ListSource, collect, first, forever, task_names
from thread_support import (
    PATIENCE,
    PINS,
    Boom,
    DemandedSource,
    Gates,
    Pin,
    Unprintable,
    borrowed,
    dispatches,
    first_of_none,
    queued,
    states,
    until,
)
from trio.testing import wait_all_tasks_blocked

from trio_wow.errors import ExecutorClosedError
from trio_wow.execution import KeyedExecutor, blocking, direct


class TestForcedStop:
    @pytest.mark.parametrize("pin", ["compute", "wait"])
    async def test_abandons_threads_and_names_them(
        self, gates: Gates, pin: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        now = 100.0
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
        assert borrowed(executor) == (pin == "wait")
        with trio.fail_after(PATIENCE):
            await executor.aclose()
        with pytest.raises(ExecutorClosedError):
            await executor.dispatch(ListSource(["b"]), key=first, handler=gates.wait)

        gates.open_all()
        await until(lambda: states(executor) == ["idle"] and not borrowed(executor))
        assert len(caplog.records) == 1
        assert gates.arrived == ["a1"]
        assert (executor.statistics().threads_abandoned, executor.statistics().late_results) == (1, 1)

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
        await until(lambda: ended and states(executor) == ["idle"] and not borrowed(executor))
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    @PINS
    async def test_a_thread_that_ends_at_that_moment_tells_its_error_exactly_once(
        self, pin: Pin, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def one_round() -> None:
            caplog.clear()
            executor = KeyedExecutor(workers=1)
            go, gone, inside = threading.Event(), threading.Event(), threading.Event()
            reported: list[object] = []

            @pin
            def handler(item: str) -> None:
                inside.set()
                assert go.wait(PATIENCE)
                gone.set()
                raise ValueError(item)

            async with trio.open_nursery() as nursery:
                run = partial(executor.dispatch, EndlessSource(["a"]), key=first, handler=handler)
                run = partial(run, on_error=lambda *args: reported.append(args))
                nursery.start_soon(collect, run)
                await until(inside.is_set)
                go.set()
                assert gone.wait(PATIENCE)  # holds the event loop, so that nobody hears of the thread's end
                executor.force_stop()
            await until(lambda: states(executor) == ["idle"])
            await until(lambda: len(reported) + sum(r.levelname == "ERROR" for r in caplog.records) == 1)
            await wait_all_tasks_blocked()
            assert len(reported) + sum(r.levelname == "ERROR" for r in caplog.records) == 1
            assert len(reported) + sum(r.levelname == "WARNING" for r in caplog.records) == 1

        for _ in range(30):
            await one_round()

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


class Vexing:
    """A key that cannot be looked up any more, once it is `broken`."""

    broken = False

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        if self.broken:
            raise LookupError(self.name)
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return self is other


class TestKeysThatBreak:
    async def test_a_forced_stop_ends_the_other_dispatches_too(self, gates: Gates) -> None:
        executor = KeyedExecutor(workers=1)
        outcomes: list[list[BaseException | None]] = [[], [], []]
        keys = [Vexing("x"), Vexing("y")]
        async with trio.open_nursery() as nursery:
            for outcome in outcomes:
                run = partial(executor.dispatch, EndlessSource(keys), key=lambda key: key, handler=gates.compute)
                nursery.start_soon(collect, run, outcome)
            await gates.arrival(keys[0])
            await wait_all_tasks_blocked()
            assert queued(executor) == [5]
            for key in keys:
                key.broken = True
            executor.force_stop()
        assert all(outcomes)
        assert queued(executor) == [0]
        for key in keys:
            key.broken = False
        gates.open_all()
        await until(lambda: states(executor) == ["idle"])

    async def test_a_dispatch_that_discards_queued_ones_leaves_the_worker_as_it_was(self) -> None:
        executor = KeyedExecutor(workers=1)
        keys = [Vexing(name) for name in "abcd"]
        discarded: list[Vexing] = []

        def handler(item: Vexing) -> None:
            for key in keys:
                key.broken = True
            raise ValueError(item.name)

        with pytest.raises(ExceptionGroup) as caught:
            await executor.dispatch(ListSource(keys), key=lambda key: key, handler=handler, on_discard=discarded.append)
        assert caught.group_contains(ValueError, match="a")
        assert discarded == keys[1:]
        assert (states(executor), queued(executor)) == (["idle"], [0])

    @pytest.mark.parametrize("handler", [direct(lambda _: None), forever], ids=["direct", "async"])
    async def test_a_key_that_ends_the_program_when_it_is_printed_leaves_no_worker_taken(self, handler: Any) -> None:
        class Exiting:
            exits = True

            def __str__(self) -> str:
                if self.exits:
                    raise SystemExit
                return "no longer"

        executor = KeyedExecutor(workers=1)
        with pytest.raises(BaseExceptionGroup) as caught:
            await executor.dispatch(ListSource([Exiting()]), key=lambda key: key, handler=handler)
        assert caught.group_contains(SystemExit)
        Exiting.exits = False  # its mailbox may live on as garbage, and be shown to other tests
        assert states(executor) == ["idle"]
        done: list[int] = []
        await executor.dispatch(ListSource([1]), key=first_of_none, handler=direct(lambda n: done.append(n)))
        assert done == [1]


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

        def shows(*expected: int) -> bool:
            return numbers() == expected

        executor = KeyedExecutor(workers=1, max_in_flight=4)
        async with trio.open_nursery() as nursery:
            source = DemandedSource(range(6), excess=2)
            nursery.start_soon(partial(executor.dispatch, source, key=lambda _: "k", handler=getattr(gates, pin)))
            await gates.arrival(0)
            await wait_all_tasks_blocked()
            assert numbers() == (6, 0, 2)
            for n in range(6):
                gates.open(n)
                await until(partial(shows, 5 - n, max(0, n - 1), max(0, 1 - n)))
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
            gc.collect()
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
