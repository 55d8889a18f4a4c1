"""The dispatchers of event processors, projections and sagas: each has a child for events and one for state events."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, TypedDict, Unpack

import trio

from trio_wow.buses import CommandBus, DomainEventBus, StateEventBus
from trio_wow.dispatch._failures import FailureRetries
from trio_wow.dispatch._filters import FilterChain, Retry
from trio_wow.dispatch._processors import BoundProcessor, Call, ProcessorDispatcher, ProcessorParts
from trio_wow.dispatch._progress import CatchUp
from trio_wow.dispatch._registry import FunctionRegistry, RegisteredProcessor, is_in_memory
from trio_wow.dispatch._results import CommandResults
from trio_wow.dispatch._scheduling import GroupedScheduling, Groups
from trio_wow.dispatch._sender import MAX_HOPS, SagaSender
from trio_wow.domain import ProcessorKind
from trio_wow.errors import ConfigurationError
from trio_wow.eventsourcing import AggregateRepository, FailureRecorder, LoadedAggregate, LoggingFailureRecorder
from trio_wow.messages import AggregateId, DomainEvent, DomainEventStream, Stage, StateEvent
from trio_wow.runtime import RuntimeContext

__all__ = ["EventDispatcher", "ProcessorOptions", "ProjectionDispatcher", "SagaDispatcher"]

REBUILT = 1_000
"""States that are kept while the store is read, so that the next version of an aggregate costs only its own events."""


class _DomainEventChild(ProcessorDispatcher[DomainEventStream]):
    """Runs functions for each event of a stream in order."""

    def calls(self, processor: BoundProcessor, message: DomainEventStream, /) -> Iterator[Call]:
        for sequence, body in enumerate(message.events, 1):
            for function in processor.registered.functions.get(type(body), ()):
                yield Call(function, body, DomainEvent(body, sequence, message), sequence)

    def part_name(self) -> str:
        return self.name

    def message_after(self, event: StateEvent[Any], /) -> DomainEventStream:
        return event.stream

    async def message_of(self, stream: DomainEventStream, /) -> DomainEventStream:
        return stream


class _StateEventChild(ProcessorDispatcher[StateEvent[Any]]):
    """Runs functions once for each state event. For what is read from the store the state is rebuilt."""

    def __init__(
        self,
        name: str,
        bus: StateEventBus,
        processors: Sequence[BoundProcessor],
        parts: ProcessorParts,
        repository: AggregateRepository,
    ) -> None:
        super().__init__(name, bus, processors, parts)
        self._states = repository
        # By version: what has failed is asked for again and again, between those that come after it.
        self._rebuilt: OrderedDict[tuple[AggregateId, int], LoadedAggregate] = OrderedDict()

    def calls(self, processor: BoundProcessor, message: StateEvent[Any], /) -> Iterator[Call]:
        for function in processor.registered.functions.get(type(message.state), ()):
            yield Call(function, message.state, message, len(message.stream.events))

    def part_name(self) -> str:
        return f"{self.name}/state"

    def message_after(self, event: StateEvent[Any], /) -> StateEvent[Any]:
        return event

    async def message_of(self, stream: DomainEventStream, /) -> StateEvent[Any]:
        aggregate_id, version = stream.aggregate_id, stream.version
        loaded = self._rebuilt.pop((aggregate_id, version), None)
        if loaded is None:
            loaded = self._rebuilt.pop((aggregate_id, version - 1), None)
            if loaded is None:
                loaded = await self._states.load(aggregate_id, version=version)
            else:
                loaded.source([stream])
        self._rebuilt[aggregate_id, version] = loaded
        if len(self._rebuilt) > REBUILT:
            self._rebuilt.popitem(last=False)
        return StateEvent(stream, deepcopy(loaded.state), loaded.deleted)

    def whole(self, processor: BoundProcessor, /) -> str:
        return f"{processor.name}/state"

    def role(self, call: Call, /) -> str:
        return f"state/{call.function.name}"


class ProcessorOptions(TypedDict, total=False):
    """The keyword arguments of `EventDispatcher`."""

    states: StateEventBus | None
    repository: AggregateRepository | None
    catch_up: CatchUp | None
    filters: FilterChain | None
    function_filters: FilterChain | None
    failures: FailureRecorder | None
    ack_on_unrecorded_failure: bool
    retries: FailureRetries | None
    scheduling: GroupedScheduling | None
    signals: CommandResults | None
    name: str | None


class EventDispatcher:
    """Runs the functions of event processors, in order per aggregate and in parallel across them.

    A runtime component made of two: one takes the streams of events and runs the `@on_event` functions for each event
    in order, the other takes state events and runs the `@on_state_event` functions. Both are in the consumer group that
    has the dispatcher's name. The functions for one event start in the order of their priority, one after the other;
    beside those in the executor's pool the next ones go on. Between the two components no order is promised.

    Args:
        registry: the functions; those of this dispatcher's kind are run. It is sealed when the dispatcher is prepared.
        events: where streams come from.
        states: where state events come from; needed where a function handles them.
        repository: loads the states that functions take, and rebuilds those of state events; needed where one does.
        catch_up: the store to begin with; see `ProcessorDispatcher`.
        filters: around each message as a whole; see `FilterChain`.
        function_filters: around each attempt to call a function; by default `Retry()`.
        failures: is told of what has failed for good; by default a `LoggingFailureRecorder`.
        ack_on_unrecorded_failure: whether a message is acknowledged although nobody keeps its failure but a log.
        retries: tries executions that have failed for good again, when it is told to.
        scheduling: in groups of aggregate IDs; `None` for keyed execution, in a mailbox for each. Both components use
            the same schedulers, and each has its own order.
        signals: is told when what a command has led to is handled.
        name: the component and its consumer group; by default `default_name`.
    """

    kind = ProcessorKind.EVENT
    stage = Stage.EVENT_HANDLED
    default_name = "event-dispatcher"

    def __init__(
        self,
        registry: FunctionRegistry,
        events: DomainEventBus,
        *,
        states: StateEventBus | None = None,
        repository: AggregateRepository | None = None,
        catch_up: CatchUp | None = None,
        filters: FilterChain | None = None,
        function_filters: FilterChain | None = None,
        failures: FailureRecorder | None = None,
        ack_on_unrecorded_failure: bool = True,
        retries: FailureRetries | None = None,
        scheduling: GroupedScheduling | None = None,
        signals: CommandResults | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name if name is not None else self.default_name
        self.filters = filters if filters is not None else FilterChain()
        self.function_filters = function_filters if function_filters is not None else FilterChain([Retry()])
        self._registry = registry
        self._events = events
        self._states = states
        self._repository = repository
        self._catch_up = catch_up
        self._failures = failures if failures is not None else LoggingFailureRecorder()
        self._ack_on_unrecorded_failure = ack_on_unrecorded_failure
        self._retries = retries
        self._scheduling = scheduling
        self._groups: Groups | None = None
        self._signals = signals
        self._sender: SagaSender | None = None
        self._children: list[ProcessorDispatcher[Any]] = []

    async def prepare(self, context: RuntimeContext, /) -> None:
        """See `RuntimeComponent.prepare`.

        Raises:
            ConfigurationError: functions do not fit; see `FunctionRegistry.seal`. Or what they need was not given.
        """
        self._registry.seal()
        if not self._children:
            self._children = self._made()
        if self._scheduling is not None:
            self._groups = self._scheduling.groups_for(self.name, context)
        for child in self._children:
            if self._groups is not None:
                child.borrow(self._groups)
            await child.prepare(context)

    def start(self) -> None:
        """See `RuntimeComponent.start`."""
        for child in self._children:
            child.start()

    async def caught_up(self) -> None:
        """Wait until everything that was stored when the runtime started is handled, or has been tried."""
        for child in self._children:
            await child.caught_up()

    def quiesce(self) -> None:
        """See `RuntimeComponent.quiesce`."""
        for child in self._children:
            child.quiesce()

    async def stop(self) -> None:
        """See `RuntimeComponent.stop`."""
        self.quiesce()
        for child in self._children:
            await child.stop()
        if self._groups is not None:
            await self._groups.schedulers.stop_gracefully()
        await trio.lowlevel.checkpoint()

    def force_stop(self) -> None:
        """See `RuntimeComponent.force_stop`."""
        for child in self._children:
            child.force_stop()
        if self._groups is not None:
            self._groups.schedulers.force_stop()

    def _made(self) -> list[ProcessorDispatcher[Any]]:
        on_events, on_states = self._registry.on_events(self.kind), self._registry.on_states(self.kind)
        takes_state = any(
            function.arguments.needs_state
            for processor in on_events
            for functions in processor.functions.values()
            for function in functions
        )
        problems = []
        if on_states and self._states is None:
            problems.append(f"{self.name} has functions for state events; give it their bus as `states`")
        if (on_states or takes_state) and self._repository is None:
            problems.append(f"{self.name} has functions that need states; give it a `repository`")
        if problems:
            raise ConfigurationError(problems)
        parts = ProcessorParts(
            self._catch_up,
            self._repository,
            self._sender,
            self.filters,
            self.function_filters,
            self._failures,
            self._ack_on_unrecorded_failure,
            self._retries,
            self.stage,
            self._signals,
        )
        children: list[ProcessorDispatcher[Any]] = []
        if on_events:
            processors = [self._bound(each, each.name) for each in on_events]
            children.append(_DomainEventChild(self.name, self._events, processors, parts))
        if on_states and self._states is not None and self._repository is not None:
            processors = [self._bound(each, f"{each.name}/state") for each in on_states]
            children.append(_StateEventChild(self.name, self._states, processors, parts, self._repository))
        return children

    def _bound(self, processor: RegisteredProcessor, name: str) -> BoundProcessor:
        progress = None
        if self._catch_up is not None:
            progress = self._catch_up.progress_of(
                processor.instance,
                f"{self.name}/{name}",
                _topics(processor),
                in_memory=is_in_memory(processor),
                in_transaction=processor.in_transaction,
            )
        return BoundProcessor(processor, progress)


def _topics(processor: RegisteredProcessor) -> Sequence[tuple[str, str]]:
    return [(each.context, each.name) for each in processor.aggregates]


class ProjectionDispatcher(EventDispatcher):
    """An `EventDispatcher` for projections."""

    kind = ProcessorKind.PROJECTION
    stage = Stage.PROJECTED
    default_name = "projection-dispatcher"


class SagaDispatcher(EventDispatcher):
    """An `EventDispatcher` for sagas: it sends the commands that their functions return, see `SagaSender`.

    Args:
        registry: as for `EventDispatcher`.
        events: as for `EventDispatcher`.
        commands: where commands go.
        results: tells how commands end; `None` for a command bus that survives the process.
        max_hops: how many of sagas' commands may follow one another; a positive int.
        options: as for `EventDispatcher`.

    Raises:
        ValueError: `max_hops` is out of its range.
    """

    kind = ProcessorKind.SAGA
    stage = Stage.SAGA_HANDLED
    default_name = "saga-dispatcher"

    def __init__(
        self,
        registry: FunctionRegistry,
        events: DomainEventBus,
        commands: CommandBus,
        *,
        results: CommandResults | None = None,
        max_hops: int = MAX_HOPS,
        **options: Unpack[ProcessorOptions],
    ) -> None:
        super().__init__(registry, events, **options)
        self._sender = SagaSender(registry.domain, commands, results, max_hops=max_hops)
