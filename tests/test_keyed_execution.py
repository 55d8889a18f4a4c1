"""The semantics of keyed execution; K numbers are rows of the design's table."""

import contextvars
import gc
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import trio
import trio.lowlevel
from hypothesis import given
from hypothesis import strategies as st
from support import EndlessSource, ListSource, a_cancelled, first, forever, itself, task_names
from trio.testing import wait_all_tasks_blocked

from trio_wow.errors import CancelScopeLeakError, ExecutorClosedError
from trio_wow.execution import KeyedExecutor


class TestOrder:
    @pytest.mark.parametrize("seed", range(20))
    async def test_k3_items_of_one_key_run_one_at_a_time_in_order(self, autojump_clock: object, seed: int) -> None:
        rng = random.Random(seed)
        items = [(rng.randrange(5), n) for n in range(200)]
        waits = {item: rng.choice((0, 0, 1, 2, "sleep")) for item in items}
        running: set[int] = set()
        done: dict[int, list[int]] = defaultdict(list)

        async def handler(item: tuple[int, int]) -> None:
            key, n = item
            assert key not in running
            running.add(key)
            wait = waits[item]
            if isinstance(wait, int):
                for _ in range(wait):
                    await trio.lowlevel.checkpoint()
            else:
                await trio.sleep(rng.random())
            running.remove(key)
            done[key].append(n)

        await KeyedExecutor(max_in_flight=16).dispatch(ListSource(items, batch=7), key=first, handler=handler)

        assert done == {key: [n for k, n in items if k == key] for key in done}
        assert sum(map(len, done.values())) == 200

    async def test_k3_different_keys_run_in_parallel(self) -> None:
        arrived = {"a": trio.Event(), "b": trio.Event()}

        async def meet(item: str) -> None:
            arrived[item].set()
            await arrived["b" if item == "a" else "a"].wait()

        with trio.fail_after(5):
            await KeyedExecutor().dispatch(ListSource(["a", "b"]), key=itself, handler=meet)

    async def test_a_plain_function_is_a_handler_too(self) -> None:
        seen: list[int] = []
        await KeyedExecutor().dispatch(ListSource(range(40)), key=lambda n: n % 3, handler=seen.append)
        assert sorted(seen) == list(range(40))


class TestMailboxes:
    async def test_k4_a_mailbox_is_a_named_task_while_it_has_items_and_then_gone(self) -> None:
        gate = trio.Event()

        async def handler(item: tuple[str, int]) -> None:
            await gate.wait()

        source = EndlessSource([("a", 1), ("a", 2), ("b", 1)])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(KeyedExecutor().dispatch, source, key=first, handler=handler))
            await wait_all_tasks_blocked()
            assert sorted(name for name in task_names() if name.startswith("mailbox")) == ["mailbox a", "mailbox b"]
            gate.set()
            await wait_all_tasks_blocked()
            assert not [name for name in task_names() if name.startswith("mailbox")]
            nursery.cancel_scope.cancel()

    @pytest.mark.parametrize("fails", [False, True])
    @pytest.mark.parametrize("seed", range(50))
    async def test_fs01_an_item_that_arrives_while_the_mailbox_leaves_is_handled(self, seed: int, fails: bool) -> None:
        rng = random.Random(seed)
        send, receive = trio.open_memory_channel[int](1)
        handled: list[int] = []
        errors: list[int] = []

        async def handler(n: int) -> None:
            assert task_names().count("mailbox A") <= 1
            handled.append(n)
            if n < 200:
                nursery.start_soon(feed, n + 1)
            else:
                send.close()
            for _ in range(rng.randrange(3)):
                await trio.lowlevel.checkpoint()
            if fails and n % 7 == 0:
                raise ValueError(n)

        async def feed(n: int) -> None:
            for _ in range(rng.randrange(4)):
                await trio.lowlevel.checkpoint()
            await send.send(n)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(feed, 0)
                await KeyedExecutor().dispatch(
                    receive, key=lambda _: "A", handler=handler, on_error=lambda n, _: errors.append(n)
                )

        assert handled == list(range(201)), f"seed {seed}"
        assert errors == [n for n in range(201) if fails and n % 7 == 0]

    async def test_k4_memory_follows_active_keys(self) -> None:
        class Key:
            def __init__(self, n: int) -> None:
                self.n = n

        alive = [0]

        async def handler(key: Key) -> None:
            if key.n in (2_000, 9_000):
                gc.collect()
                alive.append(sum(isinstance(each, Key) for each in gc.get_objects()))

        class Keys:
            n = 0

            async def receive_batch(self, limit: int, /) -> list[Key]:
                await trio.lowlevel.checkpoint()
                if self.n >= 10_000:
                    raise trio.EndOfChannel
                self.n += limit
                return [Key(n) for n in range(self.n - limit, self.n)]

        await KeyedExecutor(max_in_flight=64).dispatch(Keys(), key=itself, handler=handler)
        assert max(alive) <= 2 * 64


