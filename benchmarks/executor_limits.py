"""What a KeyedExecutor needs when keys are many, and what it leaves of the event loop when handlers are busy."""

import gc
import operator
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import trio
from attrs import frozen

from contenders import WINDOW, Batches
from trio_wow.execution import KeyedExecutor

MIB = 2**20
TICK = 0.005
BURNS = (50e-6, 100e-6, 150e-6, 200e-6)
DISPATCHES = 6
WORKERS = 16
KEYS_PER_DISPATCH = 64


@frozen
class Peak:
    """Memory that one dispatch took on top of the idle process."""

    keys: int
    idle_mib: float
    above_idle_mib: float
    measured_by: str


async def returns(item: int) -> None:
    """Handle nothing."""


async def dispatch_distinct(keys: int) -> float:
    """Dispatch an item of each of so many keys; return µs an item."""
    async with KeyedExecutor(max_in_flight=WINDOW) as executor:
        started = time.perf_counter()
        await executor.dispatch(Batches(range(keys)), key=operator.index, handler=returns)
        return (time.perf_counter() - started) / keys * 1e6


def cost(keys: int) -> float:
    """Return µs an item when each item has its own key."""
    gc.collect()
    return trio.run(dispatch_distinct, keys)


def peak(keys: int) -> Peak:
    """Measure this process, which has to be a fresh one: memory once taken is reused and hides what is needed.

    Linux keeps the peak of a process (`VmHWM`), which writing 5 to `clear_refs` sets back to what it holds now. Where
    that is not to be had, `ru_maxrss` is read before and after; it knows only the peak of the process's whole life (on
    Linux even that of its parent before `exec`), so what is needed below that peak stays hidden.
    """
    trio.run(dispatch_distinct, 1)  # what the first dispatch of a process loads is not the keys' doing
    gc.collect()
    measured_by = "VmHWM, set back by clear_refs" if _reset_peak() else "ru_maxrss"
    idle = _peak_bytes(measured_by)
    trio.run(dispatch_distinct, keys)
    return Peak(keys, idle / MIB, (_peak_bytes(measured_by) - idle) / MIB, measured_by)


def _reset_peak() -> bool:
    block = b"\1" * (16 * MIB)  # raises the peak, so that one sees it set back
    raised = _high_water_mark()
    del block
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    reset = _high_water_mark()
    return raised is not None and reset is not None and reset < raised


def _high_water_mark() -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _peak_bytes(measured_by: str) -> int:
    mark = _high_water_mark()
    if measured_by != "ru_maxrss" and mark is not None:
        return mark
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@frozen
class Lateness:
    """How late a task was that sleeps for 5 ms at a time, in ms."""

    load: str
    ticks: int
    median: float
    p99: float
    max: float


def lateness(handler: str, items: int) -> Lateness:
    """Run a ticker beside six dispatches of so many items each on one executor of 16 workers.

    Args:
        handler: "async" or "plain", the kind of function that burns the time; "none" for an idle loop.
        items: items of each dispatch; with "none", ticks.
    """
    gc.collect()
    late = sorted(trio.run(_ticks, items) if handler == "none" else trio.run(_ticks_beside, handler, items))
    return Lateness(
        load=handler,
        ticks=len(late),
        median=statistics.median(late),
        p99=late[min(len(late) - 1, len(late) * 99 // 100)],
        max=late[-1],
    )


async def _ticks(count: int) -> list[float]:
    return [await _tick() for _ in range(count)]


async def _ticks_beside(kind: str, items: int) -> list[float]:
    handler: Callable[[int], object] = burns_async if kind == "async" else burns
    running = DISPATCHES

    async def dispatch() -> None:
        nonlocal running
        await executor.dispatch(Batches(range(items)), key=lambda item: item % KEYS_PER_DISPATCH, handler=handler)
        running -= 1

    late = []
    async with KeyedExecutor(workers=WORKERS, max_in_flight=WINDOW) as executor, trio.open_nursery() as nursery:
        for _ in range(DISPATCHES):
            nursery.start_soon(dispatch)
        while running:
            late.append(await _tick())
    return late


async def _tick() -> float:
    started = time.perf_counter()
    await trio.sleep(TICK)
    return (time.perf_counter() - started - TICK) * 1e3


def burns(item: int) -> None:
    """Compute for 50 to 200 µs."""
    until = time.perf_counter() + BURNS[item % len(BURNS)]
    while time.perf_counter() < until:
        pass


async def burns_async(item: int) -> None:
    """Compute for 50 to 200 µs, without a checkpoint."""
    burns(item)
