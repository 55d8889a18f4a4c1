"""The pauses of the garbage collector: they fall into whatever code runs, and say nothing of it."""

import gc
from time import perf_counter

import trio

__all__ = ["paused_within", "watch_pauses"]

SHORTEST = 0.0005
"""Seconds. Most collections are shorter, and make no function slow."""

_began = 0.0
_recent: tuple[tuple[float, float], ...] = ()  # the last ones, begin and end; replaced, never changed


@trio.lowlevel.enable_ki_protection
def _note(phase: str, _: object) -> None:
    global _began, _recent
    if phase == "start":
        _began = perf_counter()
    elif (ended := perf_counter()) - _began >= SHORTEST:
        _recent = (*_recent[-7:], (_began, ended))


def watch_pauses() -> None:
    """Take note of pauses from now on, in this process. Idempotent."""
    if _note not in gc.callbacks:
        gc.callbacks.append(_note)


def paused_within(seconds: float) -> float:
    """Return how many of the last `seconds` the collector has taken."""
    since = perf_counter() - seconds
    return sum(ended - max(began, since) for began, ended in _recent if ended > since)
