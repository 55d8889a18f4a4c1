"""The stored form of messages: versioned JSON."""

from collections.abc import Iterable
from datetime import datetime
from math import isfinite
from typing import Any

import orjson
from cattrs.preconf.orjson import OrjsonConverter, make_converter

from trio_wow.errors import ConfigurationError, SerializationError, UnknownMessageTypeError
from trio_wow.messages._envelopes import DomainEventStream
from trio_wow.messages._identity import AggregateId
from trio_wow.messages._types import EventUpgrader, MessageTypes

__all__ = ["Serializer"]

FORMAT = 1


class Serializer:
    """Writes and reads messages as JSON; one for each application.

    A body is stored with its registered name and revision, never with an import path. Whatever JSON cannot hold is
    refused, not changed: NaN, infinities, integers outside -2**63 .. 2**64-1, lone surrogates.

    Args:
        types: the names.
        upgraders: for bodies of older revisions, one for each revision to leave behind.
        converter: a cattrs converter with hooks for types that it does not know; owned by this serializer from now on.

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
        self._converter = converter if converter is not None else make_converter()
        self._upgraders: dict[tuple[str, int], EventUpgrader] = {}
        for upgrader in upgraders:
            if self._upgraders.setdefault((upgrader.name, upgrader.revision), upgrader) is not upgrader:
                raise ConfigurationError([f"two upgraders read revision {upgrader.revision} of {upgrader.name!r}"])

    def check(self, body: object) -> None:
        """Refuse a body that could not be stored or sent, before anything is.

        Raises:
            SerializationError: JSON cannot hold one of its values.
            UnknownMessageTypeError: its class is not registered.
        """
        self._to_json(self._body(body), body)

    def dump_stream(self, stream: DomainEventStream) -> bytes:
        """Write a stream.

        Raises:
            SerializationError: JSON cannot hold one of its values.
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
            "headers": stream.headers,
            "events": [self._body(event) for event in stream.events],
        }
        return self._to_json(form, stream.aggregate_id)

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
            return DomainEventStream(
                aggregate_id=AggregateId(form["context"], form["aggregate"], form["aggregate_id"], form["tenant"]),
                version=form["version"],
                events=tuple(self._load_body(each, source) for each in form["events"]),
                command_id=form["command_id"],
                request_id=form["request_id"],
                id=form["id"],
                headers=form["headers"],
                created_at=datetime.fromisoformat(form["created_at"]),
            )
        except SerializationError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise SerializationError(f"{source} is not a stored stream: {error!r}") from error

    def _body(self, body: object) -> dict[str, Any]:
        named = self._types.of(body)
        return {"name": named.name, "revision": named.revision, "body": self._converter.unstructure(body)}

    def _load_body(self, form: dict[str, Any], source: str) -> object:
        cls, named = self._types.find(form["name"], source)
        body, revision = form["body"], form["revision"]
        while revision < named.revision:
            upgrader = self._upgraders.get((named.name, revision))
            if upgrader is None:
                raise SerializationError(
                    f"{source} holds revision {revision} of {named.name!r} and no EventUpgrader reads it"
                )
            body, revision = upgrader.upgrade(body), revision + 1
        if revision > named.revision:
            raise SerializationError(
                f"{source} holds revision {revision} of {named.name!r}, newer than {named.revision}, the one known here"
            )
        try:
            return self._converter.structure(body, cls)
        except UnknownMessageTypeError:
            raise
        except Exception as error:
            raise SerializationError(f"{source} holds a {named.name!r} that does not fit {cls.__name__}") from error

    @staticmethod
    def _to_json(form: object, what: object) -> bytes:
        try:
            data = orjson.dumps(form)
        except TypeError as error:
            raise SerializationError(f"{what} cannot be written as JSON: {error}") from error
        # orjson writes NaN and infinities as null, so only then is there anything to look for.
        if b"null" in data and (lost := _first_lost_number(form)) is not None:
            raise SerializationError(f"{what} holds {lost!r}, which JSON has no number for")
        return data


def _first_lost_number(form: object) -> float | None:
    if isinstance(form, float):
        return None if isfinite(form) else form
    inner: Iterable[object] = ()
    if isinstance(form, dict):
        inner = form.values()
    elif isinstance(form, list | tuple):
        inner = form
    return next((lost for each in inner if (lost := _first_lost_number(each)) is not None), None)
