"""What the dispatchers of event processors, projections and sagas have in common."""

import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from inspect import isawaitable
from itertools import groupby
from typing import Any, Protocol, TypeVar, cast

import trio
from attrs import define, field, frozen

from trio_wow.buses import MessageBus
from trio_wow.dispatch._dispatcher import MessageDispatcher
from trio_wow.dispatch._filters import FilterChain, Handling, Outcome
from trio_wow.dispatch._progress import PAGE, CatchUp, Progress, advance
from trio_wow.dispatch._registry import BoundFunction, RegisteredProcessor
from trio_wow.dispatch._sender import SagaSender
from trio_wow.errors import StoreError
from trio_wow.eventsourcing import (
    AggregateRepository,
    EventStore,
    FailedExecution,
    FailureRecorder,
    RecordedStream,
    Recording,
)
from trio_wow.execution import no_leaked_scope, refuse_awaitable
from trio_wow.messages import AggregateId, DomainEvent, DomainEventStream, StateEvent
from trio_wow.runtime import RuntimeContext

__all__ = ["BoundProcessor", "Call", "ProcessorDispatcher", "ProcessorParts"]

_log = logging.getLogger("trio_wow.dispatch")

CHECKPOINT_INTERVAL = 1.0
"""Seconds from one move of the checkpoints to the next, while there is something to move them over."""


@frozen
class BoundProcessor:
    """One processor, as its dispatcher runs it.

    Attributes:
        registered: the processor and its functions.
        progress: how far it has come; `None` when that is not kept.
    """

    registered: RegisteredProcessor
    progress: Progress | None

    @property
    def name(self) -> str:
        """Its class's name."""
        return self.registered.name


@frozen
class Call:
    """One call of one function for one message.

    Attributes:
        function: what to call.
        body: the event or the state.
        envelope: what it is in.
        sequence: which event of the stream it is for, from 1.
    """

    function: BoundFunction
    body: object
    envelope: DomainEvent[Any] | StateEvent[Any]
    sequence: int


@define(eq=False)
class _Calling(Handling):
    """One call on its way through the function filters; where all of a processor's share a transaction, those.

    Attributes:
        processor: whose function it is.
        call: `None` for those that share a transaction.
        number: of the call, among those for one message.
        started: set when the function is about to be called, where others wait for that.
    """

    processor: BoundProcessor = field(kw_only=True)
    call: Call | None = field(default=None, kw_only=True)
    number: int = field(default=0, kw_only=True)
    started: trio.Event | None = field(default=None, kw_only=True)


class _Streamed(Protocol):
    @property
    def aggregate_id(self) -> AggregateId: ...

    @property
    def version(self) -> int: ...


M = TypeVar("M", bound=_Streamed)


@frozen
class ProcessorParts:
    """What a dispatcher of processors hands down to the dispatchers in it.

    Attributes:
        catch_up: the store to begin with; `None` for what is published while the runtime runs.
        repository: loads states; `None` where no function needs them.
        sender: sends what functions return; `None` where that means nothing.
        filters: around each message as a whole.
        function_filters: around each attempt to call a function.
        failures: is told of what has failed for good.
        ack_on_unrecorded_failure: whether a message is acknowledged although nobody keeps its failure but a log.
    """

    catch_up: CatchUp | None
    repository: AggregateRepository | None
    sender: SagaSender | None
    filters: FilterChain
    function_filters: FilterChain
    failures: FailureRecorder
    ack_on_unrecorded_failure: bool


