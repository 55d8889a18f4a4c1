"""Marking methods as message functions, and reading from their annotations what each of them handles and takes."""

import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

from attrs import frozen

from trio_wow.messages import CommandMessage, DomainEvent, DomainEventStream, Headers, StateEvent

__all__ = [
    "AGGREGATE",
    "FunctionKind",
    "MessageFunction",
    "Parameter",
    "Source",
    "message_functions",
    "on_command",
    "on_error",
    "on_event",
    "on_sourcing",
    "on_state_event",
]

F = TypeVar("F", bound=Callable[..., object])
_ATTRIBUTE = "__wow_function__"
AGGREGATE = "__wow_aggregate__"
"""The attribute of an aggregate's class that holds its model."""


class FunctionKind(enum.Enum):
    """What a message function is for; the value is its decorator's name."""

    COMMAND = "on_command"
    SOURCING = "on_sourcing"
    ERROR = "on_error"
    EVENT = "on_event"
    STATE_EVENT = "on_state_event"


_ENVELOPES: dict[FunctionKind, tuple[Any, ...]] = {
    FunctionKind.COMMAND: (CommandMessage,),
    FunctionKind.SOURCING: (),
    FunctionKind.ERROR: (CommandMessage,),
    FunctionKind.EVENT: (DomainEvent, DomainEventStream),
    FunctionKind.STATE_EVENT: (StateEvent, DomainEventStream),
}
"""What a function of each kind may take beside the body."""
_ALL_ENVELOPES = (CommandMessage, DomainEvent, DomainEventStream, StateEvent)


class Source(enum.Enum):
    """Where the argument for a parameter comes from."""

    HEADERS = "headers"
    """The message's headers."""
    ENVELOPE = "envelope"
    """The message itself, around the body."""
    STREAM = "stream"
    """The stream that an event or a state came in."""
    STATE = "state"
    """The aggregate's state after the stream."""
    SERVICE = "service"
    """What the application has registered under the annotation, or the store's transaction."""


@frozen
class Parameter:
    """One parameter of a message function, after the message.

    Attributes:
        name: its name.
        annotation: the class that it is annotated with; for the envelope the bare one.
        source: where its argument comes from.
        is_optional: whether it has a default, which stands when nothing is registered.
    """

    name: str
    annotation: Any
    source: Source
    is_optional: bool


@frozen
class MessageFunction:
    """One marked method of a class.

    Attributes:
        name: the method's name.
        kind: its decorator.
        handles: the classes that it handles; for an error function those of the commands.
        takes_envelope: whether its first parameter is the envelope rather than what is in it.
        is_async: whether it is an `async def`.
        parameters: what it takes besides.
        errors: the classes of the errors that an error function handles.
        exists: whether a command wants its aggregate to exist already (`True`) or not yet (`False`).
        priority: of those that handle the same event, the greater one starts first.
        block: whether those of lower priority are not called for that event.
    """

    name: str
    kind: FunctionKind
    handles: tuple[type, ...]
    takes_envelope: bool
    is_async: bool
    parameters: tuple[Parameter, ...]
    errors: tuple[type, ...] = ()
    exists: bool | None = None
    priority: int = 0
    block: bool = False


@frozen
class _Mark:
    kind: FunctionKind
    exists: bool | None = None
    priority: int = 0
    block: bool = False


@overload
def on_command(function: F, /) -> F: ...


@overload
def on_command(*, exists: bool | None = None) -> Callable[[F], F]: ...


def on_command(function: F | None = None, /, *, exists: bool | None = None) -> F | Callable[[F], F]:
    """Mark a method of an aggregate that decides on a command.

    Its first parameter's annotation is the command's class, or a union of several. It reads the state, changes nothing,
    and returns the event that follows, several in a list or tuple, or `None` for no event; in a `Reply`, if it has
    something to say to the caller. It may be `async def`. To refuse, it raises. What it may take besides the command:
    `docs/dispatch.md`, "What a function takes".

    While the aggregate is deleted it is called for `RecoverAggregate` only; one for that or for `DeleteAggregate`
    decides instead of what is built in.

    Args:
        function: the method.
        exists: `True` refuses the command with `AggregateNotFoundError` while nothing has happened to the aggregate,
            `False` with `AggregateExistsError` once something has. With `None` the first command brings it about.
    """
    if exists not in (None, True, False):
        raise TypeError(f"exists must be True, False or None, not {exists!r}")
    mark = _Mark(FunctionKind.COMMAND, exists)
    return (lambda function: _mark(function, mark)) if function is None else _mark(function, mark)


def on_sourcing(function: F) -> F:
    """Mark a method of an aggregate that changes its state by an event.

    Its first parameter's annotation is the event's class, or a union of several. It is a plain function that takes
    nothing else and does nothing else: it runs again each time the aggregate is loaded.
    """
    return _mark(function, _Mark(FunctionKind.SOURCING))


