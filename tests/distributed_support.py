"""A distributed bus between nodes of one process, which can be told to fail, delay, duplicate and redeliver."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import trio
from attrs import define

from trio_wow.buses import MessageExchange, Subscription


def no_one(_message: Any) -> str | None:
    """Let whoever asks first have a message."""
    return None


@define(eq=False)
class Delivery:
    """One message on its way to one group."""

    message: Any
    node: str | None
    not_before: float
    redelivered: bool = False


class Group:
    """What one consumer group has still to get, and what it has got and not acknowledged."""

    def __init__(self) -> None:
        self.pending: list[Delivery] = []
        self.unacknowledged: dict[Delivery, None] = {}
        self.acknowledged: list[Any] = []
        self.discarded: list[Any] = []
        self.receivers: list[NetworkReceiver] = []


class Network:
    """Carries messages of one kind. Each group keeps what it has been sent until it is acknowledged.

    Attributes:
        sent: every message that was sent, marks and all.
        failing: how many sends fail, from now on.
        copies: how often each group gets each message.
        forgetting: how many acknowledgements get lost, from now on.
        delay: seconds from sending to delivery; infinite until `let_go`.
        node_of: says which node's receivers shall get a message, if they are open; `None` for any.
    """

    def __init__(self, *, copies: int = 1, delay: float = 0.0, node_of: Callable[[Any], str | None] = no_one) -> None:
        self.sent: list[Any] = []
        self.failing = 0
        self.forgetting = 0
        self.copies = copies
        self.delay = delay
        self.node_of = node_of
        self.groups: dict[tuple[str, str], Group] = {}
        self.changed = trio.Event()

    def bus(self, node: str) -> "NetworkBus":
        """Return the bus as one node sees it."""
        return NetworkBus(self, node)

    def group(self, name: str, context: str = "chains") -> Group:
        return self.groups.setdefault((name, context), Group())

    def change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def let_go(self) -> None:
        """Deliver what is delayed."""
        self.delay = 0.0
        for group in self.groups.values():
            for delivery in group.pending:
                delivery.not_before = -inf
        self.change()

    def redeliver(self) -> None:
        """Deliver once more what has not been acknowledged, as after a timeout or the death of a node."""
        for group in self.groups.values():
            for delivery in group.unacknowledged:
                delivery.redelivered = True
            group.pending = [*group.unacknowledged, *group.pending]
            group.unacknowledged.clear()
        self.change()

    @property
    def is_done(self) -> bool:
        """Whether every group that has a receiver has acknowledged everything."""
        groups = (group for group in self.groups.values() if group.receivers)
        return not any(group.pending or group.unacknowledged for group in groups)


class NetworkBus:
    def __init__(self, network: Network, node: str) -> None:
        self.network = network
        self.node = node

    async def send(self, message: Any) -> None:
        await self.send_if_subscribed(message)

    async def send_if_subscribed(self, message: Any) -> bool:
        await trio.lowlevel.checkpoint()
        network = self.network
        if network.failing:
            network.failing -= 1
            raise OSError("the network is down")
        network.sent.append(message.routed())
        aggregate_id = message.aggregate_id
        groups = [group for (_, context), group in network.groups.items() if context == aggregate_id.context]
        for group in groups:
            for _ in range(network.copies):
                delivery = Delivery(message.routed(), network.node_of(message), trio.current_time() + network.delay)
                group.pending.append(delivery)
        network.change()
        return bool(groups)

    def receiver(self, subscription: Subscription) -> "NetworkReceiver":
        group = self.network.group(subscription.group, subscription.context)
        receiver = NetworkReceiver(self.network, self.node, group, subscription)
        group.receivers.append(receiver)
        return receiver


class NetworkReceiver:
    """One node's member of a group.

    Attributes:
        limits: what each call has asked for.
        broken: raised by the next call.
    """

    def __init__(self, network: Network, node: str, group: Group, subscription: Subscription) -> None:
        self.network = network
        self.node = node
        self.group = group
        self.subscription = subscription
        self.ready = trio.Event()
        self.ready.set()
        self.is_open = False
        self.is_closed = False
        self.limits: list[int] = []
        self.broken: Exception | None = None

    async def receive_batch(self, limit: int, /) -> Sequence[MessageExchange[Any]]:
        assert self.is_open
        self.limits.append(limit)
        await trio.lowlevel.checkpoint()
        while True:
            if self.broken is not None:
                raise self.broken
            if self.is_closed:
                raise trio.EndOfChannel
            if batch := self._take(limit):
                return batch
            due = min((each.not_before for each in self.group.pending if self._may_have(each)), default=inf)
            with trio.move_on_at(due):
                await self.network.changed.wait()

    def _may_have(self, delivery: Delivery) -> bool:
        others = [each for each in self.group.receivers if each.is_open and each.node == delivery.node]
        return not others or self in others

    def _take(self, limit: int) -> list[MessageExchange[Any]]:
        now = trio.current_time()
        due = [each for each in self.group.pending if each.not_before <= now and self._may_have(each)][:limit]
        for delivery in due:
            self.group.pending.remove(delivery)
            self.group.unacknowledged[delivery] = None
        return [NetworkExchange(delivery, self.group, self.network) for delivery in due]

    def open(self) -> None:
        self.is_open = True
        self.network.change()

    def close(self) -> None:
        self.is_closed = True
        if self in self.group.receivers:
            self.group.receivers.remove(self)
        self.network.change()

    def abandon(self) -> None:
        self.close()


class NetworkExchange(MessageExchange[Any]):
    def __init__(self, delivery: Delivery, group: Group, network: Network) -> None:
        super().__init__(delivery.message.routed(), None)
        self.redelivered = delivery.redelivered
        self.delivery = delivery
        self.group = group
        self.network = network

    def discard(self) -> None:
        self.group.discarded.append(self.message)

    async def acknowledge(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.network.forgetting:
            self.network.forgetting -= 1
            return
        self.group.unacknowledged.pop(self.delivery, None)
        self.group.pending = [each for each in self.group.pending if each is not self.delivery]
        self.group.acknowledged.append(self.message)
