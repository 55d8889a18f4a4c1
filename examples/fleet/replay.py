"""Replays a month of real flights through a running runtime, and checks what came of it. See `--help`."""

import argparse
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, closing, nullcontext
from itertools import islice
from math import inf
from pathlib import Path
from time import perf_counter

import trio
from attrs import evolve, frozen

from fleet_check import DETAILED, FleetCheck, FlightList
from fleet_domain import (
    CHECK_INTERVAL,
    Aircraft,
    DeparturesByAirport,
    LogFlight,
    Maintenance,
    MinutesByAircraft,
    MinutesByCarrier,
    WorkOrder,
)
from flight_data import (
    Flight,
    FlightDataError,
    FlightSurvey,
    Reason,
    RejectedRow,
    read_flights,
    read_rows,
    survey_flights,
)
from trio_wow import App, CommandGateway, Domain, InMemoryEventStore, KeyedExecutor, Runtime
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.dispatch import GroupedScheduling
from trio_wow.errors import (
    AdmissionClosedError,
    AppendOutcomeUnknownError,
    DuplicateRequestIdError,
    RuntimeStateError,
    SerializationError,
    SettingsError,
    ShutdownDeadlineError,
    StoreError,
    VersionConflictError,
    WaitAbandonedError,
)
from trio_wow.eventsourcing import EventStore, FailedExecution
from trio_wow.messages import CommandError, DomainEventStream, Serializer
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

STORE_TROUBLE: tuple[type[Exception], ...] = (
    StoreError,
    *StoreError.__subclasses__(),
    SerializationError,
    AppendOutcomeUnknownError,
    VersionConflictError,  # somebody else writes to it
)

COMPLETE, DIFFERENT, UNUSABLE, INTERRUPTED = 0, 1, 2, 130


class Feed:
    """Sends flights to a gateway: those of one aircraft one after the other, in order; those of different ones at once.

    A `BatchSource`: the executor asks for more as flights are done, so no more than its window is ever held.

    Attributes:
        logged: flights whose command succeeded.
        repeated: flights that were logged already, by an earlier run.
        refused: how many flights were refused.
        refusals: the first of them, and why.
        interrupted: whether a flight was not taken any more, because the runtime's stop had been requested.
        trouble: why the store could not be used; flights that come after it are not sent.
    """

    def __init__(self, gateway: CommandGateway, flights: Iterator[Flight]) -> None:
        self.logged = 0
        self.repeated = 0
        self.refused = 0
        self.refusals: list[tuple[Flight, CommandError]] = []
        self.interrupted = False
        self.trouble: CommandError | None = None
        self._gateway = gateway
        self._flights = flights

    @property
    def done(self) -> int:
        """Flights that have their result."""
        return self.logged + self.repeated + self.refused

    async def run(self) -> None:
        """Send them all, or all until the runtime takes no more."""
        async with KeyedExecutor(name="replay", blocking_calls="raise") as executor:
            await executor.dispatch(self, key=lambda flight: flight.tail, handler=self._log)

    async def receive_batch(self, limit: int, /) -> Sequence[Flight]:
        """See `BatchSource`."""
        await trio.lowlevel.checkpoint()
        batch = [] if self.interrupted or self.trouble else list(islice(self._flights, limit))
        if not batch:
            raise trio.EndOfChannel
        return batch

    async def _log(self, flight: Flight) -> None:
        if self.interrupted or self.trouble:
            return  # it may be the next of an aircraft whose last one failed, and must not overtake it
        command = LogFlight(flight.tail, flight.carrier, flight.origin, flight.minutes)
        try:
            result = await self._gateway.send_and_wait(command, request_id=flight.request_id, timeout=inf)
        except (AdmissionClosedError, WaitAbandonedError):
            self.interrupted = True
            return
        error = result.error
        if error is None:
            self.logged += 1
        elif error.code == DuplicateRequestIdError.__name__:
            self.repeated += 1
        elif error.undecided:
            self.trouble = error
        else:
            self.refused += 1
            if len(self.refusals) < SHOWN:
                self.refusals.append((flight, error))


