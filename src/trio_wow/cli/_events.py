"""`trio-wow events`."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, runtime_checkable

import click
import trio
from attrs import frozen
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trio_wow.app import App
from trio_wow.cli._failure import FAILED, USAGE, Failure, expected, printable
from trio_wow.cli._target import load_app
from trio_wow.errors import AggregateVersionError, InvalidIdentifierError
from trio_wow.eventsourcing import AggregateRepository
from trio_wow.messages import AggregateId, DomainEventStream

__all__ = ["Query", "show"]

NARROW = 60
"""Columns of a terminal that a table needs."""


@frozen
class Query:
    """What is asked for.

    Attributes:
        target: the application, as `MODULE:APP`.
        aggregate: as `CONTEXT.AGGREGATE`.
        id: of the aggregate.
        version: whose state is asked for; `None` for the events.
        as_json: whether a program reads the answer.
    """

    target: str
    aggregate: str
    id: str
    version: int | None
    as_json: bool


@runtime_checkable
class _Closing(Protocol):
    async def aclose(self) -> None: ...


def show(query: Query, *, show_traceback: bool) -> None:
    """Write what is asked for to stdout.

    Raises:
        Failure: there is no such application, aggregate or version, or the store cannot be read.
    """
    app = load_app(query.target, show_traceback=show_traceback)
    aggregate_id = _identified(app, query)
    try:
        lines = trio.run(_answer, app, aggregate_id, query)
    except Failure:
        raise
    except Exception as error:
        known = expected(error)
        kind = "" if known else f"{type(error).__name__}: "
        raise Failure(f"{kind}{error}", FAILED, cause=None if known else error) from error
    if isinstance(lines, Table):
        Console(highlight=False).print(lines)
        return
    for line in lines:
        click.echo(line)


def _identified(app: App, query: Query) -> AggregateId:
    context, dot, name = query.aggregate.partition(".")
    known = sorted(f"{model.context}.{model.name}" for model in app.domain.aggregates)
    if not dot or query.aggregate not in known:
        raise Failure(
            f"{query.target} has no aggregate {query.aggregate!r}; there are {', '.join(known) or 'none'}", USAGE
        )
    try:
        return AggregateId(context, name, query.id)
    except InvalidIdentifierError as error:
        raise Failure(str(error), USAGE) from error


async def _answer(app: App, aggregate_id: AggregateId, query: Query) -> Table | list[str]:
    async with AsyncExitStack() as stack:
        if isinstance(app.store, _Closing):
            stack.push_async_callback(app.store.aclose)
        until = None if query.version is None else 1
        streams = await app.store.load(aggregate_id, until=until)
        if not streams:
            raise Failure(f"{aggregate_id} has no history in the store of {query.target}")
        if query.version is None:
            return _history(app, streams, query)
        return await _state(app, streams[0].aggregate_id, query.version, query)


def _history(app: App, streams: Sequence[DomainEventStream], query: Query) -> Table | list[str]:
    records = [record for stream in streams for record in _records(app, stream)]
    if query.as_json:
        return [json.dumps(record) for record in records]
    rows: list[tuple[str, ...]] = [("VERSION", "WHEN", "EVENT", "BODY")]
    for record in records:
        body = json.dumps(record["body"], ensure_ascii=False)
        row = (str(record["version"]), record["created_at"], record["event"], body)
        rows.append(tuple(map(printable, row)))
    return _table(rows) if _is_terminal() else list(_columns(rows))


def _records(app: App, stream: DomainEventStream) -> Iterator[dict[str, Any]]:
    form = json.loads(app.domain.serializer.dump_stream(stream))
    for sequence, event in enumerate(form["events"], 1):
        yield {
            "context": form["context"],
            "aggregate": form["aggregate"],
            "id": form["aggregate_id"],
            "tenant": form["tenant"],
            "version": form["version"],
            "sequence": sequence,
            "created_at": form["created_at"],
            "event": event["name"],
            "revision": event["revision"],
            "body": event["body"],
            "stream_id": form["id"],
            "command_id": form["command_id"],
            "request_id": form["request_id"],
            "headers": form["headers"],
        }


async def _state(app: App, aggregate_id: AggregateId, version: int, query: Query) -> list[str]:
    # From the events alone: a snapshot that is of no use would be discarded, and looking changes nothing.
    repository = AggregateRepository(app.domain, app.store)
    try:
        loaded = await repository.load(aggregate_id, version=version)
    except AggregateVersionError as error:
        raise Failure(f"{error.aggregate_id} has no version {version}; its history ends at {error.last}") from error
    state = json.loads(app.domain.serializer.dump_state(loaded.state))
    if query.as_json:
        identity = {"context": aggregate_id.context, "aggregate": aggregate_id.aggregate, "id": aggregate_id.id}
        return [json.dumps({**identity, "tenant": aggregate_id.tenant, "version": version, "state": state})]
    return [
        f"{printable(str(aggregate_id))} at version {version}",
        *(printable(line) for line in json.dumps(state, ensure_ascii=False, indent=2).splitlines()),
    ]


def _is_terminal() -> bool:
    if sys.stdout is None or not sys.stdout.isatty():
        return False
    console = Console()
    return not console.is_dumb_terminal and console.width >= NARROW  # in less, a table shows next to nothing


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
        yield "  ".join([*padded, row[-1]]).rstrip()


def _table(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for number, title in enumerate(rows[0]):
        table.add_column(title, overflow="fold", no_wrap=number == 0)
    for row in rows[1:]:
        table.add_row(*(Text(text) for text in row))  # as it stands: no markup
    return table
