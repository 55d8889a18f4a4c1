"""Where the task lives in which the websocket library reads."""

import trio

__all__ = ["HostedReader"]


class HostedReader:
    """A nursery for that task, and for nothing else: what it raises would end those who use the websocket.

    It raises, for one, when a ping comes during the closing handshake, or when the other side answers the opening one
    with what is none.

    Attributes:
        handshake: the scope of the opening handshake; cancelled when the task has ended, since nothing will come then.
        error: what the task has raised.
    """

    def __init__(self) -> None:
        self.handshake = trio.CancelScope()
        self.error: Exception | None = None
        self._begun = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """Give the nursery to who starts this; `begin` is called, and the task spawned in the same step, after that."""
        try:
            async with trio.open_nursery() as nursery:
                task_status.started(nursery)
                await self._begun.wait()
        except* Exception as errors:
            (self.error,) = errors.exceptions
        self.handshake.cancel()

    def begin(self) -> None:
        """Let `run` end when the nursery is empty."""
        self._begun.set()
