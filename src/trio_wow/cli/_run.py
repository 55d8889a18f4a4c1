"""`trio-wow run`."""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import trio

from trio_wow.app import load_settings
from trio_wow.cli._failure import FAILED, Failure, Interrupted, expected
from trio_wow.cli._target import load_app
from trio_wow.runtime import Runtime

__all__ = ["serve", "signals_before_it_runs"]

_log = logging.getLogger("trio_wow.cli")

PATIENCE = 1.0
"""Seconds that a forced stop may take."""


def serve(target: str, *, file: str | None, arguments: Mapping[str, object], level: str, show_traceback: bool) -> None:
    """Serve an application until it has stopped in order.

    Raises:
        Failure: it cannot be found, or it failed.
        SettingsError: a setting is not legal.
        Interrupted: a signal came before there was a runtime.
    """
    with signals_before_it_runs():
        app = load_app(target, show_traceback=show_traceback)
        if not logging.root.handlers:
            logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
            logging.getLogger("stamina").setLevel(logging.ERROR)  # it says no more than that something is tried again
        base = app.settings if app.has_own_settings else None
        runtime = app.runtime(settings=load_settings(file=file, arguments=arguments, base=base))
        _stop_at_signals(runtime)
        try:
            trio.run(_serve, runtime, target)
        except BaseException as error:
            kind = "" if expected(error) else f"{type(error).__name__}: "
            cause = None if expected(error) else error
            raise Failure(f"{kind}{error}", FAILED, cause=cause) from error


@contextmanager
def signals_before_it_runs() -> Iterator[None]:
    """Let a signal end what is not running yet with `Interrupted`, and put the handlers back at the end."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    for number in kept:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _stop_at_signals(runtime: Runtime) -> None:
    """Stop in order at a signal that comes before the runtime takes them, or after it has given them back."""

    def stop(_: int, __: FrameType | None) -> None:
        runtime.request_stop()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


async def _serve(runtime: Runtime, target: str) -> None:
    raised: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_leave_behind_what_does_not_end, runtime)
        try:
            await runtime.serve(task_status=_Announcement(target))
        except BaseException as error:
            # Kept out of the nursery's own group, and raised as it is.
            raised = error
        nursery.cancel_scope.cancel()
    if raised is not None:
        raise raised


class _Announcement(trio.TaskStatus[Any]):
    def __init__(self, target: str) -> None:
        self._target = target

    def started(self, value: object = None) -> None:  # noqa: ARG002 - the runtime is known
        _log.info("%s is served; SIGINT or SIGTERM stops it", self._target)


async def _leave_behind_what_does_not_end(runtime: Runtime) -> None:
    await runtime.wait_forced()
    await trio.sleep(PATIENCE)
    _log.error("what was forced to stop has not ended within %s s; the process ends without it", PATIENCE)
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(FAILED)
