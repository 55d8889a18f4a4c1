"""The assembly of one application."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

import trio

from trio_wow.app._settings import Settings, load_settings
from trio_wow.buses import (
    CommandBus,
    DistributedBuses,
    DomainEventBus,
    InMemoryCommandBus,
    InMemoryDomainEventBus,
    InMemoryStateEventBus,
    LocalFirstCommandBus,
    LocalFirstDomainEventBus,
    LocalFirstStateEventBus,
    StateEventBus,
)
from trio_wow.dispatch import (
    CatchUp,
    CommandDispatcher,
    CommandResults,
    EventDispatcher,
    FailureRetries,
    Filter,
    FilterChain,
    FunctionRegistry,
    GroupedScheduling,
    ProcessorOptions,
    ProjectionDispatcher,
    Retry,
    SagaDispatcher,
    SnapshotDispatcher,
    StageNotifier,
    conflict_retry,
)
from trio_wow.domain import Domain, ProcessorKind, processor_model
from trio_wow.errors import RuntimeStateError
from trio_wow.eventsourcing import (
    AggregateRepository,
    CheckpointStore,
    EventStore,
    FailureRecorder,
    InMemoryEventStore,
    InMemorySnapshotStore,
    LoggingFailureRecorder,
    SnapshotStore,
)
from trio_wow.execution import KeyedExecutor
from trio_wow.gateway import CommandGateway
from trio_wow.runtime import Runtime, RuntimeComponent

__all__ = ["App"]


class App:
    """An application: in-memory or local-first buses, one store, a dispatcher for each kind of processor.

    When it is served, its processors first catch up with the store: what is in memory is made anew, sagas and event
    processors go on from their checkpoints. Only then are commands taken.

    Whoever needs another arrangement builds it from the same parts, each of which takes its collaborators as arguments.

    Args:
        aggregates: classes decorated with `@aggregate`, or a `Domain` made of them.
        processors: instances of classes decorated with `@event_processor`, `@projection` or `@saga`.
        store: where events are kept; by default in memory. One that is a `SnapshotStore` keeps the snapshots too, one
            that is a `CheckpointStore` the checkpoints, and one that is a `RuntimeComponent` is opened when a runtime
            starts and closed when it stops. It is the caller's, and outlives the runtimes.
        services: what a function gets for a parameter that is annotated with a class; by that class.
        filters: around each message as a whole, in every dispatcher; see `FilterChain`.
        function_filters: around each attempt to call a function, in every dispatcher.
        command_retry: tries a command again when another writer was first; by default `conflict_retry()`.
        event_retry: tries functions of processors again; by default `Retry()`.
        failures: is told of what has failed for good: functions of processors, and publications; by default a
            `LoggingFailureRecorder`. Give it the store, if that is a `FailureStore`, to let what is recorded pass.
        scheduling: in groups of aggregate IDs; `None` for keyed execution, in a mailbox for each. `docs/scheduling.md`
            says when to take which.
        max_hops: how many of sagas' commands may follow one another; a positive int.
        distributed: buses to its other nodes, each of which makes the bus of its kind a local-first one. A saga's event
            is then finished when the bus has its commands. They are the caller's, and outlive the runtimes.
        cached: of how many aggregates the last state is kept in memory for their next commands; see
            `AggregateRepository`.
        settings: of its runtimes; `None` for what `load_settings` finds in the environment and in a file when the first
            runtime is made. `trio-wow run` reads neither where they are given: only its options go before them.

    Attributes:
        domain: the registry of the aggregates.
        store: the event store.
        has_own_settings: whether its program gave it the settings.
        repository: loads aggregates.
        filters: as given.
        function_filters: as given.
        failures: is told of what has failed for good.
        gateway: sends commands to the runtime that is running.
        events: the bus on which its events are published.

    Raises:
        ConfigurationError: aggregates or processors do not fit together.
        TypeError: one of them is none.
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        aggregates: Iterable[type] | Domain,
        processors: Iterable[object] = (),
        *,
        store: EventStore | None = None,
        services: Mapping[type, object] | None = None,
        filters: Iterable[Filter] = (),
        function_filters: Iterable[Filter] = (),
        command_retry: Retry | None = None,
        event_retry: Retry | None = None,
        failures: FailureRecorder | None = None,
        scheduling: GroupedScheduling | None = None,
        max_hops: int = 32,
        distributed: DistributedBuses | None = None,
        cached: int = 1_024,
        settings: Settings | None = None,
    ) -> None:
        self.has_own_settings = settings is not None
        self._settings = settings
        self.domain = aggregates if isinstance(aggregates, Domain) else Domain(aggregates)
        self.store = store if store is not None else InMemoryEventStore(self.domain.serializer)
        snapshots = self.store if isinstance(self.store, SnapshotStore) else InMemorySnapshotStore()
        self.repository = AggregateRepository(self.domain, self.store, snapshots, cached=cached)
        self._distributed = distributed if distributed is not None else DistributedBuses()
        self._commands, self.events, self._state_events = _buses(self._distributed)
        self._results = CommandResults()
        self._catch_up = CatchUp(self.store, self.store if isinstance(self.store, CheckpointStore) else None)
        self.gateway = CommandGateway(self.domain, self._commands, results=self._results)
        self.filters = tuple(filters)
        self.function_filters = tuple(function_filters)
        self._command_retry = command_retry if command_retry is not None else conflict_retry()
        self._event_retry = event_retry if event_retry is not None else Retry()
        self.failures = failures if failures is not None else LoggingFailureRecorder()
        self._retries = FailureRetries(self.failures, self.store)
        self._scheduling = scheduling
        self._max_hops = max_hops
        self._processors = list(processors)
        self._gateways: list[RuntimeComponent] = []
        self._registry = FunctionRegistry(
            self.domain,
            services=services,
            transaction_type=self.store.transaction_type if isinstance(self.store, CheckpointStore) else None,
        )
        for processor in self._processors:
            self._registry.register(processor)
        self._registry.seal()  # finds what does not fit now rather than at the start
        self._components()

    @property
    def settings(self) -> Settings:
        """Its own, or those that `load_settings` finds when they are first asked for.

        Raises:
            SettingsError: a setting in the environment or the file is not legal.
        """
        if self._settings is None:
            self._settings = load_settings()
        return self._settings

    def runtime(
        self,
        *,
        executor: KeyedExecutor | None = None,
        shutdown_timeout: float | None = None,
        shutdown_quiet_period: float | None = None,
        signals: bool = True,
        settings: Settings | None = None,
    ) -> Runtime:
        """Return a new runtime of this application. Serve one at a time.

        Its components are, in this order: the store, if it is one, the dispatchers of commands, events, projections,
        sagas and snapshots, as far as there is something for them to do, the gateway, and those of `add_gateway`.

        Args:
            executor: used instead of one made by the settings.
            shutdown_timeout: goes before the settings; see `Runtime`.
            shutdown_quiet_period: goes before the settings; see `Runtime`.
            signals: see `Runtime`.
            settings: used instead of the application's.

        Raises:
            ValueError: a number is out of its range; see `Runtime`.
            SettingsError: as for `App.settings`, where it is not given other ones.
        """
        settings = settings if settings is not None else self.settings
        if executor is None:
            executor = KeyedExecutor(
                workers=settings.dispatch.workers,
                max_in_flight=settings.dispatch.max_in_flight,
                throughput=settings.dispatch.throughput,
                blocking_calls=settings.dispatch.blocking_calls,
            )
        shutdown = settings.shutdown
        return Runtime(
            self._components(),
            executor=executor,
            shutdown_timeout=shutdown.timeout if shutdown_timeout is None else shutdown_timeout,
            shutdown_quiet_period=shutdown.quiet_period if shutdown_quiet_period is None else shutdown_quiet_period,
            signals=signals,
        )

    def add_gateway(self, gateway: RuntimeComponent) -> None:
        """Let runtimes that are made from now on have a further way in. It starts last and stops first."""
        self._gateways.append(gateway)

    async def retry_failure(self, id: str) -> bool:
        """Try a failed execution again in the runtime that is running; see `FailureRetries.retry`."""
        return await self._retries.retry(id)

    @asynccontextmanager
    async def serving(self, runtime: Runtime | None = None) -> AsyncIterator[CommandGateway]:
        """Serve while the `async with` block runs; at its end stop in order and wait for it.

        For programs that have a main job of their own, and for tests. A nursery is open inside: what fails comes in
        an exception group. An error in the block, Ctrl+C included, stops the runtime in order too.

        Args:
            runtime: made by `runtime()`; by default one that leaves signals alone. One that takes them stops at the
                first signal while the block goes on: its next command from outside is refused.

        Raises:
            RuntimeStateError: a stop was requested before the runtime could serve.
        """
        if runtime is None:
            runtime = self.runtime(signals=False)
        returned = False

        async def serve(*, task_status: trio.TaskStatus[Runtime]) -> None:
            nonlocal returned
            await runtime.serve(task_status=task_status)
            returned = True

        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(serve)
            except RuntimeError:
                if not returned:
                    raise
                # Trio's complaint that a service ended before it had started.
                raise RuntimeStateError("a stop was requested before it could serve", runtime.state.name) from None
            yield self.gateway
            runtime.request_stop()

    def _components(self) -> list[RuntimeComponent]:
        domain, commands, events, states = self.domain, self._commands, self.events, self._state_events
        registry = self._registry
        kinds = {processor_model(each).kind for each in self._processors}
        with_states = any(registry.on_states(kind) for kind in kinds)
        snapshots = any(model.snapshot_every is not None for model in domain.aggregates)
        components: list[RuntimeComponent] = [self.store] if isinstance(self.store, RuntimeComponent) else []
        components.append(
            CommandDispatcher(
                domain,
                commands,
                self.store,
                events,
                state_events=states if with_states or snapshots else None,
                repository=self.repository,
                registry=registry,
                results=self._results,
                filters=FilterChain([StageNotifier(self._results), *self.filters]),
                function_filters=FilterChain([self._command_retry, *self.function_filters]),
                failures=self.failures,
                retries=self._retries,
                scheduling=self._scheduling,
            )
        )
        options: ProcessorOptions = {
            "states": states,
            "repository": self.repository,
            "catch_up": self._catch_up,
            "filters": FilterChain(self.filters),
            "function_filters": FilterChain([self._event_retry, *self.function_filters]),
            "failures": self.failures,
            "retries": self._retries,
            "scheduling": self._scheduling,
            "signals": self._results,
        }
        if ProcessorKind.EVENT in kinds:
            components.append(EventDispatcher(registry, events, **options))
        if ProcessorKind.PROJECTION in kinds:
            components.append(ProjectionDispatcher(registry, events, **options))
        if ProcessorKind.SAGA in kinds:
            # What a distributed bus has may be handled by a node that this one hears nothing from.
            results = self._results if self._distributed.commands is None else None
            saga = SagaDispatcher(registry, events, commands, results=results, max_hops=self._max_hops, **options)
            components.append(saga)
        if snapshots:
            components.append(
                SnapshotDispatcher(
                    domain,
                    states,
                    self.repository,
                    filters=FilterChain(self.filters),
                    scheduling=self._scheduling,
                    signals=self._results,
                )
            )
        return [*components, self.gateway, *self._gateways]


def _buses(distributed: DistributedBuses) -> tuple[CommandBus, DomainEventBus, StateEventBus]:
    commands, events, states = InMemoryCommandBus(), InMemoryDomainEventBus(), InMemoryStateEventBus()
    return (
        commands if distributed.commands is None else LocalFirstCommandBus(commands, distributed.commands),
        events if distributed.events is None else LocalFirstDomainEventBus(events, distributed.events),
        states if distributed.state_events is None else LocalFirstStateEventBus(states, distributed.state_events),
    )
