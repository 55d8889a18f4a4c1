"""Replays a month of real flights through a running runtime, and checks what came of it. See `--help`."""

import argparse
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from time import perf_counter

import trio
from attrs import frozen

from fleet_check import differences
from fleet_domain import (
    CHECK_INTERVAL,
    Aircraft,
    DeparturesByAirport,
    FlightLogged,
    LogFlight,
    Maintenance,
    MinutesByCarrier,
    WorkOrder,
    WorkOrderOpened,
)
from flight_data import Flight, FlightDataError, FlightFile, Reason, read_flights
from trio_wow import App, CommandGateway, KeyedExecutor, Runtime
from trio_wow.errors import AdmissionClosedError, ShutdownDeadlineError, WaitAbandonedError
from trio_wow.eventsourcing import EventStore
from trio_wow.messages import CommandError, DomainEventStream
from trio_wow.runtime import RuntimeState

try:
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
except ModuleNotFoundError:
    raise SystemExit('the replay draws with rich, which is not installed: pip install "trio-wow[examples]"') from None

JANUARY = Path(__file__).with_name("data") / "flights-2013-01.csv.gz"
PAGE = 1_000
SHOWN = 20

COMPLETE, DIFFERENT, UNUSABLE, INTERRUPTED = 0, 1, 2, 130


class Feed:
    """Sends flights to a gateway: those of one aircraft one after the other, in order; those of different ones at once.

    A `BatchSource`: the executor asks for more as flights are done, so no more than its window is ever waiting.

    Attributes:
        logged: flights whose command succeeded.
        refused: flights whose command failed, and why.
        interrupted: whether a flight was not taken any more, because the runtime's stop had been requested.
    """

    def __init__(self, gateway: CommandGateway, flights: Sequence[Flight]) -> None:
        self.flights = flights
        self.logged = 0
        self.refused: list[tuple[Flight, CommandError]] = []
        self.interrupted = False
        self._gateway = gateway
        self._taken = 0

    @property
    def done(self) -> int:
        """Flights that have their result."""
        return self.logged + len(self.refused)

    async def run(self) -> None:
        """Send them all, or all until the runtime takes no more."""
        async with KeyedExecutor(name="replay") as executor:
            await executor.dispatch(self, key=lambda flight: flight.tail, handler=self._log)

    async def receive_batch(self, limit: int, /) -> Sequence[Flight]:
        """See `BatchSource`."""
        await trio.lowlevel.checkpoint()
        batch = () if self.interrupted else self.flights[self._taken : self._taken + limit]
        if not batch:
            raise trio.EndOfChannel
        self._taken += len(batch)
        return batch

    async def _log(self, flight: Flight) -> None:
        command = LogFlight(flight.tail, flight.carrier, flight.origin, flight.minutes)
        try:
            result = await self._gateway.send_and_wait(command, request_id=flight.request_id, timeout=inf)
        except (AdmissionClosedError, WaitAbandonedError):
            self.interrupted = True
            return
        if result.error is None:
            self.logged += 1
        else:
            self.refused.append((flight, result.error))


@frozen
class Outcome:
    """How a replay ended.

    Attributes:
        streams: what the store holds.
        refused: see `Feed`.
        interrupted: whether it was stopped before every flight had its result.
        forced: whether the stop was forced, so that accepted commands may be unfinished.
        seconds: from the first command until the runtime had stopped.
    """

    streams: Sequence[DomainEventStream]
    refused: Sequence[tuple[Flight, CommandError]]
    interrupted: bool
    forced: bool
    seconds: float

    def count(self, event: type) -> int:
        """Return how many stored events are of this class."""
        return sum(type(body) is event for stream in self.streams for body in stream.events)


async def replay(app: App, flights: Sequence[Flight], console: Console) -> Outcome:
    """Serve the application, feed it the flights, stop it in order, and read its store."""
    # No quiet period: what an operation causes takes its lease first, so when none is held nothing is to come.
    runtime = app.runtime(shutdown_quiet_period=0)
    feed = Feed(app.gateway, flights)
    forced = False
    started = perf_counter()
    try:
        async with app.serving(runtime), trio.open_nursery() as nursery:
            nursery.start_soon(show_progress, feed, runtime, console)
            await feed.run()
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if group.split(ShutdownDeadlineError)[1] is not None:
            raise
        forced = True
    seconds = perf_counter() - started
    interrupted = forced or feed.interrupted
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the summary is left to do
    return Outcome(await read_all(app.store), feed.refused, interrupted, forced, seconds)


async def read_all(store: EventStore) -> Sequence[DomainEventStream]:
    """Read every stream of a store, page by page."""
    streams: list[DomainEventStream] = []
    position = 0
    while page := await store.read_all(position, PAGE):
        streams += [recorded.stream for recorded in page]
        position = page[-1].position
    return streams


async def show_progress(feed: Feed, runtime: Runtime, console: Console) -> None:
    """Show how far a feed has come, until cancelled: a bar on a terminal, else a line for each tenth."""
    total = len(feed.flights)
    started = perf_counter()
    tenths = 0
    stopping = False
    with Progress(
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} flights a second"),
        console=console,
        auto_refresh=False,  # else rich refreshes from a thread of its own
        disable=not console.is_interactive,
    ) as progress:
        bar = progress.add_task("", total=total, rate=0.0)
        try:
            while True:
                await trio.sleep(0.1)
                rate = feed.done / (perf_counter() - started)
                progress.update(bar, completed=feed.done, rate=rate)
                progress.refresh()
                if not console.is_interactive and feed.done * 10 // total > tenths:
                    tenths = feed.done * 10 // total
                    say(f"{tenths * 10:3} %: {feed.done:,} flights, {rate:,.0f} flights a second")
                if not stopping and runtime.state is not RuntimeState.RUNNING:
                    stopping = True
                    say("stopping: what was accepted is being finished; Ctrl+C again forces the stop")
        finally:
            progress.update(bar, completed=feed.done)


