"""The command line."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import click

from trio_wow.cli._events import Query, show
from trio_wow.cli._failure import FAILED, USAGE, Failure, Interrupted
from trio_wow.cli._failures import FailureQuery, show_failures
from trio_wow.cli._run import serve, signals_before_it_runs
from trio_wow.errors import SettingsError

__all__ = ["run"]

EXIT_CODES = """\b
Exit codes:
  0    done, or stopped in order
  1    it failed
  2    bad arguments or settings
  130  Ctrl+C (SIGINT) before it served
  143  SIGTERM before it served
"""

_APP = click.argument("app", metavar="MODULE:APP")
_TRACEBACK = click.option("--traceback", "show_traceback", is_flag=True, help="Show where an import failed.")


def _setting(name: str, metavar: str, help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(f"--{name}", metavar=metavar, help=help)


OPTIONS = {
    "workers": "dispatch.workers",
    "max_in_flight": "dispatch.max_in_flight",
    "throughput": "dispatch.throughput",
    "blocking_calls": "dispatch.blocking_calls",
    "shutdown_timeout": "shutdown.timeout",
    "shutdown_quiet_period": "shutdown.quiet_period",
}


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Click would write an empty line and hide which signal it was.
            raise Interrupted(signal.SIGINT) from None


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
    no_args_is_help=True,
)
@click.version_option(package_name="trio-wow", prog_name="trio-wow", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve a trio-wow application, or look at what its store keeps.

    "trio-wow COMMAND --help" says more.
    """


@cli.command("run", epilog=EXIT_CODES, short_help="Serve an application.")
@_APP
@click.option("--settings", "file", metavar="FILE", help="Read settings from this TOML file, not from WOW_SETTINGS.")
@_setting("workers", "N|none", "Handlers that may compute at once; none for the CPUs of the process.")
@_setting("max-in-flight", "N", "Messages that one receiver may hold unfinished.")
@_setting("throughput", "N", "Messages of one aggregate handled in a row.")
@_setting("blocking-calls", "allow|warn|raise", "When a function blocks the event loop, by time.sleep and the like.")
@_setting("shutdown-timeout", "SECONDS", "From the stop request until what still runs is cancelled.")
@_setting("shutdown-quiet-period", "SECONDS|none", "Without any running operation before the stop goes on.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged to stderr, unless the program sets up logging itself.",
)
@_TRACEBACK
def _run(app: str, file: str | None, log_level: str, show_traceback: bool, **options: str | None) -> None:
    """Serve the application that MODULE:APP names, such as "shop.main:app".

    The current directory is importable. SIGINT or SIGTERM stops the application in order; the second one at once, which
    counts as a failure. What does not end then is left behind one second later.

    An option goes before its environment variable (WOW_DISPATCH_WORKERS, WOW_SHUTDOWN_TIMEOUT and so on), which goes
    before the settings file. An application whose program gave it settings reads neither environment nor WOW_SETTINGS;
    options and --settings go before its settings too.
    """
    arguments = {OPTIONS[name]: value for name, value in options.items() if value is not None}
    try:
        serve(app, file=file, arguments=arguments, level=log_level.upper(), show_traceback=show_traceback)
    except SettingsError as error:
        raise Failure(_with_option_names(str(error)), USAGE) from error


def _with_option_names(text: str) -> str:
    for name, setting in OPTIONS.items():
        text = text.replace(f"(argument {setting})", f"(option --{name.replace('_', '-')})")
    return text


@cli.command("events", epilog=EXIT_CODES, short_help="Show the history of an aggregate.")
@_APP
@click.argument("aggregate", metavar="CONTEXT.AGGREGATE")
@click.argument("id", metavar="ID")
@click.option("--state", "version", metavar="VERSION", type=click.IntRange(min=0), help="Show the state at a version.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document on each line, for programs.")
@_TRACEBACK
def _events(app: str, aggregate: str, id: str, version: int | None, as_json: bool, show_traceback: bool) -> None:
    """Show what has happened to one aggregate, such as "fleet.aircraft N14228", in the store of an application.

    Nothing is served; a store that does not exist yet is made, and empty. The state at a version is made from the
    events up to it; 0 is the one before the first event. The tenant does not matter.
    """
    with signals_before_it_runs():
        show(Query(app, aggregate, id, version, as_json), show_traceback=show_traceback)


@cli.command("failures", epilog=EXIT_CODES, short_help="List or resolve failed executions.")
@_APP
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="List at most N; 100 without it.")
@click.option("--function", metavar="NAME", help="List only those of this function, by the name that the list shows.")
@click.option("--show", "shown", metavar="ID", help="Show one whole, with its traceback.")
@click.option("--resolve", "resolved", metavar="ID", help="Forget one: its cause is dealt with.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document on each line, for programs.")
@_TRACEBACK
def _failures(
    app: str,
    limit: int | None,
    function: str | None,
    shown: str | None,
    resolved: str | None,
    as_json: bool,
    show_traceback: bool,
) -> None:
    """List the events that event functions could not handle, the first one first, in the store of an application.

    An event is named by its aggregate, the version and its place in the version. Nothing is served, and no function is
    called; a store that does not exist yet is made, and empty.
    """
    if sum((shown is not None, resolved is not None, limit is not None or function is not None)) > 1:
        raise click.UsageError(
            "--show, --resolve and what selects from the list (--limit, --function) exclude one another"
        )
    query = FailureQuery(app, 100 if limit is None else limit, function, shown, resolved, as_json)
    with signals_before_it_runs():
        show_failures(query, show_traceback=show_traceback)


def run() -> int:
    """Run the command; returns the exit code."""
    code = _exit_code()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        code = code or _unwritten(error)
    if code:
        # A thread that the program left behind must not keep a process that has failed.
        main = threading.main_thread()
        if any(not thread.daemon and thread is not main for thread in threading.enumerate()):
            logging.shutdown()
            sys.stderr.flush()
            os._exit(code)
    return code


def _exit_code() -> int:
    try:
        # Without the standalone mode, click leaves exit codes to its caller.
        result = cli.main(prog_name="trio-wow", standalone_mode=False)
    except Failure as error:
        error.show()
        return error.code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except Interrupted as error:
        click.echo(f"trio-wow: ended by {signal.Signals(error.number).name} before it served", err=True)
        return 128 + error.number
    except OSError as error:
        return _unwritten(error)
    return result if isinstance(result, int) else 0


def _unwritten(error: OSError) -> int:
    """Say that the output could not be written; a reader that has gone need not be told."""
    if not isinstance(error, BrokenPipeError):
        click.echo(f"trio-wow: the output cannot be written: {error.strerror or error}", err=True)
    # What is left in the buffer would fail once more when the interpreter flushes it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED
