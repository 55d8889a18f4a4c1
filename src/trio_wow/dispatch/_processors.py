"""What the dispatchers of event processors, projections and sagas have in common."""

import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import isawaitable
from typing import Any, Protocol, TypeVar

import trio
from attrs import frozen

from trio_wow.buses import MessageBus
from trio_wow.dispatch._dispatcher import MessageDispatcher
from trio_wow.dispatch._progress import PAGE, CatchUp, Progress, advance
from trio_wow.domain import AggregateModel, EventFunction, ProcessorKind, ProcessorModel, processor_model
from trio_wow.errors import StoreError
from trio_wow.eventsourcing import EventStore, RecordedStream
from trio_wow.execution import no_leaked_scope, refuse_awaitable
from trio_wow.messages import AggregateId, DomainEventStream
from trio_wow.runtime import RuntimeContext

__all__ = ["BoundFunction", "BoundProcessor", "Call", "ProcessorDispatcher", "bind"]

_log = logging.getLogger("trio_wow.dispatch")

CHECKPOINT_INTERVAL = 1.0
"""Seconds from one move of the checkpoints to the next, while there is something to move them over."""


@frozen
class BoundFunction:
    """One function of one processor.

    Attributes:
        name: the class and the method.
        handles: the class that it handles.
        takes_envelope: whether it takes the envelope rather than what is in it.
        call: the bound method.
    """

    name: str
    handles: type
    takes_envelope: bool
    call: Callable[..., object]


@frozen
class BoundProcessor:
    """One processor, as its dispatcher runs it.

    Attributes:
        name: its class's name.
        kind: its class's decorator.
        functions: by the class that they handle.
        in_transaction: whether they take the store's transaction.
        progress: how far it has come; `None` when that is not kept.
    """

    name: str
    kind: ProcessorKind
    functions: Mapping[type, Sequence[BoundFunction]]
    in_transaction: bool
    progress: Progress | None


@frozen
class Call:
    """One call of one function for one message.

    Attributes:
        function: what to call.
        argument: what with.
        sequence: which event of the stream it is for, from 1.
        about: the class of the event or state.
    """

    function: BoundFunction
    argument: object
    sequence: int
    about: type


class _Streamed(Protocol):
    @property
    def aggregate_id(self) -> AggregateId: ...

    @property
    def version(self) -> int: ...


M = TypeVar("M", bound=_Streamed)


def bind(
    processors: Iterable[object],
    functions_of: Callable[[ProcessorModel], Sequence[EventFunction]],
    publishers_of: Callable[[BoundFunction], Collection[AggregateModel]],
    catch_up: CatchUp | None,
    group: str,
    problems: list[str],
) -> tuple[list[BoundProcessor], list[AggregateModel]]:
    """Bind the functions of processors, and return the processors and all aggregates that they subscribe to.

    Args:
        processors: instances of decorated classes.
        functions_of: which functions of a processor's class are meant.
        publishers_of: which aggregates a function subscribes to; none is a problem that it notes itself.
        catch_up: keeps how far each has come.
        group: the dispatcher's name.
        problems: gets a sentence for whatever does not fit.
    """
    bound: list[BoundProcessor] = []
    everything: dict[AggregateModel, None] = {}
    seen: list[object] = []
    kept: set[str] = set()
    for processor in processors:
        model = processor_model(processor)
        if any(processor is other for other in seen):
            problems.append(f"{processor!r} is given twice; give it once")
            continue
        seen.append(processor)
        functions: dict[type, list[BoundFunction]] = {}
        own: dict[AggregateModel, None] = {}
        for each in functions_of(model):
            method = getattr(processor, each.name)
            function = BoundFunction(f"{model.name}.{each.name}", each.handles, each.takes_envelope, method)
            functions.setdefault(each.handles, []).append(function)
            own |= dict.fromkeys(publishers_of(function))
        everything |= own
        in_memory = model.kind is ProcessorKind.PROJECTION and not model.takes_transaction
        if model.takes_transaction and (catch_up is None or catch_up.checkpoints is None):
            problems.append(
                f"the functions of {model.name} take a transaction, which needs a store that keeps checkpoints"
            )
        if not in_memory and catch_up is not None and catch_up.checkpoints is not None:
            if model.name in kept:
                problems.append(f"several processors are named {model.name}, so that they would share one checkpoint")
            kept.add(model.name)
        progress = None
        if catch_up is not None:
            progress = catch_up.progress_of(
                processor,
                f"{group}/{model.name}",
                [(each.context, each.name) for each in own],
                in_memory=in_memory,
                in_transaction=model.takes_transaction,
            )
        bound.append(BoundProcessor(model.name, model.kind, functions, model.takes_transaction, progress))
    return bound, list(everything)


