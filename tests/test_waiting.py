"""Waiting for stages: who signals which, in which order, and what becomes of the wait when a signal does not come."""

from functools import partial
from typing import Any

import attrs
import pytest
import trio
from attrs import define, field, frozen
from chain_domain import Break, Chain, Ignore, Note, Notebook, Refuse, Step, Stepped, Twice
from support import collect, interleaving
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow import (
    App,
    CommandGateway,
    CommandRejectedError,
    CommandResult,
    Reply,
    Stage,
    aggregate,
    event_processor,
    on_command,
    on_event,
    on_sourcing,
    on_state_event,
    projection,
    saga,
)
from trio_wow.dispatch import Retry
from trio_wow.domain import Domain
from trio_wow.errors import (
    CommandFailedError,
    InvalidCommandError,
    SerializationError,
    StageUnavailableError,
    WaitAbandonedError,
    WaitTimeoutError,
)
from trio_wow.eventsourcing import InMemoryEventStore, InMemoryFailureStore, Snapshot
from trio_wow.runtime import Runtime
from trio_wow.testing import given

AFTER = (Stage.SNAPSHOT, Stage.PROJECTED, Stage.EVENT_HANDLED, Stage.SAGA_HANDLED)


def quick(app: App, **options: Any) -> Runtime:
    return app.runtime(**{"signals": False, "shutdown_quiet_period": 0, **options})


@projection
class View:
    """Handles steps, each after its gate (if it has one) was opened."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.gates: dict[int, trio.Event] = {}
        self.error: Exception | None = None

    @on_event
    async def stepped(self, event: Stepped) -> None:
        if (gate := self.gates.get(event.number)) is not None:
            await gate.wait()
        if self.error is not None:
            raise self.error
        self.seen.append(event.number)


async def test_projected_says_that_the_view_shows_it() -> None:
    view = View()
    app = App([Chain], [view])
    async with app.serving(quick(app)) as gateway:
        result = await gateway.send_and_wait(Twice("a"), until=Stage.PROJECTED)
        assert (result.stage, result.version, result.error) == (Stage.PROJECTED, 1, None)
        assert view.seen == [100, 101]
        assert not gateway.results.waiting


@event_processor
class Watcher:
    """Handles each step after its gate was opened."""

    def __init__(self) -> None:
        self.gate = trio.Event()

    @on_event
    async def stepped(self, event: Stepped) -> None:
        await self.gate.wait()


@saga
class Noting:
    """Answers each step with a note, whose result it waits for."""

    @on_event
    def stepped(self, event: Stepped) -> Note:
        return Note("n", str(event.number))


@projection
class Totals:
    """Sees states only."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.steps: list[int] = []

    @on_state_event
    async def seen(self, chain: Chain) -> None:
        await self.gate.wait()
        self.steps = chain.steps


@frozen
class Put:
    id: str
    number: int = 0


@frozen
class PutDown:
    number: int


@aggregate(context="shelves", snapshot_every=2)
@define
class Shelf:
    id: str
    number: int = 0

    @on_command
    def put(self, command: Put) -> PutDown:
        return PutDown(command.number)

    @on_sourcing
    def put_down(self, event: PutDown) -> None:
        self.number = event.number


def everything(*more: object) -> App:
    return App([Chain, Notebook, Shelf], [View(), Watcher(), Noting(), *more])


async def follow(gateway: CommandGateway, command: object, until: Stage, **options: Any) -> list[CommandResult]:
    async with gateway.stream(command, until=until, **options) as signals:
        return [signal async for signal in signals]