class TestTurns:
    @pytest.mark.parametrize("throughput", [1, 5, 16])
    async def test_k6_a_hot_key_lets_the_others_in_after_its_turn(self, throughput: int) -> None:
        order: list[str] = []

        async def handler(item: str) -> None:
            order.append(item)

        items = ["hot"] * 100 + [f"cold {n}" for n in range(5)]
        executor = KeyedExecutor(workers=1, throughput=throughput)
        await executor.dispatch(ListSource(items), key=itself, handler=handler)

        before_last_cold = order[: max(n for n, item in enumerate(order) if item != "hot")]
        assert before_last_cold.count("hot") <= throughput
        assert order.count("hot") == 100

    async def test_fs04_a_key_that_is_never_empty_leaves_the_loop_to_others(self) -> None:
        passes = handled = 0
        stop = False

        class Refilled:
            async def receive_batch(self, limit: int, /) -> list[int]:
                await trio.lowlevel.checkpoint()
                if stop:
                    raise trio.EndOfChannel
                return list(range(limit))

        async def handler(_: int) -> None:
            nonlocal handled
            handled += 1

        async def ticker() -> None:
            nonlocal passes, stop
            while handled < 2_000:
                passes += 1
                await trio.lowlevel.checkpoint()
            stop = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ticker)
            await KeyedExecutor(throughput=16).dispatch(Refilled(), key=lambda _: "hot", handler=handler)
        assert passes >= 2_000 / 16 - 2

    async def test_k7_a_waiting_key_delays_no_other_key(self, autojump_clock: trio.testing.MockClock) -> None:
        done: dict[int, float] = {}

        async def handler(n: int) -> None:
            await trio.sleep(100 if n == 0 else 0.01)
            done[n] = trio.current_time()

        start = trio.current_time()
        await KeyedExecutor(workers=1).dispatch(ListSource(range(20)), key=itself, handler=handler)
        assert max(done[n] for n in range(1, 20)) - start < 0.1


class TestWindow:
    @pytest.mark.parametrize(("window", "lot"), [(1, 1), (4, 1), (16, 1), (40, 2), (256, 16)])
    async def test_k8_demand_is_the_window_and_then_returns_in_lots(self, window: int, lot: int) -> None:
        gates = [trio.Event() for _ in range(2 * window)]

        async def handler(n: int) -> None:
            await gates[n].wait()

        source = EndlessSource(range(2 * window))
        async with trio.open_nursery() as nursery:
            executor = KeyedExecutor(max_in_flight=window)
            nursery.start_soon(partial(executor.dispatch, source, key=itself, handler=handler))
            await wait_all_tasks_blocked()
            assert source.limits == [window]
            for n in range(lot - 1):
                gates[n].set()
            await wait_all_tasks_blocked()
            assert source.limits == [window]
            gates[lot - 1].set()
            await wait_all_tasks_blocked()
            assert source.limits == [window, lot]
            assert len(source.rest) == window - lot
            nursery.cancel_scope.cancel()

    async def test_k8_what_was_asked_for_and_not_yet_given_is_part_of_the_window(self) -> None:
        source = EndlessSource(range(100), batch=3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(KeyedExecutor(max_in_flight=8).dispatch, source, key=itself, handler=forever))
            await wait_all_tasks_blocked()
            assert source.limits == [8, 5, 2]
            nursery.cancel_scope.cancel()

    async def test_k9_one_key_with_nearly_the_whole_window_stalls_its_own_dispatch_only(self) -> None:
        window, lot = 256, 16
        held = [("hot", n) for n in range(window - lot + 1)]
        free = [("cold", n) for n in range(lot - 1)]
        source = EndlessSource([*held, *free, ("late", 0)])
        gate = trio.Event()

        async def handler(item: tuple[str, int]) -> None:
            if item[0] == "hot":
                await gate.wait()

        async with trio.open_nursery() as nursery:
            executor = KeyedExecutor()
            nursery.start_soon(partial(executor.dispatch, source, key=first, handler=handler))
            await wait_all_tasks_blocked()
            assert source.limits == [window]  # 15 of a lot of 16 are back
            assert source.rest == [("late", 0)]

            with trio.fail_after(5):
                await executor.dispatch(ListSource(range(1000)), key=itself, handler=lambda _: None)

            gate.set()
            await wait_all_tasks_blocked()
            assert source.rest == []
            nursery.cancel_scope.cancel()

    async def test_k9_half_a_window_of_stuck_items_does_not_stall_the_rest(self) -> None:
        handled: list[int] = []

        async def handler(n: int) -> None:
            if n < 128:
                await trio.sleep_forever()
            handled.append(n)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(KeyedExecutor().dispatch, EndlessSource(range(5000)), key=itself, handler=handler)
            )
            await wait_all_tasks_blocked()
            assert sorted(handled) == list(range(128, 5000))
            nursery.cancel_scope.cancel()

    @pytest.mark.parametrize("returned", [0, 9])
    async def test_a_source_that_does_not_keep_to_its_limit_ends_the_dispatch(self, returned: int) -> None:
        class Wrong:
            async def receive_batch(self, limit: int, /) -> list[int]:
                await trio.lowlevel.checkpoint()
                return list(range(returned))

        discarded: list[int] = []
        with pytest.raises(ValueError, match=rf"Wrong.receive_batch\(8\) returned {returned} items; return 1 to 8"):
            await KeyedExecutor(max_in_flight=8).dispatch(
                Wrong(), key=itself, handler=lambda _: None, on_discard=discarded.append
            )
        assert discarded == list(range(returned))

    async def test_a_demand_source_hears_of_demand_and_may_exceed_the_window(self) -> None:
        class Pushing:
            def __init__(self) -> None:
                self.demand: list[int] = []
                self.send, self.receive = trio.open_memory_channel[list[int]](100)

            def add_demand(self, count: int, /) -> None:
                self.demand.append(count)

            async def receive_batch(self, limit: int, /) -> list[int]:
                return await self.receive.receive()

        source, gates = Pushing(), [trio.Event() for _ in range(6)]
        async with trio.open_nursery() as nursery:

            async def handler(n: int) -> None:
                await gates[n].wait()

            executor = KeyedExecutor(max_in_flight=2)
            nursery.start_soon(partial(executor.dispatch, source, key=itself, handler=handler))
            await wait_all_tasks_blocked()
            assert source.demand == [2]
            source.send.send_nowait([0, 1, 2, 3])
            source.send.send_nowait([4, 5])
            await wait_all_tasks_blocked()
            assert sum(name.startswith("mailbox") for name in task_names()) == 6
            for gate in gates:
                gate.set()
            await wait_all_tasks_blocked()
            assert sum(source.demand) == 2 + 6
            nursery.cancel_scope.cancel()


