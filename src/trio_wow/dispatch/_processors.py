"""What the dispatchers of event processors, projections and sagas have in common."""

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from inspect import isawaitable
from itertools import groupby
from typing import Any, Protocol, TypeVar, cast

import trio
from attrs import define, field, frozen

from trio_wow.buses import MessageBus
from trio_wow.dispatch._dispatcher import MessageDispatcher
from trio_wow.dispatch._failures import FailureRetries, record
from trio_wow.dispatch._filters import FilterChain, Handling, Outcome
from trio_wow.dispatch._progress import PAGE, CatchUp, Progress, advance
from trio_wow.dispatch._registry import BoundFunction, RegisteredProcessor
from trio_wow.dispatch._results import CommandResults, StagePart
from trio_wow.dispatch._sender import SagaSender
from trio_wow.dispatch._store_source import StoreSource
from trio_wow.errors import FailureNotRetryableError, StoreError
from trio_wow.eventsourcing import (
    AggregateRepository,
    CheckpointStore,
    EventStore,
    FailedExecution,
    FailureRecorder,
    RecordedStream,
)
from trio_wow.execution import refuse_awaitable, user_call
from trio_wow.messages import AggregateId, CommandError, DomainEvent, DomainEventStream, Stage, StateEvent
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
        sequence: which event of the stream it is for, from 1; 0 for all of them.
        number: of the call, among those for one message.
        again: whether the version is handled already, and this call of it is tried again.
        started: set when the function is about to be called, where others wait for that.
    """

    processor: BoundProcessor = field(kw_only=True)
    call: Call | None = field(default=None, kw_only=True)
    sequence: int = field(kw_only=True)
    number: int = field(kw_only=True)
    again: bool = field(default=False, kw_only=True)
    started: trio.Event | None = field(default=None, kw_only=True)


class _Streamed(Protocol):
    @property
    def aggregate_id(self) -> AggregateId: ...

    @property
    def version(self) -> int: ...

    @property
    def command_id(self) -> str: ...


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
        retries: is told which functions can be tried again; `None` where nobody asks for that.
        stage: what a command has reached when all that it has led to is handled.
        signals: is told when that is so; `None` where nobody waits for it.
    """

    catch_up: CatchUp | None
    repository: AggregateRepository | None
    sender: SagaSender | None
    filters: FilterChain
    function_filters: FilterChain
    failures: FailureRecorder
    ack_on_unrecorded_failure: bool
    retries: FailureRetries | None
    stage: Stage
    signals: CommandResults | None


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
        if parts.retries is not None:
            parts.retries.add((f"{name}/{each}" for processor in processors for each in self._names(processor)), self)
        self._signals = parts.signals
        self._part = StagePart(parts.stage, self.part_name(), self._concerns)
        self._filtered_call = parts.function_filters.around(self._call)
        self._turns = _Turns()  # not the runtime's: what is tried again may outlive it
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

    @abstractmethod
    def part_name(self) -> str:
        """Tell this dispatcher from the others that one stage waits for."""

    @abstractmethod
    def message_after(self, event: StateEvent[Any], /) -> M:
        """Return what the bus will bring for what a command has led to."""

    def role(self, call: Call, /) -> str:
        """Name a call among those for one stream: the part of a saga's request IDs that tells them apart."""
        return f"{call.sequence}/{call.function.name}"

    def whole(self, processor: BoundProcessor, /) -> str:
        """Name the functions of a processor that share a transaction."""
        return processor.name

    async def prepare(self, context: RuntimeContext, /) -> None:
        """See `RuntimeComponent.prepare`."""
        self._reset()
        await super().prepare(context)
        if self._signals is not None:
            self._signals.serve(self._part)
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
        await self._turns.take(message.aggregate_id)
        try:
            for processor in self._processors:
                if processor.progress is None:
                    outcome = _worse(outcome, await self._run(processor, message))
                elif processor.progress.wants(message.aggregate_id):
                    outcome = _worse(outcome, await self._handle_once(processor, processor.progress, message))
        finally:
            self._turns.give_back(message.aggregate_id)
        handling.outcome = outcome
        self._signal(message, outcome)
        return outcome.settles or (outcome is Outcome.FAILURE_UNRECORDED and self._ack_on_unrecorded_failure)

    def unfinished(self, message: M, /) -> None:
        """See `MessageDispatcher.unfinished`. Whoever waits for it to be handled need not wait any more."""
        if self._signals is not None:
            self._signals.lost(self._part, message.command_id)

    def _concerns(self, event: StateEvent[Any]) -> bool:
        message = self.message_after(event)
        return any(
            any(True for _ in self.calls(processor, message))
            for processor in self._processors
            if processor.progress is None or processor.progress.wants(message.aggregate_id)
        )

    def _signal(self, message: M, outcome: Outcome, error: CommandError | None = None) -> None:
        """Tell who waits for a command that what it has led to is handled, or has failed; the first time counts."""
        if self._signals is None or outcome is Outcome.UNFINISHED:
            return
        if outcome is not Outcome.HANDLED and error is None:
            text = f"{self.name} has not handled version {message.version} of {message.aggregate_id}: see its log"
            error = CommandError(outcome.name, text)
        self._signals.done(self._part, message.command_id, error)

    async def try_again(self, failure: FailedExecution, stream: DomainEventStream, /) -> Outcome:
        """See `MessageDispatcher.try_again`. Nothing else of the aggregate is handled here meanwhile."""
        await self._turns.take(failure.aggregate_id)
        try:
            calling = self._calling_of(failure, await self.message_of(stream))
            return await self._run_like_message(failure.aggregate_id, partial(self._run_call, calling))
        finally:
            self._turns.give_back(failure.aggregate_id)

    def _calling_of(self, failure: FailedExecution, message: M) -> _Calling:
        callings = [
            calling
            for processor in self._processors
            for calling in self._callings(processor, message)
            if self._full_name(calling) == failure.function and calling.sequence == failure.sequence
        ]
        if len(callings) != 1:
            reason = f"{len(callings) or 'none'} of the functions for its event are named {failure.function}"
            raise FailureNotRetryableError(failure.id, reason)
        callings[0].again = True
        return callings[0]

    async def _catch_up(self, store: EventStore) -> None:
        context = self._prepared()
        source = StoreSource(store, self._progress, context, self._count_dropped, self._advance)
        while True:
            await context.executor.dispatch(source, key=self._chain_of_stored, handler=self._handle_stored)
            await self._advance(store)
            if context.stop_requested.is_set():
                return
            if source.dropped == self._dropped:
                break
        self._is_live = True
        self._caught_up.set()

    def _chain_of_stored(self, record: RecordedStream) -> Hashable:
        return self._chain_of(record.aggregate_id)

    async def _handle_stored(self, record: RecordedStream) -> None:
        lease = self._prepared().try_acquire("stored stream for %s", self.name)
        if lease is None:
            return
        try:
            with lease:
                await self._turns.take(record.aggregate_id)
                try:
                    await self._offer(record)
                finally:
                    self._turns.give_back(record.aggregate_id)
        except BaseException as error:
            self._report(error, record.aggregate_id)
            raise

    async def _offer(self, record: RecordedStream) -> None:
        message: M | None = None
        outcome = Outcome.HANDLED
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
            outcome = _worse(outcome, await self._handle_once(processor, progress, message))
        if message is not None:
            self._signal(message, outcome)

    async def _handle_once(self, processor: BoundProcessor, progress: Progress, message: M) -> Outcome:
        """Handle a version unless it is handled, and those before it if they are not."""
        aggregate_id, version = message.aggregate_id, message.version
        try:
            last = await progress.last_version(aggregate_id)
            if version <= last:
                return Outcome.HANDLED
            count = 1  # grows: what is missing has often failed before, and then the first of it fails again
            while self._store is not None and last + 1 < version:
                streams = await self._store.load(aggregate_id, after=last, until=min(last + count, version - 1))
                if not streams:
                    break
                for stream in streams:
                    outcome = await self._run_and_note(processor, progress, await self.message_of(stream))
                    if not outcome.settles:
                        return outcome
                last, count = streams[-1].version, min(2 * count, PAGE)
                await trio.lowlevel.checkpoint()  # a store in memory does not give way, and there may be many
        except Exception:
            _log.exception(
                "what %s has missed of %s before version %s cannot be read", processor.name, aggregate_id, version
            )
            return Outcome.UNFINISHED
        return await self._run_and_note(processor, progress, message)

    async def _run_and_note(self, processor: BoundProcessor, progress: Progress, message: M) -> Outcome:
        if processor.registered.in_transaction:
            outcome = await self._run_in_transaction(processor, progress, message)
        else:
            outcome = await self._run(processor, message)
        if outcome.settles:
            progress.handled(message.aggregate_id, message.version)
            self._handled.set()
        return outcome

    async def _run(self, processor: BoundProcessor, message: M) -> Outcome:
        progress = processor.progress
        done: set[int] = set() if progress is None else progress.done(message.aggregate_id)
        worst, failed = Outcome.HANDLED, False
        for _, same in groupby(self._callings(processor, message), key=_sequence_of):
            if failed and progress is not None:
                break  # what comes later waits for its turn
            callings = [calling for calling in same if calling.number not in done]
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

        async def run(calling: _Calling) -> None:
            try:
                outcomes[calling.number] = await self._run_call(calling)
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
                    nursery.start_soon(run, calling, name=calling.function)
                    await calling.started.wait()
                else:
                    await run(calling)
                    if outcomes[calling.number] is Outcome.UNFINISHED:
                        break
        return outcomes

    def _callings(self, processor: BoundProcessor, message: M) -> Iterator[_Calling]:
        if processor.registered.in_transaction:
            yield _Calling(self.name, message, self.whole(processor), processor=processor, sequence=0, number=0)
            return
        for number, call in enumerate(self.calls(processor, message)):
            yield _Calling(
                self.name,
                message,
                call.function.name,
                processor=processor,
                call=call,
                sequence=call.sequence,
                number=number,
            )

    def _names(self, processor: BoundProcessor) -> Iterable[str]:
        if processor.registered.in_transaction:
            return [self.whole(processor)]
        return {function.name for functions in processor.registered.functions.values() for function in functions}

    def _full_name(self, calling: _Calling) -> str:
        return f"{self.name}/{calling.function}"

    async def _run_call(self, calling: _Calling) -> Outcome:
        progress, aggregate_id = calling.processor.progress, calling.message.aggregate_id
        if calling.again:
            progress = None  # it has passed this version
        if progress is not None:
            calling.attempts = progress.attempts(aggregate_id).get(calling.number, 0)
        try:
            await self._filtered_call(calling)
        except Exception as error:
            if progress is not None:
                progress.attempts(aggregate_id)[calling.number] = calling.attempts
            return await self._failed(calling, error)
        return Outcome.HANDLED

    async def _call(self, handling: Handling) -> None:
        handling.attempts += 1
        calling = cast("_Calling", handling)
        call, message = calling.call, calling.message
        if call is None:
            await self._call_in_transaction(calling.processor, message, again=calling.again)
            return
        function = call.function
        arguments = await self._arguments(function, call.envelope, message) if function.arguments else {}
        executor, event = self._prepared().executor, call.envelope if function.takes_envelope else call.body
        with user_call(function.name, message.aggregate_id):
            if calling.started is not None:
                calling.started.set()  # the call takes its place in the pool in this very step
            result = await executor.call(function.profile, function.call, event, **arguments)
            if isawaitable(result):
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

    async def _run_in_transaction(self, processor: BoundProcessor, progress: Progress, message: M) -> Outcome:
        done = progress.done(message.aggregate_id)
        outcome = Outcome.FAILURE_RECORDED
        if not done:
            (calling,) = self._callings(processor, message)
            outcome = await self._run_call(calling)
            if outcome is Outcome.HANDLED or not outcome.settles:
                return outcome
            done.add(calling.number)  # so that it is not recorded again when only what follows fails
        try:
            await _in_transaction(processor, message, lambda _: None)
        except Exception:
            _log.exception(
                "%s cannot go on after version %s of %s", processor.name, message.version, message.aggregate_id
            )
            return Outcome.UNFINISHED
        return outcome

    async def _call_in_transaction(self, processor: BoundProcessor, message: M, *, again: bool) -> None:
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

        progress, checkpoints = _transactional(processor)
        if again and await progress.last_version(message.aggregate_id) + 1 != message.version:
            await checkpoints.transact(work)
        else:  # tried again too, if it could not be passed: it would be done once more after a restart
            await _in_transaction(processor, message, work)

    async def _failed(self, calling: _Calling, error: Exception) -> Outcome:
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
            function=self._full_name(calling),
            aggregate_id=message.aggregate_id,
            version=message.version,
            sequence=calling.sequence,
            attempts=calling.attempts,
        )
        outcome = await record(self._failures, failure)
        self._signal(message, outcome, CommandError.of(error))
        return outcome

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


