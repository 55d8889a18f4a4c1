"""Sending the commands of sagas."""

from trio_wow.buses import CommandBus
from trio_wow.dispatch._results import CommandResults
from trio_wow.domain import Domain
from trio_wow.errors import HopLimitError, NoSubscriberError
from trio_wow.messages import CommandMessage, DomainEventStream

__all__ = ["MAX_HOPS", "SagaSender"]

HOPS = "wow-hops"
MAX_HOPS = 32


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
        max_hops: how many of sagas' commands may follow one another, so that a saga cannot feed itself for ever. The
            count travels in the header `wow-hops`.

    Raises:
        ValueError: `max_hops` is no positive int.
    """

    def __init__(
        self, domain: Domain, bus: CommandBus, results: CommandResults | None, *, max_hops: int = MAX_HOPS
    ) -> None:
        if type(max_hops) is not int or max_hops < 1:
            raise ValueError(f"max_hops must be a positive int, not {max_hops!r}")
        self._max_hops = max_hops
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
            HopLimitError: they would be too many in a row. None was sent.
            UnroutableCommandError: no aggregate handles one of them. None was sent.
            NoSubscriberError: nobody receives one; those before it were sent.
            WaitAbandonedError: the runtime ends before one of them is handled.
            CommandFailedError: the store could not be used for one of them.
            WowError: as for `Domain.command_message`. None was sent.
        """
        commands = result if isinstance(result, list | tuple) else () if result is None else (result,)
        if not commands:
            return
        hops = _hops(stream)
        if hops >= self._max_hops:
            raise HopLimitError(stream.aggregate_id, self._max_hops)
        messages = [
            self._domain.command_message(
                command,
                request_id=f"{stream.id}/{role}/{index}",
                tenant=stream.aggregate_id.tenant,
                headers={HOPS: str(hops + 1)},
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


def _hops(stream: DomainEventStream) -> int:
    text = stream.headers.get(HOPS, "0")
    # Anybody may write headers: what is no count is the most there can be, so that it ends a circle all the same.
    return int(text) if text.isdecimal() and len(text) < 10 else 10**9
