"""What functions handle and take, what is tried again, and what becomes of what fails for good."""

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice, repeat
from typing import Any

import pytest
import trio
from attrs import define, evolve, field, frozen
from chain_domain import Chain, Step, Stepped, Steps, registry_of
from support import a_cancelled, collect
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_wow import (
    App,
    CommandGateway,
    CommandRejectedError,
    DomainEvent,
    Headers,
    StateEvent,
    aggregate,
    event_processor,
    on_command,
    on_error,
    on_event,
    on_sourcing,
    on_state_event,
    projection,
    saga,
)
from trio_wow.app import DispatchSettings, Settings
from trio_wow.buses import InMemoryCommandBus, InMemoryDomainEventBus, MessageExchange
from trio_wow.dispatch import (
    CatchUp,
    CommandDispatcher,
    EventDispatcher,
    FilterChain,
    Handler,
    Handling,
    Outcome,
    ProjectionDispatcher,
    Retry,
    is_retryable,
)
from trio_wow.domain import Domain, aggregate_model
from trio_wow.errors import (
    ConfigurationError,
    HopLimitError,
    RuntimeStateError,
    SerializationError,
    StoreLockedError,
    TenantMismatchError,
    VersionConflictError,
    WaitAbandonedError,
)
from trio_wow.eventsourcing import FailedExecution, InMemoryEventStore, InMemoryFailureStore, Recording
from trio_wow.execution import KeyedExecutor
from trio_wow.messages import AggregateId, CommandMessage, CommandResult, DomainEventStream
from trio_wow.runtime import Runtime, RuntimeContext
from trio_wow.testing import given


class Change:
    """What all changes of a balance have in common."""


@frozen
class Deposited(Change):
    amount: int


@frozen
class Withdrawn(Change):
    amount: int


@frozen
class Open:
    id: str


@frozen
class Opened:
    pass


@frozen
class Deposit:
    id: str
    amount: int


@frozen
class Withdraw:
    id: str
    amount: int


class Fees:
    def __init__(self, fee: int) -> None:
        self.fee = fee


@aggregate(context="bank")
@define
class Account:
    id: str
    balance: int = 0
    is_open: bool = False

    @on_command(exists=False)
    def open(self, command: Open) -> Opened:
        return Opened()

    @on_command(exists=True)
    async def change(
        self, command: Deposit | Withdraw, headers: Headers, message: CommandMessage, fees: Fees
    ) -> Deposited | Withdrawn:
        assert headers == message.headers
        if isinstance(command, Deposit):
            return Deposited(command.amount - fees.fee)
        if command.amount > self.balance:
            raise CommandRejectedError(f"only {self.balance} left")
        return Withdrawn(command.amount)

    @on_sourcing
    def opened(self, event: Opened) -> None:
        self.is_open = True

    @on_sourcing
    def changed(self, event: Deposited | Withdrawn) -> None:
        self.balance += event.amount if isinstance(event, Deposited) else -event.amount

    @on_error
    async def failed(
        self, error: CommandRejectedError | TenantMismatchError, command: Withdraw, headers: Headers
    ) -> None:
        told.append((str(error), command.amount, self.balance, dict(headers)))


told: list[tuple[str, int, int, dict[str, str]]] = []


@pytest.fixture(autouse=True)
def nobody_told() -> None:
    told.clear()


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[CommandGateway]:
    async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
        yield gateway


def account(*processors: object, **options: Any) -> App:
    return App([Account], processors, services={Fees: Fees(1)}, **options)


