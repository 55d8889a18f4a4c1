"""Loading aggregates, deciding, and making streams of what was decided."""

from typing import Any

from attrs import define

from trio_wow.domain import AggregateModel, Domain
from trio_wow.errors import AggregateNotReadableError, TenantMismatchError
from trio_wow.eventsourcing._store import EventStore
from trio_wow.messages import AggregateId, CommandMessage, DomainEventStream, Serializer

__all__ = ["AggregateRepository", "LoadedAggregate"]


@define
class LoadedAggregate:
    """One aggregate's state in memory, for one command: thrown away whatever comes of it.

    Attributes:
        id: the aggregate.
        model: what it can do.
        state: an instance of the aggregate's class.
        version: of the last stream applied; 0 when nothing has happened yet.
        serializer: the application's.
    """

    id: AggregateId
    model: AggregateModel
    state: Any
    version: int
    serializer: Serializer

    def advance(self, command: CommandMessage, events: tuple[object, ...]) -> DomainEventStream:
        """Apply what was decided, and return it as the aggregate's next stream.

        Raises:
            UnsourcedEventError: the aggregate cannot source one of the events.
            SerializationError: one would not come back from a store as it is.
            Exception: what a sourcing function raised. The state is then of no use any more.
        """
        for event in events:
            self.model.check_sourced(event)
            # A copy, as it will be loaded: what the state makes of it must not change what is stored.
            self.model.apply(self.state, self.serializer.copy(event))
        self.version += 1
        return DomainEventStream(
            aggregate_id=self.id,
            version=self.version,
            events=events,
            command_id=command.id,
            request_id=command.request_id,
            headers=command.headers,
        )


class AggregateRepository:
    """Rebuilds aggregates from their events."""

    def __init__(self, domain: Domain, store: EventStore) -> None:
        self._domain = domain
        self._store = store

    async def load(self, aggregate_id: AggregateId) -> LoadedAggregate:
        """Return an aggregate's present state; a new one if nothing has happened to it.

        Raises:
            TenantMismatchError: it belongs to another tenant than `aggregate_id` names.
            AggregateNotReadableError: a stored event cannot be applied any more.
            SerializationError: a stored event cannot be read any more.
        """
        model = self._domain.model_of(aggregate_id)
        loaded = LoadedAggregate(aggregate_id, model, model.new_state(aggregate_id.id), 0, self._domain.serializer)
        for stream in await self._store.load(aggregate_id):
            if stream.aggregate_id.tenant != aggregate_id.tenant:
                raise TenantMismatchError(aggregate_id, aggregate_id.tenant)
            try:
                for event in stream.events:
                    model.apply(loaded.state, event)
            except Exception as error:
                raise AggregateNotReadableError(aggregate_id, stream.version, error) from error
            loaded.version = stream.version
        return loaded
