"""The two scheduling strategies side by side: a mailbox for each aggregate ID, and serial groups that IDs share.

Two parts. *Throughput*: what an item costs a dispatch, with IDs of text; measured as `keyed_dispatch.py` does, which
first checks that nothing is lost, repeated, or out of order. *Retry*: an application in which one aggregate's command
meets version conflicts and is tried again, with the backoff of `conflict_retry`, while commands for other IDs arrive at
a steady pace: how long those take.

Run it with `--quick` to see that it works.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import stamina
import trio
from attrs import asdict, frozen

from contenders import WINDOW, Batches, Contender, Load
from keyed_dispatch import HANDLERS, Cost, WrongResultError, at_least_one, check_json, machine, measure, write_json
from sqlite_append import Count, Counter
from trio_wow import App, Domain, InMemoryEventStore, KeyedExecutor
from trio_wow.app import Settings
from trio_wow.dispatch import GroupedScheduling
from trio_wow.errors import VersionConflictError
from trio_wow.execution import AggregateScheduler, group_key
from trio_wow.messages import DomainEventStream

ITEMS, ROUNDS, IDS = 100_000, 5, 256
QUICK_ITEMS, QUICK_ROUNDS, QUICK_IDS = 2_000, 2, 32
KEYS = (1, 100)  # and one for each item
FEW_GROUPS = 16
CONFLICTS = 5
PACE = 0.002
HOT = "hot"


async def keyed(load: Load) -> None:
    """KeyedExecutor: a mailbox for each ID."""
    async with KeyedExecutor(max_in_flight=WINDOW) as executor:
        await executor.dispatch(Batches(load.items), key=lambda item: str(load.key(item)), handler=load.handler)


async def grouped(load: Load) -> None:
    """AggregateScheduler: 64 groups for each worker."""
    async with trio.open_nursery() as nursery:
        scheduler = AggregateScheduler("benchmark", nursery=nursery, like=KeyedExecutor(max_in_flight=WINDOW))
        groups = 64 * scheduler.statistics().parallelism
        await scheduler.dispatch(
            Batches(load.items), key=lambda item: group_key(str(load.key(item)), groups), handler=load.handler
        )
        await scheduler.stop_gracefully()


STRATEGIES = [Contender("keyed", keyed, "trio"), Contender("grouped", grouped, "trio")]


class Conflicting(InMemoryEventStore):
    """Another writer is first, some times, where the hot aggregate is concerned."""

    conflicts = CONFLICTS

    async def append(self, stream: DomainEventStream) -> None:
        if stream.aggregate_id.id == HOT and self.conflicts:
            self.conflicts -= 1
            raise VersionConflictError(stream.aggregate_id, 0, 1)
        await super().append(stream)


@frozen
class Retry:
    """How long commands took, in ms, while another aggregate's was tried again.

    Attributes:
        strategy: how they were scheduled.
        groups: how many groups there were; `None` in mailboxes.
        ids: how many other aggregates had a command.
        sharing: how many of them were in the group of the one that was tried again.
        retrying: how long that one took.
        median: of the others, all rounds together.
        p99: of the others.
        max: of the others.
    """

    strategy: str
    groups: int | None
    ids: int
    sharing: int
    retrying: float
    median: float
    p99: float
    max: float


async def latencies(scheduling: GroupedScheduling | None, ids: Sequence[str]) -> tuple[float, list[float]]:
    """Return how long the hot aggregate's command took, and how long those of the others did, in ms."""
    domain = Domain([Counter])
    app = App(domain, store=Conflicting(domain.serializer), scheduling=scheduling, settings=Settings())
    taken: dict[str, float] = {}

    async def send(id: str) -> None:
        started = trio.current_time()
        (await app.gateway.send_and_wait(Count(id))).raise_for_error()
        taken[id] = (trio.current_time() - started) * 1e3

    runtime = app.runtime(signals=False, shutdown_quiet_period=0)
    async with app.serving(runtime), trio.open_nursery() as nursery:
        nursery.start_soon(send, HOT)
        for id in ids:
            await trio.sleep(PACE)
            nursery.start_soon(send, id)
    return taken.pop(HOT), list(taken.values())


