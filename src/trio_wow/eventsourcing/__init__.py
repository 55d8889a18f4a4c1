"""Event sourcing: stores and their contracts, failed executions, loading aggregates from snapshots and events."""

from trio_wow.eventsourcing._failures import FailedExecution as FailedExecution
from trio_wow.eventsourcing._failures import FailureRecorder as FailureRecorder
from trio_wow.eventsourcing._failures import FailureStore as FailureStore
from trio_wow.eventsourcing._failures import InMemoryFailureStore as InMemoryFailureStore
from trio_wow.eventsourcing._failures import LoggingFailureRecorder as LoggingFailureRecorder
from trio_wow.eventsourcing._failures import Recording as Recording
from trio_wow.eventsourcing._failures import storable_text as storable_text
from trio_wow.eventsourcing._memory import InMemoryEventStore as InMemoryEventStore
from trio_wow.eventsourcing._memory import InMemorySnapshotStore as InMemorySnapshotStore
from trio_wow.eventsourcing._repository import AggregateRepository as AggregateRepository
from trio_wow.eventsourcing._repository import LoadedAggregate as LoadedAggregate
from trio_wow.eventsourcing._store import CheckpointStore as CheckpointStore
from trio_wow.eventsourcing._store import EventStore as EventStore
from trio_wow.eventsourcing._store import RecordedStream as RecordedStream
from trio_wow.eventsourcing._store import Snapshot as Snapshot
from trio_wow.eventsourcing._store import SnapshotStore as SnapshotStore

__all__ = [
    "AggregateRepository",
    "CheckpointStore",
    "EventStore",
    "FailedExecution",
    "FailureRecorder",
    "FailureStore",
    "InMemoryEventStore",
    "InMemoryFailureStore",
    "InMemorySnapshotStore",
    "LoadedAggregate",
    "LoggingFailureRecorder",
    "RecordedStream",
    "Recording",
    "Snapshot",
    "SnapshotStore",
    "storable_text",
]
