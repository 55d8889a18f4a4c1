"""Snapshots."""

import logging
from typing import Any

from trio_wow.buses import StateEventBus
from trio_wow.dispatch._dispatcher import MessageDispatcher
from trio_wow.dispatch._filters import FilterChain, Handling, Outcome
from trio_wow.dispatch._scheduling import GroupedScheduling
from trio_wow.domain import Domain
from trio_wow.eventsourcing import AggregateRepository
from trio_wow.messages import StateEvent

__all__ = ["SnapshotDispatcher"]

_log = logging.getLogger("trio_wow.dispatch")


class SnapshotDispatcher(MessageDispatcher[StateEvent[Any]]):
    """Takes a snapshot of each aggregate that has a `snapshot_every`, when its version is a multiple of that.

    None of a version at which the aggregate is deleted.

    A snapshot that cannot be taken is logged: it costs time at the next loading, and nothing else.

    Args:
        domain: the aggregates.
        bus: where state events come from.
        repository: keeps snapshots; it has a snapshot store.
        filters: around each message as a whole; see `FilterChain`.
        scheduling: in groups of aggregate IDs; `None` for keyed execution, in a mailbox for each.
        name: the component and its consumer group.
    """

    def __init__(
        self,
        domain: Domain,
        bus: StateEventBus,
        repository: AggregateRepository,
        *,
        filters: FilterChain | None = None,
        scheduling: GroupedScheduling | None = None,
        name: str = "snapshot-dispatcher",
    ) -> None:
        aggregates = [each for each in domain.aggregates if each.snapshot_every is not None]
        super().__init__(name, bus, aggregates, filters, scheduling)
        self._domain = domain
        self._repository = repository

    def wants(self, message: StateEvent[Any], /) -> bool:
        """See `MessageDispatcher.wants`."""
        every = self._domain.model_of(message.aggregate_id).snapshot_every
        return every is not None and not message.deleted and message.version % every == 0

    async def handle(self, handling: Handling, /) -> bool:
        """See the class."""
        message: StateEvent[Any] = handling.message
        handling.outcome = Outcome.HANDLED
        if self.wants(message):
            try:
                await self._repository.take_snapshot(message)
            except Exception:
                _log.warning(
                    "no snapshot of version %s of %s: it cannot be taken",
                    message.version,
                    message.aggregate_id,
                    exc_info=True,
                )
        return True
