"""The functions of an application: found by annotation, bound to events and aggregates, checked all together."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import frozen

from trio_wow.domain import (
    AggregateDeleted,
    AggregateModel,
    AggregateRecovered,
    Arguments,
    CommandFunction,
    Domain,
    MessageFunction,
    ProcessorKind,
    ProcessorModel,
    checked_services,
    processor_model,
)
from trio_wow.errors import ConfigurationError, RuntimeStateError

__all__ = ["BoundFunction", "FunctionRegistry", "RegisteredProcessor", "is_in_memory"]


@frozen
class BoundFunction:
    """One function of one processor.

    Attributes:
        name: the class and the method.
        takes_envelope: whether its message is the envelope rather than what is in it.
        call: the bound method.
        arguments: what it takes besides its message.
    """

    name: str
    takes_envelope: bool
    call: Callable[..., object]
    arguments: Arguments


@frozen
class RegisteredProcessor:
    """One processor's functions for events, or those for state events.

    Attributes:
        instance: the processor.
        name: its class's name.
        kind: its class's decorator.
        functions: by the class of the event, or of the state.
        aggregates: those that it subscribes to.
        in_transaction: whether the functions take the store's transaction.
    """

    instance: object
    name: str
    kind: ProcessorKind
    functions: Mapping[type, Sequence[BoundFunction]]
    aggregates: Sequence[AggregateModel]
    in_transaction: bool


def is_in_memory(processor: RegisteredProcessor) -> bool:
    """Whether a processor's view ends with the process, so that it is made anew when that starts."""
    return processor.kind is ProcessorKind.PROJECTION and not processor.in_transaction


