"""Who has subscribed to what, and the two sources that tell them."""

import logging
from collections.abc import Iterable
from typing import Protocol

import orjson

from trio_wow.adapters.websocket._protocol import change_frame, events_part
from trio_wow.buses import DomainEventBus
from trio_wow.dispatch import Handler, Handling, MessageDispatcher
from trio_wow.domain import Domain
from trio_wow.errors import SerializationError
from trio_wow.messages import AggregateId, DomainEventStream

__all__ = ["EventFeed", "ProjectionChanges", "Subscriptions"]

_log = logging.getLogger("trio_wow.adapters.websocket")


class Subscriber(Protocol):
    """Who takes frames for a subscription, at once."""

    def deliver(self, id: str, frame: bytes, /) -> None:
        """Take a frame for the subscription `id`. Synchronous, and never raises."""
        ...


class Subscriptions:
    """Subscriptions by topic: an aggregate ID or the name of a projection. Each is for one tenant's aggregates."""

    def __init__(self) -> None:
        self._by_topic: dict[AggregateId | str, dict[tuple[Subscriber, str], str]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_topic.values()))

    def __contains__(self, topic: AggregateId | str) -> bool:
        return topic in self._by_topic

    def add(self, topic: AggregateId | str, subscriber: Subscriber, id: str, tenant: str) -> None:
        """Subscribe."""
        self._by_topic.setdefault(topic, {})[subscriber, id] = tenant

    def remove(self, topic: AggregateId | str, subscriber: Subscriber, id: str) -> None:
        """Unsubscribe; what is not there is no error."""
        of_topic = self._by_topic.get(topic, {})
        of_topic.pop((subscriber, id), None)
        if not of_topic:
            self._by_topic.pop(topic, None)

    def of(self, topic: AggregateId | str, tenant: str) -> list[tuple[Subscriber, str]]:
        """Return who may be told of something that has happened to an aggregate of a tenant."""
        return [who for who, theirs in self._by_topic.get(topic, {}).items() if theirs == tenant]


class EventFeed(MessageDispatcher[DomainEventStream]):
    """Tells subscribers of the streams that are published. It never waits for one of them."""

    def __init__(self, name: str, domain: Domain, events: DomainEventBus, subscriptions: Subscriptions) -> None:
        super().__init__(name, events, domain.aggregates)
        self._serializer = domain.serializer
        self._subscriptions = subscriptions

    def wants(self, message: DomainEventStream, /) -> bool:
        """See `MessageDispatcher.wants`: a stream of an aggregate that nobody has subscribed to is left out."""
        return message.aggregate_id in self._subscriptions

    async def handle(self, handling: Handling, /) -> bool:
        """Tell the subscribers. A stream that they cannot be told of is no reason to end."""
        stream: DomainEventStream = handling.message
        subscribers = self._subscriptions.of(stream.aggregate_id, stream.aggregate_id.tenant)
        if not subscribers:
            return True
        try:
            part = orjson.Fragment(events_part(self._serializer, stream))
        except SerializationError:
            _log.exception("subscribers of %s were not told of version %s", stream.aggregate_id, stream.version)
            return True
        for subscriber, id in subscribers:
            subscriber.deliver(id, orjson.dumps({"type": "events", "id": id, "stream": part}))
        return True


class ProjectionChanges:
    """A function filter that tells of what projections have handled: give it to the `App`, and to the gateway.

    Args:
        projections: those that may be subscribed to: classes decorated with `@projection`, or instances of them.
    """

    def __init__(self, projections: Iterable[object]) -> None:
        self.names = frozenset(each.__name__ if isinstance(each, type) else type(each).__name__ for each in projections)
        self._listening: list[Subscriptions] = []

    def tell(self, subscriptions: Subscriptions) -> None:
        """Tell these subscribers too."""
        self._listening.append(subscriptions)

    async def __call__(self, handling: Handling, proceed: Handler, /) -> object:
        """See `Filter`."""
        outcome = await proceed(handling)
        # "View.handled", or "View" or "View/state" where its functions share a transaction.
        name = (handling.function or "").partition(".")[0].partition("/")[0]
        if name in self.names:
            aggregate_id, version = handling.message.aggregate_id, handling.message.version
            for subscriptions in self._listening:
                for subscriber, id in subscriptions.of(name, aggregate_id.tenant):
                    subscriber.deliver(id, change_frame(id, name, aggregate_id, version))
        return outcome
