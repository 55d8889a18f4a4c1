"""Commands: load, decide, apply, append, publish, acknowledge, report."""

import logging
from inspect import isawaitable
from typing import Any

from trio_wow.buses import CommandBus, DomainEventBus, StateEventBus
from trio_wow.dispatch._dispatcher import MessageDispatcher
from trio_wow.dispatch._results import CommandResults
from trio_wow.domain import Domain
from trio_wow.errors import (
    AdmissionClosedError,
    AppendOutcomeUnknownError,
    CommandRejectedError,
    DuplicateRequestIdError,
    StoreError,
    TenantMismatchError,
)
from trio_wow.eventsourcing import AggregateRepository, EventStore
from trio_wow.execution import no_leaked_scope
from trio_wow.messages import CommandError, CommandMessage, CommandResult, DomainEventStream, Stage, StateEvent

__all__ = ["CommandDispatcher"]

_log = logging.getLogger("trio_wow.dispatch")


class CommandDispatcher(MessageDispatcher[CommandMessage]):
    """Handles the commands of a domain's aggregates.

    For each command: load the aggregate, let it decide, apply the events, append them, publish them, publish the state
    after them, acknowledge, report `PROCESSED`. When applying fails nothing is stored; when appending fails nothing is
    published. What fails up to the append is the command's result, not the dispatcher's failure, and the command is
    acknowledged. A request that is stored already is not decided again: its stored events are published again, and the
    result is a `DuplicateRequestIdError` with their version. A command that yields no event stores nothing and is not
    remembered. A state event that cannot be published is logged; a processor with a checkpoint misses nothing by it.

    Args:
        domain: the aggregates.
        bus: where commands come from.
        store: where events are kept.
        events: where stored events are published.
        state_events: where the states after them are published; `None` when nobody wants them.
        repository: loads the aggregates; by default one without snapshots.
        results: is told how each command ends.
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
        results: CommandResults | None = None,
        name: str = "command-dispatcher",
    ) -> None:
        super().__init__(name, bus, domain.aggregates)
        self._store = store
        self._repository = repository if repository is not None else AggregateRepository(domain, store)
        self._events = events
        self._state_events = state_events
        self._results = results

    async def handle(self, message: CommandMessage) -> bool:
        """See the class."""
        stream: DomainEventStream | None = None
        state: StateEvent[Any] | None = None
        error: Exception | None = None
        try:
            stream = await self._stored(message)
            if stream is None:
                try:
                    state = await self._decide_and_append(message)
                    stream = None if state is None else state.stream
                except DuplicateRequestIdError as raised:  # another process has stored it meanwhile
                    stream, error = await self._stored(message), raised
            else:
                error = DuplicateRequestIdError(message.aggregate_id, message.request_id, stream.version)
        except Exception as raised:
            _log_failure(message, raised)
            stream, error = None, raised
        if stream is not None and not await self._publish(stream):
            return False
        if state is not None and self._state_events is not None:
            await self._publish_state(state, self._state_events)
        if self._results is not None:
            self._results.processed(
                CommandResult(
                    command_id=message.id,
                    request_id=message.request_id,
                    aggregate_id=message.aggregate_id,
                    stage=Stage.PROCESSED,
                    version=None if stream is None else stream.version,
                    error=None if error is None else CommandError.of(error),
                )
            )
        return True

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

    async def _decide_and_append(self, message: CommandMessage) -> StateEvent[Any] | None:
        """Return what is now stored and is to be published, or `None` if the command has led to nothing."""
        aggregate = await self._repository.load(message.aggregate_id)
        decided = aggregate.model.decide(aggregate.state, message.body)
        if isawaitable(decided):
            with no_leaked_scope(getattr(decided, "__qualname__", repr(decided)), message.aggregate_id):
                decided = await decided
        events = aggregate.model.events_of(message.body, decided)
        if not events:
            return None
        stream = aggregate.advance(message, events)
        try:
            await self._store.append(stream)
        except AppendOutcomeUnknownError:
            stored = await self._stored(message)
            if stored is None or stored.id != stream.id:
                raise
        return StateEvent(stream, aggregate.state)

    async def _publish(self, stream: DomainEventStream) -> bool:
        try:
            if not self._is_ending():
                await self._events.send(stream)
                return True
        except AdmissionClosedError:
            pass
        _log.warning(
            "version %s of %s is stored but not published, and its command not acknowledged: the runtime is ending",
            stream.version,
            stream.aggregate_id,
        )
        return False

    async def _publish_state(self, state: StateEvent[Any], bus: StateEventBus) -> None:
        try:
            await bus.send(state)
        except Exception:
            _log.warning(
                "the state of %s at version %s is not published", state.aggregate_id, state.version, exc_info=True
            )


def _log_failure(message: CommandMessage, error: Exception) -> None:
    name = type(message.body).__name__
    if isinstance(error, CommandRejectedError):
        _log.debug("%s for %s was refused: %s", name, message.aggregate_id, error)
    elif isinstance(error, StoreError):  # no fault of the program, and the same for many commands
        _log.warning("%s for %s failed: %s", name, message.aggregate_id, error)
    else:
        _log.warning("%s for %s failed", name, message.aggregate_id, exc_info=error)
