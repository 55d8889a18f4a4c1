"""Domain events: the functions of event processors and projections."""

from collections.abc import Iterable, Iterator, Sequence

from trio_wow.buses import DomainEventBus
from trio_wow.dispatch._processors import BoundFunction, BoundProcessor, Call, ProcessorDispatcher, bind
from trio_wow.dispatch._progress import CatchUp
from trio_wow.domain import AggregateModel, Domain, EventFunction, ProcessorKind, ProcessorModel
from trio_wow.errors import ConfigurationError
from trio_wow.messages import DomainEvent, DomainEventStream

__all__ = ["EventDispatcher", "ProjectionDispatcher"]


class EventDispatcher(ProcessorDispatcher[DomainEventStream]):
    """Runs the `@on_event` functions of event processors, for each event of a stream in order.

    The functions for one event run one after the other; no order among them is promised.

    Args:
        processors: instances of classes decorated with this dispatcher's kind.
        domain: knows which aggregates the events happen to.
        bus: where streams come from.
        catch_up: the store to begin with; see `ProcessorDispatcher`.
        name: the component and its consumer group.

    Raises:
        ConfigurationError: a processor is of another kind, or handles an event that no aggregate of the domain
            sources, or takes a transaction that nobody makes, or shares its checkpoint's name with another; all such
            problems are listed together.
        TypeError: one is no processor at all.
    """

    kind = ProcessorKind.EVENT

    def __init__(
        self,
        processors: Iterable[object],
        domain: Domain,
        bus: DomainEventBus,
        *,
        catch_up: CatchUp | None = None,
        name: str = "event-dispatcher",
    ) -> None:
        problems: list[str] = []

        def publishers_of(function: BoundFunction) -> tuple[AggregateModel, ...]:
            models = domain.publishers_of(function.handles)
            if not models:
                problems.append(
                    f"{function.name} handles {function.handles.__name__}, which no aggregate of the domain sources"
                )
            return models

        def functions_of(model: ProcessorModel) -> Sequence[EventFunction]:
            if model.kind is not self.kind:
                problems.append(
                    f"{model.name} is a @{model.kind.value}; {type(self).__name__} takes a @{self.kind.value}"
                )
            return model.event_functions

        bound, aggregates = bind(processors, functions_of, publishers_of, catch_up, name, problems)
        if problems:
            raise ConfigurationError(problems)
        super().__init__(name, bus, bound, aggregates, catch_up)

    def calls(self, processor: BoundProcessor, message: DomainEventStream, /) -> Iterator[Call]:
        """See `ProcessorDispatcher.calls`."""
        for sequence, body in enumerate(message.events, 1):
            for function in processor.functions.get(type(body), ()):
                argument = DomainEvent(body, sequence, message) if function.takes_envelope else body
                yield Call(function, argument, sequence, type(body))

    async def message_of(self, stream: DomainEventStream, /) -> DomainEventStream:
        """See `ProcessorDispatcher.message_of`."""
        return stream


class ProjectionDispatcher(EventDispatcher):
    """An `EventDispatcher` for projections."""

    kind = ProcessorKind.PROJECTION

    def __init__(
        self,
        projections: Iterable[object],
        domain: Domain,
        bus: DomainEventBus,
        *,
        catch_up: CatchUp | None = None,
        name: str = "projection-dispatcher",
    ) -> None:
        super().__init__(projections, domain, bus, catch_up=catch_up, name=name)
