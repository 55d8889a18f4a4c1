"""Executions of event functions that failed for good: what is kept of one, and who keeps it."""

import enum
import logging
import traceback as tracebacks
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol, Self, runtime_checkable
from uuid import uuid4

import trio
from attrs import evolve, field, frozen

from trio_wow.errors import printable
from trio_wow.messages import AggregateId

__all__ = [
    "FailedExecution",
    "FailureRecorder",
    "FailureStore",
    "InMemoryFailureStore",
    "LoggingFailureRecorder",
    "Recording",
    "storable_text",
]

MAX_TEXT = 2_000
MAX_TRACEBACK = 16_000

_log = logging.getLogger("trio_wow.dispatch")


def storable_text(text: str) -> str:
    """Replace each lone surrogate, which no store keeps, by `?`."""
    return str.encode(text, errors="replace").decode()


def _start(text: str) -> str:
    text = storable_text(text)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


def _end(text: str) -> str:
    text = storable_text(text)
    return text if len(text) <= MAX_TRACEBACK else f"...{text[3 - MAX_TRACEBACK :]}"


def _asked(show: Callable[[], str]) -> str:
    try:
        return show()
    except Exception as error:  # a user's error: whatever is asked of it runs the user's code
        return f"(it cannot be shown: {type(error).__name__})"


@frozen(kw_only=True)
class FailedExecution:
    """One event that one event function could not handle, with the last error. Lone surrogates in texts become `?`.

    Also a stream that could not be published.

    Attributes:
        function: which one, such as `event-dispatcher/Mailer.flight_logged`. Where the functions of a projection share
            a transaction, all of them: `projection-dispatcher/Ledger`, or with `/state` for state events.
            `command-dispatcher/publication` for what could not be published.
        aggregate_id: whose event it is.
        version: of the event's stream.
        sequence: of the event in its stream, from 1; 0 for all of them, where functions share a transaction, and for a
            publication.
        error: the error's class, by its name.
        text: what the error says; at most 2,000 characters, the first ones.
        traceback: at most 16,000 characters, the last ones.
        attempts: how often it was tried.
        failed_at: when it was tried last; UTC.
        id: names the failure.
    """

    function: str = field(converter=storable_text)
    aggregate_id: AggregateId
    version: int
    sequence: int
    error: str = field(converter=storable_text)
    text: str = field(converter=_start)
    traceback: str = field(converter=_end)
    attempts: int
    failed_at: datetime = field(factory=lambda: datetime.now(UTC))
    id: str = field(factory=lambda: uuid4().hex, converter=storable_text)

    @classmethod
    def of(
        cls,
        error: BaseException,
        *,
        function: str,
        aggregate_id: AggregateId,
        version: int,
        sequence: int,
        attempts: int,
    ) -> Self:
        """Make one of an error, which may be one that cannot be shown; never raises."""
        return cls(
            function=function,
            aggregate_id=aggregate_id,
            version=version,
            sequence=sequence,
            error=_asked(lambda: type(error).__name__),
            text=_asked(lambda: printable(error)),
            traceback=_asked(lambda: "".join(tracebacks.format_exception(error))),
            attempts=attempts,
        )


class Recording(enum.Enum):
    """What a recorder did with a failure."""

    RECORDED = "recorded"
    """It is kept, and will still be there after a crash, if the recorder's store is."""

    WAIVED = "waived"
    """It need not be kept: somebody has decided that this failure does not matter."""

    UNRECORDED = "unrecorded"
    """It is not kept, only told: the recorder has nowhere to keep it."""


@runtime_checkable
class FailureRecorder(Protocol):
    """Is told of each execution that failed for good."""

    async def record(self, failure: FailedExecution, /) -> Recording:
        """Take a failure, and say what was done with it. The same one may come again, with another ID.

        Raises:
            Exception: the recording failed; nothing may be taken for recorded.
        """
        ...


@runtime_checkable
class FailureStore(FailureRecorder, Protocol):
    """A recorder that keeps failures until they are resolved: these are open.

    Open is at most one for each function and event (aggregate, version and sequence). Recording that again changes the
    open one: it keeps its ID and its place, the attempts are added, and the rest is that of the newest.

    Every method may raise a `StoreError`: the store cannot be used.

    Cancellation: as for `EventStore.append`.
    """

    async def failures(
        self, *, limit: int = 100, function: str | None = None, aggregate_id: AggregateId | None = None
    ) -> Sequence[FailedExecution]:
        """Return the open failures, the one that was recorded first as the first.

        Args:
            limit: how many at most; at least 1.
            function: only those of this function.
            aggregate_id: only those of this aggregate; its tenant does not count.
        """
        ...

    async def failure(self, id: str, /) -> FailedExecution | None:
        """Return an open failure; `None` if there is none of that ID, or it has been resolved."""
        ...

    async def resolve_failure(self, id: str, /) -> bool:
        """Forget an open failure, and return whether there was one. Idempotent.

        The same function failing for the same event afterwards is a new failure, with an ID of its own.
        """
        ...


class LoggingFailureRecorder:
    """A `FailureRecorder` that logs each failure as one ERROR of the logger `trio_wow.dispatch`, and keeps nothing.

    The log record has the failure in its attribute `failure`.
    """

    async def record(self, failure: FailedExecution, /) -> Recording:
        """See `FailureRecorder.record`. Returns `UNRECORDED`."""
        await trio.lowlevel.checkpoint()
        _log.error(
            "%s failed on version %s of %s, after %s: %s: %s\n%s",
            failure.function,
            failure.version,
            failure.aggregate_id,
            "1 attempt" if failure.attempts == 1 else f"{failure.attempts} attempts",
            failure.error,
            failure.text,
            failure.traceback,
            extra={"failure": failure},
        )
        return Recording.UNRECORDED


class InMemoryFailureStore:
    """A `FailureStore` that ends with the process."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, AggregateId, int, int], FailedExecution] = {}

    async def record(self, failure: FailedExecution, /) -> Recording:
        """See `FailureRecorder.record`. Returns `RECORDED`."""
        await trio.lowlevel.checkpoint()
        key = _key(failure)
        before = self._open.get(key)
        if before is not None:
            failure = evolve(failure, id=before.id, attempts=before.attempts + failure.attempts)
        self._open[key] = failure
        return Recording.RECORDED

    async def failures(
        self, *, limit: int = 100, function: str | None = None, aggregate_id: AggregateId | None = None
    ) -> Sequence[FailedExecution]:
        """See `FailureStore.failures`."""
        await trio.lowlevel.checkpoint()
        function = None if function is None else storable_text(function)
        return [
            failure
            for failure in self._open.values()
            if function in (None, failure.function) and aggregate_id in (None, failure.aggregate_id)
        ][:limit]

    async def failure(self, id: str, /) -> FailedExecution | None:
        """See `FailureStore.failure`."""
        await trio.lowlevel.checkpoint()
        id = storable_text(id)
        return next((failure for failure in self._open.values() if failure.id == id), None)

    async def resolve_failure(self, id: str, /) -> bool:
        """See `FailureStore.resolve_failure`."""
        failure = await self.failure(id)
        return failure is not None and self._open.pop(_key(failure), None) is not None


def _key(failure: FailedExecution) -> tuple[str, AggregateId, int, int]:
    return (failure.function, failure.aggregate_id, failure.version, failure.sequence)
