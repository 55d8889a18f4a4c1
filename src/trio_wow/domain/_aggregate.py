"""The aggregate model, compiled once from a decorated class."""

import re
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import attrs
from attrs import frozen

from trio_wow.domain._functions import AGGREGATE, FunctionKind, Parameter, Source, message_functions
from trio_wow.errors import (
    AggregateDeletedError,
    AggregateExistsError,
    AggregateNotDeletedError,
    AggregateNotFoundError,
    UnsourcedEventError,
)
from trio_wow.execution import inline
from trio_wow.messages import DEFAULT_TENANT, AggregateId, check_name, interned_id, message_type

__all__ = [
    "AggregateDeleted",
    "AggregateModel",
    "AggregateRecovered",
    "CommandFunction",
    "DeleteAggregate",
    "RecoverAggregate",
    "Reply",
    "aggregate",
    "aggregate_model",
]

C = TypeVar("C", bound=type)
E_co = TypeVar("E_co", covariant=True)
V_co = TypeVar("V_co", covariant=True)


@message_type("wow.aggregate_deleted")
@frozen
class AggregateDeleted:
    """An aggregate was deleted: until it is recovered it refuses every command but `RecoverAggregate`.

    It can happen to every aggregate, also to one without a sourcing function for it.
    """


@message_type("wow.aggregate_recovered")
@frozen
class AggregateRecovered:
    """A deleted aggregate is back, in the state that it had. It can happen to every aggregate."""


@frozen
class _AnyAggregateCommand:
    context: str
    aggregate: str
    id: str

    @classmethod
    def of(cls, aggregate: type, id: str) -> Self:
        """Return the command for one aggregate of a class.

        Raises:
            TypeError: the class is no aggregate.
        """
        model = aggregate_model(aggregate)
        return cls(model.context, model.name, id)


@message_type("wow.delete_aggregate")
@frozen
class DeleteAggregate(_AnyAggregateCommand):
    """Delete an aggregate. Every aggregate understands it; an `@on_command` function of its own decides instead.

    Attributes:
        context: the bounded context's name.
        aggregate: the aggregate's name in it.
        id: the aggregate's ID.
    """


@message_type("wow.recover_aggregate")
@frozen
class RecoverAggregate(_AnyAggregateCommand):
    """Recover a deleted aggregate. For the rest it is like `DeleteAggregate`, with the same attributes."""


ANY_AGGREGATE_COMMANDS: tuple[type[_AnyAggregateCommand], ...] = (DeleteAggregate, RecoverAggregate)
ANY_AGGREGATE_EVENTS: tuple[type, ...] = (AggregateDeleted, AggregateRecovered)


@frozen
class Reply(Generic[E_co, V_co]):
    """What a command function returns that has something to say to the caller beside the events.

    The caller finds the value in `CommandResult.value`, as plain JSON data: an attrs object comes as a dict. What JSON
    cannot hold fails the command, and nothing is stored. It is not kept: a duplicate of the request does not get it.

    Attributes:
        events: as the function would have returned them alone: an event, several in a list or tuple, or `None`.
        value: for the caller.
    """

    events: E_co
    value: V_co


@frozen
class CommandFunction:
    """A function of an aggregate that decides on a command, or is told of one that has failed.

    Attributes:
        name: the class and the method.
        call: takes the state, for an error function the error, the command, and the arguments for `parameters`.
        parameters: what it takes besides.
        exists: whether a command wants its aggregate to exist already or not yet; `None` for neither.
        errors: the classes of the errors that an error function handles.
    """

    name: str
    call: Callable[..., object]
    parameters: tuple[Parameter, ...]
    exists: bool | None = None
    errors: tuple[type, ...] = ()


