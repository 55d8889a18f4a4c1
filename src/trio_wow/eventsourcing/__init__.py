"""Event sourcing: the store's contract, the memory store, and loading aggregates from events."""

from trio_wow.eventsourcing._memory import InMemoryEventStore as InMemoryEventStore
from trio_wow.eventsourcing._repository import AggregateRepository as AggregateRepository
from trio_wow.eventsourcing._repository import LoadedAggregate as LoadedAggregate
from trio_wow.eventsourcing._store import EventStore as EventStore
from trio_wow.eventsourcing._store import RecordedStream as RecordedStream

__all__ = ["AggregateRepository", "EventStore", "InMemoryEventStore", "LoadedAggregate", "RecordedStream"]
