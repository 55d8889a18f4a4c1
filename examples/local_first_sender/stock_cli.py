"""What the programs have in common: one line for each error, and an exit code."""

import sys
from collections.abc import Callable, Iterator

import stamina

from trio_wow import WowError

STOPPED, DIFFERENT, UNUSABLE = 0, 1, 2


def say(text: str) -> None:
    """Print a line at once, for who reads it through a pipe."""
    # What a server has said is shown, and not done by the terminal.
    print("".join(each if each.isprintable() else " " for each in text), flush=True)


def run(name: str, program: Callable[[], int]) -> int:
    """Run a program's main part. Returns the exit code."""
    stamina.instrumentation.set_on_retry_hooks([])  # what is tried again the programs say themselves
    code = UNUSABLE
    try:
        code = program()
    except* KeyboardInterrupt:
        code = STOPPED  # before or after its main part, which takes the signal itself
    except* (WowError, OSError) as group:
        for error in _leaves(group):
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return code


def _leaves(group: BaseExceptionGroup[Exception]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
