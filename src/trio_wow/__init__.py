"""Event-sourced aggregates on Trio: in order per aggregate ID, in parallel across IDs.

The names that most programs need. Everything else is exported by the room it belongs to, such as
`trio_wow.messages` or `trio_wow.runtime`.
"""

from trio_wow.app import App as App
from trio_wow.app import Settings as Settings
from trio_wow.buses import InMemoryCommandBus as InMemoryCommandBus
from trio_wow.buses import InMemoryDomainEventBus as InMemoryDomainEventBus
from trio_wow.buses import InMemoryStateEventBus as InMemoryStateEventBus
from trio_wow.dispatch import CommandDispatcher as CommandDispatcher
from trio_wow.dispatch import EventDispatcher as EventDispatcher
from trio_wow.dispatch import ProjectionDispatcher as ProjectionDispatcher
from trio_wow.dispatch import SagaDispatcher as SagaDispatcher
from trio_wow.dispatch import SnapshotDispatcher as SnapshotDispatcher
from trio_wow.domain import AggregateDeleted as AggregateDeleted
from trio_wow.domain import AggregateRecovered as AggregateRecovered
from trio_wow.domain import DeleteAggregate as DeleteAggregate
from trio_wow.domain import Domain as Domain
from trio_wow.domain import RecoverAggregate as RecoverAggregate
from trio_wow.domain import Reply as Reply
from trio_wow.domain import aggregate as aggregate
from trio_wow.domain import event_processor as event_processor
from trio_wow.domain import on_command as on_command
from trio_wow.domain import on_error as on_error
from trio_wow.domain import on_event as on_event
from trio_wow.domain import on_sourcing as on_sourcing
from trio_wow.domain import on_state_event as on_state_event
from trio_wow.domain import projection as projection
from trio_wow.domain import saga as saga
from trio_wow.errors import CommandRejectedError as CommandRejectedError
from trio_wow.errors import WowError as WowError
from trio_wow.eventsourcing import InMemoryEventStore as InMemoryEventStore
from trio_wow.execution import KeyedExecutor as KeyedExecutor
from trio_wow.gateway import CommandGateway as CommandGateway
from trio_wow.messages import AggregateId as AggregateId
from trio_wow.messages import CommandResult as CommandResult
from trio_wow.messages import DomainEvent as DomainEvent
from trio_wow.messages import Headers as Headers
from trio_wow.messages import Stage as Stage
from trio_wow.messages import StateEvent as StateEvent
from trio_wow.runtime import Runtime as Runtime

__all__ = [
    "AggregateDeleted",
    "AggregateId",
    "AggregateRecovered",
    "App",
    "CommandDispatcher",
    "CommandGateway",
    "CommandRejectedError",
    "CommandResult",
    "DeleteAggregate",
    "Domain",
    "DomainEvent",
    "EventDispatcher",
    "Headers",
    "InMemoryCommandBus",
    "InMemoryDomainEventBus",
    "InMemoryEventStore",
    "InMemoryStateEventBus",
    "KeyedExecutor",
    "ProjectionDispatcher",
    "RecoverAggregate",
    "Reply",
    "Runtime",
    "SagaDispatcher",
    "Settings",
    "SnapshotDispatcher",
    "Stage",
    "StateEvent",
    "WowError",
    "aggregate",
    "event_processor",
    "on_command",
    "on_error",
    "on_event",
    "on_sourcing",
    "on_state_event",
    "projection",
    "saga",
]
