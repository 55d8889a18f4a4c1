"""Every transition of a runtime's life, legal and illegal, from a task and from a thread.

Where threads take part the clock stands still: time that jumps would not wait for them.
"""

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
from runtime_support import Part, quick, shielded
from support import ListSource, collect
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow.errors import RuntimeStateError, ShutdownDeadlineError
from trio_wow.execution import KeyedExecutor
from trio_wow.runtime import Runtime, RuntimeState

NEW, STARTING, RUNNING, STOPPING, FORCE_STOPPING, STOPPED = RuntimeState
TIMEOUT = 10

Asks = Callable[[Callable[[], object]], Awaitable[object]]


async def from_a_task(ask: Callable[[], object]) -> object:
    return ask()


async def from_a_thread(ask: Callable[[], object]) -> object:
    return await trio.to_thread.run_sync(ask)


async def from_another_run(ask: Callable[[], object]) -> object:
    return await trio.to_thread.run_sync(trio.run, partial(from_a_task, ask))


class Life:
    """A runtime that can be brought to any state and stays there until it is let go."""

    def __init__(self) -> None:
        self.states: list[RuntimeState] = []
        self.log: list[str] = []
        self.hold_start = False
        self.let_go = trio.Event()
        self.scope = trio.CancelScope()
        self.caught: list[BaseException | None] = []
        self.runtime: Runtime = quick(
            [Part("a", self.log, prepare=self._prepare, start=self._note, quiesce=self._note, stop=self._stop)],
            shutdown_timeout=TIMEOUT,
        )

    def _note(self, _part: Part) -> None:
        self.states.append(self.runtime.state)

    async def _prepare(self, part: Part) -> None:
        self._note(part)
        if self.hold_start:
            await trio.sleep_forever()

    async def _stop(self, part: Part) -> None:
        self._note(part)
        with trio.CancelScope(shield=True):
            await self.let_go.wait()
        self._note(part)

    async def serve(self) -> None:
        with self.scope:
            await collect(self.runtime.serve, self.caught)
        self.states.append(self.runtime.state)

    async def bring_to(self, state: RuntimeState, nursery: trio.Nursery) -> None:
        self.hold_start = state is STARTING
        if state is not NEW:
            nursery.start_soon(self.serve)
            await wait_all_tasks_blocked()
        if state in (STOPPING, STOPPED):
            self.runtime.request_stop()
        if state is FORCE_STOPPING:
            self.runtime.force_stop()
        await wait_all_tasks_blocked()
        if state is STOPPED:
            self.let_go.set()
            await self.runtime.wait_stopped()
        assert self.runtime.state is state

    async def asked(self, state: RuntimeState, what: str, ask: Asks, then: RuntimeState) -> BaseException | None:
        """Ask twice in a state for `request_stop` or `force_stop`; return what `serve` raised in the end."""
        async with trio.open_nursery() as nursery:
            await self.bring_to(state, nursery)
            for _ in range(2):
                await ask(getattr(self.runtime, what))
                await wait_all_tasks_blocked()
                assert self.runtime.state is then
            return await self.end(nursery)

    async def end(self, nursery: trio.Nursery) -> BaseException | None:
        """Let it end, and return what `serve` raised."""
        if self.runtime.state is NEW:
            nursery.start_soon(self.serve)
        self.runtime.request_stop()
        self.let_go.set()
        await self.runtime.wait_stopped()
        await wait_all_tasks_blocked()
        assert self.states == sorted(self.states, key=lambda state: state.value)  # only ever forward
        assert self.states[-1] is STOPPED
        (error,) = self.caught
        return error


REQUESTED = {NEW: NEW, STARTING: STOPPING, RUNNING: STOPPING}
FORCED = {NEW: NEW, STARTING: FORCE_STOPPING, RUNNING: FORCE_STOPPING, STOPPING: FORCE_STOPPING}


@pytest.mark.parametrize("ask", [from_a_task, from_a_thread, from_another_run])
@pytest.mark.parametrize("state", RuntimeState)
async def test_request_stop_moves_what_runs_to_stopping_and_nothing_else(
    state: RuntimeState, ask: Asks, mock_clock: MockClock
) -> None:
    life = Life()
    error = await life.asked(state, "request_stop", ask, REQUESTED.get(state, state))
    assert isinstance(error, ShutdownDeadlineError) == (state is FORCE_STOPPING)
    assert life.log.count("stop a") == (state is not NEW)


@pytest.mark.parametrize("ask", [from_a_task, from_a_thread, from_another_run])
@pytest.mark.parametrize("state", RuntimeState)
async def test_force_stop_moves_what_is_not_over_to_force_stopping(
    state: RuntimeState, ask: Asks, mock_clock: MockClock
) -> None:
    life = Life()
    error = await life.asked(state, "force_stop", ask, FORCED.get(state, state))
    assert isinstance(error, ShutdownDeadlineError) == (state is not STOPPED)
    assert life.log.count("force_stop a") == (state not in (NEW, STOPPED))


