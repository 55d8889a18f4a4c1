"""Aggregates and event processors: decorators, the models compiled from them, and the application's registry."""

from trio_wow.domain._aggregate import AggregateDeleted as AggregateDeleted
from trio_wow.domain._aggregate import AggregateModel as AggregateModel
from trio_wow.domain._aggregate import AggregateRecovered as AggregateRecovered
from trio_wow.domain._aggregate import CommandFunction as CommandFunction
from trio_wow.domain._aggregate import DeleteAggregate as DeleteAggregate
from trio_wow.domain._aggregate import RecoverAggregate as RecoverAggregate
from trio_wow.domain._aggregate import Reply as Reply
from trio_wow.domain._aggregate import aggregate as aggregate
from trio_wow.domain._aggregate import aggregate_model as aggregate_model
from trio_wow.domain._arguments import Arguments as Arguments
from trio_wow.domain._arguments import checked_services as checked_services
from trio_wow.domain._domain import Domain as Domain
from trio_wow.domain._functions import MessageFunction as MessageFunction
from trio_wow.domain._functions import on_command as on_command
from trio_wow.domain._functions import on_error as on_error
from trio_wow.domain._functions import on_event as on_event
from trio_wow.domain._functions import on_sourcing as on_sourcing
from trio_wow.domain._functions import on_state_event as on_state_event
from trio_wow.domain._processor import ProcessorKind as ProcessorKind
from trio_wow.domain._processor import ProcessorModel as ProcessorModel
from trio_wow.domain._processor import event_processor as event_processor
from trio_wow.domain._processor import processor_model as processor_model
from trio_wow.domain._processor import projection as projection
from trio_wow.domain._processor import saga as saga

__all__ = [
    "AggregateDeleted",
    "AggregateModel",
    "AggregateRecovered",
    "Arguments",
    "CommandFunction",
    "DeleteAggregate",
    "Domain",
    "MessageFunction",
    "ProcessorKind",
    "ProcessorModel",
    "RecoverAggregate",
    "Reply",
    "aggregate",
    "aggregate_model",
    "checked_services",
    "event_processor",
    "on_command",
    "on_error",
    "on_event",
    "on_sourcing",
    "on_state_event",
    "processor_model",
    "projection",
    "saga",
]