def on_error(function: F) -> F:
    """Mark a method of an aggregate that is told of a command that has failed.

    Its first two parameters' annotations are the class of the errors (`Exception` for all) and that of the command;
    each may be a union. It is called once, after the last attempt, on the state as it is stored; what it changes is
    lost, and the command's result stays what it was. It may be `async def`. What it raises is logged.
    """
    return _mark(function, _Mark(FunctionKind.ERROR))


@overload
def on_event(function: F, /) -> F: ...


@overload
def on_event(*, priority: int = 0, block: bool = False) -> Callable[[F], F]: ...


def on_event(function: F | None = None, /, *, priority: int = 0, block: bool = False) -> F | Callable[[F], F]:
    """Mark a method of a processor that handles an event.

    Its first parameter's annotation is the event's class, a union of several, or a class that several inherit from;
    bare or as `DomainEvent[Class]` for the envelope around it. In a saga it returns the command to send, several in a
    list or tuple, or `None`. It may be `async def`. What it may take besides the event: `docs/dispatch.md`, "What a
    function takes".

    In a projection it may take the open transaction of the store (for SQLite a parameter annotated
    `sqlite3.Connection`), and then all functions of that projection do. The store takes note in that transaction that
    the event was handled. The function is then a plain one, runs in the thread that writes to the store, and must not
    commit or roll back.

    Args:
        function: the method.
        priority: of the functions of this processor for one event, those with a greater one start first.
        block: `True` keeps those of lower priority from being called for the event, however this one ends.
    """
    return _mark_ordered(function, FunctionKind.EVENT, priority, block)


@overload
def on_state_event(function: F, /) -> F: ...


@overload
def on_state_event(*, priority: int = 0, block: bool = False) -> Callable[[F], F]: ...


def on_state_event(function: F | None = None, /, *, priority: int = 0, block: bool = False) -> F | Callable[[F], F]:
    """Mark a method of a processor that handles the state an aggregate has after the events of one command.

    Its first parameter's annotation is the aggregate's class, or a union of several; bare or as `StateEvent[Class]` for
    the stream beside the state. For the rest it is like an `@on_event` function.

    Args:
        function: the method.
        priority: as for `on_event`.
        block: as for `on_event`.
    """
    return _mark_ordered(function, FunctionKind.STATE_EVENT, priority, block)


def _mark_ordered(function: F | None, kind: FunctionKind, priority: int, block: bool) -> F | Callable[[F], F]:
    if type(priority) is not int:
        raise TypeError(f"priority must be an int, not {priority!r}")
    if type(block) is not bool:
        raise TypeError(f"block must be True or False, not {block!r}")
    mark = _Mark(kind, priority=priority, block=block)
    return (lambda function: _mark(function, mark)) if function is None else _mark(function, mark)


def _mark(function: F, mark: _Mark) -> F:
    if not inspect.isfunction(function):
        raise TypeError(f"@{mark.kind.value} decorates a method, not {function!r}")
    setattr(function, _ATTRIBUTE, mark)
    return function


def message_functions(cls: type, allowed: set[FunctionKind], decorator: str) -> Iterator[MessageFunction]:
    """Yield the marked methods of a class and its bases, overriding ones once, in the order of their definition.

    Raises:
        TypeError: one is marked for another kind of class, or the annotation of a parameter is of no use.
    """
    names = {name: None for base in reversed(cls.__mro__) for name in vars(base)}
    for name in names:
        function = inspect.getattr_static(cls, name)
        mark = getattr(getattr(function, "__func__", function), _ATTRIBUTE, None)
        where = f"{cls.__name__}.{name}"
        if not isinstance(mark, _Mark):
            if any(hasattr(vars(base).get(name), _ATTRIBUTE) for base in cls.__mro__):
                raise TypeError(f"{where} overrides a message function; give it the decorator of the one it overrides")
            continue
        if not inspect.isfunction(function):
            raise TypeError(f"{where} must be an ordinary method, not a {type(function).__name__}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{where} must return what it has to say; a function that yields is not run")
        if mark.kind not in allowed:
            raise TypeError(
                f"{where} is marked @{mark.kind.value}, which does not belong into a class marked @{decorator}"
            )
        yield _read(function, mark, name, where)


