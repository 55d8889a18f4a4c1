"""What becomes of items of `@direct` and `@blocking` handlers, and which functions those are."""

import contextvars
import gc
import random
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from functools import partial, partialmethod, wraps
from typing import Any

import pytest
import trio
import trio.testing
from support import EndlessSource, ListSource, a_cancelled, collect, first, task_names
from thread_support import (
    ERRORS,
    FATAL,
    PATIENCE,
    PINS,
    DemandedSource,
    Gates,
    Pin,
    Unprintable,
    borrowed,
    first_of_none,
    queued,
    raiser,
    states,
    until,
)

from trio_wow.errors import ExecutorClosedError
from trio_wow.execution import ExecPool, ExecProfile, KeyedExecutor, blocking, direct


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
    async def test_k16_what_a_callback_sets_is_nothing_of_the_next_item(self, pin: Pin) -> None:
        var = contextvars.ContextVar("var", default="unset")
        seen: list[str] = []

        @pin
        def handler(n: int) -> None:
            seen.append(var.get())
            raise ValueError(n)

        await KeyedExecutor(workers=1).dispatch(
            ListSource(range(3)), key=lambda _: 0, handler=handler, on_error=lambda *_: var.set("by on_error")
        )
        assert seen == ["unset"] * 3

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
        assert borrowed(executor) == 0

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
        assert borrowed(executor) == 0
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


KINDS = ("direct", "blocking", "calls direct", "calls blocking", "async", "plain")


@pytest.mark.parametrize("seed", range(60))
async def test_every_item_ends_in_exactly_one_state_and_every_worker_idle(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Dispatches of all kinds on one executor, of which some fail, are cancelled or stopped by force."""
    rng = random.Random(seed)
    forced = seed % 5 == 4
    executor = KeyedExecutor(
        pool=ExecPool(rng.randint(1, 3), rng.randint(0, 4)),
        workers=rng.randint(1, 3),
        max_in_flight=rng.randint(1, 12),
        throughput=rng.choice((1, 2, 16)),
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

        async def calls(item: Any) -> None:
            try:
                await executor.call(profile, in_a_thread, item)
            except trio.Cancelled:
                if not forced and item[2] not in started[item[1]]:
                    ended[item].append("interrupted")
                raise

        handler: Callable[[Any], object] = on_the_loop
        pin = {"direct": direct, "blocking": blocking}.get(kind.removeprefix("calls "))
        profile = ExecProfile(pin(in_a_thread) if pin else end)
        if kind == "plain":
            handler = end
        elif kind != "async":
            handler = calls if kind.startswith("calls") else in_a_thread
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
        await until(lambda: not borrowed(executor))
        for item in source.rest:
            ended[item].append("in the source")
        # A handler does not hear of it when it waits for a thread in vain, or is abandoned in one.
        stopped = cancelled or scope.cancelled_caught or fatal
        unheard = (kind == "blocking" and stopped) or (kind != "async" and forced)
        states = Counter(len(states) for states in ended.values())
        assert {*states} <= ({0, 1} if unheard else {1}), (ended, seed)
        assert states[0] <= 5
        for key, order in started.items():
            assert order == [n for _, k, n in ended if k == key][: len(order)]

    scopes: list[trio.CancelScope] = []
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(run, number, rng.choice(KINDS))
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