def _sequence_of(calling: _Calling) -> int:
    return calling.sequence


def _worse(one: Outcome, other: Outcome) -> Outcome:
    return max(one, other, key=lambda outcome: outcome.value)


async def _in_transaction(processor: BoundProcessor, message: _Streamed, work: Callable[[Any], object]) -> None:
    progress, checkpoints = _transactional(processor)
    await checkpoints.handle_once(progress.name, message.aggregate_id, message.version, progress.position, work)


def _transactional(processor: BoundProcessor) -> tuple[Progress, CheckpointStore]:
    progress = processor.progress
    if progress is None or progress.checkpoints is None:
        raise RuntimeError(f"{processor.name} takes a transaction, but there is no store to make one")
    return progress, progress.checkpoints


class _Turns:
    """Of what belongs to one aggregate one thing at a time: a message, or a failed execution that is tried again.

    In the order in which they come: a mailbox that never empties takes its next turn as it gives one back.
    """

    def __init__(self) -> None:
        self._waiting: dict[AggregateId, deque[trio.Event]] = {}

    async def take(self, aggregate_id: AggregateId) -> None:
        waiting = self._waiting.get(aggregate_id)
        if waiting is None:
            self._waiting[aggregate_id] = deque()
            return
        turn = trio.Event()
        waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # it came in the same moment
                self.give_back(aggregate_id)
            else:
                waiting.remove(turn)
            raise

    def give_back(self, aggregate_id: AggregateId) -> None:
        if waiting := self._waiting[aggregate_id]:
            waiting.popleft().set()
        else:
            del self._waiting[aggregate_id]
