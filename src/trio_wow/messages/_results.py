"""What a sender learns of a command."""

import enum

from attrs import frozen

from trio_wow.errors import AppendOutcomeUnknownError, CommandFailedError, StoreError, VersionConflictError
from trio_wow.messages._identity import AggregateId

__all__ = ["CommandError", "CommandResult", "Stage"]


class Stage(enum.Enum):
    """How far a command has come. Reaching one proves what it says and nothing more."""

    SENT = "SENT"
    """The bus has taken the command."""
    PROCESSED = "PROCESSED"
    """The command was decided: its events are stored and published, or its error is known."""


@frozen
class CommandError:
    """Why a command failed.

    Attributes:
        code: the name of the error's class.
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
        return cls(type(error).__name__, text, _is_undecided(error))


def _is_undecided(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_undecided, error.exceptions))
    return isinstance(error, StoreError | VersionConflictError | AppendOutcomeUnknownError)


@frozen(kw_only=True)
class CommandResult:
    """How a command ended, at one stage.

    Attributes:
        command_id: the message's ID.
        request_id: the request's ID.
        aggregate_id: the aggregate.
        stage: the stage that was reached.
        version: the version at which the command's events are stored; for a duplicate, the one of the first time;
            `None` when nothing is stored.
        error: why it failed; `None` when it did not.
    """

    command_id: str
    request_id: str
    aggregate_id: AggregateId
    stage: Stage
    version: int | None = None
    error: CommandError | None = None

    def raise_for_error(self) -> "CommandResult":
        """Return this result, or raise its error.

        Raises:
            CommandFailedError: the command failed.
        """
        if self.error is not None:
            raise CommandFailedError(self.error.code, self.error.text, retryable=self.error.undecided)
        return self
