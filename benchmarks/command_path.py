"""What a command costs from its sender to its result: trio-wow beside packages and hand-written floors.

Each sender sends a bank-account command and waits for its result (`send_and_wait`, stage `PROCESSED`): see
`command_contenders.py` for what each contender does and leaves out. On one account the commands queue up behind one
another, and whoever replays all events for each command pays for it; on 1,000 accounts each has a few.

How it measures: the contenders take turns, round by round, in one process, so that what else the machine does falls on
all of them. Opening the accounts is not timed. After each run the balances are compared with what was withdrawn, and
one withdrawal too much must have been refused, or the program ends with status 1. `gc.collect()` comes before each run
and the collector stays on. Shown are the median, the least and the most of all rounds in commands a second, and the
throughput relative to the floor with JSON and as many senders, and to `eventsourcing` at its defaults.

Run it with `--quick` to see that it works. The packages come with the extra `bench`; one that is not there is reported
as missing.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from command_contenders import COMMAND_CONTENDERS, FUNDS, CommandContender, Load, Outcome
from keyed_dispatch import WrongResultError, at_least_one, check_json, machine, write_json

FLOOR, DEFAULTS = "floor-json", "eventsourcing"
ACCOUNTS = (1, 1_000)
SENDERS = (1, 32, 256)
ROUNDS, QUICK_ROUNDS = 5, 1
COMMANDS, QUICK_COMMANDS = 20_000, 500
MOST_ON_ONE = 500
"""Commands on one account: half of the contenders replay all that came before for each."""


def check(contender: CommandContender, load: Load, outcome: Outcome) -> None:
    """Compare what a contender came to with what was asked of it.

    Raises:
        WrongResultError: it differs.
    """
    expected = [FUNDS - len(range(number, load.commands, load.accounts)) for number in range(load.accounts)]
    if outcome.balances != expected:
        raise WrongResultError(f"{contender.name} has other balances than the commands lead to")
    if not outcome.refused:
        raise WrongResultError(f"{contender.name} has overdrawn an account")


@frozen
class Rate:
    """What one contender reached, in commands a second."""

    accounts: int
    contender: str
    load: Load
    median: float
    min: float
    max: float
    of_floor: float | None
    of_defaults: float | None
    samples: list[float]


def measure(accounts: int, options: argparse.Namespace) -> list[Rate]:
    """Time the contenders round by round, each with every number of senders that it takes."""
    commands = min(options.commands, MOST_ON_ONE) if accounts == 1 else options.commands
    runs: dict[tuple[str, int], tuple[CommandContender, Load]] = {}
    for contender in COMMAND_CONTENDERS:
        if contender.installed and contender.name in options.contender:
            for senders in options.senders:
                load = contender.able(Load(accounts, commands, senders))
                runs[contender.name, load.senders] = contender, load
    samples: dict[tuple[str, int], list[float]] = {run: [] for run in runs}
    for _ in range(options.rounds):
        for run, (contender, load) in runs.items():
            gc.collect()
            outcome = contender.run(load)
            check(contender, load, outcome)
            samples[run].append(load.commands / outcome.seconds)
    medians = {run: statistics.median(taken) for run, taken in samples.items()}
    defaults = medians.get((DEFAULTS, 1))
    rates = []
    for run, (contender, load) in runs.items():
        floor = medians.get((FLOOR, load.senders))
        rates.append(
            Rate(
                accounts=accounts,
                contender=contender.name,
                load=load,
                median=medians[run],
                min=min(samples[run]),
                max=max(samples[run]),
                of_floor=medians[run] / floor if floor else None,
                of_defaults=medians[run] / defaults if defaults else None,
                samples=samples[run],
            )
        )
    return rates


def print_rates(accounts: int, rates: Sequence[Rate], options: argparse.Namespace) -> None:
    """Print a line for each chosen contender and number of senders, measured or not."""
    print(f"\n{accounts:,} {'account' if accounts == 1 else 'accounts'}: commands a second")
    print(f"  {'':22} {'senders':>7} {'median':>8} {'min':>8} .. {'max':<8} {'of floor':>9} {'of defaults':>11}")
    for contender in COMMAND_CONTENDERS:
        if contender.name not in options.contender:
            continue
        if not contender.installed:
            print(f"  {contender.name:22} {'-':>7}  missing (extra: bench)")
        for rate in rates:
            if rate.contender != contender.name:
                continue
            floor = "-" if rate.of_floor is None else f"{rate.of_floor:.2f} x"
            defaults = "-" if rate.of_defaults is None else f"{rate.of_defaults:.2f} x"
            less = f"   {rate.load.accounts} accounts" if rate.load.accounts < accounts else ""
            print(
                f"  {contender.name:22} {rate.load.senders:7} {rate.median:8,.0f} {rate.min:8,.0f} .. "
                f"{rate.max:<8,.0f} {floor:>9} {defaults:>11}{less}",
                flush=True,
            )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what is wrong with it ends the program with status 2."""
    described = "\n".join(f"  {contender.name:22} {contender.about}" for contender in COMMAND_CONTENDERS)
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"contenders:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [contender.name for contender in COMMAND_CONTENDERS]
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_COMMANDS} commands, {QUICK_ROUNDS} round")
    parser.add_argument(
        "--commands", type=at_least_one, help=f"of a run ({COMMANDS:,}); at most {MOST_ON_ONE} on one account"
    )
    parser.add_argument("--rounds", type=at_least_one, help=f"timed rounds ({ROUNDS})")
    parser.add_argument("--accounts", nargs="+", type=at_least_one, default=ACCOUNTS, help="1 and 1,000 by default")
    parser.add_argument("--senders", nargs="+", type=at_least_one, default=SENDERS, help="1, 32 and 256 by default")
    parser.add_argument("--contender", nargs="+", choices=names, default=names, metavar="NAME", help="all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    options = parser.parse_args(arguments)
    options.commands = options.commands or (QUICK_COMMANDS if options.quick else COMMANDS)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    check_json(parser, options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    options = parse(arguments)
    facts = machine()
    missing = [contender.name for contender in COMMAND_CONTENDERS if not contender.installed]
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{options.commands:,} commands, {options.rounds} rounds; collected before each run, gc on")
    print(f"missing: {', '.join(missing) or 'none'}")
    report: dict[str, Any] = {"machine": facts, "commands": options.commands, "missing": missing, "rates": []}
    try:
        for accounts in options.accounts:
            rates = measure(accounts, options)
            print_rates(accounts, rates, options)
            report["rates"] += [asdict(rate) for rate in rates]
    except WrongResultError as error:
        print(error, file=sys.stderr)
        return 1
    write_json(options, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