class ProcessorDispatcher(MessageDispatcher[M]):
    """Runs the functions of processors for what happened to aggregates.

    With a `CatchUp` it reads the store from its processors' checkpoints when it starts, in mailboxes and a window of
    its own, while it acknowledges and drops what the bus brings, since that is in the store too. It goes live when the
    store has no more and nothing was dropped since it was asked. From then on a version that is handled already is
    skipped, and a gap is read from the store first. A version is handled when every function for it has succeeded.

    Each call of a function goes through the function filters, which try again what may succeed then. What fails for
    good goes to the failure recorder; the other functions still run. If the recorder keeps it, or says that it need not
    be kept, the version counts as handled. If not, it holds its processor's checkpoint and the further versions of its
    aggregate, and is tried again when the next one arrives, and after a restart; what succeeded is not run again before
    a restart. Without a `CatchUp` it holds nothing.
    """

    def __init__(
        self,
        name: str,
        bus: MessageBus[M],
        processors: Sequence[BoundProcessor],
        parts: ProcessorParts,
    ) -> None:
        aggregates = dict.fromkeys(model for each in processors for model in each.registered.aggregates)
        super().__init__(name, bus, aggregates, parts.filters)
        self._processors = processors
        self._repository = parts.repository
        self._sender = parts.sender
        self._failures = parts.failures
        self._ack_on_unrecorded_failure = parts.ack_on_unrecorded_failure
        self._filtered_call = parts.function_filters.around(self._call)
        self._store = parts.catch_up.store if parts.catch_up is not None else None
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

    def role(self, call: Call, /) -> str:
        """Name a call among those for one stream: the part of a saga's request IDs that tells them apart."""
        return f"{call.sequence}/{call.function.name}"

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

    async def handle(self, handling: Handling, /) -> bool:
        """See the class."""
        message: M = handling.message
        if not self._is_live:
            self._dropped += 1
            return True
        outcome = Outcome.HANDLED
        for processor in self._processors:
            if processor.progress is None:
                outcome = _worse(outcome, await self._run(processor, message))
            elif processor.progress.wants(message.aggregate_id):
                outcome = _worse(outcome, await self._handle_once(processor, processor.progress, message))
        handling.outcome = outcome
        return outcome.settles or (outcome is Outcome.FAILURE_UNRECORDED and self._ack_on_unrecorded_failure)

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

    async def _handle_once(self, processor: BoundProcessor, progress: Progress, message: M) -> Outcome:
        """Handle a version unless it is handled, and those before it if they are not."""
        aggregate_id, version = message.aggregate_id, message.version
        try:
            last = await progress.last_version(aggregate_id)
            if version <= last:
                return Outcome.HANDLED
            if self._store is not None and last + 1 < version:
                for stream in await self._store.load(aggregate_id, after=last, until=version - 1):
                    outcome = await self._run_and_note(processor, progress, await self.message_of(stream))
                    if not outcome.settles:
                        return outcome
        except Exception:
            _log.exception(
                "what %s has missed of %s before version %s cannot be read", processor.name, aggregate_id, version
            )
            return Outcome.UNFINISHED
        return await self._run_and_note(processor, progress, message)

    async def _run_and_note(self, processor: BoundProcessor, progress: Progress, message: M) -> Outcome:
        run = self._run_in_transaction if processor.registered.in_transaction else self._run
        outcome = await run(processor, message)
        if outcome.settles:
            progress.handled(message.aggregate_id, message.version)
            self._handled.set()
        return outcome

    async def _run(self, processor: BoundProcessor, message: M) -> Outcome:
        progress = processor.progress
        done: set[int] = set() if progress is None else progress.done(message.aggregate_id)
        worst, failed = Outcome.HANDLED, False
        for _, calls in groupby(enumerate(self.calls(processor, message)), key=_sequence):
            if failed and progress is not None:
                break  # what comes later waits for its turn
            callings = [
                _Calling(self.name, message, call.function.name, call=call, processor=processor, number=number)
                for number, call in calls
                if number not in done
            ]
            for number, outcome in (await self._run_side_by_side(callings)).items():
                if outcome.settles:
                    done.add(number)
                else:
                    failed = True
                worst = _worse(worst, outcome)
            if worst is Outcome.UNFINISHED:
                break
        return worst

    async def _run_side_by_side(self, callings: Sequence[_Calling]) -> Mapping[int, Outcome]:
        """Run the functions for one event. They start in order; the others go on beside those in the pool."""
        uses_pool = self._prepared().executor.uses_pool
        outcomes: dict[int, Outcome] = {}

        async def run(calling: _Calling, call: Call) -> None:
            try:
                outcomes[calling.number] = await self._run_call(calling, call.sequence)
            finally:
                if calling.started is not None:
                    calling.started.set()

        async with AsyncExitStack() as stack:
            nursery: trio.Nursery | None = None
            for calling in callings:
                call = cast("Call", calling.call)
                if calling is not callings[-1] and uses_pool(call.function.profile):
                    if nursery is None:
                        nursery = await stack.enter_async_context(trio.open_nursery())
                    calling.started = trio.Event()
                    nursery.start_soon(run, calling, call, name=calling.function)
                    await calling.started.wait()
                else:
                    await run(calling, call)
                    if outcomes[calling.number] is Outcome.UNFINISHED:
                        break
        return outcomes

    async def _run_call(self, calling: "_Calling", sequence: int) -> Outcome:
        progress, aggregate_id = calling.processor.progress, calling.message.aggregate_id
        if progress is not None:
            calling.attempts = progress.attempts(aggregate_id).get(calling.number, 0)
        try:
            await self._filtered_call(calling)
        except Exception as error:
            if progress is not None:
                progress.attempts(aggregate_id)[calling.number] = calling.attempts
            return await self._failed(calling, error, sequence)
        return Outcome.HANDLED

    async def _call(self, handling: Handling) -> None:
        handling.attempts += 1
        calling = cast("_Calling", handling)
        call, message = calling.call, calling.message
        if call is None:
            await self._call_in_transaction(calling.processor, message)
            return
        function = call.function
        arguments = await self._arguments(function, call.envelope, message) if function.arguments else {}
        executor, event = self._prepared().executor, call.envelope if function.takes_envelope else call.body
        if calling.started is not None:
            calling.started.set()  # the call takes its place in the pool in this very step
        result = await executor.call(function.profile, function.call, event, **arguments)
        if isawaitable(result):
            with no_leaked_scope(function.name, message.aggregate_id):
                result = await result
        if self._sender is not None:
            await self._sender.send(result, self.role(call), call.envelope.stream)

    async def _arguments(self, function: BoundFunction, envelope: Any, message: M) -> dict[str, object]:
        state: object = None
        if function.arguments.needs_state:
            if isinstance(message, StateEvent):
                state = message.state
            elif self._repository is not None:
                state = (await self._repository.load(message.aggregate_id, version=message.version)).state
        return function.arguments.of(envelope, state)

    async def _run_in_transaction(self, processor: BoundProcessor, message: M) -> Outcome:
        calling = _Calling(self.name, message, processor.name, processor=processor)
        outcome = await self._run_call(calling, 0)
        if outcome.settles and outcome is not Outcome.HANDLED:
            try:
                await _in_transaction(processor, message, lambda _: None)
            except Exception:
                _log.exception(
                    "%s cannot go on after version %s of %s", processor.name, message.version, message.aggregate_id
                )
                return Outcome.UNFINISHED
        return outcome

    async def _call_in_transaction(self, processor: BoundProcessor, message: M) -> None:
        calls = tuple(self.calls(processor, message))
        executor = self._prepared().executor

        def work(transaction: Any) -> None:
            for call in calls:
                function = call.function
                arguments = function.arguments.of(call.envelope)
                arguments[str(function.arguments.transaction)] = transaction
                event = call.envelope if function.takes_envelope else call.body
                result = executor.call_here(function.profile, function.call, event, **arguments)
                if isawaitable(result):
                    refuse_awaitable(result, f"{function.name} returned an awaitable, which no thread awaits")

        await _in_transaction(processor, message, work)

    async def _failed(self, calling: _Calling, error: Exception, sequence: int) -> Outcome:
        """Give what has failed for good to the failure recorder."""
        message = calling.message
        if self._is_ending():
            _log.warning(
                "%s did not finish version %s of %s: the runtime is ending",
                calling.function,
                message.version,
                message.aggregate_id,
            )
            return Outcome.UNFINISHED
        failure = FailedExecution.of(
            error,
            function=f"{self.name}/{calling.function}",
            aggregate_id=message.aggregate_id,
            version=message.version,
            sequence=sequence,
            attempts=calling.attempts,
        )
        try:
            recording = await self._failures.record(failure)
        except Exception:
            _log.exception(
                "%s failed on version %s of %s (%s: %s), and recording that failed",
                calling.function,
                message.version,
                message.aggregate_id,
                failure.error,
                failure.text,
            )
            return Outcome.RECORDING_FAILED
        return _OUTCOMES[recording]

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


_OUTCOMES = {
    Recording.RECORDED: Outcome.FAILURE_RECORDED,
    Recording.WAIVED: Outcome.FAILURE_WAIVED,
    Recording.UNRECORDED: Outcome.FAILURE_UNRECORDED,
}


def _sequence(numbered: tuple[int, Call]) -> int:
    return numbered[1].sequence


def _worse(one: Outcome, other: Outcome) -> Outcome:
    return max(one, other, key=lambda outcome: outcome.value)


async def _in_transaction(processor: BoundProcessor, message: _Streamed, work: Callable[[Any], object]) -> None:
    progress = processor.progress
    if progress is None or progress.checkpoints is None:
        raise RuntimeError(f"{processor.name} takes a transaction, but there is no store to make one")
    await progress.checkpoints.handle_once(
        progress.name, message.aggregate_id, message.version, progress.position, work
    )


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
