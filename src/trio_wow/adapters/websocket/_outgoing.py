"""What waits to be sent on one connection: bounded in messages and in bytes."""

from collections import deque

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection

from trio_wow.adapters.websocket._settings import WebsocketSettings

__all__ = ["Outgoing"]


class Outgoing:
    """A queue that one task, `write`, sends from.

    Args:
        settings: how much may wait, how long one send may take before the connection counts as broken, and after how
            much silence an unsolicited pong is sent: it finds out who reads no more.

    Attributes:
        most_messages: the most that have waited.
        most_bytes: the most bytes.
    """

    def __init__(self, settings: WebsocketSettings) -> None:
        self._settings = settings
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._putting = trio.StrictFIFOLock()
        self._sending = False
        self._changed = trio.Event()
        self.most_messages = 0
        self.most_bytes = 0

    def offer(self, data: bytes) -> bool:
        """Queue a message if there is room, and say so."""
        if not self._has_room(data):
            return False
        self._add(data)
        return True

    async def put(self, data: bytes) -> None:
        """Queue a message, after those that wait already. A cancelled call has queued nothing.

        Uses half of the room, unless nothing waits: the rest is for those who cannot wait.
        """
        async with self._putting:
            while self._bytes and not self._has_room(data, 2):
                await self._wait_change()
            self._add(data)

    async def drained(self) -> None:
        """Wait until everything has been sent."""
        while self._queue or self._sending or self._putting.locked():
            await self._wait_change()

    def clear(self) -> None:
        """Forget what waits."""
        self._bytes -= sum(map(len, self._queue))
        self._queue.clear()
        self._changed.set()

    async def write(self, socket: WebSocketConnection) -> bool:
        """Send until the connection is closed; `False` if a send took too long, and the connection is broken."""
        try:
            while True:
                with trio.move_on_after(self._settings.heartbeat):
                    while not self._queue:
                        await self._wait_change()
                data = self._queue.popleft() if self._queue else None
                self._sending = True
                with trio.move_on_after(self._settings.send_timeout) as sending:
                    if data is None:
                        await socket.pong()
                    else:
                        await socket.send_message(data.decode())
                if sending.cancelled_caught:
                    return False
                self._sending = False
                self._bytes -= len(data or b"")
                self._changed.set()
        except ConnectionClosed:
            return True

    def _has_room(self, data: bytes, part: int = 1) -> bool:
        settings = self._settings
        return (
            len(self._queue) * part < settings.queue_messages
            and (self._bytes + len(data)) * part <= settings.queue_bytes
        )

    def _add(self, data: bytes) -> None:
        self._queue.append(data)
        self._bytes += len(data)
        self.most_messages = max(self.most_messages, len(self._queue))
        self.most_bytes = max(self.most_bytes, self._bytes)
        self._changed.set()

    async def _wait_change(self) -> None:
        if self._changed.is_set():
            self._changed = trio.Event()
        await self._changed.wait()
