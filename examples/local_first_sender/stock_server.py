"""The server: takes commands over websockets, and keeps what happens in a SQLite file. See `--help`."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

import stock_cli
from stock_cli import STOPPED, say
from stock_domain import Shelf, stock_domain
from trio_wow import App, StateEvent, event_processor, on_state_event
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.adapters.websocket import WebsocketGateway


@event_processor
class Display:
    """Shows each change of a shelf; after a crash perhaps once more."""

    @on_state_event
    async def changed(self, event: StateEvent[Shelf]) -> None:
        """Show what is there now."""
        for each in event.stream.events:
            say(f"{event.state.id}: {type(each).__name__.lower()} {each.quantity}, {event.state.quantity} left")


class Announcement(trio.TaskStatus[Any]):
    """Says that the server can be used, once it can."""

    def __init__(self, gateway: WebsocketGateway, host: str) -> None:
        self._gateway = gateway
        self._host = host

    def started(self, value: object = None) -> None:  # noqa: ARG002 - the runtime is known
        """See `trio.TaskStatus`."""
        say(f"serving on ws://{self._host}:{self._gateway.port}/; Ctrl+C stops it")


def serve(db: Path, host: str, port: int) -> int:
    """Serve until a signal comes. Returns the exit code."""
    domain = stock_domain()
    app = App(domain, [Display()], store=SqliteStore(db, domain.serializer))
    gateway = WebsocketGateway(domain, app.gateway, host=host, port=port)
    app.add_gateway(gateway)
    trio.run(partial(app.runtime().serve, task_status=Announcement(gateway, host)))
    return STOPPED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Keep the stock, and take commands for it from devices (stock_sender.py).",
        epilog="Exit codes: 0 stopped in order (Ctrl+C once; twice stops at once); 2 the file or the address is not "
        "usable. Everybody who can connect may send; docs/websocket.md says how to ask who it is.",
    )
    parser.add_argument("--db", type=Path, default=Path("server.db"), help="SQLite file (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="0 for a free one (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not 0 <= options.port < 65_536:
        parser.error(f"argument --port: must be 0 to 65535, not {options.port}")
    return stock_cli.run("stock_server", lambda: serve(options.db, options.host, options.port))


if __name__ == "__main__":
    sys.exit(main())
