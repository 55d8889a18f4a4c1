"""Event processors: classes whose methods handle events."""

import enum
from typing import TypeVar

from attrs import frozen

from trio_wow.domain._functions import FunctionKind, MessageFunction, message_functions

__all__ = [
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
class ProcessorModel:
    """What a processor class handles. Get it with `processor_model`.

    Attributes:
        kind: its decorator.
        name: the class's name.
        event_functions: in the order of their definition.
        state_functions: in the order of their definition.
    """

    kind: ProcessorKind
    name: str
    event_functions: tuple[MessageFunction, ...]
    state_functions: tuple[MessageFunction, ...]


def event_processor(cls: C) -> C:
    """Declare a class whose `@on_event` and `@on_state_event` methods act on events: a mail, a call elsewhere.

    Its effects are outside the process, so where it has come to is kept in the store, if that keeps checkpoints. After
    a crash the last few events come again.
    """
    return _compile(cls, ProcessorKind.EVENT)


def projection(cls: C) -> C:
    """Declare a class whose `@on_event` and `@on_state_event` methods keep a view of the events for reading.

    The view is in memory, and made anew from the first event when the process starts; or it is in the store's own
    database, and then its functions take the transaction (see `on_event`), which has each event's effect exactly once.
    One that writes elsewhere is an `@event_processor`.
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
    setattr(
        cls,
        _ATTRIBUTE,
        ProcessorModel(
            kind=kind,
            name=cls.__name__,
            event_functions=tuple(each for each in found if each.kind is FunctionKind.EVENT),
            state_functions=tuple(each for each in found if each.kind is FunctionKind.STATE_EVENT),
        ),
    )
    return cls