class TestStages:
    async def test_each_later_stage_is_told_of_by_its_own_dispatcher(self) -> None:
        app = everything()
        watcher = app._processors[1]
        assert isinstance(watcher, Watcher)
        async with app.serving(quick(app)) as gateway:
            async with gateway.stream(Step("a"), until=Stage.EVENT_HANDLED) as signals:
                got = [await anext(signals) for _ in range(5)]
                watcher.gate.set()
                got += [signal async for signal in signals]
        assert [each.stage for each in got[:2]] == [Stage.SENT, Stage.PROCESSED]
        assert {each.stage for each in got[2:5]} == {Stage.SNAPSHOT, Stage.PROJECTED, Stage.SAGA_HANDLED}
        assert [each.stage for each in got[5:]] == [Stage.EVENT_HANDLED]
        assert [each.version for each in got] == [None, 1, 1, 1, 1, 1]

    async def test_a_saga_has_handled_an_event_when_its_commands_have_their_results(self) -> None:
        app = App([Chain, Notebook], [Noting()])
        async with app.serving(quick(app)) as gateway:
            await gateway.send_and_wait(Step("a", 7), until=Stage.SAGA_HANDLED)
            assert (await app.repository.load(Domain([Notebook]).aggregates[0].aggregate_id("n"))).state.last == "7"

    async def test_a_stage_waits_for_functions_of_events_and_of_states(self) -> None:
        view, totals = View(), Totals()
        app = App([Chain], [view, totals])
        ended: list[CommandResult] = []

        async def send(gateway: CommandGateway) -> None:
            ended.append(await gateway.send_and_wait(Step("a", 3), until=Stage.PROJECTED))

        async with app.serving(quick(app)) as gateway, trio.open_nursery() as nursery:
            nursery.start_soon(send, gateway)
            await wait_all_tasks_blocked()
            assert (view.seen, ended) == ([3], [])
            totals.gate.set()
        assert (totals.steps, ended[0].stage) == ([3], Stage.PROJECTED)

    async def test_a_snapshot_that_is_due_is_kept(self) -> None:
        app = App([Shelf])
        kept: list[int] = []
        snapshots: Any = app.repository._snapshots
        save = snapshots.save_snapshot

        async def noted(snapshot: Snapshot) -> None:
            await wait_all_tasks_blocked()
            await save(snapshot)
            kept.append(snapshot.version)

        snapshots.save_snapshot = noted
        async with app.serving(quick(app)) as gateway:
            first = await gateway.send_and_wait(Put("s", 1), until=Stage.SNAPSHOT)
            assert (first.version, kept) == (1, [])  # none is due
            second = await gateway.send_and_wait(Put("s", 2), until=Stage.SNAPSHOT)
            assert (second.stage, second.version, kept) == (Stage.SNAPSHOT, 2, [2])

    async def test_a_snapshot_that_cannot_be_taken_fails_its_stage_and_not_the_command(self) -> None:
        app = App([Shelf])

        async def fail(snapshot: Snapshot) -> None:
            raise OSError("no room")

        app.repository._snapshots.save_snapshot = fail  # type: ignore[union-attr,method-assign]
        async with app.serving(quick(app)) as gateway:
            await gateway.send_and_wait(Put("s", 1))
            result = await gateway.send_and_wait(Put("s", 2), until=Stage.SNAPSHOT)
        assert result.error is not None
        assert (result.stage, result.version, result.error.code) == (Stage.SNAPSHOT, 2, "OSError")

    @pytest.mark.parametrize("command", [Ignore("a"), Note("n", "of no concern")])
    @pytest.mark.parametrize("until", [Stage.PROJECTED, Stage.EVENT_HANDLED, Stage.SAGA_HANDLED, Stage.SNAPSHOT])
    async def test_a_stage_at_which_nobody_has_anything_to_do_is_reached_at_once(
        self, command: object, until: Stage
    ) -> None:
        app = everything()  # whose watcher never returns
        async with app.serving(quick(app)) as gateway:
            result = await gateway.send_and_wait(command, until=until)
        assert (result.stage, result.error) == (until, None)

    @pytest.mark.parametrize("until", AFTER)
    async def test_a_stage_of_which_nobody_tells_is_refused_before_anything_is_sent(self, until: Stage) -> None:
        app = App([Chain])
        async with app.serving(quick(app)) as gateway:
            with pytest.raises(StageUnavailableError, match=f"reached {until.name}: it has no dispatcher for that"):
                await gateway.send_and_wait(Step("a"), until=until)
            with pytest.raises(StageUnavailableError):
                async with gateway.stream(Step("a"), until=until):
                    raise AssertionError("sent")
            assert not gateway.results.waiting
        assert list(await app.store.read_all(0, 9)) == []

    async def test_signals_come_once_and_in_order_however_tasks_interleave(self) -> None:
        for seed in range(20):
            with interleaving(seed):
                app = App([Chain, Notebook, Shelf], [View(), Noting()])
                async with app.serving(quick(app)) as gateway:
                    stages = [each.stage for each in await follow(gateway, Step("a"), Stage.SAGA_HANDLED)]
            assert stages[:2] == [Stage.SENT, Stage.PROCESSED]
            assert stages[-1] is Stage.SAGA_HANDLED
            assert len(set(stages)) == len(stages)

    async def test_a_signal_that_comes_before_processed_is_kept_for_it(self) -> None:
        """The events are published, and may be handled, before their command is acknowledged."""
        order: list[str] = []

        async def late(handling: Any, proceed: Any) -> None:
            await proceed(handling)
            if handling.dispatcher == "command-dispatcher":
                await wait_all_tasks_blocked()
            order.append(handling.dispatcher)

        view = View()
        app = App([Chain], [view], filters=[late])
        async with app.serving(quick(app)) as gateway:
            got = await follow(gateway, Step("a", 4), Stage.PROJECTED)
        assert order == ["projection-dispatcher", "command-dispatcher"]
        assert [each.stage for each in got] == [Stage.SENT, Stage.PROCESSED, Stage.PROJECTED]


