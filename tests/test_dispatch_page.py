"""The examples of docs/dispatch.md run."""

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, frozen

from trio_wow import App, DeleteAggregate, Headers, RecoverAggregate, aggregate, on_command, on_sourcing
from trio_wow.dispatch import Handler, Handling

PAGE = (Path(__file__).parents[1] / "docs/dispatch.md").read_text()
TAKING, DELETING, TIMING = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@frozen
class Open:
    id: str


@frozen
class Opened:
    pass


@frozen
class Pay:
    id: str


@frozen
class Paid:
    by: str


EXISTING = """
@on_command
def open(self, command: Open) -> Opened:
    return Opened()

@on_sourcing
def opened(self, event: Opened) -> None: ...

"""


class Bank:
    def transfer(self, headers: Headers) -> str:
        return headers["by"]


@aggregate(context="shop")
@define
class Order:
    id: str

    @on_command
    def open(self, command: Open) -> Opened:
        return Opened()

    @on_sourcing
    def opened(self, event: Opened) -> None:
        pass


NAMES: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(
            App,
            DeleteAggregate,
            Handler,
            Handling,
            Headers,
            RecoverAggregate,
            aggregate,
            define,
            on_command,
            on_sourcing,
        ),
        *(Bank, Open, Opened, Order, Paid, Pay),
    )
}


async def test_what_a_function_takes() -> None:
    method = TAKING.replace("-> Paid: ...", "-> Paid:\n    return Paid(bank.transfer(headers))")
    program = f"""
@aggregate(context="shop")
@define
class Order:
    id: str
{textwrap.indent(EXISTING + method, "    ")}
    @on_sourcing
    def paid(self, event: Paid) -> None: ...
"""
    names: dict[str, Any] = {**NAMES}
    exec(program, names)
    app = App([names["Order"]], services={Bank: Bank()})
    async with app.serving() as gateway:
        assert (await gateway.send_and_wait(Pay("4711"))).error is not None  # it has to exist
        await gateway.send_and_wait(Open("4711"))
        await gateway.send_and_wait(Pay("4711"), headers={"by": "card"})
        _, paid = await app.store.read_all(0, 9)
    assert paid.stream.events == (Paid("card"),)


async def test_deleting() -> None:
    example = DELETING.replace("Aircraft", "Order").replace("N14228", "4711")
    names: dict[str, Any] = {**NAMES}
    exec(f"async def run(gateway):\n{textwrap.indent(example, '    ')}", names)
    app = App([Order])
    async with app.serving() as gateway:
        await gateway.send_and_wait(Open("4711"))
        await names["run"](gateway)
        streams = await app.store.read_all(0, 9)
    assert [type(each.stream.events[0]).__name__ for each in streams] == [
        "Opened",
        "AggregateDeleted",
        "AggregateRecovered",
    ]


async def test_a_filter_of_three_lines() -> None:
    spans: list[str | None] = []

    @contextmanager
    def span(name: str) -> Iterator[None]:
        spans.append(name)
        yield

    names: dict[str, Any] = {**NAMES, "span": span}
    function, *apps = TIMING.rstrip().rsplit("\n", 2)
    exec(function, names)
    for each in apps:
        async with eval(each, names).serving() as gateway:
            await gateway.send_and_wait(Open("4711"))
    assert spans == ["command-dispatcher", "Order.open"]
