"""What adaptive execution is worth: plain functions of which a twentieth of the calls block for 60 ms.

The other calls take 20 µs. The calls are those of two functions, a slow and a fast one, or of one function alone
(`mixed`). Each load is run in four ways, in turns, round by round: adaptive; all on the event loop; all in threads of
the pool; and by an oracle, which knows of each call what it will take. Each run has an executor of its own and so
learns anew. A task beside it sleeps for 1 ms at a time; how late it is shows how long the event loop is held.

Shown are the median, the least and the most of all rounds: the total time, the latest the heartbeat was after the first
1,000 items (which are for learning), and the stalls: how often a slow call held the event loop in the whole run.

Then what a fast function costs once it is known, beside a call of it alone, and what deciding for a known function
allocates. Run it with `--quick` to see that it works.
"""

import argparse
import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import trio
from attrs import asdict, define, frozen

from contenders import Batches
from keyed_dispatch import at_least_one, check_json, machine, write_json
from trio_wow.execution import ExecClass, ExecProfile, KeyedExecutor, blocking, inline

FAST, SLOW, EVERY = 20e-6, 0.060, 20
HEARTBEAT = 0.001
LEARNING = 1_000
KEYS = 500
ITEMS, ROUNDS = 3_000, 5
QUICK_ITEMS, QUICK_ROUNDS = 200, 1
DECISIONS = 100_000

Item = tuple[int, int]
WAYS = ("adaptive", "inline", "threads", "oracle")


def fast(item: Item) -> None:
    """Compute for 20 µs."""
    until = time.perf_counter() + FAST
    while time.perf_counter() < until:
        pass


stalls = 0


def slow(item: Item) -> None:
    """Block for 60 ms."""
    global stalls
    stalls += trio.lowlevel.in_trio_task()
    time.sleep(SLOW)


def mixed(item: Item) -> None:
    """Block in a twentieth of the calls."""
    (slow if is_slow(item) else fast)(item)


def is_slow(item: Item) -> bool:
    """Whether an item's call is a slow one."""
    return item[1] % EVERY == EVERY - 1


@define
class Run:
    """What one run of one load showed, in ms.

    Attributes:
        total: from the first item to the end of the last.
        worst: the latest heartbeat after the learning.
        stalls: slow calls that held the event loop, in the whole run.
        done: items that have ended.
    """

    total: float = 0.0
    worst: float = 0.0
    stalls: int = 0
    done: int = 0


def placed(function: Callable[[Item], None], way: str) -> Callable[[Item], None]:
    """Return a function that runs where the way says: a new one, of which nothing is known."""

    def call(item: Item) -> None:
        function(item)

    if way == "oracle":
        way = "threads" if function is slow else "inline"
    if way == "inline":
        return inline(call)
    return blocking(call) if way == "threads" else call


def handler_for(load: str, way: str, executor: KeyedExecutor) -> Callable[[Item], Any]:
    """Return the handler of a load: for two functions one that calls either of them."""
    if load == "mixed" and way != "oracle":
        return placed(mixed, way)
    functions = [placed(function, way) for function in (fast, slow)]
    profiles = [ExecProfile(function) for function in functions]

    async def handler(item: Item) -> None:
        number = int(is_slow(item))
        await executor.call(profiles[number], functions[number], item)

    return handler


