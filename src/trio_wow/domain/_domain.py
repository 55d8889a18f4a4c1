"""One application's domain: its aggregates, where their commands go, and how its messages are written."""

from collections.abc import Iterable, Mapping
from functools import partial
from inspect import isawaitable
from typing import Any

import attrs
from cattrs.preconf.orjson import OrjsonConverter

from trio_wow.domain._aggregate import ANY_AGGREGATE_COMMANDS, ANY_AGGREGATE_EVENTS, AggregateModel, aggregate_model
from trio_wow.errors import ConfigurationError, InvalidCommandError, UnroutableCommandError, printable
from trio_wow.execution import refuse_awaitable
from trio_wow.messages import DEFAULT_TENANT, AggregateId, CommandMessage, EventUpgrader, MessageTypes, Serializer

__all__ = ["Domain"]


class Domain:
    """The registry of one application. There is no global one.

    Args:
        aggregates: classes decorated with `@aggregate`.
        upgraders: for stored bodies of older revisions.
        converter: from `trio_wow.messages.make_converter`, with hooks of your own.

    Attributes:
        aggregates: their models.
        serializer: writes and reads this application's messages.

    Raises:
        ConfigurationError: two aggregates share a name or a command, or two message classes share a name; all such
            problems are listed together.
        TypeError: a class is no aggregate.
    """

    def __init__(
        self,
        aggregates: Iterable[type],
        *,
        upgraders: Iterable[EventUpgrader] = (),
        converter: OrjsonConverter | None = None,
    ) -> None:
        self.aggregates = tuple(dict.fromkeys(aggregate_model(cls) for cls in aggregates))
        self._by_name: dict[tuple[str, str], AggregateModel] = {}
        self._by_command: dict[type, AggregateModel] = {}
        self._by_event: dict[type, list[AggregateModel]] = {}
        problems = []
        for model in self.aggregates:
            other = self._by_name.setdefault((model.context, model.name), model)
            if other is not model:
                problems.append(f"{model!r} and {other!r} share a name; give one @aggregate(name=...)")
            for command in model.commands:
                if command in ANY_AGGREGATE_COMMANDS:  # names its aggregate itself
                    continue
                other = self._by_command.setdefault(command, model)
                if other is not model:
                    problems.append(
                        f"{command.__name__} is handled by {model!r} and {other!r}; a command has one aggregate"
                    )
            for event in dict.fromkeys((*model.events, *ANY_AGGREGATE_EVENTS)):
                self._by_event.setdefault(event, []).append(model)
        types = MessageTypes([*self._by_command, *self._by_event, *ANY_AGGREGATE_COMMANDS, *ANY_AGGREGATE_EVENTS])
        problems += types.problems
        if problems:
            raise ConfigurationError(problems)
        # By command, its fields that have validators.
        self._validated = {
            command: tuple(each for each in attrs.fields(command) if each.validator is not None)
            for command in self._by_command
        }
        self.serializer = Serializer(types, upgraders=upgraders, converter=converter)

    def model_of(self, aggregate_id: AggregateId) -> AggregateModel:
        """Return the model of one aggregate.

        Raises:
            KeyError: its kind is not registered.
        """
        return self._by_name[aggregate_id.context, aggregate_id.aggregate]

    def model_of_class(self, cls: type) -> AggregateModel | None:
        """Return the model of a registered aggregate class, or `None`."""
        return next((model for model in self.aggregates if model.cls is cls), None)

    def events_of(self, cls: type) -> tuple[type, ...]:
        """Return the registered events that are of a class: itself, and those that inherit from it."""
        return tuple(event for event in self._by_event if issubclass(event, cls))

    def publishers_of(self, event: type) -> tuple[AggregateModel, ...]:
        """Return the aggregates to which an event of this class can happen; none if it is not registered."""
        return tuple(self._by_event.get(event, ()))

    def command_message(
        self,
        command: Any,
        *,
        request_id: str | None = None,
        tenant: str = DEFAULT_TENANT,
        headers: Mapping[str, str] | None = None,
        expected_version: int | None = None,
    ) -> CommandMessage:
        """Address a command to the aggregate that its `id` names, and check that it can travel.

        Args:
            command: an attrs object of a registered class; the message holds a copy.
            request_id: names what is wanted, so that it is done once; by default a new one.
            tenant: the tenant who sends it.
            headers: copied.
            expected_version: the version at which the aggregate must be; see `CommandMessage`.

        Raises:
            UnroutableCommandError: no aggregate handles its class, or the aggregate that it names is not registered.
            InvalidCommandError: a validator of one of its fields, or its own `validate()`, refuses it.
            InvalidIdentifierError: its `id`, the request ID or the tenant is not legal.
            SerializationError: JSON cannot hold one of its values.
            ValueError: `expected_version` is no version.
        """
        names_aggregate = type(command) in ANY_AGGREGATE_COMMANDS
        if names_aggregate:
            model = self._by_name.get((command.context, command.aggregate))
        else:
            model = self._by_command.get(type(command))
        if model is None:
            raise UnroutableCommandError(
                type(command), f"{command.context}.{command.aggregate}" if names_aggregate else None
            )
        _check(command, self._validated.get(type(command), ()))
        aggregate_id = model.aggregate_id(command.id, tenant)
        body = self.serializer.copy(command)
        make = CommandMessage if request_id is None else partial(CommandMessage, request_id=request_id)
        return make(aggregate_id=aggregate_id, body=body, headers=headers or {}, expected_version=expected_version)


def _check(command: Any, validated: Iterable[Any]) -> None:
    """Refuse a command that is not valid in itself."""
    cls = type(command)
    validate = getattr(cls, "validate", None)
    try:
        for field in validated:
            field.validator(command, field, getattr(command, field.name))
        said = validate(command) if callable(validate) else None  # else it is a field
    except Exception as error:
        raise InvalidCommandError(cls, printable(error)) from error
    if said is not None:
        if isawaitable(said):
            refuse_awaitable(said, f"{cls.__name__}.validate returned an awaitable; make it a plain method that raises")
        raise TypeError(f"{cls.__name__}.validate returned {said!r}; raise an error to refuse the command")
