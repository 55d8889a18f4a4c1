"""Where a dispatch takes its items from."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import trio

__all__ = ["BatchSource", "ChannelSource", "DemandSource", "IterableSource"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class BatchSource(Protocol[T_co]):
    """A source that hands over items in batches, never more than it is asked for."""

    async def receive_batch(self, limit: int, /) -> Sequence[T_co]:
        """Wait until there is something to take, and take it.

        Args:
            limit: the most items to return, at least 1.

        Returns:
            One to `limit` items, in order.

        Raises:
            trio.EndOfChannel: there will be no more items.

        Cancellation: a cancelled call has taken nothing. A call that has items at hand looks for cancellation, as with
            `trio.lowlevel.checkpoint_if_cancelled`, and had better not yield to the event loop: a dispatch does, when
            it has no room. One pass later it may find the mailboxes of busy keys empty.
        Ownership: the returned items are the caller's; a dispatch finishes, reports or discards each of them.
        """
        ...


@runtime_checkable
class DemandSource(BatchSource[T_co], Protocol[T_co]):
    """A `BatchSource` that is told of demand at the moment it arises, and that may exceed it.

    For a source whose senders wait for demand, and which must sometimes hand over an item that nobody has room for,
    because its sender would otherwise wait for itself (`docs/concepts.md`, "Back-pressure and cycles"). A dispatch
    accepts all that such a source returns; what exceeds its window is the window's overdraft.
    """

    def add_demand(self, count: int, /) -> None:
        """Take note that `count` more items have room. Called first with the whole window, then with each lot.

        Called synchronously while an item finishes: it must not block, nor call back into the dispatch.
        """
        ...


class ChannelSource(BatchSource[T]):
    """Reads a Trio memory channel, which stays open: draining what it holds costs no task switch per item."""

    def __init__(self, channel: trio.MemoryReceiveChannel[T]) -> None:
        self._channel = channel

    async def receive_batch(self, limit: int, /) -> Sequence[T]:
        """See `BatchSource.receive_batch`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            batch = [self._channel.receive_nowait()]
        except trio.WouldBlock:
            batch = [await self._channel.receive()]
        try:
            while len(batch) < limit:
                batch.append(self._channel.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
            pass  # the next call tells; what is in the batch has left the channel
        return batch


class IterableSource(BatchSource[T]):
    """Reads an async iterable, one item at a time. `aclose` closes an async generator; others stay as they are."""

    def __init__(self, iterable: AsyncIterable[T]) -> None:
        self._iterator: AsyncIterator[T] = aiter(iterable)

    async def receive_batch(self, _limit: int, /) -> Sequence[T]:
        """See `BatchSource.receive_batch`. An iterable that never waits is no checkpoint."""
        try:
            return (await anext(self._iterator),)
        except StopAsyncIteration:
            raise trio.EndOfChannel from None
        except trio.EndOfChannel as error:  # of something inside, and not this iterable's end
            raise RuntimeError(f"{type(self._iterator).__name__} raised trio.EndOfChannel") from error

    async def aclose(self) -> None:
        """Close the iterator if it is an async generator."""
        if isinstance(self._iterator, AsyncGenerator):
            await self._iterator.aclose()
