"""The stored form of messages: versioned JSON."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from datetime import datetime
from decimal import Decimal
from itertools import repeat
from math import isfinite
from typing import Any, TypeVar
from uuid import UUID

import attrs
import orjson
from cattrs import BaseValidationError, transform_error
from cattrs.preconf.orjson import OrjsonConverter
from cattrs.preconf.orjson import make_converter as orjson_converter

from trio_wow.errors import ConfigurationError, SerializationError
from trio_wow.messages._envelopes import DomainEventStream, checked_headers
from trio_wow.messages._identity import interned_id
from trio_wow.messages._types import EventUpgrader, MessageTypes

__all__ = ["Serializer", "make_converter"]

B = TypeVar("B")
S = TypeVar("S")

FORMAT = 1


class Serializer:
    """Writes and reads messages as JSON; one for each application.

    A body is stored with its registered name and revision, never with an import path. What would not come back equal is
    refused, not changed: NaN, infinities, integers outside -2**63 .. 2**64-1, lone surrogates, a value that does
    not fit its field's annotation (1.5 for an `int`), a set or bytes in a field of type `Any`.

    Args:
        types: the names.
        upgraders: for bodies of older revisions, one for each revision to leave behind.
        converter: from `make_converter`, with hooks of your own; owned by this serializer from now on.

    Raises:
        ConfigurationError: two upgraders read the same name and revision, or one reads a name that is not registered.
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
            if not types.knows(upgrader.name):
                raise ConfigurationError([f"an upgrader reads {upgrader.name!r}, which is no registered name"])
            if self._upgraders.setdefault((upgrader.name, upgrader.revision), upgrader) is not upgrader:
                raise ConfigurationError([f"two upgraders read revision {upgrader.revision} of {upgrader.name!r}"])

    def copy(self, body: B) -> B:
        """Return a body as it will come back from a store or another process: equal, and sharing nothing.

        Raises:
            SerializationError: it would not come back as it is.
            UnknownMessageTypeError: its class is not registered.
        """
        return self.written(body)[1]

    def written(self, body: B) -> tuple[bytes, B]:
        """Return a body's JSON, and the body as it will come back from that; see `copy`."""
        self._types.of(body)
        return self._written(body)

    def keep_written(self, stream: DomainEventStream, written: Iterable[bytes]) -> None:
        """Keep with a stream what `written` has returned for its events, so that `dump_stream` need not write them."""
        object.__setattr__(stream, "_written", tuple(written))

    def plain(self, value: object) -> object:
        """Return a value as plain JSON data: dicts, lists, texts, numbers, booleans, `None`. It shares nothing.

        Raises:
            SerializationError: JSON cannot hold it.
        """
        try:
            form = self._converter.unstructure(value)
            _check_finite(form)
            back: object = orjson.loads(orjson.dumps(form))
        except Exception as error:
            raise SerializationError(f"{_shown(value)} cannot be kept as JSON: {error}") from error
        return back

    def dump_body(self, body: object) -> bytes:
        """Write a body with its name and revision, as a JSON object of `name`, `revision` and `body`.

        Raises:
            SerializationError: it would not come back as it was.
            UnknownMessageTypeError: its class is not registered.
        """
        return orjson.dumps(self._body(body, None))

    def load_body(self, form: Mapping[str, object], source: str) -> object:
        """Read a body that somebody else has written.

        Args:
            form: what `dump_body` wrote, parsed. Without a `revision` it is of the one known here.
            source: where it comes from, for errors.

        Raises:
            SerializationError: it is not such a form, does not fit its class, or would lose something in it: a field
                that the class has not, a fraction in a whole number.
            UnknownMessageTypeError: its name is not registered.
        """
        name, body = form.get("name"), form.get("body")
        if not isinstance(name, str):
            raise SerializationError(f"name of {source} must be text, not {_shown(name)}")
        if not isinstance(body, dict):
            raise SerializationError(f"body of {source} must be an object, not {_shown(body)}")
        known = self._types.find(name, source)[1].revision
        revision = form.get("revision", known)
        if type(revision) is not int or revision < 1:
            raise SerializationError(f"revision of {source} must be a positive int, not {_shown(revision)}")
        loaded = self._load_body({"name": name, "revision": revision, "body": dict(body)}, source)
        # Bodies of older revisions have another shape on purpose.
        lost = _lost_in(body, self._converter.unstructure(loaded), "body") if revision == known else None
        if lost is not None:
            raise SerializationError(f"{source} holds a {name!r} that is not kept whole: {lost}")
        return loaded

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
            "events": [
                self._body(event, data)
                for event, data in zip(stream.events, stream._written or repeat(None), strict=False)
            ],
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
                aggregate_id=interned_id(form["context"], form["aggregate"], form["aggregate_id"], form["tenant"]),
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

    def dump_state(self, state: object) -> bytes:
        """Write an aggregate's state, as a JSON object.

        Raises:
            SerializationError: it would not come back as it is, also where `==` does not look: in the types of values,
                in fields without `eq`, and in attributes that are no fields.
        """
        return self._written(state, _lost)[0]

    def load_state(self, data: bytes, cls: type[S], source: str) -> S:
        """Read a state. It has all the fields that the class has now, and no other: no default stands in for one.

        Args:
            data: what `dump_state` wrote.
            cls: its class.
            source: where it comes from, for errors.

        Raises:
            SerializationError: it does not fit the class.
        """
        try:
            form = orjson.loads(data)
            state = self._converter.structure(form, cls)
            fields = self._converter.unstructure(state).keys()
            other = form.keys() ^ fields
        except Exception as error:
            raise SerializationError(f"{source} does not fit {cls.__name__}: {_reasons(error)}") from error
        if other:
            raise SerializationError(
                f"{source} does not fit {cls.__name__}, which differs in {', '.join(sorted(other))}"
            )
        return state

    def _body(self, body: object, data: bytes | None) -> dict[str, object]:
        named = self._types.of(body)
        fragment = orjson.Fragment(self._written(body)[0] if data is None else data)
        return {"name": named.name, "revision": named.revision, "body": fragment}

    def _written(self, body: B, difference: Callable[[B, B], str | None] | None = None) -> tuple[bytes, B]:
        """Write a body and read it back, since only that shows what JSON, or its own annotations, would change."""
        cls = type(body)
        try:
            data = orjson.dumps(self._converter.unstructure(body))
            back = self._converter.structure(orjson.loads(data), cls)
            lost = (difference or _difference)(body, back)
        except Exception as error:
            raise SerializationError(f"{cls.__name__} cannot be kept as JSON: {self._explain(body, error)}") from error
        if lost is not None:
            raise SerializationError(f"{cls.__name__} does not come back from JSON as it was: {lost}")
        return data, back

    def _explain(self, body: object, error: Exception) -> str:
        """Name the first field that cannot be kept, if one alone is to blame."""
        for field in attrs.fields(type(body)):  # type: ignore[arg-type]
            value = getattr(body, field.name)
            try:
                orjson.dumps(self._converter.unstructure(value))
            except Exception as reason:
                return (
                    f"{field.name}={_shown(value)}: {reason}; change the value, or give the Domain a converter "
                    f"(trio_wow.messages.make_converter) with hooks for {type(value).__name__}"
                )
        return _reasons(error)

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
            raise SerializationError(
                f"{source} holds a {named.name!r} that does not fit {cls.__name__}: {_reasons(error)}"
            ) from error


