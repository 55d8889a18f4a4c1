"""What keyed execution costs an item: trio-wow's KeyedExecutor beside hand-written code, packages and floors.

Three parts, each alone with an option of its own: the contenders of `contenders.py` (`--cost`), memory and cost as keys
grow to a million (`--memory`), how late a timer is beside busy handlers (`--ticker`).

How it measures: every contender first handles all items once, untimed, with a handler that records them; an item lost
or repeated, two of one key at a time or out of order end the program with status 1. Then the contenders take turns,
round by round, in one process, so that what else the machine does falls on all of them. The clock starts inside the
running loop. `gc.collect()` comes before each timing and the collector stays on. Shown are the median, the least and
the most of all rounds in µs an item, and the throughput relative to asyncio's deque and task per key.

Run it with `--quick` to see that it works. The packages come with the extra `bench`; one that is not there is reported
as missing.
"""

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import trio
from attrs import asdict, frozen

import executor_limits
from contenders import CONTENDERS, WINDOW, Contender, Item, Load
from trio_wow.execution import KeyedExecutor

BASELINE = "asyncio-deque"
KEYS = (1, 100, 10_000)  # and one for each item
ITEMS, ROUNDS = 200_000, 5
QUICK_ITEMS, QUICK_ROUNDS = 5_000, 3


async def returns(item: Item) -> None:
    """Do nothing."""


async def waits_in_trio(item: Item) -> None:
    """Yield to the event loop once."""
    await trio.lowlevel.checkpoint()


async def waits_in_asyncio(item: Item) -> None:
    """Yield to the event loop once."""
    await asyncio.sleep(0)


def plain(item: Item) -> None:
    """Do nothing, without `async`."""


HANDLERS = {"noop": "an async def that returns", "yield": "an async def that yields once", "plain": "a plain def"}


def handler_for(contender: Contender, kind: str) -> Callable[[Item], Any]:
    """Return the handler of a kind that the contender's library can run."""
    if kind == "noop":
        return returns
    if kind == "plain":
        return plain
    return waits_in_trio if contender.library == "trio" else waits_in_asyncio


def run(contender: Contender, load: Load) -> float:
    """Let a contender handle a load; return the seconds it took."""
    if contender.library == "none":
        started = time.perf_counter()
        contender.run(load)
        return time.perf_counter() - started
    if contender.library == "trio":
        return trio.run(_timed, contender.run, load)
    return asyncio.run(_timed(contender.run, load))


async def _timed(handle: Callable[[Load], Any], load: Load) -> float:
    started = time.perf_counter()
    await handle(load)
    return time.perf_counter() - started


class WrongResultError(Exception):
    """A contender does not do what it is measured for."""


def verify(contender: Contender, load: Load) -> None:
    """Let a contender handle a load once and check that it did: all items, each once; per key one at a time, in order.

    Raises:
        WrongResultError: it did not.
    """
    handled: list[Item] = []
    running: set[object] = set()
    overlaps: list[Item] = []

    def begin(item: Item) -> None:
        if load.key(item) in running:
            overlaps.append(item)
        running.add(load.key(item))

    def end(item: Item) -> None:
        running.discard(load.key(item))
        handled.append(item)

    async def record(item: Item) -> None:
        begin(item)
        await load.handler(item)
        end(item)

    def record_plain(item: Item) -> None:
        begin(item)
        load.handler(item)
        end(item)

    run(contender, Load(load.items, load.key, record if load.awaits else record_plain, load.awaits))
    if sorted(handled, key=itemgetter(1)) != list(load.items):
        raise WrongResultError(f"{contender.name} handled {len(handled)} of {len(load.items)} items, or not each once")
    if contender.keyed and overlaps:
        raise WrongResultError(f"{contender.name} handled {overlaps[0]} beside another item of its key")
    if contender.keyed and by_key(handled, load) != by_key(load.items, load):
        raise WrongResultError(f"{contender.name} handled items of one key out of order")


