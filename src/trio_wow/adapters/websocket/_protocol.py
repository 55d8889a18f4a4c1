"""The frames of the sub-protocol `trio-wow.v1`; `docs/websocket.md` is their reference."""

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

import orjson
from attrs import frozen

from trio_wow.errors import InvalidIdentifierError, WowError
from trio_wow.messages import (
    AggregateId,
    CommandError,
    CommandResult,
    DomainEventStream,
    Serializer,
    Stage,
    check_identifier,
)

__all__ = [
    "SUBPROTOCOL",
    "Frame",
    "FrameError",
    "SendFrame",
    "SubscribeFrame",
    "UnsubscribeFrame",
    "change_frame",
    "error_frame",
    "events_part",
    "is_last",
    "parse_frame",
    "read_result",
    "result_form",
    "subscription_frame",
]

SUBPROTOCOL = "trio-wow.v1"
MAX_ID = 128


class FrameError(WowError):
    """A frame is not legal. Nothing of it was done.

    Attributes:
        id: the frame's ID, if it has a legal one that is not in use.
        field: the path of the field at fault; `None` for the frame as a whole.
        text: what is wrong, without the field.
    """

    def __init__(self, text: str, field: str | None = None, id: str | None = None) -> None:
        super().__init__(text if field is None else f"{field}: {text}")
        self.text = text
        self.field = field
        self.id = id


@frozen
class SendFrame:
    """Send a command, and tell what becomes of it."""

    id: str
    command: Mapping[str, Any]
    until: Stage
    timeout: float
    signals: bool
    request_id: str | None
    expected_version: int | None
    tenant: str | None
    headers: Mapping[str, str]


@frozen
class SubscribeFrame:
    """Tell of an aggregate's events, or of what a projection has handled. One of the two is not `None`."""

    id: str
    aggregate_id: tuple[str, str, str] | None
    projection: str | None
    tenant: str | None


@frozen
class UnsubscribeFrame:
    """End what an ID stands for."""

    id: str


Frame = SendFrame | SubscribeFrame | UnsubscribeFrame


class _Fields:
    """Takes fields out of a JSON object, and knows which are left."""

    def __init__(self, form: object, path: str | None, id: str | None = None) -> None:
        if not isinstance(form, dict):
            raise FrameError(f"must be a JSON object, not {_shown(form)}", path, id)
        self._rest = dict(form)
        self._path = path
        self.id = id

    def error(self, name: str, text: str) -> FrameError:
        return FrameError(text, name if self._path is None else f"{self._path}.{name}", self.id)

    def take(self, name: str, kind: type | tuple[type, ...], what: str, default: Any = ...) -> Any:
        value = self._rest.pop(name, default)
        if value is ...:
            raise self.error(name, f"is missing; it must be {what}")
        # A bool is an int to Python, and not to JSON.
        if value is default or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
            return value
        raise self.error(name, f"must be {what}, not {_shown(value)}")

    def identifier(self, name: str, default: Any = ...) -> Any:
        value = self.take(name, str, "text", default)
        try:
            return value if value is default else check_identifier(name, value)
        except InvalidIdentifierError as error:
            raise self.error(name, str(error)) from None

    def end(self) -> None:
        for name in self._rest:
            raise self.error(name, "is no field of this frame")


def parse_frame(data: str) -> Frame:
    """Read what a client has sent.

    Raises:
        FrameError: it is no frame of this protocol.
    """
    try:
        form = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise FrameError(f"is no JSON: {error}") from None
    fields = _Fields(form, None)
    id = fields.take("id", str, f"text of 1 to {MAX_ID} characters")
    if not 0 < len(id) <= MAX_ID:
        raise fields.error("id", f"must be text of 1 to {MAX_ID} characters, not {_shown(id)}")
    fields.id = id
    kind = fields.take("type", str, "text")
    if kind == "send":
        frame: Frame = _send_frame(id, fields)
    elif kind == "subscribe":
        frame = _subscribe_frame(id, fields)
    elif kind == "unsubscribe":
        frame = UnsubscribeFrame(id)
    else:
        raise fields.error("type", f"must be 'send', 'subscribe' or 'unsubscribe', not {_shown(kind)}")
    fields.end()
    return frame


