"""Event processors: classes whose methods handle events."""

import enum
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from attrs import frozen

from trio_wow.domain._functions import FunctionKind, MessageFunction, message_class, message_functions
from trio_wow.messages import DomainEvent, StateEvent

__all__ = [
    "EventFunction",
    "ProcessorKind",
    "ProcessorModel",
    "event_processor",
    "processor_model",
    "projection",
    "saga",
]

C = TypeVar("C", bound=type)
_ATTRIBUTE = "__wow_processor__"


class ProcessorKind(enum.Enum):
    """What a processor is for; the value is its decorator's name."""

    EVENT = "event_processor"
    PROJECTION = "projection"
    SAGA = "saga"


@frozen
class EventFunction:
    """One event function, or state-event function, of a processor class.

    Attributes:
        name: the method's name.
        handles: the event's class, or the aggregate's.
        takes_envelope: whether it takes a `DomainEvent` or `StateEvent` rather than the bare event or state.
    """

    name: str
    handles: type
    takes_envelope: bool


@frozen
class ProcessorModel:
    """What a processor class handles. Get it with `processor_model`.

    Attributes:
        kind: its decorator.
        name: the class's name.
        event_functions: in the order of their definition.
        state_functions: in the order of their definition.
        takes_transaction: whether its functions take the transaction in which the store keeps its checkpoint.
    """

    kind: ProcessorKind
    name: str
    event_functions: tuple[EventFunction, ...]
    state_functions: tuple[EventFunction, ...]
    takes_transaction: bool


def event_processor(cls: C) -> C:
    """Declare a class whose `@on_event` and `@on_state_event` methods act on events: a mail, a call elsewhere.

    Its effects are outside the process, so where it has come to is kept in the store, if that keeps checkpoints. After
    a crash the last few events come again.
    """
    return _compile(cls, ProcessorKind.EVENT)


def projection(cls: C) -> C:
    """Declare a class whose `@on_event` and `@on_state_event` methods keep a view of the events for reading.

    The view is in memory, and made anew from the first event when the process starts; or it is in the store's own
    database, and then its functions take the transaction as their second parameter (see `on_event`), which has each
    event's effect exactly once. One that writes elsewhere is an `@event_processor`.
    """
    return _compile(cls, ProcessorKind.PROJECTION)


def saga(cls: C) -> C:
    """Declare a class whose `@on_event` and `@on_state_event` methods answer events with commands, which they return.

    Where it has come to is kept in the store, if that keeps checkpoints. So it has no state of its own in memory:
    after a restart it would not be there.
    """
    return _compile(cls, ProcessorKind.SAGA)


def processor_model(processor: object) -> ProcessorModel:
    """Return the model of a processor (an instance of a decorated class).

    Raises:
        TypeError: its class is not decorated (a subclass is decorated itself).
    """
    model = type(processor).__dict__.get(_ATTRIBUTE)
    if not isinstance(model, ProcessorModel):
        hint = " (give an instance, not the class)" if isinstance(processor, type) else ""
        raise TypeError(
            f"{processor!r} is no processor; decorate its class with @event_processor, @projection or @saga{hint}"
        )
    return model


def _compile(cls: C, kind: ProcessorKind) -> C:
    found = list(message_functions(cls, {FunctionKind.EVENT, FunctionKind.STATE_EVENT}, kind.value))
    if not found:
        raise TypeError(f"{cls.__name__} has no @on_event or @on_state_event function")
    functions: dict[FunctionKind, list[EventFunction]] = {FunctionKind.EVENT: [], FunctionKind.STATE_EVENT: []}
    for each in found:
        functions[each.kind].append(_event_function(each, f"{cls.__name__}.{each.name}"))
    setattr(
        cls,
        _ATTRIBUTE,
        ProcessorModel(
            kind=kind,
            name=cls.__name__,
            event_functions=tuple(functions[FunctionKind.EVENT]),
            state_functions=tuple(functions[FunctionKind.STATE_EVENT]),
            takes_transaction=_all_or_none(cls, found),
        ),
    )
    return cls


def _all_or_none(cls: type, functions: Sequence[MessageFunction]) -> bool:
    without = [each.name for each in functions if not each.takes_transaction]
    if 0 < len(without) < len(functions):
        raise TypeError(
            f"{cls.__name__}: {', '.join(without)} must take the transaction too, as its other functions do: "
            "one checkpoint stands for all of them"
        )
    return not without


def _event_function(function: MessageFunction, where: str) -> EventFunction:
    envelope: Any = DomainEvent if function.kind is FunctionKind.EVENT else StateEvent
    annotation = function.annotation
    if annotation is envelope:
        raise TypeError(f"{where}: write {envelope.__name__}[...] with the class of what it handles")
    if typing.get_origin(annotation) is envelope:
        return EventFunction(function.name, message_class(typing.get_args(annotation)[0], where), takes_envelope=True)
    return EventFunction(function.name, message_class(annotation, where), takes_envelope=False)
