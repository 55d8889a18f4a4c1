"""What a sender learns of a command."""

import enum
from typing import Any

from attrs import frozen

from trio_wow.errors import (
    AppendOutcomeUnknownError,
    CommandFailedError,
    CommandRejectedError,
    StoreError,
    VersionConflictError,
)
from trio_wow.messages._identity import AggregateId

__all__ = ["CommandError", "CommandResult", "Stage"]


class Stage(enum.Enum):
    """How far a command has come. Reaching one proves what it says and nothing more; see `docs/waiting.md`.

    `PROCESSED` comes after `SENT`, and each of the others after `PROCESSED`, in any order among themselves.
    """

    SENT = "SENT"
    """The bus has taken the command."""
    PROCESSED = "PROCESSED"
    """The command was decided: its events are stored and published, or its error is known."""
    SNAPSHOT = "SNAPSHOT"
    """The snapshot that is due at the command's version is kept, if one is due."""
    PROJECTED = "PROJECTED"
    """Every projection of this process that handles one of the command's events, or the state after them, has done."""
    EVENT_HANDLED = "EVENT_HANDLED"
    """The same for every event processor."""
    SAGA_HANDLED = "SAGA_HANDLED"
    """The same for every saga; the commands that they sent have their results too, unless their bus is durable."""


@frozen
class CommandError:
    """Why a command failed, or what it has led to was not handled.

    Attributes:
        code: the `code` of a `CommandRejectedError`, if it has one, else the name of the error's class.
        text: the error's text.
        undecided: whether nothing was decided for or against the command, because the store could not be used or
            another writer was first: the same command with the same request ID may still succeed. Of a group every
            leaf must say so.
    """

    code: str
    text: str
    undecided: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "CommandError":
        """Describe an exception."""
        try:
            text = str(error)
        except Exception as failure:
            text = f"its text cannot be shown: {type(failure).__name__}"
        code = error.code if isinstance(error, CommandRejectedError) else None
        return cls(code or type(error).__name__, text, _is_undecided(error))


def _is_undecided(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_undecided, error.exceptions))
    return isinstance(error, StoreError | VersionConflictError | AppendOutcomeUnknownError)


@frozen(kw_only=True)
class CommandResult:
    """What became of a command, at one stage.

    Attributes:
        command_id: the message's ID.
        request_id: the request's ID.
        aggregate_id: the aggregate.
        stage: the stage that was reached, or at which it failed.
        version: the version at which the command's events are stored; for a duplicate, the one of the first time;
            `None` when nothing is stored, or that is not known yet.
        error: at stage `PROCESSED`, why the command failed; at a later one, why a function for what it has led to
            failed: the command itself stands. `None` when nothing did.
        value: what the command function returned for the caller (see `Reply`), as plain JSON data: dicts, lists,
            texts, numbers, booleans, `None`. `None` at stage `SENT`, with an error of the command, and for a duplicate.
    """

    command_id: str
    request_id: str
    aggregate_id: AggregateId
    stage: Stage
    version: int | None = None
    error: CommandError | None = None
    value: Any = None

    def raise_for_error(self) -> "CommandResult":
        """Return this result, or raise its error.

        Raises:
            CommandFailedError: the command failed, or a stage after it.
        """
        if self.error is not None:
            raise CommandFailedError(
                self.error.code, self.error.text, retryable=self.error.undecided, stage=self.stage.name
            )
        return self
