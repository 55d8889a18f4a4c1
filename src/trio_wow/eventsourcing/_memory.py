"""Stores in memory."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial

from attrs import define, field

from trio_wow.errors import DuplicateRequestIdError, VersionConflictError
from trio_wow.eventsourcing._store import RecordedStream, Snapshot
from trio_wow.messages import AggregateId, DomainEventStream, Serializer
from trio_wow.runtime import checkpoint_in_turn

__all__ = ["InMemoryEventStore", "InMemorySnapshotStore"]


@define
class _History:
    """One aggregate's streams, as stored: `streams[n]` is version n + 1, and `positions[n]` its position."""

    streams: list[bytes] = field(factory=list)
    positions: list[int] = field(factory=list)
    versions: dict[str, int] = field(factory=dict)


class InMemoryEventStore:
    """An `EventStore` that ends with the process.

    It keeps the serialized form, so that what another store could not keep fails here already, and no two readers
    share an object.
    """

    def __init__(self, serializer: Serializer) -> None:
        self._serializer = serializer
        self._histories: dict[AggregateId, _History] = {}
        self._all: list[tuple[AggregateId, int]] = []

    async def append(self, stream: DomainEventStream) -> None:
        """See `EventStore.append`."""
        await checkpoint_in_turn()
        aggregate_id = stream.aggregate_id
        history = self._histories.get(aggregate_id) or _History()
        stored = history.versions.get(stream.request_id)
        if stored is not None:
            raise DuplicateRequestIdError(aggregate_id, stream.request_id, stored)
        if stream.version != len(history.streams) + 1:
            raise VersionConflictError(aggregate_id, stream.version - 1, len(history.streams))
        data = self._serializer.dump_stream(stream)
        history.streams.append(data)
        history.versions[stream.request_id] = stream.version
        self._histories[aggregate_id] = history
        self._all.append((aggregate_id, stream.version))
        history.positions.append(len(self._all))

    async def load(
        self, aggregate_id: AggregateId, *, after: int = 0, until: int | None = None
    ) -> Sequence[DomainEventStream]:
        """See `EventStore.load`."""
        await checkpoint_in_turn()
        history = self._histories.get(aggregate_id)
        if history is None:
            return []
        last = len(history.streams) if until is None else min(until, len(history.streams))
        return [self._read(aggregate_id, version) for version in range(max(after, 0) + 1, last + 1)]

    async def load_request(self, aggregate_id: AggregateId, request_id: str) -> DomainEventStream | None:
        """See `EventStore.load_request`."""
        await checkpoint_in_turn()
        history = self._histories.get(aggregate_id)
        if history is None or (version := history.versions.get(request_id)) is None:
            return None
        return self._read(aggregate_id, version)

    async def read_all(self, after: int, limit: int) -> Sequence[RecordedStream]:
        """See `EventStore.read_all`."""
        await checkpoint_in_turn()
        after = max(after, 0)
        page = self._all[after : after + limit]
        return [
            RecordedStream(position, aggregate_id, version, partial(self._read, aggregate_id, version))
            for position, (aggregate_id, version) in enumerate(page, after + 1)
        ]

    async def version_at(self, aggregate_id: AggregateId, position: int) -> int:
        """See `EventStore.version_at`."""
        await checkpoint_in_turn()
        history = self._histories.get(aggregate_id)
        return 0 if history is None else bisect_right(history.positions, position)

    def _read(self, aggregate_id: AggregateId, version: int) -> DomainEventStream:
        data = self._histories[aggregate_id].streams[version - 1]
        return self._serializer.load_stream(data, f"version {version} of {aggregate_id} in the memory store")


class InMemorySnapshotStore:
    """A `SnapshotStore` that ends with the process."""

    def __init__(self) -> None:
        self._snapshots: dict[AggregateId, Snapshot] = {}

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        """See `SnapshotStore.save_snapshot`."""
        await checkpoint_in_turn()
        kept = self._snapshots.get(snapshot.aggregate_id)
        if kept is None or kept.version < snapshot.version:
            self._snapshots[snapshot.aggregate_id] = snapshot

    async def load_snapshot(self, aggregate_id: AggregateId) -> Snapshot | None:
        """See `SnapshotStore.load_snapshot`."""
        await checkpoint_in_turn()
        return self._snapshots.get(aggregate_id)

    async def discard_snapshot(self, snapshot: Snapshot) -> None:
        """See `SnapshotStore.discard_snapshot`."""
        await checkpoint_in_turn()
        if self._snapshots.get(snapshot.aggregate_id) == snapshot:
            del self._snapshots[snapshot.aggregate_id]