class TestFailures:
    @pytest.mark.parametrize("until", AFTER)
    @pytest.mark.parametrize(
        ("command", "code"), [(Refuse("a"), "CommandRejectedError"), (Break("a"), "ZeroDivisionError")]
    )
    async def test_a_failing_command_ends_later_stages_at_once(
        self, until: Stage, command: object, code: str, autojump_clock: MockClock
    ) -> None:
        app = everything()
        async with app.serving(quick(app)) as gateway:
            start = trio.current_time()
            result = await gateway.send_and_wait(command, until=until)
            stages = [each.stage for each in await follow(gateway, command, until)]
            assert trio.current_time() == start
        assert result.error is not None
        assert (result.stage, result.error.code, result.value) == (Stage.PROCESSED, code, None)
        assert stages == [Stage.SENT, Stage.PROCESSED]

    async def test_a_duplicate_ends_later_stages_at_once(self) -> None:
        app = App([Chain], [View()])
        async with app.serving(quick(app)) as gateway:
            await gateway.send_and_wait(Step("a"), until=Stage.PROJECTED, request_id="r")
            again = await gateway.send_and_wait(Step("a"), until=Stage.PROJECTED, request_id="r")
        assert again.error is not None
        assert (again.stage, again.version, again.error.code) == (Stage.PROCESSED, 1, "DuplicateRequestIdError")

    async def test_a_failing_projection_fails_its_stage_and_the_command_stands(self) -> None:
        view = View()
        view.error = CommandRejectedError("not today", code="closed")
        app = App([Chain], [view], failures=InMemoryFailureStore(), event_retry=Retry(retries=0))
        async with app.serving(quick(app)) as gateway:
            result = await gateway.send_and_wait(Step("a"), until=Stage.PROJECTED)
            processed = await gateway.send_and_wait(Step("a"))
        assert (result.stage, result.version) == (Stage.PROJECTED, 1)
        assert processed.error is None
        with pytest.raises(
            CommandFailedError, match=r"closed: not today \(at PROJECTED; the command stands\)"
        ) as caught:
            result.raise_for_error()
        assert (caught.value.code, caught.value.stage, caught.value.retryable) == ("closed", "PROJECTED", False)

    async def test_a_version_behind_one_that_failed_says_so(self) -> None:
        view = View()
        view.error = ValueError("broken")
        app = App([Chain], [view], event_retry=Retry(retries=0))  # nobody keeps failures, so that later ones wait
        async with app.serving(quick(app)) as gateway:
            await gateway.send_and_wait(Step("a"))
            await wait_all_tasks_blocked()
            result = await gateway.send_and_wait(Step("a"), until=Stage.PROJECTED)
        assert result.error is not None
        assert (result.version, result.error.code) == (2, "FAILURE_UNRECORDED")
        assert "has not handled version 2 of chains.chain/a" in result.error.text

    async def test_the_other_stages_still_come_after_one_has_failed(self) -> None:
        view = View()
        view.error = ValueError("broken")
        watcher = Watcher()
        app = App([Chain], [view, watcher], event_retry=Retry(retries=0))
        async with app.serving(quick(app)) as gateway:
            async with gateway.stream(Step("a"), until=Stage.EVENT_HANDLED) as signals:
                got = [await anext(signals) for _ in range(3)]
                watcher.gate.set()
                got += [signal async for signal in signals]
        assert [(each.stage, each.error is None) for each in got[2:]] == [
            (Stage.PROJECTED, False),
            (Stage.EVENT_HANDLED, True),
        ]

    @pytest.mark.parametrize("until", [Stage.PROJECTED, Stage.EVENT_HANDLED])
    async def test_a_forced_stop_tells_who_waits_for_what_it_has_cut_off(
        self, until: Stage, autojump_clock: MockClock
    ) -> None:
        view, watcher = View(), Watcher()
        view.gates[0] = trio.Event()
        app = App([Chain], [view, watcher])
        runtime = quick(app, shutdown_timeout=1)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            nursery.start_soon(collect, partial(app.gateway.send_and_wait, Step("a"), until=until), caught)
            await wait_all_tasks_blocked()
            runtime.request_stop()
        (abandoned,) = [error for error in caught if isinstance(error, WaitAbandonedError)]
        assert abandoned.reached == "PROCESSED"
        assert not app.gateway.results.waiting

    async def test_a_lost_signal_ends_with_the_runtime(self, autojump_clock: MockClock) -> None:
        app = App([Chain], [View()])
        app._results.done = lambda *_: None  # type: ignore[method-assign]
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            async with app.serving(quick(app)) as gateway:
                nursery.start_soon(collect, partial(gateway.send_and_wait, Step("a"), until=Stage.PROJECTED), caught)
                await wait_all_tasks_blocked()
        assert isinstance(caught[0], WaitAbandonedError)