class FunctionRegistry:
    """The functions of one application: those of its aggregates, and those of the processors that are registered.

    A function is found by its annotation when its class is decorated, and bound to the events and aggregates of the
    domain when its processor is registered. What does not fit is noted, and told all together when the registry is
    sealed: by the first dispatcher that is prepared, or before.

    Args:
        domain: the aggregates, and the events that happen to them.
        services: what a parameter with a class as its annotation gets, by that class.
        transaction_type: the class of the store's transactions, if it has some.

    Attributes:
        domain: as given.

    Raises:
        TypeError: `services` is no mapping from classes.
    """

    def __init__(
        self,
        domain: Domain,
        *,
        services: Mapping[type, object] | None = None,
        transaction_type: type | None = None,
    ) -> None:
        self.domain = domain
        self._services = checked_services(services)
        self._transaction_type = transaction_type
        self._sealed = False
        self._problems: list[str] = []
        self._models: list[ProcessorModel] = []
        self._on_events: list[RegisteredProcessor] = []
        self._on_states: list[RegisteredProcessor] = []
        self._commands: dict[CommandFunction, Arguments] = {}
        for model in domain.aggregates:
            for function in model.functions():
                self._commands[function] = Arguments(function.name, function.parameters, self._services, self._problems)

    def register(self, processor: object) -> None:
        """Bind the functions of a processor (an instance of a decorated class).

        Raises:
            TypeError: it is no processor.
            RuntimeStateError: the registry is sealed.
        """
        if self._sealed:
            raise RuntimeStateError("register processors before the first runtime starts", "STARTING")
        model = processor_model(processor)
        if any(each.instance is processor for each in (*self._on_events, *self._on_states)):
            self._problems.append(f"{processor!r} is given twice; give it once")
            return
        self._models.append(model)
        if model.event_functions:
            self._on_events.append(self._bound(processor, model, model.event_functions, self._events_of))
        if model.state_functions:
            self._on_states.append(self._bound(processor, model, model.state_functions, self._states_of))
        both = [each for each in (*self._on_events, *self._on_states) if each.instance is processor]
        if len({each.in_transaction for each in both}) > 1:
            self._problems.append(f"either all functions of {model.name} take the transaction, or none")

    def seal(self) -> None:
        """Say that all processors are registered. Idempotent.

        Raises:
            ConfigurationError: something does not fit; it lists everything that was found.
        """
        problems = [*self._problems]
        for kind in ProcessorKind:
            in_memory = {
                each.name for each in (*self._on_events, *self._on_states) if is_in_memory(each) and each.kind is kind
            }
            names = Counter(model.name for model in self._models if model.kind is kind)
            problems += [
                f"several @{kind.value} classes are named {name}, so that they would share one checkpoint, and sagas "
                "the IDs of their requests; give one another name"
                for name, count in names.items()
                if count > 1 and name not in in_memory
            ]
        if problems:
            raise ConfigurationError(problems)
        self._sealed = True

    def on_events(self, kind: ProcessorKind) -> Sequence[RegisteredProcessor]:
        """Return the processors of a kind that have functions for events."""
        return [each for each in self._on_events if each.kind is kind]

    def on_states(self, kind: ProcessorKind) -> Sequence[RegisteredProcessor]:
        """Return the processors of a kind that have functions for state events."""
        return [each for each in self._on_states if each.kind is kind]

    def command_arguments(self, function: CommandFunction) -> Arguments:
        """Return what a function of an aggregate takes besides its command."""
        return self._commands[function]

    def _events_of(self, cls: type, where: str) -> Mapping[type, Sequence[AggregateModel]]:
        events = self.domain.events_of(cls)
        if not events:
            self._problems.append(f"{where} handles {cls.__name__}, which no aggregate of the domain sources")
        return {event: self.domain.publishers_of(event) for event in events}

    def _states_of(self, cls: type, where: str) -> Mapping[type, Sequence[AggregateModel]]:
        model = self.domain.model_of_class(cls)
        if model is None:
            self._problems.append(f"{where} handles {cls.__name__}, which is no aggregate of the domain")
            return {}
        return {cls: (model,)}

    def _check_state(self, takes: str, state: type, cls: type, publishers: Iterable[Sequence[AggregateModel]]) -> None:
        """Refuse a function that would get the state of another aggregate than it says."""
        models = {model for several in publishers for model in several}
        others = {model for model in models if model.cls is not state}
        if not others:
            return
        names = ", ".join(
            sorted(repr(each) if each.cls.__name__ == state.__name__ else each.cls.__name__ for each in others)
        )
        if others == models:
            problem = f"what it handles happens to {names} and never to that; take another state, or none"
        elif cls in (AggregateDeleted, AggregateRecovered):
            problem = f"its events happen to {names} too; take DomainEvent[{cls.__name__}] without a state"
        else:
            problem = f"its events happen to {names} too; write a function for each aggregate"
        self._problems.append(f"{takes}: {state.__name__}, but {problem}")

    def _bound(
        self,
        processor: object,
        model: ProcessorModel,
        functions: Sequence[MessageFunction],
        subscribed: Callable[[type, str], Mapping[type, Sequence[AggregateModel]]],
    ) -> RegisteredProcessor:
        bound: dict[type, list[BoundFunction]] = {}
        aggregates: dict[AggregateModel, None] = {}
        with_transaction: list[str] = []
        for function in functions:
            where = f"{model.name}.{function.name}"
            arguments = Arguments(
                where, function.parameters, self._services, self._problems, transaction_type=self._transaction_type
            )
            if arguments.transaction is not None:
                with_transaction.append(function.name)
                self._check_transaction(model, function, arguments, where)
            one = BoundFunction(where, function.takes_envelope, getattr(processor, function.name), arguments)
            for cls in function.handles:
                found = subscribed(cls, where)
                for name, state in arguments.states.items():
                    self._check_state(f"{where} takes {name}", state, cls, found.values())
                for message, publishers in found.items():
                    if one not in bound.setdefault(message, []):
                        bound[message].append(one)
                    aggregates |= dict.fromkeys(publishers)
        without = [each.name for each in functions if each.name not in with_transaction]
        if with_transaction and without:
            self._problems.append(
                f"{model.name}: {', '.join(without)} must take the transaction too, as its other functions do: "
                "one checkpoint stands for all of them"
            )
        return RegisteredProcessor(processor, model.name, model.kind, bound, tuple(aggregates), bool(with_transaction))

    def _check_transaction(
        self, model: ProcessorModel, function: MessageFunction, arguments: Arguments, where: str
    ) -> None:
        if model.kind is not ProcessorKind.PROJECTION:
            self._problems.append(f"{where} takes a transaction, which only the functions of a projection may")
        elif function.is_async:
            self._problems.append(f"{where} takes a transaction, which is used in a thread; make it a plain function")
        elif arguments.needs_state:
            self._problems.append(f"{where} takes a transaction, and then cannot take the aggregate's state as well")
