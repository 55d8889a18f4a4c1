"""The aggregate model, compiled once from a decorated class."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from trio_wow.domain._functions import FunctionKind, message_class, message_functions
from trio_wow.errors import UnsourcedEventError
from trio_wow.messages import DEFAULT_TENANT, AggregateId, check_name

__all__ = ["AggregateModel", "aggregate", "aggregate_model"]

C = TypeVar("C", bound=type)
_ATTRIBUTE = "__wow_aggregate__"


class AggregateModel:
    """What an aggregate class can do. Made by `@aggregate`; get it with `aggregate_model`.

    Attributes:
        cls: the class, whose instances are the states.
        context: the bounded context's name.
        name: the aggregate's name in its context.
        commands: the command classes it handles.
        events: the event classes it is rebuilt from.
        snapshot_every: versions from one snapshot to the next; `None` for no snapshots.
        revision: of the state's shape.
    """

    def __init__(
        self, cls: type, context: str, name: str, *, snapshot_every: int | None = None, revision: int = 1
    ) -> None:
        for what, value in (("snapshot_every", snapshot_every), ("revision", revision)):
            if (value is not None or what == "revision") and (type(value) is not int or value < 1):
                raise ValueError(f"{what} of {cls.__name__} must be a positive int, not {value!r}")
        self.cls = cls
        self.snapshot_every = snapshot_every
        self.revision = revision
        self.context = check_name("context", context)
        self.name = check_name("aggregate name", name)
        self._decide: dict[type, Callable[[Any, Any], object]] = {}
        self._source: dict[type, Callable[[Any, Any], object]] = {}
        _check_state(cls, has_snapshots=snapshot_every is not None)
        for function in message_functions(cls, {FunctionKind.COMMAND, FunctionKind.SOURCING}, "aggregate"):
            where = f"{cls.__name__}.{function.name}"
            message = message_class(function.annotation, where)
            if function.kind is FunctionKind.COMMAND:
                table = self._decide
                _check_command(message, where)
            else:
                table = self._source
                if function.is_async:
                    raise TypeError(f"{where} changes state in memory and must be a plain function, not `async def`")
            if message in table:
                raise TypeError(f"{where} is a second @{function.kind.value} function for {message.__name__}; keep one")
            table[message] = getattr(cls, function.name)
        if not self._decide:
            raise TypeError(f"{cls.__name__} has no @on_command function")
        self.commands = tuple(self._decide)
        self.events = tuple(self._source)

    def __repr__(self) -> str:
        return f"<aggregate {self.context}.{self.name}: {self.cls.__name__}>"

    def aggregate_id(self, id: str, tenant: str = DEFAULT_TENANT) -> AggregateId:
        """Return the identity of one aggregate of this kind."""
        return AggregateId(self.context, self.name, id, tenant)

    def new_state(self, id: str) -> Any:
        """Return the state of an aggregate to which nothing has happened."""
        return self.cls(id=id)

    def decide(self, state: object, command: object) -> object:
        """Call the command function; what it returns goes through `events_of`, once awaited if it is awaitable.

        Raises:
            KeyError: the class has no function for this command.
        """
        return self._decide[type(command)](state, command)

    def events_of(self, command: object, decided: object) -> tuple[object, ...]:
        """Return the events in what a command function returned.

        Raises:
            TypeError: it is neither an attrs object, nor a list or tuple of them, nor `None`.
        """
        events = tuple(decided) if isinstance(decided, list | tuple) else () if decided is None else (decided,)
        for event in events:
            if not attrs.has(type(event)):
                raise TypeError(
                    f"{self.cls.__name__} answered {type(command).__name__} with {event!r}; "
                    "return an event (an attrs object), a list or tuple of events, or None"
                )
        return events

    def apply(self, state: object, event: object) -> None:
        """Change a state by an event.

        Raises:
            UnsourcedEventError: the class has no sourcing function for it.
        """
        self.check_sourced(event)
        self._source[type(event)](state, event)

    def check_sourced(self, event: object) -> None:
        """Refuse an event that could not change the state.

        Raises:
            UnsourcedEventError: the class has no sourcing function for it.
        """
        if type(event) not in self._source:
            raise UnsourcedEventError(self.cls.__name__, type(event))


def aggregate(
    *, context: str, name: str | None = None, snapshot_every: int | None = None, revision: int = 1
) -> Callable[[C], C]:
    """Declare an attrs class an aggregate: its instances are states, its methods decide and source.

    Put it above `@attrs.define`. The class has a field `id` and defaults for all others.

    Args:
        context: the bounded context, see `check_name`.
        name: the aggregate's name in it; by default the class's in lower case, words joined by `_`.
        snapshot_every: versions from one snapshot of the state to the next, so that loading begins there; at least 1.
            `None` for no snapshots: right while an aggregate has few events. With snapshots all of the state is in
            fields that `__init__` takes, and is something that JSON holds (see `Serializer`).
        revision: of the state's shape, at least 1; raise it when the fields change, so that older snapshots are made
            anew from the events.

    Raises:
        ValueError: a number is out of its range.
        TypeError: the class, or a message function of it, does not fit; the error names it and the fix.
        InvalidIdentifierError: a name is not legal.
    """

    def decorate(cls: C) -> C:
        model = AggregateModel(
            cls,
            context,
            name if name is not None else _snake_case(cls.__name__),
            snapshot_every=snapshot_every,
            revision=revision,
        )
        setattr(cls, _ATTRIBUTE, model)
        return cls

    return decorate


def aggregate_model(cls: type) -> AggregateModel:
    """Return the model of a class that `@aggregate` has decorated.

    Raises:
        TypeError: it has not (a subclass is decorated itself).
    """
    model = cls.__dict__.get(_ATTRIBUTE)
    if not isinstance(model, AggregateModel):
        raise TypeError(f"{cls.__name__} is no aggregate; decorate it with @aggregate(context=...)")
    return model


def _check_state(cls: type, *, has_snapshots: bool) -> None:
    if not attrs.has(cls):
        raise TypeError(f"{cls.__name__} is no attrs class; put @attrs.define below @aggregate")
    fields = attrs.fields_dict(cls)
    if "id" not in fields or not fields["id"].init or fields["id"].alias != "id":
        raise TypeError(f"{cls.__name__} has no field `id` that can be given by this name; add `id: str`")
    missing = [name for name, field in fields.items() if field.init and field.default is attrs.NOTHING and name != "id"]
    if missing:
        raise TypeError(f"{cls.__name__} needs a default for {', '.join(missing)}: a new aggregate has only its id")
    lost = [name for name, field in fields.items() if not field.init]
    if lost and has_snapshots:
        raise TypeError(
            f"{cls.__name__} has snapshots, which would lose {', '.join(lost)}: they keep what __init__ takes; "
            "remove `init=False`, or compute it in a property, or remove `snapshot_every`"
        )


def _check_command(command: type, where: str) -> None:
    if not attrs.has(command):
        raise TypeError(f"{where}: {command.__name__} is no attrs class; decorate it with @attrs.frozen")
    if "id" not in attrs.fields_dict(command):
        raise TypeError(f"{where}: {command.__name__} has no field `id`, which names the aggregate that it is for")


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
