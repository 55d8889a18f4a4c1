"""The lifecycle: ordered start and stop, one deadline, failures, signals."""

import signal
import textwrap
import threading
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
import trio
from runtime_support import CatchingUp, Part, quick, raising, shielded, sleeping
from support import ListSource, PythonProcess, a_cancelled, collect, forever, itself, task_names
from trio.lowlevel import enable_ki_protection
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow.errors import ExecutorClosedError, HandlerExitError, RuntimeStateError, ShutdownDeadlineError
from trio_wow.execution import KeyedExecutor
from trio_wow.runtime import ActivityLease, Admission, Runtime


class Unspeakable:
    """Counts how often its text is asked for; has none if made with `None`."""

    def __init__(self, text: str | None) -> None:
        self.text = text
        self.asked = 0

    def __str__(self) -> str:
        self.asked += 1
        if self.text is None:
            raise ValueError("no text")
        return self.text


class TestOwnership:
    async def test_a_component_of_a_running_runtime_is_left_alone_by_another(self) -> None:
        log: list[str] = []
        a, b, c = (Part(name, log) for name in "abc")
        first, second = quick([a, b]), quick([c, b])
        async with trio.open_nursery() as nursery:
            await nursery.start(first.serve)
            log.clear()
            with pytest.raises(RuntimeStateError, match="b belongs to another runtime until that has stopped"):
                await second.serve()
            assert log == []
            assert (first.state.name, second.state.name) == ("RUNNING", "NEW")
            first.request_stop()
            await first.wait_stopped()
            await nursery.start(second.serve)
            second.request_stop()
        assert log[-6:] == ["start c", "start b", "quiesce c", "quiesce b", "stop b", "stop c"]

    async def test_while_a_runtime_stops_its_components_are_still_its_own(self) -> None:
        release = trio.Event()
        part = Part("a", [], stop=lambda part: release.wait())
        first = quick([part])
        async with trio.open_nursery() as nursery:
            await nursery.start(first.serve)
            first.request_stop()
            await wait_all_tasks_blocked()
            with pytest.raises(RuntimeStateError, match="a belongs to another runtime"):
                await quick([part]).serve()
            assert part.log.count("stop a") == 1
            release.set()

    async def test_what_a_failed_runtime_had_can_be_used_again(self) -> None:
        failing = Part("a", [], prepare=raising(OSError("disk")))
        for _ in range(2):
            with pytest.raises(OSError, match="disk"):
                await quick([failing]).serve()
        assert failing.log == ["prepare a", "quiesce a", "stop a"] * 2

    def test_not_even_another_thread_may_have_it(self) -> None:
        part = Part("a", [])
        refused: list[BaseException] = []

        def serve() -> None:
            with pytest.raises(RuntimeStateError, match="a belongs to another runtime") as raised:
                trio.run(quick([part]).serve)
            refused.append(raised.value)

        async def main() -> None:
            runtime = quick([part])
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                await trio.to_thread.run_sync(serve)
                assert part.log == ["prepare a", "start a"]
                runtime.request_stop()

        trio.run(main)
        assert len(refused) == 1


class TestOrder:
    async def test_prepares_all_then_starts_all_and_stops_in_reverse(self, autojump_clock: MockClock) -> None:
        log: list[str] = []
        runtime = quick([CatchingUp(name, log) for name in "abc"])
        assert runtime.state.name == "NEW"
        async with trio.open_nursery() as nursery:
            assert await nursery.start(runtime.serve) is runtime
            assert runtime.state.name == "RUNNING"
            assert log[:6] == ["prepare a", "prepare b", "prepare c", "start a", "start b", "start c"]
            assert sorted(log[6:]) == ["caught_up a", "caught_up b", "caught_up c"]
            log.clear()
            runtime.request_stop()
            assert runtime.state.name == "STOPPING"
            runtime.request_stop()
            await runtime.wait_stopped()
        assert runtime.state.name == "STOPPED"
        assert log == ["quiesce a", "quiesce b", "quiesce c", "stop c", "stop b", "stop a"]

    async def test_the_task_tree_reads_like_the_design(self) -> None:
        done = trio.Event()
        runtime = quick([Part("a", [], start=lambda part: part.spawn(done.wait, "work of a"))])
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            assert {"component a", "work of a"} <= set(task_names())
            done.set()
            runtime.request_stop()

    async def test_nothing_comes_in_before_everything_has_caught_up(self, autojump_clock: MockClock) -> None:
        log: list[str] = []

        async def catch_up(part: Part) -> None:
            assert part.context is not None
            await trio.sleep(5)
            log.append(f"intake open: {part.context.admission.intake_is_open}")
            lease = part.context.try_acquire("catch-up")
            assert lease is not None
            lease.close()

        part = CatchingUp("a", log, caught_up=catch_up)
        runtime = quick([part, CatchingUp("b", log, caught_up=catch_up)])
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            assert trio.current_time() - start == 5  # side by side
            assert log[-2:] == ["intake open: False"] * 2
            assert part.context is not None
            assert part.context.admission.intake_is_open
            runtime.request_stop()

    async def test_each_component_stops_wholly_before_the_one_before_it(self, autojump_clock: MockClock) -> None:
        log: list[str] = []

        async def stop(part: Part) -> None:
            await trio.sleep(1)
            log.append(f"stopped {part.name}")

        async with trio.open_nursery() as nursery:
            runtime = await nursery.start(quick([Part(name, log, stop=stop) for name in "ab"]).serve)
            runtime.request_stop()
        assert log[-4:] == ["stop b", "stopped b", "stop a", "stopped a"]

    async def test_a_component_may_end_its_tasks_by_cancelling_its_nursery_when_it_stops(self) -> None:
        log: list[str] = []

        async def stop(part: Part) -> None:
            assert part.context is not None
            part.context.nursery.cancel_scope.cancel()
            await wait_all_tasks_blocked()  # closes a connection, say
            log.append(f"stopped {part.name}")

        parts = [Part("a", log), Part("b", log, start=lambda part: part.spawn(trio.sleep_forever), stop=stop)]
        async with trio.open_nursery() as nursery:
            runtime = await nursery.start(quick(parts).serve)
            runtime.request_stop()
        assert log[-3:] == ["stop b", "stopped b", "stop a"]

    async def test_the_executor_is_closed_after_the_last_component(self) -> None:
        log: list[str] = []
        executor = KeyedExecutor()

        async def stop(part: Part) -> None:
            assert part.context is not None
            assert part.context.executor is executor
            await executor.dispatch(ListSource([1]), key=lambda n: n, handler=lambda n: log.append("dispatched"))

        async with trio.open_nursery() as nursery:
            runtime = await nursery.start(quick([Part("a", log, stop=stop)], executor=executor).serve)
            runtime.request_stop()
        assert log[-1] == "dispatched"
        with pytest.raises(ExecutorClosedError):
            await executor.dispatch(ListSource([1]), key=lambda n: n, handler=lambda n: None)

    async def test_a_runtime_serves_once(self) -> None:
        runtime = quick([])
        runtime.request_stop()
        await runtime.serve()
        with pytest.raises(RuntimeStateError, match=r"serve can be called only once; .* \(the runtime is STOPPED\)"):
            await runtime.serve()

    async def test_components_of_one_class_have_names_of_their_own(self) -> None:
        class Nameless(Part):
            name = ""

            def __init__(self) -> None:
                super().__init__("", [])

        runtime = quick([Nameless(), Nameless()])
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            assert {"component Nameless", "component Nameless 2"} <= set(task_names())
            runtime.request_stop()


