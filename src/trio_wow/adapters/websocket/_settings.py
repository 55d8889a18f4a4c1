"""What may be set on a websocket gateway, and what its authentication hook sees and says."""

from collections.abc import Mapping
from math import inf
from typing import Any

from attrs import Attribute, field, frozen

from trio_wow.messages import check_identifier

__all__ = ["Handshake", "Identity", "WebsocketSettings"]


def _count(_: object, attribute: "Attribute[int]", value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{attribute.name} must be a positive int, not {value!r}")


def _seconds(_: object, attribute: "Attribute[float]", value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < inf:
        raise ValueError(f"{attribute.name} must be a positive number of seconds, not {value!r}")


def _tenant(_: object, attribute: "Attribute[str | None]", value: Any) -> None:
    if value is not None:
        check_identifier(attribute.name, value)


def _texts(_: object, attribute: "Attribute[Mapping[str, str]]", value: Any) -> None:
    if not (isinstance(value, Mapping) and all(isinstance(text, str) for text in (*value, *value.values()))):
        raise TypeError(f"{attribute.name} must be a mapping of text to text, not {value!r}")


@frozen(kw_only=True)
class WebsocketSettings:
    """Bounds of a `WebsocketGateway`. Together they bound what one connection can cost.

    Attributes:
        max_message_size: bytes of one message in either direction; a client that sends a larger one is closed (1009).
        max_connections: connections at a time, handshakes included; further ones are closed at once.
        max_pending: commands of one connection whose last signal it has not been sent; while there are so many, the
            connection is not read.
        max_subscriptions: of one connection.
        queue_messages: messages that may wait to be sent on one connection.
        queue_bytes: their bytes; at least `max_message_size`. A subscriber that would go over either is closed (1013).
        handshake_timeout: seconds for TLS, the opening handshake and the authentication together.
        send_timeout: seconds for one message; a client that has not taken it by then is cut off.
        close_timeout: seconds at most for what waits to be sent, and the closing handshake, at a close.
        heartbeat: seconds of silence after which the gateway sends an unsolicited pong.

    Raises:
        ValueError: one is out of its range.
    """

    max_message_size: int = field(default=2**20, validator=_count)
    max_connections: int = field(default=1_000, validator=_count)
    max_pending: int = field(default=64, validator=_count)
    max_subscriptions: int = field(default=64, validator=_count)
    queue_messages: int = field(default=256, validator=_count)
    queue_bytes: int = field(default=4 * 2**20, validator=_count)
    handshake_timeout: float = field(default=10.0, validator=_seconds)
    send_timeout: float = field(default=10.0, validator=_seconds)
    close_timeout: float = field(default=1.0, validator=_seconds)
    heartbeat: float = field(default=20.0, validator=_seconds)

    def __attrs_post_init__(self) -> None:
        if self.queue_bytes < self.max_message_size:
            raise ValueError(
                f"queue_bytes must be at least max_message_size ({self.max_message_size}), not {self.queue_bytes}"
            )


@frozen
class Handshake:
    """What a client has asked for.

    Attributes:
        path: the requested path, with its query.
        headers: names in lower case and values, in order.
        remote: the client's address and port.
    """

    path: str
    headers: tuple[tuple[str, str], ...]
    remote: str

    def header(self, name: str) -> str | None:
        """Return the first header of a name, in whatever case, or `None`."""
        return next((value for each, value in self.headers if each == name.lower()), None)


@frozen
class Identity:
    """Who a client is.

    Attributes:
        tenant: of every command and subscription of the connection; `None` lets each frame name one.
        headers: put on every command, and out of the client's reach.

    Raises:
        InvalidIdentifierError: the tenant is not legal; an empty one is not.
        TypeError: the headers are no mapping of text to text.
    """

    tenant: str | None = field(default=None, validator=_tenant)
    headers: Mapping[str, str] = field(factory=dict, validator=_texts)
