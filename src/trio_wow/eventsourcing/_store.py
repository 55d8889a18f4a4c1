"""The contracts of stores. Implementations point here."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from attrs import field, frozen

from trio_wow.messages import AggregateId, DomainEventStream

__all__ = ["CheckpointStore", "EventStore", "RecordedStream", "Snapshot", "SnapshotStore"]


@frozen
class RecordedStream:
    """A stream and its place in the order of all streams of the store. It is read only when it is looked at.

    Attributes:
        position: from 1, growing; may have gaps.
        aggregate_id: the aggregate; its tenant is in the stream.
        version: the aggregate's version after the stream.
    """

    position: int
    aggregate_id: AggregateId
    version: int
    _load: Callable[[], DomainEventStream] = field(eq=False, repr=False)

    @cached_property
    def stream(self) -> DomainEventStream:
        """The stream.

        Raises:
            SerializationError: it cannot be read; `UnknownMessageTypeError` for a name not registered.
        """
        return self._load()


class EventStore(Protocol):
    """Keeps the streams of every aggregate, in order, each version once.

    Every method may raise a `StoreError`: the store cannot be used. An error of any method leaves the store usable.
    """

    async def append(self, stream: DomainEventStream) -> None:
        """Store a stream whole, as the next version of its aggregate.

        Raises:
            DuplicateRequestIdError: the aggregate has stored this request ID; however old that is, and even if the
                version is taken as well. A request ID means something only together with its aggregate.
            VersionConflictError: the version is not the next one.
            AppendOutcomeUnknownError: it was cut off, so that nobody can say whether the stream is stored.
            SerializationError: JSON cannot hold one of its values, or an event's class is not registered.
            StoreError: nothing was stored.

        Cancellation: a call that ends with `Cancelled` has stored nothing. One that has begun to write finishes and
            returns, or raises, what came of it.
        Atomicity: others see all of the stream or nothing.
        """
        ...

    async def load(
        self, aggregate_id: AggregateId, *, after: int = 0, until: int | None = None
    ) -> Sequence[DomainEventStream]:
        """Return the streams of one aggregate with versions above `after` and up to `until`, in order.

        Args:
            aggregate_id: the aggregate; its tenant does not count.
            after: a version; 0 for all from the first.
            until: a version; `None` for all up to the last.

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

        Streams become visible in that order: one that is stored later never has a lower position than one already seen.

        Args:
            after: 0 to read from the start.
            limit: at least 1.
        """
        ...

    async def version_at(self, aggregate_id: AggregateId, position: int) -> int:
        """Return the version that an aggregate had when everything up to a position was stored; 0 for none."""
        ...


@frozen
class Snapshot:
    """An aggregate's state at one version, so that loading need not begin with the first event.

    Attributes:
        aggregate_id: the aggregate.
        version: its version.
        stream_id: the stream that led to this version. A log that was cut back and went on another way has another one.
        revision: of the state's shape.
        data: the state, as written by `Serializer.dump_state`.
    """

    aggregate_id: AggregateId
    version: int
    stream_id: str
    revision: int
    data: bytes


@runtime_checkable
class SnapshotStore(Protocol):
    """Keeps the latest snapshot of each aggregate. Losing one costs time, nothing else."""

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        """Keep a snapshot instead of an older one; does nothing if the one kept is as new or newer."""
        ...

    async def load_snapshot(self, aggregate_id: AggregateId) -> Snapshot | None:
        """Return the snapshot of an aggregate, or `None`."""
        ...

    async def discard_snapshot(self, snapshot: Snapshot) -> None:
        """Forget a snapshot that is of no use; does nothing if another one is kept by now."""
        ...


@runtime_checkable
class CheckpointStore(Protocol):
    """Keeps how far processors have come, beside what they have written.

    Attributes:
        transaction_type: the class of what a `work` is called with. A function of a projection takes one by a parameter
            with this annotation.
    """

    transaction_type: type

    async def load_checkpoint(self, processor: str) -> int:
        """Return the position up to which a processor has handled everything; 0 for one that is not known."""
        ...

    async def save_checkpoint(self, processor: str, position: int) -> None:
        """Keep a position; does nothing if the one kept is as high or higher."""
        ...

    async def load_version(self, processor: str, aggregate_id: AggregateId) -> int:
        """Return the last version of an aggregate that a processor has handled with `handle_once`; 0 for none."""
        ...

    async def handle_once(
        self,
        processor: str,
        aggregate_id: AggregateId,
        version: int,
        position: int,
        work: Callable[[Any], object],
    ) -> bool:
        """Do a processor's work for one version of an aggregate, in the transaction that takes note of it.

        Args:
            processor: the processor.
            aggregate_id: the aggregate.
            version: of the stream to be handled.
            position: the processor's checkpoint so far; kept in the same transaction.
            work: called with the open transaction, in the thread that writes; it must not commit or roll back.

        Returns:
            Whether it was done; `False` when this version was handled before: then `work` has not been called.

        Raises:
            Exception: what `work` raised; nothing was written.
            StoreError: nothing was written.

        Cancellation: as for `EventStore.append`.
        """
        ...

    async def transact(self, work: Callable[[Any], object]) -> None:
        """Do some work in a transaction of its own, whatever was done before: no version is looked at or kept.

        Args:
            work: as for `handle_once`.

        Raises:
            Exception: what `work` raised; nothing was written.
            StoreError: as for `handle_once`.

        Cancellation: as for `EventStore.append`.
        """
        ...
