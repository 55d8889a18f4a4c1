"""Commands: load, decide, apply, append, publish, acknowledge, report."""

import logging
from inspect import isawaitable
from typing import Protocol

from trio_wow.buses import CommandBus, DomainEventBus
from trio_wow.dispatch._dispatcher import MessageDispatcher
from trio_wow.domain import Domain
from trio_wow.errors import AdmissionClosedError, CommandRejectedError, DuplicateRequestIdError
from trio_wow.eventsourcing import AggregateRepository, EventStore
from trio_wow.execution import no_leaked_scope
from trio_wow.messages import CommandError, CommandMessage, CommandResult, DomainEventStream, Stage

__all__ = ["CommandDispatcher", "ResultSink"]

_log = logging.getLogger("trio_wow.dispatch")


class ResultSink(Protocol):
    """Is told how commands end. A `CommandGateway` is one."""

    def processed(self, result: CommandResult, /) -> None:
        """Take note of a result of stage `PROCESSED`. Plain, quick, and never raises: it changes no outcome."""
        ...


class CommandDispatcher(MessageDispatcher[CommandMessage]):
    """Handles the commands of a domain's aggregates.

    For each command: load the aggregate, let it decide, apply the events, append them, publish them, acknowledge,
    report `PROCESSED`. When applying fails nothing is stored; when appending fails nothing is published. What fails up
    to the append is the command's result, not the dispatcher's failure, and the command is acknowledged. A request
    that is stored already is not decided again: its stored events are published again, and the result is a
    `DuplicateRequestIdError` with their version. A command that yields no event stores nothing and is not remembered.

    Args:
        domain: the aggregates.
        bus: where commands come from.
        store: where events are kept.
        events: where stored events are published.
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
        results: ResultSink | None = None,
        name: str = "command-dispatcher",
    ) -> None:
        super().__init__(name, bus, domain.aggregates)
        self._store = store
        self._repository = AggregateRepository(domain, store)
        self._events = events
        self._results = results

    async def handle(self, message: CommandMessage) -> bool:
        """See the class."""
        error: Exception | None = None
        try:
            stream, error = await self._decide_and_append(message)
        except Exception as raised:
            _log_failure(message, raised)
            stream, error = None, raised
        if stream is not None and not await self._publish(stream):
            return False
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

    async def _decide_and_append(self, message: CommandMessage) -> tuple[DomainEventStream | None, Exception | None]:
        """Return the stream to publish, if any, and the error to report beside it, if any."""
        aggregate = await self._repository.load(message.aggregate_id)
        stored = await self._store.load_request(message.aggregate_id, message.request_id)
        if stored is not None:
            return stored, DuplicateRequestIdError(message.aggregate_id, message.request_id, stored.version)
        decided = aggregate.model.decide(aggregate.state, message.body)
        if isawaitable(decided):
            with no_leaked_scope(getattr(decided, "__qualname__", repr(decided)), message.aggregate_id):
                decided = await decided
        events = aggregate.model.events_of(message.body, decided)
        if not events:
            return None, None
        stream = aggregate.advance(message, events)
        await self._store.append(stream)
        return stream, None

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


def _log_failure(message: CommandMessage, error: Exception) -> None:
    name = type(message.body).__name__
    if isinstance(error, CommandRejectedError):
        _log.debug("%s for %s was refused: %s", name, message.aggregate_id, error)
    else:
        _log.warning("%s for %s failed", name, message.aggregate_id, exc_info=error)
