"""What all dispatchers have in common: receivers, leases, mailboxes, the component's life."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable
from functools import partial
from typing import Generic, Protocol, TypeVar

import trio

from trio_wow.buses import MessageBus, MessageExchange, MessageReceiver, Subscription
from trio_wow.dispatch._filters import FilterChain, Handling, Outcome
from trio_wow.dispatch._scheduling import GroupedScheduling, Groups
from trio_wow.domain import AggregateModel
from trio_wow.errors import AdmissionClosedError, FailureNotRetryableError
from trio_wow.eventsourcing import FailedExecution, FailureStore
from trio_wow.execution import split_cancelled
from trio_wow.messages import AggregateId, DomainEventStream
from trio_wow.runtime import RuntimeContext

__all__ = ["MessageDispatcher"]


class _Addressed(Protocol):
    @property
    def aggregate_id(self) -> AggregateId: ...


M = TypeVar("M", bound=_Addressed)
T = TypeVar("T")


class MessageDispatcher(ABC, Generic[M]):
    """A runtime component that handles messages in order per aggregate ID, in parallel across IDs.

    It has one receiver for each bounded context of its aggregates, in the consumer group that has its name, and a
    window of its own for each. With a `GroupedScheduling` it has one for each aggregate, and handles messages in order
    per group of aggregate IDs.

    Attributes:
        name: the component's name, and its consumer group's.
        filters: around each message as a whole, its acknowledgement included. What one raises ends the dispatcher.
    """

    def __init__(
        self,
        name: str,
        bus: MessageBus[M],
        aggregates: Iterable[AggregateModel],
        filters: FilterChain | None = None,
        scheduling: GroupedScheduling | None = None,
    ) -> None:
        self.name = name
        self.filters = filters if filters is not None else FilterChain()
        self._filtered = self.filters.around(self._handle_and_acknowledge)
        self._bus = bus
        self._scheduling = scheduling
        self._lent: Groups | None = None
        self._groups: Groups | None = None
        self._aggregates = tuple(aggregates)
        self._receivers: dict[str, MessageReceiver[M]] = {}
        self._context: RuntimeContext | None = None
        self._running = 0
        self._idle = trio.Event()

    @abstractmethod
    async def handle(self, handling: Handling, /) -> bool:
        """Handle one message, and say whether it may be acknowledged.

        What this raises ends the dispatcher and its runtime, so a user function's `Exception` must not leave it.
        """

    def wants(self, _message: M, /) -> bool:
        """Whether the dispatcher has any use for a message of its aggregates. It may get it all the same."""
        return True

    def unfinished(self, message: M, /) -> None:
        """Take note that a message was let go without having been finished. Plain, quick, and never raises."""

    async def retry(self, failure: FailedExecution, failures: FailureStore, stream: DomainEventStream, /) -> bool:
        """Try a failed execution of this dispatcher again; see `FailureRetries.retry`."""
        context = self._context
        if context is not None and context.admission.is_inside():
            raise FailureNotRetryableError(failure.id, "a function that handles a message would wait for itself")
        lease = None
        if context is not None and context.admission.intake_is_open:  # it is work from outside
            lease = context.try_acquire("failure %s of %s once more", failure.id, failure.function)
        if lease is None:
            raise AdmissionClosedError(self.name)
        self._running += 1  # after a failure the runtime waits for no lease
        try:
            with lease:
                outcome = await self.try_again(failure, stream)
                if outcome is Outcome.UNFINISHED:
                    raise AdmissionClosedError(self.name)
                if outcome is Outcome.HANDLED:
                    await failures.resolve_failure(failure.id)
        finally:
            self._end_running()
        return outcome is Outcome.HANDLED

    async def try_again(self, failure: FailedExecution, stream: DomainEventStream, /) -> Outcome:
        """Do once more what has failed, and say what has become of it; what fails for good is recorded again.

        Raises:
            FailureNotRetryableError: there is nothing like that here.
        """
        await trio.lowlevel.checkpoint()
        raise FailureNotRetryableError(failure.id, f"{self.name} does nothing for version {stream.version} again")

    async def _run_like_message(self, aggregate_id: AggregateId, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Run something where messages are handled, so that a forced stop ends it too, and what it raises."""
        outcome = Outcome.UNFINISHED

        async def run(_: AggregateId) -> None:
            nonlocal outcome
            try:
                outcome = await work()
            except BaseException as error:
                self._report(error, aggregate_id)
                raise

        await self._prepared().executor.dispatch(_only(aggregate_id), key=_itself, handler=run)
        return outcome

    async def prepare(self, context: RuntimeContext, /) -> None:
        """See `RuntimeComponent.prepare`."""
        self._context = context
        self._groups = self._lent
        if self._groups is None and self._scheduling is not None:
            self._groups = self._scheduling.groups_for(self.name, context)
        topics: dict[str, tuple[str, set[str]]] = {}
        for model in self._aggregates:
            name = model.context if self._groups is None else f"{model.context}.{model.name}"
            topics.setdefault(name, (model.context, set()))[1].add(model.name)
        self._receivers = {}
        for name, (bounded, aggregates) in topics.items():  # one by one: when one fails, those before are closed
            names = frozenset(aggregates)
            subscription = Subscription(self.name, bounded, names, context.admission, self.wants, context.nursery)
            self._receivers[name] = self._bus.receiver(subscription)
        for receiver in self._receivers.values():
            await receiver.ready.wait()

    def start(self) -> None:
        """See `RuntimeComponent.start`."""
        dispatch: Callable[..., Awaitable[None]] = self._prepared().executor.dispatch
        for name, receiver in self._receivers.items():
            if self._groups is not None:
                dispatch = self._groups.schedulers.get_or_initialize(name).dispatch
            self._run_task(partial(self._receive, dispatch), receiver, name=f"receiver {name}")

    def quiesce(self) -> None:
        """See `RuntimeComponent.quiesce`."""
        for receiver in self._receivers.values():
            receiver.close()

    async def stop(self) -> None:
        """See `RuntimeComponent.stop`."""
        self.quiesce()
        while self._running:
            if self._idle.is_set():
                self._idle = trio.Event()
            await self._idle.wait()
        if self._groups is not None:
            await self._groups.schedulers.stop_gracefully()
        await trio.lowlevel.checkpoint()

    def force_stop(self) -> None:
        """See `RuntimeComponent.force_stop`."""
        self.quiesce()
        if self._groups is not None:
            self._groups.schedulers.force_stop()

    def borrow(self, groups: Groups) -> None:
        """Use the groups of the dispatcher that this one is a part of, from the next `prepare` on."""
        self._lent = groups.lent()

    def _run_task(self, function: Callable[[T], Awaitable[object]], argument: T, *, name: str) -> None:
        """Run a task that `stop` waits for."""

        async def run() -> None:
            try:
                await function(argument)
            finally:
                self._end_running()

        self._running += 1
        self._prepared().nursery.start_soon(run, name=name)

    def _end_running(self) -> None:
        self._running -= 1
        self._idle.set()

    async def _receive(self, dispatch: Callable[..., Awaitable[None]], receiver: MessageReceiver[M]) -> None:
        try:
            receiver.open()
            await dispatch(
                receiver,
                key=_mailbox_key if self._groups is None else self._group_key,
                handler=self._process,
                on_discard=self._discard,
            )
        finally:
            receiver.abandon()

    def _group_key(self, exchange: MessageExchange[M]) -> Hashable:
        return self._chain_of(exchange.message.aggregate_id)

    def _chain_of(self, aggregate_id: AggregateId) -> Hashable:
        """Return the key of what is handled one at a time: an ID, or a group of them."""
        return aggregate_id if self._groups is None else self._groups.of(aggregate_id)

    def _discard(self, exchange: MessageExchange[M]) -> None:
        settled = exchange.is_settled()
        exchange.discard()
        if not settled:
            self.unfinished(exchange.message)

    async def _process(self, exchange: MessageExchange[M]) -> None:
        lease = exchange.lease
        if lease is None:
            lease = self._prepared().try_acquire("%s, in %s", exchange.message, self.name)
        handling = Handling(self.name, exchange.message, exchange=exchange)
        try:
            if lease is not None:  # else admission has closed: not handled, not acknowledged
                with lease:
                    if exchange.is_settled():
                        await exchange.acknowledge()
                        handling.acknowledged = True
                    else:
                        await self._filtered(handling)
        except BaseException as error:
            self._report(error, exchange.message.aggregate_id)
            raise
        finally:
            if not handling.acknowledged:
                self._discard(exchange)

    async def _handle_and_acknowledge(self, handling: Handling) -> None:
        if await self.handle(handling) and handling.exchange is not None:
            await handling.exchange.acknowledge()
            handling.acknowledged = True

    def _report(self, error: BaseException, aggregate_id: AggregateId) -> None:
        """Tell the runtime now, not when the other handlers have left: until then messages would go to the dead."""
        _, failure = split_cancelled(error)
        if failure is not None:
            failure.add_note(f"while {self.name} handled a message for {aggregate_id}")
            self._prepared().report_failure(failure)

    def _is_ending(self) -> bool:
        """Whether the runtime is ending after a failure, so that what is sent or published now may reach nobody."""
        return self._prepared().admission.is_closed

    def _prepared(self) -> RuntimeContext:
        if self._context is None:
            raise RuntimeError(f"{self.name} has not been prepared; put it into a Runtime")
        return self._context


async def _only(aggregate_id: AggregateId) -> AsyncGenerator[AggregateId, None]:
    yield aggregate_id


def _itself(aggregate_id: AggregateId) -> AggregateId:
    return aggregate_id


def _mailbox_key(exchange: MessageExchange[M]) -> AggregateId:
    return exchange.message.aggregate_id