class Lost(App):
    """An application whose projections' signals are lost, or come when they are let go."""

    def __init__(self) -> None:
        super().__init__([Chain], [View()])
        self.held: list[tuple[Any, ...]] = []
        self.done = self._results.done
        self._results.done = lambda *signal: self.held.append(signal)  # type: ignore[method-assign]


class TestFs21:
    async def test_fs21_lost_signals_end_at_the_deadline_and_leave_nothing(self, autojump_clock: MockClock) -> None:
        app = Lost()
        ended: list[tuple[float, str | None]] = []

        async def send(gateway: CommandGateway, number: int, scope: trio.CancelScope) -> None:
            with scope:
                with pytest.raises(WaitTimeoutError) as caught:
                    await gateway.send_and_wait(Step(str(number)), until=Stage.PROJECTED, timeout=3)
                ended.append((trio.current_time(), caught.value.reached))

        scopes = [trio.CancelScope() for _ in range(1_000)]
        async with app.serving(quick(app)) as gateway:
            start = trio.current_time()
            async with trio.open_nursery() as nursery:
                for number, scope in enumerate(scopes):
                    nursery.start_soon(send, gateway, number, scope)
                await trio.sleep_until(start + 1)
                assert gateway.results.waiting == 1_000
                for scope in scopes[::2]:
                    scope.cancel()
                await wait_all_tasks_blocked()
                assert gateway.results.waiting == 500
            assert ended == [(start + 3, "PROCESSED")] * 500
            assert not gateway.results.waiting

    async def test_fs21_an_early_signal_is_not_lost(self) -> None:
        """The handler completes before `send` returns."""
        app = App([Chain], [View()])
        async with app.serving(quick(app)) as gateway:
            send = gateway._bus.send_if_subscribed

            async def slow(message: Any) -> bool:
                sent = await send(message)
                await wait_all_tasks_blocked()
                return sent

            gateway._bus.send_if_subscribed = slow  # type: ignore[method-assign]
            result = await gateway.send_and_wait(Step("a"), until=Stage.PROJECTED)
            got = await follow(gateway, Step("a"), Stage.PROJECTED)
            sent = await gateway.send_and_wait(Step("a"), until=Stage.SENT)
        assert (result.stage, sent.stage, sent.version) == (Stage.PROJECTED, Stage.SENT, None)
        assert [each.stage for each in got] == [Stage.SENT, Stage.PROCESSED, Stage.PROJECTED]

    async def test_fs21_a_late_signal_is_dropped_and_completes_no_other_wait(self, autojump_clock: MockClock) -> None:
        app = Lost()
        async with app.serving(quick(app)) as gateway:
            with pytest.raises(WaitTimeoutError):
                await gateway.send_and_wait(Step("a"), until=Stage.PROJECTED, timeout=3)
            await trio.sleep(0.1)
            async with gateway.stream(Step("a"), until=Stage.PROJECTED, timeout=3) as signals:
                assert (await anext(signals)).stage is Stage.SENT
                assert (await anext(signals)).stage is Stage.PROCESSED
                await wait_all_tasks_blocked()
                first, second = app.held
                app.done(*first)
                with trio.move_on_after(1) as waiting:
                    await anext(signals)
                assert waiting.cancelled_caught
                app.done(*second)
                assert (await anext(signals)).stage is Stage.PROJECTED

    async def test_fs21_a_command_that_is_waited_for_is_not_waited_for_twice(self) -> None:
        app = App([Chain])
        async with app.serving(quick(app)) as gateway:
            with gateway.results.expecting("c"), pytest.raises(ValueError, match="c is waited for already"):
                gateway.results.expecting("c")
            with gateway.results.expecting("c"):
                assert gateway.results.waiting == 1

    async def test_fs21_the_deadline_of_a_stream_is_absolute(self, autojump_clock: MockClock) -> None:
        app = Lost()
        async with app.serving(quick(app)) as gateway:
            start = trio.current_time()
            got = []
            with pytest.raises(WaitTimeoutError, match=r"did not reach PROJECTED within 3 s; it has reached PROCESSED"):
                async with gateway.stream(Step("a"), until=Stage.PROJECTED, timeout=3) as signals:
                    async for signal in signals:
                        got.append(signal.stage)
                        await trio.sleep_until(start + 2)
            assert trio.current_time() == start + 3
            assert got == [Stage.SENT, Stage.PROCESSED]
            assert not gateway.results.waiting

    async def test_fs21_a_signal_after_the_deadline_does_not_count_though_nobody_looked(
        self, autojump_clock: MockClock
    ) -> None:
        app = Lost()
        async with app.serving(quick(app)) as gateway:
            async with gateway.stream(Step("a"), until=Stage.PROJECTED, timeout=3) as signals:
                await trio.sleep(3)
                app.done(*app.held[0])
                assert [(await anext(signals)).stage for _ in range(2)] == [Stage.SENT, Stage.PROCESSED]
                with pytest.raises(WaitTimeoutError):
                    await anext(signals)

    async def test_fs21_ten_thousand_waits_at_once_leave_an_empty_registry(self) -> None:
        app = App([Chain], [View()])
        stages: list[Stage] = []

        async def send(gateway: CommandGateway, number: int) -> None:
            stages.append((await gateway.send_and_wait(Step(str(number)), until=Stage.PROJECTED)).stage)

        async with app.serving(quick(app)) as gateway:
            async with trio.open_nursery() as nursery:
                for number in range(10_000):
                    nursery.start_soon(send, gateway, number)
            assert not gateway.results.waiting
        assert stages == [Stage.PROJECTED] * 10_000


