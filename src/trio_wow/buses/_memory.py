"""Buses inside the process."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Generic, Protocol, Self, TypeVar

import trio

from trio_wow.buses._bus import MessageExchange, Subscription
from trio_wow.errors import AdmissionClosedError
from trio_wow.messages import AggregateId, CommandMessage, DomainEventStream

__all__ = ["InMemoryCommandBus", "InMemoryDomainEventBus"]


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
        self.subscription = subscription
        self.ready = trio.Event()
        self.ready.set()
        self._open = False
        self._closed = False
        self._room = 0
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
        self._queue.append(exchange)
        self._room -= 1
        if self._room == -1:
            self.subscription.admission.begin_overdraft()
        self._arrived.set()

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
    """A send from outside that found no room, and how it ended."""

    __slots__ = ("error", "message", "subscribed", "task")

    def __init__(self, message: R, task: trio.lowlevel.Task) -> None:
        self.message = message
        self.task = task
        self.subscribed = False
        self.error: AdmissionClosedError | None = None


class _Topic(Generic[R]):
    """One bounded context: its receivers by group, and the sends that wait for room, first come first served."""

    def __init__(self) -> None:
        self.groups: dict[str, list[InMemoryReceiver[R]]] = {}
        self.waiting: OrderedDict[_WaitingSend[R], None] = OrderedDict()

    def add(self, receiver: InMemoryReceiver[R]) -> None:
        self.groups.setdefault(receiver.subscription.group, []).append(receiver)
        receiver.subscription.admission.watch(self.hand_over_waiting)

    def remove(self, receiver: InMemoryReceiver[R]) -> None:
        group = self.groups[receiver.subscription.group]
        group.remove(receiver)
        if not group:
            del self.groups[receiver.subscription.group]
        admission = receiver.subscription.admission
        if all(each.subscription.admission is not admission for group in self.groups.values() for each in group):
            admission.unwatch(self.hand_over_waiting)
        self.hand_over_waiting()

    def hand_over(self, message: R, *, waited: bool) -> bool:
        """Hand a message to one receiver of each group, to all or to none.

        Args:
            message: the message.
            waited: whether it is the first of the waiting sends; otherwise the calling task is its sender.

        Returns:
            Whether there was any group.

        Raises:
            trio.WouldBlock: a receiver has no room for a message from outside.
            AdmissionClosedError: see `MessageBus.send`.
        """
        targets = self._targets(message.aggregate_id)
        for receiver in targets:
            admission = receiver.subscription.admission
            if admission.is_closed:
                raise AdmissionClosedError(str(receiver))
            if not waited and admission.is_inside():
                continue
            if not admission.intake_is_open:
                raise AdmissionClosedError(str(receiver))
            if not receiver.has_room or (self.waiting and not waited):
                raise trio.WouldBlock
        for receiver in targets:
            lease = receiver.subscription.admission.try_acquire(f"{type(message).__name__} for {receiver.name}")
            receiver.put(MessageExchange(message.routed(), lease))
        return bool(targets)

    def hand_over_waiting(self) -> None:
        """Hand over what waits, in order, as far as there is room."""
        while self.waiting:
            send = next(iter(self.waiting))
            try:
                send.subscribed = self.hand_over(send.message, waited=True)
            except trio.WouldBlock:
                return
            except AdmissionClosedError as error:
                send.error = error
            del self.waiting[send]
            trio.lowlevel.reschedule(send.task)

    async def wait_for_room(self, message: R) -> bool:
        """Wait for a turn among the sends from outside; see `hand_over` for the outcome."""
        send = _WaitingSend(message, trio.lowlevel.current_task())
        self.waiting[send] = None

        def abort(_: object) -> trio.lowlevel.Abort:
            del self.waiting[send]
            # The one that goes may have been the one that all others waited behind.
            self.hand_over_waiting()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        if send.error is not None:
            raise send.error
        return send.subscribed

    def _targets(self, aggregate_id: AggregateId) -> list[InMemoryReceiver[R]]:
        targets = []
        for group in self.groups.values():
            members = [each for each in group if aggregate_id.aggregate in each.subscription.aggregates]
            if members:
                # By ID, so that the order per ID holds when several receivers share a group.
                targets.append(members[hash(aggregate_id) % len(members)])
        return targets


class InMemoryMessageBus(Generic[R]):
    """A bus inside the process. What is on it ends with the process; acknowledging is a formality.

    Several receivers of one group share its aggregate IDs among them.
    """

    def __init__(self) -> None:
        self._topics: dict[str, _Topic[R]] = {}

    def receiver(self, subscription: Subscription) -> InMemoryReceiver[R]:
        """See `MessageBus.receiver`. The subscription is installed at once."""
        topic = self._topics.setdefault(subscription.context, _Topic())
        receiver = InMemoryReceiver(topic, subscription)
        topic.add(receiver)
        return receiver

    async def send(self, message: R) -> None:
        """See `MessageBus.send`."""
        await self.send_if_subscribed(message)

    async def send_if_subscribed(self, message: R) -> bool:
        """See `MessageBus.send_if_subscribed`."""
        await trio.lowlevel.checkpoint()
        topic = self._topics.get(message.aggregate_id.context)
        if topic is None:
            return False
        try:
            return topic.hand_over(message, waited=False)
        except trio.WouldBlock:
            return await topic.wait_for_room(message)


class InMemoryCommandBus(InMemoryMessageBus[CommandMessage]):
    """A `CommandBus` inside the process."""


class InMemoryDomainEventBus(InMemoryMessageBus[DomainEventStream]):
    """A `DomainEventBus` inside the process."""
