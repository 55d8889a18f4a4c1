"""Ending with one line that says why."""

import sys
import traceback

import click

from trio_wow.errors import ShutdownDeadlineError, StoreError, WowError

__all__ = ["FAILED", "USAGE", "Failure", "Interrupted", "expected", "printable"]

FAILED = 1
USAGE = 2


class Failure(click.ClickException):
    """Ends the command: one line on stderr, and an exit code.

    Args:
        message: the line.
        code: the exit code.
        cause: shown as a traceback before the line, if there is one.
    """

    def __init__(self, message: str, code: int = FAILED, *, cause: BaseException | None = None) -> None:
        super().__init__(printable(" ".join(message.split())))
        self.code = code
        self._cause = cause

    def show(self, file: object = None) -> None:  # noqa: ARG002 - always stderr
        """Write it."""
        if self._cause is not None:
            sys.stderr.writelines(traceback.format_exception(self._cause))
        click.echo(f"trio-wow: {self.message}", err=True)


def printable(text: str) -> str:
    """Escape what a terminal would obey rather than show, and what stdout cannot encode."""
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # there may be no stdout
    return shown.encode(encoding, "backslashreplace").decode(encoding)


class Interrupted(BaseException):
    """A signal came before there was anything to stop in order. Like `KeyboardInterrupt`, but for every signal.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def expected(error: BaseException) -> bool:
    """Whether an error says all that there is to say, so that its traceback would only hide it."""
    if isinstance(error, StoreError | ShutdownDeadlineError):
        return True
    return isinstance(error, WowError) and error.__cause__ is None