class TestStream:
    async def test_leaving_early_ends_the_waiting_and_not_the_command(self) -> None:
        app = App([Chain])
        async with app.serving(quick(app)) as gateway:
            async with gateway.stream(Step("a")) as signals:
                assert (await anext(signals)).stage is Stage.SENT
            assert not gateway.results.waiting
            assert (await gateway.send_and_wait(Step("a"))).version == 2

    async def test_it_can_end_with_sent(self) -> None:
        app = App([Chain])
        async with app.serving(quick(app)) as gateway:
            assert [each.stage for each in await follow(gateway, Step("a"), Stage.SENT)] == [Stage.SENT]

    async def test_a_stream_that_cannot_be_sent_in_time_is_not_entered(self, autojump_clock: MockClock) -> None:
        app = App([Chain])
        async with app.serving(quick(app)) as gateway:

            async def never(message: Any) -> bool:
                await trio.sleep_forever()
                raise AssertionError

            gateway._bus.send_if_subscribed = never  # type: ignore[method-assign]
            with pytest.raises(WaitTimeoutError, match="it was not sent"):
                async with gateway.stream(Step("a"), timeout=2):
                    raise AssertionError("entered")
            assert not gateway.results.waiting

    async def test_a_cancelled_iteration_can_go_on(self, autojump_clock: MockClock) -> None:
        app = Lost()
        async with app.serving(quick(app)) as gateway:
            async with gateway.stream(Step("a"), until=Stage.PROJECTED) as signals:
                await anext(signals)
                await anext(signals)
                with trio.move_on_after(1):
                    await anext(signals)
                app.done(*app.held[0])
                assert [each.stage async for each in signals] == [Stage.PROJECTED]

    async def test_it_is_abandoned_when_the_runtime_is_forced_to_stop(self, autojump_clock: MockClock) -> None:
        class Gated(InMemoryEventStore):
            async def append(self, stream: object) -> None:
                await trio.sleep_forever()

        domain = Domain([Chain])
        app = App(domain, store=Gated(domain.serializer))
        runtime = quick(app, shutdown_timeout=1)
        caught: list[BaseException | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, runtime.serve, caught)
            await wait_all_tasks_blocked()
            nursery.start_soon(collect, partial(follow, app.gateway, Step("a"), Stage.PROCESSED), caught)
            await wait_all_tasks_blocked()
            runtime.request_stop()
        assert WaitAbandonedError in {type(error) for error in caught}