class ProcessorDispatcher(MessageDispatcher[M]):
    """Runs the functions of processors for what happened to aggregates.

    With a `CatchUp` it reads the store from its processors' checkpoints when it starts, in mailboxes and a window of
    its own, while it acknowledges and drops what the bus brings, since that is in the store too. It goes live when the
    store has no more and nothing was dropped since it was asked. From then on a version that is handled already is
    skipped, and a gap is read from the store first. A version is handled when every function for it has succeeded.
    One that fails is logged, holds its processor's checkpoint and the further versions of its aggregate, and is tried
    again when the next one arrives, and after a restart; what succeeded is not run again before a restart.

    Without a `CatchUp` a failing function is logged, the others still run, and the message is acknowledged.
    """

    def __init__(
        self,
        name: str,
        bus: MessageBus[M],
        processors: Sequence[BoundProcessor],
        aggregates: Iterable[AggregateModel],
        catch_up: CatchUp | None,
    ) -> None:
        super().__init__(name, bus, aggregates)
        self._processors = processors
        self._store = catch_up.store if catch_up is not None else None
        self._progress = [each.progress for each in processors if each.progress is not None]
        self._reset()

    def _reset(self) -> None:
        self._is_live = self._store is None
        self._dropped = 0
        self._caught_up = trio.Event()
        self._handled = trio.Event()
        self._keeping = trio.CancelScope()

    @abstractmethod
    def calls(self, processor: BoundProcessor, message: M, /) -> Iterator[Call]:
        """Yield the calls of one processor for one message, in order."""

    @abstractmethod
    async def message_of(self, stream: DomainEventStream, /) -> M:
        """Return what the bus would have brought for a stored stream."""

    async def answer(self, processor: BoundProcessor, call: Call, message: M, result: object, /) -> None:
        """Take what a function returned. Only a saga's result means anything."""

    async def prepare(self, context: RuntimeContext, /) -> None:
        """See `RuntimeComponent.prepare`."""
        self._reset()
        await super().prepare(context)
        for each in self._progress:
            await each.restore()

    def start(self) -> None:
        """See `RuntimeComponent.start`."""
        super().start()
        if self._store is not None:
            self._run_task(self._catch_up, self._store, name=f"catch-up of {self.name}")
            self._prepared().nursery.start_soon(self._keep_checkpoints, self._store, name=f"checkpoints of {self.name}")

    async def caught_up(self) -> None:
        """Wait until everything that was stored when the runtime started is handled, or has been tried."""
        if self._store is not None:
            await self._caught_up.wait()

    async def stop(self) -> None:
        """See `RuntimeComponent.stop`."""
        await super().stop()
        self._keeping.cancel()
        if self._store is not None:
            await self._advance(self._store)

    def force_stop(self) -> None:
        """See `RuntimeComponent.force_stop`."""
        super().force_stop()
        self._keeping.cancel()

    async def handle(self, message: M) -> bool:
        """See the class."""
        if not self._is_live:
            self._dropped += 1
            return True
        finished = True
        for processor in self._processors:
            if processor.progress is None:
                finished = await self._run(processor, message) and finished
            elif processor.progress.wants(message.aggregate_id):
                finished = await self._handle_once(processor, processor.progress, message) and finished
        return finished

    async def _catch_up(self, store: EventStore) -> None:
        context = self._prepared()
        source = _StoreSource(store, self._progress, context, self._count_dropped, self._advance)
        while True:
            await context.executor.dispatch(source, key=_aggregate_of, handler=self._handle_stored)
            await self._advance(store)
            if context.stop_requested.is_set():
                return
            if source.dropped == self._dropped:
                break
        self._is_live = True
        self._caught_up.set()

    async def _handle_stored(self, record: RecordedStream) -> None:
        lease = self._prepared().try_acquire("stored stream for %s", self.name)
        if lease is None:
            return
        try:
            with lease:
                await self._offer(record)
        except BaseException as error:
            self._report(error, record.aggregate_id)
            raise

    async def _offer(self, record: RecordedStream) -> None:
        message: M | None = None
        for processor in self._processors:
            progress = processor.progress
            if progress is None or not progress.wants(record.aggregate_id) or record.position <= progress.position:
                continue
            with suppress(Exception):  # `_handle_once` asks again, and tells
                if record.version <= await progress.last_version(record.aggregate_id):
                    continue
            if message is None:
                try:
                    message = await self.message_of(record.stream)
                except Exception:
                    _log.exception(
                        "version %s of %s cannot be read, and holds the checkpoints of %s",
                        record.version,
                        record.aggregate_id,
                        self.name,
                    )
                    return
            await self._handle_once(processor, progress, message)

    async def _handle_once(self, processor: BoundProcessor, progress: Progress, message: M) -> bool:
        """Handle a version unless it is handled, and those before it if they are not."""
        aggregate_id, version = message.aggregate_id, message.version
        try:
            last = await progress.last_version(aggregate_id)
            if version <= last:
                return True
            if self._store is not None and last + 1 < version:
                for stream in await self._store.load(aggregate_id, after=last, until=version - 1):
                    if not await self._run_and_note(processor, progress, await self.message_of(stream)):
                        return False
        except Exception:
            _log.exception(
                "what %s has missed of %s before version %s cannot be read", processor.name, aggregate_id, version
            )
            return False
        return await self._run_and_note(processor, progress, message)

    async def _run_and_note(self, processor: BoundProcessor, progress: Progress, message: M) -> bool:
        run = self._run_in_transaction if processor.in_transaction else self._run
        finished = await run(processor, message)
        if finished:
            progress.handled(message.aggregate_id, message.version)
            self._handled.set()
        return finished

    async def _run(self, processor: BoundProcessor, message: M) -> bool:
        progress = processor.progress
        done: set[int] = set() if progress is None else progress.done(message.aggregate_id)
        failed_at: int | None = None
        for number, call in enumerate(self.calls(processor, message)):
            if number in done:
                continue
            if failed_at is not None and failed_at < call.sequence and progress is not None:
                break  # what comes later waits for its turn
            try:
                result = call.function.call(call.argument)
                if isawaitable(result):
                    with no_leaked_scope(call.function.name, message.aggregate_id):
                        result = await result
                await self.answer(processor, call, message, result)
                done.add(number)
            except Exception:
                where = (call.function.name, call.about.__name__, message.version, message.aggregate_id)
                if self._is_ending():
                    _log.warning("%s did not finish %s, version %s of %s: the runtime is ending", *where)
                    return False
                _log.exception("%s failed on %s, version %s of %s", *where)
                failed_at = call.sequence
        return failed_at is None or progress is None

    async def _run_in_transaction(self, processor: BoundProcessor, message: M) -> bool:
        progress = processor.progress
        if progress is None or progress.checkpoints is None:
            raise RuntimeError(f"{processor.name} takes a transaction, but there is no store to make one")
        calls = tuple(self.calls(processor, message))

        def work(transaction: Any) -> None:
            for call in calls:
                result = call.function.call(call.argument, transaction)
                if isawaitable(result):
                    refuse_awaitable(result, f"{call.function.name} returned an awaitable, which no thread awaits")

        try:
            await progress.checkpoints.handle_once(
                progress.name, message.aggregate_id, message.version, progress.position, work
            )
        except Exception:
            _log.exception("%s failed on version %s of %s", processor.name, message.version, message.aggregate_id)
            return False
        return True

    async def _keep_checkpoints(self, store: EventStore) -> None:
        with self._keeping:
            while True:
                await self._handled.wait()
                self._handled = trio.Event()
                await self._advance(store)
                await trio.sleep(CHECKPOINT_INTERVAL)

    def _count_dropped(self) -> int:
        return self._dropped

    async def _advance(self, store: EventStore) -> None:
        try:
            await advance(store, self._progress)
        except StoreError as error:
            _log.warning("the checkpoints of %s stay behind for now: %s", self.name, error)


