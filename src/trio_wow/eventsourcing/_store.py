"""The contract of an event store. Implementations point here."""

from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

from trio_wow.messages import AggregateId, DomainEventStream

__all__ = ["EventStore", "RecordedStream"]


@frozen
class RecordedStream:
    """A stream and its place in the order of all streams of the store.

    Attributes:
        position: from 1, growing; may have gaps.
        stream: the stream.
    """

    position: int
    stream: DomainEventStream


class EventStore(Protocol):
    """Keeps the streams of every aggregate, in order, each version once."""

    async def append(self, stream: DomainEventStream) -> None:
        """Store a stream whole, as the next version of its aggregate.

        Raises:
            DuplicateRequestIdError: the aggregate has stored this request ID; however old that is, and even if the
                version is taken as well.
            VersionConflictError: the version is not the next one.
            SerializationError: JSON cannot hold one of its values, or an event's class is not registered.

        Cancellation: a cancelled call has stored the stream whole or not at all.
        Atomicity: others see all of the stream or nothing.
        """
        ...

    async def load(self, aggregate_id: AggregateId, *, after: int = 0) -> Sequence[DomainEventStream]:
        """Return the streams of one aggregate with versions above `after`, in order; none if there is none.

        Raises:
            SerializationError: a stored stream cannot be read; `UnknownMessageTypeError` for a name not registered.
        """
        ...

    async def load_request(self, aggregate_id: AggregateId, request_id: str) -> DomainEventStream | None:
        """Return the stream that one aggregate stored for a request, or `None`.

        Raises:
            SerializationError: as for `load`.
        """
        ...

    async def read_all(self, after: int, limit: int) -> Sequence[RecordedStream]:
        """Return up to `limit` streams with positions above `after`, in the order in which they were stored.

        Args:
            after: 0 to read from the start.
            limit: at least 1.

        Raises:
            SerializationError: as for `load`.
        """
        ...
