"""The store."""

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from datetime import datetime
from functools import partial
from inspect import isawaitable
from math import inf
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

import trio

from trio_wow.adapters.sqlite._database import CommitError, Database
from trio_wow.adapters.sqlite._lane import Lane
from trio_wow.errors import (
    AppendOutcomeUnknownError,
    DuplicateRequestIdError,
    InvalidIdentifierError,
    SerializationError,
    StoreError,
    StoreFormatError,
    VersionConflictError,
)
from trio_wow.eventsourcing import FailedExecution, RecordedStream, Recording, Snapshot, storable_text
from trio_wow.execution import refuse_awaitable
from trio_wow.messages import AggregateId, DomainEventStream, Serializer
from trio_wow.runtime import RuntimeContext

__all__ = ["SqliteStore"]

_LAST = 2**63 - 1

# All that an append needs when it succeeds: each call of SQLite gives the interpreter up and has to take it back.
# The parameters have names, as Python 3.12 takes numbered ones for such.
_APPEND = """
INSERT INTO wow_streams (context, aggregate, id, version, request_id, data)
SELECT :context, :aggregate, :id, :version, :request_id, :data
WHERE :version = 1 + coalesce(
        (SELECT max(version) FROM wow_streams WHERE context = :context AND aggregate = :aggregate AND id = :id), 0
    )
    AND NOT EXISTS (
        SELECT 1 FROM wow_streams
        WHERE context = :context AND aggregate = :aggregate AND id = :id AND request_id = :request_id
    )
"""
_WHERE = "WHERE context = ? AND aggregate = ? AND id = ?"
_OF = f"FROM wow_streams {_WHERE}"


