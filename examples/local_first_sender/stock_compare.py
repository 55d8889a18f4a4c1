"""Compares the events of two files, device's and server's. See `--help`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import trio

import stock_cli
from stock_cli import DIFFERENT, STOPPED, say
from stock_domain import stock_domain
from trio_wow.adapters.sqlite import SqliteStore

PAGE = 1_000


async def events_in(path: Path) -> Mapping[tuple[str, str], str]:
    """Return what happened for each request to each shelf: the version and the events.

    Not what each side makes of its own: IDs of messages and streams, the time, the order among shelves.
    """
    domain = stock_domain()
    found: dict[tuple[str, str], str] = {}
    async with SqliteStore(path, domain.serializer) as store:
        position = 0
        while page := await store.read_all(position, PAGE):
            for stream in (recorded.stream for recorded in page):
                events = ", ".join(f"{type(each).__name__.lower()} {each.quantity}" for each in stream.events)
                key = stream.aggregate_id.id, stream.request_id  # which a store has once
                found[key] = f"{stream.aggregate_id.id} {stream.version}: {events} (request {stream.request_id})"
            position = page[-1].position
    return found


async def compare(one: Path, other: Path) -> int:
    """Say where two files differ. Returns the exit code."""
    left, right = await events_in(one), await events_in(other)
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            say(f"{one.name} has {left.get(key, 'nothing')}; {other.name} has {right.get(key, 'nothing')}")
    if left != right:
        return DIFFERENT
    say(f"the same in both: the events of {len(left)} requests, each once")
    return STOPPED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Compare what happened to each shelf, in which order, and for which request.",
        epilog="Exit codes: 0 the same; 1 different; 2 a file is not usable.",
    )
    parser.add_argument("one", type=Path)
    parser.add_argument("other", type=Path)
    options = parser.parse_args(arguments)
    for path in (options.one, options.other):
        if not path.is_file():  # the store would make one
            parser.error(f"{path} is no file")
    return stock_cli.run("stock_compare", lambda: trio.run(compare, options.one, options.other))


if __name__ == "__main__":
    sys.exit(main())