class Boom(BaseException):
    pass


class Unprintable:
    def __str__(self) -> str:
        raise LookupError


class TestErrors:
    async def test_an_error_given_to_on_error_lets_the_dispatch_go_on(self) -> None:
        failed: list[tuple[int, str]] = []
        handled: list[int] = []

        async def handler(n: int) -> None:
            if n % 3 == 0:
                raise ValueError(n)
            handled.append(n)

        await KeyedExecutor(max_in_flight=4).dispatch(
            ListSource(range(64)),
            key=lambda n: n % 5,
            handler=handler,
            on_error=lambda n, error: failed.append((n, repr(error))),
        )
        assert sorted(failed) == [(n, f"ValueError({n})") for n in range(0, 64, 3)]
        assert sorted(handled) == [n for n in range(64) if n % 3]

    @pytest.mark.parametrize(
        "error",
        [
            ValueError("plain"),
            Boom("outside Exception"),
            SystemExit(3),
            ExceptionGroup("group", [ValueError("leaf")]),
            ExceptionGroup("outer", [ExceptionGroup("inner", [ValueError("leaf")])]),
            BaseExceptionGroup("mixed", [Boom("a"), ValueError("b")]),
        ],
        ids=repr,
    )
    @pytest.mark.parametrize("plain", [False, True])
    async def test_fs03_without_on_error_what_a_handler_raised_is_raised_as_it_is(
        self, error: BaseException, plain: bool
    ) -> None:
        discarded: list[int] = []

        def fail(n: int) -> None:
            raise error

        async def fail_later(n: int) -> None:
            await trio.lowlevel.checkpoint()
            raise error

        handler: Callable[[int], object] = fail if plain else fail_later
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - identity is asserted
            await KeyedExecutor(max_in_flight=4).dispatch(
                ListSource(range(64)), key=lambda _: "one", handler=handler, on_discard=discarded.append
            )
        assert caught.value is error
        assert discarded == [1, 2, 3]

    @pytest.mark.parametrize("error", [Boom(), SystemExit(0), KeyboardInterrupt()], ids=repr)
    async def test_what_is_no_exception_ends_the_dispatch_in_spite_of_on_error(self, error: BaseException) -> None:
        reported: list[object] = []

        async def handler(n: int) -> None:
            raise error

        with pytest.raises(type(error)):
            await KeyedExecutor().dispatch(
                ListSource([1]), key=itself, handler=handler, on_error=lambda *args: reported.append(args)
            )
        assert reported == []

    async def test_several_errors_come_as_a_group_with_the_first_one_first(self, autojump_clock: object) -> None:
        async def handler(n: int) -> None:
            try:
                await trio.sleep(1 + n)
            finally:
                raise ValueError(n)

        with pytest.raises(ExceptionGroup) as caught:
            await KeyedExecutor().dispatch(ListSource(range(3)), key=itself, handler=handler)
        assert repr(caught.value.exceptions[0]) == "ValueError(0)"
        assert {repr(error) for error in caught.value.exceptions} == {f"ValueError({n})" for n in range(3)}

    async def test_what_callbacks_raise_joins_the_errors_and_stops_no_other_hand_over(self) -> None:
        discarded: list[int] = []

        def on_error(n: int, error: Exception) -> None:
            raise LookupError("on_error")

        def on_discard(n: int) -> None:
            discarded.append(n)
            raise KeyError(n)

        def handler(n: int) -> None:
            raise ValueError(n)

        with pytest.raises(ExceptionGroup) as caught:
            await KeyedExecutor(max_in_flight=4).dispatch(
                ListSource(range(9)), key=lambda _: 0, handler=handler, on_error=on_error, on_discard=on_discard
            )
        assert discarded == [1, 2, 3]
        assert [repr(error) for error in caught.value.exceptions] == [
            "LookupError('on_error')",
            "KeyError(1)",
            "KeyError(2)",
            "KeyError(3)",
        ]

    @pytest.mark.parametrize(
        ("key", "error"),
        [
            (lambda n: 1 // (2 - n), ZeroDivisionError),
            (lambda n: [n] if n == 2 else n, TypeError),
        ],
        ids=["raises", "unhashable"],
    )
    async def test_a_bad_key_ends_the_dispatch_and_loses_no_item(
        self, key: Callable[[int], Any], error: type[Exception]
    ) -> None:
        discarded: list[int] = []
        handled: list[int] = []
        source = ListSource(range(6))
        with pytest.raises(error):
            await KeyedExecutor(max_in_flight=4).dispatch(
                source, key=key, handler=handled.append, on_discard=discarded.append
            )
        assert sorted([*handled, *discarded, *source.rest]) == list(range(6))
        assert {2, 3} <= set(discarded)

    async def test_end_of_channel_from_a_key_is_an_error_not_the_end(self) -> None:
        def key(n: int) -> int:
            raise trio.EndOfChannel

        with pytest.raises(trio.EndOfChannel):
            await KeyedExecutor().dispatch(ListSource([1]), key=key, handler=lambda _: None)

    async def test_a_failing_source_cancels_the_handlers_and_discards_what_is_queued(self) -> None:
        states: dict[int, str] = {}

        class Breaking(ListSource):
            async def receive_batch(self, limit: int, /) -> list[int]:
                if not self.rest:
                    await wait_all_tasks_blocked()
                    raise OSError("gone")
                return await super().receive_batch(limit)

        async def handler(n: int) -> None:
            try:
                await trio.sleep_forever()
            finally:
                states[n] = "interrupted"

        with pytest.raises(OSError, match="gone"):
            await KeyedExecutor().dispatch(
                Breaking(range(6)),
                key=lambda n: n % 2,
                handler=handler,
                on_discard=lambda n: states.setdefault(n, "discarded"),
            )
        assert states == {0: "interrupted", 1: "interrupted", **dict.fromkeys(range(2, 6), "discarded")}

    async def test_a_plain_handler_that_returns_an_awaitable_is_told_so(self) -> None:
        async def work(n: int) -> None:
            raise AssertionError("must not run")

        with pytest.raises(TypeError, match=r"<lambda> is a plain function but returned an awaitable; declare it"):
            await KeyedExecutor().dispatch(ListSource([1]), key=itself, handler=lambda n: work(n))

    async def test_an_object_with_an_async_call_is_an_async_handler(self) -> None:
        class Handler:
            seen: list[int] = []  # noqa: RUF012

            async def __call__(self, n: int) -> None:
                await trio.lowlevel.checkpoint()
                self.seen.append(n)

        handler = Handler()
        await KeyedExecutor().dispatch(ListSource([1, 2]), key=itself, handler=handler)
        assert sorted(handler.seen) == [1, 2]

    @pytest.mark.parametrize("source", [[1, 2], "text", 7, iter([1])])
    async def test_what_is_no_source_is_refused(self, source: Any) -> None:
        with pytest.raises(TypeError, match=f"cannot dispatch from {type(source).__name__}: give a trio.Memory"):
            await KeyedExecutor().dispatch(source, key=itself, handler=lambda _: None)

    @pytest.mark.parametrize("name", ["key", "on_error", "on_discard"])
    async def test_what_is_no_plain_function_is_refused(self, name: str) -> None:
        async def wrong(*args: object) -> None: ...

        functions: dict[str, Any] = {"key": itself, "handler": itself}
        for value in (wrong, 5):
            with pytest.raises(TypeError, match=f"{name} must be a plain function, not"):
                await KeyedExecutor().dispatch(ListSource([1]), **(functions | {name: value}))
        with pytest.raises(TypeError, match="key must be a plain function, not None"):
            await KeyedExecutor().dispatch(ListSource([1]), **(functions | {"key": None}))
        with pytest.raises(TypeError, match="handler must be a function of one item that does not yield, not None"):
            await KeyedExecutor().dispatch(ListSource([1]), **(functions | {"handler": None}))

    async def test_a_handler_that_yields_is_refused(self) -> None:
        def generator(n: int) -> Any:
            yield n

        async def async_generator(n: int) -> Any:
            yield n

        for handler in (generator, async_generator):
            with pytest.raises(TypeError, match="handler must be a function of one item that does not yield"):
                await KeyedExecutor().dispatch(ListSource([1]), key=itself, handler=handler)

    async def test_a_key_function_that_stops_the_executor_starts_nothing_after(self) -> None:
        executor = KeyedExecutor()
        discarded: list[int] = []
        handled: list[int] = []

        def key(n: int) -> str:
            if n == 2:
                executor.force_stop()
            return "one"

        with pytest.raises(ExecutorClosedError):
            await executor.dispatch(ListSource(range(4)), key=key, handler=handled.append, on_discard=discarded.append)
        assert (handled, sorted(discarded)) == ([], [0, 1, 2, 3])

    async def test_a_demand_source_that_returns_nothing_ends_the_dispatch(self) -> None:
        class Empty:
            def add_demand(self, count: int, /) -> None: ...

            async def receive_batch(self, limit: int, /) -> list[int]:
                return []

        with pytest.raises(ValueError, match=r"Empty.receive_batch\(256\) returned 0 items"):
            await KeyedExecutor().dispatch(Empty(), key=itself, handler=lambda _: None)

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Boom()], ids=repr)
    async def test_k11_what_is_no_exception_outweighs_a_scope_left_open(self, error: BaseException) -> None:
        failed: list[object] = []

        async def handler(n: int) -> None:
            trio.CancelScope().__enter__()
            raise error

        with pytest.raises(type(error)) as caught:
            await KeyedExecutor().dispatch(
                ListSource([1]), key=itself, handler=handler, on_error=lambda *args: failed.append(args)
            )
        assert caught.value is error
        assert failed == []
        assert "left a cancel scope open" in error.__notes__[0]


