"""Asking a store, and writing the answer."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVarTuple, Unpack, runtime_checkable

import click
import trio
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trio_wow.cli._failure import FAILED, Failure, expected

__all__ = ["answer", "closing", "table"]

Ts = TypeVarTuple("Ts")


@runtime_checkable
class _Closing(Protocol):
    async def aclose(self) -> None: ...


def answer(ask: Callable[[Unpack[Ts]], Awaitable[Table | list[str]]], *arguments: *Ts) -> None:
    """Run an async function, and write what it returns to stdout.

    Raises:
        Failure: what it raised.
    """
    try:
        lines = trio.run(ask, *arguments)
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


@asynccontextmanager
async def closing(store: object) -> AsyncIterator[None]:
    """Close a store afterwards, if it is one that can be closed."""
    try:
        yield
    finally:
        if isinstance(store, _Closing):
            await store.aclose()


def table(rows: Sequence[Sequence[str]], *, width: int) -> Table | list[str]:
    """Lay rows out, of which the first one has the titles; as plain lines where no terminal is.

    Args:
        rows: of printable texts.
        width: columns of a terminal that the table needs; in less, it shows next to nothing.
    """
    return _table(rows) if _is_terminal(width) else list(_columns(rows))


def _is_terminal(width: int) -> bool:
    if sys.stdout is None or not sys.stdout.isatty():
        return False
    console = Console()
    return not console.is_dumb_terminal and console.width >= width


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
