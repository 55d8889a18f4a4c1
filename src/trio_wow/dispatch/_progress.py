"""How far processors have come with the streams of a store."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from trio_wow.eventsourcing import CheckpointStore, EventStore, RecordedStream
from trio_wow.messages import AggregateId

__all__ = ["CatchUp", "Progress", "advance"]

PAGE = 500
"""Streams read at once."""

SETTLED = 10_000
"""Aggregates of which each processor remembers the version it has handled, beyond what lies after its checkpoint."""


class Progress:
    """How far one processor has come: everything up to a position, and after it some versions of some aggregates.

    What lies after the position is kept until the position has passed it. What lies before is kept for the aggregates
    looked at last; for others the store knows.

    Attributes:
        name: the processor's, under which the store keeps its checkpoint.
        position: the checkpoint. Everything up to it that the processor subscribes to is handled.
        checkpoints: where the checkpoint is kept; `None` for a processor whose state is in memory.
    """

    def __init__(
        self,
        name: str,
        aggregates: Iterable[tuple[str, str]],
        store: EventStore,
        checkpoints: CheckpointStore | None,
        *,
        in_transaction: bool,
    ) -> None:
        self.name = name
        self.position = 0
        self.checkpoints = checkpoints
        self._aggregates = frozenset(aggregates)
        self._store = store
        self._in_transaction = in_transaction
        self._saved = 0
        self._forgotten = 0  # up to this position the store has to be asked
        self._ahead: dict[AggregateId, int] = {}
        self._settled: OrderedDict[AggregateId, int] = OrderedDict()
        self._done: dict[AggregateId, set[int]] = {}
        self._attempts: dict[AggregateId, Counter[int]] = {}

    def wants(self, aggregate_id: AggregateId) -> bool:
        """Whether the processor subscribes to this aggregate."""
        return (aggregate_id.context, aggregate_id.aggregate) in self._aggregates

    async def restore(self) -> None:
        """Go on from where the store says that the processor was, if another process has brought it further."""
        if self.checkpoints is None:
            return
        self._saved = saved = await self.checkpoints.load_checkpoint(self.name)
        if saved <= self.position:
            return
        ahead = {
            aggregate_id: version
            for aggregate_id, version in self._ahead.items()
            if version > await self._store.version_at(aggregate_id, saved)
        }
        self.position = self._forgotten = saved
        self._ahead = ahead
        # The other may have handled more of these aggregates than is known here.
        self._settled.clear()
        self._done.clear()
        self._attempts.clear()

    async def save(self) -> None:
        """Keep the position in the store."""
        if self.checkpoints is not None and (position := self.position) > self._saved:
            await self.checkpoints.save_checkpoint(self.name, position)
            self._saved = position

    async def last_version(self, aggregate_id: AggregateId) -> int:
        """Return the last version of an aggregate that is handled, and all before it; 0 for none."""
        version = self._ahead.get(aggregate_id)
        if version is None:
            version = self._settled.get(aggregate_id)
            if version is not None:
                self._settled.move_to_end(aggregate_id)
        if version is None:
            version = await self._store.version_at(aggregate_id, self._forgotten) if self._forgotten else 0
            if self._in_transaction and self.checkpoints is not None:
                in_rows = await self.checkpoints.load_version(self.name, aggregate_id)
                if in_rows > version:
                    self._ahead[aggregate_id] = in_rows
                    return in_rows
            self._settle(aggregate_id, version)
        return version

    def done(self, aggregate_id: AggregateId) -> set[int]:
        """Return which calls for the version after the last handled one have succeeded; add to it those that do."""
        return self._done.setdefault(aggregate_id, set())

    def attempts(self, aggregate_id: AggregateId) -> Counter[int]:
        """Return how often each call for the version after the last handled one has failed, to be counted on."""
        return self._attempts.setdefault(aggregate_id, Counter())

    def handled(self, aggregate_id: AggregateId, version: int) -> None:
        """Take note that a version is handled; all before it are."""
        self._ahead[aggregate_id] = version
        self._settled.pop(aggregate_id, None)
        self._done.pop(aggregate_id, None)
        self._attempts.pop(aggregate_id, None)

    def advance(self, page: Sequence[RecordedStream]) -> bool:
        """Move the position over what is handled, and say whether that was all of a page that follows it."""
        for record in page:
            if record.position <= self.position:
                continue  # another call has been here since the page was read
            if self.wants(record.aggregate_id):
                ahead = self._ahead.get(record.aggregate_id, 0)
                if ahead == record.version:
                    del self._ahead[record.aggregate_id]
                    self._settle(record.aggregate_id, record.version)
                elif ahead < record.version:
                    return False
            self.position = record.position
        return True

    def _settle(self, aggregate_id: AggregateId, version: int) -> None:
        self._settled[aggregate_id] = version
        if len(self._settled) > SETTLED:
            self._settled.popitem(last=False)
            self._forgotten = self.position


async def advance(store: EventStore, processors: Iterable[Progress]) -> None:
    """Move the checkpoints of processors over what they have handled, in the order of the store, and keep them."""
    moving = list(processors)
    while moving:
        position = min(each.position for each in moving)
        page = await store.read_all(position, PAGE)
        for each in [each for each in moving if each.position == position]:
            if not (page and each.advance(page)):
                moving.remove(each)
            await each.save()


class CatchUp:
    """What one application knows of how far its processors have come. It outlives the runtimes.

    A dispatcher that has it reads the store from there when it starts, before it handles what its bus brings, and its
    processors get each stream once, in order, without a gap. Without it a processor gets what is published while it
    runs, at least once, and nothing else.

    Where a checkpoint is kept depends on where the processor's effects are (`docs/concepts.md`, "Catching up"): for a
    projection in memory it is in memory, for one that takes the store's transaction in that transaction, and for event
    processors and sagas in the store.

    Args:
        store: all streams.
        checkpoints: keeps checkpoints; `None` when they need not outlive the process.
    """

    def __init__(self, store: EventStore, checkpoints: CheckpointStore | None = None) -> None:
        self.store = store
        self.checkpoints = checkpoints
        self._progress: dict[tuple[str, int], tuple[object, Progress]] = {}

    def progress_of(
        self,
        processor: object,
        name: str,
        aggregates: Iterable[tuple[str, str]],
        *,
        in_memory: bool,
        in_transaction: bool,
    ) -> Progress:
        """Return the progress of a processor under a name: the same one each time, so that a restart goes on from it.

        Args:
            processor: the instance; kept.
            name: under which the store keeps its checkpoint.
            aggregates: context and name of what it subscribes to.
            in_memory: whether its state ends with the process.
            in_transaction: whether its functions take the store's transaction.
        """
        key = (name, id(processor))
        if key not in self._progress:
            checkpoints = None if in_memory else self.checkpoints
            progress = Progress(name, aggregates, self.store, checkpoints, in_transaction=in_transaction)
            self._progress[key] = (processor, progress)
        return self._progress[key][1]