class TestWrongFunctions:
    """Each would lose something silently."""

    async def test_a_callable_that_yields_is_no_handler(self) -> None:
        class Yielding:
            def __call__(self, item: int) -> Iterator[int]:
                yield item

        with pytest.raises(TypeError, match="handler must be a function of one item that does not yield"):
            await KeyedExecutor().dispatch(ListSource([1]), key=itself, handler=Yielding())

    async def test_a_key_that_is_a_coroutine_is_refused(self) -> None:
        async def key(item: int) -> int:
            return item

        def hidden(item: int) -> Any:
            return key(item)

        discarded: list[int] = []
        with pytest.raises(TypeError, match="key returned a coroutine for int; make it plain"):
            await KeyedExecutor().dispatch(ListSource([1]), key=hidden, handler=forever, on_discard=discarded.append)
        assert discarded == [1]
        with pytest.raises(TypeError, match="key must be a plain function"):
            await KeyedExecutor().dispatch(ListSource([1]), key=yielding, handler=forever)

    async def test_a_callback_that_returns_an_awaitable_is_an_error(self) -> None:
        async def later(*_: object) -> None: ...

        def fails(item: int) -> None:
            raise ValueError(item)

        with pytest.raises(TypeError, match="on_error returned an awaitable, which nobody awaits"):
            await KeyedExecutor().dispatch(
                ListSource([1]), key=itself, handler=fails, on_error=lambda *arguments: later(*arguments)
            )
        with pytest.raises(ExceptionGroup) as caught:
            await KeyedExecutor(workers=1).dispatch(
                ListSource([1, 2]), key=itself, handler=fails, on_discard=lambda item: later(item)
            )
        assert caught.group_contains(TypeError, match="on_discard returned an awaitable")

    async def test_a_handler_that_cannot_be_shown_is_named_by_its_class(self) -> None:
        class Unshowable:
            def __repr__(self) -> str:
                raise LookupError

            def __call__(self, item: int) -> None:
                names.append(executor.statistics().dispatches[0].handler)

        names: list[str] = []
        executor = KeyedExecutor()
        for handler in (Unshowable(), partial(Unshowable().__call__)):
            await executor.dispatch(ListSource([1]), key=itself, handler=handler)
        assert [name.rpartition(".<locals>.")[2] for name in names] == ["Unshowable", "Unshowable.__call__"]


