"""Buses inside the process."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, Self, TypeVar
from uuid import uuid4

import trio

from trio_wow.buses._bus import MessageExchange, Subscription
from trio_wow.errors import AdmissionClosedError, RuntimeStateError
from trio_wow.messages import AggregateId, CommandMessage, DomainEventStream, StateEvent
from trio_wow.runtime import checkpoint_in_turn

__all__ = ["InMemoryCommandBus", "InMemoryDomainEventBus", "InMemoryStateEventBus"]


class _Routable(Protocol):
    @property
    def aggregate_id(self) -> AggregateId: ...

    def routed(self) -> Self: ...


R = TypeVar("R", bound=_Routable)


class InMemoryReceiver(Generic[R]):
    """The receiving end of an in-memory bus; a `DemandSource`.

    `_room` counts the messages that its dispatch has asked for and not yet been handed. Below zero it is the overdraft:
    messages handed over because their senders, being handled themselves, must not wait.
    """

    def __init__(self, topic: "_Topic[R]", subscription: Subscription) -> None:
        self._topic = topic
        self.id = uuid4().hex
        self.subscription = subscription
        self.ready = trio.Event()
        self.ready.set()
        self._open = False
        self._closed = False
        self._room = 0
        self._feed: trio.Event | None = None
        self.feed_is_next = True  # where there is room for one, and senders wait as well
        self._queue: deque[MessageExchange[R]] = deque()
        self._arrived = trio.Event()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._open else "not open"
        return f"<in-memory receiver {self.name}: {state}>"

    @property
    def name(self) -> str:
        """The group and the context that it receives for."""
        return f"{self.subscription.group}:{self.subscription.context}"

    @property
    def is_open(self) -> bool:
        """Whether messages are let in."""
        return self._open and not self._closed

    @property
    def has_room(self) -> bool:
        """Whether a message from outside can be handed over."""
        return self._open and self._room > 0 and not self.subscription.admission.is_overdrawn

    def open(self) -> None:
        """See `MessageReceiver.open`."""
        self._open = True
        self._topic.hand_over_waiting()

    def close(self) -> None:
        """See `MessageReceiver.close`."""
        if self._closed:
            return
        self._closed = True
        if self._room < 0:
            self.subscription.admission.end_overdraft()
        self._arrived.set()
        self._topic.remove(self)

    def abandon(self) -> None:
        """See `MessageReceiver.abandon`."""
        self.close()
        while self._queue:
            self._queue.popleft().discard()

    def add_demand(self, count: int, /) -> None:
        """See `DemandSource.add_demand`."""
        overdrawn = self._room < 0
        self._room += count
        if self._closed:
            return
        if overdrawn and self._room >= 0:
            self.subscription.admission.end_overdraft()
        self._topic.hand_over_waiting()

    def put(self, exchange: MessageExchange[R]) -> None:
        """Take an exchange, whether there is room or not."""
        self.feed_is_next = True
        self._queue.append(exchange)
        self._room -= 1
        if self._room == -1:
            self.subscription.admission.begin_overdraft()
        self._arrived.set()

    def keep(self, most: int, /) -> int:
        """See `LocalReceiver.keep`."""
        places = min(most, self._room // 2) if self._takes_from_outside else 0
        self._room -= places
        return places

    async def reserve(self) -> None:
        """See `LocalReceiver.reserve`."""
        await trio.lowlevel.checkpoint()
        served = self._feed = trio.Event()
        self._topic.feeding[self] = None
        self.serve_feed()
        try:
            await served.wait()
        except trio.Cancelled:
            if served.is_set():
                self.release(1)
            self._feed = None
            self._topic.feeding.pop(self, None)
            raise

    def release(self, places: int, /) -> None:
        """See `LocalReceiver.release`."""
        if places and not self._closed:
            self.add_demand(places)

    def bring(self, exchange: MessageExchange[R], /) -> None:
        """See `LocalReceiver.bring`."""
        self._queue.append(exchange)
        self._arrived.set()

    def serve_feed(self) -> None:
        """Give the feed that waits its place, as soon as it can have one."""
        if self._feed is not None and self._takes_from_outside and self._room > 0:
            self._room -= 1
            self.feed_is_next = False
            self._feed.set()
            self._feed = None
            del self._topic.feeding[self]

    @property
    def _takes_from_outside(self) -> bool:
        admission = self.subscription.admission
        return self.is_open and admission.intake_is_open and not admission.is_overdrawn

    async def receive_batch(self, limit: int, /) -> Sequence[MessageExchange[R]]:  # noqa: ARG002 - see DemandSource
        """Return everything that was handed over, even if that is more than `limit`; see `DemandSource`."""
        await trio.lowlevel.checkpoint()
        while not self._queue:
            if self._closed:
                raise trio.EndOfChannel
            self._arrived = trio.Event()
            await self._arrived.wait()
        batch = tuple(self._queue)
        self._queue.clear()
        return batch


class _WaitingSend(Generic[R]):
    """A send from outside that found no room, and how it ended.

    With `targets` it is for these and no others.
    """

    __slots__ = ("ended", "error", "message", "parked", "taken_by", "targets")

    def __init__(self, message: R, targets: Sequence[InMemoryReceiver[R]] | None) -> None:
        self.message = message
        self.targets = targets
        self.parked: trio.lowlevel.Task | None = None
        self.ended = False
        self.taken_by: Sequence[InMemoryReceiver[R]] = ()
        self.error: AdmissionClosedError | None = None


class _Topic(Generic[R]):
    """One bounded context: its receivers by group, and the sends from outside that wait for room.

    The sends that wait for one receiver are served in their order.
    """

    def __init__(self) -> None:
        self.groups: dict[str, list[InMemoryReceiver[R]]] = {}
        self.waiting: OrderedDict[_WaitingSend[R], None] = OrderedDict()
        self.feeding: dict[InMemoryReceiver[R], None] = {}

    @property
    def receivers(self) -> list[InMemoryReceiver[R]]:
        return [receiver for group in self.groups.values() for receiver in group]

    def add(self, receiver: InMemoryReceiver[R]) -> None:
        self.groups.setdefault(receiver.subscription.group, []).append(receiver)
        receiver.subscription.admission.watch(self.hand_over_waiting)

    def remove(self, receiver: InMemoryReceiver[R]) -> None:
        group = self.groups[receiver.subscription.group]
        group.remove(receiver)
        if not group:
            del self.groups[receiver.subscription.group]
        if not self.groups:
            receiver.subscription.admission.unwatch(self.hand_over_waiting)
        self.hand_over_waiting()

    async def send(self, message: R) -> bool:
        """Hand a message to one receiver of each group, to all or to none, and say whether there was any."""
        targets = self._targets(message)
        if not targets:
            return False
        message = message.routed()  # the bus's own from here on, and known to be whole
        if (admission := targets[0].subscription.admission).is_inside():
            if admission.is_closed:
                raise AdmissionClosedError(str(targets[0]))
            self._hand_over(message, targets)
            return True
        if not self.waiting and admission.intake_is_open and all(target.has_room for target in targets):
            self._hand_over(message, targets)
            return True
        return bool(await self._send_from_outside(_WaitingSend(message, None)))

    async def admit(self, message: R) -> Sequence[InMemoryReceiver[R]]:
        """See `LocalMessageBus.admit`."""
        targets = [target for target in self._targets(message) if target.is_open]
        if not targets:
            return ()
        message = message.routed()
        if (admission := targets[0].subscription.admission).is_inside():
            if admission.is_closed:
                return ()
            self._hand_over(message, targets)
            return targets
        return await self._send_from_outside(_WaitingSend(message, targets))

    async def _send_from_outside(self, send: _WaitingSend[R]) -> Sequence[InMemoryReceiver[R]]:
        self.waiting[send] = None
        self.hand_over_waiting()
        if not send.ended:

            def abort(_: object) -> trio.lowlevel.Abort:
                del self.waiting[send]
                self.hand_over_waiting()  # others may have waited behind this one
                return trio.lowlevel.Abort.SUCCEEDED

            send.parked = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(abort)
        if send.error is not None:
            raise send.error
        return send.taken_by

    def hand_over_waiting(self) -> None:
        """Hand over what waits, in order, as far as there is room."""
        for receiver in tuple(self.feeding):
            if receiver.feed_is_next or not self.waiting:
                receiver.serve_feed()
        if self.waiting:
            self._serve_senders()
            for receiver in tuple(self.feeding):
                receiver.serve_feed()

    def _serve_senders(self) -> None:
        receivers = len(self.receivers)
        blocked: set[InMemoryReceiver[R]] = set()
        ended = []
        for send in self.waiting:
            targets = self._targets(send.message) if send.targets is None else send.targets
            if send.targets is not None and not all(target.is_open for target in targets):
                pass  # nobody takes it
            elif targets and not targets[0].subscription.admission.intake_is_open:
                if send.targets is None:
                    send.error = AdmissionClosedError(str(targets[0]))
            elif any(target in blocked or not target.has_room for target in targets):
                blocked.update(targets)
                if len(blocked) == receivers:
                    break
                continue
            else:
                send.taken_by = targets
                self._hand_over(send.message, targets)
            ended.append(send)
        for send in ended:
            send.ended = True
            del self.waiting[send]
            if send.parked is not None:
                trio.lowlevel.reschedule(send.parked)

    def _hand_over(self, message: R, targets: Sequence[InMemoryReceiver[R]]) -> None:
        for route, receiver in enumerate(targets):
            subscription = receiver.subscription
            lease = subscription.admission.try_acquire("%s, in %s", message, subscription.group)
            receiver.put(MessageExchange(message if route == 0 else message.routed(), lease))

    def _targets(self, message: R) -> Sequence[InMemoryReceiver[R]]:
        aggregate_id = message.aggregate_id
        targets: list[InMemoryReceiver[R]] = []
        for group in self.groups.values():
            members = [each for each in group if aggregate_id.aggregate in each.subscription.aggregates]
            if members:
                # By ID, so that the order per ID holds when several receivers share a group.
                target = members[hash(aggregate_id) % len(members)]
                if target.subscription.wants(message):
                    targets.append(target)
        return targets


class InMemoryMessageBus(Generic[R]):
    """A bus inside the process, for one runtime at a time. What is on it ends with the process.

    Acknowledging is a formality. Several receivers of one group share its aggregate IDs among them.
    """

    def __init__(self) -> None:
        self._topics: dict[str, _Topic[R]] = {}

    def receiver(self, subscription: Subscription) -> InMemoryReceiver[R]:
        """See `MessageBus.receiver`. The subscription is installed at once."""
        for topic in self._topics.values():
            if any(each.subscription.admission is not subscription.admission for each in topic.receivers):
                # The one could neither wait for the other's room, nor be refused by it, without breaking its promises.
                raise RuntimeStateError(
                    f"{type(self).__name__} serves one runtime at a time; make another one", "STARTING"
                )
        topic = self._topics.setdefault(subscription.context, _Topic())
        receiver = InMemoryReceiver(topic, subscription)
        topic.add(receiver)
        return receiver

    async def send(self, message: R) -> None:
        """See `MessageBus.send`."""
        await self.send_if_subscribed(message)

    async def send_if_subscribed(self, message: R) -> bool:
        """See `MessageBus.send_if_subscribed`."""
        await checkpoint_in_turn()
        topic = self._topics.get(message.aggregate_id.context)
        return topic is not None and await topic.send(message)

    async def admit(self, message: R) -> Sequence[InMemoryReceiver[R]]:
        """See `LocalMessageBus.admit`."""
        await trio.lowlevel.checkpoint()
        topic = self._topics.get(message.aggregate_id.context)
        return () if topic is None else await topic.admit(message)


class InMemoryCommandBus(InMemoryMessageBus[CommandMessage]):
    """A `CommandBus` inside the process."""


class InMemoryDomainEventBus(InMemoryMessageBus[DomainEventStream]):
    """A `DomainEventBus` inside the process."""


class InMemoryStateEventBus(InMemoryMessageBus[StateEvent[Any]]):
    """A `StateEventBus` inside the process."""
