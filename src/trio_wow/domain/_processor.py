"""Event processors: classes whose methods handle events."""

import enum
import typing
from typing import Any, TypeVar

from attrs import frozen

from trio_wow.domain._functions import FunctionKind, message_class, message_functions
from trio_wow.messages import DomainEvent

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
    """One event function of a processor class.

    Attributes:
        name: the method's name.
        event: the event class it handles.
        takes_envelope: whether it takes a `DomainEvent` rather than the bare body.
    """

    name: str
    event: type
    takes_envelope: bool


@frozen
class ProcessorModel:
    """What a processor class handles. Get it with `processor_model`.

    Attributes:
        kind: its decorator.
        name: the class's name.
        functions: in the order of their definition.
    """

    kind: ProcessorKind
    name: str
    functions: tuple[EventFunction, ...]


def event_processor(cls: C) -> C:
    """Declare a class whose `@on_event` methods act on events: a mail, a call to another system."""
    return _compile(cls, ProcessorKind.EVENT)


def projection(cls: C) -> C:
    """Declare a class whose `@on_event` methods keep a view of the events for reading."""
    return _compile(cls, ProcessorKind.PROJECTION)


def saga(cls: C) -> C:
    """Declare a class whose `@on_event` methods answer events with commands, which they return."""
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
    functions = tuple(
        _event_function(function.name, function.annotation, f"{cls.__name__}.{function.name}")
        for function in message_functions(cls, {FunctionKind.EVENT}, kind.value)
    )
    if not functions:
        raise TypeError(f"{cls.__name__} has no @on_event function")
    setattr(cls, _ATTRIBUTE, ProcessorModel(kind, cls.__name__, functions))
    return cls


def _event_function(name: str, annotation: Any, where: str) -> EventFunction:
    if annotation is DomainEvent:
        raise TypeError(f"{where}: write DomainEvent[...] with the event's class")
    if typing.get_origin(annotation) is DomainEvent:
        return EventFunction(name, message_class(typing.get_args(annotation)[0], where), takes_envelope=True)
    return EventFunction(name, message_class(annotation, where), takes_envelope=False)