def _aggregate_of(record: RecordedStream) -> AggregateId:
    return record.aggregate_id


class _StoreSource:
    """A `BatchSource` of the streams of a store that processors have not handled. It can be dispatched again.

    Attributes:
        dropped: how many messages had been dropped when the last page was asked for.
    """

    def __init__(
        self,
        store: EventStore,
        progress: Sequence[Progress],
        context: RuntimeContext,
        dropped: Callable[[], int],
        advance: Callable[[EventStore], Awaitable[None]],
    ) -> None:
        self._store = store
        self._progress = progress
        self._context = context
        self._count_dropped = dropped
        self._advance = advance
        self._position = 0
        self._page: Sequence[RecordedStream] = ()
        self.dropped = 0

    async def receive_batch(self, limit: int, /) -> Sequence[RecordedStream]:
        """See `BatchSource`."""
        await self._wait_for_room()
        while not self._page:
            await self._advance(self._store)  # with each page, also where nothing in it is wanted
            self._position = max(self._position, min((each.position for each in self._progress), default=0))
            self.dropped = self._count_dropped()
            page = await self._store.read_all(self._position, PAGE)
            if not page or self._context.stop_requested.is_set():
                raise trio.EndOfChannel
            self._position = page[-1].position
            self._page = [each for each in page if any(one.wants(each.aggregate_id) for one in self._progress)]
        batch, self._page = self._page[:limit], self._page[limit:]
        return batch

    async def _wait_for_room(self) -> None:
        admission = self._context.admission
        while admission.is_overdrawn and not self._context.stop_requested.is_set():
            changed = trio.Event()
            admission.watch(changed.set)
            try:
                await changed.wait()
            finally:
                admission.unwatch(changed.set)
        await trio.lowlevel.checkpoint()
        if self._context.stop_requested.is_set():
            raise trio.EndOfChannel