class AggregateModel:
    """What an aggregate class can do. Made by `@aggregate`; get it with `aggregate_model`.

    Attributes:
        cls: the class, whose instances are the states.
        context: the bounded context's name.
        name: the aggregate's name in its context.
        commands: the command classes that it has functions for.
        events: the event classes that it has sourcing functions for.
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
        self._decide: dict[type, CommandFunction] = {}
        self._source: dict[type, Callable[[Any, Any], object]] = {}
        self._failed: dict[type, list[CommandFunction]] = {}
        _check_state(cls, has_snapshots=snapshot_every is not None)
        for function in message_functions(
            cls, {FunctionKind.COMMAND, FunctionKind.SOURCING, FunctionKind.ERROR}, "aggregate"
        ):
            where = f"{cls.__name__}.{function.name}"
            call = getattr(cls, function.name)
            for parameter in function.parameters:
                if parameter.source is Source.STATE:
                    raise TypeError(f"{where}: leave {parameter.name!r} out; `self` is the aggregate's state")
            if function.kind is FunctionKind.SOURCING and function.is_async:
                raise TypeError(f"{where} changes state in memory and must be a plain function, not `async def`")
            command_function = CommandFunction(where, call, function.parameters, function.exists, function.errors)
            for message in function.handles:
                if function.kind is FunctionKind.ERROR:
                    self._failed.setdefault(message, []).append(command_function)
                    continue
                table: dict[type, Any] = self._decide if function.kind is FunctionKind.COMMAND else self._source
                if function.kind is FunctionKind.COMMAND:
                    _check_command(message, where)
                    if message in ANY_AGGREGATE_COMMANDS and function.exists is False:
                        raise TypeError(f"{where}: {message.__name__} is for what exists; leave `exists=False` out")
                if message in table:
                    raise TypeError(
                        f"{where} is a second @{function.kind.value} function for {message.__name__}; keep one"
                    )
                table[message] = call if function.kind is FunctionKind.SOURCING else command_function
        for message, functions in self._failed.items():
            if message not in self._decide and message not in ANY_AGGREGATE_COMMANDS:
                raise TypeError(
                    f"{functions[0].name} is told of failures of {message.__name__}, for which {cls.__name__} has no "
                    "@on_command function"
                )
        if not self._decide:
            raise TypeError(f"{cls.__name__} has no @on_command function")
        self.commands = tuple(self._decide)
        self.events = tuple(self._source)
        for message, event in zip(ANY_AGGREGATE_COMMANDS, ANY_AGGREGATE_EVENTS, strict=True):
            built_in = CommandFunction(f"{cls.__name__}.{message.__name__}", _always(event()), ())
            self._decide.setdefault(message, built_in)

    def __repr__(self) -> str:
        return f"<aggregate {self.context}.{self.name}: {self.cls.__name__}>"

    def aggregate_id(self, id: str, tenant: str = DEFAULT_TENANT) -> AggregateId:
        """Return the identity of one aggregate of this kind."""
        return interned_id(self.context, self.name, id, tenant)

    def new_state(self, id: str) -> Any:
        """Return the state of an aggregate to which nothing has happened."""
        return self.cls(id=id)

    def command_function(self, command: type) -> CommandFunction:
        """Return the function that decides on a command, be it the class's own or built in.

        Raises:
            KeyError: the class has none.
        """
        return self._decide[command]

    def error_functions(self, command: type, error: Exception) -> tuple[CommandFunction, ...]:
        """Return the functions that are told of an error of a command."""
        return tuple(each for each in self._failed.get(command, ()) if isinstance(error, each.errors))

    def functions(self) -> tuple[CommandFunction, ...]:
        """Return all functions that decide on commands or are told of failed ones."""
        return (*self._decide.values(), *(each for several in self._failed.values() for each in several))

    def events_of(self, command: object, decided: object) -> tuple[object, ...]:
        """Return the events in what a command function returned, in a `Reply` or not.

        Raises:
            TypeError: the events are neither an attrs object, nor a list or tuple of them, nor `None`.
        """
        if isinstance(decided, Reply):
            decided = decided.events
        events = tuple(decided) if isinstance(decided, list | tuple) else () if decided is None else (decided,)
        for event in events:
            if not attrs.has(type(event)) or isinstance(event, Reply):
                raise TypeError(
                    f"{self.cls.__name__} answered {type(command).__name__} with {event!r}; "
                    "return an event (an attrs object), a list or tuple of events, None, or a Reply around one of these"
                )
        return events

    def check_life(self, command: object, aggregate_id: AggregateId, version: int, *, deleted: bool) -> None:
        """Refuse a command that an aggregate cannot have: since it is deleted or is not, or exists or does not.

        Raises:
            AggregateNotFoundError: the command wants it to exist, as to be deleted or recovered does, and nothing has
                happened to it.
            AggregateDeletedError: it is deleted, and the command does not recover it.
            AggregateNotDeletedError: it is to be recovered, and is not deleted.
            AggregateExistsError: the command wants a new one, and something has happened to it.
        """
        exists = self.command_function(type(command)).exists
        if not version and (exists is True or type(command) in ANY_AGGREGATE_COMMANDS):
            raise AggregateNotFoundError(aggregate_id)
        recovers = type(command) is RecoverAggregate
        if deleted and not recovers:
            raise AggregateDeletedError(aggregate_id, version)
        if recovers and not deleted:
            raise AggregateNotDeletedError(aggregate_id, version)
        if version and exists is False:
            raise AggregateExistsError(aggregate_id, version)

    def deleted_after(self, event: object, deleted: bool) -> bool:
        """Return whether an aggregate is deleted after an event, given whether it was before."""
        return type(event) is AggregateDeleted or (deleted and type(event) is not AggregateRecovered)

    def apply(self, state: object, event: object) -> None:
        """Change a state by an event. One that can happen to every aggregate changes nothing without a function.

        Raises:
            UnsourcedEventError: the class has no sourcing function for it.
        """
        self.check_sourced(event)
        source = self._source.get(type(event))
        if source is not None:
            source(state, event)

    def check_sourced(self, event: object) -> None:
        """Refuse an event that could not change the state.

        Raises:
            UnsourcedEventError: the class has no sourcing function for it.
        """
        if type(event) not in self._source and type(event) not in ANY_AGGREGATE_EVENTS:
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
        setattr(cls, AGGREGATE, model)
        return cls

    return decorate


def aggregate_model(cls: type) -> AggregateModel:
    """Return the model of a class that `@aggregate` has decorated.

    Raises:
        TypeError: it has not (a subclass is decorated itself).
    """
    model = cls.__dict__.get(AGGREGATE)
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


def _always(event: object) -> Callable[..., object]:
    return inline(lambda _state, _command: event)


def _check_command(command: type, where: str) -> None:
    if not attrs.has(command):
        raise TypeError(f"{where}: {command.__name__} is no attrs class; decorate it with @attrs.frozen")
    if "id" not in attrs.fields_dict(command):
        raise TypeError(f"{where}: {command.__name__} has no field `id`, which names the aggregate that it is for")


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
