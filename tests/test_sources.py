"""Where a dispatch takes its items from: channels, async iterables, batches."""

from collections.abc import AsyncIterator
from functools import partial

import pytest
import trio
from support import forever, itself
from trio.testing import wait_all_tasks_blocked

from trio_wow.errors import ExecutorClosedError
from trio_wow.execution import KeyedExecutor


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks."""

    count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


class TestChannels:
    async def test_what_a_channel_holds_is_drained_without_a_switch_for_each_item(self) -> None:
        send, receive = trio.open_memory_channel[int](10_000)
        for n in range(10_000):
            send.send_nowait(n)
        send.close()
        handled: list[int] = []
        steps = Steps()
        trio.lowlevel.add_instrument(steps)
        await KeyedExecutor(workers=1, perf_counter=lambda: 0.0).dispatch(receive, key=itself, handler=handled.append)
        trio.lowlevel.remove_instrument(steps)
        assert handled == list(range(10_000))
        assert steps.count < 10_000 / 256 * 5

    async def test_the_order_of_senders_that_wait_is_kept(self) -> None:
        send, receive = trio.open_memory_channel[int](0)
        handled: list[int] = []

        async def feed() -> None:
            async with send:
                for n in range(500):
                    await send.send(n)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed)
            await KeyedExecutor(max_in_flight=8).dispatch(receive, key=lambda _: 0, handler=handled.append)
        assert handled == list(range(500))

    async def test_a_closed_receiving_end_is_the_sources_error(self) -> None:
        _, receive = trio.open_memory_channel[int](0)
        receive.close()
        with pytest.raises(trio.ClosedResourceError):
            await KeyedExecutor().dispatch(receive, key=itself, handler=forever)


class Numbers:
    """Async generators that say how they ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def count(self, to: int) -> AsyncIterator[int]:
        try:
            for n in range(to):
                yield n
            await trio.lowlevel.checkpoint()
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise
        else:
            self.ends.append("end")

    async def count_in_a_scope(self, to: int) -> AsyncIterator[int]:
        task = trio.lowlevel.current_task()
        try:
            with trio.CancelScope():
                for n in range(to):
                    yield n
        finally:
            assert trio.lowlevel.current_task() is task
            self.ends.append("left its scope")

    async def count_in_a_nursery(self, to: int) -> AsyncIterator[int]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            for n in range(to):
                yield n
            nursery.cancel_scope.cancel()
        self.ends.append("end")


class TestAsyncIterables:
    async def test_every_item_of_an_async_generator_is_handled(self) -> None:
        numbers = Numbers()
        handled: list[int] = []
        await KeyedExecutor(max_in_flight=16).dispatch(
            numbers.count(1_000), key=lambda n: n % 7, handler=handled.append
        )
        assert sorted(handled) == list(range(1_000))
        assert numbers.ends == ["end"]

    async def test_an_end_of_channel_inside_is_no_end_of_the_iterable(self) -> None:
        async def items() -> AsyncIterator[int]:
            yield 1
            raise trio.EndOfChannel

        with pytest.raises(RuntimeError, match=r"async_generator raised trio\.EndOfChannel") as caught:
            await KeyedExecutor().dispatch(items(), key=itself, handler=forever)
        assert isinstance(caught.value.__cause__, trio.EndOfChannel)

    async def test_an_async_generator_is_closed_when_a_handler_fails(self) -> None:
        numbers = Numbers()

        def handler(n: int) -> None:
            raise ValueError(n)

        with pytest.raises(ValueError, match="0"):
            await KeyedExecutor(max_in_flight=4).dispatch(numbers.count(1_000), key=lambda _: 0, handler=handler)
        assert numbers.ends == ["GeneratorExit"]

    async def test_an_async_generator_is_closed_in_the_task_that_it_ran_in_when_the_dispatch_is_cancelled(self) -> None:
        numbers = Numbers()
        async with trio.open_nursery() as nursery:
            executor = KeyedExecutor(max_in_flight=4)
            nursery.start_soon(partial(executor.dispatch, numbers.count_in_a_scope(99), key=itself, handler=forever))
            await wait_all_tasks_blocked()
            assert numbers.ends == []
            nursery.cancel_scope.cancel()
        assert numbers.ends == ["left its scope"]

    async def test_a_generator_with_a_nursery_of_its_own_ends_whole(self) -> None:
        numbers = Numbers()
        handled: list[int] = []
        executor = KeyedExecutor(max_in_flight=4)
        await executor.dispatch(numbers.count_in_a_nursery(40), key=itself, handler=handled.append)
        assert sorted(handled) == list(range(40))
        assert numbers.ends == ["end"]

    async def test_what_a_generator_raises_while_it_is_closed_joins_the_errors(self) -> None:
        async def numbers() -> AsyncIterator[int]:
            try:
                for n in range(1_000):
                    yield n
            finally:
                raise OSError("disk")

        def handler(n: int) -> None:
            raise ValueError(n)

        with pytest.raises(ExceptionGroup) as caught:
            await KeyedExecutor(max_in_flight=4).dispatch(numbers(), key=lambda _: 0, handler=handler)
        assert list(map(repr, caught.value.exceptions)) == ["ValueError(0)", "OSError('disk')"]

    async def test_an_iterator_that_is_no_generator_is_left_open(self) -> None:
        class Lines:
            def __init__(self) -> None:
                self.rest = list(range(9))

            def __aiter__(self) -> "Lines":
                return self

            async def __anext__(self) -> int:
                await trio.lowlevel.checkpoint()
                if not self.rest:
                    raise StopAsyncIteration
                return self.rest.pop(0)

            async def aclose(self) -> None:
                raise AssertionError("not the dispatch's to close")

        handled: list[int] = []
        await KeyedExecutor().dispatch(Lines(), key=itself, handler=handled.append)
        assert sorted(handled) == list(range(9))

    async def test_a_refused_generator_has_not_begun(self) -> None:
        executor = KeyedExecutor()
        await executor.aclose()
        numbers = Numbers()
        generator = numbers.count(3)
        with pytest.raises(ExecutorClosedError):
            await executor.dispatch(generator, key=itself, handler=forever)
        assert [n async for n in generator] == [0, 1, 2]
