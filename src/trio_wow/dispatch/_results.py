"""Who waits for which command, and what became of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from trio_wow.errors import WaitAbandonedError
from trio_wow.messages import CommandResult

__all__ = ["CommandResults", "CommandWait"]


class CommandWait:
    """One command that somebody waits for. Made by `CommandResults.expecting`."""

    __slots__ = ("_command_id", "_ended", "_result")

    def __init__(self, command_id: str) -> None:
        self._command_id = command_id
        self._ended = trio.Event()
        self._result: CommandResult | None = None

    def end(self, result: CommandResult | None) -> None:
        """Say how the command ended; `None` when that will not be known."""
        self._result = result
        self._ended.set()

    async def wait(self) -> CommandResult:
        """Wait for the result of stage `PROCESSED`.

        Raises:
            WaitAbandonedError: the runtime has ended, or is ending, before the command was handled.
        """
        await self._ended.wait()
        if self._result is None:
            raise WaitAbandonedError(self._command_id)
        return self._result


class CommandResults:
    """Brings the results of commands from the command dispatcher to those who wait for them, inside one process.

    Nothing is kept: a result that nobody expects is dropped.
    """

    def __init__(self) -> None:
        self._waits: dict[str, CommandWait] = {}

    @property
    def waiting(self) -> int:
        """How many commands are waited for."""
        return len(self._waits)

    @contextmanager
    def expecting(self, command_id: str) -> Iterator[CommandWait]:
        """Expect the result of a command that is about to be sent, until the block is left."""
        wait = self._waits[command_id] = CommandWait(command_id)
        try:
            yield wait
        finally:
            del self._waits[command_id]

    def processed(self, result: CommandResult, /) -> None:
        """Take note of a result of stage `PROCESSED`. Never raises."""
        if (wait := self._waits.get(result.command_id)) is not None:
            wait.end(result)

    def abandoned(self, command_id: str, /) -> None:
        """Take note that a command has been let go unhandled, or half handled. Never raises."""
        if (wait := self._waits.get(command_id)) is not None:
            wait.end(None)
