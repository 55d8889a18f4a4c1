"""The examples of docs/waiting.md run."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from trio_wow import (
    App,
    on_event,
    projection,
    saga,
)
from trio_wow.errors import InvalidCommandError
from trio_wow.testing import given

PAGE = (Path(__file__).parents[1] / "docs/waiting.md").read_text()
CALLS, CODE, ANSWER, CHECKED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

DOMAIN = """
@frozen
class Opened(Happened):
    amount: int

@frozen
class Withdraw:
    id: str
    amount: int

@frozen
class Withdrawn(Happened):
    amount: int

@frozen
class Open:
    id: str

@aggregate(context="bank")
@define
class Account:
    id: str
    balance: int = 0

    @on_command
    def open(self, command: Open) -> Opened:
        return Opened(200)

    @on_command
    def pay(self, command: Transfer) -> None:
        raise OverdrawnError("empty")

    @on_sourcing
    def opened(self, event: Opened) -> None:
        self.balance += event.amount

    @on_sourcing
    def withdrawn(self, event: Withdrawn) -> None:
        self.balance -= event.amount

"""


class Happened:
    """What the events of the page inherit from."""


@projection
class View:
    def __init__(self) -> None:
        self.seen = 0

    @on_event
    def any(self, event: Happened) -> None:
        self.seen += 1


@saga
class Following:
    @on_event
    def any(self, event: Happened) -> None: ...


def names() -> dict[str, Any]:
    scope: dict[str, Any] = {"Happened": Happened, "__name__": __name__}
    exec("from attrs import define, field, frozen, validators; from trio_wow import *", scope)
    exec(CODE + CHECKED + DOMAIN + textwrap.indent(ANSWER, "    "), scope)
    return scope


async def test_the_calls(capsys: pytest.CaptureFixture[str]) -> None:
    scope = names()
    app = App([scope["Account"]], [View(), Following()])
    async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
        await gateway.send_and_wait(scope["Open"]("A"))
        scope["gateway"] = gateway
        exec("async def calls():\n" + textwrap.indent(CALLS, "    ") + "\n    return signals", scope)
        await scope["calls"]()
        rejected = await gateway.send_and_wait(scope["Transfer"]("A", "B", 5))
    lines = capsys.readouterr().out.splitlines()
    assert (lines[:2], lines[-1]) == (["Stage.SENT None", "Stage.PROCESSED 4"], "Stage.SAGA_HANDLED 4")
    assert rejected.error is not None
    assert rejected.error.code == "account.overdrawn"


def test_the_answer_and_the_test_of_it() -> None:
    scope = names()
    scope["given"] = given
    (line,) = re.findall(r"^`(given\(.*\))`\.$", PAGE, re.MULTILINE)
    exec(line, scope)


async def test_what_is_checked_before() -> None:
    scope = names()
    app = App([scope["Account"]])
    async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
        with pytest.raises(InvalidCommandError, match="an account cannot pay itself"):
            await gateway.send(scope["Transfer"]("A", "A", 5))
