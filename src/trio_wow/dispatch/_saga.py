"""Sagas: events answered with commands."""

from collections import Counter
from collections.abc import Iterable

from trio_wow.buses import CommandBus, DomainEventBus
from trio_wow.dispatch._event import EventDispatcher
from trio_wow.dispatch._processors import BoundProcessor, Call
from trio_wow.dispatch._progress import CatchUp
from trio_wow.dispatch._results import CommandResults
from trio_wow.domain import Domain, ProcessorKind, processor_model
from trio_wow.errors import ConfigurationError, NoSubscriberError
from trio_wow.messages import CommandMessage, DomainEventStream

__all__ = ["SagaDispatcher", "SagaSender"]


class SagaSender:
    """Sends the commands that saga functions return.

    A command's request ID comes from the event and the command's role (which function returned it, as which of
    several), so that an event handled again has each command's effect once. The command carries the tenant of the
    event's aggregate. Being sent while an event is handled, it never waits for room.

    Args:
        domain: knows where commands go.
        bus: where commands go.
        results: tells how they end. With it, an event is finished only when every command that it led to has its
            result, as it must be on a bus that does not survive the process. Without it, a command sent is enough.
    """

    def __init__(self, domain: Domain, bus: CommandBus, results: CommandResults | None) -> None:
        self._domain = domain
        self._bus = bus
        self._results = results

    async def send(self, result: object, role: str, stream: DomainEventStream) -> None:
        """Send what a function has returned: a command, several in a list or tuple, or `None`.

        Args:
            result: what it returned.
            role: the event of the stream, and the function.
            stream: what it was called for.

        Raises:
            UnroutableCommandError: no aggregate handles one of them. None was sent.
            NoSubscriberError: nobody receives one; those before it were sent.
            WaitAbandonedError: the runtime ends before one of them is handled.
            CommandFailedError: the store could not be used for one of them.
            WowError: as for `Domain.command_message`. None was sent.
        """
        commands = result if isinstance(result, list | tuple) else () if result is None else (result,)
        messages = [
            self._domain.command_message(
                command, request_id=f"{stream.id}/{role}/{index}", tenant=stream.aggregate_id.tenant
            )
            for index, command in enumerate(commands)
        ]
        for message in messages:
            if self._results is None:
                await self._send(message)
                continue
            with self._results.expecting(message.id) as wait:
                await self._send(message)
                ended = await wait.wait()
            if ended.error is not None and ended.error.undecided:
                ended.raise_for_error()

    async def _send(self, message: CommandMessage) -> None:
        if not await self._bus.send_if_subscribed(message):
            raise NoSubscriberError(message.aggregate_id)


def refuse_shared_names(sagas: Iterable[object]) -> None:
    """Refuse sagas of one name: their commands would share request IDs, and all but one be taken for duplicates.

    Raises:
        ConfigurationError: there are some.
    """
    names = Counter(processor_model(each).name for each in sagas)
    if doubled := [name for name, count in names.items() if count > 1]:
        raise ConfigurationError([f"several sagas are named {name}; give one class another name" for name in doubled])


class SagaDispatcher(EventDispatcher):
    """An `EventDispatcher` for sagas: it sends the commands that their functions return, see `SagaSender`.

    Args:
        sagas: instances of classes decorated with `@saga`.
        domain: knows which aggregates events happen to, and where commands go.
        bus: where streams come from.
        commands: where commands go.
        results: tells how commands end; `None` for a command bus that survives the process.
        catch_up: the store to begin with; see `ProcessorDispatcher`.
        name: the component and its consumer group.

    Raises:
        ConfigurationError: as for `EventDispatcher`; or two sagas have one name.
    """

    kind = ProcessorKind.SAGA

    def __init__(
        self,
        sagas: Iterable[object],
        domain: Domain,
        bus: DomainEventBus,
        commands: CommandBus,
        *,
        results: CommandResults | None = None,
        catch_up: CatchUp | None = None,
        name: str = "saga-dispatcher",
    ) -> None:
        sagas = list(sagas)
        refuse_shared_names(sagas)
        super().__init__(sagas, domain, bus, catch_up=catch_up, name=name)
        self._sender = SagaSender(domain, commands, results)

    async def answer(
        self, _processor: BoundProcessor, call: Call, message: DomainEventStream, result: object, /
    ) -> None:
        """See `ProcessorDispatcher.answer`."""
        await self._sender.send(result, f"{call.sequence}/{call.function.name}", message)
