"""What processors have missed, as a source of a dispatch."""

from collections.abc import Awaitable, Callable, Sequence

import trio

from trio_wow.dispatch._progress import PAGE, Progress
from trio_wow.eventsourcing import EventStore, RecordedStream
from trio_wow.runtime import RuntimeContext

__all__ = ["StoreSource"]


class StoreSource:
    """A `BatchSource` of the streams of a store that processors have not handled. It can be dispatched again.

    Attributes:
        dropped: how many messages had been dropped when the last page was asked for.
    """

    def __init__(
        self,
        store: EventStore,
        progress: Sequence[Progress],
        context: RuntimeContext,
        dropped: Callable[[], int],
        advance: Callable[[EventStore], Awaitable[None]],
    ) -> None:
        self._store = store
        self._progress = progress
        self._context = context
        self._count_dropped = dropped
        self._advance = advance
        self._position = 0
        self._page: Sequence[RecordedStream] = ()
        self.dropped = 0

    async def receive_batch(self, limit: int, /) -> Sequence[RecordedStream]:
        """See `BatchSource`."""
        await self._wait_for_room()
        while not self._page:
            await self._advance(self._store)  # with each page, also where nothing in it is wanted
            self._position = max(self._position, min((each.position for each in self._progress), default=0))
            self.dropped = self._count_dropped()
            page = await self._store.read_all(self._position, PAGE)
            if not page or self._context.stop_requested.is_set():
                raise trio.EndOfChannel
            self._position = page[-1].position
            self._page = [each for each in page if any(one.wants(each.aggregate_id) for one in self._progress)]
        batch, self._page = self._page[:limit], self._page[limit:]
        return batch

    async def _wait_for_room(self) -> None:
        admission = self._context.admission
        while admission.is_overdrawn and not self._context.stop_requested.is_set():
            changed = trio.Event()
            admission.watch(changed.set)
            try:
                await changed.wait()
            finally:
                admission.unwatch(changed.set)
        await trio.lowlevel.checkpoint()
        if self._context.stop_requested.is_set():
            raise trio.EndOfChannel
