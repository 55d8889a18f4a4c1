"""The file: opening it, its schema, its transactions, and what SQLite's errors mean."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

from trio_wow.errors import (
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreVersionError,
)

__all__ = ["CommitError", "Database"]

SCHEMAS = (
    """
CREATE TABLE wow_schema (version INTEGER NOT NULL);
CREATE TABLE wow_streams (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    context TEXT NOT NULL,
    aggregate TEXT NOT NULL,
    id TEXT NOT NULL,
    version INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    data BLOB NOT NULL
);
CREATE UNIQUE INDEX wow_streams_version ON wow_streams (context, aggregate, id, version);
CREATE UNIQUE INDEX wow_streams_request ON wow_streams (context, aggregate, id, request_id);
CREATE TABLE wow_snapshots (
    context TEXT NOT NULL,
    aggregate TEXT NOT NULL,
    id TEXT NOT NULL,
    version INTEGER NOT NULL,
    stream_id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (context, aggregate, id)
) WITHOUT ROWID;
CREATE TABLE wow_checkpoints (processor TEXT NOT NULL PRIMARY KEY, position INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE wow_versions (
    processor TEXT NOT NULL,
    context TEXT NOT NULL,
    aggregate TEXT NOT NULL,
    id TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (processor, context, aggregate, id)
) WITHOUT ROWID
""",
    """
CREATE TABLE wow_failures (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    failure_id TEXT NOT NULL,
    function TEXT NOT NULL,
    context TEXT NOT NULL,
    aggregate TEXT NOT NULL,
    id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    version INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    error TEXT NOT NULL,
    text TEXT NOT NULL,
    traceback TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    failed_at TEXT NOT NULL
);
CREATE INDEX wow_failures_id ON wow_failures (failure_id);
CREATE UNIQUE INDEX wow_failures_event ON wow_failures (function, context, aggregate, id, version, sequence)
""",
)
"""What each version of the schema adds to the one before; a file is brought from its own to the last one."""

SCHEMA_VERSION = len(SCHEMAS)
PAUSE = 0.01


class CommitError(StoreError):
    """A commit failed in a way that does not tell whether its transaction is in the file."""


class Database:
    """One connection to the file, opened when it is first used. Not for two threads at once.

    Args:
        path: the file; made if it does not exist.
        busy_timeout: seconds to wait for somebody else's lock.
        writes: whether the connection is for writing.
    """

    def __init__(self, path: Path, busy_timeout: float, *, writes: bool) -> None:
        self._path = path
        self._busy_timeout = busy_timeout
        self._writes = writes
        self._connection: sqlite3.Connection | None = None
        self._was_locked = False

    def open(self) -> sqlite3.Connection:
        """Return the open connection.

        Raises:
            StoreError: the file cannot be opened, or is no store.
        """
        if self._connection is None:
            with self.translating():
                self._connection = self._connect()
        return self._connection

    def close(self) -> None:
        """Close the connection, if it is open; the next use opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with self.translating():
                connection.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection for a read.

        Raises:
            StoreError: the file cannot be read.
        """
        connection = self.open()
        with self.translating():
            yield connection

    @contextmanager
    def writing(self, asked_at: float) -> Iterator[sqlite3.Connection]:
        """Lend the connection for one transaction, which is committed at the end and rolled back after an error.

        The wait for somebody else's lock ends one busy timeout after `asked_at` (`time.monotonic`), so that those who
        wait behind one that gives up do not begin to wait anew.

        Errors of SQLite that the block raises are left as they are: they may be about a user's own tables.

        Raises:
            StoreError: the transaction could not begin, or could not be committed; nothing was written.
            CommitError: whether it was committed is not known.
        """
        connection = self.open()
        with self.translating():
            try:
                self._begin(connection, asked_at)
            except sqlite3.OperationalError as error:
                if _name(error) != "SQLITE_BUSY_SNAPSHOT":
                    raise
                # A cursor that a work has left unfinished holds this connection in the past: no wait ends that.
                self._discard(connection)
                connection = self.open()
                self._begin(connection, asked_at)
        try:
            yield connection
        except BaseException:
            self._roll_back(connection)
            raise
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            known = connection.in_transaction or _name(error).startswith("SQLITE_FULL")
            self._roll_back(connection)
            if known:
                raise self._translated(error) from error
            raise CommitError(str(self._path), f"it is not known whether a commit has happened ({error})") from error

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Raise SQLite's errors as a `StoreError`."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._translated(error) from error
        except UnicodeDecodeError as error:  # in a text, or in SQLite's own words on what is wrong
            raise StoreFormatError(str(self._path), f"it is damaged: what should be text is none ({error})") from error

    def _begin(self, connection: sqlite3.Connection, asked_at: float) -> None:
        if self._was_locked:
            left = max(0.0, asked_at + self._busy_timeout - monotonic())
            connection.execute(f"PRAGMA busy_timeout = {int(left * 1000)}")
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            self._was_locked = self._was_locked or _name(error).startswith(_LOCKED)
            raise
        if self._was_locked:
            connection.execute(f"PRAGMA busy_timeout = {int(self._busy_timeout * 1000)}")
            self._was_locked = False

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            # Nothing can be said of this connection any more. Closing it rolls back; the next use opens another.
            self._discard(connection)

    def _discard(self, connection: sqlite3.Connection) -> None:
        self._connection = None
        with suppress(sqlite3.Error):
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA synchronous = FULL")
            version = self._schema_version(connection)
            if version == 0 or (version <= SCHEMA_VERSION and self._writes):
                self._use_wal(connection)
            if version < SCHEMA_VERSION:
                connection.execute("BEGIN IMMEDIATE")
                version = self._schema_version(connection)
                if version < SCHEMA_VERSION:  # still, now that nobody else can change it
                    for statement in ";".join(SCHEMAS[version:]).split(";"):
                        connection.execute(statement)
                    connection.execute("INSERT INTO wow_schema VALUES (?)", (SCHEMA_VERSION,))
                    version = SCHEMA_VERSION
                connection.execute("COMMIT")
            if version > SCHEMA_VERSION:
                raise StoreVersionError(str(self._path), version, SCHEMA_VERSION)
            if not self._writes:
                connection.execute("PRAGMA query_only = ON")
        except BaseException:
            connection.close()
            raise
        return connection

    def _schema_version(self, connection: sqlite3.Connection) -> int:
        """Return the version of the file's schema; 0 for none yet."""
        with closing(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'wow_schema'")) as found:
            if found.fetchone() is None:
                return 0
        with closing(connection.execute("SELECT max(version) FROM wow_schema")) as found:
            (version,) = found.fetchone()
        if type(version) is not int or version < 1:
            raise StoreFormatError(str(self._path), f"its schema version is {version!r}; this is no store")
        return version

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        # SQLite's own busy timeout does not cover the change of the journal.
        deadline = monotonic() + self._busy_timeout
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
                if mode != "wal":
                    raise StoreError(
                        str(self._path), f"it cannot use a write-ahead log, only {mode!r}; use a local disk"
                    )
                return
            except sqlite3.OperationalError as error:
                if not _name(error).startswith(_LOCKED) or monotonic() > deadline:
                    raise
                sleep(PAUSE)

    def _translated(self, error: sqlite3.Error) -> StoreError:
        where, name = str(self._path), _name(error)
        if name.startswith(_LOCKED):
            return StoreLockedError(
                where, f"somebody else has held its lock for longer than {self._busy_timeout} s; try again"
            )
        if name.startswith("SQLITE_FULL"):
            return StoreFullError(where, "there is no room left on its disk; make some, and try again")
        if name.startswith(("SQLITE_READONLY", "SQLITE_PERM")):
            return StoreReadOnlyError(
                where, f"it cannot be written ({error}); check the permissions of it and its folder"
            )
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            return StoreFormatError(where, f"it is no SQLite database, or a damaged one ({error})")
        if name.startswith("SQLITE_CANTOPEN"):
            return self._cannot_open(where, error)
        if name == "SQLITE_ERROR":
            return StoreFormatError(where, f"its tables are not what they should be ({error})")
        return StoreError(where, f"SQLite reports {name or type(error).__name__} ({error})")

    def _cannot_open(self, where: str, error: sqlite3.Error) -> StoreError:
        if self._path.is_dir():
            return StoreFormatError(where, "it is a folder, not a file")
        if not self._path.parent.is_dir():
            return StoreError(where, f"there is no folder {self._path.parent}; make it first")
        return StoreReadOnlyError(where, f"it cannot be opened ({error}); check the permissions of it and its folder")


_LOCKED = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")


def _name(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", None) or ""