class TestWhatFunctionsTake:
    async def test_unions_headers_message_and_services(self) -> None:
        app = account()
        async with serving(app) as gateway:
            await gateway.send_and_wait(Open("a"))
            await gateway.send_and_wait(Deposit("a", 10), headers={"trace": "t"})
            assert (await gateway.send_and_wait(Withdraw("a", 4))).error is None
        assert (await app.repository.load(AggregateId("bank", "account", "a"))).state == Account("a", 5, is_open=True)

    def test_a_service_that_is_not_there_is_told_with_the_fix(self) -> None:
        with pytest.raises(ConfigurationError, match=r"Account.change takes fees: Fees, .* services=\{Fees: ...\}"):
            App([Account])
        with pytest.raises(TypeError, match="'Fees' is no class"):
            App([Account], services={"Fees": Fees(1)})  # type: ignore[dict-item]

    def test_given_has_services_too(self) -> None:
        given(Account, "a", Opened(), services={Fees: Fees(2)}).when(Deposit("a", 5)).expect_events(Deposited(3))

    async def test_an_event_function_handles_what_inherits_and_takes_envelope_stream_and_state(self) -> None:
        seen: list[object] = []

        @event_processor
        class Changes:
            @on_event
            async def changed(
                self, change: Change, event: DomainEvent[Change], stream: DomainEventStream, state: Account, fees: Fees
            ) -> None:
                assert event.body is change
                assert stream is event.stream
                seen.append((type(change).__name__, event.sequence, state.balance, fees.fee))

            @on_state_event
            def of(self, state: Account, event: StateEvent[Account], headers: Headers) -> None:
                seen.append(("state", event.version, state.balance, dict(headers)))

        async with serving(account(Changes())) as gateway:
            await gateway.send_and_wait(Open("a"))
            await gateway.send_and_wait(Deposit("a", 10), headers={"trace": "t"})
            await gateway.send_and_wait(Withdraw("a", 4))
        assert sorted(seen, key=str) == sorted(
            [
                ("state", 1, 0, {}),
                ("Deposited", 1, 9, 1),
                ("state", 2, 9, {"trace": "t"}),
                ("Withdrawn", 1, 5, 1),
                ("state", 3, 5, {}),
            ],
            key=str,
        )

    def test_what_cannot_be_taken_is_refused_when_the_class_is_decorated(self) -> None:
        with pytest.raises(TypeError, match=r"Wrong.on: 'state' cannot be a StateEvent here; write DomainEvent"):

            @projection
            class Wrong:
                @on_event
                def on(self, event: Opened, state: StateEvent[Account]) -> None: ...

        with pytest.raises(TypeError, match=r"Wrong.on must name what it takes besides its message, not take \*rest"):

            @projection
            class Wrong:  # type: ignore[no-redef]
                @on_event
                def on(self, event: Opened, *rest: Fees) -> None: ...

    def test_the_state_of_another_aggregate_is_refused(self) -> None:
        @frozen
        class Move:
            id: str

        def other(context: str, handles: type) -> Any:
            @aggregate(context=context)
            @define
            class Account:
                id: str

                @on_command
                def decide(self, command: handles) -> Opened:  # type: ignore[valid-type]
                    return Opened()

                @on_sourcing
                def opened(self, event: Opened) -> None: ...

            return Account

        namesake = other("elsewhere", Move)

        @event_processor
        class Wrong:
            @on_event
            def opened(self, event: Opened, chain: Chain) -> None: ...

            @on_event
            def both(self, event: Opened, state: Account) -> None: ...

            @on_state_event
            def of(self, state: Account, chain: Chain) -> None: ...

        never = "what it handles happens to {} and never to that; take another state, or none"
        with pytest.raises(ConfigurationError) as caught:  # `Chain` is not even registered
            App([Account, namesake], [Wrong()], services={Fees: Fees(1)})
        assert caught.value.problems == (
            f"Wrong.opened takes chain: Chain, but {never.format('Account, Account')}",
            "Wrong.both takes state: Account, but its events happen to <aggregate elsewhere.account: Account> too; "
            "write a function for each aggregate",
            f"Wrong.of takes chain: Chain, but {never.format('Account')}",
        )

    def test_a_sealed_registry_takes_no_more(self) -> None:
        registry = registry_of(Domain([Chain]))
        registry.seal()
        with pytest.raises(RuntimeStateError, match="register processors before"):
            registry.register(object())


class TestVersions:
    async def test_exists_and_expected_version(self) -> None:
        async with serving(account()) as gateway:
            codes = []
            for command, expected in [
                (Deposit("a", 5), None),
                (Open("a"), 1),
                (Open("a"), 0),
                (Open("a"), None),
                (Deposit("a", 5), 1),
                (Deposit("a", 5), 1),
            ]:
                result = await gateway.send_and_wait(command, expected_version=expected)
                codes.append(result.error.code if result.error else result.version)
        assert codes == [
            "AggregateNotFoundError",
            "ExpectedVersionError",
            1,
            "AggregateExistsError",
            2,
            "ExpectedVersionError",
        ]

    def test_an_expected_version_is_a_version(self) -> None:
        domain = Domain([Chain])
        for wrong in (-1, True, 2**63, "1"):
            with pytest.raises(ValueError, match="expected_version must be an int"):
                domain.command_message(Step("a"), expected_version=wrong)  # type: ignore[arg-type]


class Racing(InMemoryEventStore):
    """Before each append for some requests another writer appends an event of its own, as long as it has one."""

    def __init__(self, domain: Domain, others: Mapping[str, Iterable[object]]) -> None:
        super().__init__(domain.serializer)
        self.others = {request_id: iter(events) for request_id, events in others.items()}

    async def append(self, stream: DomainEventStream) -> None:
        for event in islice(self.others.get(stream.request_id, iter(())), 1):
            other = f"of another writer, {stream.version}"
            await super().append(evolve(stream, events=[event], id=other, request_id=other))
        await super().append(stream)


