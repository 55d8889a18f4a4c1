"""The assembly of one application."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import trio

from trio_wow.buses import InMemoryCommandBus, InMemoryDomainEventBus
from trio_wow.dispatch import CommandDispatcher, EventDispatcher, ProjectionDispatcher, SagaDispatcher
from trio_wow.domain import Domain, ProcessorKind, processor_model
from trio_wow.errors import RuntimeStateError
from trio_wow.eventsourcing import EventStore, InMemoryEventStore
from trio_wow.execution import KeyedExecutor
from trio_wow.gateway import CommandGateway
from trio_wow.runtime import Runtime, RuntimeComponent

__all__ = ["App"]


class App:
    """An application inside one process: in-memory buses, one store, a dispatcher for each kind of processor.

    Whoever needs another arrangement builds it from the same parts, each of which takes its collaborators as arguments.

    Args:
        aggregates: classes decorated with `@aggregate`, or a `Domain` made of them.
        processors: instances of classes decorated with `@event_processor`, `@projection` or `@saga`.
        store: where events are kept; by default in memory.

    Attributes:
        domain: the registry of the aggregates.
        store: the event store. It outlives the runtimes.
        gateway: sends commands to the runtime that is running.

    Raises:
        ConfigurationError: aggregates or processors do not fit together.
        TypeError: one of them is none.
    """

    def __init__(
        self, aggregates: Iterable[type] | Domain, processors: Iterable[object] = (), *, store: EventStore | None = None
    ) -> None:
        self.domain = aggregates if isinstance(aggregates, Domain) else Domain(aggregates)
        self.store = store if store is not None else InMemoryEventStore(self.domain.serializer)
        self._commands = InMemoryCommandBus()
        self._events = InMemoryDomainEventBus()
        self.gateway = CommandGateway(self.domain, self._commands)
        self._processors: dict[ProcessorKind, list[object]] = {}
        for processor in processors:
            self._processors.setdefault(processor_model(processor).kind, []).append(processor)
        self._components()  # finds what does not fit now rather than at the start

    def runtime(
        self,
        *,
        executor: KeyedExecutor | None = None,
        shutdown_timeout: float = 60.0,
        shutdown_quiet_period: float | None = None,
        signals: bool = True,
    ) -> Runtime:
        """Return a new runtime of this application; see `Runtime` for the arguments. Serve one at a time.

        Its components are, in this order: command dispatcher, event dispatcher, projections, sagas, gateway.
        """
        return Runtime(
            self._components(),
            executor=executor,
            shutdown_timeout=shutdown_timeout,
            shutdown_quiet_period=shutdown_quiet_period,
            signals=signals,
        )

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
        domain, commands, events = self.domain, self._commands, self._events
        components: list[RuntimeComponent] = [
            CommandDispatcher(domain, commands, self.store, events, results=self.gateway)
        ]
        kinds = self._processors
        if ProcessorKind.EVENT in kinds:
            components.append(EventDispatcher(kinds[ProcessorKind.EVENT], domain, events))
        if ProcessorKind.PROJECTION in kinds:
            components.append(ProjectionDispatcher(kinds[ProcessorKind.PROJECTION], domain, events))
        if ProcessorKind.SAGA in kinds:
            components.append(SagaDispatcher(kinds[ProcessorKind.SAGA], domain, events, commands))
        components.append(self.gateway)
        return components
