"""Messages: identity, headers, envelopes, and their versioned JSON form."""

from trio_wow.messages._envelopes import CommandMessage as CommandMessage
from trio_wow.messages._envelopes import DomainEvent as DomainEvent
from trio_wow.messages._envelopes import DomainEventStream as DomainEventStream
from trio_wow.messages._envelopes import Headers as Headers
from trio_wow.messages._envelopes import StateEvent as StateEvent
from trio_wow.messages._identity import DEFAULT_TENANT as DEFAULT_TENANT
from trio_wow.messages._identity import AggregateId as AggregateId
from trio_wow.messages._identity import check_identifier as check_identifier
from trio_wow.messages._identity import check_name as check_name
from trio_wow.messages._identity import interned_id as interned_id
from trio_wow.messages._results import CommandError as CommandError
from trio_wow.messages._results import CommandResult as CommandResult
from trio_wow.messages._results import Stage as Stage
from trio_wow.messages._serialization import Serializer as Serializer
from trio_wow.messages._serialization import make_converter as make_converter
from trio_wow.messages._types import EventUpgrader as EventUpgrader
from trio_wow.messages._types import MessageType as MessageType
from trio_wow.messages._types import MessageTypes as MessageTypes
from trio_wow.messages._types import message_type as message_type

__all__ = [
    "DEFAULT_TENANT",
    "AggregateId",
    "CommandError",
    "CommandMessage",
    "CommandResult",
    "DomainEvent",
    "DomainEventStream",
    "EventUpgrader",
    "Headers",
    "MessageType",
    "MessageTypes",
    "Serializer",
    "Stage",
    "StateEvent",
    "check_identifier",
    "check_name",
    "interned_id",
    "make_converter",
    "message_type",
]
