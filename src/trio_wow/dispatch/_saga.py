"""Sagas: events answered with commands."""

from collections import Counter
from collections.abc import Iterable

from trio_wow.buses import CommandBus, DomainEventBus
from trio_wow.dispatch._event import BoundFunction, EventDispatcher
from trio_wow.domain import Domain, ProcessorKind, processor_model
from trio_wow.errors import ConfigurationError, NoSubscriberError
from trio_wow.messages import DomainEvent

__all__ = ["SagaDispatcher"]


class SagaDispatcher(EventDispatcher):
    """An `EventDispatcher` for sagas: it sends the commands that their functions return.

    A command's request ID comes from the event and the command's role (which function returned it, as which of
    several), so that an event delivered again has each command's effect once. The command carries the tenant of the
    event's aggregate. Being sent while an event is handled, it never waits for room.

    Args:
        sagas: instances of classes decorated with `@saga`.
        domain: knows which aggregates events happen to, and where commands go.
        bus: where streams come from.
        commands: where commands go.
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
        name: str = "saga-dispatcher",
    ) -> None:
        sagas = list(sagas)
        names = Counter(processor_model(each).name for each in sagas)
        if doubled := [name for name, count in names.items() if count > 1]:
            # Their commands would share request IDs, and all but one of each would be taken for duplicates.
            raise ConfigurationError(
                [f"several sagas are named {name}; give one class another name" for name in doubled]
            )
        super().__init__(sagas, domain, bus, name=name)
        self._domain = domain
        self._commands = commands

    async def _answer(self, function: BoundFunction, event: DomainEvent[object], result: object) -> None:
        commands = result if isinstance(result, list | tuple) else () if result is None else (result,)
        messages = [
            self._domain.command_message(
                command,
                request_id=f"{event.stream.id}/{event.sequence}/{function.name}/{index}",
                tenant=event.aggregate_id.tenant,
            )
            for index, command in enumerate(commands)
        ]
        for message in messages:
            if not await self._commands.send_if_subscribed(message):
                raise NoSubscriberError(message.aggregate_id)
