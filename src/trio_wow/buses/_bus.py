"""The contracts of a bus. Implementations point here."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import trio
from attrs import frozen

from trio_wow.execution import DemandSource
from trio_wow.messages import CommandMessage, DomainEventStream, StateEvent
from trio_wow.runtime import ActivityLease, Admission

__all__ = [
    "CommandBus",
    "DomainEventBus",
    "LocalMessageBus",
    "LocalReceiver",
    "MessageBus",
    "MessageExchange",
    "MessageReceiver",
    "StateEventBus",
    "Subscription",
]

M = TypeVar("M")


def _everything(_: object) -> bool:
    return True


@frozen
class Subscription:
    """What a receiver receives.

    Attributes:
        group: receivers of one group share the messages; each group gets all of them.
        context: the bounded context.
        aggregates: names of the context's aggregates.
        admission: the doors of the runtime that the receiver works for.
        wants: says of a message whether the receiver has any use for it. A plain, quick function. A bus that can ask it
            leaves out the others; one that cannot brings them all the same.
        nursery: where a receiver runs tasks of its own, from `open` to `close`: its component's. Receivers inside the
            process need none.
    """

    group: str
    context: str
    aggregates: frozenset[str]
    admission: Admission
    wants: Callable[[Any], bool] = _everything
    nursery: trio.Nursery | None = None


class MessageExchange(Generic[M]):
    """One delivery of one message to one receiver.

    Attributes:
        message: this route's own copy.
        lease: the activity lease under which it was handed over inside the process; `None` when it came from outside,
            and then the dispatcher takes one.
        redelivered: whether the message may have been brought before, to this receiver or another one of its group,
            without having been acknowledged.
        taken_elsewhere: whether it is the first delivery of a copy, whose message another receiver of the group has
            taken, and has perhaps handled by now. Of a further delivery one cannot say so: who took it may have died.
    """

    __slots__ = ("lease", "message")

    redelivered: bool = False
    taken_elsewhere: bool = False

    def __init__(self, message: M, lease: ActivityLease | None) -> None:
        self.message = message
        self.lease = lease

    async def acknowledge(self) -> None:
        """Tell the transport that the message is finished and need not come again.

        In memory there is nobody to tell, so this neither waits nor is a checkpoint.
        """

    def is_settled(self) -> bool:
        """Whether the message needs no handling but only to be acknowledged. To be asked when its turn has come."""
        return False

    def discard(self) -> None:
        """Let go of a message without having finished it. It stays unacknowledged. Synchronous, idempotent."""
        if self.lease is not None:
            self.lease.close()


class MessageReceiver(Protocol[M]):
    """A `BatchSource` of exchanges: one dispatcher's messages of one bounded context."""

    @property
    def ready(self) -> trio.Event:
        """Set when the subscription is installed: what is sent from then on reaches this receiver or its group."""
        ...

    async def receive_batch(self, limit: int, /) -> Sequence[MessageExchange[M]]:
        """See `BatchSource.receive_batch`. Ends with `trio.EndOfChannel` when closed and empty."""
        ...

    def open(self) -> None:
        """Let messages in. Before, senders wait."""
        ...

    def close(self) -> None:
        """Let no more messages in; those that are in can still be received. Synchronous, idempotent."""
        ...

    def abandon(self) -> None:
        """Close, and discard what nobody will receive any more. Synchronous, idempotent."""
        ...


class MessageBus(Protocol[M]):
    """Carries messages to the receivers subscribed to their aggregates."""

    async def send(self, message: M) -> None:
        """Hand a message over to every group that is subscribed to its aggregate; none is no error.

        A send from outside waits until every group has room; that wait is the only buffer. A send made while a message
        of the same runtime is being handled never waits for room (`docs/concepts.md`, "Back-pressure and cycles").

        Raises:
            AdmissionClosedError: the runtime of a receiver takes no such message: from outside because it has not
                started or is stopping, from inside because it is ending after a failure. No group got the message.
            SerializationError: a header was changed to something that is no text. No group got the message.

        Cancellation: a cancelled call has handed over nothing.
        Ordering: messages that one task sends one after the other reach each group in that order.
        """
        ...

    async def send_if_subscribed(self, message: M) -> bool:
        """Like `send`, and say whether anybody is subscribed. Where nobody is, nothing was sent."""
        ...

    def receiver(self, subscription: Subscription) -> MessageReceiver[M]:
        """Subscribe. The caller owns the receiver and closes it.

        Raises:
            RuntimeStateError: the bus is in use by another runtime and cannot serve two.
        """
        ...


class LocalReceiver(MessageReceiver[M], DemandSource[MessageExchange[M]], Protocol[M]):
    """A receiver inside the process, which lets a feed bring it messages in another way, in the same window.

    Attributes:
        id: no other receiver has or had it.
        subscription: what it receives.
    """

    @property
    def id(self) -> str: ...

    @property
    def subscription(self) -> Subscription: ...

    def keep(self, most: int, /) -> int:
        """Keep up to `most` places for what the feed is about to ask for, and return how many. Synchronous.

        At most half of the room, so that while nothing comes not all others are kept out. None while nothing may be
        taken from outside.
        """
        ...

    async def reserve(self) -> None:
        """Wait until something may be taken from outside and there is room, and keep one place.

        The feed and the senders that wait take turns. There is one feed.

        Cancellation: a cancelled call keeps nothing.
        """
        ...

    def release(self, places: int, /) -> None:
        """Give places back that are not needed. Synchronous."""
        ...

    def bring(self, exchange: MessageExchange[M], /) -> None:
        """Put an exchange into a place that was kept for it. Synchronous."""
        ...


class LocalMessageBus(MessageBus[M], Protocol[M]):
    """A bus inside the process, which knows who has taken a message."""

    async def admit(self, message: M) -> Sequence[LocalReceiver[M]]:
        """Hand a message over to those open receivers that it is for now, one of each group, and return them.

        It is handed over to all of them or to none: to none if one of them closes before, or if their runtime does not
        admit it. Whoever has got it has its runtime's lease for it, which a later shutdown waits for. It waits for room
        as `send` does, and never for a receiver to open.

        Raises:
            SerializationError: as for `send`.

        Cancellation: a cancelled call has handed over nothing.
        Ordering: as for `send`.
        """
        ...

    def receiver(self, subscription: Subscription) -> LocalReceiver[M]:
        """See `MessageBus.receiver`. It is ready at once."""
        ...


CommandBus = MessageBus[CommandMessage]
DomainEventBus = MessageBus[DomainEventStream]
StateEventBus = MessageBus[StateEvent[Any]]
