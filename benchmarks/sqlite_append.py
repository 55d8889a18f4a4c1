"""How many appends a second the SQLite store takes, from one caller and from many at once.

Each append is one stream of one event, on the disk before it returns. Rates depend on the disk: name a folder on the
one that counts. Run it with `--quick` to see that it works.
"""

import argparse
import statistics
import tempfile
from itertools import count
from pathlib import Path

import trio
from attrs import define, frozen

from trio_wow import aggregate, on_command, on_sourcing
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.domain import Domain
from trio_wow.messages import AggregateId, DomainEventStream


@frozen
class Count:
    id: str


@frozen
class Counted:
    number: int


@aggregate(context="benchmark")
@define
class Counter:
    id: str
    number: int = 0

    @on_command
    def count(self, command: Count) -> Counted:
        return Counted(self.number + 1)

    @on_sourcing
    def counted(self, event: Counted) -> None:
        self.number = event.number


DOMAIN = Domain([Counter])
CALLERS = (1, 256)
NAMES = count()


async def append(store: SqliteStore, versions: int) -> None:
    """Append to one new aggregate."""
    aggregate_id = AggregateId("benchmark", "counter", str(next(NAMES)))
    for version in range(1, versions + 1):
        await store.append(
            DomainEventStream(
                aggregate_id=aggregate_id,
                version=version,
                events=(Counted(version),),
                command_id=str(version),
                request_id=str(version),
            )
        )


async def rate(store: SqliteStore, callers: int, appends: int) -> float:
    """Return appends per second of so many callers."""
    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(callers):
            nursery.start_soon(append, store, max(1, appends // callers))
    return callers * max(1, appends // callers) / (trio.current_time() - started)


async def main(folder: Path, rounds: int, appends: int) -> None:
    """Measure, and print a line for each number of callers."""
    async with SqliteStore(folder / "benchmark.db", DOMAIN.serializer) as store:
        for callers in CALLERS:
            await rate(store, callers, appends // 5)  # warm
            rates = [await rate(store, callers, appends) for _ in range(rounds)]
            print(
                f"{callers:4} concurrent callers: {statistics.median(rates):8,.0f} appends/s "
                f"(median of {rounds} rounds of {appends:,}; from {min(rates):,.0f} to {max(rates):,.0f})"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small round")
    parser.add_argument("--folder", type=Path, help="where to make the file; by default the system's temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        trio.run(main, Path(made), 1 if options.quick else 5, 512 if options.quick else 5120)