@define
class Bank:
    """An application with one worker, whose third conflict is the last. It writes down what happens when."""

    others: Mapping[str, Iterable[object]]
    attempts: list[tuple[str, float]] = field(factory=list)
    ended: dict[str, tuple[float, CommandResult]] = field(factory=dict)
    executor: KeyedExecutor = field(factory=lambda: KeyedExecutor(workers=1))
    gateway: CommandGateway = field(init=False)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[App]:
        async def note(handling: Handling, proceed: Handler) -> object:
            self.attempts.append((handling.message.request_id, trio.current_time()))
            return await proceed(handling)

        domain = Domain([Account])
        retry = Retry(is_retryable, retries=2, backoff=1, max_backoff=1, jitter=0)
        store = Racing(domain, self.others)
        app = App(domain, services={Fees: Fees(0)}, store=store, command_retry=retry, function_filters=[note])
        async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0, executor=self.executor)) as gateway:
            self.gateway = gateway
            yield app

    async def send(self, name: str, command: object) -> None:
        result = await self.gateway.send_and_wait(command, request_id=name)
        self.ended[name] = trio.current_time(), result


class TestConflicts:
    async def test_fs02_a_conflict_is_decided_again_from_a_fresh_load_and_delays_only_its_mailbox(
        self, autojump_clock: MockClock
    ) -> None:
        bank = Bank({"A1": [Withdrawn(10), Withdrawn(90)]})  # version 4, a balance of 90; version 5, one of 0
        async with bank.serving() as app:
            for command in (Open("A"), Deposit("A", 60), Deposit("A", 40), Open("B")):
                await bank.gateway.send_and_wait(command)
            bank.attempts.clear()
            start = trio.current_time()
            commands = {"A1": Withdraw("A", 50), "A2": Deposit("A", 7), "A3": Withdraw("A", 7)}
            async with trio.open_nursery() as nursery:
                for name, each in {**commands, **{f"B{n}": Deposit("B", 1) for n in range(100)}}.items():
                    nursery.start_soon(bank.send, name, each)
                    await wait_all_tasks_blocked()
                await trio.sleep_until(start + 0.5)  # in the middle of a backoff
                assert sorted(bank.ended) == sorted(f"B{n}" for n in range(100))
                assert [(each.state, each.mailboxes_queued) for each in bank.executor.statistics().workers] == [
                    ("idle", 0)
                ]
            streams = await app.store.load(AggregateId("bank", "account", "A"))
        assert all(at - start < 0.1 and not result.error for name, (at, result) in bank.ended.items() if name[0] == "B")
        of_a = [(name, at - start) for name, at in bank.attempts if name[0] == "A"]
        assert of_a == [("A1", 0), ("A1", 1), ("A1", 2), ("A2", 2), ("A3", 2)]
        assert sorted(name for name in bank.ended if name[0] == "A") == ["A1", "A2", "A3"]
        refused = bank.ended["A1"][1].error
        assert refused is not None
        assert (refused.code, refused.text) == ("CommandRejectedError", "only 0 left")
        assert told == [("only 0 left", 50, 0, {})]
        assert [stream.events[0] for stream in streams][3:] == [
            Withdrawn(10),
            Withdrawn(90),
            Deposited(7),
            Withdrawn(7),
        ]

    async def test_fs02_a_conflict_every_time_ends_after_the_last_attempt_and_the_next_command_runs(
        self, autojump_clock: MockClock
    ) -> None:
        bank = Bank({"C1": repeat(Deposited(1))}, executor=KeyedExecutor(workers=1, max_in_flight=4))
        async with bank.serving():
            await bank.gateway.send_and_wait(Open("C"))
            bank.attempts.clear()
            start = trio.current_time()
            async with trio.open_nursery() as nursery:
                for name, each in (("C1", Withdraw("C", 0)), ("C2", Withdraw("C", 3))):
                    nursery.start_soon(bank.send, name, each)
                    await wait_all_tasks_blocked()
                (dispatch,) = bank.executor.statistics().dispatches
                assert (dispatch.in_flight, dispatch.mailboxes) == (2, 1)
            await wait_all_tasks_blocked()
            (dispatch,) = bank.executor.statistics().dispatches
            assert (dispatch.in_flight, dispatch.demand_outstanding) == (0, 4)
        assert [(name, at - start) for name, at in bank.attempts] == [("C1", 0), ("C1", 1), ("C1", 2), ("C2", 2)]
        conflict = bank.ended["C1"][1].error
        assert conflict is not None
        assert (conflict.code, conflict.undecided) == ("VersionConflictError", True)
        assert bank.ended["C2"][1].error is None  # what the other writer has deposited three times

    def test_fs03_a_group_is_retried_only_when_every_leaf_is(self) -> None:
        conflict = VersionConflictError("a", 1, 2)
        assert is_retryable(ExceptionGroup("all", [conflict, ExceptionGroup("inner", [OSError()])]))
        assert not is_retryable(ExceptionGroup("mixed", [conflict, CommandRejectedError("no")]))
        assert is_retryable(StoreLockedError("here", "locked"))
        assert not is_retryable(SystemExit())


