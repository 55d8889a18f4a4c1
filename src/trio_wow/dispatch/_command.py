"""Commands: load, decide, apply, append, publish, acknowledge, report."""

import logging
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from typing import Any, cast

from attrs import define

from trio_wow.buses import CommandBus, DomainEventBus, StateEventBus
from trio_wow.dispatch._dispatcher import MessageDispatcher
from trio_wow.dispatch._failures import FailureRetries, record
from trio_wow.dispatch._filters import FilterChain, Handling, Outcome, Retry, StageNotifier, leaves
from trio_wow.dispatch._registry import FunctionRegistry
from trio_wow.dispatch._results import CommandResults
from trio_wow.dispatch._scheduling import GroupedScheduling
from trio_wow.dispatch._waits import handles
from trio_wow.domain import CommandFunction, Domain, Reply
from trio_wow.errors import (
    AdmissionClosedError,
    AggregateDeletedError,
    AggregateExistsError,
    AggregateNotDeletedError,
    AggregateNotFoundError,
    AppendOutcomeUnknownError,
    CommandRejectedError,
    DuplicateRequestIdError,
    ExpectedVersionError,
    StoreError,
    TenantMismatchError,
    VersionConflictError,
    printable,
)
from trio_wow.eventsourcing import (
    AggregateRepository,
    EventStore,
    FailedExecution,
    FailureRecorder,
    LoggingFailureRecorder,
)
from trio_wow.execution import user_call
from trio_wow.messages import CommandError, CommandMessage, CommandResult, DomainEventStream, Stage, StateEvent
from trio_wow.runtime import RuntimeContext

__all__ = ["CommandDispatcher", "conflict_retry"]

_log = logging.getLogger("trio_wow.dispatch")


@define(eq=False)
class _Deciding(Handling):
    """One command on its way through the function filters.

    Attributes:
        value: what the command function returned for the caller.
    """

    value: object = None


