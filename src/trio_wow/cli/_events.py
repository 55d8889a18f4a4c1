"""`trio-wow events`."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import frozen
from rich.table import Table

from trio_wow.app import App
from trio_wow.cli._answer import answer, closing, table
from trio_wow.cli._failure import USAGE, Failure, printable
from trio_wow.cli._target import load_app
from trio_wow.errors import AggregateVersionError, InvalidIdentifierError
from trio_wow.eventsourcing import AggregateRepository
from trio_wow.messages import AggregateId, DomainEventStream

__all__ = ["Query", "show"]


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


def show(query: Query, *, show_traceback: bool) -> None:
    """Write what is asked for to stdout.

    Raises:
        Failure: there is no such application, aggregate or version, or the store cannot be read.
    """
    app = load_app(query.target, show_traceback=show_traceback)
    aggregate_id = _identified(app, query)
    answer(_answer, app, aggregate_id, query)


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
    async with closing(app.store):
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
    return table(rows, width=60)


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
