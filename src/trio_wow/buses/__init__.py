"""Buses: how messages reach the receivers of dispatchers, with back-pressure."""

from trio_wow.buses._bus import CommandBus as CommandBus
from trio_wow.buses._bus import DomainEventBus as DomainEventBus
from trio_wow.buses._bus import MessageBus as MessageBus
from trio_wow.buses._bus import MessageExchange as MessageExchange
from trio_wow.buses._bus import MessageReceiver as MessageReceiver
from trio_wow.buses._bus import StateEventBus as StateEventBus
from trio_wow.buses._bus import Subscription as Subscription
from trio_wow.buses._memory import InMemoryCommandBus as InMemoryCommandBus
from trio_wow.buses._memory import InMemoryDomainEventBus as InMemoryDomainEventBus
from trio_wow.buses._memory import InMemoryStateEventBus as InMemoryStateEventBus

__all__ = [
    "CommandBus",
    "DomainEventBus",
    "InMemoryCommandBus",
    "InMemoryDomainEventBus",
    "InMemoryStateEventBus",
    "MessageBus",
    "MessageExchange",
    "MessageReceiver",
    "StateEventBus",
    "Subscription",
]