class TestPublication:
    async def test_a_failing_publication_is_tried_again_alone(self, autojump_clock: MockClock) -> None:
        decided: list[str] = []

        class Unreachable(InMemoryDomainEventBus):
            failures = 3

            async def send(self, message: DomainEventStream) -> None:
                if self.failures:
                    self.failures -= 1
                    raise OSError("unreachable")
                await super().send(message)

        async def noting(handling: Handling, proceed: Handler) -> object:
            decided.append(str(handling.function))
            return await proceed(handling)

        steps = Steps()
        domain, commands, events = Domain([Chain]), InMemoryCommandBus(), Unreachable()
        gateway = CommandGateway(domain, commands)
        dispatcher = CommandDispatcher(
            domain,
            commands,
            InMemoryEventStore(domain.serializer),
            events,
            results=gateway.results,
            function_filters=FilterChain([noting]),
        )
        projections = ProjectionDispatcher(registry_of(domain, steps), events)
        runtime = Runtime([dispatcher, projections, gateway], signals=False, shutdown_quiet_period=0)
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            assert (await gateway.send_and_wait(Step("a", 7))).version == 1
            runtime.request_stop()
        assert steps.of == {"a": [7]}
        assert decided == ["Chain.step"]

    async def test_what_a_forced_stop_left_stored_and_unpublished_is_published_when_the_command_comes_again(
        self, autojump_clock: MockClock
    ) -> None:
        class Unreachable(InMemoryDomainEventBus):
            reachable = False

            async def send(self, message: DomainEventStream) -> None:
                if not self.reachable:
                    raise OSError("unreachable")
                await super().send(message)

        steps, domain, commands, events = Steps(), Domain([Chain]), InMemoryCommandBus(), Unreachable()
        store = InMemoryEventStore(domain.serializer)
        results: list[CommandResult] = []
        for _ in range(2):
            gateway = CommandGateway(domain, commands)
            dispatcher = CommandDispatcher(domain, commands, store, events, results=gateway.results)
            projections = ProjectionDispatcher(registry_of(domain, steps), events)
            runtime = Runtime(
                [dispatcher, projections, gateway], signals=False, shutdown_timeout=3, shutdown_quiet_period=0
            )

            async def send(gateway: CommandGateway = gateway) -> None:
                with suppress(WaitAbandonedError):
                    results.append(await gateway.send_and_wait(Step("a", 7), request_id="r"))

            with suppress(ExceptionGroup):
                async with trio.open_nursery() as nursery:
                    await nursery.start(runtime.serve)
                    nursery.start_soon(send)
                    await wait_all_tasks_blocked()
                    runtime.request_stop()
            assert len(await store.read_all(0, 9)) == 1
            events.reachable = True
        assert [(each.version, each.error and each.error.code) for each in results] == [(1, "DuplicateRequestIdError")]
        assert steps.of == {"a": [7]}

    async def test_one_that_can_never_succeed_is_told_and_the_command_ends(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class TooSmall(InMemoryDomainEventBus):
            async def send(self, message: DomainEventStream) -> None:
                raise SerializationError("too large for this bus")

        domain, commands = Domain([Chain]), InMemoryCommandBus()
        store = InMemoryEventStore(domain.serializer)
        gateway = CommandGateway(domain, commands)
        dispatcher = CommandDispatcher(domain, commands, store, TooSmall(), results=gateway.results)
        runtime = Runtime([dispatcher, gateway], signals=False, shutdown_quiet_period=0)
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            assert (await gateway.send_and_wait(Step("a"))).version == 1
            runtime.request_stop()
        (record,) = caplog.records
        assert record.getMessage().startswith(
            "command-dispatcher/publication failed on version 1 of chains.chain/a, after 1 attempt: "
            "SerializationError: too large for this bus\n"
        )
        assert len(await store.read_all(0, 9)) == 1


@frozen
class Nap:
    id: str


@frozen
class Napped:
    pass


@aggregate(context="sleepers")
@define
class Sleeper:
    id: str

    @on_command
    async def nap(self, command: Nap) -> Napped:
        if command.id == "deciding":
            await trio.lowlevel.checkpoint()
            time.sleep(0)  # noqa: ASYNC251 - what is refused
        return Napped()

    @on_sourcing
    def napped(self, event: Napped) -> None:
        pass


@event_processor
class Snores:
    @on_event
    def napped(self, event: Napped) -> None:
        time.sleep(0)


class TestBlockingCalls:
    async def test_k13_the_function_is_named_and_not_the_dispatcher(self) -> None:
        failures = InMemoryFailureStore()
        settings = Settings(dispatch=DispatchSettings(blocking_calls="raise"))
        app = App([Sleeper], [Snores()], failures=failures, settings=settings)
        async with app.serving() as gateway:
            refused = await gateway.send_and_wait(Nap("deciding"))
            assert refused.error is not None
            assert refused.error.text.startswith("handler Sleeper.nap called time.sleep")
            await gateway.send_and_wait(Nap("a"))
        (failure,) = await failures.failures()
        assert failure.text.startswith("handler Snores.napped called time.sleep")


class TestErrorFunctions:
    async def test_on_error_is_told_once_on_the_state_as_it_is_stored(self) -> None:
        async with serving(account()) as gateway:
            await gateway.send_and_wait(Open("a"))
            await gateway.send_and_wait(Deposit("a", 3))
            result = await gateway.send_and_wait(Withdraw("a", 9), headers={"h": "1"})
        assert result.error is not None
        assert result.error.text == "only 2 left"
        assert told == [("only 2 left", 9, 2, {"h": "1"})]

    async def test_what_on_error_raises_is_logged_and_changes_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        @frozen
        class Act:
            id: str

        @aggregate(context="acts")
        @define
        class Actor:
            id: str

            @on_command
            def act(self, command: Act) -> None:
                raise CommandRejectedError("no")

            @on_error
            def failed(self, error: Exception, command: Act) -> None:
                raise LookupError("not even this")

        async with serving(App([Actor])) as gateway:
            result = await gateway.send_and_wait(Act("a"))
        assert result.error is not None
        assert result.error.text == "no"
        (record,) = caplog.records
        assert record.getMessage() == "Actor.failed failed for acts.actor/a"

    async def test_nobody_is_told_of_a_command_of_another_tenant(self, caplog: pytest.LogCaptureFixture) -> None:
        async with serving(account()) as gateway:
            await gateway.send_and_wait(Open("a"), tenant="one")
            await gateway.send_and_wait(Withdraw("a", 1), tenant="two")
        assert told == []
        _, record = caplog.records
        assert (record.levelname, record.getMessage()) == (
            "WARNING",
            "Account.failed is not told, as bank.account/a cannot be loaded: "
            "bank.account/a does not belong to tenant 'two'",
        )

    def test_wrong_ones_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"annotate 'error' with a class of errors, such as Exception"):

            @aggregate(context="acts")
            @define
            class Wrong:
                id: str

                @on_command
                def open(self, command: Open) -> Opened:
                    return Opened()

                @on_error
                def failed(self, error: int, command: Open) -> None: ...

        with pytest.raises(TypeError, match=r"is told of failures of Deposit, for which Other has no @on_command"):

            @aggregate(context="acts")
            @define
            class Other:
                id: str

                @on_command
                def open(self, command: Open) -> Opened:
                    return Opened()

                @on_error
                def failed(self, error: Exception, command: Deposit) -> None: ...


