"""The `trio-wow` command: serves an application, and shows the history of its aggregates."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command with the arguments of the process. Needs the extra `cli`.

    Returns:
        The exit code: 0 done; 1 it failed; 2 it was asked for something that makes no sense, or a setting is not legal;
        130 or 143 interrupted by SIGINT or SIGTERM before it served.
    """
    try:
        from trio_wow.cli._command import run
    except KeyboardInterrupt:
        sys.stderr.write("trio-wow: ended by SIGINT before it served\n")
        return 130
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("click", "rich"):
            raise
        sys.stderr.write('trio-wow: the command needs an extra: pip install "trio-wow[cli]"\n')
        return 2
    return run()
