"""Failed executions and what keeps them: each store in the same way, and SQLite over real files."""

import logging
import re
import sqlite3
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from test_eventsourcing import cancelled_at, stream
from test_sqlite_store import DOMAIN, child, order, rows, succeed, write_lock

from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.errors import StoreFormatError, StoreLockedError
from trio_wow.eventsourcing import (
    FailedExecution,
    FailureRecorder,
    FailureStore,
    InMemoryFailureStore,
    LoggingFailureRecorder,
    Recording,
)
from trio_wow.messages import AggregateId

MAILER = "event-dispatcher/Mailer.paid"
DOCS = Path(__file__).parents[1] / "docs" / "failures.md"
A, B = order("A"), order("B")


def failure(
    aggregate_id: AggregateId = A, version: int = 1, *, function: str = MAILER, sequence: int = 1, **changes: Any
) -> FailedExecution:
    made = FailedExecution.of(
        ConnectionError("no mail today"),
        function=function,
        aggregate_id=aggregate_id,
        version=version,
        sequence=sequence,
        attempts=4,
    )
    return evolve(made, **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[FailureStore]:
    if request.param == "memory":
        yield InMemoryFailureStore()
    else:
        async with SqliteStore(path, DOMAIN.serializer) as sqlite_store:
            yield sqlite_store


class TestFailedExecution:
    def test_of_an_error(self) -> None:
        before = datetime.now(UTC)
        try:
            raise ConnectionError("no mail today")
        except ConnectionError as error:
            made = FailedExecution.of(error, function=MAILER, aggregate_id=A, version=2, sequence=3, attempts=4)
        assert (made.error, made.text) == ("ConnectionError", "no mail today")
        assert "in test_of_an_error" in made.traceback
        assert (made.function, made.aggregate_id, made.version, made.sequence, made.attempts) == (MAILER, A, 2, 3, 4)
        assert before <= made.failed_at <= datetime.now(UTC)
        assert made.failed_at.tzinfo is UTC
        assert made.id != failure().id

    def test_long_texts_are_cut_and_the_end_of_a_traceback_is_kept(self) -> None:
        made = None
        for length in (1_999, 2_000, 2_001, 30_000):
            text = "x" * (length - 1) + "y"
            made = FailedExecution.of(
                ValueError(text), function=MAILER, aggregate_id=A, version=1, sequence=1, attempts=1
            )
            assert len(made.text) == min(length, 2_000)
            assert (made.text == text) is (length <= 2_000)
            assert len(made.traceback) <= 16_000
            assert made.traceback.endswith("xy\n")
        assert made is not None
        assert len(made.traceback) == 16_000
        assert made.traceback.startswith("...")

    def test_lone_surrogates_are_replaced(self) -> None:
        made = FailedExecution.of(
            ValueError("file \udcff é"), function="p/M.\ud800", aggregate_id=A, version=1, sequence=1, attempts=1
        )
        assert (made.error, made.text, made.function) == ("ValueError", "file ? é", "p/M.?")
        assert "file ? é" in made.traceback

    def test_errors_that_cannot_be_shown(self) -> None:
        class SilentError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("not even this")

            __repr__ = __str__

        class TracelessError(Exception):
            @property
            def __traceback__(self) -> Any:  # type: ignore[override]
                raise RuntimeError("no")

        class Words(str):
            def encode(self, *_: object, **__: object) -> bytes:
                raise RuntimeError("no")

        class WordyError(Exception):
            def __str__(self) -> str:
                return Words("words")

        for error in (
            SilentError(),
            TracelessError("x"),
            WordyError(),
            ExceptionGroup("several", [SilentError(), WordyError()]),
        ):
            made = FailedExecution.of(error, function=MAILER, aggregate_id=A, version=1, sequence=1, attempts=1)
            assert made.error == type(error).__name__
            assert type(made.text) is type(made.traceback) is str
            assert made.text
            assert made.traceback


class TestLogging:
    async def test_one_error_and_nothing_kept(self, caplog: pytest.LogCaptureFixture) -> None:
        recorder = LoggingFailureRecorder()
        assert isinstance(recorder, FailureRecorder)
        assert not isinstance(recorder, FailureStore)
        assert await recorder.record(failure(version=7, sequence=2)) is Recording.UNRECORDED
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("trio_wow.dispatch", logging.ERROR)
        line, *_ = record.getMessage().splitlines()
        assert line == (
            f"{MAILER} failed on version 7 of {A}, after 4 attempts: ConnectionError: no mail today"
        )


class TestFailureStore:
    async def test_it_is_a_recorder(self, store: FailureStore) -> None:
        assert isinstance(store, FailureStore)
        assert isinstance(store, FailureRecorder)

    async def test_empty(self, store: FailureStore) -> None:
        assert list(await store.failures()) == []
        assert await store.failure("none") is None
        assert not await store.resolve_failure("none")

    async def test_what_is_recorded_comes_back(self, store: FailureStore) -> None:
        made = failure(AggregateId("shop", "order", "A", "tenant 1"))
        assert await store.record(made) is Recording.RECORDED
        (listed,) = await store.failures()
        assert listed == made == await store.failure(made.id)
        assert listed.aggregate_id.tenant == "tenant 1"
        assert listed.failed_at.utcoffset() == made.failed_at.utcoffset()

    async def test_the_same_again_changes_the_open_one(self, store: FailureStore) -> None:
        first, other = failure(), failure(B)
        await store.record(first)
        await store.record(other)
        again = failure(error="ValueError", text="t", traceback="tb", attempts=2)
        assert await store.record(again) is Recording.RECORDED
        changed = evolve(again, id=first.id, attempts=6)
        assert list(await store.failures()) == [changed, other]  # in its place
        assert await store.failure(again.id) is None
        await store.record(changed)  # its own ID: no different
        assert await store.failure(first.id) == evolve(changed, attempts=12)

    async def test_what_differs_is_another_one(self, store: FailureStore) -> None:
        every = [failure(), failure(version=2), failure(sequence=2), failure(B), failure(function="p/M.other")]
        every.append(failure(AggregateId("shop", "cart", "A")))
        every.append(failure(AggregateId("mall", "order", "A")))
        for each in every:
            await store.record(each)
        assert list(await store.failures()) == every

    async def test_filters_and_limit(self, store: FailureStore) -> None:
        every = [failure((A, B)[n % 2], n, function=f"p/M.f{n % 3}") for n in range(1, 121)]
        for each in every:
            await store.record(each)
        assert list(await store.failures()) == every[:100]
        assert list(await store.failures(limit=2**70)) == every
        assert list(await store.failures(limit=3)) == every[:3]
        of_f1 = [each for each in every if each.function == "p/M.f1"]
        assert list(await store.failures(function="p/M.f1")) == of_f1
        assert list(await store.failures(function="p/M.f1", limit=2)) == of_f1[:2]
        of_b = [each for each in every if each.aggregate_id == B]
        assert list(await store.failures(aggregate_id=evolve(B, tenant="another"))) == of_b
        of_both = [each for each in of_b if each in of_f1]
        assert list(await store.failures(function="p/M.f1", aggregate_id=B)) == of_both
        assert list(await store.failures(function="p/M.f")) == []

    async def test_resolving(self, store: FailureStore) -> None:
        first, other = failure(), failure(B)
        await store.record(first)
        await store.record(other)
        assert await store.resolve_failure(first.id)
        assert not await store.resolve_failure(first.id)
        assert await store.failure(first.id) is None
        assert list(await store.failures()) == [other]
        again = failure()
        await store.record(again)  # failing anew is a new one, behind the others
        assert list(await store.failures()) == [other, again]

    @pytest.mark.parametrize(
        "id", ["x" * 512, "a'b\"; DROP TABLE wow_failures", "é", "e\u0301", "\U0001f6e9", "A", "a"]
    )
    async def test_odd_ids_and_texts(self, store: FailureStore, id: str) -> None:
        text = f"{id} \0 \udcff \x1b[31m\n\r"
        made = failure(AggregateId("shop", "order", id, id), function=f"p/{id}.\ud800", text=text, traceback=text)
        await store.record(made)
        (listed,) = await store.failures(function=f"p/{id}.\ud800", aggregate_id=made.aggregate_id)
        assert listed == made
        assert listed.aggregate_id.tenant == id
        assert listed.text == text.replace("\udcff", "?")
        assert list(await store.failures(aggregate_id=order("b"))) == []
        assert await store.failure("\ud800") is None
        assert not await store.resolve_failure("\ud800")

    async def test_each_method_is_a_checkpoint_that_does_nothing_when_cancelled(self, store: FailureStore) -> None:
        made = failure()
        await store.record(made)
        for call in (
            lambda: store.record(failure(B)),
            lambda: store.resolve_failure(made.id),
            lambda: store.failure(made.id),
            lambda: store.failures(),
        ):
            with trio.CancelScope() as scope:
                scope.cancel()
                await call()
            assert scope.cancelled_caught
        assert list(await store.failures()) == [made]

    async def test_cancelled_at_each_wait(self, store: FailureStore) -> None:
        for step in range(100):
            made = failure(version=step + 1)
            with trio.CancelScope() as recording:
                await cancelled_at(store.record(made), step, recording)
            assert (await store.failure(made.id) == made) is not recording.cancelled_caught
            await store.record(failure(version=step + 1, id=made.id))
            with trio.CancelScope() as resolving:
                await cancelled_at(store.resolve_failure(made.id), step, resolving)
            assert (await store.failure(made.id) is None) is not resolving.cancelled_caught
            if not (recording.cancel_called or resolving.cancel_called):
                break
        else:
            pytest.fail("it never ended")


async def test_the_example_of_the_docs(store: FailureStore, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {
        "FailedExecution": FailedExecution,
        "store": store,
        "id": A,
        "error": ValueError("no mail"),
    }
    exec("async def run():\n" + textwrap.indent(example, "    "), names)
    await names["run"]()
    assert capsys.readouterr().out.endswith(f" {A} 4 ValueError no mail\n")
    assert list(await store.failures()) == []


def record_fifty(path: str) -> None:
    """In a child: record 50 failures that another process records too."""

    async def run() -> None:
        async with SqliteStore(path, DOMAIN.serializer, busy_timeout=60) as store:
            print("ready")
            for version in range(1, 51):
                await store.record(failure(version=version))

    trio.run(run)


class TestSqliteFailures:
    async def test_they_are_there_after_reopening(self, path: Path) -> None:
        made = failure()
        async with SqliteStore(path, DOMAIN.serializer) as store:
            await store.record(made)
        async with SqliteStore(path, DOMAIN.serializer) as store:
            assert list(await store.failures()) == [made]
            assert await store.resolve_failure(made.id)
        async with SqliteStore(path, DOMAIN.serializer) as store:
            assert list(await store.failures()) == []

    async def test_two_processes_record_the_same(self, path: Path) -> None:
        async with SqliteStore(path, DOMAIN.serializer) as store:
            with child(record_fifty, path) as one, child(record_fifty, path) as other:
                with write_lock(path):
                    one.read_until("ready")
                    other.read_until("ready")
                succeed(one)
                succeed(other)
            every = await store.failures()
        assert [(each.version, each.attempts) for each in every] == [(version, 8) for version in range(1, 51)]

    async def test_a_lock_that_is_held_too_long(self, path: Path) -> None:
        async with SqliteStore(path, DOMAIN.serializer, busy_timeout=0.05) as store:
            made = failure()
            await store.record(made)
            with write_lock(path):
                with pytest.raises(StoreLockedError):
                    await store.record(failure(B))
                with pytest.raises(StoreLockedError):
                    await store.resolve_failure(made.id)
                assert list(await store.failures()) == [made]  # reading does not wait
            assert await store.resolve_failure(made.id)
            assert list(await store.failures()) == []

    @pytest.mark.parametrize("first", ["open", "failures", "append"])
    async def test_an_older_file_is_upgraded(self, path: Path, first: str) -> None:
        old = stream(A, 1)
        async with SqliteStore(path, DOMAIN.serializer) as store:
            await store.append(old)
            await store.save_checkpoint("mails", 1)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DROP TABLE wow_failures")
            connection.execute("UPDATE wow_schema SET version = 1")
        calls: dict[str, Callable[[], Any]] = {
            "open": store.open,
            "failures": store.failures,
            "append": lambda: store.append(stream(B, 1)),
        }
        await calls[first]()
        made = failure()
        await store.record(made)
        assert list(await store.failures()) == [made]
        assert await store.load(A) == [old]
        assert await store.load_checkpoint("mails") == 1
        await store.aclose()
        assert rows(path, "SELECT max(version) FROM wow_schema") == [(2,)]

    async def test_an_older_file_that_is_locked_is_left_as_it_is(self, path: Path) -> None:
        store = SqliteStore(path, DOMAIN.serializer, busy_timeout=0.05)
        await store.open()
        await store.aclose()
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DROP TABLE wow_failures")
            connection.execute("UPDATE wow_schema SET version = 1")
        with write_lock(path), pytest.raises(StoreLockedError):
            await store.open()
        assert rows(path, "SELECT version FROM wow_schema") == [(1,)]
        await store.open()
        await store.aclose()
        assert rows(path, "SELECT max(version) FROM wow_schema") == [(2,)]

    @pytest.mark.parametrize(
        ("column", "value"), [("context", " "), ("id", ""), ("tenant", ""), ("text", b"\xff"), ("failed_at", "today")]
    )
    async def test_damaged_row(self, path: Path, column: str, value: object) -> None:
        async with SqliteStore(path, DOMAIN.serializer) as store:
            await store.record(failure())
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute(f"UPDATE wow_failures SET {column} = ?", (value,))
            with pytest.raises(StoreFormatError, match="it is damaged at failure 1"):
                await store.failures()
