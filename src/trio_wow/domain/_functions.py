"""Marking methods as message functions, and finding what each of them handles by its annotation."""

import enum
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from attrs import frozen

__all__ = [
    "FunctionKind",
    "MessageFunction",
    "message_functions",
    "on_command",
    "on_event",
    "on_sourcing",
    "on_state_event",
]

F = TypeVar("F", bound=Callable[..., object])
_ATTRIBUTE = "__wow_function__"


class FunctionKind(enum.Enum):
    """What a message function is for; the value is its decorator's name."""

    COMMAND = "on_command"
    SOURCING = "on_sourcing"
    EVENT = "on_event"
    STATE_EVENT = "on_state_event"


@frozen
class MessageFunction:
    """One marked method of a class.

    Attributes:
        name: the method's name.
        kind: its decorator.
        annotation: the annotation of its first parameter after `self`.
        is_async: whether it is an `async def`.
        takes_transaction: whether it has a second parameter, for the transaction that keeps its checkpoint.
    """

    name: str
    kind: FunctionKind
    annotation: Any
    is_async: bool
    takes_transaction: bool


def on_command(function: F) -> F:
    """Mark a method of an aggregate that decides on a command.

    Its first parameter's annotation is the command's class. It reads the state, changes nothing, and returns the event
    that follows, several in a list or tuple, or `None` for no event. It may be `async def`. To refuse, it raises.
    """
    return _mark(function, FunctionKind.COMMAND)


def on_sourcing(function: F) -> F:
    """Mark a method of an aggregate that changes its state by an event.

    Its first parameter's annotation is the event's class. It is a plain function that does nothing else: it runs again
    each time the aggregate is loaded.
    """
    return _mark(function, FunctionKind.SOURCING)


def on_event(function: F) -> F:
    """Mark a method of a processor that handles an event.

    Its first parameter's annotation is the event's class, or `DomainEvent[Class]` for the envelope around it. In a
    saga it returns the command to send, several in a list or tuple, or `None`. It may be `async def`.

    In a projection it may have a second parameter, and then all functions of that projection have: the open transaction
    of the store (for SQLite a `sqlite3.Connection`), in which the store also takes note that the event was handled. It
    is then a plain function, runs in the thread that writes to the store, and must not commit or roll back.
    """
    return _mark(function, FunctionKind.EVENT)


def on_state_event(function: F) -> F:
    """Mark a method of a processor that handles the state an aggregate has after the events of one command.

    Its first parameter's annotation is the aggregate's class, or `StateEvent[Class]` for the stream beside the state.
    For the rest it is like an `@on_event` function.
    """
    return _mark(function, FunctionKind.STATE_EVENT)


def _mark(function: F, kind: FunctionKind) -> F:
    if not inspect.isfunction(function):
        raise TypeError(f"@{kind.value} decorates a method, not {function!r}")
    setattr(function, _ATTRIBUTE, kind)
    return function


def message_functions(cls: type, allowed: set[FunctionKind], decorator: str) -> Iterator[MessageFunction]:
    """Yield the marked methods of a class and its bases, overriding ones once, in the order of their definition.

    Raises:
        TypeError: one is marked for another kind of class, or its first parameter has no usable annotation.
    """
    names = {name: None for base in reversed(cls.__mro__) for name in vars(base)}
    for name in names:
        function = inspect.getattr_static(cls, name)
        kind = getattr(getattr(function, "__func__", function), _ATTRIBUTE, None)
        where = f"{cls.__name__}.{name}"
        if kind is None:
            if any(hasattr(vars(base).get(name), _ATTRIBUTE) for base in cls.__mro__):
                raise TypeError(f"{where} overrides a message function; give it the decorator of the one it overrides")
            continue
        if not inspect.isfunction(function):
            raise TypeError(f"{where} must be an ordinary method, not a {type(function).__name__}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{where} must return what it has to say; a function that yields is not run")
        if kind not in allowed:
            raise TypeError(f"{where} is marked @{kind.value}, which does not belong into a class marked @{decorator}")
        is_async = inspect.iscoroutinefunction(function)
        parameters = _parameters(function)[1:]
        takes_transaction = (
            decorator == "projection" and len(parameters) == 2 and parameters[1].default is inspect.Parameter.empty
        )
        if len(parameters) != 1 and not takes_transaction:
            raise TypeError(f"{where} must take self and one message, not {len(parameters)} further parameters")
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                raise TypeError(f"{where} must take its message as an ordinary parameter, not as {parameter}")
        if takes_transaction and is_async:
            raise TypeError(f"{where} takes a transaction, which is used in a thread; make it a plain function")
        yield MessageFunction(
            name, kind, _annotation(function, parameters[0], where), is_async, takes_transaction=takes_transaction
        )


def _annotation(function: Callable[..., object], parameter: inspect.Parameter, where: str) -> Any:
    if parameter.annotation is parameter.empty:
        raise TypeError(f"{where}: annotate {parameter.name!r} with the class of the message that it handles")
    try:
        # Only this one annotation: what the others name may be known to type checkers alone.
        scope = inspect.unwrap(function).__globals__
        return typing.get_type_hints(_Annotated(message=parameter.annotation), scope)["message"]
    except Exception as error:
        raise TypeError(
            f"{where}: the annotation {parameter.annotation!r} cannot be resolved ({error}); "
            "import the class at module level, outside `if TYPE_CHECKING`"
        ) from error


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    if sys.version_info >= (3, 14):
        import annotationlib

        signature = inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    else:
        signature = inspect.signature(function)
    return list(signature.parameters.values())


class _Annotated:
    """Something with annotations, as `typing.get_type_hints` wants it."""

    def __init__(self, **annotations: object) -> None:
        self.__annotations__ = annotations


def message_class(annotation: Any, where: str) -> type:
    """Return the message class that an annotation names.

    Raises:
        TypeError: it names none, or more than one.
    """
    if isinstance(annotation, type) and annotation not in (object, typing.Any, type(None)):
        return annotation
    raise TypeError(f"{where}: the annotation {annotation!r} must name one message class; write a function for each")