def yielding(item: int) -> Any:
    yield item


class TestCancellation:
    async def test_an_item_cancelled_from_outside_is_interrupted_even_if_it_left_a_scope_open(self) -> None:
        failed: list[object] = []

        async def handler(n: int) -> None:
            trio.CancelScope().__enter__()
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            run = partial(KeyedExecutor().dispatch, EndlessSource([1]), key=itself, handler=handler)
            nursery.start_soon(partial(run, on_error=lambda *args: failed.append(args)))
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert nursery.cancel_scope.cancelled_caught
        assert failed == []

    async def test_interrupts_what_runs_and_discards_what_waits(self) -> None:
        states: dict[int, str] = {}

        async def handler(n: int) -> None:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                states[n] = "interrupted"
                raise

        source = EndlessSource(range(10))
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                executor = KeyedExecutor(max_in_flight=6)
                dispatch = partial(executor.dispatch, source, key=lambda n: n % 2, handler=handler)
                nursery.start_soon(partial(dispatch, on_discard=lambda n: states.setdefault(n, "discarded")))
                await wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
        assert states == {0: "interrupted", 1: "interrupted", **dict.fromkeys(range(2, 6), "discarded")}
        assert source.rest == [6, 7, 8, 9]

    @pytest.mark.parametrize("passes", range(12))
    async def test_at_any_moment_leaves_each_item_in_one_state_and_no_task(self, passes: int) -> None:
        states: dict[int, list[str]] = {n: [] for n in range(40)}

        async def handler(n: int) -> None:
            try:
                for _ in range(n % 4):
                    await trio.lowlevel.checkpoint()
            except trio.Cancelled:
                states[n].append("interrupted")
                raise
            if n % 5 == 4:
                raise ValueError(n)
            states[n].append("handled")

        source = ListSource(range(40), batch=3)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                executor = KeyedExecutor(max_in_flight=8, throughput=2)
                nursery.start_soon(
                    partial(
                        executor.dispatch,
                        source,
                        key=lambda n: n % 3,
                        handler=handler,
                        on_error=lambda n, _: states[n].append("failed"),
                        on_discard=lambda n: states[n].append("discarded"),
                    )
                )
                for _ in range(passes):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        for n in source.rest:
            states[n].append("in the source")
        assert all(len(state) == 1 for state in states.values()), states
        assert not [name for name in task_names() if name.startswith("mailbox")]
        with trio.fail_after(1):
            await executor.aclose()

    async def test_an_error_of_the_same_moment_is_not_lost(self) -> None:
        async def handler(n: int) -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError(n)

        with pytest.raises(ExceptionGroup) as caught:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(
                        partial(KeyedExecutor().dispatch, EndlessSource([1]), key=itself, handler=handler)
                    )
                    await wait_all_tasks_blocked()
                    scope.cancel()
        assert caught.group_contains(ValueError, match="1")
        assert not caught.group_contains(trio.Cancelled)

    async def test_a_group_with_a_cancellation_and_an_error_keeps_both(self) -> None:
        failed: list[Exception] = []

        async def handler(n: int) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                try:
                    await trio.sleep_forever()
                finally:
                    raise ValueError(n)

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                dispatch = partial(KeyedExecutor().dispatch, EndlessSource([1]), key=itself, handler=handler)
                nursery.start_soon(partial(dispatch, on_error=lambda _, error: failed.append(error)))
                await wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
        assert len(failed) == 1
        assert isinstance(failed[0], ExceptionGroup)
        assert failed[0].split(ValueError)[1] is None

    async def test_a_handler_that_a_shield_lets_finish_is_handled_and_nothing_starts_after_it(self) -> None:
        states: list[tuple[int, str]] = []

        async def handler(n: int) -> None:
            with trio.CancelScope(shield=True):
                for _ in range(5):
                    await trio.lowlevel.checkpoint()
            states.append((n, "handled"))

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                dispatch = partial(KeyedExecutor().dispatch, ListSource(range(3)), key=lambda _: 0, handler=handler)
                nursery.start_soon(partial(dispatch, on_discard=lambda n: states.append((n, "discarded"))))
                while not states and len(task_names()) < 6:
                    await trio.lowlevel.checkpoint()
                    if "mailbox 0" in task_names():
                        break
                scope.cancel()
        assert sorted(states) == [(0, "handled"), (1, "discarded"), (2, "discarded")]

    async def test_k15_cancelling_or_failing_one_dispatch_leaves_the_other_alone(self) -> None:
        executor = KeyedExecutor(workers=1)
        handled: list[int] = []
        gate = trio.Event()

        async def steady(n: int) -> None:
            await gate.wait()
            handled.append(n)

        async def failing(n: int) -> None:
            await trio.lowlevel.checkpoint()
            raise ValueError(n)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(executor.dispatch, ListSource(range(9)), key=lambda n: n % 2, handler=steady))
            await wait_all_tasks_blocked()
            with pytest.raises(ValueError, match="7"):
                await executor.dispatch(ListSource([7]), key=itself, handler=failing)
            with trio.move_on_after(0) as scope:
                await executor.dispatch(EndlessSource([1]), key=itself, handler=forever)
            assert scope.cancelled_caught
            gate.set()
        assert sorted(handled) == list(range(9))