def run(path: Path, *, show_rejected: bool) -> int:
    """Read, replay, report, check. Returns the exit code."""
    try:
        file = read_flights(path)
    except FlightDataError as error:
        print(f"replay: {error}", file=sys.stderr)
        return UNUSABLE
    for row in file.rejected if show_rejected else ():
        say(f"rejected, line {row.line}: {row.reason.value}: {row.text}")
    flights = file.flights
    say(f"{path.name}: {len(flights) + len(file.rejected):,} rows, {len(flights):,} accepted")
    say(f"replaying {len(flights):,} flights of {len({flight.tail for flight in flights}):,} aircraft")
    console = Console(highlight=False)
    minutes, departures = MinutesByCarrier(), DeparturesByAirport()
    app = App([Aircraft, WorkOrder], [minutes, departures, Maintenance()])
    outcome = trio.run(replay, app, flights, console)
    if outcome.interrupted:
        say(
            f"{'forced to stop' if outcome.forced else 'interrupted'}: {outcome.count(FlightLogged):,} of "
            f"{len(flights):,} flights logged, {outcome.count(WorkOrderOpened):,} work orders opened; "
            "the store is in memory, so nothing is stored yet: run it again"
        )
        return INTERRUPTED
    report(file, outcome, minutes.minutes, departures.departures, console)
    found = differences(flights, outcome.streams, minutes.minutes, departures.departures)
    say(f"check: {len(found):,} differences between the file and what was recorded")
    say_some(found)
    return DIFFERENT if found else COMPLETE


def report(
    file: FlightFile, outcome: Outcome, minutes: Counter[str], departures: Counter[str], console: Console
) -> None:
    """Print what came of a complete replay."""
    reasons = Counter(row.reason for row in file.rejected)
    orders = outcome.count(WorkOrderOpened)
    # Each flight is a command; each work order two, one to open it and one to schedule its check.
    commands = len(file.flights) + 2 * orders
    hours = [(carrier, f"{total / 60:,.1f}") for carrier, total in minutes.most_common()]
    print_table(console, "Carriers by hours flown", ("carrier", "hours"), hours)
    counted = [(airport, f"{count:,}") for airport, count in departures.most_common()]
    print_table(console, "Departures by airport", ("airport", "departures"), counted)
    rejected = [(reason.value, f"{reasons[reason]:,}") for reason in Reason]
    print_table(console, "Rejected rows", ("reason", "rows"), [*rejected, ("in all", f"{len(file.rejected):,}")])
    say(f"work orders opened: {orders:,}")
    say(f"commands: {commands:,} in {outcome.seconds:.1f} s, {commands / outcome.seconds:,.0f} commands a second")
    if outcome.refused:
        say(f"flights that the aircraft refused: {len(outcome.refused):,}")
        say_some([f"line {flight.line}: {error.code}: {error.text}" for flight, error in outcome.refused])


def print_table(console: Console, title: str, heads: tuple[str, str], rows: Iterable[tuple[str, str]]) -> None:
    """Print a table of names and numbers."""
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None)
    table.add_column(heads[0])
    table.add_column(heads[1], justify="right")
    for row in rows:
        table.add_row(*row)
    say(title)
    console.print(table)
    say("")


def say(text: str) -> None:
    """Print a line at once, for who reads the output of a running replay through a pipe."""
    print(text, flush=True)


def say_some(lines: Sequence[str]) -> None:
    """Print lines, but no more than can be read."""
    for line in lines[:SHOWN]:
        say(f"  {line}")
    if len(lines) > SHOWN:
        say(f"  and {len(lines) - SHOWN:,} more")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Replay flights through event-sourced aircraft: each row is a command to its aircraft, and each "
        f"{CHECK_INTERVAL:,} minutes in the air lead to a work order. At the end, what was recorded is checked "
        "against the file.",
        epilog="Exit codes: 0 the replay is complete and agrees with the file; 1 it does not; "
        "2 the file or the command line is not usable; 130 interrupted (Ctrl+C once stops in order, twice at once).",
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=JANUARY, help="gzip-compressed CSV file (default: January 2013)"
    )
    parser.add_argument(
        "--show-rejected", action="store_true", help="list the rejected rows, with line number and reason"
    )
    options = parser.parse_args(arguments)
    # What the runtime logs of a forced stop is also raised, and told in one line here.
    logging.getLogger("trio_wow.runtime").setLevel(logging.CRITICAL)
    code = INTERRUPTED
    try:
        code = run(options.file, show_rejected=options.show_rejected)
    except* KeyboardInterrupt:
        # Before or after the runtime, which takes the signal while it serves.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("replay: interrupted; nothing is stored: run it again", file=sys.stderr)
    except* BrokenPipeError:
        # The reader has gone (`| head`). What is still buffered must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = DIFFERENT
    return code


if __name__ == "__main__":
    sys.exit(main())
