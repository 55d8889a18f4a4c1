"""Events: every function of every processor that handles them."""

import logging
from collections.abc import Callable, Iterable
from inspect import isawaitable
from typing import Any

from attrs import frozen

from trio_wow.buses import DomainEventBus
from trio_wow.dispatch._dispatcher import MessageDispatcher
from trio_wow.domain import Domain, ProcessorKind, processor_model
from trio_wow.errors import ConfigurationError
from trio_wow.execution import no_leaked_scope
from trio_wow.messages import DomainEvent, DomainEventStream

__all__ = ["EventDispatcher", "ProjectionDispatcher"]

_log = logging.getLogger("trio_wow.dispatch")


@frozen
class BoundFunction:
    """One event function of one processor.

    Attributes:
        name: the class and the method.
        takes_envelope: whether it takes a `DomainEvent` rather than the bare body.
        call: the bound method.
    """

    name: str
    takes_envelope: bool
    call: Callable[[Any], object]


class EventDispatcher(MessageDispatcher[DomainEventStream]):
    """Runs the `@on_event` functions of event processors, for each event of a stream in order.

    The functions for one event run one after the other; no order among them is promised. An `Exception` from one is
    logged with the function, the event and the aggregate; the others still run and the stream is acknowledged.

    Args:
        processors: instances of classes decorated with this dispatcher's kind.
        domain: knows which aggregates the events happen to.
        bus: where streams come from.
        name: the component and its consumer group.

    Raises:
        ConfigurationError: a processor is of another kind, or handles an event that no aggregate of the domain
            sources; all such problems are listed together.
        TypeError: one is no processor at all.
    """

    kind = ProcessorKind.EVENT

    def __init__(
        self, processors: Iterable[object], domain: Domain, bus: DomainEventBus, *, name: str = "event-dispatcher"
    ) -> None:
        self._functions: dict[type, list[BoundFunction]] = {}
        problems = []
        seen: list[object] = []
        for processor in processors:
            model = processor_model(processor)
            if any(processor is other for other in seen):
                problems.append(f"{processor!r} is given twice; give it once")
            seen.append(processor)
            if model.kind is not self.kind:
                problems.append(
                    f"{model.name} is a @{model.kind.value}; {type(self).__name__} takes a @{self.kind.value}"
                )
            for function in model.functions:
                bound = BoundFunction(
                    f"{model.name}.{function.name}", function.takes_envelope, getattr(processor, function.name)
                )
                self._functions.setdefault(function.event, []).append(bound)
                if not domain.publishers_of(function.event):
                    problems.append(
                        f"{bound.name} handles {function.event.__name__}, which no aggregate of the domain sources"
                    )
        if problems:
            raise ConfigurationError(problems)
        super().__init__(name, bus, {each: None for event in self._functions for each in domain.publishers_of(event)})

    async def handle(self, message: DomainEventStream) -> bool:
        """See the class."""
        for sequence, body in enumerate(message.events, 1):
            for function in self._functions.get(type(body), ()):
                event = DomainEvent(body, sequence, message)
                try:
                    result = function.call(event if function.takes_envelope else body)
                    if isawaitable(result):
                        with no_leaked_scope(function.name, message.aggregate_id):
                            result = await result
                    await self._answer(function, event, result)
                except Exception:
                    where = (function.name, type(body).__name__, message.version, message.aggregate_id)
                    if self._is_ending():
                        _log.warning("%s did not finish %s, version %s of %s: the runtime is ending", *where)
                        return False
                    _log.exception("%s failed on %s, version %s of %s", *where)
        return True

    async def _answer(self, function: BoundFunction, event: DomainEvent[object], result: object) -> None:
        """Take what a function returned. Only a saga's result means anything."""


class ProjectionDispatcher(EventDispatcher):
    """An `EventDispatcher` for projections."""

    kind = ProcessorKind.PROJECTION

    def __init__(
        self, projections: Iterable[object], domain: Domain, bus: DomainEventBus, *, name: str = "projection-dispatcher"
    ) -> None:
        super().__init__(projections, domain, bus, name=name)
