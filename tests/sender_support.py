"""A link that can be cut where a test wants it, and the programs of the local-first sender."""

import json
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fleet_support import ENVIRONMENT
from support import PythonProcess

import stock_sender
import stock_server

SENDER, SERVER = Path(stock_sender.__file__), Path(stock_server.__file__)


class Link:
    """A TCP proxy between device and server.

    It is closed at first: who connects is refused by the system. The port stays the same.

    Attributes:
        port: where the device connects.
        holds_answers: whether what the server says after the opening handshake is kept back, for connections that are
            made from now on.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.holds_answers = False
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/"

    def open(self, target: int) -> None:
        """Let connections through to a port."""
        self._listener = listener = socket.create_server(("127.0.0.1", self.port))
        self._start(self._accept, listener, target)

    def refuse(self) -> None:
        """Refuse further connections; those that are open stay."""
        if self._listener is not None:
            with suppress(OSError):  # it has ended by itself
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def cut(self) -> None:
        """Refuse further connections, and reset those that are open: what is on the way is lost."""
        self.refuse()
        for each in self._sockets:
            with suppress(OSError):  # the other side was first
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()
        self._sockets, self._threads = [], []

    def _start(self, function: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, target: int) -> None:
        with suppress(OSError):
            while True:
                device, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", target))
                self._sockets += [device, server]
                self._start(self._pump, device, server, False)
                self._start(self._pump, server, device, self.holds_answers)

    def _pump(self, source: socket.socket, sink: socket.socket, holds: bool) -> None:
        seen = b""
        with suppress(OSError):
            while data := source.recv(65_536):
                if holds:
                    seen += data
                    end = seen.find(b"\r\n\r\n") + 4
                    data = data[: max(0, end - len(seen) + len(data))] if end > 3 else data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def linked() -> Iterator[Link]:
    link = Link()
    try:
        yield link
    finally:
        link.cut()


class Sender(PythonProcess):
    """The device's program."""

    def __init__(self, db: Path, url: str, *, script: Path = SENDER) -> None:
        arguments = ("--db", db, "--url", url, "--backoff-max", "0.05")
        super().__init__(script, *arguments, env=ENVIRONMENT, stdin=subprocess.PIPE)


class Server(PythonProcess):
    """The server's program, once it serves."""

    def __init__(self, db: Path) -> None:
        super().__init__(SERVER, "--db", db, "--port", "0", env=ENVIRONMENT)
        self.port = int(self.read_until("serving on").partition("127.0.0.1:")[2].partition("/")[0])


def events_in(path: Path) -> list[tuple[str, int, str, list[dict[str, Any]]]]:
    """Return what both sides must have in common, without the help of the example."""
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            "SELECT id, version, request_id, data FROM wow_streams ORDER BY id, version"
        ).fetchall()
    connection.close()
    return [(id, version, request_id, json.loads(data)["events"]) for id, version, request_id, data in rows]


def changed_sender(folder: Path, text: str) -> Path:
    """Write a device's program that is changed."""
    path = folder / "driver.py"
    head = f"import os, signal, sys; sys.path.insert(0, {str(SENDER.parent)!r})\nimport stock_sender\n"
    path.write_text(f"{head}{text}\nsys.exit(stock_sender.main())\n")
    return path


def compare(*paths: Path) -> subprocess.CompletedProcess[str]:
    """Run the example's own comparison."""
    script = SENDER.with_name("stock_compare.py")
    return subprocess.run([sys.executable, script, *paths], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