class TestStart:
    @pytest.mark.parametrize("step", ["prepare", "start", "caught_up"])
    async def test_fs12_a_failed_start_stops_what_was_prepared_in_reverse(self, step: str) -> None:
        log: list[str] = []
        error = OSError("port taken")
        parts = [CatchingUp("a", log), CatchingUp("b", log, **{step: raising(error)}), CatchingUp("c", log)]
        started: list[Runtime] = []
        with pytest.raises(OSError, match="port taken") as caught:
            await quick(parts).serve(task_status=_Status(started))
        assert caught.value is error
        stops = [line for line in log if line.startswith("stop ")]
        assert stops == (["stop b", "stop a"] if step == "prepare" else ["stop c", "stop b", "stop a"])
        assert ("start c" in log) == (step == "caught_up")
        assert started == []

    async def test_fs12_errors_of_the_roll_back_come_after_the_first_and_stop_nothing(self) -> None:
        log: list[str] = []
        parts = [
            Part("a", log),
            Part("b", log, stop=raising(ValueError("stop b")), quiesce=raising(LookupError("quiesce b"))),
            Part("c", log, start=raising(OSError("start c"))),
            Part("d", log),
        ]
        with pytest.raises(ExceptionGroup) as caught:
            await quick(parts).serve()
        assert [repr(error) for error in caught.value.exceptions] == [
            "OSError('start c')",
            "LookupError('quiesce b')",
            "ValueError('stop b')",
        ]
        assert [line for line in log if line.startswith("stop")] == ["stop d", "stop c", "stop b", "stop a"]
        assert "start d" not in log

    @pytest.mark.parametrize("step", ["prepare", "caught_up"])
    async def test_fs12_a_stop_during_the_start_rolls_it_back_and_serve_returns(self, step: str) -> None:
        log: list[str] = []
        started: list[Runtime] = []
        parts = [CatchingUp("a", log), CatchingUp("b", log, **{step: sleeping}), CatchingUp("c", log)]
        runtime = quick(parts)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: runtime.serve(task_status=_Status(started)))
            await wait_all_tasks_blocked()
            assert runtime.state.name == "STARTING"
            runtime.request_stop()
        assert runtime.state.name == "STOPPED"
        stops = [line for line in log if line.startswith("stop ")]
        assert stops == (["stop b", "stop a"] if step == "prepare" else ["stop c", "stop b", "stop a"])
        assert started == []

    async def test_a_host_that_fails_when_it_is_told_of_the_start_rolls_it_back_too(self) -> None:
        class Refusing(trio.TaskStatus[Any]):
            def started(self, value: Any = None) -> None:
                raise error

        log: list[str] = []
        error = OSError("no route")
        executor = KeyedExecutor()
        runtime = quick([Part("a", log), Part("b", log)], executor=executor)
        assert await collect(partial(runtime.serve, task_status=Refusing())) is error
        assert log[-4:] == ["quiesce a", "quiesce b", "stop b", "stop a"]
        assert executor.statistics().closed

    async def test_what_fails_to_catch_up_after_others_were_cancelled_is_raised_too(self) -> None:
        error = ValueError("on the way out")

        async def fail_when_cancelled(part: Part) -> None:
            try:
                await trio.sleep_forever()
            finally:
                await shielded(0)
                raise error

        steps = {"a": sleeping, "b": fail_when_cancelled, "c": sleeping}
        runtime = quick([CatchingUp(name, [], caught_up=step) for name, step in steps.items()])
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            runtime.request_stop()
        assert caught == [error]

    async def test_a_stop_asked_before_serve_starts_nothing(self) -> None:
        log: list[str] = []
        runtime = quick([Part("a", log)])
        runtime.request_stop()
        assert runtime.state.name == "NEW"
        await runtime.serve()
        assert log == []
        assert runtime.state.name == "STOPPED"

    async def test_a_stop_asked_by_a_component_that_starts(self) -> None:
        log: list[str] = []
        runtime = quick([Part("a", log, start=lambda _: runtime.request_stop()), Part("b", log)])
        await runtime.serve()
        assert log[-2:] == ["stop b", "stop a"]

    @pytest.mark.parametrize("how", ["stop", "fail"])
    @pytest.mark.parametrize("step", ["prepare", "start"])
    async def test_nothing_is_begun_after_a_stop_or_a_failure(self, step: str, how: str) -> None:
        """Even if the step that it came in could not be cancelled."""
        log: list[str] = []

        def act(part: Part) -> None:
            assert part.context is not None
            if how == "stop":
                runtime.request_stop()
            else:
                part.context.report_failure(ValueError("broken"))

        async def shielded_act(part: Part) -> None:
            with trio.CancelScope(shield=True):
                act(part)
                await trio.lowlevel.checkpoint()

        parts = [CatchingUp("a", log, **{step: shielded_act if step == "prepare" else act}), CatchingUp("b", log)]
        runtime = quick(parts)
        error = await collect(runtime.serve)
        assert isinstance(error, ValueError) == (how == "fail")
        assert f"{step} b" not in log
        assert not [line for line in log if line.startswith("caught_up")]
        assert log[-1] == "stop a"

    @pytest.mark.parametrize("step", ["prepare", "caught_up", "stop"])
    async def test_a_cancelled_that_is_not_ours_is_a_failure(self, step: str) -> None:
        log: list[str] = []

        async def stray(part: Part) -> None:
            raise await a_cancelled()

        parts = [CatchingUp("a", log), CatchingUp("b", log, **{step: stray})]
        runtime = quick(parts)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            if step == "stop":
                await wait_all_tasks_blocked()
                runtime.request_stop()
        (error,) = caught
        assert isinstance(error, RuntimeError)
        assert "raised trio.Cancelled although nothing had been cancelled" in str(error)
        assert log[-1] == "stop a"

    async def test_a_task_that_raises_a_cancelled_of_its_own_ends_the_runtime(self) -> None:
        log: list[str] = []

        async def stray() -> None:
            raise await a_cancelled()

        runtime = quick([Part("a", log, start=lambda part: part.spawn(stray)), Part("b", log)])
        error = await collect(runtime.serve)
        assert isinstance(error, RuntimeError)
        assert "a task of a raised trio.Cancelled although nothing had been cancelled" in str(error)
        assert log[-2:] == ["stop b", "stop a"]