@pytest.mark.parametrize("state", [state for state in RuntimeState if state is not NEW])
async def test_serve_is_refused_in_every_state_but_the_first(state: RuntimeState, mock_clock: MockClock) -> None:
    life = Life()
    async with trio.open_nursery() as nursery:
        await life.bring_to(state, nursery)
        with pytest.raises(RuntimeStateError, match=f"serve can be called only once; .*{state.name}"):
            await life.runtime.serve()
        with pytest.raises(RuntimeStateError, match=f"serve can be called only once; .*{state.name}"):
            await trio.to_thread.run_sync(partial(trio.run, life.runtime.serve))
        assert life.runtime.state is state
        error = await life.end(nursery)
    assert isinstance(error, ShutdownDeadlineError) == (state is FORCE_STOPPING)


@pytest.mark.parametrize("state", RuntimeState)
async def test_waiting_for_the_end_moves_nothing_not_even_when_the_wait_is_cancelled(
    state: RuntimeState, mock_clock: MockClock
) -> None:
    life = Life()
    async with trio.open_nursery() as nursery:
        await life.bring_to(state, nursery)
        async with trio.open_nursery() as waiting:
            waiting.start_soon(life.runtime.wait_stopped)
            await wait_all_tasks_blocked()
            assert bool(waiting.child_tasks) == (state is not STOPPED)
            waiting.cancel_scope.cancel()
        with trio.CancelScope() as cancelled:
            cancelled.cancel()
            await life.runtime.wait_stopped()
        assert cancelled.cancelled_caught
        assert life.runtime.state is state
        async with trio.open_nursery() as waiting:
            waiting.start_soon(_wait_in_a_thread, life.runtime)
            waiting.start_soon(life.runtime.wait_stopped)
            error = await life.end(nursery)
        assert isinstance(error, ShutdownDeadlineError) == (state is FORCE_STOPPING)


@pytest.mark.parametrize("state", [STARTING, RUNNING])
async def test_cancelling_serve_asks_for_a_stop(state: RuntimeState, mock_clock: MockClock) -> None:
    life = Life()
    async with trio.open_nursery() as nursery:
        await life.bring_to(state, nursery)
        life.scope.cancel()
        await wait_all_tasks_blocked()
        assert life.runtime.state is STOPPING
        assert isinstance(await life.end(nursery), trio.Cancelled)


@pytest.mark.parametrize("state", [STOPPING, FORCE_STOPPING])
async def test_cancelling_serve_in_a_stop_moves_nothing_and_is_raised_in_the_end(
    state: RuntimeState, mock_clock: MockClock
) -> None:
    life = Life()
    async with trio.open_nursery() as nursery:
        await life.bring_to(state, nursery)
        mock_clock.jump(1)
        seconds_left = life.runtime.statistics().seconds_left
        life.scope.cancel()
        await wait_all_tasks_blocked()
        assert life.runtime.state is state
        assert life.runtime.statistics().seconds_left == seconds_left
        error = await life.end(nursery)
    if state is FORCE_STOPPING:
        assert isinstance(error, BaseExceptionGroup)
        forced, error = error.exceptions
        assert isinstance(forced, ShutdownDeadlineError)
        assert isinstance(error, BaseExceptionGroup)
        (error,) = error.exceptions
    assert isinstance(error, trio.Cancelled)


@pytest.mark.parametrize("state", [STARTING, RUNNING, STOPPING])
async def test_a_failure_stops_what_runs_and_closes_the_doors(state: RuntimeState, mock_clock: MockClock) -> None:
    life = Life()
    async with trio.open_nursery() as nursery:
        await life.bring_to(state, nursery)
        (slot,) = life.runtime._slots
        part = slot.component
        assert isinstance(part, Part)
        assert part.context is not None
        part.context.report_failure(ValueError("broken"))
        assert life.runtime.state is STOPPING
        assert part.context.admission.is_closed
        assert isinstance(await life.end(nursery), ValueError)


@pytest.mark.parametrize("state", [STARTING, RUNNING, STOPPING])
async def test_the_deadline_forces_what_has_not_ended_by_then(state: RuntimeState, autojump_clock: MockClock) -> None:
    life = Life()
    async with trio.open_nursery() as nursery:
        life.runtime = quick(
            [Part("a", life.log, prepare=life._prepare, stop=lambda _: shielded(3))], shutdown_timeout=2
        )
        await life.bring_to(state, nursery)
        start = trio.current_time()
        life.runtime.request_stop()
        await life.runtime.wait_forced()
        assert life.runtime.state is FORCE_STOPPING
        assert trio.current_time() - start == pytest.approx(2)
        error = await life.end(nursery)
    assert isinstance(error, ShutdownDeadlineError)


