"""The device's program: takes commands line by line, with or without a connection to the server. See `--help`."""

import argparse
import io
import sys
from collections.abc import AsyncIterator, Sequence
from math import inf
from pathlib import Path
from signal import SIGINT, SIGTERM

import trio

import stock_cli
from stock_cli import STOPPED, say
from stock_domain import Count, Pick, Receive, stock_domain
from stock_link import Sender, shown
from stock_outbox import Outbox, State, only_sender
from trio_wow import App, WowError
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.adapters.websocket import is_websocket_url, open_websocket_gateway

COMMANDS: dict[str, type[Receive | Pick | Count]] = {"receive": Receive, "pick": Pick, "count": Count}
USAGE = "a line is 'receive SHELF N', 'pick SHELF N', 'count SHELF N' or 'status'"


def parse(line: str) -> Receive | Pick | Count:
    """Read a command.

    Raises:
        ValueError: it is none.
    """
    match line.split():
        case [name, shelf, number] if name in COMMANDS and number.isdecimal():
            return COMMANDS[name](shelf, int(number))
    raise ValueError(USAGE)


async def read_lines() -> AsyncIterator[str]:
    """Yield what is typed, until the input ends."""
    # Not `sys.stdin`: the thread that waits for a line is left behind at the end, and must hold no lock then.
    with io.FileIO(0, closefd=False) as file:
        while line := await trio.to_thread.run_sync(file.readline, abandon_on_cancel=True):
            yield line.decode(errors="surrogateescape")


async def take(line: str, sender: Sender, outbox: Outbox) -> None:
    """Do what a line asks for."""
    if line.strip() == "status":
        return await show_status(outbox)
    try:
        command = parse(line)
        message = sender.checked(command)
    except (ValueError, WowError) as error:
        say(f"not kept: {error}")
    else:
        await sender.submit(message)


async def show_status(outbox: Outbox) -> None:
    """Say how many commands are where, and what the server has refused."""
    counts = await outbox.counts()
    say(
        f"{counts[State.PENDING]} to send, {counts[State.DELIVERED]} delivered, "
        f"{counts[State.REJECTED]} not done, {counts[State.REFUSED]} refused by the server"
    )
    for entry in await outbox.entries(State.REFUSED, limit=counts[State.REFUSED]):
        say(f"  {shown(entry)}: {entry.text} ({entry.code})")


async def work(db: Path, url: str, backoff_max: float) -> None:
    """Take commands and send them, until the input has ended and all is sent, or a signal comes."""
    domain = stock_domain()
    store = SqliteStore(db, domain.serializer)
    app = App(domain, store=store)
    outbox = Outbox(store, domain.serializer)
    with trio.open_signal_receiver(SIGINT, SIGTERM) as signals:
        async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as local:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_at_signal, signals, nursery.cancel_scope)
                await outbox.open()
                sender = Sender(
                    domain, outbox, local, lambda: open_websocket_gateway(url, domain), backoff_max=backoff_max, say=say
                )
                await sender.recover()
                say(f"ready: {USAGE}; Ctrl+C ends")
                await show_status(outbox)
                nursery.start_soon(sender.keep_sending, name="link")
                async for line in read_lines():
                    await take(line, sender, outbox)
                if left := (await outbox.counts())[State.PENDING]:
                    say(f"the input has ended; {left} to send, then this ends too")
                await sender.wait_sent()
                nursery.cancel_scope.cancel()
            counts = await outbox.counts()
            say(f"ended: {counts[State.NEW] + counts[State.PENDING]} left to send")


async def cancel_at_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    """Cancel a scope at the first signal. What was taken is on the disk; what is cut off is done at the next start."""
    async for _ in signals:
        scope.cancel()


def run(db: Path, url: str, backoff_max: float) -> int:
    """Run the device's program. Returns the exit code."""
    with only_sender(db):
        trio.run(work, db, url, backoff_max)
    return STOPPED


def websocket_url(text: str) -> str:
    """Check a URL."""
    if not is_websocket_url(text):
        raise argparse.ArgumentTypeError(f"must be like wss://host:port/path, not {text!r}")
    return text


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text!r}")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=f"Take commands from the standard input, and send them to the server when there is one: {USAGE}.",
        epilog="When the input ends, it goes on until all is sent. Ctrl+C ends it in order at any time; what is not "
        "sent then is sent after the next start. Exit codes: 0 ended in order; 2 the file, the command line or the "
        "disk is not usable.",
    )
    parser.add_argument("--db", type=Path, default=Path("device.db"), help="SQLite file (default: %(default)s)")
    parser.add_argument(
        "--url", type=websocket_url, default="ws://127.0.0.1:8080/", help="of the server (default: %(default)s)"
    )
    parser.add_argument(
        "--backoff-max",
        type=seconds,
        default=5.0,
        metavar="SECONDS",
        help="longest pause before the next attempt to connect (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    return stock_cli.run("stock_sender", lambda: run(options.db, options.url, options.backoff_max))


if __name__ == "__main__":
    sys.exit(main())
