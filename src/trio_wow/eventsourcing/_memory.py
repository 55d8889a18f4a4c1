"""An event store in memory."""

from collections.abc import Sequence

import trio
from attrs import define, field

from trio_wow.errors import DuplicateRequestIdError, VersionConflictError
from trio_wow.eventsourcing._store import RecordedStream
from trio_wow.messages import AggregateId, DomainEventStream, Serializer

__all__ = ["InMemoryEventStore"]


@define
class _History:
    """One aggregate's streams, as stored: `streams[n]` is version n + 1."""

    streams: list[bytes] = field(factory=list)
    versions: dict[str, int] = field(factory=dict)


class InMemoryEventStore:
    """An `EventStore` that ends with the process.

    It keeps the serialized form, so that what another store could not keep fails here already, and no two readers
    share an object.
    """

    def __init__(self, serializer: Serializer) -> None:
        self._serializer = serializer
        self._histories: dict[AggregateId, _History] = {}
        self._all: list[bytes] = []

    async def append(self, stream: DomainEventStream) -> None:
        """See `EventStore.append`."""
        await trio.lowlevel.checkpoint()
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
        self._all.append(data)

    async def load(self, aggregate_id: AggregateId, *, after: int = 0) -> Sequence[DomainEventStream]:
        """See `EventStore.load`."""
        await trio.lowlevel.checkpoint()
        history = self._histories.get(aggregate_id)
        if history is None:
            return []
        versions = range(max(after, 0) + 1, len(history.streams) + 1)
        return [self._read(history, version, aggregate_id) for version in versions]

    async def load_request(self, aggregate_id: AggregateId, request_id: str) -> DomainEventStream | None:
        """See `EventStore.load_request`."""
        await trio.lowlevel.checkpoint()
        history = self._histories.get(aggregate_id)
        if history is None or (version := history.versions.get(request_id)) is None:
            return None
        return self._read(history, version, aggregate_id)

    async def read_all(self, after: int, limit: int) -> Sequence[RecordedStream]:
        """See `EventStore.read_all`."""
        await trio.lowlevel.checkpoint()
        after = max(after, 0)
        page = self._all[after : after + limit]
        return [
            RecordedStream(position, self._serializer.load_stream(data, f"position {position} of the memory store"))
            for position, data in enumerate(page, after + 1)
        ]

    def _read(self, history: _History, version: int, aggregate_id: AggregateId) -> DomainEventStream:
        return self._serializer.load_stream(
            history.streams[version - 1], f"version {version} of {aggregate_id} in the memory store"
        )
