"""`trio-wow failures`."""

import json
from typing import Any

from attrs import frozen
from rich.table import Table

from trio_wow.cli._answer import answer, closing, table
from trio_wow.cli._failure import USAGE, Failure, printable
from trio_wow.cli._target import load_app
from trio_wow.eventsourcing import FailedExecution, FailureStore

__all__ = ["FailureQuery", "show_failures"]


@frozen
class FailureQuery:
    """What is asked for.

    Attributes:
        target: the application, as `MODULE:APP`.
        limit: how many are listed at most.
        function: the only one to be listed; `None` for all.
        show: the ID of the one to be shown whole; `None` to list them.
        resolve: the ID of the one to be resolved; `None` to list them.
        as_json: whether a program reads the answer.
    """

    target: str
    limit: int
    function: str | None
    show: str | None
    resolve: str | None
    as_json: bool


def show_failures(query: FailureQuery, *, show_traceback: bool) -> None:
    """Write what is asked for to stdout, or resolve a failure.

    Raises:
        Failure: there is no such application or failure, or it keeps none, or its store cannot be used.
    """
    store = load_app(query.target, show_traceback=show_traceback).failures
    if not isinstance(store, FailureStore):
        raise Failure(
            f"{query.target} keeps no failures; give its App a FailureStore, such as SqliteStore, as `failures`", USAGE
        )
    answer(_answer, store, query)


async def _answer(store: FailureStore, query: FailureQuery) -> Table | list[str]:
    async with closing(store):
        if query.resolve is not None:
            if not await store.resolve_failure(query.resolve):
                raise _not_open(query, query.resolve)
            resolved = {"id": query.resolve, "resolved": True}
            return [json.dumps(resolved) if query.as_json else f"resolved {printable(query.resolve)}"]
        if query.show is not None:
            failure = await store.failure(query.show)
            if failure is None:
                raise _not_open(query, query.show)
            return [json.dumps(_record(failure))] if query.as_json else _whole(failure)
        failures = await store.failures(limit=query.limit, function=query.function)
    if query.as_json:
        return [json.dumps(_record(failure)) for failure in failures]
    if not failures:
        return ["no open failures"]
    rows = [("ID", "WHEN", "FUNCTION", "EVENT", "ATTEMPTS", "ERROR")]
    rows.extend(
        (
            printable(failure.id),
            failure.failed_at.isoformat(timespec="seconds"),
            printable(failure.function),
            printable(_event(failure)),
            str(failure.attempts),
            printable(f"{failure.error}: {failure.text}"),
        )
        for failure in failures
    )
    return table(rows, width=100)


def _not_open(query: FailureQuery, id: str) -> Failure:
    return Failure(f"there is no open failure {id!r} of {query.target}")


def _event(failure: FailedExecution) -> str:
    return f"{failure.aggregate_id} {failure.version}.{failure.sequence}"


def _record(failure: FailedExecution) -> dict[str, Any]:
    return {
        "id": failure.id,
        "function": failure.function,
        "context": failure.aggregate_id.context,
        "aggregate": failure.aggregate_id.aggregate,
        "aggregate_id": failure.aggregate_id.id,
        "tenant": failure.aggregate_id.tenant,
        "version": failure.version,
        "sequence": failure.sequence,
        "error": failure.error,
        "text": failure.text,
        "traceback": failure.traceback,
        "attempts": failure.attempts,
        "failed_at": failure.failed_at.isoformat(),
    }


def _whole(failure: FailedExecution) -> list[str]:
    record = _record(failure)
    traceback = record.pop("traceback")
    return [
        *(f"{name}: {printable(str(value))}" for name, value in record.items()),
        "",
        *(printable(line) for line in traceback.splitlines()),
    ]
