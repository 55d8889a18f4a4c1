"""Buses: how messages reach the receivers of dispatchers, with back-pressure."""

from trio_wow.buses._bus import CommandBus as CommandBus
from trio_wow.buses._bus import DomainEventBus as DomainEventBus
from trio_wow.buses._bus import LocalMessageBus as LocalMessageBus
from trio_wow.buses._bus import LocalReceiver as LocalReceiver
from trio_wow.buses._bus import MessageBus as MessageBus
from trio_wow.buses._bus import MessageExchange as MessageExchange
from trio_wow.buses._bus import MessageReceiver as MessageReceiver
from trio_wow.buses._bus import StateEventBus as StateEventBus
from trio_wow.buses._bus import Subscription as Subscription
from trio_wow.buses._local_first import DistributedBuses as DistributedBuses
from trio_wow.buses._local_first import LocalFirstCommandBus as LocalFirstCommandBus
from trio_wow.buses._local_first import LocalFirstDomainEventBus as LocalFirstDomainEventBus
from trio_wow.buses._local_first import LocalFirstStateEventBus as LocalFirstStateEventBus
from trio_wow.buses._memory import InMemoryCommandBus as InMemoryCommandBus
from trio_wow.buses._memory import InMemoryDomainEventBus as InMemoryDomainEventBus
from trio_wow.buses._memory import InMemoryStateEventBus as InMemoryStateEventBus

__all__ = [
    "CommandBus",
    "DistributedBuses",
    "DomainEventBus",
    "InMemoryCommandBus",
    "InMemoryDomainEventBus",
    "InMemoryStateEventBus",
    "LocalFirstCommandBus",
    "LocalFirstDomainEventBus",
    "LocalFirstStateEventBus",
    "LocalMessageBus",
    "LocalReceiver",
    "MessageBus",
    "MessageExchange",
    "MessageReceiver",
    "StateEventBus",
    "Subscription",
]