@frozen
class Ask:
    id: str
    what: str = "number"


@frozen
class Asked:
    what: str


@frozen
class Answered:
    number: int
    others: tuple[int, ...] = (1, 2)


@aggregate(context="oracles")
@define
class Oracle:
    id: str
    asked: int = 0

    @on_command
    async def ask(self, command: Ask) -> Asked | Reply[Any, Any]:
        match command.what:
            case "number":
                return Reply(Asked("number"), self.asked + 1)
            case "object":
                return Reply([Asked("object")], Answered(self.asked))
            case "nothing":
                return Reply(None, {"asked": self.asked})
            case "nan":
                return Reply(Asked("nan"), float("nan"))
            case "reply":
                return Reply(Reply(None, 1), 2)
            case "refuse":
                raise ClosedError
        return Asked(command.what)

    @on_sourcing
    def asked_for(self, event: Asked) -> None:
        self.asked += 1


class ClosedError(CommandRejectedError):
    """The oracle is closed."""

    code = "oracle.closed"

    def __init__(self) -> None:
        super().__init__("come back tomorrow")


class TestValues:
    @pytest.mark.parametrize(
        ("what", "value", "version"),
        [
            ("number", 1, 1),
            ("object", {"number": 0, "others": [1, 2]}, 1),
            ("nothing", {"asked": 0}, None),
            ("plain", None, 1),
        ],
    )
    async def test_a_reply_brings_a_value_beside_the_events(
        self, what: str, value: object, version: int | None
    ) -> None:
        app = App([Oracle])
        async with app.serving(quick(app)) as gateway:
            sent, processed = await follow(gateway, Ask("o", what), Stage.PROCESSED)
        assert sent.value is None
        assert (processed.value, processed.version, processed.error) == (value, version, None)

    async def test_a_value_comes_with_later_stages_and_not_with_a_duplicate(self) -> None:
        app = App([Oracle, Shelf])
        async with app.serving(quick(app)) as gateway:
            later = await gateway.send_and_wait(Ask("o"), until=Stage.SNAPSHOT, request_id="r")
            again = await gateway.send_and_wait(Ask("o"), request_id="r")
        assert (later.stage, later.value, again.value, again.version) == (Stage.SNAPSHOT, 1, None, 1)

    async def test_a_value_that_json_cannot_hold_fails_the_command_and_stores_nothing(self) -> None:
        app = App([Oracle])
        async with app.serving(quick(app)) as gateway:
            result = await gateway.send_and_wait(Ask("o", "nan"))
        assert result.error is not None
        assert (result.error.code, result.error.text) == (
            "SerializationError",
            "nan cannot be kept as JSON: nan is no number in JSON",
        )
        assert list(await app.store.read_all(0, 9)) == []

    async def test_a_refusal_has_the_domains_own_code(self) -> None:
        app = App([Oracle])
        async with app.serving(quick(app)) as gateway:
            result = await gateway.send_and_wait(Ask("o", "refuse"))
        assert result.error is not None
        assert (result.error.code, result.error.text) == ("oracle.closed", "come back tomorrow")

    def test_in_tests_of_aggregates(self) -> None:
        case = given(Oracle, "o").when(Ask("o")).expect_events(Asked("number")).expect_value(1)
        case.when(Ask("o", "object")).expect_value({"number": 1, "others": [1, 2]})
        case.when(Ask("o", "plain")).expect_value(None)
        with pytest.raises(AssertionError, match="expected the value 5, got None"):
            case.expect_value(5)
        case.when(Ask("o", "nan")).expect_error(SerializationError)
        case.when(Ask("o", "reply")).expect_error(TypeError, "or a Reply around one of these")


