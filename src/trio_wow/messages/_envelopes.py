"""The envelopes in which bodies travel: frozen, with headers that are copied for every route."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from datetime import UTC, datetime
from functools import cache
from os import urandom
from typing import Any, Generic, NewType, TypeVar

from attrs import field, fields, frozen

from trio_wow.errors import SerializationError
from trio_wow.messages._identity import AggregateId, check_identifier

__all__ = ["CommandMessage", "DomainEvent", "DomainEventStream", "Headers", "StateEvent"]

B_co = TypeVar("B_co", covariant=True)
S_co = TypeVar("S_co", covariant=True)
M = TypeVar("M", "CommandMessage", "DomainEventStream")

Headers = NewType("Headers", dict[str, str])
"""Annotates a parameter of a message function that takes the headers of its message."""


def _new_id() -> str:
    return urandom(16).hex()


def _now() -> datetime:
    return datetime.now(UTC)


def _as_tuple(events: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(events)


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the headers of a message.

    Raises:
        SerializationError: they are no mapping, or one is no text or holds a lone surrogate.
    """
    if type(headers) is dict and not headers:
        return {}
    if not isinstance(headers, Mapping):
        raise SerializationError(f"headers are a mapping of text to text, not {headers!r}")
    copy = dict(headers)
    for text in (*copy, *copy.values()):
        if not isinstance(text, str):
            raise SerializationError(f"headers hold text only, not {text!r}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise SerializationError(f"header text {text!r} holds a lone surrogate") from None
    return copy


@cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(cls) if each.name != "headers")


def _routed(message: M) -> M:
    """Copy an envelope. All but the headers was checked when it was made, and cannot have been changed since."""
    cls: Any = type(message)
    copy: M = object.__new__(cls)
    for name in _names(cls):
        object.__setattr__(copy, name, getattr(message, name))
    object.__setattr__(copy, "headers", checked_headers(message.headers))
    return copy


@frozen(kw_only=True)
class CommandMessage:
    """A command on its way to one aggregate.

    Attributes:
        aggregate_id: the aggregate that decides.
        body: the command itself, an attrs object.
        id: names this message; a command sent again is another message.
        request_id: names what is wanted; an aggregate stores the events of one request once. By default `id`.
        expected_version: the version at which the aggregate must be for the command to be decided; 0 for one to which
            nothing has happened; `None` for any.
        headers: the message's own copy of what it was made with.
        created_at: wall time, UTC.
        is_void: whether it is sent for the record alone: dispatchers leave it, and it takes no local route.

    Raises:
        InvalidIdentifierError: `id` or `request_id` is not legal.
        SerializationError: a header is no text, or holds a lone surrogate.
        ValueError: the expected version is no int from 0 to 2**63-1.
    """

    aggregate_id: AggregateId
    body: Any
    id: str = field(factory=_new_id)
    request_id: str = field()
    expected_version: int | None = None
    headers: dict[str, str] = field(factory=dict, converter=checked_headers)
    created_at: datetime = field(factory=_now)
    is_void: bool = False

    @request_id.default
    def _request_id_is_id(self) -> str:
        return self.id

    def __attrs_post_init__(self) -> None:
        check_identifier("command ID", self.id)
        if self.request_id is not self.id:
            check_identifier("request ID", self.request_id)
        version = self.expected_version
        if version is not None and (type(version) is not int or not 0 <= version < 2**63):
            raise ValueError(f"expected_version must be an int from 0 to 2**63-1, or None, not {version!r}")

    def __str__(self) -> str:
        return f"{type(self.body).__name__} for {self.aggregate_id}"

    def routed(self) -> "CommandMessage":
        """Return a copy for one route: equal, with headers of its own."""
        return _routed(self)


@frozen(kw_only=True)
class DomainEventStream:
    """All events that one command produced, in order. Stored, published and handled as a whole.

    Attributes:
        aggregate_id: the aggregate that they happened to.
        version: the aggregate's version after them; its streams run 1..n without a gap.
        events: the bodies, at least one.
        command_id: the message that caused them.
        request_id: the request that caused them.
        id: names the stream.
        headers: the message's own copy of what it was made with.
        created_at: wall time, UTC; not for ordering.

    Raises:
        InvalidIdentifierError: an ID is not legal.
        SerializationError: a header is no text, or holds a lone surrogate.
        ValueError: the version is no int from 1 to 2**63-1, or there is no event.
    """

    aggregate_id: AggregateId
    version: int
    events: tuple[Any, ...] = field(converter=_as_tuple)
    command_id: str
    request_id: str
    id: str = field(factory=_new_id)
    headers: dict[str, str] = field(factory=dict, converter=checked_headers)
    created_at: datetime = field(factory=_now)
    # The JSON of the events, where it is known; the serializer's. One that is made from this one has its own events.
    _written: tuple[bytes, ...] | None = field(default=None, eq=False, repr=False, init=False)

    def __attrs_post_init__(self) -> None:
        check_identifier("stream ID", self.id)
        check_identifier("command ID", self.command_id)
        if self.request_id is not self.command_id:
            check_identifier("request ID", self.request_id)
        if type(self.version) is not int or not 1 <= self.version < 2**63:
            raise ValueError(
                f"the version of a stream of {self.aggregate_id} must be an int from 1 to 2**63-1, not {self.version!r}"
            )
        if not self.events:
            raise ValueError(f"a stream of {self.aggregate_id} must hold at least one event")

    def __str__(self) -> str:
        more = f" and {len(self.events) - 1} more" if len(self.events) > 1 else ""
        return f"{type(self.events[0]).__name__}{more} of {self.aggregate_id}, version {self.version}"

    def routed(self) -> "DomainEventStream":
        """Return a copy for one route: equal, with headers of its own."""
        return _routed(self)


@frozen
class DomainEvent(Generic[B_co]):
    """One event of a stream, for a function that wants to know more than the body.

    Attributes:
        body: the event itself.
        sequence: its place in the stream, from 1.
        stream: the stream that it came in.
    """

    body: B_co
    sequence: int
    stream: DomainEventStream

    @property
    def aggregate_id(self) -> AggregateId:
        """The aggregate that it happened to."""
        return self.stream.aggregate_id

    @property
    def version(self) -> int:
        """The aggregate's version after the stream."""
        return self.stream.version

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the stream."""
        return self.stream.headers


@frozen
class StateEvent(Generic[S_co]):
    """A stream, and the state of its aggregate after it.

    Attributes:
        stream: the events that led to the state.
        state: an instance of the aggregate's class; a copy for this route. Read it, do not change it: the functions
            that handle one state event share it.
        deleted: whether the aggregate is deleted after the stream.
    """

    stream: DomainEventStream
    state: S_co
    deleted: bool = False

    @property
    def aggregate_id(self) -> AggregateId:
        """The aggregate."""
        return self.stream.aggregate_id

    @property
    def version(self) -> int:
        """The aggregate's version."""
        return self.stream.version

    @property
    def command_id(self) -> str:
        """The message that caused the events."""
        return self.stream.command_id

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the stream."""
        return self.stream.headers

    def __str__(self) -> str:
        return f"state after {self.stream}"

    def routed(self) -> "StateEvent[S_co]":
        """Return a copy for one route: with headers and a state of its own."""
        return StateEvent(self.stream.routed(), deepcopy(self.state), self.deleted)