def _read(function: Callable[..., object], mark: _Mark, name: str, where: str) -> MessageFunction:
    parameters = _parameters(function)[1:]
    leading = 2 if mark.kind is FunctionKind.ERROR else 1
    what = "an error and a command" if leading == 2 else "a message"
    if len(parameters) < leading:
        raise TypeError(f"{where} must take self and {what}")
    for parameter in parameters[:leading]:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise TypeError(f"{where} must take {what} as ordinary parameters, not as {parameter}")
    errors: tuple[type, ...] = ()
    if leading == 2:
        errors = _classes(_annotation(function, parameters[0], where), where)
        if not all(issubclass(error, Exception) for error in errors):
            raise TypeError(f"{where}: annotate {parameters[0].name!r} with a class of errors, such as Exception")
    message = _annotation(function, parameters[leading - 1], where)
    envelope: Any = {FunctionKind.EVENT: DomainEvent, FunctionKind.STATE_EVENT: StateEvent}.get(mark.kind)
    if envelope is not None and message is envelope:
        raise TypeError(f"{where}: write {envelope.__name__}[...] with the class of what it handles")
    takes_envelope = envelope is not None and typing.get_origin(message) is envelope
    return MessageFunction(
        name=name,
        kind=mark.kind,
        handles=_classes(typing.get_args(message)[0], where) if takes_envelope else _classes(message, where, envelope),
        takes_envelope=takes_envelope,
        is_async=inspect.iscoroutinefunction(function),
        parameters=tuple(_parameter(function, each, mark.kind, where) for each in parameters[leading:]),
        errors=errors,
        exists=mark.exists,
        priority=mark.priority,
        block=mark.block,
    )


def _parameter(
    function: Callable[..., object], parameter: inspect.Parameter, kind: FunctionKind, where: str
) -> Parameter:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise TypeError(f"{where} must name what it takes besides its message, not take {parameter}")
    if kind is FunctionKind.SOURCING:
        raise TypeError(f"{where} must take self and one event, and nothing else such as {parameter.name!r}")
    annotation = _annotation(function, parameter, where)
    annotation = typing.get_origin(annotation) or annotation
    if annotation is Headers:
        source = Source.HEADERS
    elif annotation in _ENVELOPES[kind]:
        source = Source.STREAM if annotation is DomainEventStream else Source.ENVELOPE
    elif annotation in _ALL_ENVELOPES:
        legal = " or ".join(each.__name__ for each in _ENVELOPES[kind])
        raise TypeError(f"{where}: {parameter.name!r} cannot be a {annotation.__name__} here; write {legal}")
    elif not isinstance(annotation, type) or annotation is object:
        raise TypeError(
            f"{where}: the annotation {parameter.annotation!r} of {parameter.name!r} must name one class: Headers, the "
            "envelope, the aggregate, or a service"
        )
    else:
        source = Source.STATE if AGGREGATE in vars(annotation) else Source.SERVICE
    return Parameter(parameter.name, annotation, source, parameter.default is not parameter.empty)


def _annotation(function: Callable[..., object], parameter: inspect.Parameter, where: str) -> Any:
    if parameter.annotation is parameter.empty:
        raise TypeError(f"{where}: annotate {parameter.name!r} with the class of the message that it handles, or takes")
    try:
        # Only this one annotation: what the others name may be known to type checkers alone.
        scope = inspect.unwrap(function).__globals__
        return _unaliased(typing.get_type_hints(_Annotated(message=parameter.annotation), scope)["message"])
    except Exception as error:
        raise _unresolved(parameter.annotation, where, error) from error


def _unaliased(annotation: Any) -> Any:
    if sys.version_info >= (3, 12):
        while isinstance(annotation, typing.TypeAliasType):
            annotation = annotation.__value__
    return annotation


def _unresolved(annotation: Any, where: str, error: Exception) -> TypeError:
    return TypeError(
        f"{where}: the annotation {annotation!r} cannot be resolved ({error}); "
        "import the class at module level, outside `if TYPE_CHECKING`"
    )


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


def _classes(annotation: Any, where: str, envelope: Any = None) -> tuple[type, ...]:
    """Return the classes that an annotation names: one, or those of a union.

    Args:
        annotation: what is written.
        where: the class and the method, for problems.
        envelope: what the function may have written around it.
    """
    try:
        classes = tuple(_members(annotation))
    except Exception as error:  # an alias is evaluated when it is looked at
        raise _unresolved(annotation, where, error) from error
    for cls in classes:
        outer = typing.get_origin(cls) or cls
        if outer in _ALL_ENVELOPES and outer is not envelope:
            around = "" if envelope is None else f", or {envelope.__name__}[...] around it"
            raise TypeError(
                f"{where}: the annotation {annotation!r} must name one message class or a union of several{around}, "
                f"not {outer.__name__}; what a message travels in may be a further parameter"
            )
        if not isinstance(cls, type) or cls in (object, typing.Any, type(None)):
            hint = "; put the union inside the brackets" if outer is envelope else ""
            raise TypeError(
                f"{where}: the annotation {annotation!r} must name one message class or a union of several{hint}"
            )
        try:
            issubclass(object, cls)
        except TypeError as error:
            raise TypeError(
                f"{where}: {cls.__name__} cannot say which classes inherit from it ({error}); name a message class, or "
                "an ordinary class that several inherit from"
            ) from error
    return tuple(dict.fromkeys(classes))


def _members(annotation: Any) -> Iterator[Any]:
    annotation = _unaliased(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for each in typing.get_args(annotation):
            yield from _members(each)
    else:
        yield annotation