def measure_retry(count: int, rounds: int) -> list[Retry]:
    """Measure the strategies round by round, and print a line for each."""
    ids = [f"counter-{number}" for number in range(count)]
    many = 64 * len(KeyedExecutor().statistics().workers)
    cases: list[tuple[str, int | None]] = [("keyed", None), ("grouped", many), ("grouped", FEW_GROUPS)]
    hot: dict[int | None, list[float]] = {groups: [] for _, groups in cases}
    others: dict[int | None, list[float]] = {groups: [] for _, groups in cases}
    for _ in range(rounds):
        for _, groups in cases:
            scheduling = None if groups is None else GroupedScheduling(groups=groups)
            retrying, taken = trio.run(latencies, scheduling, ids)
            hot[groups].append(retrying)
            others[groups] += taken
    print(
        f"\nretry: commands for {count:,} other IDs, {PACE * 1e3:.0f} ms apart, while one meets {CONFLICTS} conflicts"
    )
    print(f"  {'':8} {'groups':>6} {'sharing':>8} {'retrying':>10} {'median':>9} {'p99':>9} {'max':>9}   ms")
    measured = []
    for strategy, groups in cases:
        late = sorted(others[groups])
        retry = Retry(
            strategy=strategy,
            groups=groups,
            ids=count,
            sharing=0 if groups is None else sum(group_key(id, groups) == group_key(HOT, groups) for id in ids),
            retrying=statistics.median(hot[groups]),
            median=statistics.median(late),
            p99=late[len(late) * 99 // 100],
            max=late[-1],
        )
        measured.append(retry)
        print(
            f"  {strategy:8} {groups or '-':>6} {retry.sharing:8} {retry.retrying:10.1f} {retry.median:9.2f} "
            f"{retry.p99:9.2f} {retry.max:9.2f}",
            flush=True,
        )
    return measured


def measure_throughput(items: int, rounds: int) -> list[Cost]:
    """Measure both kinds of handlers with few and many IDs, and print a line for each strategy."""
    costs = []
    for kind in ("noop", "yield"):
        for keys in (*KEYS, items):
            measured = measure(kind, keys, STRATEGIES, items, rounds)
            print(f"\n{kind}: {HANDLERS[kind]}; {keys:,} {'ID' if keys == 1 else 'IDs'}")
            for cost in measured:
                print(
                    f"  {cost.contender:8} {cost.median:8.2f} µs/item  {cost.min:.2f} .. {cost.max:.2f}"
                    f"  {1e6 / cost.median:12,.0f} items/s",
                    flush=True,
                )
            costs += measured
    return costs


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ITEMS:,} items, {QUICK_ROUNDS} rounds")
    parser.add_argument("--items", type=at_least_one, help=f"items of a run ({ITEMS:,})")
    parser.add_argument("--ids", type=at_least_one, help=f"other IDs beside a retry ({IDS})")
    parser.add_argument("--rounds", type=at_least_one, help=f"timed rounds ({ROUNDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    options = parser.parse_args(arguments)
    check_json(parser, options)
    items = options.items or (QUICK_ITEMS if options.quick else ITEMS)
    ids = options.ids or (QUICK_IDS if options.quick else IDS)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    stamina.instrumentation.set_on_retry_hooks([])  # which would log each
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{items:,} items, {rounds} rounds, window {WINDOW}; collected before each timing, gc on")
    try:
        costs = measure_throughput(items, rounds)
    except WrongResultError as error:
        print(error, file=sys.stderr)
        return 1
    retries = measure_retry(ids, rounds)
    report: dict[str, Any] = {
        "machine": facts,
        "items": items,
        "rounds": rounds,
        "costs": [asdict(cost) for cost in costs],
        "retries": [asdict(retry) for retry in retries],
    }
    write_json(options, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
