"""The stored form of messages: versioned JSON."""

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

import attrs
import orjson
from cattrs.preconf.orjson import OrjsonConverter, make_converter

from trio_wow.errors import ConfigurationError, SerializationError
from trio_wow.messages._envelopes import DomainEventStream, checked_headers
from trio_wow.messages._identity import AggregateId
from trio_wow.messages._types import EventUpgrader, MessageTypes

__all__ = ["Serializer"]

FORMAT = 1

# The streams of one aggregate are read together, and need its identity checked once.
_identity = lru_cache(maxsize=1024)(AggregateId)


class Serializer:
    """Writes and reads messages as JSON; one for each application.

    A body is stored with its registered name and revision, never with an import path. What would not come back as it
    was is refused, not changed: NaN, infinities, integers outside -2**63 .. 2**64-1, lone surrogates, a value that does
    not fit its field's annotation (1.5 for an `int`), a set or bytes in a field of type `Any`.

    Args:
        types: the names.
        upgraders: for bodies of older revisions, one for each revision to leave behind.
        converter: a cattrs converter with hooks of your own; owned by this serializer from now on. By default one that
            also knows `UUID` and `Decimal`.

    Raises:
        ConfigurationError: two upgraders read the same name and revision.
    """

    def __init__(
        self,
        types: MessageTypes,
        *,
        upgraders: Iterable[EventUpgrader] = (),
        converter: OrjsonConverter | None = None,
    ) -> None:
        self._types = types
        self._converter = converter if converter is not None else _default_converter()
        self._upgraders: dict[tuple[str, int], EventUpgrader] = {}
        for upgrader in upgraders:
            if self._upgraders.setdefault((upgrader.name, upgrader.revision), upgrader) is not upgrader:
                raise ConfigurationError([f"two upgraders read revision {upgrader.revision} of {upgrader.name!r}"])

    def check(self, body: object) -> None:
        """Refuse a body that could not be stored or sent, before anything is.

        Raises:
            SerializationError: it would not come back as it was.
            UnknownMessageTypeError: its class is not registered.
        """
        self._body(body)

    def dump_stream(self, stream: DomainEventStream) -> bytes:
        """Write a stream.

        Raises:
            SerializationError: it would not come back as it was.
            UnknownMessageTypeError: an event's class is not registered.
        """
        aggregate_id = stream.aggregate_id
        form = {
            "format": FORMAT,
            "id": stream.id,
            "context": aggregate_id.context,
            "aggregate": aggregate_id.aggregate,
            "aggregate_id": aggregate_id.id,
            "tenant": aggregate_id.tenant,
            "version": stream.version,
            "command_id": stream.command_id,
            "request_id": stream.request_id,
            "created_at": stream.created_at,
            "headers": checked_headers(stream.headers),  # anybody may have changed them
            "events": [self._body(event) for event in stream.events],
        }
        return orjson.dumps(form)

    def load_stream(self, data: bytes, source: str) -> DomainEventStream:
        """Read a stream.

        Args:
            data: what `dump_stream` wrote.
            source: where it comes from, for errors.

        Raises:
            SerializationError: it is not such a form, is of a newer format, or a body does not fit its class.
            UnknownMessageTypeError: a body's name is not registered.
        """
        try:
            form = orjson.loads(data)
            if form["format"] != FORMAT:
                raise SerializationError(f"{source} has format {form['format']!r}; this version reads {FORMAT}")
            events = [self._load_body(each, source) for each in form["events"]]
        except SerializationError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise SerializationError(f"{source} is not a stored stream: {error!r}") from error
        try:
            return DomainEventStream(
                aggregate_id=_identity(form["context"], form["aggregate"], form["aggregate_id"], form["tenant"]),
                version=form["version"],
                events=events,
                command_id=form["command_id"],
                request_id=form["request_id"],
                id=form["id"],
                headers=form["headers"],
                created_at=datetime.fromisoformat(form["created_at"]),
            )
        except (KeyError, TypeError, ValueError, SerializationError) as error:
            raise SerializationError(f"{source} is not a stored stream: {error!r}") from error

    def _body(self, body: object) -> dict[str, object]:
        """Write a body and read it back, since only that shows what JSON, or its own annotations, would change."""
        named, cls = self._types.of(body), type(body)
        try:
            data = orjson.dumps(self._converter.unstructure(body))
            back = self._converter.structure(orjson.loads(data), cls)
            same = back == body
        except Exception as error:
            raise SerializationError(f"{cls.__name__} cannot be written as JSON and read back: {error}") from error
        if not same:
            raise SerializationError(
                f"{cls.__name__} does not come back from JSON as it was: {_difference(body, back)}"
            )
        return {"name": named.name, "revision": named.revision, "body": orjson.Fragment(data)}

    def _load_body(self, form: dict[str, Any], source: str) -> object:
        cls, named = self._types.find(form["name"], source)
        body, revision = form["body"], form["revision"]
        while revision < named.revision:
            upgrader = self._upgraders.get((named.name, revision))
            if upgrader is None:
                raise SerializationError(
                    f"{source} holds revision {revision} of {named.name!r} and no EventUpgrader reads it"
                )
            try:
                body, revision = upgrader.upgrade(body), revision + 1
            except Exception as error:
                raise SerializationError(
                    f"{source} holds revision {revision} of {named.name!r}, which its EventUpgrader cannot read"
                ) from error
        if revision > named.revision:
            raise SerializationError(
                f"{source} holds revision {revision} of {named.name!r}, newer than {named.revision}, the one known here"
            )
        try:
            return self._converter.structure(body, cls)
        except Exception as error:
            raise SerializationError(f"{source} holds a {named.name!r} that does not fit {cls.__name__}") from error


def _difference(body: Any, back: Any) -> str:
    for field in attrs.fields(type(body)):
        was, came = getattr(body, field.name), getattr(back, field.name)
        if was != came:
            return f"{field.name}={was!r} comes back as {came!r}"
    return f"{body!r} comes back as {back!r}, which compares unequal"


def _default_converter() -> OrjsonConverter:
    converter = make_converter()
    for cls in (UUID, Decimal):
        converter.register_unstructure_hook(cls, str)
        converter.register_structure_hook(cls, lambda value, to: to(value))
    return converter