class StoreTrouble:
    """Takes what the library logs of a store that cannot be used, a traceback for each command, out of the log.

    The replay tells it in one line.

    Attributes:
        last: the last such error.
    """

    def __init__(self) -> None:
        self.last: Exception | None = None

    def __call__(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter.filter`."""
        failure: FailedExecution | None = getattr(record, "failure", None)
        if failure is not None:  # a saga's command, logged for itself too
            return not any(each.__name__ in (failure.error, failure.text.partition(":")[0]) for each in STORE_TROUBLE)
        arguments = record.args if isinstance(record.args, tuple) else ()
        for error in (record.exc_info and record.exc_info[1], *arguments):
            if isinstance(error, STORE_TROUBLE):
                self.last = error
                return False
        return True


class Views:
    """What the replay shows at its end."""

    def __init__(self) -> None:
        self.carriers = MinutesByCarrier()
        self.airports = DeparturesByAirport()
        self.aircraft = MinutesByAircraft()


@frozen
class Outcome:
    """How a replay ended.

    Attributes:
        feed: what became of the flights.
        views: the projections.
        check: knows the whole file and the whole store if the replay is complete, else the store alone.
        differences: between file and record; none if the replay is not complete.
        interrupted: whether it was stopped before every flight had its result.
        forced: whether the stop was forced, so that accepted commands may be unfinished.
        seconds: from the start of the runtime until it had stopped.
    """

    feed: Feed
    views: Views
    check: FleetCheck
    differences: Sequence[str]
    interrupted: bool
    forced: bool
    seconds: float


async def replay(
    path: Path, total: int, store_path: Path | None, scheduling: GroupedScheduling | None, console: Console
) -> Outcome:
    """Serve the application, feed it the flights of a file, stop it in order, and read its store."""
    domain = Domain([Aircraft, WorkOrder])
    views = Views()
    async with open_store(store_path, domain.serializer) as store:
        processors = [views.carriers, views.airports, views.aircraft, Maintenance()]
        app = App(domain, processors, store=store, scheduling=scheduling)
        # No quiet period: what an operation causes takes its lease first, so when none is held nothing is to come.
        strict = evolve(app.settings, dispatch=evolve(app.settings.dispatch, blocking_calls="raise"))
        runtime = app.runtime(settings=strict, shutdown_quiet_period=0)
        forced = stopped_early = False
        started = perf_counter()
        with closing(read_flights(path)) as flights:
            feed = Feed(app.gateway, flights)
            try:
                async with app.serving(runtime), trio.open_nursery() as nursery:
                    nursery.start_soon(show_progress, feed, total, runtime, console)
                    await feed.run()
                    nursery.cancel_scope.cancel()
            except BaseExceptionGroup as group:
                if group.split((ShutdownDeadlineError, RuntimeStateError))[1] is not None:
                    raise
                forced = group.split(ShutdownDeadlineError)[0] is not None
                stopped_early = not forced
        seconds = perf_counter() - started
        interrupted = forced or stopped_early or feed.interrupted
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the summary is left to do
        check = FleetCheck()
        async for stream in read_all(store):
            check.record(stream)
        found = [] if interrupted or feed.trouble else await compare(path, store, check, views)
        return Outcome(feed, views, check, found, interrupted, forced, seconds)


def open_store(path: Path | None, serializer: Serializer) -> AbstractAsyncContextManager[EventStore]:
    """Return the store in a file, or one in memory."""
    return nullcontext(InMemoryEventStore(serializer)) if path is None else SqliteStore(path, serializer)


async def compare(path: Path, store: EventStore, check: FleetCheck, views: Views) -> list[str]:
    """Compare the file with what is recorded."""
    for flight in read_flights(path):
        check.expect(flight)
    details = FlightList(check.suspects()[:DETAILED])
    if details.tails:
        for flight in read_flights(path):
            details.expect(flight)
        async for stream in read_all(store):
            details.record(stream)
    return check.differences(views.carriers.minutes, views.airports.departures, views.aircraft.minutes, details)


async def read_all(store: EventStore) -> AsyncIterator[DomainEventStream]:
    """Yield every stream of a store, in order."""
    position = 0
    while page := await store.read_all(position, PAGE):
        for recorded in page:
            yield recorded.stream
        position = page[-1].position


async def show_progress(feed: Feed, total: int, runtime: Runtime, console: Console) -> None:
    """Show how far a feed has come, until cancelled: a bar on a terminal, else a line for each tenth."""
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


def run(
    path: Path,
    store_path: Path | None,
    scheduling: GroupedScheduling | None,
    troubles: StoreTrouble,
    *,
    show_rejected: bool,
) -> int:
    """Read, replay, report, check. Returns the exit code."""
    try:
        survey = survey_flights(path)
    except FlightDataError as error:
        complain(str(error))
        return UNUSABLE
    if show_rejected:
        for row in read_rows(path):
            if isinstance(row, RejectedRow):
                say(f"rejected, line {row.line}: {row.reason.value}: {row.text}")
    say(f"{path.name}: {survey.rows:,} rows, {survey.flights:,} accepted")
    say(f"replaying {survey.flights:,} flights of {len(survey.aircraft):,} aircraft")
    console = Console(highlight=False)
    outcome = trio.run(replay, path, survey.flights, store_path, scheduling, console)
    logged, orders = outcome.check.flights, outcome.check.work_orders
    done = f"{logged:,} of {survey.flights:,} flights logged, {orders:,} work orders opened"
    trouble = outcome.feed.trouble.text if outcome.feed.trouble else None
    if outcome.differences and troubles.last:
        trouble = str(troubles.last)  # of a saga's command, say, after the last flight
    if trouble:
        complain(f"{trouble}; {done}; run the same command again to finish")
        return UNUSABLE
    if outcome.interrupted:
        rest = "the store is in memory, so nothing is stored yet: run it again"
        if store_path is not None:
            rest = "run the same command again to finish"
        say(f"{'forced to stop' if outcome.forced else 'interrupted'}: {done}; {rest}")
        return INTERRUPTED
    report(survey, outcome, console)
    if foreign := logged - outcome.feed.logged - outcome.feed.repeated:
        say(f"the store holds {foreign:,} flights that are not in this file")
    say(f"check: {len(outcome.differences):,} differences between the file and what was recorded")
    say_some(outcome.differences)
    return DIFFERENT if outcome.differences else COMPLETE


def report(survey: FlightSurvey, outcome: Outcome, console: Console) -> None:
    """Print what came of a complete replay."""
    feed, views, orders = outcome.feed, outcome.views, outcome.check.work_orders
    print_table(console, "Carriers by hours flown", ("carrier", "hours"), in_hours(views.carriers.minutes))
    counted = [(airport, f"{count:,}") for airport, count in views.airports.departures.most_common()]
    print_table(console, "Departures by airport", ("airport", "departures"), counted)
    print_table(console, "Ten busiest aircraft", ("aircraft", "hours"), in_hours(views.aircraft.minutes)[:10])
    rejected = [(reason.value, f"{survey.rejected[reason]:,}") for reason in Reason]
    print_table(console, "Rejected rows", ("reason", "rows"), [*rejected, ("in all", f"{survey.rejected.total():,}")])
    say(f"work orders opened: {orders:,}")
    if feed.repeated:
        say(f"already logged: {feed.repeated:,} of {survey.flights:,} flights; nothing was stored twice")
    if feed.logged != outcome.check.flights:
        # Some of the work orders are from before, and nothing says which.
        rate = feed.done / outcome.seconds
        say(f"flights: {feed.done:,} in {outcome.seconds:.1f} s, {rate:,.0f} flights a second")
    else:
        # Each flight is a command; each work order two, one to open it and one to schedule its check.
        commands = feed.done + 2 * orders
        rate = commands / outcome.seconds
        say(f"commands: {commands:,} in {outcome.seconds:.1f} s, {rate:,.0f} commands a second")
    if feed.refused:
        say(f"flights that the aircraft refused: {feed.refused:,}")
        say_some([f"line {flight.line}: {error.code}: {error.text}" for flight, error in feed.refusals], feed.refused)


def in_hours(minutes: Counter[str]) -> list[tuple[str, str]]:
    """Return names and hours, the longest first; of equal ones the first by name."""
    ordered = sorted(minutes.items(), key=lambda each: (-each[1], each[0]))
    return [(name, f"{total / 60:,.1f}") for name, total in ordered]


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


def say_some(lines: Sequence[str], count: int | None = None) -> None:
    """Print lines, but no more than can be read; `count` says how many there are if these are only the first."""
    for line in lines[:SHOWN]:
        say(f"  {line}")
    if (rest := (len(lines) if count is None else count) - len(lines[:SHOWN])) > 0:
        say(f"  and {rest:,} more")


def complain(text: str) -> None:
    """Print a line about what went wrong."""
    print(f"replay: {text}", file=sys.stderr, flush=True)


def first_of(error: BaseException) -> BaseException:
    """Return the first error in a group, in whatever depth."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Replay flights through event-sourced aircraft: each row is a command to its aircraft, and each "
        f"{CHECK_INTERVAL:,} minutes in the air lead to a work order. At the end, what was recorded is checked "
        "against the file.",
        epilog="Exit codes: 0 the replay is complete and agrees with the file; 1 it does not; "
        "2 the file, the store or the command line is not usable; 130 interrupted (Ctrl+C once stops in order, twice "
        "at once). With --store, the same command again finishes what was interrupted, however it ended.",
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=JANUARY, help="gzip-compressed CSV file (default: January 2013)"
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="FILE",
        help="SQLite file to keep everything in; made if it does not exist (default: in memory)",
    )
    parser.add_argument(
        "--scheduling",
        choices=("keyed", "grouped"),
        default="keyed",
        help="keyed: a mailbox for each aircraft (default); grouped: a fixed number of groups that aircraft share",
    )
    parser.add_argument(
        "--show-rejected", action="store_true", help="list the rejected rows, with line number and reason"
    )
    options = parser.parse_args(arguments)
    # What the runtime logs of a forced stop is also raised, and told in one line here.
    logging.getLogger("trio_wow.runtime").setLevel(logging.CRITICAL)
    logging.getLogger("stamina").setLevel(logging.CRITICAL)
    troubles = StoreTrouble()
    code = INTERRUPTED
    try:
        with ExitStack() as undo:
            for name in ("trio_wow.dispatch", "trio_wow.eventsourcing"):  # a filter is not asked for child loggers
                logger = logging.getLogger(name)
                logger.addFilter(troubles)
                undo.callback(logger.removeFilter, troubles)
            scheduling = GroupedScheduling() if options.scheduling == "grouped" else None
            code = run(options.file, options.store, scheduling, troubles, show_rejected=options.show_rejected)
    except* KeyboardInterrupt:
        # Before or after the runtime, which takes the signal while it serves.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        complain("interrupted; run it again")
    except* OSError as group:
        # The reader has gone (`| head`), or nothing can be written. What is buffered must not fail once more at exit.
        error = first_of(group)
        if not isinstance(error, BrokenPipeError):
            complain(f"the output cannot be written: {error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = DIFFERENT
    except* (StoreError, SerializationError, SettingsError) as group:
        complain(str(first_of(group)))
        code = UNUSABLE
    return code


if __name__ == "__main__":
    sys.exit(main())
