"""Snapshots."""

import logging
from typing import Any

from trio_wow.buses import StateEventBus
from trio_wow.dispatch._dispatcher import MessageDispatcher
from trio_wow.dispatch._filters import FilterChain, Handling, Outcome
from trio_wow.dispatch._results import CommandResults, StagePart
from trio_wow.dispatch._scheduling import GroupedScheduling
from trio_wow.domain import Domain
from trio_wow.eventsourcing import AggregateRepository
from trio_wow.messages import CommandError, Stage, StateEvent
from trio_wow.runtime import RuntimeContext

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
        signals: is told when a snapshot is kept.
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
        signals: CommandResults | None = None,
        name: str = "snapshot-dispatcher",
    ) -> None:
        aggregates = [each for each in domain.aggregates if each.snapshot_every is not None]
        super().__init__(name, bus, aggregates, filters, scheduling)
        self._domain = domain
        self._repository = repository
        self._signals = signals
        self._part = StagePart(Stage.SNAPSHOT, name, self._concerns)

    async def prepare(self, context: RuntimeContext, /) -> None:
        """See `RuntimeComponent.prepare`."""
        await super().prepare(context)
        if self._signals is not None:
            self._signals.serve(self._part)

    def wants(self, message: StateEvent[Any], /) -> bool:
        """See `MessageDispatcher.wants`."""
        every = self._domain.model_of(message.aggregate_id).snapshot_every
        return every is not None and not message.deleted and message.version % every == 0

    async def handle(self, handling: Handling, /) -> bool:
        """See the class."""
        message: StateEvent[Any] = handling.message
        handling.outcome = Outcome.HANDLED
        if self.wants(message):
            error = None
            try:
                await self._repository.take_snapshot(message)
            except Exception as raised:
                error = CommandError.of(raised)
                _log.warning(
                    "no snapshot of version %s of %s: it cannot be taken",
                    message.version,
                    message.aggregate_id,
                    exc_info=True,
                )
            if self._signals is not None:
                self._signals.done(self._part, message.command_id, error)
        return True

    def unfinished(self, message: StateEvent[Any], /) -> None:
        """See `MessageDispatcher.unfinished`. Whoever waits for the snapshot need not wait any more."""
        if self._signals is not None:
            self._signals.lost(self._part, message.command_id)

    def _concerns(self, event: StateEvent[Any]) -> bool:
        return self.wants(event)