class TestIsolation:
    async def test_k16_context_variables_are_the_handlers_own(self) -> None:
        var = contextvars.ContextVar("var", default="unset")
        var.set("outer")
        seen: list[tuple[str, ...]] = []

        async def child() -> None:
            seen.append(("child", var.get()))

        async def handler(n: int) -> None:
            before = var.get()
            var.set(f"item {n}")
            if n != 2:
                await trio.lowlevel.checkpoint()
            task = trio.lowlevel.current_task()
            in_thread = await trio.to_thread.run_sync(var.get) if n == 1 else ""
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child)
            seen.append((before, var.get(), task.context[var], in_thread))

        await KeyedExecutor().dispatch(ListSource(range(3)), key=lambda _: 0, handler=handler)
        assert seen == [
            ("child", "item 0"),
            ("outer", "item 0", "item 0", ""),
            ("child", "item 1"),
            ("outer", "item 1", "item 1", "item 1"),
            ("child", "item 2"),
            ("outer", "item 2", "item 2", ""),
        ]
        assert var.get() == "outer"

    async def test_k10_a_handler_resumes_in_its_mailbox_task(self) -> None:
        names: list[str] = []

        async def handler(n: int) -> None:
            task = trio.lowlevel.current_task()
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            assert trio.lowlevel.current_task() is task
            names.append(task.name)

        await KeyedExecutor().dispatch(ListSource([5]), key=itself, handler=handler)
        await handler(6)
        assert names[0] == "mailbox 5"

    @pytest.mark.parametrize("waits_first", [False, True])
    @pytest.mark.parametrize("outcome", ["returns", "raises", "is cancelled by the scope it leaves"])
    async def test_a_scope_left_open_fails_its_own_item_only(self, waits_first: bool, outcome: str) -> None:
        failed: dict[int, Exception] = {}
        handled: list[int] = []

        async def handler(n: int) -> None:
            if n % 3 == 1:
                if waits_first:
                    await trio.lowlevel.checkpoint()
                scope = trio.CancelScope()
                scope.__enter__()
                if outcome == "raises":
                    raise ValueError(n)
                if outcome.startswith("is"):
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
            else:
                await trio.lowlevel.checkpoint()
                handled.append(n)

        await KeyedExecutor(max_in_flight=4).dispatch(
            ListSource(range(12)), key=lambda n: n % 2, handler=handler, on_error=failed.__setitem__
        )
        assert sorted(failed) == [1, 4, 7, 10]
        assert sorted(handled) == [n for n in range(12) if n % 3 != 1]
        leak = failed[4]
        assert isinstance(leak, CancelScopeLeakError)
        assert leak.handler.endswith("handler")
        assert leak.key == 0
        assert isinstance(leak.__cause__, ValueError) == (outcome == "raises")

    async def test_an_abandoned_generator_with_a_scope_in_it_fails_its_own_item_only(self) -> None:
        kept = []

        async def numbers() -> Any:
            with trio.CancelScope():
                yield 1
                yield 2

        async def handler(n: int) -> None:
            if n == 0:
                generator = numbers()
                kept.append(generator)  # else the interpreter would close it here
                await anext(generator)
            await trio.lowlevel.checkpoint()
            handled.append(n)

        handled: list[int] = []
        failed: list[int] = []
        await KeyedExecutor().dispatch(
            ListSource(range(4)), key=lambda _: 0, handler=handler, on_error=lambda n, _: failed.append(n)
        )
        assert failed == [0]
        assert handled == [0, 1, 2, 3]
        await kept[0].aclose()


