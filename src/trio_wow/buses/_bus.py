"""The contracts of a bus. Implementations point here."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import trio
from attrs import frozen

from trio_wow.messages import CommandMessage, DomainEventStream, StateEvent
from trio_wow.runtime import ActivityLease, Admission

__all__ = [
    "CommandBus",
    "DomainEventBus",
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
    """

    group: str
    context: str
    aggregates: frozenset[str]
    admission: Admission
    wants: Callable[[Any], bool] = _everything


class MessageExchange(Generic[M]):
    """One delivery of one message to one receiver.

    Attributes:
        message: this route's own copy.
        lease: the activity lease under which it was handed over inside the process; `None` when it came from outside,
            and then the dispatcher takes one.
    """

    __slots__ = ("lease", "message")

    def __init__(self, message: M, lease: ActivityLease | None) -> None:
        self.message = message
        self.lease = lease

    async def acknowledge(self) -> None:
        """Tell the transport that the message is finished and need not come again.

        In memory there is nobody to tell, so this neither waits nor is a checkpoint.
        """

    def discard(self) -> None:
        """Let go of a message that will not be handled here. It stays unacknowledged. Synchronous, idempotent."""
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


CommandBus = MessageBus[CommandMessage]
DomainEventBus = MessageBus[DomainEventStream]
StateEventBus = MessageBus[StateEvent[Any]]