def by_key(items: Iterable[Item], load: Load) -> dict[object, list[Item]]:
    """Return the items of each key, in order."""
    grouped: defaultdict[object, list[Item]] = defaultdict(list)
    for item in items:
        grouped[load.key(item)].append(item)
    return grouped


@frozen
class Cost:
    """What an item cost one contender, in µs; `ratio` is of throughput, to that of the baseline."""

    handler: str
    keys: int
    contender: str
    median: float
    min: float
    max: float
    ratio: float | None
    samples: list[float]


def measure(kind: str, keys: int, contenders: Sequence[Contender], items: int, rounds: int) -> list[Cost]:
    """Verify the contenders, then time them round by round."""
    numbered = [(number % keys, number) for number in range(items)]
    loads = {
        contender.name: Load(numbered, itemgetter(0), handler_for(contender, kind), awaits=kind != "plain")
        for contender in contenders
    }
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        verify(contender, loads[contender.name])
    for _ in range(rounds):
        for contender in contenders:
            gc.collect()
            samples[contender.name].append(run(contender, loads[contender.name]) / items * 1e6)
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    return [
        Cost(
            handler=kind,
            keys=keys,
            contender=name,
            median=medians[name],
            min=min(taken),
            max=max(taken),
            ratio=medians[BASELINE] / medians[name] if BASELINE in medians else None,
            samples=taken,
        )
        for name, taken in samples.items()
    ]


def measure_costs(options: argparse.Namespace) -> list[Cost]:
    """Measure what the options select, and print a table for each handler and number of keys."""
    chosen = [contender for contender in CONTENDERS if contender.name in options.contender]
    costs = []
    for kind in options.handler:
        for keys in options.keys:
            able = [contender for contender in chosen if contender.installed and keys <= contender.most_keys]
            measured = measure(kind, keys, able, options.items, options.rounds)
            print_costs(kind, keys, chosen, measured)
            costs += measured
    return costs


def print_costs(kind: str, keys: int, chosen: Iterable[Contender], costs: Iterable[Cost]) -> None:
    """Print a line for each chosen contender, measured or not."""
    print(f"\n{kind}: {HANDLERS[kind]}; {keys:,} {'key' if keys == 1 else 'keys'}")
    print(f"  {'':16} {'µs/item':>9} {'min':>8} .. {'max':<8} {'throughput':>10}")
    measured = {cost.contender: cost for cost in costs}
    for contender in chosen:
        cost = measured.get(contender.name)
        if cost is None:
            why = f"at most {contender.most_keys:,} keys" if contender.installed else "missing (extra: bench)"
            print(f"  {contender.name:16} {'-':>9}  {why}")
            continue
        ratio = "-" if cost.ratio is None else f"{cost.ratio:.2f} x"
        print(f"  {cost.contender:16} {cost.median:9.2f} {cost.min:8.2f} .. {cost.max:<8.2f} {ratio:>10}", flush=True)


def measure_memory(items: int, rounds: int) -> dict[str, Any]:
    """Measure a dispatch of up to five times as many keys as items, each item with a key of its own."""
    most = items * 5
    sizes = [max(1, most // 100), max(1, most // 10), most]
    peak = _peak_in_child(most)
    print(
        f"\nmemory: {most:,} items of as many keys take {peak['above_idle_mib']:.1f} MiB at most "
        f"above the {peak['idle_mib']:.1f} MiB of the idle process ({peak['measured_by']})",
        flush=True,
    )
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in samples:
            samples[size].append(executor_limits.cost(size))
    for size, taken in samples.items():
        print(f"  {size:9,} keys {statistics.median(taken):8.2f} µs/item  {min(taken):.2f} .. {max(taken):.2f}")
    costs = [
        {"keys": size, "median": statistics.median(taken), "min": min(taken), "max": max(taken), "samples": taken}
        for size, taken in samples.items()
    ]
    return {"peak": peak, "costs": costs}


def _peak_in_child(keys: int) -> dict[str, Any]:
    child = [sys.executable, __file__, "--peak-of", str(keys)]
    result: dict[str, Any] = json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE).stdout)
    return result