class TestFilters:
    async def test_filters_see_each_message_and_each_attempt_in_their_order(self) -> None:
        log: list[object] = []

        def noting(name: str) -> Any:
            async def note(handling: Handling, proceed: Handler) -> object:
                log.append((name, handling.function))
                result = await proceed(handling)
                log.append((name, "out"))
                return result

            return note

        app = App([Chain], filters=[noting("message")], function_filters=[noting("first"), noting("second")])
        async with serving(app) as gateway:
            await gateway.send_and_wait(Step("a"))
        assert log == [
            ("message", None),
            ("first", "Chain.step"),
            ("second", "Chain.step"),
            ("second", "out"),
            ("first", "out"),
            ("message", "out"),
        ]

    @pytest.mark.parametrize("error", [None, OSError("no metrics")], ids=["returns nothing", "raises"])
    async def test_what_is_stored_is_published_whatever_a_filter_makes_of_it(self, error: Exception | None) -> None:
        async def note(handling: Handling, proceed: Handler) -> None:
            await proceed(handling)
            if error is not None and handling.function == "Chain.step":
                raise error

        steps = Steps()
        async with serving(App([Chain], [steps], function_filters=[note])) as gateway:
            result = await gateway.send_and_wait(Step("a", 7))
        assert steps.of == {"a": [7]}
        assert (result.version, result.error and result.error.text) == (1, error and str(error))

    async def test_the_chain_is_composed_once_for_each_version_of_its_list(self) -> None:
        calls: list[str] = []

        async def handler(handling: Handling) -> str:
            calls.append("handler")
            return "done"

        async def one(handling: Handling, proceed: Handler) -> object:
            calls.append("one")
            return await proceed(handling)

        async def two(handling: Handling, proceed: Handler) -> object:
            calls.append("two")
            return await proceed(handling)

        chain = FilterChain([one])
        run = chain.around(handler)
        handling = Handling("dispatcher", None)
        assert await run(handling) == "done"
        chain.insert(0, two)
        await run(handling)
        chain.remove(one)
        await run(handling)
        assert calls == ["one", "handler", "two", "one", "handler", "two", "handler"]
        assert (list(chain), len(chain), chain.version) == ([two], 1, 2)
        with pytest.raises(TypeError, match="a filter is an async callable"):
            chain.append(lambda handling, proceed: proceed(handling))

    @pytest.mark.parametrize(
        "wrong", [{"retries": -1}, {"retries": 1.5}, {"backoff": -1.0}, {"max_backoff": 0.5, "backoff": 1.0}]
    )
    def test_retry_refuses_numbers_out_of_their_range(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="must be"):
            Retry(**wrong)

    @pytest.mark.parametrize("calls", [True, False], ids=["the function fails", "a filter before it fails"])
    async def test_retry_tries_again_as_often_as_it_is_told(self, calls: bool) -> None:
        tried = 0

        async def handler(handling: Handling) -> None:
            nonlocal tried
            tried += 1
            handling.attempts += calls
            raise LookupError

        with pytest.raises(LookupError):
            await FilterChain([Retry(retries=3)]).around(handler)(Handling("d", None))
        assert tried == 4

    @pytest.mark.parametrize("last", [SystemExit, KeyboardInterrupt, trio.Cancelled])
    async def test_retry_asks_of_no_exit_and_no_cancellation(self, last: type[BaseException]) -> None:
        asked: list[BaseException] = []
        raised: list[BaseException] = [OSError("first"), await a_cancelled() if last is trio.Cancelled else last()]

        def on(error: BaseException) -> bool:
            asked.append(error)
            return True

        async def handler(handling: Handling) -> None:
            await trio.lowlevel.checkpoint()
            handling.attempts += 1
            raise raised[handling.attempts - 1]

        assert await collect(lambda: FilterChain([Retry(on)]).around(handler)(Handling("d", None))) is raised[-1]
        assert {type(error) for error in asked} == {OSError}