class TestLife:
    async def test_a_channel_is_drained_to_its_end_and_left_open(self) -> None:
        send, receive = trio.open_memory_channel[int](50)
        for n in range(50):
            send.send_nowait(n)
        send.close()
        seen: list[int] = []
        await KeyedExecutor(max_in_flight=8).dispatch(receive, key=lambda _: 0, handler=seen.append)
        assert seen == list(range(50))
        with pytest.raises(trio.EndOfChannel):
            receive.receive_nowait()

    async def test_what_a_cancelled_dispatch_did_not_take_is_still_in_the_channel(self) -> None:
        send, receive = trio.open_memory_channel[int](50)
        for n in range(50):
            send.send_nowait(n)
        async with trio.open_nursery() as nursery:
            run = partial(KeyedExecutor(max_in_flight=8).dispatch, receive, key=itself, handler=forever)
            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert receive.statistics().current_buffer_used == 42

    async def test_aclose_refuses_new_dispatches_and_waits_for_the_running_ones(self) -> None:
        executor = KeyedExecutor(name="mine")
        gate, closed = trio.Event(), trio.Event()

        async def handler(n: int) -> None:
            await gate.wait()

        async def close() -> None:
            await executor.aclose()
            closed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(executor.dispatch, ListSource([1]), key=itself, handler=handler))
            await wait_all_tasks_blocked()
            nursery.start_soon(close)
            await wait_all_tasks_blocked()
            assert not closed.is_set()
            nursery.start_soon(executor.aclose)  # a second one keeps the first from nothing
            await wait_all_tasks_blocked()
            source = ListSource([1, 2])
            with pytest.raises(ExecutorClosedError, match="executor 'mine' is closed"):
                await executor.dispatch(source, key=itself, handler=handler)
            assert source.rest == [1, 2]
            gate.set()
        assert closed.is_set()
        await executor.aclose()

    async def test_leaving_the_executors_block_closes_it(self) -> None:
        async with KeyedExecutor() as executor:
            await executor.dispatch(ListSource([1]), key=itself, handler=lambda _: None)
        with pytest.raises(ExecutorClosedError):
            await executor.dispatch(ListSource([1]), key=itself, handler=lambda _: None)

    async def test_force_stop_ends_the_running_dispatches(self) -> None:
        executor = KeyedExecutor()
        discarded: list[int] = []
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                with pytest.raises(ExecutorClosedError, match="forced stop"):
                    await executor.dispatch(
                        EndlessSource(range(3)), key=lambda _: 0, handler=forever, on_discard=discarded.append
                    )

            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            executor.force_stop()
            executor.force_stop()
            assert discarded == [1, 2]
        with trio.fail_after(1):
            await executor.aclose()

    async def test_force_stop_of_a_dispatch_whose_source_has_not_ended_is_no_success(self) -> None:
        executor = KeyedExecutor()
        with pytest.raises(ExecutorClosedError, match="forced stop"):
            await executor.dispatch(ListSource([1]), key=itself, handler=lambda _: executor.force_stop())

    async def test_cancelled_in_the_step_of_a_forced_stop_it_raises_cancelled(self) -> None:
        """Also when the source returns in that very step, so that no task of the dispatch meets the cancellation."""
        arrived = trio.Event()

        class Source:
            async def receive_batch(self, limit: int, /) -> list[int]:
                await arrived.wait()
                return [1]

        executor = KeyedExecutor()
        discarded: list[int] = []
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                dispatch = partial(executor.dispatch, Source(), key=itself, handler=forever)
                nursery.start_soon(partial(dispatch, on_discard=discarded.append))
                await wait_all_tasks_blocked()
                arrived.set()
                scope.cancel()
                executor.force_stop()
        assert scope.cancelled_caught
        assert discarded == [1]

    async def test_a_dispatch_that_ends_by_itself_at_a_forced_stop_is_a_success(self) -> None:
        executor = KeyedExecutor()
        send, receive = trio.open_memory_channel[int](1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(executor.dispatch, receive, key=itself, handler=lambda _: None))
            await wait_all_tasks_blocked()
            send.close()
            executor.force_stop()

    async def test_a_cancelled_that_is_not_ours_is_no_success(self) -> None:
        async def handler(n: int) -> None:
            raise await a_cancelled()

        with pytest.raises(
            RuntimeError, match=r"handler, or the source, raised trio.Cancelled although nothing had been"
        ):
            await KeyedExecutor().dispatch(ListSource([1]), key=itself, handler=handler)

    @pytest.mark.parametrize("argument", ["workers", "max_in_flight", "throughput"])
    @pytest.mark.parametrize("value", [0, -1, 2.0, "4", True])
    def test_numbers_must_be_positive_ints(self, argument: str, value: Any) -> None:
        with pytest.raises(ValueError, match=rf"{argument} must be a positive int, not {value!r}"):
            KeyedExecutor(**{argument: value})

    def test_repr_shows_what_it_is(self) -> None:
        assert repr(KeyedExecutor(workers=2, name="mine")) == (
            "<KeyedExecutor 'mine': workers=2, max_in_flight=256, throughput=16, 0 dispatches>"
        )


