"""Buses that deliver inside the process first, and then tell all other nodes over a distributed bus."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import orjson
import trio
from attrs import frozen

from trio_wow.buses._bus import (
    CommandBus,
    DomainEventBus,
    LocalMessageBus,
    LocalReceiver,
    MessageBus,
    MessageExchange,
    MessageReceiver,
    StateEventBus,
    Subscription,
)
from trio_wow.errors import RuntimeStateError
from trio_wow.messages import AggregateId, CommandMessage, DomainEventStream, StateEvent

__all__ = ["DistributedBuses", "LocalFirstCommandBus", "LocalFirstDomainEventBus", "LocalFirstStateEventBus"]

RECEIPT = "wow-local-first"
"""The header of a copy that says whether its message was taken locally: `true` or `false`."""
TAKEN_BY = "wow-local-receivers"
"""The header of a distributed copy that says by whom: a JSON object of groups and the IDs of their receivers."""
REMEMBERED = 10_000
"""How many messages are known at most that were taken locally and could not be sent on."""


@frozen
class DistributedBuses:
    """The buses that connect an application with its other nodes; `None` for what stays inside each node.

    Attributes:
        commands: carries commands.
        events: carries domain events.
        state_events: carries state events.
    """

    commands: CommandBus | None = None
    events: DomainEventBus | None = None
    state_events: StateEventBus | None = None


class _Routable(Protocol):
    @property
    def aggregate_id(self) -> AggregateId: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    def routed(self) -> Self: ...


R = TypeVar("R", bound=_Routable)


class _Runs:
    """The local runs of one receiver: those under way, and those that were let go unfinished.

    A run is announced by its sender, once that has gone on, and may have ended by then.
    """

    def __init__(self) -> None:
        self.unfinished: set[str] = set()
        self._under_way: dict[str, int] = {}  # below zero: ended before they were announced
        self._awaited: tuple[str, trio.CancelScope] | None = None

    def announce(self, id: str) -> None:
        """Take note of the local run of a message."""
        self._count(id, 1)

    def end(self, id: str, *, finished: bool) -> None:
        """Take note that one has ended."""
        self._count(id, -1)
        if not finished:
            self.unfinished.add(id)
        if self._awaited is not None and self._awaited[0] == id:
            self._awaited[1].cancel()

    def is_finished(self, id: str) -> bool:
        """Whether no run of a message is under way, and none was let go unfinished."""
        return self._under_way.get(id, 0) <= 0 and id not in self.unfinished

    async def end_or(self, id: str, wait: Callable[[], Awaitable[None]]) -> bool:
        """Wait for something, but no longer than for the end of a run. Return whether the wait was over first."""
        with trio.CancelScope() as scope:
            self._awaited = id, scope
            try:
                await wait()
            finally:
                self._awaited = None
        return not scope.cancelled_caught

    def _count(self, id: str, by: int) -> None:
        count = self._under_way.pop(id, 0) + by
        if count:
            self._under_way[id] = count


class _LocalCopy(MessageExchange[R]):
    """What came by the local route. If it is let go unfinished, the distributed copy is handled in its place."""

    __slots__ = ("_ended", "_id", "_runs")

    def __init__(self, exchange: MessageExchange[R], id: str, runs: _Runs) -> None:
        super().__init__(exchange.message, exchange.lease)
        self._id = id
        self._runs = runs
        self._ended = False

    async def acknowledge(self) -> None:
        self._end(finished=True)

    def discard(self) -> None:
        self._end(finished=False)
        super().discard()

    def _end(self, *, finished: bool) -> None:
        if not self._ended:
            self._ended = True
            self._runs.end(self._id, finished=finished)


class _DistributedCopy(MessageExchange[R]):
    """What came by the distributed route.

    One that this very receiver has taken locally comes after the local copy, in the same mailbox.
    """

    __slots__ = ("_exchange", "_is_own", "_runs", "_skips", "id", "redelivered", "taken_elsewhere")

    def __init__(self, exchange: MessageExchange[R], taken_by: str | None, receiver: "LocalFirstReceiver[R]") -> None:
        super().__init__(exchange.message, exchange.lease)
        self._exchange = exchange
        self._runs = receiver.runs
        self.id = _id_of(exchange.message)
        self.redelivered = exchange.redelivered
        self._is_own = taken_by == receiver.id
        self.taken_elsewhere = taken_by is not None and not self._is_own and not exchange.redelivered
        self._skips = self.taken_elsewhere and receiver.skips_what_others_took

    def is_settled(self) -> bool:
        return self._skips or (self._is_own and self._runs.is_finished(self.id))

    async def acknowledge(self) -> None:
        await self._exchange.acknowledge()
        self._runs.unfinished.discard(self.id)

    def discard(self) -> None:
        self._exchange.discard()


class LocalFirstReceiver(Generic[R]):
    """A local receiver, and a task that feeds it what its distributed twin receives; a `DemandSource`.

    Both routes share one window. The feed asks the twin for up to a sixteenth of that at once, for which it keeps what
    room there is. What finds none waits in the feed, as a message does that is being sent; what is settled needs none.
    """

    def __init__(
        self,
        bus: "LocalFirstBus[R]",
        local: LocalReceiver[R],
        distributed: MessageReceiver[R],
        nursery: trio.Nursery,
    ) -> None:
        self._bus = bus
        self._nursery = nursery
        self._local = local
        self._distributed = distributed
        self.id = local.id
        self.skips_what_others_took = bus.skips_what_others_took
        self.runs = _Runs()
        self._lot = 0  # of what the feed asks for at once; 0 as long as the window is not known
        self._feeding = trio.CancelScope()
        self._asking = trio.CancelScope()
        self._intake_open = trio.Event()
        self._error: Exception | None = None

    @property
    def ready(self) -> trio.Event:
        """See `MessageReceiver.ready`."""
        return self._distributed.ready

    def open(self) -> None:
        """See `MessageReceiver.open`."""
        subscription = self._local.subscription
        subscription.admission.watch(self._look_at_intake)
        self._look_at_intake()
        self._distributed.open()
        self._local.open()
        self._nursery.start_soon(self._feed, name=f"feed of {subscription.group}:{subscription.context}")

    def close(self) -> None:
        """See `MessageReceiver.close`."""
        self._bus.forget(self)
        self._local.subscription.admission.unwatch(self._look_at_intake)
        self._feeding.cancel()
        self._distributed.close()
        self._local.close()

    def abandon(self) -> None:
        """See `MessageReceiver.abandon`."""
        self.close()
        self._local.abandon()
        self._distributed.abandon()

    def add_demand(self, count: int, /) -> None:
        """See `DemandSource.add_demand`."""
        self._lot = self._lot or max(1, count // 16)
        self._local.add_demand(count)

    async def receive_batch(self, limit: int, /) -> Sequence[MessageExchange[R]]:
        """See `DemandSource`.

        Raises:
            Exception: what the distributed receiver raised.
        """
        try:
            batch = await self._local.receive_batch(limit)
        except trio.EndOfChannel:
            if self._error is not None:
                raise self._error from None
            raise
        return [
            exchange if isinstance(exchange, _DistributedCopy) else self._local_copy(exchange) for exchange in batch
        ]

    def _local_copy(self, exchange: MessageExchange[R]) -> MessageExchange[R]:
        if _take_marks(exchange.message)[0] is None:
            return exchange  # somebody has sent it by the local bus alone
        return _LocalCopy(exchange, _id_of(exchange.message), self.runs)

    def _look_at_intake(self) -> None:
        if self._local.subscription.admission.intake_is_open:
            self._intake_open.set()
        elif self._intake_open.is_set():  # for good
            self._intake_open = trio.Event()
            self._asking.cancel()

    async def _feed(self) -> None:
        with self._feeding:
            try:
                await self._intake_open.wait()
                with self._asking:
                    while True:
                        await self._feed_once()
            except trio.EndOfChannel:
                self._local.close()
            except Exception as error:  # raised by `receive_batch`, so that it ends the dispatch
                self._error = error
                self._local.close()

    async def _feed_once(self) -> None:
        rest: list[_DistributedCopy[R]] = []
        kept = self._local.keep(self._lot)
        try:
            received = await self._distributed.receive_batch(max(1, self._lot))
            rest += map(self._distributed_copy, reversed(received))
            while rest:
                copy = rest[-1]
                if copy.is_settled():
                    await copy.acknowledge()
                elif kept and not self._local.subscription.admission.is_overdrawn:
                    kept -= 1
                    self._local.bring(copy)
                else:
                    self._local.release(kept)
                    kept = 0
                    if not await self.runs.end_or(copy.id, self._local.reserve):
                        continue
                    self._local.bring(copy)
                rest.pop()
        finally:
            for copy in rest:
                copy.discard()
            self._local.release(kept)

    def _distributed_copy(self, exchange: MessageExchange[R]) -> _DistributedCopy[R]:
        taken_by = _take_marks(exchange.message)[1].get(self._local.subscription.group)
        return _DistributedCopy(exchange, taken_by, self)


class LocalFirstBus(Generic[R]):
    """Sends each message to the receivers inside the process first, and a second copy over a distributed bus.

    The sender waits until the local receivers that are open have room, and have been admitted by their runtime, or are
    known not to be: that is the receipt, which the second copy carries. Who has taken a message locally acknowledges
    and leaves the second copy, unless the local run was not finished; `docs/local-first.md` says what is guaranteed
    when a node dies at each step.

    Args:
        local: a bus inside the process, for this bus alone.
        distributed: a bus between nodes. Its `send` must not wait for receivers: those of this node may be waiting for
            the sender. Its receivers leave what is not acknowledged to be delivered again, and acknowledge after they
            have been closed.
    """

    skips_what_others_took = True
    """Whether the first delivery of a copy is left if another receiver of the group has taken its message."""

    def __init__(self, local: LocalMessageBus[R], distributed: MessageBus[R]) -> None:
        self._local = local
        self._distributed = distributed
        self._receivers: dict[str, LocalFirstReceiver[R]] = {}
        self._to_be_sent_on: OrderedDict[str, dict[str, str]] = OrderedDict()

    async def send(self, message: R) -> None:
        """Send a message by both routes.

        Raises:
            SerializationError: as for `MessageBus.send`.
            Exception: what the distributed bus raises. The local receivers may have taken the message, and then handle
                it; a note of the error says so. Sent again, the same message takes the distributed route alone.

        Cancellation: as for an error of the distributed bus.
        Ordering: messages that one task sends one after the other reach each group in that order, as long as they take
            the same route.
        """
        await self._send(message)

    async def send_if_subscribed(self, message: R) -> bool:
        """Like `send`, and say whether anybody is subscribed, here or elsewhere."""
        taken, subscribed = await self._send(message)
        return taken or subscribed

    async def send_with_receipt(self, message: R) -> bool:
        """Like `send`, and return the receipt.

        Returns:
            Whether the message was taken by the local route: every receiver that was open for it has been admitted by
            its runtime, and there was one. If not, nobody has got it here, and it is left to the distributed bus.
        """
        return (await self._send(message))[0]

    def receiver(self, subscription: Subscription) -> LocalFirstReceiver[R]:
        """See `MessageBus.receiver`. It takes both routes.

        Raises:
            RuntimeStateError: as for the two buses, or the subscription names no nursery.
        """
        if subscription.nursery is None:
            raise RuntimeStateError(
                f"{type(self).__name__} runs a task for each receiver; give the subscription a nursery", "STARTING"
            )
        local = self._local.receiver(subscription)
        try:
            distributed = self._distributed.receiver(subscription)
        except BaseException:
            local.close()
            raise
        receiver = self._receivers[local.id] = LocalFirstReceiver(self, local, distributed, subscription.nursery)
        return receiver

    def forget(self, receiver: LocalFirstReceiver[R]) -> None:
        """Take note that a receiver has been closed."""
        self._receivers.pop(receiver.id, None)

    def _has_local_route(self, _message: R) -> bool:
        return True

    async def _send(self, message: R) -> tuple[bool, bool]:
        message = message.routed()
        _take_marks(message)  # those of a former route
        id = _id_of(message)
        taken_by = self._to_be_sent_on.pop(id, {})
        if not self._receivers.keys() >= set(taken_by.values()):
            taken_by = {}  # whoever had taken it is gone, and has perhaps not finished it
        if not taken_by and self._has_local_route(message):
            copy = message.routed()
            _headers_of(copy)[RECEIPT] = "true"
            for each in await self._local.admit(copy):
                taken_by[each.subscription.group] = each.id
                if (receiver := self._receivers.get(each.id)) is not None:  # else it has closed since
                    receiver.runs.announce(id)
        headers = _headers_of(message)
        headers[RECEIPT] = "true" if taken_by else "false"
        if taken_by:
            headers[TAKEN_BY] = orjson.dumps(taken_by).decode()
        try:
            subscribed = await self._distributed.send_if_subscribed(message)
        except BaseException as error:
            if taken_by:
                error.add_note(f"{', '.join(taken_by)} took the message locally, before it could not be sent on")
                self._to_be_sent_on[id] = taken_by
                if len(self._to_be_sent_on) > REMEMBERED:
                    self._to_be_sent_on.popitem(last=False)
            raise
        return bool(taken_by), subscribed


class LocalFirstCommandBus(LocalFirstBus[CommandMessage]):
    """A `CommandBus` with two routes; see `LocalFirstBus`.

    A command that another node has taken is left only where the store holds its request, which the command dispatcher
    looks up. A void command takes the distributed route only.
    """

    skips_what_others_took = False

    def _has_local_route(self, message: CommandMessage) -> bool:
        return not message.is_void


class LocalFirstDomainEventBus(LocalFirstBus[DomainEventStream]):
    """A `DomainEventBus` with two routes; see `LocalFirstBus`."""


class LocalFirstStateEventBus(LocalFirstBus[StateEvent[Any]]):
    """A `StateEventBus` with two routes; see `LocalFirstBus`."""


def _headers_of(message: _Routable) -> dict[str, str]:
    return cast("dict[str, str]", message.headers)  # a route's own copy


def _id_of(message: Any) -> str:
    id: str = message.stream.id if isinstance(message, StateEvent) else message.id
    return id


def _take_marks(message: _Routable) -> tuple[str | None, dict[str, str]]:
    """Take the marks of a route off its copy, so that nothing that follows from it inherits them."""
    headers = _headers_of(message)
    receipt, taken_by = headers.pop(RECEIPT, None), headers.pop(TAKEN_BY, None)
    if receipt != "true" or taken_by is None:
        return receipt, {}
    try:
        groups = orjson.loads(taken_by)
    except ValueError:
        return receipt, {}
    return receipt, groups if isinstance(groups, dict) else {}