class TestFailure:
    @pytest.mark.parametrize("step", ["quiesce", "force_stop"])
    async def test_a_plain_step_that_raises_anything_keeps_no_other_from_stopping(
        self, autojump_clock: MockClock, step: str
    ) -> None:
        log: list[str] = []
        hang = {"stop": sleeping} if step == "force_stop" else {}
        parts = [Part("a", log, **hang), Part("b", log, **{step: raising(SystemExit(3))}), Part("c", log)]
        runtime = quick(parts)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            runtime.request_stop()
        (error,) = caught
        if step == "quiesce":
            assert isinstance(error, HandlerExitError)
            assert log[-6:] == ["quiesce a", "quiesce b", "quiesce c", "stop c", "stop b", "stop a"]
        else:
            assert isinstance(error, ExceptionGroup)
            assert [type(each) for each in error.exceptions] == [ShutdownDeadlineError, HandlerExitError]
            assert log[-3:] == ["force_stop c", "force_stop b", "force_stop a"]

    async def test_an_error_reported_when_it_happened_and_raised_again_counts_once(self) -> None:
        error, other = ValueError("both ways"), LookupError("raised only")

        def start(part: Part) -> None:
            async def fail() -> None:
                assert part.context is not None
                part.context.report_failure(error)
                raise BaseExceptionGroup("both", [error, other])

            part.spawn(fail)

        caught = await collect(quick([Part("a", [], start=start)]).serve)
        assert isinstance(caught, ExceptionGroup)
        assert caught.exceptions[0] is error
        assert isinstance(caught.exceptions[1], ExceptionGroup)
        assert caught.exceptions[1].exceptions == (other,)

    async def test_a_task_that_fails_ends_the_runtime_with_its_error(self, autojump_clock: MockClock) -> None:
        log: list[str] = []
        error = ValueError("broken")

        async def fail() -> None:
            await trio.sleep(1)
            raise error

        parts = [Part("a", log), Part("b", log, start=lambda part: part.spawn(fail)), Part("c", log)]
        start = trio.current_time()
        with pytest.raises(ValueError, match="broken") as caught:
            await quick(parts, shutdown_quiet_period=5).serve()
        assert caught.value is error
        assert log[-6:] == ["quiesce a", "quiesce b", "quiesce c", "stop c", "stop b", "stop a"]
        assert trio.current_time() - start == 1

    async def test_a_task_that_fails_ends_the_runtime_though_another_of_its_component_does_not_leave(
        self, autojump_clock: MockClock
    ) -> None:
        error = ValueError("broken")

        async def fail() -> None:
            await trio.sleep(1)
            raise error

        def start(part: Part) -> None:
            part.spawn(partial(shielded, 30), "deaf task")
            part.spawn(fail)

        part = Part("a", [], start=start)
        runtime = quick([part], shutdown_quiet_period=5)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await trio.sleep(1.5)
            assert runtime.state.name == "STOPPING"
            assert part.context is not None
            assert part.context.admission.is_closed
            await runtime.wait_forced()
            assert trio.current_time() == pytest.approx(1 + 10)
        (raised,) = caught
        assert isinstance(raised, ExceptionGroup)
        assert {type(each) for each in raised.exceptions} == {ValueError, ShutdownDeadlineError}

    async def test_a_failure_closes_admission_at_once_and_waits_for_no_quiet(self, autojump_clock: MockClock) -> None:
        log: list[str] = []
        part = Part("a", log)
        seen: list[tuple[bool, float]] = []

        def quiesce(part: Part) -> None:
            assert part.context is not None
            seen.append((part.context.try_acquire() is None, trio.current_time() - failed_at))

        part.steps = {"quiesce": quiesce}
        runtime = quick([part], shutdown_quiet_period=5)
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                assert part.context is not None
                lease = part.context.try_acquire("never closed")
                failed_at = trio.current_time()
                part.context.report_failure(ValueError("reported"))
                assert part.context.try_acquire() is None
        assert caught.group_contains(ValueError, match="reported")
        assert seen == [(True, 0.0)]
        assert lease is not None

    async def test_a_failure_during_the_quiet_period_ends_it(self, autojump_clock: MockClock) -> None:
        part = Part("a", [])
        runtime = quick([part], shutdown_timeout=100, shutdown_quiet_period=50)
        with pytest.raises(ExceptionGroup):
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                runtime.request_stop()
                await trio.sleep(1)
                start = trio.current_time()
                assert part.context is not None
                part.context.report_failure(ValueError("late"))
                await runtime.wait_stopped()
                assert trio.current_time() == start

    async def test_further_errors_join_the_first_and_groups_stay_whole(self) -> None:
        inner = ExceptionGroup("inner", [LookupError("x")])
        parts = [
            Part("a", [], stop=raising(inner)),
            Part("b", [], start=lambda part: part.context.report_failure(ValueError("first"))),
        ]
        with pytest.raises(ExceptionGroup) as caught:
            await quick(parts).serve()
        assert repr(caught.value.exceptions[0]) == "ValueError('first')"
        assert caught.value.exceptions[1] is inner

    @pytest.mark.parametrize("wrapped", [False, True])
    async def test_k11_system_exit_of_a_component_becomes_a_handler_exit_error(self, wrapped: bool) -> None:
        error: BaseException = SystemExit(0)
        if wrapped:
            error = BaseExceptionGroup("group", [ValueError("kept"), error])
            error.add_note("while it did something")
            error.__cause__ = LookupError("why")
        failing = Part("a", [], start=lambda part: part.context.report_failure(error))
        caught = await collect(quick([failing]).serve)
        if wrapped:
            assert isinstance(caught, ExceptionGroup)
            assert [type(leaf) for leaf in caught.exceptions] == [ValueError, HandlerExitError]
            assert caught.__notes__ == ["while it did something"]
            assert caught.__cause__ is error.__cause__
        else:
            assert isinstance(caught, HandlerExitError)
            assert caught.code == 0
            assert isinstance(caught.__cause__, SystemExit)

    async def test_keyboard_interrupt_of_a_component_is_raised(self) -> None:
        failing = Part("a", [], start=lambda part: part.context.report_failure(KeyboardInterrupt()))
        assert isinstance(await collect(quick([failing]).serve), KeyboardInterrupt)

    @pytest.mark.parametrize("when", ["prepare", "running", "quiet", "stop"])
    def test_ctrl_c_in_the_task_that_serves_asks_for_a_stop_and_in_a_stop_forces_it(self, when: str) -> None:
        log: list[str] = []
        executor = KeyedExecutor()

        @enable_ki_protection
        async def act(part: Part) -> None:
            signal.raise_signal(signal.SIGINT)
            await trio.sleep(1)

        def start(part: Part) -> None:
            assert part.context is not None
            lease = part.context.try_acquire()
            part.spawn(partial(work, part, lease))

        async def work(part: Part, lease: ActivityLease | None) -> None:
            assert lease is not None
            if when == "running":
                await act(part)
            runtime.request_stop()
            if when == "quiet":
                await act(part)
            lease.close()

        steps = {when: act} if when in ("prepare", "stop") else {}
        runtime = quick([Part("a", log), Part("b", log, **{"start": start, **steps})], executor=executor)
        with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)) as caught:
            trio.run(runtime.serve, clock=MockClock(autojump_threshold=0))
        if when in ("prepare", "running"):
            assert isinstance(caught.value, KeyboardInterrupt)
            assert log[-4:] == ["quiesce a", "quiesce b", "stop b", "stop a"]
        else:
            assert isinstance(caught.value, BaseExceptionGroup)
            assert [type(error) for error in caught.value.exceptions] == [KeyboardInterrupt, ShutdownDeadlineError]
            assert log[-2:] == ["force_stop b", "force_stop a"]
        assert executor.statistics().closed

    @pytest.mark.filterwarnings("ignore:.*strict_exception_groups:trio.TrioDeprecationWarning")
    def test_a_host_without_strict_exception_groups_gets_the_same_ordered_stop(self) -> None:
        log: list[str] = []

        async def fail() -> None:
            raise ValueError("broken")

        parts = [Part("a", log), Part("b", log, start=lambda part: part.spawn(fail))]
        with pytest.raises(ValueError, match="broken"):
            trio.run(quick(parts).serve, strict_exception_groups=False)
        assert log[-2:] == ["stop b", "stop a"]