async def run(load: str, way: str, items: int) -> Run:
    """Run a load in one way."""
    seen = Run()
    over = trio.Event()

    async def heartbeat() -> None:
        while not over.is_set():
            slept = time.perf_counter()
            await trio.sleep(HEARTBEAT)
            late = (time.perf_counter() - slept - HEARTBEAT) * 1e3
            if seen.done >= min(LEARNING, items // 3):
                seen.worst = max(seen.worst, late)

    async with KeyedExecutor() as executor, trio.open_nursery() as nursery:
        nursery.start_soon(heartbeat)
        before = stalls
        source = Counting([(n % KEYS, n) for n in range(items)], seen)
        gc.collect()
        started = time.perf_counter()
        await executor.dispatch(source, key=itemgetter(0), handler=handler_for(load, way, executor))
        seen.total = (time.perf_counter() - started) * 1e3
        seen.stalls = stalls - before
        over.set()
    return seen


class Counting(Batches[Item]):
    """Counts what it has given as done: all but a window of it is."""

    def __init__(self, items: Sequence[Item], seen: Run) -> None:
        super().__init__(items)
        self._seen = seen

    async def receive_batch(self, limit: int, /) -> Any:
        """See `BatchSource`."""
        batch = await super().receive_batch(limit)
        self._seen.done += len(batch)
        return batch


@frozen
class Result:
    """All rounds of one load in one way."""

    load: str
    way: str
    total: float
    total_to_oracle: float
    total_to_threads: float
    worst: float
    stalls: float
    runs: Sequence[Run]


def measure_load(load: str, items: int, rounds: int) -> list[Result]:
    """Run a load in all ways, round by round."""
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            runs[way].append(trio.run(run, load, way, items))
    total = {way: statistics.median(each.total for each in several) for way, several in runs.items()}
    results = [
        Result(
            load,
            way,
            total[way],
            total[way] / total["oracle"],
            total[way] / total["threads"],
            statistics.median(each.worst for each in several),
            statistics.median(each.stalls for each in several),
            several,
        )
        for way, several in runs.items()
    ]
    print(f"\n{load}: {items:,} items, {len(results[0].runs)} rounds")
    print("               total ms      min .. max      of oracle  of threads   worst ms  min .. max    stalls")
    for result in results:
        totals, worsts = [each.total for each in result.runs], [each.worst for each in result.runs]
        print(
            f"  {result.way:10} {result.total:10,.0f}  {min(totals):6,.0f} .. {max(totals):<6,.0f}"
            f"  {result.total_to_oracle:8.2f}x  {result.total_to_threads:8.2f}x"
            f"  {result.worst:9.1f}  {min(worsts):5.1f} .. {max(worsts):<5.1f}"
            f"  {result.stalls:4.0f} ({min(each.stalls for each in result.runs)}"
            f" .. {max(each.stalls for each in result.runs)})",
            flush=True,
        )
    return results


async def _known(items: int) -> tuple[float, int]:
    """Return what an item of a known fast function takes, in times of the function alone.

    And how often it was promoted meanwhile, because something else took the processor away for more than 5 ms.
    """

    def function(item: Item) -> None:
        fast(item)

    work = [(n % KEYS, n) for n in range(items)]
    async with KeyedExecutor() as executor:
        for _ in range(3):  # to know it, also where a disturbance has made one run slow
            await executor.dispatch(Batches(work[:300]), key=itemgetter(0), handler=function)
        before = executor.statistics().functions[0].promotions
        started = time.perf_counter()
        await executor.dispatch(Batches(work), key=itemgetter(0), handler=function)
        dispatched = time.perf_counter() - started
        promotions = executor.statistics().functions[0].promotions - before
    started = time.perf_counter()
    for item in work:
        function(item)
    return dispatched / (time.perf_counter() - started), promotions


def measure_known(items: int, rounds: int) -> dict[str, float]:
    """Measure a fast function alone, once it is known."""
    measured = [trio.run(_known, items) for _ in range(rounds)]
    ratios, promotions = [ratio for ratio, _ in measured], sum(count for _, count in measured)
    print(f"\na known fast function, of its own time: {_spread(ratios, 'x')}; promoted {promotions} times")
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios), "promotions": promotions}


def measure_allocation() -> dict[str, float]:
    """Return the bytes that deciding for a known function, and taking note of its run, keeps and needs at most."""
    profile = ExecProfile(fast)
    for _ in range(64):
        profile.record(FAST)

    def decide() -> None:
        for _ in range(DECISIONS):
            if profile.exec_class is ExecClass.INLINE:
                pass

    def note() -> None:
        for _ in range(DECISIONS):
            profile.record(FAST)

    measured = {}
    for name, work in (("deciding", decide), ("deciding and taking note", note)):
        work()
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        after, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        measured[name] = float(after - before)
        measured[f"{name}, peak"] = float(peak - before)
        print(f"{name}, {DECISIONS:,} times: {after - before:,} bytes kept, {peak - before:,} at most at once")
    return measured


def _spread(values: Sequence[float], unit: str) -> str:
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} .. {max(values):.2f})"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what is wrong with it ends the program with status 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ITEMS:,} items, {QUICK_ROUNDS} round")
    parser.add_argument("--items", type=at_least_one, help=f"items of a run ({ITEMS:,})")
    parser.add_argument("--rounds", type=at_least_one, help=f"timed rounds ({ROUNDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    options = parser.parse_args(arguments)
    options.items = options.items or (QUICK_ITEMS if options.quick else ITEMS)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    check_json(parser, options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    options = parse(arguments)
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    report: dict[str, Any] = {"machine": facts, "items": options.items, "rounds": options.rounds}
    results = [result for load in ("two", "mixed") for result in measure_load(load, options.items, options.rounds)]
    report["loads"] = [asdict(result) for result in results]
    report["known"] = measure_known(options.items, options.rounds)
    report["allocation"] = measure_allocation()
    write_json(options, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