class SqliteStore:
    """Keeps streams, snapshots, checkpoints and failures in one SQLite file: the store of one machine.

    An `EventStore`, `SnapshotStore`, `CheckpointStore` and `FailureStore`; `load` and the like wait in threads, never
    on the event loop. What it writes is in tables that begin with `wow_`; a program may have tables of its own in the
    same file. A file that an older version of this package has written is brought to the present schema when it is
    opened; older versions refuse it from then on.

    The file is in WAL mode with `synchronous=FULL`: when `append` returns, the stream is on the disk and survives the
    loss of power, as far as the disk keeps its own promises. While it is open there are two more files beside it
    (`-wal`, `-shm`). It must be on a local disk: WAL does not work over a network. Several processes may use one file;
    one writes at a time, the others wait for up to `busy_timeout`. Nobody tells one process what another appends: an
    `App` that serves meanwhile does not see it, and its checkpoints stay before it, until it is started again
    (`docs/concepts.md`, "Durability").

    A runtime component too: a runtime that has it opens it when it starts and closes it when it stops. Used outside of
    one, it opens when it is first used; then close it with `aclose` or `async with`. After closing it can be used
    again.

    Args:
        path: the file; it is made if it does not exist, its folder is not.
        serializer: the application's (`Domain.serializer`).
        busy_timeout: seconds to wait for a lock that somebody else holds; positive and finite.

    Raises:
        ValueError: `busy_timeout` is out of its range, or `path` names no file.

    All methods raise, before anything was written:
        StoreFormatError: the file is no SQLite database, or is damaged.
        StoreVersionError: a newer version of this package has written it.
        StoreReadOnlyError: the file or its folder cannot be written.
        StoreLockedError: somebody else held the lock longer than `busy_timeout`. Worth another try.
        StoreFullError: the disk is full.
        StoreError: the disk, or SQLite, reports something else.
    """

    name = "sqlite-store"
    transaction_type: type = sqlite3.Connection

    def __init__(self, path: str | os.PathLike[str], serializer: Serializer, *, busy_timeout: float = 5.0) -> None:
        if not 0 < busy_timeout < inf:
            raise ValueError(f"busy_timeout must be a positive number of seconds, not {busy_timeout!r}")
        name = os.fspath(path)
        if not name or name == ":memory:" or "\0" in name:
            raise ValueError(f"path must name a file, not {name!r}; for a store in memory use InMemoryEventStore")
        self.path = Path(name).absolute()  # the same file after a change of the working folder
        self._serializer = serializer
        # Reads do not wait for writes: in WAL mode a second connection sees what is committed.
        self._writer = Database(self.path, busy_timeout, writes=True)
        self._reader = Database(self.path, busy_timeout, writes=False)
        self._writes = Lane()
        self._reads = Lane()

    def __repr__(self) -> str:
        return f"<SqliteStore {str(self.path)!r}>"

    async def open(self) -> None:
        """Open the file now, rather than when it is first used."""
        await self._writes.run(self._writer.open)
        await self._reads.run(self._reader.open)

    async def aclose(self) -> None:
        """Close the file once what was asked for before is done. Idempotent; a later use opens it again.

        Cancellation: it is closed all the same.
        """
        with trio.CancelScope(shield=True):
            try:
                await self._reads.run(self._reader.close)
            finally:
                await self._writes.run(self._writer.close)
        await trio.lowlevel.checkpoint_if_cancelled()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def append(self, stream: DomainEventStream) -> None:
        """See `EventStore.append`."""
        try:
            data = self._serializer.dump_stream(stream)
        except SerializationError:
            await trio.lowlevel.checkpoint()  # this method is one, however it ends
            raise
        row = {
            "context": stream.aggregate_id.context,
            "aggregate": stream.aggregate_id.aggregate,
            "id": stream.aggregate_id.id,
            "version": stream.version,
            "request_id": stream.request_id,
            "data": data,
        }
        await self._writes.run(partial(self._append, monotonic(), stream, row))

    async def load(
        self, aggregate_id: AggregateId, *, after: int = 0, until: int | None = None
    ) -> Sequence[DomainEventStream]:
        """See `EventStore.load`."""
        query = f"SELECT version, data {_OF} AND version > ? AND version <= ? ORDER BY version"
        rows = await self._fetch(
            query, (*_key(aggregate_id), _within(after), _within(_LAST if until is None else until))
        )
        return [self._read(aggregate_id, version, data) for version, data in rows]

    async def load_request(self, aggregate_id: AggregateId, request_id: str) -> DomainEventStream | None:
        """See `EventStore.load_request`."""
        rows = await self._fetch(f"SELECT version, data {_OF} AND request_id = ?", (*_key(aggregate_id), request_id))
        for version, data in rows:
            return self._read(aggregate_id, version, data)
        return None

    async def read_all(self, after: int, limit: int) -> Sequence[RecordedStream]:
        """See `EventStore.read_all`."""
        rows = await self._fetch(
            "SELECT position, context, aggregate, id, version, data FROM wow_streams "
            "WHERE position > ? ORDER BY position LIMIT ?",
            (_within(after), _within(limit)),
        )
        return [self._recorded(*row) for row in rows]

    async def version_at(self, aggregate_id: AggregateId, position: int) -> int:
        """See `EventStore.version_at`."""
        query = f"SELECT version {_OF} AND position <= ? ORDER BY version DESC LIMIT 1"
        for (version,) in await self._fetch(query, (*_key(aggregate_id), _within(position))):
            return int(version)
        return 0

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        """See `SnapshotStore.save_snapshot`."""
        await self._execute(
            "INSERT INTO wow_snapshots (context, aggregate, id, version, stream_id, revision, data) "
            "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (context, aggregate, id) DO UPDATE "
            "SET version = excluded.version, stream_id = excluded.stream_id, revision = excluded.revision, "
            "data = excluded.data WHERE excluded.version > version",
            (*_key(snapshot.aggregate_id), snapshot.version, snapshot.stream_id, snapshot.revision, snapshot.data),
        )

    async def load_snapshot(self, aggregate_id: AggregateId) -> Snapshot | None:
        """See `SnapshotStore.load_snapshot`."""
        query = f"SELECT version, stream_id, revision, data FROM wow_snapshots {_WHERE}"  # noqa: S608
        for row in await self._fetch(query, _key(aggregate_id)):
            return Snapshot(aggregate_id, *row)
        return None

    async def discard_snapshot(self, snapshot: Snapshot) -> None:
        """See `SnapshotStore.discard_snapshot`."""
        await self._execute(
            f"DELETE FROM wow_snapshots {_WHERE} AND version = ? AND stream_id = ? AND revision = ? AND data = ?",  # noqa: S608
            (*_key(snapshot.aggregate_id), snapshot.version, snapshot.stream_id, snapshot.revision, snapshot.data),
        )

    async def load_checkpoint(self, processor: str) -> int:
        """See `CheckpointStore.load_checkpoint`."""
        for (position,) in await self._fetch("SELECT position FROM wow_checkpoints WHERE processor = ?", (processor,)):
            return int(position)
        return 0

    async def save_checkpoint(self, processor: str, position: int) -> None:
        """See `CheckpointStore.save_checkpoint`."""
        await self._execute(_CHECKPOINT, (processor, position))

    async def load_version(self, processor: str, aggregate_id: AggregateId) -> int:
        """See `CheckpointStore.load_version`."""
        for (version,) in await self._fetch(_VERSION, (processor, *_key(aggregate_id))):
            return int(version)
        return 0

    async def handle_once(
        self,
        processor: str,
        aggregate_id: AggregateId,
        version: int,
        position: int,
        work: Callable[[sqlite3.Connection], object],
    ) -> bool:
        """See `CheckpointStore.handle_once`. The transaction is a `sqlite3.Connection`.

        A commit, a rollback, `executescript` (which commits), ATTACH, DETACH and a PRAGMA that changes the connection
        raise a `sqlite3.DatabaseError` in `work`; savepoints are allowed. `work` keeps neither the connection nor a
        cursor: the file is not closed while one is unfinished. `OR ROLLBACK` cannot be refused: whoever uses it must
        let its error out. A `StoreError` of the commit itself leaves open whether the work is kept; the same call
        again does it only if it is not.

        Raises:
            TypeError: `work` returned an awaitable, which nothing in a thread awaits; nothing was written.
        """
        asked_at, key, work = monotonic(), _key(aggregate_id), _in_this_context(work)

        def handle_once() -> bool:
            with self._writer.writing(asked_at) as connection:
                with self._writer.translating():
                    handled = connection.execute(_VERSION, (processor, *key)).fetchone()
                    if handled is not None and handled[0] >= version:
                        return False
                    connection.execute(
                        "INSERT INTO wow_versions (processor, context, aggregate, id, version) VALUES (?, ?, ?, ?, ?) "
                        "ON CONFLICT (processor, context, aggregate, id) DO UPDATE SET version = excluded.version",
                        (processor, *key, version),
                    )
                    if position:
                        connection.execute(_CHECKPOINT, (processor, position))
                self._do(connection, work, f"the work of {processor}")
            return True

        return await self._writes.run(handle_once)

    async def transact(self, work: Callable[[sqlite3.Connection], object]) -> None:
        """See `CheckpointStore.transact`. What `handle_once` says of a `work` and of a commit is true here too.

        Raises:
            TypeError: `work` returned an awaitable, which nothing in a thread awaits; nothing was written.
        """
        asked_at, work = monotonic(), _in_this_context(work)

        def transact() -> None:
            with self._writer.writing(asked_at) as connection:
                self._do(connection, work, "the work of a transaction")

        await self._writes.run(transact)

    async def record(self, failure: FailedExecution, /) -> Recording:
        """See `FailureRecorder.record`. Returns `RECORDED` when the failure is on the disk."""
        await self._execute(
            "INSERT INTO wow_failures (failure_id, function, context, aggregate, id, tenant, version, sequence, "
            "error, text, traceback, attempts, failed_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (function, context, aggregate, id, version, sequence) DO UPDATE SET tenant = excluded.tenant, "
            "error = excluded.error, text = excluded.text, traceback = excluded.traceback, "
            "attempts = attempts + excluded.attempts, failed_at = excluded.failed_at",
            (
                failure.id,
                failure.function,
                *_key(failure.aggregate_id),
                failure.aggregate_id.tenant,
                failure.version,
                failure.sequence,
                failure.error,
                failure.text,
                failure.traceback,
                failure.attempts,
                failure.failed_at.isoformat(),
            ),
        )
        return Recording.RECORDED

    async def failures(
        self, *, limit: int = 100, function: str | None = None, aggregate_id: AggregateId | None = None
    ) -> Sequence[FailedExecution]:
        """See `FailureStore.failures`."""
        where: dict[str, str] = {}
        if function is not None:
            where["function"] = storable_text(function)
        if aggregate_id is not None:
            where.update(zip(("context", "aggregate", "id"), _key(aggregate_id), strict=True))
        return await self._failures(where, limit)

    async def failure(self, id: str, /) -> FailedExecution | None:
        """See `FailureStore.failure`."""
        for failure in await self._failures({"failure_id": storable_text(id)}, 1):
            return failure
        return None

    async def resolve_failure(self, id: str, /) -> bool:
        """See `FailureStore.resolve_failure`."""
        return await self._execute("DELETE FROM wow_failures WHERE failure_id = ?", (storable_text(id),)) > 0

    async def prepare(self, _context: RuntimeContext, /) -> None:
        """See `RuntimeComponent.prepare`. Opens the file."""
        await self.open()

    def start(self) -> None:
        """See `RuntimeComponent.start`."""

    def quiesce(self) -> None:
        """See `RuntimeComponent.quiesce`. The components that use it stop before it does."""

    async def stop(self) -> None:
        """See `RuntimeComponent.stop`. Closes the file."""
        await self.aclose()

    def force_stop(self) -> None:
        """See `RuntimeComponent.force_stop`. What a thread has begun is finished; the file stays open."""

    def _append(self, asked_at: float, stream: DomainEventStream, row: Mapping[str, Any]) -> None:
        aggregate_id = stream.aggregate_id
        try:
            with self._writer.writing(asked_at) as connection, self._writer.translating():
                if connection.execute(_APPEND, row).rowcount == 1:
                    return
                key = _key(aggregate_id)
                stored = connection.execute(
                    f"SELECT version {_OF} AND request_id = ?", (*key, stream.request_id)
                ).fetchone()
                if stored is not None:
                    raise DuplicateRequestIdError(aggregate_id, stream.request_id, stored[0])
                (last,) = connection.execute(f"SELECT coalesce(max(version), 0) {_OF}", key).fetchone()
                raise VersionConflictError(aggregate_id, stream.version - 1, last)
        except CommitError as error:
            raise AppendOutcomeUnknownError(aggregate_id, stream.version) from error

    def _do(self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], object], whose: str) -> None:
        """Lend the connection to a user's work, inside of the transaction."""
        row_factory, text_factory = connection.row_factory, connection.text_factory
        connection.set_authorizer(_leaves_the_connection_alone)
        try:
            result = work(connection)
            if isawaitable(result):
                refuse_awaitable(result, f"{whose} returned an awaitable; make it a plain function")
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorname", None) == "SQLITE_AUTH":
                error.add_note("The store ends the transaction of a work, whose connection is lent: do not change it.")
            raise
        finally:
            connection.set_authorizer(None)
            connection.row_factory, connection.text_factory = row_factory, text_factory
        if not connection.in_transaction:
            raise StoreError(str(self.path), "a statement of the work ended its transaction; use no OR ROLLBACK")

    async def _fetch(self, query: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        def fetch() -> list[tuple[Any, ...]]:
            with self._reader.reading() as connection:
                return connection.execute(query, parameters).fetchall()

        return await self._reads.run(fetch)

    async def _execute(self, statement: str, parameters: tuple[Any, ...]) -> int:
        """Run a statement that writes, and return how many rows it has changed."""
        asked_at = monotonic()

        def execute() -> int:
            with self._writer.writing(asked_at) as connection, self._writer.translating():
                return connection.execute(statement, parameters).rowcount

        return await self._writes.run(execute)

    async def _failures(self, where: Mapping[str, str], limit: int) -> list[FailedExecution]:
        condition = " AND ".join(f"{column} = ?" for column in where) or "TRUE"
        query = f"SELECT {_FAILURE} FROM wow_failures WHERE {condition} ORDER BY position LIMIT ?"  # noqa: S608
        rows = await self._fetch(query, (*where.values(), _within(limit)))
        return [self._failed(*row) for row in rows]

    def _failed(
        self,
        position: int,
        failure_id: str,
        function: str,
        context: str,
        aggregate: str,
        id: str,
        tenant: str,
        version: int,
        sequence: int,
        error: str,
        text: str,
        traceback: str,
        attempts: int,
        failed_at: str,
    ) -> FailedExecution:
        try:
            return FailedExecution(
                id=failure_id,
                function=function,
                aggregate_id=AggregateId(context, aggregate, id, tenant),
                version=version,
                sequence=sequence,
                error=error,
                text=text,
                traceback=traceback,
                attempts=attempts,
                failed_at=datetime.fromisoformat(failed_at),
            )
        except (InvalidIdentifierError, TypeError, ValueError) as problem:
            raise StoreFormatError(str(self.path), f"it is damaged at failure {position} ({problem})") from problem

    def _recorded(
        self, position: int, context: str, aggregate: str, id: str, version: int, data: bytes
    ) -> RecordedStream:
        try:
            aggregate_id = AggregateId(context, aggregate, id)
        except InvalidIdentifierError as error:
            raise StoreFormatError(str(self.path), f"it is damaged at position {position} ({error})") from error
        return RecordedStream(position, aggregate_id, version, partial(self._read, aggregate_id, version, data))

    def _read(self, aggregate_id: AggregateId, version: int, data: bytes) -> DomainEventStream:
        return self._serializer.load_stream(data, f"version {version} of {aggregate_id} in {self.path}")


_CHECKPOINT = (
    "INSERT INTO wow_checkpoints (processor, position) VALUES (?, ?) "
    "ON CONFLICT (processor) DO UPDATE SET position = excluded.position WHERE excluded.position > position"
)
_FAILURE = (
    "position, failure_id, function, context, aggregate, id, tenant, version, sequence, "
    "error, text, traceback, attempts, failed_at"
)
_VERSION = "SELECT version FROM wow_versions WHERE processor = ? AND context = ? AND aggregate = ? AND id = ?"


def _in_this_context(work: Callable[[sqlite3.Connection], object]) -> Callable[[sqlite3.Connection], object]:
    """Run a work with the caller's context; the thread has that of whoever leads the lane."""
    context = copy_context()
    return lambda connection: context.run(work, connection)


def _key(aggregate_id: AggregateId) -> tuple[str, str, str]:
    return (aggregate_id.context, aggregate_id.aggregate, aggregate_id.id)


def _within(number: int) -> int:
    """Bring a bound of a query into the range of SQLite's integers, which are all that it is compared with."""
    return max(-_LAST, min(number, _LAST))


_LENT = (sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)
# What takes a value and leaves the connection as it is; other pragmas would outlast the transaction.
_PRAGMAS = {
    "defer_foreign_keys",
    "foreign_key_check",
    "foreign_key_list",
    "index_info",
    "index_list",
    "index_xinfo",
    "table_info",
    "table_list",
    "table_xinfo",
    "user_version",
}


def _leaves_the_connection_alone(action: int, name: str | None, value: str | None, *_: object) -> int:
    sets = action == sqlite3.SQLITE_PRAGMA and value is not None and (name or "").lower() not in _PRAGMAS
    return sqlite3.SQLITE_DENY if sets or action in _LENT else sqlite3.SQLITE_OK
