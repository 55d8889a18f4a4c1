"""The device's outbox: what was asked for, in order, and what became of it."""

import enum
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import orjson
from attrs import frozen

from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.errors import StoreError, StoreLockedError
from trio_wow.messages import CommandMessage, Serializer

T = TypeVar("T")

_SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS outbox (
        ordinal INTEGER PRIMARY KEY AUTOINCREMENT,
        request_id TEXT NOT NULL UNIQUE,
        aggregate_id TEXT NOT NULL,
        command BLOB NOT NULL,
        state TEXT NOT NULL,
        code TEXT,
        text TEXT
    )
    """,
    # Most rows are done with: a look for what is not must not cost more with every day of the device's life.
    "CREATE INDEX IF NOT EXISTS outbox_state ON outbox (state, ordinal)",
)


class State(enum.Enum):
    """How far a command has come."""

    NEW = "NEW"
    """It is kept. Whether the local model has decided it is not known."""
    PENDING = "PENDING"
    """The local model has taken it. Whether the server has it is not known."""
    DELIVERED = "DELIVERED"
    """The server has taken it."""
    REJECTED = "REJECTED"
    """The local model has refused it, so it is not sent."""
    REFUSED = "REFUSED"
    """The server has refused it, though the local model had taken it."""


@frozen
class Entry:
    """A command in the outbox.

    Attributes:
        ordinal: its place in the order of all commands of the device.
        request_id: names what is wanted, here and at the server: neither stores its events twice.
        aggregate_id: the aggregate, as text.
        command: the command itself.
        code: of the error, if it was refused.
        text: of the error, if it was refused.
    """

    ordinal: int
    request_id: str
    aggregate_id: str
    command: Any
    code: str | None = None
    text: str | None = None


class Outbox:
    """A table beside the device's events, in the same SQLite file.

    It uses the connection of the store, which is in WAL mode with `synchronous=FULL`: what a method has written is on
    the disk when it returns, and survives the loss of power. Its work is done in a thread, so that nobody waits for the
    disk. Every method may raise a `StoreError`; a call that ends with `Cancelled` has written nothing.
    """

    def __init__(self, store: SqliteStore, serializer: Serializer) -> None:
        self._store = store
        self._serializer = serializer

    async def open(self) -> None:
        """Make the table, unless it is there."""
        await self._do(lambda connection: [connection.execute(statement) for statement in _SCHEMA])

    async def append(self, message: CommandMessage) -> Entry:
        """Keep a command, as the last one."""
        key, data = str(message.aggregate_id), self._serializer.dump_body(message.body)
        ordinal = await self._do(
            lambda connection: (
                connection.execute(
                    "INSERT INTO outbox (request_id, aggregate_id, command, state) VALUES (?, ?, ?, ?)",
                    (message.request_id, key, data, State.NEW.value),
                ).lastrowid
            )
        )
        assert ordinal is not None
        return Entry(ordinal, message.request_id, key, message.body)

    async def mark(self, entry: Entry, state: State, code: str | None = None, text: str | None = None) -> None:
        """Take note of what became of a command."""
        await self._do(
            lambda connection: connection.execute(
                "UPDATE outbox SET state = ?, code = ?, text = ? WHERE ordinal = ?",
                (state.value, code, text, entry.ordinal),
            )
        )

    async def entries(self, state: State, *, after: int = 0, limit: int = 100) -> Sequence[Entry]:
        """Return the first `limit` commands in a state with ordinals above `after`, in order.

        Raises:
            SerializationError: one is of a class, or a shape, that this version of the program does not know.
        """
        rows = await self._do(
            lambda connection: connection.execute(
                "SELECT ordinal, request_id, aggregate_id, command, code, text FROM outbox "
                "WHERE state = ? AND ordinal > ? ORDER BY ordinal LIMIT ?",
                (state.value, after, limit),
            ).fetchall()
        )
        return [
            Entry(ordinal, request_id, key, self._serializer.load_body(orjson.loads(data), "the outbox"), *error)
            for ordinal, request_id, key, data, *error in rows
        ]

    async def counts(self) -> Counter[State]:
        """Return how many commands are in each state."""
        rows = await self._do(
            lambda connection: connection.execute("SELECT state, count(*) FROM outbox GROUP BY state").fetchall()
        )
        return Counter({State(state): count for state, count in rows})

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        done: list[T] = []
        await self._store.transact(lambda connection: done.append(work(connection)))
        return done[0]


@contextmanager
def only_sender(path: Path) -> Iterator[None]:
    """Keep other senders off a file while the block runs: two would each decide and send in an order of their own.

    The lock is SQLite's, on a file of its own beside it: it goes with the process, however that ends.

    Raises:
        StoreLockedError: another one has it.
        StoreError: the lock cannot be taken.
    """
    if path.is_dir():
        raise StoreError(str(path), "it is a folder, not a file")
    real = Path(os.path.realpath(path))  # a link to the file is the same file; `resolve` fails on a circle of links
    beside = real.with_name(f"{real.name}-sender")
    with ExitStack() as undo:
        try:
            lock = undo.enter_context(closing(sqlite3.connect(beside, timeout=0, isolation_level=None)))
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            if error.sqlite_errorname == "SQLITE_BUSY":
                raise StoreLockedError(str(path), "another sender uses it; end that one first") from None
            raise StoreError(str(path), f"its lock, {beside}, cannot be taken ({error})") from error
        yield