@define
class Order:
    id: str
    amount: int = field(default=1, validator=attrs.validators.gt(0))
    rooms: int = 1
    said: Any = None

    def validate(self) -> Any:
        if self.rooms > self.amount:
            raise ValueError("more rooms than guests")
        return self.said


@frozen
class Labelled:
    """Has a field of that name, and no method."""

    id: str
    validate: str = "yes"


@aggregate(context="orders")
@define
class Orders:
    id: str

    @on_command
    def order(self, command: Order) -> None:
        return None

    @on_command
    def label(self, command: Labelled) -> None:
        return None


def changed(**values: object) -> Order:
    order = Order("a")
    for name, value in values.items():
        object.__setattr__(order, name, value)
    return order


class TestValidation:
    @pytest.mark.parametrize(
        ("command", "cause", "text"),
        [
            (changed(amount=0), ValueError, "Order is not valid: 'amount' must be > 0: 0"),
            (Order("a", rooms=2), ValueError, "Order is not valid: more rooms than guests"),
        ],
    )
    async def test_fs21_a_command_that_is_not_valid_is_not_sent_and_leaves_no_handle(
        self, command: Order, cause: type[Exception], text: str
    ) -> None:
        app = App([Orders])
        async with app.serving(quick(app)) as gateway:

            async def never(message: object) -> bool:
                raise AssertionError("sent")

            gateway._bus.send_if_subscribed = never  # type: ignore[method-assign]
            for send in (gateway.send, gateway.send_and_wait, partial(follow, gateway, until=Stage.PROCESSED)):
                with pytest.raises(InvalidCommandError, match=text) as caught:
                    await send(command)
                assert type(caught.value.__cause__) is cause
                assert caught.value.command_type is Order
            assert not gateway.results.waiting

    @pytest.mark.parametrize("command", [Order("a"), Labelled("a")])
    async def test_a_valid_one_is(self, command: object) -> None:
        app = App([Orders])
        async with app.serving(quick(app)) as gateway:
            assert (await gateway.send_and_wait(command)).error is None

    async def test_a_validate_that_says_false_or_must_be_awaited_is_a_mistake(self) -> None:
        async def awaited() -> None: ...

        app = App([Orders])
        async with app.serving(quick(app)) as gateway:
            with pytest.raises(TypeError, match=r"Order.validate returned False; raise an error to refuse the command"):
                await gateway.send(Order("a", said=False))
            with pytest.raises(TypeError, match=r"Order.validate returned an awaitable; make it a plain method"):
                await gateway.send(Order("a", said=awaited()))