def measure_ticker(items: int) -> list[executor_limits.Lateness]:
    """Measure how late a ticker is on an idle loop and beside handlers of both kinds."""
    print(
        f"\nticker: how late a 5 ms sleep ends beside {executor_limits.DISPATCHES} dispatches of handlers that compute "
        f"for 50 to 200 µs, on one executor of {executor_limits.WORKERS} workers"
    )
    each = max(1, items // 10)
    measured = []
    for handler, count in (("none", max(1, items // 200)), ("async", each), ("plain", each)):
        late = executor_limits.lateness(handler, count)
        measured.append(late)
        print(
            f"  handlers: {late.load:6} median {late.median:7.2f} ms   p99 {late.p99:7.2f} ms   max {late.max:7.2f} ms"
            f"   ({late.ticks:,} ticks)",
            flush=True,
        )
    return measured


def machine() -> dict[str, Any]:
    """Return the facts that figures depend on."""
    return {
        "cores": os.cpu_count(),
        "usable_cores": len(KeyedExecutor().statistics().workers),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "trio": trio.__version__,
        "trio_wow": version("trio-wow"),
        "platform": platform.platform(),
    }


def at_least_one(text: str) -> int:
    """Read a positive number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def check_json(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse a file that could not be written, before anything is measured."""
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json} is in no folder that exists")


def write_json(options: argparse.Namespace, report: Any) -> None:
    """Write all that was measured, if that is wanted."""
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what is wrong with it ends the program with status 2."""
    described = "\n".join(f"  {contender.name:16} {contender.about}" for contender in CONTENDERS)
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"contenders:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [contender.name for contender in CONTENDERS]
    parser.add_argument("--cost", action="store_true", help="the contenders; without any of the three, all of them")
    parser.add_argument("--memory", action="store_true", help="many keys")
    parser.add_argument("--ticker", action="store_true", help="the event loop beside busy handlers")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ITEMS:,} items, {QUICK_ROUNDS} rounds")
    parser.add_argument("--items", type=at_least_one, help=f"items of a run ({ITEMS:,}); scales the other parts too")
    parser.add_argument("--rounds", type=at_least_one, help=f"timed rounds ({ROUNDS})")
    parser.add_argument("--handler", nargs="+", choices=HANDLERS, default=list(HANDLERS), help="all by default")
    parser.add_argument("--keys", nargs="+", type=at_least_one, help="1, 100, 10,000 and one for each item by default")
    parser.add_argument("--contender", nargs="+", choices=names, default=names, metavar="NAME", help="all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument(
        "--peak-of", type=at_least_one, help=argparse.SUPPRESS
    )  # what --memory runs in a process of its own
    options = parser.parse_args(arguments)
    options.items = options.items or (QUICK_ITEMS if options.quick else ITEMS)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.keys = options.keys or [*(keys for keys in KEYS if keys < options.items), options.items]
    if max(options.keys) > options.items:
        parser.error(f"--keys {max(options.keys)} is more than the {options.items} items")
    check_json(parser, options)
    if not (options.cost or options.memory or options.ticker):
        options.cost = options.memory = options.ticker = True
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    options = parse(arguments)
    if options.peak_of is not None:
        print(json.dumps(asdict(executor_limits.peak(options.peak_of))))
        return 0
    facts = machine()
    missing = [contender.name for contender in CONTENDERS if not contender.installed]
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{options.items:,} items, {options.rounds} rounds, window {WINDOW}; collected before each timing, gc on")
    print(f"missing: {', '.join(missing) or 'none'}")
    report: dict[str, Any] = {
        "machine": facts,
        "items": options.items,
        "rounds": options.rounds,
        "window": WINDOW,
        "gc": "collected before each timing, enabled",
        "baseline": BASELINE,
        "missing": missing,
    }
    if options.cost:
        try:
            report["costs"] = [asdict(cost) for cost in measure_costs(options)]
        except WrongResultError as error:
            print(error, file=sys.stderr)
            return 1
    if options.memory:
        report["memory"] = measure_memory(options.items, options.rounds)
    if options.ticker:
        report["ticker"] = [asdict(late) for late in measure_ticker(options.items)]
    write_json(options, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