def _check_finite(form: object) -> None:
    """Refuse numbers that orjson writes as null."""
    if isinstance(form, float) and not isfinite(form):
        raise ValueError(f"{form} is no number in JSON")
    for each in form.values() if isinstance(form, dict) else form if isinstance(form, list | tuple) else ():
        _check_finite(each)


def _difference(body: Any, back: Any) -> str | None:
    if back == body:
        return None
    for field in attrs.fields(type(body)):
        was, came = getattr(body, field.name), getattr(back, field.name)
        if was != came:
            return f"{field.name}={_shown(was)} comes back as {_shown(came)}"
    return f"{_shown(body)} comes back as {_shown(back)}, which compares unequal"


_PLAIN = (str, int, float, bool, type(None))


def _lost(was: Any, came: Any, where: str = "") -> str | None:
    """Say where what came is not what was, whatever `==` makes of it."""
    is_same_type = type(was) is type(came)
    parts = list(_parts(was, came, where)) if is_same_type and type(was) not in _PLAIN else []
    if parts:
        return next((lost for part in parts if (lost := _lost(*part)) is not None), None)
    if was == came and (is_same_type or (type(was) is int and type(came) is float)):
        return None
    return (
        f"{where}={_shown(was)} comes back as {_shown(came)}; "
        "only what __init__ takes is kept, and in the type of its annotation"
    )


def _parts(was: Any, came: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    """Pair the parts of two values of one type, and name them."""
    if attrs.has(type(was)) or is_dataclass(was):
        state = object.__getstate__(was)  # all that it holds, be it a field or not
        own, slots = state if isinstance(state, tuple) else (state, None)
        for name, one in {**(own or {}), **(slots or {})}.items():
            if name != "_attrs_cached_hash":  # made anew when it is asked for
                yield one, getattr(came, name, attrs.NOTHING), f"{where}.{name}".lstrip(".")
    elif isinstance(was, list | tuple | deque | dict | set | frozenset):
        yield len(was), len(came), f"len({where})"
        yield getattr(was, "maxlen", None), getattr(came, "maxlen", None), f"{where}.maxlen"
        twins = map({each: each for each in came}.get, was) if isinstance(was, set | frozenset) else came
        for number, (one, other) in enumerate(zip(was, twins, strict=False)):
            yield one, other, f"{where}[{number}]"
        if isinstance(was, dict):
            for key, one in was.items():
                yield one, came.get(key), f"{where}[{key!r}]"


def _lost_in(form: object, kept: object, where: str) -> str | None:
    """Say what of a JSON value is not in what it was read as. Text may be anything: a date, a decimal number."""
    if isinstance(form, dict) and isinstance(kept, dict):
        for key, value in form.items():
            if key not in kept:
                return f"there is no {where}.{key}"
            if (lost := _lost_in(value, kept[key], f"{where}.{key}")) is not None:
                return lost
        return None
    if isinstance(form, list) and isinstance(kept, list | tuple) and len(form) == len(kept):
        pairs = zip(form, kept, strict=True)
        return next((lost for n, pair in enumerate(pairs) if (lost := _lost_in(*pair, f"{where}[{n}]"))), None)
    number = isinstance(form, int | float) and isinstance(kept, int | float)
    return f"{where}={_shown(form)} is read as {_shown(kept)}" if number and form != kept else None


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _reasons(error: Exception) -> str:
    """Say what is wrong with a form, field by field."""
    return "; ".join(transform_error(error, path="")) if isinstance(error, BaseValidationError) else str(error)


def make_converter() -> OrjsonConverter:
    """Return a converter as a `Serializer` uses it by default: cattrs for orjson, with `UUID` and `Decimal`.

    Register hooks for further types on it, and give it to the `Domain`.
    """
    converter = orjson_converter()
    for cls in (UUID, Decimal):
        converter.register_unstructure_hook(cls, str)
        converter.register_structure_hook(cls, lambda value, to: to(value))
    return converter
