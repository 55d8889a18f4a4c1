"""Messages that come in fragments."""

from collections.abc import Generator

from wsproto import ConnectionType, WSConnection
from wsproto.events import BytesMessage, Event, TextMessage

__all__ = ["WholeMessages"]


class WholeMessages(WSConnection):
    """A server's side that puts fragments together before the websocket library gets them.

    That would keep each by itself until the last has come, and count only its characters: a letter in a fragment of its
    own would take ninety bytes, and empty ones would take room without end.

    Args:
        limit: bytes after which what there is of a message is handed on all the same, to be refused.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(ConnectionType.SERVER)
        self._limit = limit
        self._held = bytearray()

    def events(self) -> Generator[Event, None, None]:
        """Yield what has happened; a message once, when it is whole or too large."""
        for event in super().events():
            if not isinstance(event, TextMessage | BytesMessage) or (event.message_finished and not self._held):
                yield event
                continue
            text = isinstance(event, TextMessage)
            self._held += event.data.encode() if isinstance(event, TextMessage) else event.data
            if event.message_finished or len(self._held) > self._limit:
                data, self._held = bytes(self._held), bytearray()
                finished = event.message_finished
                yield TextMessage(data.decode(), True, finished) if text else BytesMessage(data, True, finished)