def _send_frame(id: str, fields: _Fields) -> SendFrame:
    command = _Fields(fields.take("command", dict, "an object"), "command", id)
    form = {"name": command.take("name", str, "text"), "body": command.take("body", dict, "an object")}
    revision = command.take("revision", int, "a positive int", None)
    if revision is not None:
        form["revision"] = revision
    command.end()
    until = fields.take("until", str, "a stage", "PROCESSED")
    if until not in Stage.__members__:
        raise fields.error("until", f"must be one of {', '.join(Stage.__members__)}, not {_shown(until)}")
    timeout = fields.take("timeout", (int, float, type(None)), "a positive number of seconds, or null for none", 30)
    if timeout is not None and not (timeout > 0 and isfinite(timeout)):
        raise fields.error("timeout", f"must be a positive number of seconds, not {timeout!r}")
    version = fields.take("expected_version", int, "an int from 0 to 2**63-1", None)
    if version is not None and not 0 <= version < 2**63:
        raise fields.error("expected_version", f"must be an int from 0 to 2**63-1, not {version!r}")
    headers = fields.take("headers", dict, "an object of texts", {})
    for name, value in headers.items():
        if not isinstance(value, str):
            raise fields.error(f"headers.{name}", f"must be text, not {_shown(value)}")
    return SendFrame(
        id,
        form,
        Stage[until],
        inf if timeout is None else timeout,
        fields.take("signals", bool, "true or false", False),
        fields.identifier("request_id", None),
        version,
        fields.identifier("tenant", None),
        headers,
    )


def _subscribe_frame(id: str, fields: _Fields) -> SubscribeFrame:
    events = fields.take("events", dict, "an object", None)
    projection = fields.take("projection", str, "text", None)
    if (events is None) == (projection is None):
        raise FrameError("needs one of 'events' and 'projection'", "events", id)
    aggregate_id = None
    if events is not None:
        inner = _Fields(events, "events", id)
        aggregate_id = (inner.identifier("context"), inner.identifier("aggregate"), inner.identifier("id"))
        inner.end()
    return SubscribeFrame(id, aggregate_id, projection, fields.identifier("tenant", None))


def is_last(result: CommandResult, until: Stage) -> bool:
    """Whether no signal follows this one."""
    return result.stage is until or (result.stage is Stage.PROCESSED and result.error is not None)


def result_form(result: CommandResult) -> dict[str, object]:
    """Return a result as JSON data."""
    aggregate_id, error = result.aggregate_id, result.error
    return {
        "command_id": result.command_id,
        "request_id": result.request_id,
        "context": aggregate_id.context,
        "aggregate": aggregate_id.aggregate,
        "aggregate_id": aggregate_id.id,
        "tenant": aggregate_id.tenant,
        "stage": result.stage.name,
        "version": result.version,
        "error": None
        if error is None
        else {"code": error.code, "text": _sendable(error.text), "undecided": error.undecided},
        # By itself, since a frame around it may be nested too deeply for the writer of JSON.
        "value": orjson.Fragment(orjson.dumps(result.value)),
    }


def read_result(form: Mapping[str, Any]) -> CommandResult:
    """Read what `result_form` wrote; `KeyError`, `TypeError` or `WowError` where it is something else."""
    error = form["error"]
    return CommandResult(
        command_id=form["command_id"],
        request_id=form["request_id"],
        aggregate_id=AggregateId(form["context"], form["aggregate"], form["aggregate_id"], form["tenant"]),
        stage=Stage[form["stage"]],
        version=form["version"],
        error=None if error is None else CommandError(error["code"], error["text"], error["undecided"]),
        value=form["value"],
    )


def error_frame(id: str | None, code: str, text: str, field: str | None = None) -> bytes:
    """Return the frame that refuses something, or ends what `id` stands for.

    What a client has sent may be repeated in it, and must not make it too large to be sent.
    """
    text = _sendable(_shortened(text))
    error = {"code": code, "text": text, "field": None if field is None else _shortened(field)}
    return orjson.dumps({"type": "error", "id": id, "error": error})


def subscription_frame(kind: str, id: str) -> bytes:
    """Return the frame that says that a subscription has begun or ended."""
    return orjson.dumps({"type": kind, "id": id})


def events_part(serializer: Serializer, stream: DomainEventStream) -> bytes:
    """Return what an `events` frame says of a stream: the same for every subscription."""
    return orjson.dumps(
        {
            **_version(stream.aggregate_id, stream.version),
            "request_id": stream.request_id,
            "created_at": stream.created_at,
            "events": [orjson.Fragment(serializer.dump_body(event)) for event in stream.events],
        }
    )


def change_frame(id: str, projection: str, aggregate_id: AggregateId, version: int) -> bytes:
    """Return the frame that says what a projection has handled."""
    return orjson.dumps({"type": "change", "id": id, "projection": projection, **_version(aggregate_id, version)})


def _version(aggregate_id: AggregateId, version: int) -> dict[str, object]:
    return {
        "context": aggregate_id.context,
        "aggregate": aggregate_id.aggregate,
        "aggregate_id": aggregate_id.id,
        "version": version,
    }


def _shown(value: object) -> str:
    try:
        return _shortened(repr(value), 80)
    except RecursionError:  # JSON may be nested more deeply than Python shows
        return f"a {type(value).__name__} nested too deeply"


def _sendable(text: str) -> str:
    """Escape lone surrogates: an exception's text may hold some, and JSON may not."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _shortened(text: str, size: int = 1_000) -> str:
    return text if len(text) <= size else f"{text[: size - 3]}..."