@pytest.mark.parametrize("state", RuntimeState)
async def test_what_each_state_says_is_true(state: RuntimeState, mock_clock: MockClock) -> None:
    life = Life()
    async with trio.open_nursery() as nursery:
        await life.bring_to(state, nursery)
        runtime = life.runtime
        admission, executor = runtime._admission, runtime._executor
        assert (runtime._slots[0].prepared) == (state is not NEW)
        assert admission.intake_is_open == (state is RUNNING)
        # With a quiet period of 0 and nothing to wait for, a stop closes the inner door at once.
        assert admission.is_closed == (state in (STOPPING, FORCE_STOPPING, STOPPED))
        assert (runtime.statistics().seconds_left is not None) == (state in (STOPPING, FORCE_STOPPING))
        assert executor.statistics().closed == (state in (FORCE_STOPPING, STOPPED))
        assert ("force_stop a" in life.log) == (state is FORCE_STOPPING)
        await life.end(nursery)
    assert runtime._executor.statistics().closed


class TestOneDeadline:
    async def test_it_holds_however_many_components_callers_and_restarts_of_the_quiet_period_there_are(
        self, autojump_clock: MockClock
    ) -> None:
        log: list[str] = []
        parts = [Part(name, log, stop=_slow) for name in "abcdefgh"]
        runtime = quick(parts, shutdown_timeout=20, shutdown_quiet_period=2)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            start = trio.current_time()
            runtime.request_stop()
            for _ in range(6):  # each begins the quiet period anew
                context = parts[0].context
                assert context is not None
                lease = context.try_acquire("late")
                assert lease is not None
                await trio.sleep(0.5)
                lease.close()
                await trio.sleep(1)
                runtime.request_stop()
                nursery.start_soon(_wait_a_second, runtime)
                seconds_left = runtime.statistics().seconds_left
                assert seconds_left == pytest.approx(start + 20 - trio.current_time())
            await runtime.wait_stopped()
            assert trio.current_time() - start == pytest.approx(20)
        assert isinstance(caught[0], ShutdownDeadlineError)
        # Quiet after 9.5 s and 2 more; the three that had time stopped in order, the fourth was forced.
        assert [line for line in log if line.startswith("stop")] == ["stop h", "stop g", "stop f", "stop e"]

    async def test_each_component_is_forced_once_in_reverse_and_the_executor_after_them(
        self, autojump_clock: MockClock
    ) -> None:
        log: list[str] = []
        executor = KeyedExecutor()

        def force_stop(part: Part) -> None:
            log.append(f"executor closed: {executor.statistics().closed}")
            runtime.force_stop()
            runtime.request_stop()

        parts = [Part(name, log, stop=lambda _: shielded(8), force_stop=force_stop) for name in "abc"]
        runtime = quick(parts, shutdown_timeout=5, executor=executor)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            runtime.request_stop()
            await trio.sleep(1)
            for _ in range(3):
                runtime.force_stop()
                await trio.lowlevel.checkpoint()
            await trio.sleep(6)  # past the deadline
            runtime.force_stop()
        forced = [line for line in log if line.startswith(("force", "executor"))]
        assert forced == [
            *["force_stop c", "executor closed: False"],
            *["force_stop b", "executor closed: False"],
            *["force_stop a", "executor closed: False"],
        ]
        assert executor.statistics().closed
        assert isinstance(caught[0], ShutdownDeadlineError)

    @pytest.mark.parametrize("how", ["stop", "fail", "force"])
    async def test_the_executor_that_it_was_given_is_closed_however_it_ends(self, how: str) -> None:
        executor = KeyedExecutor()

        def start(part: Part) -> None:
            assert part.context is not None
            if how == "stop":
                runtime.request_stop()
            elif how == "force":
                runtime.force_stop()
            else:
                part.context.report_failure(ValueError("broken"))

        async def stop(part: Part) -> None:
            if how != "force":
                await executor.dispatch(ListSource([1]), key=lambda n: n, handler=lambda n: None)

        runtime = quick([Part("a", [], start=start, stop=stop)], executor=executor)
        error = await collect(runtime.serve)
        assert type(error) is {"stop": type(None), "fail": ValueError, "force": ShutdownDeadlineError}[how]
        assert executor.statistics().closed


async def _wait_in_a_thread(runtime: Runtime) -> None:
    await trio.to_thread.run_sync(partial(trio.from_thread.run, runtime.wait_stopped))


async def _wait_a_second(runtime: Runtime) -> None:
    with trio.move_on_after(1):
        await runtime.wait_stopped()


async def _slow(_part: Part) -> None:
    await trio.sleep(3)