@given(
    plan=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["ok", "ok", "error"])), max_size=60),
    window=st.integers(1, 9),
    batch=st.integers(1, 5),
    throughput=st.integers(1, 4),
    fatal=st.booleans(),
    cancel_after=st.none() | st.integers(0, 20),
)
def test_every_item_ends_in_exactly_one_state(
    plan: list[tuple[int, int, str]], window: int, batch: int, throughput: int, fatal: bool, cancel_after: int | None
) -> None:
    states: dict[int, list[str]] = {n: [] for n in range(len(plan))}
    started: dict[int, list[int]] = defaultdict(list)
    unfinished = set[int]()

    async def handler(n: int) -> None:
        key, waits, outcome = plan[n]
        assert not any(plan[m][0] == key for m in unfinished)
        assert len(unfinished) < window
        unfinished.add(n)
        started[key].append(n)
        try:
            for _ in range(waits):
                await trio.lowlevel.checkpoint()
        except trio.Cancelled:
            states[n].append("interrupted")
            raise
        finally:
            unfinished.remove(n)
        if outcome == "error":
            if fatal:
                states[n].append("raised")
            raise ValueError(n)
        states[n].append("handled")

    async def main() -> None:
        source = ListSource(range(len(plan)), batch=batch)
        executor = KeyedExecutor(max_in_flight=window, throughput=throughput)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def run() -> None:
                    try:
                        await executor.dispatch(
                            source,
                            key=lambda n: plan[n][0],
                            handler=handler,
                            on_error=None if fatal else lambda n, _: states[n].append("failed"),
                            on_discard=lambda n: states[n].append("discarded"),
                        )
                    except* ValueError:
                        assert fatal

                nursery.start_soon(run)
                if cancel_after is not None:
                    for _ in range(cancel_after):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
        for n in source.rest:
            states[n].append("in the source")

    trio.run(main)
    assert all(len(state) == 1 for state in states.values()), states
    for key, order in started.items():
        assert order == [n for n in range(len(plan)) if plan[n][0] == key][: len(order)]
    if not fatal and cancel_after is None:
        assert {state[0] for state in states.values()} <= {"handled", "failed"}
