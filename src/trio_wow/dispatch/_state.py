"""State events: the functions of processors of every kind that look at states, and the snapshots."""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

from trio_wow.buses import CommandBus, StateEventBus
from trio_wow.dispatch._dispatcher import MessageDispatcher
from trio_wow.dispatch._processors import BoundFunction, BoundProcessor, Call, ProcessorDispatcher, bind
from trio_wow.dispatch._progress import CatchUp
from trio_wow.dispatch._results import CommandResults
from trio_wow.dispatch._saga import SagaSender, refuse_shared_names
from trio_wow.domain import AggregateModel, Domain, ProcessorKind, processor_model
from trio_wow.errors import ConfigurationError
from trio_wow.eventsourcing import AggregateRepository, LoadedAggregate
from trio_wow.messages import AggregateId, DomainEventStream, StateEvent

__all__ = ["SnapshotDispatcher", "StateEventDispatcher"]

_log = logging.getLogger("trio_wow.dispatch")

REBUILT = 1_000
"""Aggregates whose states are kept while the store is read, so that the next version costs only its own events."""


class StateEventDispatcher(ProcessorDispatcher[StateEvent[Any]]):
    """Runs the `@on_state_event` functions of event processors, projections and sagas, once for each state event.

    What a saga's function returns is sent as by a `SagaDispatcher`. For what is read from the store, the state is
    rebuilt at each version.

    Args:
        processors: instances of decorated classes.
        domain: the aggregates.
        bus: where state events come from.
        repository: rebuilds states.
        commands: where the commands of sagas go.
        results: as for `SagaDispatcher`.
        catch_up: the store to begin with; see `ProcessorDispatcher`.
        name: the component and its consumer group.

    Raises:
        ConfigurationError: a function handles an aggregate that the domain has not, or two sagas have one name; or as
            for `EventDispatcher`.
        TypeError: one is no processor at all.
    """

    def __init__(
        self,
        processors: Iterable[object],
        domain: Domain,
        bus: StateEventBus,
        repository: AggregateRepository,
        commands: CommandBus,
        *,
        results: CommandResults | None = None,
        catch_up: CatchUp | None = None,
        name: str = "state-event-dispatcher",
    ) -> None:
        problems: list[str] = []

        def publishers_of(function: BoundFunction) -> tuple[AggregateModel, ...]:
            model = domain.model_of_class(function.handles)
            if model is None:
                problems.append(
                    f"{function.name} handles {function.handles.__name__}, which is no aggregate of the domain"
                )
                return ()
            return (model,)

        processors = list(processors)
        sagas = [each for each in processors if processor_model(each).kind is ProcessorKind.SAGA]
        refuse_shared_names(sagas)
        bound, aggregates = bind(
            processors, lambda model: model.state_functions, publishers_of, catch_up, name, problems
        )
        if problems:
            raise ConfigurationError(problems)
        super().__init__(name, bus, bound, aggregates, catch_up)
        self._repository = repository
        self._sender = SagaSender(domain, commands, results)
        self._rebuilt: OrderedDict[AggregateId, LoadedAggregate] = OrderedDict()

    def calls(self, processor: BoundProcessor, message: StateEvent[Any], /) -> Iterator[Call]:
        """See `ProcessorDispatcher.calls`."""
        cls = type(message.state)
        for function in processor.functions.get(cls, ()):
            yield Call(function, message if function.takes_envelope else message.state, len(message.stream.events), cls)

    async def message_of(self, stream: DomainEventStream, /) -> StateEvent[Any]:
        """See `ProcessorDispatcher.message_of`."""
        aggregate_id = stream.aggregate_id
        loaded = self._rebuilt.pop(aggregate_id, None)
        if loaded is not None and loaded.version == stream.version - 1:
            loaded.source([stream])
        elif loaded is None or loaded.version != stream.version:
            loaded = await self._repository.load(aggregate_id, version=stream.version)
        self._rebuilt[aggregate_id] = loaded
        if len(self._rebuilt) > REBUILT:
            self._rebuilt.popitem(last=False)
        return StateEvent(stream, deepcopy(loaded.state))

    async def answer(self, processor: BoundProcessor, call: Call, message: StateEvent[Any], result: object, /) -> None:
        """See `ProcessorDispatcher.answer`."""
        if processor.kind is ProcessorKind.SAGA:
            await self._sender.send(result, f"state/{call.function.name}", message.stream)


class SnapshotDispatcher(MessageDispatcher[StateEvent[Any]]):
    """Takes a snapshot of each aggregate that has a `snapshot_every`, when its version is a multiple of that.

    A snapshot that cannot be taken is logged: it costs time at the next loading, and nothing else.

    Args:
        domain: the aggregates.
        bus: where state events come from.
        repository: keeps snapshots; it has a snapshot store.
        name: the component and its consumer group.
    """

    def __init__(
        self,
        domain: Domain,
        bus: StateEventBus,
        repository: AggregateRepository,
        *,
        name: str = "snapshot-dispatcher",
    ) -> None:
        super().__init__(name, bus, [model for model in domain.aggregates if model.snapshot_every is not None])
        self._domain = domain
        self._repository = repository

    def wants(self, message: StateEvent[Any], /) -> bool:
        """See `MessageDispatcher.wants`."""
        every = self._domain.model_of(message.aggregate_id).snapshot_every
        return every is not None and message.version % every == 0

    async def handle(self, message: StateEvent[Any]) -> bool:
        """See the class."""
        if self.wants(message):
            try:
                await self._repository.take_snapshot(message)
            except Exception:
                _log.warning(
                    "no snapshot of version %s of %s: it cannot be taken",
                    message.version,
                    message.aggregate_id,
                    exc_info=True,
                )
        return True