class Recorder:
    def __init__(self, answer: Recording | Exception) -> None:
        self.answer = answer
        self.failures: list[FailedExecution] = []

    async def record(self, failure: FailedExecution, /) -> Recording:
        await trio.lowlevel.checkpoint()
        self.failures.append(failure)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Failing:
    """Fails on 2, as often as it is told to."""

    def __init__(self, times: int, error: Exception) -> None:
        self.times = times
        self.error = error
        self.calls: list[tuple[int, float]] = []
        self.done: list[int] = []

    def handle(self, number: int) -> None:
        self.calls.append((number, trio.current_time()))
        if number == 2 and self.times:
            self.times -= 1
            raise self.error
        self.done.append(number)


@event_processor
class Mails(Failing):
    @on_event
    async def stepped(self, event: Stepped) -> None:
        self.handle(event.number)


async def run_three(mails: Mails, **options: Any) -> None:
    async with serving(App([Chain], [mails], **options)) as gateway:
        for number in (1, 2, 3):
            await gateway.send_and_wait(Step("a", number))


class TestFailures:
    async def test_an_event_function_is_tried_again_with_growing_backoff(self, autojump_clock: MockClock) -> None:
        mails = Mails(3, OSError("unreachable"))
        await run_three(mails, event_retry=Retry(backoff=2, jitter=0))
        start = mails.calls[1][1]
        assert [at - start for number, at in mails.calls if number == 2] == pytest.approx([0, 2, 6, 14])
        assert mails.done == [1, 2, 3]

    async def test_an_error_that_cannot_pass_is_not_tried_again(self) -> None:
        mails = Mails(1, CommandRejectedError("never"))
        recorder = Recorder(Recording.RECORDED)
        await run_three(mails, failures=recorder)
        (failure,) = recorder.failures
        assert failure.function == "event-dispatcher/Mails.stepped"
        assert (failure.version, failure.sequence, failure.attempts) == (2, 1, 1)
        assert (failure.error, failure.text) == ("CommandRejectedError", "never")
        assert "Traceback" in failure.traceback

    @pytest.mark.parametrize(
        ("answer", "goes_on"),
        [
            (Recording.RECORDED, True),
            (Recording.WAIVED, True),
            (Recording.UNRECORDED, False),
            (LookupError("no recorder"), False),
        ],
        ids=str,
    )
    async def test_what_is_kept_lets_the_aggregate_go_on_and_what_is_not_holds_it(
        self, answer: Recording | Exception, goes_on: bool
    ) -> None:
        mails = Mails(1_000, OSError("unreachable"))
        recorder = Recorder(answer)
        await run_three(mails, failures=recorder)
        assert mails.done == ([1, 3] if goes_on else [1])
        assert recorder.failures[0].attempts == 4
        if not goes_on:  # the next one tries again, once
            assert [each.attempts for each in recorder.failures] == [4, 5]

    async def test_a_recorder_whose_answer_is_none_has_failed(self, caplog: pytest.LogCaptureFixture) -> None:
        mails = Mails(1_000, CommandRejectedError("never"))
        await run_three(mails, failures=Recorder(None))  # type: ignore[arg-type]
        assert mails.done == [1]
        assert "and recording that failed" in caplog.records[0].getMessage()

    def test_an_error_that_cannot_be_shown_is_described_all_the_same(self) -> None:
        class UnshowableError(Exception):
            def __str__(self) -> str:
                raise LookupError

        for error in (UnshowableError(), ValueError("\ud800" * 9_000)):
            failure = FailedExecution.of(
                error, function="f", aggregate_id=AggregateId("c", "a", "i"), version=1, sequence=1, attempts=1
            )
            assert failure.error == type(error).__name__
            failure.text.encode()
            failure.traceback.encode()
            assert len(failure.text) <= 2_000


