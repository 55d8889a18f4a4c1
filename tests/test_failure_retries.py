"""Executions that have failed for good, tried again by their IDs."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from chain_domain import Chain, Note, Notebook, Step, Stepped, registry_of
from trio.testing import MockClock, Sequencer, wait_all_tasks_blocked

from trio_wow import App, DomainEvent, event_processor, on_event, on_state_event, projection, saga
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.buses import InMemoryCommandBus, InMemoryDomainEventBus
from trio_wow.dispatch import CommandDispatcher, EventDispatcher, FailureRetries, Handler, Handling, Retry
from trio_wow.domain import Domain
from trio_wow.errors import (
    AdmissionClosedError,
    ExecutorClosedError,
    FailureNotRetryableError,
    HandlerExitError,
    SerializationError,
    ShutdownDeadlineError,
    StoreLockedError,
)
from trio_wow.eventsourcing import FailedExecution, FailureStore, InMemoryEventStore, InMemoryFailureStore
from trio_wow.gateway import CommandGateway
from trio_wow.messages import AggregateId, DomainEventStream
from trio_wow.runtime import Runtime

ONCE = Retry(retries=0)


class Failing:
    """Fails for number 2 while it is told to; notes what it has done."""

    def __init__(self) -> None:
        self.broken = True
        self.called = 0
        self.done: list[int] = []

    def handle(self, number: int) -> None:
        if number == 2:
            self.called += 1
            if self.broken:
                raise OSError("unreachable")
        self.done.append(number)


@event_processor
class Mailer(Failing):
    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> None:
        self.handle(event.body.number)

    @on_event
    async def counted(self, _: Stepped) -> None:
        pass


@event_processor
class Mails:
    """Fails for number 2 while it is told to, and later stays in it until it is let go; leaves at number 5."""

    def __init__(self) -> None:
        self.broken = True
        self.began = trio.Event()
        self.finish = trio.Event()

    @on_event
    async def stepped(self, event: Stepped) -> None:
        if event.number == 2 and self.broken:
            raise OSError("unreachable")
        if event.number == 2:
            self.began.set()
            await self.finish.wait()
        if event.number == 5:
            raise SystemExit(3)


@projection
class Ends(Failing):
    @on_state_event
    def chained(self, chain: Chain) -> None:
        self.handle(chain.steps[-1])


@saga
class Notes(Failing):
    @on_event
    def stepped(self, event: DomainEvent[Stepped]) -> Note:
        self.handle(event.body.number)
        return Note(event.aggregate_id.id, f"step {event.body.number}")


@projection
class Rows(Failing):
    @on_event
    def stepped(self, event: DomainEvent[Stepped], connection: sqlite3.Connection) -> None:
        self.handle(event.body.number)
        connection.execute("INSERT INTO rows VALUES (?)", (event.body.number,))

    @on_state_event
    def chained(self, chain: Chain, connection: sqlite3.Connection) -> None:
        self.handle(chain.steps[-1])
        connection.execute("INSERT INTO ends VALUES (?)", (chain.steps[-1],))


@projection
class Row(Failing):
    @on_event
    def stepped(self, event: DomainEvent[Stepped], _: sqlite3.Connection) -> None:
        self.handle(event.body.number)


class Stuck(SqliteStore):
    """Lets nobody pass the second version without work for it, once or more often."""

    most = 1
    refused = 0

    async def handle_once(self, *arguments: Any) -> Any:
        *_, version, _, work = arguments
        if version == 2 and getattr(work, "__name__", "") != "work" and self.refused < self.most:
            self.refused += 1
            raise StoreLockedError(str(self.path), "busy")
        return await super().handle_once(*arguments)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(tmp_path / "chains.db", Domain([Chain, Notebook]).serializer) as store:
        yield store


def app_of(store: SqliteStore, *processors: object, **options: Retry | FailureStore) -> App:
    return App([Chain, Notebook], processors, store=store, **{"failures": store, **options})  # type: ignore[arg-type]


@asynccontextmanager
async def failed(app: App) -> AsyncIterator[FailedExecution]:
    """Serve, let the second of three steps fail, and give its failure when all of them have been handled."""
    runtime = app.runtime(signals=False, shutdown_quiet_period=0)
    async with app.serving(runtime) as gateway:
        for number in (1, 2, 3):
            await gateway.send_and_wait(Step("a", number))
        with trio.fail_after(30):
            while runtime.statistics().leases:  # noqa: ASYNC110 - the functions run beside
                await trio.sleep(0.01)
        yield await first_failure(app)


async def first_failure(app: App) -> FailedExecution:
    with trio.fail_after(30):
        while not (failures := await open_failures(app)):  # noqa: ASYNC110 - the functions run beside
            await trio.sleep(0.01)
    await wait_all_tasks_blocked(0.01)
    return failures[0]


async def open_failures(app: App) -> list[FailedExecution]:
    assert isinstance(app.failures, FailureStore)
    return list(await app.failures.failures())


class TestSuccess:
    async def test_the_function_that_failed_is_called_once_more_and_the_failure_is_resolved(
        self, store: SqliteStore
    ) -> None:
        mailer, seen = Mailer(), []

        async def noting(handling: Handling, proceed: Handler) -> object:
            if isinstance(handling.message, DomainEventStream):
                seen.append((handling.function, handling.message.version))
            return await proceed(handling)

        app = App([Chain, Notebook], [mailer], store=store, failures=store, event_retry=ONCE, function_filters=[noting])
        async with failed(app) as failure:
            assert (failure.function, failure.attempts) == ("event-dispatcher/Mailer.stepped", 1)
            mailer.broken = False
            seen.clear()
            assert await app.retry_failure(failure.id)
            assert seen == [("Mailer.stepped", 2)]  # through the filters, and no other function
            assert mailer.done == [1, 3, 2]
            assert await open_failures(app) == []
            with pytest.raises(FailureNotRetryableError, match="none that is open"):
                await app.retry_failure(failure.id)
        assert mailer.called == 2

    async def test_state_events(self, store: SqliteStore) -> None:
        ends = Ends()
        app = app_of(store, ends)
        async with failed(app) as failure:
            ends.broken = False
            assert await app.retry_failure(failure.id)
            assert ends.done == [1, 3, 2]  # the state as it was after the second step

    async def test_a_saga_sends_what_it_could_not(self, store: SqliteStore) -> None:
        notes = Notes()
        app = app_of(store, notes)
        async with failed(app) as failure:
            assert failure.function == "saga-dispatcher/Notes.stepped"
            notes.broken = False
            assert await app.retry_failure(failure.id)
            notebook = await app.repository.load(AggregateId("notes", "notebook", "a"))
            assert (notebook.version, notebook.state.last) == (3, "step 2")

    async def test_functions_that_share_a_transaction(self, store: SqliteStore) -> None:
        def create(connection: sqlite3.Connection) -> None:
            connection.execute("CREATE TABLE rows (number)")
            connection.execute("CREATE TABLE ends (number)")

        await store.transact(create)
        rows = Rows()
        app = app_of(store, rows, event_retry=ONCE)
        async with failed(app):
            both = {each.function: each for each in await open_failures(app)}
            assert sorted(both) == ["projection-dispatcher/Rows", "projection-dispatcher/Rows/state"]
            assert {(each.version, each.sequence, each.attempts) for each in both.values()} == {(2, 0, 1)}
            rows.broken = False
            for each in both.values():
                assert await app.retry_failure(each.id)
            assert await open_failures(app) == []
            found: list[list[int]] = []

            def read(connection: sqlite3.Connection) -> None:
                found.extend(
                    [number for (number,) in connection.execute(f"SELECT number FROM {table} ORDER BY rowid")]
                    for table in ("rows", "ends")
                )

            await store.transact(read)
            assert found == [[1, 3, 2], [1, 3, 2]]

    async def test_a_failure_that_could_not_be_passed_is_recorded_once(self, tmp_path: Path) -> None:
        async with Stuck(tmp_path / "stuck.db", Domain([Chain, Notebook]).serializer) as store:
            row = Row()
            async with failed(app_of(store, row, event_retry=ONCE)) as failure:
                assert (failure.version, failure.attempts) == (2, 1)
                with trio.fail_after(30):
                    while row.done != [1, 3]:  # noqa: ASYNC110 - the functions run beside
                        await trio.sleep(0.01)
                assert (store.refused, row.called) == (1, 1)

    async def test_a_failure_that_could_not_be_passed_is_done_once_by_its_retry_and_a_restart(
        self, tmp_path: Path
    ) -> None:
        async with Stuck(tmp_path / "stuck.db", Domain([Chain, Notebook]).serializer) as store:
            store.most = 100
            row = Row()
            app = app_of(store, row, event_retry=ONCE)
            async with failed(app) as failure:
                row.broken = False
                assert await app.retry_failure(failure.id)
                assert row.done == [1, 2]
            store.most = 0
            app = app_of(store, row, event_retry=ONCE)
            async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)):
                assert row.done == [1, 2, 3]

    async def test_an_application_started_again_can_retry_what_failed_before(self, store: SqliteStore) -> None:
        async with failed(app_of(store, Mailer())) as failure:
            pass
        mailer = Mailer()
        mailer.broken = False
        app = app_of(store, mailer)
        async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)):
            assert await app.retry_failure(failure.id)
        assert mailer.done == [2]

    async def test_a_recorder_of_its_own(self, store: SqliteStore) -> None:
        mailer, failures = Mailer(), InMemoryFailureStore()
        app = app_of(store, mailer, failures=failures)
        async with failed(app) as failure:
            mailer.broken = False
            assert await app.retry_failure(failure.id)
        assert await failures.failures() == []


class TestNoSuccess:
    async def test_it_keeps_its_id_and_adds_its_attempts(self, store: SqliteStore) -> None:
        mailer = Mailer()
        app = app_of(store, mailer, event_retry=Retry(retries=2))
        async with failed(app) as failure:
            assert failure.attempts == 3
            for attempts in (6, 9):
                assert not await app.retry_failure(failure.id)
                (still,) = await open_failures(app)
                assert (still.id, still.attempts) == (failure.id, attempts)
            assert mailer.called == 9
            assert mailer.done == [1, 3]

    async def test_what_is_no_exception_ends_the_runtime(self, store: SqliteStore) -> None:
        class Leaving(Mailer):
            def handle(self, number: int) -> None:
                if number == 2 and not self.broken:
                    raise SystemExit(3)
                super().handle(number)

        mailer = event_processor(Leaving)()
        app = app_of(store, mailer)
        with pytest.RaisesGroup(HandlerExitError, flatten_subgroups=True):
            async with failed(app) as failure:
                mailer.broken = False
                with pytest.raises(SystemExit):
                    await app.retry_failure(failure.id)
        assert [each.id for each in await open_failures(app)] == [failure.id]

    async def test_cancelled_it_stays_open(self, store: SqliteStore) -> None:
        slow = Mails()
        app = app_of(store, slow)
        async with failed(app) as failure:
            slow.broken = False
            with trio.move_on_after(0) as scope:
                await app.retry_failure(failure.id)
            assert scope.cancelled_caught
            with trio.move_on_after(0.05):
                await app.retry_failure(failure.id)
            assert [each.id for each in await open_failures(app)] == [failure.id]
            slow.broken = True
            assert not await app.retry_failure(failure.id)  # nothing is held

    async def test_what_the_end_of_a_runtime_has_left_unfinished_is_no_answer(self, store: SqliteStore) -> None:
        began, exploded, proceed = trio.Event(), trio.Event(), trio.Event()

        @event_processor
        class Mails:
            broken = True

            @on_event
            async def stepped(self, event: Stepped) -> None:
                if not self.broken:
                    began.set()
                    await proceed.wait()
                raise OSError("unreachable")

        class Exploding(Mailer):
            def handle(self, number: int) -> None:
                if number == 5:
                    exploded.set()
                    raise SystemExit(3)

        mails = Mails()
        app = app_of(store, mails, projection(Exploding)(), event_retry=ONCE)

        async def retry(id: str) -> None:
            with pytest.raises(AdmissionClosedError):
                await app.retry_failure(id)

        with pytest.RaisesGroup(HandlerExitError, flatten_subgroups=True):
            async with trio.open_nursery() as nursery, app.serving(app.runtime(signals=False)) as gateway:
                await gateway.send_and_wait(Step("a", 2))
                failure = await first_failure(app)
                mails.broken = False
                nursery.start_soon(retry, failure.id)
                await began.wait()
                await gateway.send(Step("b", 5))
                await exploded.wait()
                await wait_all_tasks_blocked()
                proceed.set()
                await trio.sleep_forever()
        (still,) = await store.failures(aggregate_id=failure.aggregate_id)
        assert (still.id, still.attempts) == (failure.id, 1)


class TestRefusals:
    async def test_an_id_that_nobody_knows(self, store: SqliteStore) -> None:
        app = app_of(store, Mailer())
        with pytest.raises(FailureNotRetryableError, match="'nobody' cannot be tried again: there is none") as caught:
            await app.retry_failure("nobody")
        assert caught.value.failure_id == "nobody"

    async def test_an_application_that_keeps_no_failures(self) -> None:
        with pytest.raises(FailureNotRetryableError, match="give the App a FailureStore"):
            await App([Chain], [Mailer()]).retry_failure("x")

    async def test_without_a_runtime_before_and_after_one(self, store: SqliteStore) -> None:
        async with failed(app_of(store, Mailer())) as failure:
            pass
        app = app_of(store, Mailer())
        with pytest.raises(FailureNotRetryableError, match=r"no function event-dispatcher/Mailer.stepped, or it was"):
            await app.retry_failure(failure.id)
        async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)):
            pass
        with pytest.raises(AdmissionClosedError):
            await app.retry_failure(failure.id)
        assert [each.id for each in await open_failures(app)] == [failure.id]

    async def test_while_the_runtime_starts(self, store: SqliteStore) -> None:
        async with failed(app_of(store, Mailer(), event_retry=ONCE)) as failure:
            pass
        asked, proceed = trio.Event(), trio.Event()

        @projection
        class CatchingUp:
            @on_event
            async def stepped(self, _: Stepped) -> None:
                asked.set()
                await proceed.wait()

        mailer = Mailer()
        app = app_of(store, mailer, CatchingUp(), event_retry=ONCE)
        async with trio.open_nursery() as nursery:
            runtime = app.runtime(signals=False, shutdown_quiet_period=0, shutdown_timeout=1)
            nursery.start_soon(runtime.serve)
            await asked.wait()
            with pytest.raises(AdmissionClosedError):
                await app.retry_failure(failure.id)
            assert mailer.called == 0
            proceed.set()
            runtime.request_stop()

    async def test_after_the_stop_was_requested(self, store: SqliteStore) -> None:
        app = app_of(store, Mailer(), event_retry=ONCE)
        runtime = app.runtime(signals=False, shutdown_quiet_period=0.2)
        async with app.serving(runtime):
            await app.gateway.send_and_wait(Step("a", 2))
            failure = await first_failure(app)
            runtime.request_stop()
            with pytest.raises(AdmissionClosedError):
                await app.retry_failure(failure.id)

    async def test_a_function_that_is_not_there_any_more(self, store: SqliteStore) -> None:
        async with failed(app_of(store, Mailer())) as failure:
            pass

        @event_processor
        class Mailer2:
            @on_event
            def stepped(self, _: Stepped) -> None:
                pass

        app = app_of(store, Mailer2())
        async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)):
            with pytest.raises(FailureNotRetryableError, match=r"no function event-dispatcher/Mailer.stepped"):
                await app.retry_failure(failure.id)

    async def test_a_function_that_does_not_handle_the_event_any_more(self, store: SqliteStore) -> None:
        async with failed(app_of(store, Mailer())) as failure:
            pass
        elsewhere = FailedExecution.of(
            OSError(),
            function=failure.function,
            aggregate_id=failure.aggregate_id,
            version=2,
            sequence=2,  # there is one event
            attempts=1,
        )
        await store.record(elsewhere)
        beyond = FailedExecution.of(
            OSError(),
            function=failure.function,
            aggregate_id=failure.aggregate_id,
            version=4,
            sequence=1,
            attempts=1,
        )
        await store.record(beyond)
        app = app_of(store, Mailer())
        async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)):
            with pytest.raises(FailureNotRetryableError, match=r"none of the functions for its event are named"):
                await app.retry_failure(elsewhere.id)
            with pytest.raises(FailureNotRetryableError, match=r"version 4 of chains.chain/a is not in the store"):
                await app.retry_failure(beyond.id)

    async def test_a_function_that_would_wait_for_itself(self, store: SqliteStore) -> None:
        @event_processor
        class Own:
            def __init__(self) -> None:
                self.app: App | None = None
                self.refused = ""

            @on_event
            async def stepped(self, event: Stepped) -> None:
                if event.number == 2:
                    raise OSError("unreachable")
                if event.number == 3:
                    assert self.app is not None
                    (failure,) = await open_failures(self.app)
                    try:
                        await self.app.retry_failure(failure.id)
                    except FailureNotRetryableError as error:
                        self.refused = str(error)

        own = Own()
        own.app = app_of(store, own)
        async with failed(own.app):
            pass
        assert own.refused.endswith("a function that handles a message would wait for itself")


class TestTurns:
    async def test_nothing_else_of_its_aggregate_is_handled_meanwhile_and_others_are(self, store: SqliteStore) -> None:
        seq, log = Sequencer(), []

        @event_processor
        class Mails:
            broken = True

            @on_event
            async def stepped(self, event: DomainEvent[Stepped]) -> None:
                at = (event.aggregate_id.id, event.body.number)
                if at == ("a", 2):
                    if self.broken:
                        raise OSError("unreachable")
                    log.append("begin")
                    async with seq(0):
                        pass
                    async with seq(2):
                        log.append("end")
                else:
                    log.append(f"{at[0]}{at[1]}")

        mails = Mails()
        app = app_of(store, mails)
        async with failed(app) as failure, trio.open_nursery() as nursery:
            mails.broken = False
            log.clear()
            nursery.start_soon(app.retry_failure, failure.id)
            async with seq(1):
                with pytest.raises(FailureNotRetryableError, match="being tried already"):
                    await app.retry_failure(failure.id)
                await app.gateway.send_and_wait(Step("a", 4))
                await app.gateway.send_and_wait(Step("b", 1))
                await wait_all_tasks_blocked(0.01)
        assert log == ["begin", "b1", "end", "a4"]

    async def test_it_has_its_turn_however_many_messages_wait(self, store: SqliteStore) -> None:
        @event_processor
        class Mails:
            broken = True

            def __init__(self) -> None:
                self.done: list[int] = []
                self.may = trio.CapacityLimiter(1)

            @on_event
            async def stepped(self, event: Stepped) -> None:
                if event.number == 2 and self.broken:
                    raise OSError("unreachable")
                async with self.may:
                    self.done.append(event.number)

        mails = Mails()
        app = app_of(store, mails, event_retry=ONCE)
        runtime = app.runtime(signals=False, shutdown_quiet_period=0)
        async with app.serving(runtime) as gateway, trio.open_nursery() as nursery:
            await gateway.send_and_wait(Step("a", 2))
            failure = await first_failure(app)
            mails.broken = False
            async with mails.may:
                for number in range(3, 9):
                    await gateway.send_and_wait(Step("a", number))
                nursery.start_soon(app.retry_failure, failure.id)
                with trio.fail_after(30):
                    while "once more" not in runtime.statistics().leases[-1].name:  # noqa: ASYNC110
                        await trio.sleep(0.01)
        assert mails.done == [3, 2, 4, 5, 6, 7, 8]

    async def test_cancelled_while_it_waits_it_passes_its_turn_on(self, store: SqliteStore) -> None:
        @event_processor
        class Mails:
            broken = True

            def __init__(self) -> None:
                self.may = trio.CapacityLimiter(1)

            @on_event
            async def stepped(self, event: Stepped) -> None:
                if event.number == 2 and self.broken:
                    raise OSError("unreachable")
                async with self.may:
                    pass

        mails = Mails()
        app = app_of(store, mails, event_retry=ONCE)
        async with failed(app) as failure:
            mails.broken = False
            for number in range(4, 20):  # the cancellation may come before the turn or after it
                async with trio.open_nursery() as nursery:
                    async with mails.may:
                        await app.gateway.send_and_wait(Step("a", number))
                        await wait_all_tasks_blocked(0.01)
                        nursery.start_soon(app.retry_failure, failure.id)
                        await wait_all_tasks_blocked(0.01)
                        nursery.cancel_scope.cancel()
            with trio.fail_after(5):
                assert await app.retry_failure(failure.id)

    async def test_one_that_outlives_its_runtime_takes_nothing_from_the_next(self) -> None:
        began, finish = trio.Event(), trio.Event()

        @event_processor
        class Mails:
            @on_event
            async def stepped(self, _: Stepped) -> None:
                with trio.CancelScope(shield=True):
                    began.set()
                    await finish.wait()

        domain, failures = Domain([Chain]), InMemoryFailureStore()
        store = InMemoryEventStore(domain.serializer)
        registry, retries = registry_of(domain, Mails()), FailureRetries(failures, store)
        dispatcher = EventDispatcher(registry, InMemoryDomainEventBus(), failures=failures, retries=retries)
        command = domain.command_message(Step("a"))
        await store.append(
            DomainEventStream(
                aggregate_id=command.aggregate_id,
                version=1,
                events=(Stepped(0),),
                command_id=command.id,
                request_id=command.request_id,
            )
        )
        failure = FailedExecution.of(
            OSError(),
            function="event-dispatcher/Mails.stepped",
            aggregate_id=command.aggregate_id,
            version=1,
            sequence=1,
            attempts=1,
        )
        await failures.record(failure)

        async def retry() -> None:
            with pytest.raises(ExecutorClosedError):
                await retries.retry(failure.id)

        async with trio.open_nursery() as nursery:
            runtime = Runtime([dispatcher], signals=False, shutdown_quiet_period=0)
            with pytest.RaisesGroup(ShutdownDeadlineError):
                async with trio.open_nursery() as serving:
                    await serving.start(runtime.serve)
                    nursery.start_soon(retry)
                    await began.wait()
                    runtime.force_stop()
            runtime = Runtime([dispatcher], signals=False, shutdown_quiet_period=0)
            await nursery.start(runtime.serve)
            finish.set()
            await wait_all_tasks_blocked()
            assert await retries.retry(failure.id)
            runtime.request_stop()

    async def test_a_stop_waits_for_it_and_says_so(self, store: SqliteStore) -> None:
        mails, results = Mails(), []
        app = app_of(store, mails)
        runtime = app.runtime(signals=False, shutdown_quiet_period=0)

        async def retry(id: str) -> None:
            results.append(await app.retry_failure(id))

        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.serve)
            for number in (1, 2):
                await app.gateway.send_and_wait(Step("a", number))
            failure = await first_failure(app)
            mails.broken = False
            nursery.start_soon(retry, failure.id)
            await mails.began.wait()
            runtime.request_stop()
            await wait_all_tasks_blocked()
            names = [lease.name for lease in runtime.statistics().leases]
            assert names == [f"failure {failure.id} of event-dispatcher/Mails.stepped once more"]
            mails.finish.set()
        assert results == [True]
        assert await open_failures(app) == []

    async def test_after_a_failure_the_store_is_closed_when_it_has_ended(self, tmp_path: Path) -> None:
        log: list[str] = []

        class Logging(SqliteStore):
            async def resolve_failure(self, id: str, /) -> bool:
                log.append("resolved")
                return await super().resolve_failure(id)

            async def stop(self) -> None:
                log.append("closed")
                await super().stop()

        mails = Mails()
        async with Logging(tmp_path / "chains.db", Domain([Chain, Notebook]).serializer) as store:
            app = app_of(store, mails, event_retry=ONCE)
            with pytest.RaisesGroup(HandlerExitError, flatten_subgroups=True):
                async with trio.open_nursery() as nursery, app.serving(app.runtime(signals=False)) as gateway:
                    await gateway.send_and_wait(Step("a", 2))
                    failure = await first_failure(app)
                    mails.broken = False
                    nursery.start_soon(app.retry_failure, failure.id)
                    await mails.began.wait()
                    await gateway.send_and_wait(Step("b", 5))
                    await wait_all_tasks_blocked(0.05)
                    mails.finish.set()
                    await trio.sleep_forever()
            assert log == ["resolved", "closed"]

    async def test_a_forced_stop_ends_it_and_it_stays_open(self, store: SqliteStore) -> None:
        mails = Mails()
        app = app_of(store, mails)
        runtime = app.runtime(signals=False, shutdown_quiet_period=0)

        async def retry(id: str) -> None:
            with pytest.raises(ExecutorClosedError):
                await app.retry_failure(id)

        async with trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[Runtime]) -> None:
                with pytest.raises(ShutdownDeadlineError):
                    await runtime.serve(task_status=task_status)

            await nursery.start(serve)
            for number in (1, 2):
                await app.gateway.send_and_wait(Step("a", number))
            failure = await first_failure(app)
            mails.broken = False
            nursery.start_soon(retry, failure.id)
            await mails.began.wait()
            runtime.force_stop()
        assert [each.id for each in await open_failures(app)] == [failure.id]


class Narrow(InMemoryDomainEventBus):
    """Takes no stream as long as it is told so, or takes for ever."""

    narrow = True
    slow = False

    async def send(self, message: DomainEventStream, /) -> None:
        if self.slow:
            await trio.sleep_forever()
        if self.narrow:
            raise SerializationError("too large for this bus")
        await super().send(message)


class Publishing:
    """A runtime that cannot publish."""

    def __init__(self) -> None:
        self.events, self.failures = Narrow(), InMemoryFailureStore()
        domain, commands = Domain([Chain]), InMemoryCommandBus()
        store = InMemoryEventStore(domain.serializer)
        self.retries = FailureRetries(self.failures, store)
        self.gateway = CommandGateway(domain, commands)
        dispatcher = CommandDispatcher(
            domain,
            commands,
            store,
            self.events,
            results=self.gateway.results,
            failures=self.failures,
            retries=self.retries,
        )
        self.runtime = Runtime([dispatcher, self.gateway], signals=False, shutdown_quiet_period=0)


class TestPublications:
    async def test_one_that_can_never_succeed_is_parked_and_the_command_ends(self, mock_clock: MockClock) -> None:
        it = Publishing()
        async with trio.open_nursery() as nursery:
            await nursery.start(it.runtime.serve)
            assert (await it.gateway.send_and_wait(Step("a"))).version == 1
            (failure,) = await it.failures.failures()
            assert failure.function == "command-dispatcher/publication"
            assert (failure.version, failure.sequence, failure.error) == (1, 0, "SerializationError")
            assert failure.attempts == 1
            assert not await it.retries.retry(failure.id)
            assert [each.attempts for each in await it.failures.failures()] == [2]
            it.events.narrow = False
            assert await it.retries.retry(failure.id)
            assert await it.failures.failures() == []
            it.runtime.request_stop()

    async def test_a_forced_stop_ends_the_retry_of_one(self) -> None:
        it = Publishing()

        async def serve(task_status: trio.TaskStatus[Runtime]) -> None:
            with pytest.raises(ShutdownDeadlineError):
                await it.runtime.serve(task_status=task_status)

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                await nursery.start(serve)
                await it.gateway.send_and_wait(Step("a"))
                (failure,) = await it.failures.failures()
                it.events.slow = True

                async def retry() -> None:
                    with pytest.raises(ExecutorClosedError):
                        await it.retries.retry(failure.id)

                nursery.start_soon(retry)
                await wait_all_tasks_blocked()
                it.runtime.force_stop()
        assert [each.id for each in await it.failures.failures()] == [failure.id]
