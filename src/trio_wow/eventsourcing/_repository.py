"""Loading aggregates from snapshots and events, deciding, and making streams of what was decided."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import cache
from types import NoneType
from typing import Any
from uuid import UUID

from attrs import define

from trio_wow.domain import AggregateModel, Domain
from trio_wow.errors import AggregateNotReadableError, AggregateVersionError, SerializationError, TenantMismatchError
from trio_wow.eventsourcing._store import EventStore, Snapshot, SnapshotStore
from trio_wow.messages import AggregateId, CommandMessage, DomainEventStream, Serializer, StateEvent

__all__ = ["AggregateRepository", "LoadedAggregate"]

_log = logging.getLogger("trio_wow.eventsourcing")


_ATOMS = frozenset({bool, bytes, date, datetime, Decimal, float, int, NoneType, str, timedelta, UUID})
"""What two states may share."""


@cache
def _is_plain(cls: Any) -> bool:
    """Whether the attributes of an instance are all that there is to copy."""
    ways = ("__deepcopy__", "__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__")
    if hasattr(cls, "__getattr__"):
        return False  # to look at the slots would fill those of cached properties
    own = (getattr(cls, way, None) for way in ways if getattr(cls, way, None) is not getattr(object, way, None))
    return all(getattr(way, "__name__", "").startswith("slots_") for way in own)  # those that attrs has made


def _copied(state: Any) -> Any:
    """Return a deep copy. Most states are flat, which takes a tenth of the time."""
    cls: Any = type(state)
    if _is_plain(cls):
        held = object.__getstate__(state)
        own, slots = held if isinstance(held, tuple) else (held, None)
        values = {**(own or {}), **(slots or {})}
        if _ATOMS.issuperset(map(type, values.values())):
            copy = object.__new__(cls)
            for name, value in values.items():
                object.__setattr__(copy, name, value)
            return copy
    return deepcopy(state)


@define
class LoadedAggregate:
    """One aggregate's state in memory, for one command.

    Attributes:
        id: the aggregate.
        model: what it can do.
        state: an instance of the aggregate's class.
        version: of the last stream applied; 0 when nothing has happened yet.
        serializer: the application's.
        deleted: whether it is deleted.
    """

    id: AggregateId
    model: AggregateModel
    state: Any
    version: int
    serializer: Serializer
    deleted: bool = False

    def copy(self) -> "LoadedAggregate":
        """Return the same with a state of its own.

        Raises:
            Exception: the state cannot be copied.
        """
        return LoadedAggregate(self.id, self.model, _copied(self.state), self.version, self.serializer, self.deleted)

    def state_to_read(self) -> Any:
        """Return a copy of the state, for a function that decides.

        What the function does to it, caches in it or takes out of it for its events has then no part in the state that
        is published and kept. A state that cannot be copied is returned itself; nor is such a one kept.
        """
        try:
            return _copied(self.state)
        except Exception:
            return self.state

    def advance(self, command: CommandMessage, events: tuple[object, ...]) -> DomainEventStream:
        """Apply what was decided, and return it as the aggregate's next stream.

        Raises:
            UnsourcedEventError: the aggregate cannot source one of the events.
            SerializationError: one would not come back from a store as it is.
            Exception: what a sourcing function raised. The state is then of no use any more.
        """
        written = []
        for event in events:
            self.model.check_sourced(event)
            # A copy, as it will be loaded: what the state makes of it must not change what is stored.
            data, copy = self.serializer.written(event)
            written.append(data)
            self.model.apply(self.state, copy)
            self.deleted = self.model.deleted_after(event, self.deleted)
        self.version += 1
        stream = DomainEventStream(
            aggregate_id=self.id,
            version=self.version,
            events=events,
            command_id=command.id,
            request_id=command.request_id,
            headers=command.headers,
        )
        self.serializer.keep_written(stream, written)
        return stream

    def source(self, streams: Sequence[DomainEventStream]) -> None:
        """Apply what has happened, in order.

        Raises:
            TenantMismatchError: it happened to an aggregate of another tenant.
            AggregateNotReadableError: an event cannot be applied any more. The state is then of no use.
        """
        for stream in streams:
            if stream.aggregate_id.tenant != self.id.tenant:
                raise TenantMismatchError(self.id, self.id.tenant)
            try:
                for event in stream.events:
                    self.model.apply(self.state, event)
                    self.deleted = self.model.deleted_after(event, self.deleted)
            except Exception as error:
                raise AggregateNotReadableError(self.id, stream.version, error) from error
            self.version = stream.version


class AggregateRepository:
    """Rebuilds aggregates from their events, from the last snapshot on where there is one.

    A snapshot is only ever a shortcut. One that cannot be used (unreadable, of another revision, ahead of the events or
    beside them) is logged, discarded, and the state made from the events; so is what a snapshot store raises.

    Args:
        domain: the aggregates.
        store: their events.
        snapshots: their snapshots, for those aggregates that have a `snapshot_every`.
        cached: of how many aggregates the last known state is kept for `load_to_decide`; at least 0.

    Raises:
        ValueError: `cached` is out of its range.
    """

    def __init__(
        self, domain: Domain, store: EventStore, snapshots: SnapshotStore | None = None, *, cached: int = 1_024
    ) -> None:
        if type(cached) is not int or cached < 0:
            raise ValueError(f"cached must be an int of at least 0, not {cached!r}")
        self._domain = domain
        self._store = store
        self._snapshots = snapshots
        self._cached = cached
        self._last: OrderedDict[AggregateId, LoadedAggregate] = OrderedDict()

    def model_of(self, aggregate_id: AggregateId) -> AggregateModel:
        """Return what an aggregate can do.

        Raises:
            KeyError: its kind is not registered.
        """
        return self._domain.model_of(aggregate_id)

    async def load(self, aggregate_id: AggregateId, *, version: int | None = None) -> LoadedAggregate:
        """Return an aggregate's present state, or that at a version; a new one if nothing has happened to it.

        Args:
            aggregate_id: the aggregate.
            version: the version to stop at; 0 for the state before the first event.

        Raises:
            TenantMismatchError: it belongs to another tenant than `aggregate_id` names.
            AggregateNotReadableError: a stored event cannot be applied any more.
            AggregateVersionError: it has not reached `version`, or that is negative.
            SerializationError: a stored event cannot be read any more.
            StoreError: the store cannot be used.
        """
        model = self._domain.model_of(aggregate_id)
        loaded = None
        if model.snapshot_every is not None and self._snapshots is not None:
            loaded = await self._from_snapshot(model, aggregate_id, version, self._snapshots)
        if loaded is None:
            loaded = LoadedAggregate(aggregate_id, model, model.new_state(aggregate_id.id), 0, self._domain.serializer)
            loaded.source(await self._store.load(aggregate_id, until=version))
        if version is not None and loaded.version != version:
            raise AggregateVersionError(aggregate_id, version, loaded.version)
        return loaded

    async def load_to_decide(self, aggregate_id: AggregateId) -> LoadedAggregate:
        """Return an aggregate's present state as `load` does; from what `keep` was given, if that is not too long ago.

        The store is asked for what others have appended since, and the state is the caller's own copy.

        Raises:
            WowError: as for `load`.
        """
        kept = self._last.get(aggregate_id)
        if kept is None:
            return await self.load(aggregate_id)
        if kept.id.tenant != aggregate_id.tenant:
            raise TenantMismatchError(aggregate_id, aggregate_id.tenant)
        self._last.move_to_end(aggregate_id)
        streams = await self._store.load(aggregate_id, after=kept.version)
        try:
            loaded = kept.copy()
        except Exception:  # not every state can be copied
            self.forget(aggregate_id)
            return await self.load(aggregate_id)
        loaded.source(streams)
        return loaded

    def keep(self, aggregate: LoadedAggregate) -> None:
        """Keep an aggregate, in a state that is stored, for `load_to_decide`. It is the repository's from now on."""
        self._last[aggregate.id] = aggregate
        self._last.move_to_end(aggregate.id)
        if len(self._last) > self._cached:
            self._last.popitem(last=False)

    def forget(self, aggregate_id: AggregateId) -> None:
        """Keep an aggregate no longer, so that it is made from its events the next time."""
        self._last.pop(aggregate_id, None)

    async def take_snapshot(self, event: StateEvent[Any]) -> None:
        """Keep the state of a state event as its aggregate's snapshot.

        Raises:
            SerializationError: JSON cannot hold the state.
            ValueError: the aggregate is deleted; a snapshot always means that it is not.
            Exception: what the snapshot store raised.
        """
        if event.deleted:
            raise ValueError(
                f"{event.aggregate_id} is deleted at version {event.version}; "
                "take a snapshot of a version at which it is not"
            )
        if self._snapshots is None:
            raise RuntimeError("this repository has no snapshot store; give it one")
        revision = self._domain.model_of(event.aggregate_id).revision
        data = self._domain.serializer.dump_state(event.state)
        await self._snapshots.save_snapshot(
            Snapshot(event.aggregate_id, event.version, event.stream.id, revision, data)
        )

    async def _from_snapshot(
        self, model: AggregateModel, aggregate_id: AggregateId, version: int | None, snapshots: SnapshotStore
    ) -> LoadedAggregate | None:
        try:
            snapshot = await snapshots.load_snapshot(aggregate_id)
        except Exception:
            _log.warning("the snapshot of %s cannot be loaded; using its events", aggregate_id, exc_info=True)
            return None
        if snapshot is None or (version is not None and version < snapshot.version):
            return None
        # The stream that the snapshot ends with comes along: only that proves that the snapshot belongs to this log.
        streams = await self._store.load(aggregate_id, after=snapshot.version - 1, until=version)
        try:
            if snapshot.revision != model.revision:
                raise SerializationError(f"it has revision {snapshot.revision}, and the aggregate {model.revision}")
            if not streams:
                raise SerializationError("it is ahead of the events")
            if streams[0].id != snapshot.stream_id:
                raise SerializationError("it was made from other events")
            state: Any = self._domain.serializer.load_state(snapshot.data, model.cls, "it")
        except SerializationError as error:
            await self._discard(snapshot, error, snapshots)
            return None
        if streams[0].aggregate_id.tenant != aggregate_id.tenant:
            raise TenantMismatchError(aggregate_id, aggregate_id.tenant)
        loaded = LoadedAggregate(aggregate_id, model, state, snapshot.version, self._domain.serializer)
        loaded.source(streams[1:])
        return loaded

    async def _discard(self, snapshot: Snapshot, error: Exception, snapshots: SnapshotStore) -> None:
        where = (snapshot.version, snapshot.aggregate_id)
        _log.warning("the snapshot of version %s of %s is of no use: %s; using the events", *where, error)
        try:
            await snapshots.discard_snapshot(snapshot)
        except Exception:
            _log.warning("the snapshot of version %s of %s cannot be discarded", *where, exc_info=True)