@event_processor
class Two:
    """Two functions of one event, each of which fails if it has an answer of the recorder to get."""

    def __init__(self, answers: Mapping[str, Recording | type[Exception]]) -> None:
        self.answers = answers
        self.ran: list[str] = []

    def run(self, name: str) -> None:
        self.ran.append(name)
        if name in self.answers:
            raise CommandRejectedError(name)

    @on_event
    def first(self, event: Stepped) -> None:
        self.run("first")

    @on_event
    async def second(self, event: Stepped) -> None:
        await trio.lowlevel.checkpoint()
        self.run("second")


class Answers:
    """A recorder that answers each function as it is told to."""

    def __init__(self, answers: Mapping[str, Recording | type[Exception]]) -> None:
        self.answers = answers
        self.recorded: list[str] = []

    async def record(self, failure: FailedExecution, /) -> Recording:
        self.recorded.append(failure.text)
        answer = self.answers[failure.text]
        if isinstance(answer, type):
            raise answer("no recorder")
        return answer


class Delivery:
    """An event dispatcher without a runtime, to which one event is delivered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, processor: object, **options: Any) -> None:
        async def note(handling: Handling, proceed: Handler) -> object:
            await proceed(handling)
            self.ended.append((handling.outcome, handling.acknowledged))
            return None

        async def acknowledge(exchange: MessageExchange[Any]) -> None:
            self.acknowledged.append(exchange.message)

        monkeypatch.setattr(MessageExchange, "acknowledge", acknowledge)
        self.ended: list[tuple[Outcome | None, bool]] = []
        self.acknowledged: list[object] = []
        self.domain, self.bus = Domain([Chain]), InMemoryDomainEventBus()
        registry = registry_of(self.domain, processor)
        self.dispatcher = EventDispatcher(registry, self.bus, filters=FilterChain([note]), **options)
        self.stream = DomainEventStream(
            aggregate_id=AggregateId("chains", "chain", "a"),
            version=1,
            events=[Stepped(1)],
            command_id="c",
            request_id="r",
        )

    async def deliver(self) -> None:
        async with trio.open_nursery() as nursery:
            self.context = RuntimeContext(nursery)
            await self.dispatcher.prepare(self.context)
            self.dispatcher.start()
            await self.dispatcher.caught_up()
            await self.bus.send(self.stream)
            await self.dispatcher.stop()


ANSWERS: dict[Outcome, Recording | type[Exception]] = {
    Outcome.FAILURE_RECORDED: Recording.RECORDED,
    Outcome.FAILURE_WAIVED: Recording.WAIVED,
    Outcome.FAILURE_UNRECORDED: Recording.UNRECORDED,
    Outcome.RECORDING_FAILED: LookupError,
}
ACKNOWLEDGED = {
    # by default, and with ack_on_unrecorded_failure=False
    Outcome.HANDLED: (True, True),
    Outcome.FAILURE_RECORDED: (True, True),
    Outcome.FAILURE_WAIVED: (True, True),
    Outcome.FAILURE_UNRECORDED: (True, False),
    Outcome.RECORDING_FAILED: (False, False),
}
ENDS = [Outcome.HANDLED, *ANSWERS]


@pytest.mark.parametrize("catches_up", [False, True], ids=["without a store", "with a store"])
@pytest.mark.parametrize("on_unrecorded", [True, False], ids=["default", "not acknowledged if unrecorded"])
class TestOutcomes:
    @pytest.mark.parametrize("second", ENDS, ids=lambda outcome: outcome.name)
    @pytest.mark.parametrize("first", ENDS, ids=lambda outcome: outcome.name)
    async def test_each_function_runs_and_the_worst_that_becomes_of_one_decides_for_the_message(
        self, first: Outcome, second: Outcome, on_unrecorded: bool, catches_up: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers = {name: ANSWERS[end] for name, end in (("first", first), ("second", second)) if end in ANSWERS}
        two, recorder = Two(answers), Answers(answers)
        delivery = Delivery(
            monkeypatch,
            two,
            failures=recorder,
            ack_on_unrecorded_failure=on_unrecorded,
            catch_up=CatchUp(InMemoryEventStore(Domain([Chain]).serializer)) if catches_up else None,
        )
        await delivery.deliver()
        worst = max(first, second, key=list(ACKNOWLEDGED).index)
        acknowledged = ACKNOWLEDGED[worst][0 if on_unrecorded else 1]
        assert two.ran == ["first", "second"]
        assert recorder.recorded == list(answers)
        assert delivery.ended == [(worst, acknowledged)]
        assert len(delivery.acknowledged) == acknowledged

    async def test_what_fails_while_the_runtime_is_ending_is_neither_recorded_nor_acknowledged(
        self, on_unrecorded: bool, catches_up: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @event_processor
        class Ending:
            @on_event
            def stepped(self, event: Stepped) -> None:
                delivery.context.admission.close()
                raise CommandRejectedError("it may be for that")

        recorder = Answers({})
        delivery = Delivery(
            monkeypatch,
            Ending(),
            failures=recorder,
            ack_on_unrecorded_failure=on_unrecorded,
            catch_up=CatchUp(InMemoryEventStore(Domain([Chain]).serializer)) if catches_up else None,
        )
        await delivery.deliver()
        assert delivery.ended == [(Outcome.UNFINISHED, False)]
        assert delivery.acknowledged == []
        assert recorder.recorded == []


@pytest.mark.parametrize("on_unrecorded", [True, False])
async def test_what_comes_after_versions_that_cannot_be_read_is_not_acknowledged(
    on_unrecorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Locked(InMemoryEventStore):
        async def load(self, *arguments: Any, **options: Any) -> Sequence[DomainEventStream]:
            raise StoreLockedError("here", "locked")

    two, recorder = Two({}), Answers({})
    delivery = Delivery(
        monkeypatch,
        two,
        failures=recorder,
        ack_on_unrecorded_failure=on_unrecorded,
        catch_up=CatchUp(Locked(Domain([Chain]).serializer)),
    )
    delivery.stream = evolve(delivery.stream, version=2)
    await delivery.deliver()
    assert delivery.ended == [(Outcome.UNFINISHED, False)]
    assert (delivery.acknowledged, two.ran, recorder.recorded) == ([], [], [])


class TestSagaLimits:
    async def test_fs20_a_saga_that_feeds_itself_ends_at_the_hop_limit(self) -> None:
        @saga
        class Circle:
            @on_event
            def stepped(self, event: DomainEvent[Stepped]) -> Step:
                return Step("ring", event.body.number + 1)

        recorder = Recorder(Recording.RECORDED)
        app = App([Chain], [Circle()], failures=recorder, max_hops=5)
        async with serving(app) as gateway:
            await gateway.send_and_wait(Step("ring", 0))
            for n in range(100):
                assert (await gateway.send_and_wait(Step("other"), headers={"wow-hops": "5"})).error is None, n
        streams: Sequence[DomainEventStream] = await app.store.load(aggregate_model(Chain).aggregate_id("ring"))
        assert [stream.events[0] for stream in streams] == [Stepped(n) for n in range(6)]
        assert [stream.headers.get("wow-hops") for stream in streams] == [None, "1", "2", "3", "4", "5"]
        assert {failure.error for failure in recorder.failures} == {HopLimitError.__name__}
        assert recorder.failures[0].attempts == 1

    @pytest.mark.parametrize("wrong", [0, -1, True, 1.5])
    def test_max_hops_is_a_positive_int(self, wrong: Any) -> None:
        @saga
        class Idle:
            @on_event
            def stepped(self, event: Stepped) -> None: ...

        with pytest.raises(ValueError, match="max_hops must be a positive int"):
            App([Chain], [Idle()], max_hops=wrong)