class TestDeadline:
    async def test_at_the_deadline_what_still_runs_is_cancelled_and_named(self, autojump_clock: MockClock) -> None:
        log: list[str] = []
        hung = Part("hung", log, start=lambda part: part.spawn(trio.sleep_forever, "hung task"), stop=sleeping)
        runtime = quick([Part("first", log), hung, Part("last", log)], shutdown_timeout=7)
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            caught: list[BaseException | None] = []

            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            runtime.request_stop()
            await trio.sleep(3)
            runtime.request_stop()  # moves nothing
            with trio.move_on_after(1):
                await runtime.wait_stopped()  # nor does this
        assert trio.current_time() - start == 7
        error = caught[0]
        assert isinstance(error, ShutdownDeadlineError)
        assert error.reason == "its deadline (7 s)"
        assert error.held == {"hung": ("its stop()", "hung task"), "first": ()}
        assert log[-3:] == ["force_stop last", "force_stop hung", "force_stop first"]
        assert runtime.state.name == "STOPPED"

    def test_the_text_of_a_forced_stop_names_the_first_few_tasks(self) -> None:
        names = [f"mailbox {n}" for n in range(300)]
        error = ShutdownDeadlineError("its deadline", {"a": names, "b": names[:9]})
        assert "a held mailbox 0, " in str(error)
        assert "mailbox 7, 292 more; b held mailbox 0, " in str(error)
        assert str(error).endswith("mailbox 8")
        assert error.held["a"] == tuple(names)
        assert str(ShutdownDeadlineError("x", {"a": ["b", "c", "b"]})).endswith("a held b (2 times), c")

    async def test_operations_that_are_still_open_are_named(self, autojump_clock: MockClock) -> None:
        part = Part("a", [], start=lambda part: part.context.try_acquire("import of orders"))
        runtime = quick([part])
        part.steps["caught_up"] = lambda _: None
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                runtime.request_stop()
        (error,) = caught.value.exceptions
        assert isinstance(error, ShutdownDeadlineError)
        assert error.operations == (("import of orders", 10.0),)
        assert str(error).endswith("a held nothing; open operations: import of orders (10.0 s)")

    async def test_the_quiet_period_cannot_move_the_deadline(self, autojump_clock: MockClock) -> None:
        part = Part("a", [])
        runtime = quick([part], shutdown_timeout=7, shutdown_quiet_period=2)
        start = trio.current_time()

        async def busy() -> None:
            assert part.context is not None
            while (lease := part.context.try_acquire()) is not None:
                await trio.sleep(1)
                lease.close()
                await trio.sleep(0.5)

        part.steps = {"start": lambda part: part.spawn(busy)}
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                runtime.request_stop()
        assert caught.group_contains(ShutdownDeadlineError)
        assert trio.current_time() - start == 7

    async def test_force_stop_does_not_wait(self, autojump_clock: MockClock) -> None:
        log: list[str] = []
        runtime = quick([Part("a", log, stop=sleeping)])
        start = trio.current_time()
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                runtime.force_stop()
                runtime.force_stop()
        assert caught.group_contains(ShutdownDeadlineError, match=r"forced by force_stop\(\)")
        assert trio.current_time() == start
        assert log.count("force_stop a") == 1

    async def test_a_forced_stop_joins_the_error_that_came_first(self, autojump_clock: MockClock) -> None:
        parts = [Part("a", [], stop=sleeping), Part("b", [], start=raising(ValueError("first")))]
        with pytest.raises(ExceptionGroup) as caught:
            await quick(parts).serve()
        assert [type(error) for error in caught.value.exceptions] == [ValueError, ShutdownDeadlineError]

    async def test_what_failed_before_is_told_when_the_stop_is_forced_and_not_only_when_serve_raises_it(
        self, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("ERROR", "trio_wow.runtime")
        first, second = ValueError("first"), LookupError("second")
        runtime = quick(
            [
                Part("a", [], stop=lambda _: shielded(50)),
                Part("b", [], stop=raising(second)),
                Part("c", [], start=raising(first)),
            ],
            shutdown_timeout=3,
        )
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await runtime.wait_forced()
            assert not caught
            told = [(record.getMessage(), record.exc_info and record.exc_info[1]) for record in caplog.records]
        assert "the stop was forced by its deadline" in told[0][0]
        assert told[1:] == [("before that a component had failed", error) for error in (first, second)]
        (raised,) = caught
        assert isinstance(raised, ExceptionGroup)
        assert raised.exceptions[:2] == (first, second)

    async def test_a_slow_start_is_forced_back_too(self, autojump_clock: MockClock) -> None:
        async def prepare(part: Part) -> None:
            await shielded(50)

        runtime = quick([Part("a", [], prepare=prepare)], shutdown_timeout=3)
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runtime.serve)
                await trio.sleep(1)
                runtime.request_stop()
        assert caught.group_contains(ShutdownDeadlineError, match=r"its deadline \(3 s\)")

    @pytest.mark.parametrize("step", ["prepare", "caught_up", "stop", "task"])
    async def test_what_shields_itself_is_named_at_the_deadline_and_not_only_when_it_ends(
        self, step: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("ERROR", "trio_wow.runtime")
        log: list[str] = []

        async def hold(part: Part) -> None:
            await shielded(50)

        if step == "task":
            parts = [Part("a", log, start=lambda part: part.spawn(partial(shielded, 50), "deaf task"))]
        else:
            parts = [CatchingUp("a", log, **{step: hold})]
        runtime = quick(parts, shutdown_timeout=3)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            start = trio.current_time()
            runtime.request_stop()
            with trio.move_on_after(2):
                await runtime.wait_forced()
                raise AssertionError("nothing has been forced yet")
            await runtime.wait_forced()
            assert trio.current_time() - start == 3
            assert runtime.state.name == "FORCE_STOPPING"
            assert ("a held deaf task" if step == "task" else f"a held its {step}()") in caplog.text
            assert log.count("force_stop a") == 1
            await runtime.wait_stopped()
            assert trio.current_time() - start == 50
        (error,) = caught
        assert isinstance(error, ShutdownDeadlineError)
        assert log.count("force_stop a") == 1
        assert caplog.text.count("the stop was forced") == 1

    async def test_what_ends_at_the_very_deadline_is_not_forced(self, autojump_clock: MockClock) -> None:
        for _ in range(20):  # tasks of one moment run in any order
            runtime = quick([Part("a", [], stop=lambda _: shielded(3))], shutdown_timeout=3)
            runtime.request_stop()
            assert await collect(runtime.serve) is None
            assert not runtime._forced.is_set()


class TestStatistics:
    async def test_it_tells_each_state_and_what_each_component_does(self, autojump_clock: MockClock) -> None:
        def sleep(seconds: float) -> Callable[..., Awaitable[None]]:
            async def step(part: Part) -> None:
                await trio.sleep(seconds)

            return step

        parts = [
            CatchingUp("a", [], prepare=sleep(1), start=lambda part: part.spawn(partial(trio.sleep, 2), "work")),
            CatchingUp("b", [], caught_up=sleep(2), stop=sleep(4)),
        ]
        runtime = quick(parts)
        seen: list[tuple[object, ...]] = []

        def look() -> None:
            statistics = runtime.statistics()
            seen.append((statistics.state.name, statistics.seconds_left))
            seen.extend((each.name, each.step, each.left, each.tasks) for each in statistics.components)

        look()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.serve)
            await wait_all_tasks_blocked()
            look()
            await trio.sleep(1.5)
            look()
            await trio.sleep(2)
            look()
            runtime.request_stop()
            await trio.sleep(3)
            look()
        look()
        assert seen == [
            *[("NEW", None), ("a", None, False, ()), ("b", None, False, ())],
            *[("STARTING", None), ("a", "prepare", False, ()), ("b", None, False, ())],
            *[("STARTING", None), ("a", None, False, ("work",)), ("b", "caught_up", False, ())],
            *[("RUNNING", None), ("a", None, False, ()), ("b", None, False, ())],
            *[("STOPPING", 7.0), ("a", None, False, ()), ("b", "stop", False, ())],
            *[("STOPPED", None), ("a", None, True, ()), ("b", None, True, ())],
        ]

    def test_it_can_be_asked_before_and_after_the_trio_run(self) -> None:
        runtime = quick([Part("a", [])])
        assert runtime.statistics().state.name == "NEW"
        runtime.request_stop()
        trio.run(runtime.serve)
        statistics = runtime.statistics()
        assert (statistics.state.name, statistics.seconds_left, statistics.leases) == ("STOPPED", None, ())

    async def test_open_operations_have_names_and_ages_oldest_first(self, autojump_clock: MockClock) -> None:
        part = Part("a", [])
        runtime = quick([part])
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            assert part.context is not None
            first = part.context.try_acquire("import of %s from %s", "orders", Unspeakable("a.csv"))
            await trio.sleep(2)
            second = part.context.try_acquire("100% of it")
            await trio.sleep(1)
            third = part.context.try_acquire("unspeakable: %s", Unspeakable(None))
            leases = runtime.statistics().leases
            assert [(lease.name, lease.age) for lease in leases] == [
                ("import of orders from a.csv", 3.0),
                ("100% of it", 1.0),
                ("unspeakable: %s", 0.0),
            ]
            for lease in (second, first, third):
                assert lease is not None
                lease.close()
            assert runtime.statistics().leases == ()
            runtime.request_stop()

    async def test_a_name_is_put_together_when_asked_for_and_not_before(self) -> None:
        admission = Admission()
        part = Unspeakable("a.csv")
        lease = admission.try_acquire("import of %s", part)
        assert lease is not None
        lease.close()
        assert part.asked == 0
        assert repr(lease) == "<lease 'import of a.csv': closed>"

    @pytest.mark.parametrize("ends", [6, 20])
    async def test_at_half_of_the_deadline_the_log_says_once_what_is_waited_for(
        self, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, ends: float
    ) -> None:
        caplog.set_level("WARNING", "trio_wow.runtime")

        def start(part: Part) -> None:
            assert part.context is not None
            lease = part.context.try_acquire("import of %s", "orders")

            async def work() -> None:
                assert lease is not None
                with lease:
                    await trio.sleep(1 + ends)

            part.spawn(work, "importer")

        runtime = quick([Part("a", []), Part("b", [], start=start)])
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await trio.sleep(1)
            runtime.request_stop()
            runtime.request_stop()
        half = [record for record in caplog.records if record.levelname == "WARNING"]
        assert [(record.name, record.getMessage()) for record in half] == [
            (
                "trio_wow.runtime",
                "half of the time to stop (10 s) is over; still waiting: b held importer; a held nothing; "
                "open operations: import of orders (6.0 s)",
            )
        ]
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        if ends < 10:
            assert (caught, errors) == ([None], [])
        else:
            assert errors == [str(caught[0])]
            assert errors[0].endswith("b held importer; a held nothing; open operations: import of orders (11.0 s)")

    async def test_a_stop_that_is_forced_before_half_of_its_time_warns_of_nothing(
        self, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("WARNING", "trio_wow.runtime")
        runtime = quick([Part("a", [], stop=lambda _: shielded(8))])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve)
            await wait_all_tasks_blocked()
            runtime.request_stop()
            await trio.sleep(1)
            runtime.force_stop()
        assert [record.levelname for record in caplog.records] == ["ERROR"]

    async def test_what_the_executor_runs_for_nobody_is_named_too(
        self, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("WARNING", "trio_wow.runtime")
        executor = KeyedExecutor()
        runtime = quick([Part("a", [])], executor=executor)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            nursery.start_soon(collect, partial(executor.dispatch, ListSource([1]), key=itself, handler=forever))
            await wait_all_tasks_blocked()
            runtime.request_stop()
        assert caplog.records[0].getMessage().endswith("still waiting: the executor held forever")
        (error,) = caught
        assert isinstance(error, ShutdownDeadlineError)
        assert error.held == {"the executor": ("forever",)}

    def test_of_many_operations_the_first_few_are_told_and_each_name_once(self) -> None:
        error = ShutdownDeadlineError("x", {}, [("b", 9.25), ("a", 3.0), ("b", 2.0)])
        assert str(error) == "the stop was forced by x: open operations: b (2 times, up to 9.2 s), a (3.0 s)"
        many = ShutdownDeadlineError("x", {}, [(f"n{n}", 300.0 - n) for n in range(300)])
        assert str(many).endswith("n7 (293.0 s), 292 more")


class TestQuietPeriod:
    async def test_several_may_wait_for_quiet_at_once(self) -> None:
        admission = Admission()
        lease = admission.try_acquire()
        assert lease is not None
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(admission.wait_quiet, 0)
                nursery.start_soon(admission.wait_quiet, 0)
                await wait_all_tasks_blocked()
                lease.close()

    async def test_admission_closes_when_nothing_ran_for_the_whole_period(self, autojump_clock: MockClock) -> None:
        part = Part("a", [])
        runtime = quick([part], shutdown_quiet_period=2)
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            assert part.context is not None
            first = part.context.try_acquire("first")
            start = trio.current_time()
            runtime.request_stop()
            assert part.context.stop_requested.is_set()
            assert not part.context.admission.intake_is_open
            await trio.sleep(3)
            assert first is not None
            first.close()
            first.close()
            await trio.sleep(1.5)
            second = part.context.try_acquire("second")  # within the period: it begins anew
            assert second is not None
            second.close()
            await trio.sleep(1.9)
            third = part.context.try_acquire("third")
            assert third is not None
            third.close()
            await runtime.wait_stopped()
            assert trio.current_time() - start == pytest.approx(3 + 1.5 + 1.9 + 2)

    async def test_with_period_zero_it_closes_as_soon_as_nothing_runs(self, autojump_clock: MockClock) -> None:
        part = Part("a", [])
        runtime = quick([part])
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            assert part.context is not None
            lease: ActivityLease | None = part.context.try_acquire()
            runtime.request_stop()
            for _ in range(50):  # a chain that hands over without a gap
                await trio.sleep(0.01)
                following = part.context.try_acquire()
                assert following is not None
                assert lease is not None
                lease.close()
                lease = following
            assert lease is not None
            lease.close()
            await runtime.wait_stopped()
            assert part.context.try_acquire() is None

    def test_default_is_a_tenth_of_the_timeout_and_at_most_a_second(self) -> None:
        assert Runtime([], shutdown_timeout=5)._quiet_period == 0.5
        assert Runtime([], shutdown_timeout=60)._quiet_period == 1.0

    async def test_a_lease_marks_the_code_inside_it_and_its_children_as_inside(self) -> None:
        admission, other = Admission(), Admission()
        seen: list[bool] = []

        async def child(done: trio.Event) -> None:
            seen.append(admission.is_inside())
            await done.wait()
            seen.append(admission.is_inside())  # the message is finished: outside

        done = trio.Event()
        async with trio.open_nursery() as nursery:
            lease = admission.try_acquire("one")
            assert lease is not None
            assert not admission.is_inside()
            with lease:
                assert admission.is_inside()
                assert not other.is_inside()
                assert await trio.to_thread.run_sync(admission.is_inside)
                nursery.start_soon(child, done)
                await wait_all_tasks_blocked()
                assert repr(lease) == "<lease 'one': open>"
            assert not admission.is_inside()
            assert not lease.is_open
            done.set()
        assert seen == [True, False]

    async def test_a_lease_that_is_left_in_another_context_is_closed_all_the_same(self) -> None:
        admission = Admission()
        lease = admission.try_acquire("one")
        assert lease is not None
        copy_context().run(lease.__enter__)
        with pytest.raises(ValueError, match="different Context"):
            lease.__exit__(None, None, None)
        assert not lease.is_open
        assert admission.leases == ()


class TestCancellation:
    async def test_drains_in_order_and_then_raises_cancelled(self, autojump_clock: MockClock) -> None:
        log: list[str] = []

        async def stop(part: Part) -> None:
            await trio.sleep(2)

        runtime = quick([Part("a", log, stop=stop), Part("b", log, stop=stop)])
        start = trio.current_time()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                scope.cancel()
        assert scope.cancelled_caught
        assert trio.current_time() - start == 4
        assert log[-2:] == ["stop b", "stop a"]

    async def test_the_deadline_holds_and_its_error_is_kept(self, autojump_clock: MockClock) -> None:
        runtime = quick([Part("a", [], stop=sleeping)])
        start = trio.current_time()
        with pytest.raises(ExceptionGroup) as caught:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(runtime.serve)
                    scope.cancel()
        assert caught.group_contains(ShutdownDeadlineError)
        assert not caught.group_contains(trio.Cancelled)
        assert trio.current_time() - start == 10

    async def test_during_the_start_rolls_it_back(self) -> None:
        log: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(quick([Part("a", log), Part("b", log, prepare=sleeping)]).serve)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert nursery.cancel_scope.cancelled_caught
        assert log[-2:] == ["stop b", "stop a"]


class TestThreads:
    @pytest.mark.parametrize("force", [False, True])
    async def test_a_stop_may_be_asked_from_any_thread_at_any_time(self, force: bool) -> None:
        runtime = quick([Part("a", [], stop=sleeping if force else lambda _: None)])
        ask = runtime.force_stop if force else runtime.request_stop
        async with trio.open_nursery() as nursery:
            caught: list[BaseException | None] = []

            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            await trio.to_thread.run_sync(ask)
        error = caught[0]
        assert isinstance(error, ShutdownDeadlineError) == force
        await trio.to_thread.run_sync(ask)

    def test_a_stop_asked_by_a_signal_handler_between_tasks_does_not_interfere_with_their_scheduling(self) -> None:
        runtime = quick([])
        states: list[str] = []

        class Between(trio.abc.Instrument):
            def before_io_wait(self, timeout: float) -> None:
                if runtime.state.name == "RUNNING":
                    signal.raise_signal(signal.SIGTERM)
                    states.append(runtime.state.name)

        before = signal.signal(signal.SIGTERM, lambda *_: runtime.request_stop())
        try:
            trio.run(runtime.serve, instruments=[Between()])
        finally:
            signal.signal(signal.SIGTERM, before)
        assert states[0] == "RUNNING"
        assert runtime.state.name == "STOPPED"

    def test_a_stop_asked_after_the_run_is_no_error(self) -> None:
        runtime = quick([])

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.serve)
                runtime.request_stop()

        trio.run(main)
        runtime.request_stop()
        runtime.force_stop()

    def test_a_runtime_in_another_thread_leaves_signals_alone(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        inside: list[object] = []

        def start(part: Part) -> None:
            inside.append(signal.getsignal(signal.SIGINT))
            runtime.request_stop()

        runtime = Runtime([Part("a", [], start=start)], shutdown_quiet_period=0)
        thread = threading.Thread(target=trio.run, args=(runtime.serve,))
        thread.start()
        thread.join()
        assert inside == [before]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"shutdown_timeout": 0}, "shutdown_timeout must be a positive number of seconds, not 0"),
        ({"shutdown_timeout": float("inf")}, "shutdown_timeout must be a positive"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout must be a positive"),
        ({"shutdown_quiet_period": -1}, "shutdown_quiet_period must be at least 0"),
        ({"shutdown_timeout": 2, "shutdown_quiet_period": 2}, "less than shutdown_timeout"),
        ({"shutdown_quiet_period": float("nan")}, "shutdown_quiet_period must be at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Runtime([], **options)  # type: ignore[arg-type]


def test_two_components_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two components are named 'a'; give one another name"):
        Runtime([Part("a", []), Part("a", [])])


def test_what_is_no_component_is_refused() -> None:
    with pytest.raises(TypeError, match="is no RuntimeComponent: it lacks one of prepare, start"):
        Runtime([object()])  # type: ignore[list-item]


async def test_only_one_runtime_of_a_process_takes_its_signals() -> None:
    before = signal.getsignal(signal.SIGINT)
    first = Runtime([], shutdown_quiet_period=0)
    async with trio.open_nursery() as nursery:
        await nursery.start(first.serve)
        second = Runtime([])
        with pytest.raises(RuntimeStateError, match="another runtime takes this process's signals; pass signals=False"):
            await second.serve()
        assert second.state.name == "NEW"
        third = await nursery.start(quick([]).serve)
        third.request_stop()
        await third.wait_stopped()
        first.request_stop()
    assert signal.getsignal(signal.SIGINT) is before
    for _ in range(20):  # tasks of one moment run in any order
        await _serve_one_after_a_cancelled_one()
    fourth = Runtime([], shutdown_quiet_period=0)
    fourth.request_stop()
    await fourth.serve()


async def _serve_one_after_a_cancelled_one() -> None:
    cancelled, following = Runtime([], shutdown_quiet_period=0), Runtime([], shutdown_quiet_period=0)
    following.request_stop()
    async with trio.open_nursery() as nursery:

        async def follow() -> None:
            await cancelled.wait_stopped()
            await following.serve()

        nursery.start_soon(follow)
        async with trio.open_nursery() as serving:
            await serving.start(cancelled.serve)
            serving.cancel_scope.cancel()


SERVICE = """
    import trio
    from trio_wow.runtime import Runtime

    class Slow:
        name = "slow"
        async def prepare(self, context): self.context = context
        def start(self): print("running", flush=True)
        def quiesce(self): print("quiesced", flush=True)
        async def stop(self): await trio.sleep({drain})
        def force_stop(self): print("forced", flush=True)

    trio.run(Runtime([Slow()], shutdown_quiet_period=0).serve)
    print("returned")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("times", [1, 2])
def test_signals_stop_a_real_process(number: signal.Signals, times: int) -> None:
    program = textwrap.dedent(SERVICE.format(drain=0 if times == 1 else 60))
    with PythonProcess("-c", program) as process:
        process.read_until("running")
        process.send(number)
        process.read_until("quiesced")
        if times == 2:
            process.send(number)
        code, output, errors = process.finish()
    if times == 1:
        assert (code, output, errors) == (0, "returned\n", "")
    else:
        assert (code, output) == (1, "forced\n")
        assert f"ShutdownDeadlineError: the stop was forced by a second signal ({number.name})" in errors


class _Status(trio.TaskStatus[Any]):
    """Takes the started value without a nursery."""

    def __init__(self, values: list[Runtime]) -> None:
        self.values = values

    def started(self, value: Any = None) -> None:
        self.values.append(value)
