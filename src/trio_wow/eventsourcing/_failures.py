"""What is kept of functions that have failed for good."""

import enum
import logging
from datetime import UTC, datetime
from traceback import format_exception
from typing import Protocol, runtime_checkable
from uuid import uuid4

from attrs import field, frozen

from trio_wow.errors import printable
from trio_wow.messages import AggregateId

__all__ = ["FailedExecution", "FailureRecorder", "LoggingFailureRecorder", "Recording"]

_log = logging.getLogger("trio_wow.dispatch")

TEXT = 2_000
TRACEBACK = 16_000


def _new_id() -> str:
    return uuid4().hex


def _now() -> datetime:
    return datetime.now(UTC)


@frozen(kw_only=True)
class FailedExecution:
    """A function of a processor that has failed on an event for good: retries were of no use, or would be of none.

    Attributes:
        function: the dispatcher, the class and the method: `event-dispatcher/Mailer.flight_logged`. Where the functions
            of a projection share a transaction, without the method.
        aggregate_id: whose event it was.
        version: of the stream.
        sequence: which event of the stream, from 1; 0 where functions share a transaction.
        error: the name of the error's class.
        text: the error's text; at most 2,000 characters.
        traceback: at most the last 16,000 characters.
        attempts: how often it was tried.
        id: names this failure.
        failed_at: wall time, UTC.
    """

    function: str
    aggregate_id: AggregateId
    version: int
    sequence: int
    error: str
    text: str
    traceback: str
    attempts: int
    id: str = field(factory=_new_id)
    failed_at: datetime = field(factory=_now)

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
    ) -> "FailedExecution":
        """Describe an error; never raises, whatever the error is."""
        try:
            lines = "".join(format_exception(error))
        except Exception as failure:
            lines = f"its traceback cannot be shown: {type(failure).__name__}"
        return cls(
            function=function,
            aggregate_id=aggregate_id,
            version=version,
            sequence=sequence,
            error=type(error).__name__,
            text=_whole(printable(error)[:TEXT]),
            traceback=_whole(lines[-TRACEBACK:]),
            attempts=attempts,
        )


def _whole(text: str) -> str:
    """Replace lone surrogates, which no store keeps."""
    return text.encode(errors="replace").decode()


class Recording(enum.Enum):
    """What a failure recorder has done about a failure."""

    RECORDED = "recorded"
    """It is kept, and can be looked at and tried again."""
    WAIVED = "waived"
    """It need not be kept."""
    UNRECORDED = "unrecorded"
    """Nobody keeps it but a log."""


@runtime_checkable
class FailureRecorder(Protocol):
    """Is told of every function of a processor that has failed for good."""

    async def record(self, failure: FailedExecution, /) -> Recording:
        """Take note of a failure. Whatever this raises means that it was not recorded."""
        ...


class LoggingFailureRecorder:
    """Logs each failure as an error, with its traceback, to the logger `trio_wow.dispatch`.

    The log record has the failure in its attribute `failure`.
    """

    async def record(self, failure: FailedExecution, /) -> Recording:
        """See `FailureRecorder.record`."""
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