class CommandDispatcher(MessageDispatcher[CommandMessage]):
    """Handles the commands of a domain's aggregates.

    For each command: load the aggregate, let it decide, apply the events, append them, publish them, publish the state
    after them, acknowledge, report `PROCESSED`. When applying fails nothing is stored; when appending fails nothing is
    published. When another writer was first, all of it is tried again from a fresh load, while only this aggregate
    waits. What fails up to the append is the command's result, not the dispatcher's failure, and the command is
    acknowledged; the aggregate's `@on_error` functions are told. A request that is stored already is not decided again:
    its stored events are published again, and the result is a `DuplicateRequestIdError` with their version, unless they
    came of this very message, delivered once more. A command that yields no event stores nothing and is not remembered.

    A publication that fails is tried again alone, until it succeeds or the runtime ends. One that can never succeed
    goes to the failure recorder, as a failure of `command-dispatcher/publication`; unless that fails too, the command
    is acknowledged: the events stay in the store, where a processor with a checkpoint finds them. A state event that
    cannot be published is logged; a processor with a checkpoint misses nothing by it.

    Args:
        domain: the aggregates.
        bus: where commands come from.
        store: where events are kept.
        events: where stored events are published.
        state_events: where the states after them are published; `None` when nobody wants them.
        repository: loads the aggregates; by default one without snapshots.
        registry: knows what functions take besides their commands; by default one without services.
        results: is told how each command ends.
        filters: around each command as a whole; by default a `StageNotifier` for `results`.
        function_filters: around each attempt to decide and append; by default a `Retry` of version conflicts.
        failures: is told of publications that can never succeed; by default a `LoggingFailureRecorder`.
        retries: tries those again, when it is told to.
        scheduling: in groups of aggregate IDs, where a command that is tried again delays all of its group; `None` for
            keyed execution, in a mailbox for each ID.
        name: the component and its consumer group.
    """

    def __init__(
        self,
        domain: Domain,
        bus: CommandBus,
        store: EventStore,
        events: DomainEventBus,
        *,
        state_events: StateEventBus | None = None,
        repository: AggregateRepository | None = None,
        registry: FunctionRegistry | None = None,
        results: CommandResults | None = None,
        filters: FilterChain | None = None,
        function_filters: FilterChain | None = None,
        failures: FailureRecorder | None = None,
        retries: FailureRetries | None = None,
        scheduling: GroupedScheduling | None = None,
        name: str = "command-dispatcher",
    ) -> None:
        if filters is None:
            filters = FilterChain([StageNotifier(results)] if results is not None else [])
        super().__init__(name, bus, domain.aggregates, filters, scheduling)
        self.function_filters = function_filters if function_filters is not None else FilterChain([conflict_retry()])
        self._store = store
        self._repository = repository if repository is not None else AggregateRepository(domain, store)
        self._registry = registry if registry is not None else FunctionRegistry(domain)
        self._events = events
        self._state_events = state_events
        self._results = results
        self._failures = failures if failures is not None else LoggingFailureRecorder()
        self._publication = f"{name}/publication"
        self._retries = retries
        self._attempt = self.function_filters.around(self._decide_and_append)
        self._until_published = Retry(retries=None, backoff=0.1)

    async def prepare(self, context: RuntimeContext, /) -> None:
        """See `RuntimeComponent.prepare`.

        Raises:
            ConfigurationError: functions do not fit; see `FunctionRegistry.seal`.
        """
        self._registry.seal()
        if self._retries is not None:
            self._retries.add([self._publication], self)
        await super().prepare(context)

    def wants(self, message: CommandMessage, /) -> bool:
        """See `MessageDispatcher.wants`."""
        return not message.is_void

    async def handle(self, handling: Handling, /) -> bool:
        """See the class."""
        message: CommandMessage = handling.message
        if message.is_void:
            return True
        handles(message)
        stream: DomainEventStream | None = None
        error: Exception | None = None
        deciding = _Deciding(self.name, message)
        taken_elsewhere = handling.exchange is not None and handling.exchange.taken_elsewhere
        try:
            stream = await self._stored(message)
            if stream is not None and taken_elsewhere:
                return True  # who took it publishes it, and tells who waits
            if stream is None:
                function = self._repository.model_of(message.aggregate_id).command_function(type(message.body))
                deciding.function = function.name
                try:
                    await self._attempt(deciding)
                except DuplicateRequestIdError as raised:  # another process has stored it meanwhile
                    stream, error = await self._stored(message), raised
                    if taken_elsewhere:
                        return True
            else:
                error = DuplicateRequestIdError(message.aggregate_id, message.request_id, stream.version)
            if error is not None and stream is not None and stream.command_id == message.id:
                error = None  # no other command, but another delivery of this one
        except Exception as raised:
            _log_failure(message, raised)
            await self._tell(message, raised)
            stream, error = None, raised
        state = deciding.stored
        if state is not None:  # whatever a filter has returned or raised since
            stream = state.stream
        if stream is not None and await self._published(stream) in (Outcome.RECORDING_FAILED, Outcome.UNFINISHED):
            return False
        if state is not None and self._state_events is not None:
            await self._publish_state(state, self._state_events)
        handling.outcome = Outcome.HANDLED
        if state is None and stream is not None and error is None:
            state = await self._led_to(stream)
        handling.stored = state
        handling.result = CommandResult(
            command_id=message.id,
            request_id=message.request_id,
            aggregate_id=message.aggregate_id,
            stage=Stage.PROCESSED,
            version=None if stream is None else stream.version,
            error=None if error is None else CommandError.of(error),
            value=deciding.value if error is None else None,
        )
        return True

    async def stop(self) -> None:
        """See `RuntimeComponent.stop`. It stops after all that tell of later stages, so nobody need wait any more."""
        await super().stop()
        if self._results is not None:
            self._results.abandon_all()

    async def try_again(self, _: FailedExecution, stream: DomainEventStream, /) -> Outcome:
        """See `MessageDispatcher.try_again`. Commands of the aggregate are handled meanwhile."""
        return await self._run_like_message(stream.aggregate_id, partial(self._published, stream))

    def unfinished(self, message: CommandMessage, /) -> None:
        """See `MessageDispatcher.unfinished`. Whoever waits for the command need not wait any more."""
        if self._results is not None:
            self._results.abandoned(message.id)

    async def _stored(self, message: CommandMessage) -> DomainEventStream | None:
        """Return what the command's request has led to before."""
        stream = await self._store.load_request(message.aggregate_id, message.request_id)
        if stream is not None and stream.aggregate_id.tenant != message.aggregate_id.tenant:
            raise TenantMismatchError(message.aggregate_id, message.aggregate_id.tenant)
        return stream

    async def _led_to(self, stream: DomainEventStream) -> StateEvent[Any] | None:
        """Return what another delivery of a command has led to: its events are published here once more."""
        try:
            loaded = await self._repository.load(stream.aggregate_id, version=stream.version)
        except Exception:
            _log.warning("the state after %s cannot be loaded", stream, exc_info=True)
            return None
        return StateEvent(stream, loaded.state, loaded.deleted)

    async def _decide_and_append(self, handling: Handling) -> None:
        handling.attempts += 1
        deciding = cast("_Deciding", handling)
        message: CommandMessage = handling.message
        aggregate = await self._repository.load_to_decide(message.aggregate_id)
        function = aggregate.model.command_function(type(message.body))
        aggregate.model.check_life(message.body, message.aggregate_id, aggregate.version, deleted=aggregate.deleted)
        _check_version(message, aggregate.version)
        decided = await self._call(function, message, aggregate.state_to_read(), message.body)
        events = aggregate.model.events_of(message.body, decided)
        deciding.value = aggregate.serializer.plain(decided.value) if isinstance(decided, Reply) else None
        if not events:
            return
        stream = aggregate.advance(message, events)
        try:
            await self._store.append(stream)
        except AppendOutcomeUnknownError:
            stored = None
            with suppress(Exception):  # it stays unknown: the error of this would say that nothing was written
                stored = await self._stored(message)
            if stored is None or stored.id != stream.id:
                raise
        except VersionConflictError:
            self._repository.forget(message.aggregate_id)
            raise
        self._repository.keep(aggregate)
        deciding.stored = StateEvent(stream, aggregate.state, aggregate.deleted)

    async def _tell(self, message: CommandMessage, error: Exception) -> None:
        """Tell the aggregate, as it is stored, of a command that has failed."""
        functions = self._repository.model_of(message.aggregate_id).error_functions(type(message.body), error)
        for function in functions:
            try:
                aggregate = await self._repository.load(message.aggregate_id)
            except Exception as raised:
                _log.warning(
                    "%s is not told, as %s cannot be loaded: %s",
                    function.name,
                    message.aggregate_id,
                    printable(raised),
                )
                return
            try:
                await self._call(function, message, aggregate.state, error, message.body)
            except Exception:
                _log.exception("%s failed for %s", function.name, message.aggregate_id)

    async def _call(self, function: CommandFunction, message: CommandMessage, *leading: object) -> object:
        profile, arguments = self._registry.command_profile(function), self._registry.command_arguments(function)
        with user_call(function.name, message.aggregate_id):
            result = await self._prepared().executor.call(profile, function.call, *leading, **arguments.of(message))
            return await result if isawaitable(result) else result

    async def _published(self, stream: DomainEventStream) -> Outcome:
        handling = Handling(self.name, stream)
        try:
            await self._until_published(handling, self._publish)
        except AdmissionClosedError:
            _log.warning(
                "version %s of %s is stored but not published, and its command not acknowledged: the runtime is ending",
                stream.version,
                stream.aggregate_id,
            )
            return Outcome.UNFINISHED
        except Exception as error:
            failure = FailedExecution.of(
                error,
                function=self._publication,
                aggregate_id=stream.aggregate_id,
                version=stream.version,
                sequence=0,
                attempts=handling.attempts,
            )
            return await record(self._failures, failure)
        return Outcome.HANDLED

    async def _publish(self, handling: Handling) -> None:
        handling.attempts += 1
        if self._is_ending():
            raise AdmissionClosedError(self.name)
        await self._events.send(handling.message)

    async def _publish_state(self, state: StateEvent[Any], bus: StateEventBus) -> None:
        try:
            await bus.send(state)
        except Exception:
            _log.warning(
                "the state of %s at version %s is not published", state.aggregate_id, state.version, exc_info=True
            )


def conflict_retry() -> Retry:
    """Return the filter that tries again when another writer was first: up to nine times, in about three seconds."""
    return Retry(_is_conflict, retries=9, backoff=0.02, max_backoff=0.5, jitter=0.02)


def _is_conflict(error: BaseException) -> bool:
    return all(isinstance(leaf, VersionConflictError) for leaf in leaves(error))


def _check_version(message: CommandMessage, version: int) -> None:
    if message.expected_version is not None and message.expected_version != version:
        raise ExpectedVersionError(message.aggregate_id, message.expected_version, version)


_REFUSALS = (
    CommandRejectedError,
    AggregateDeletedError,
    AggregateExistsError,
    AggregateNotDeletedError,
    AggregateNotFoundError,
    ExpectedVersionError,
)


def _log_failure(message: CommandMessage, error: Exception) -> None:
    name = type(message.body).__name__
    if isinstance(error, _REFUSALS):
        _log.debug("%s for %s was refused: %s", name, message.aggregate_id, error)
    elif isinstance(error, StoreError | VersionConflictError):  # no fault of the program
        _log.warning("%s for %s failed: %s", name, message.aggregate_id, error)
    else:
        _log.warning("%s for %s failed", name, message.aggregate_id, exc_info=error)
