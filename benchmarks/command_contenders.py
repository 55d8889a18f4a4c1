"""Ways to run bank-account commands: trio-wow's, three packages, and two hand-written floors.

All of them take the same `Load` and do the same for each command: bring the account to its present state, refuse to
overdraw it, yield one event, store it as JSON under a version check, and give the sender the new balance or the
refusal. Everything is in memory. At the end a contender gives the balances as it finds them in its store, or in what
it keeps instead.

The packages know one caller at a time, so senders mean something to trio-wow and to the floors only. What differs:
`eventsourcing` and `python-event-sourcery` publish nothing and have no commands, only methods. At its fastest
`eventsourcing` takes aggregates from a cache, uncopied and without a look at what others have stored. `protean` has
commands and a handler; each of its commands reads its whole store, so it is asked for few. The floors have one task and
one mailbox for each account, keep its state for ever, and know neither requests, tenants, retries, publication, nor an
end.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any
from uuid import UUID, uuid5

import orjson
import trio
import trio.testing
from attrs import define, field, frozen

from trio_wow import App, CommandRejectedError, Reply, aggregate, on_command, on_sourcing
from trio_wow.execution import KeyedExecutor

try:
    from eventsourcing.application import Application
    from eventsourcing.domain import Aggregate as EventSourcingAggregate
    from eventsourcing.domain import event as es_event
except ImportError:
    HAS_EVENTSOURCING = False
else:
    HAS_EVENTSOURCING = True

try:
    import protean
    from protean import fields as protean_fields
except ImportError:
    HAS_PROTEAN = False
else:
    HAS_PROTEAN = True

try:
    from event_sourcery import StreamUUID
    from event_sourcery.backend import InMemoryBackend
    from event_sourcery.event import Event as SourceryEvent
    from event_sourcery.event_sourcing import Aggregate as SourceryAggregate
    from event_sourcery.event_sourcing import Repository as SourceryRepository
except ImportError:
    HAS_SOURCERY = False
else:
    HAS_SOURCERY = True

FUNDS = 1_000_000
NAMESPACE = UUID(int=0)


@frozen
class Load:
    """What each contender is given: each command takes 1 from the next account in turn."""

    accounts: int
    commands: int
    senders: int

    @property
    def names(self) -> list[str]:
        """The accounts."""
        return [f"account-{number}" for number in range(self.accounts)]


@frozen
class Outcome:
    """What a run came to."""

    seconds: float
    balances: list[int]
    refused: bool
    """Whether a last command, for more than the account holds, was refused."""


@frozen
class CommandContender:
    """Something that runs commands."""

    name: str
    run: Callable[[Load], Outcome]
    concurrent: bool
    """Whether several senders can wait at once."""
    installed: bool = True
    most_accounts: int = sys.maxsize
    most_commands: int = sys.maxsize

    def able(self, load: Load) -> Load:
        """Return as much of a load as it can be asked for."""
        return Load(
            min(load.accounts, self.most_accounts),
            min(load.commands, self.most_commands),
            load.senders if self.concurrent else 1,
        )

    @property
    def about(self) -> str:
        """What it is, in a line."""
        return (self.run.__doc__ or "").splitlines()[0]


class OverdrawnError(Exception):
    """An account holds less than is to be withdrawn."""


async def _send_all(load: Load, send: Callable[[str, int], Awaitable[object]]) -> float:
    """Let the senders send all commands; return the seconds it took."""
    names, numbers = load.names, iter(range(load.commands))

    async def sender() -> None:
        for number in numbers:
            await send(names[number % len(names)], 1)

    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(load.senders):
            nursery.start_soon(sender)
    return time.perf_counter() - started


def _call_all(load: Load, call: Callable[[str, int], object]) -> float:
    """Make all calls; return the seconds it took."""
    names = load.names
    started = time.perf_counter()
    for number in range(load.commands):
        call(names[number % len(names)], 1)
    return time.perf_counter() - started


def _is_refused(call: Callable[[], object], *errors: type[Exception]) -> bool:
    try:
        call()
    except errors:
        return True
    return False


# trio-wow


@frozen
class Open:
    id: str
    funds: int


@frozen
class Withdraw:
    id: str
    amount: int


@frozen
class Ask:
    id: str


@frozen
class Opened:
    funds: int


@frozen
class Withdrawn:
    amount: int


@aggregate(context="bank")
@define
class Account:
    id: str
    balance: int = 0

    @on_command
    def open(self, command: Open) -> Opened:
        return Opened(command.funds)

    @on_command
    def withdraw(self, command: Withdraw) -> Reply[Withdrawn, int]:
        if command.amount > self.balance:
            raise CommandRejectedError("overdrawn")
        return Reply(Withdrawn(command.amount), self.balance - command.amount)

    @on_command
    def ask(self, command: Ask) -> Reply[None, int]:
        return Reply(None, self.balance)

    @on_sourcing
    def opened(self, event: Opened) -> None:
        self.balance = event.funds

    @on_sourcing
    def withdrawn(self, event: Withdrawn) -> None:
        self.balance -= event.amount


def trio_wow(load: Load) -> Outcome:
    """trio-wow: `send_and_wait(PROCESSED)` through bus, dispatcher and memory store."""

    async def main() -> Outcome:
        app = App([Account])
        runtime = app.runtime(executor=KeyedExecutor(), signals=False, shutdown_quiet_period=0)
        async with app.serving(runtime) as gateway:

            async def send(name: str, amount: int) -> None:
                (await gateway.send_and_wait(Withdraw(name, amount))).raise_for_error()

            for name in load.names:
                await gateway.send_and_wait(Open(name, FUNDS))
            seconds = await _send_all(load, send)
            last = await gateway.send_and_wait(Withdraw(load.names[0], FUNDS + 1))
            balances = [(await gateway.send_and_wait(Ask(name))).value for name in load.names]
            return Outcome(seconds, balances, refused=last.error is not None and last.error.text == "overdrawn")

    return trio.run(main)


# The floors


@define
class _FloorAccount:
    balance: int = 0
    stored: list[Any] = field(factory=list)


class _Reply:
    """What a sender waits for."""

    __slots__ = ("ended", "error", "value")

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.error: Exception | None = None
        self.value = 0


async def _floor(load: Load, *, json: bool) -> Outcome:
    accounts = {name: _FloorAccount(FUNDS) for name in load.names}
    mailboxes: dict[str, trio.MemorySendChannel[tuple[Any, _Reply]]] = {}

    def handle(account: _FloorAccount, command: Withdraw) -> int:
        version = len(account.stored)
        if command.amount > account.balance:
            raise OverdrawnError
        event = Withdrawn(command.amount)
        if version != len(account.stored):
            raise RuntimeError("another writer was first")
        if json:
            data = orjson.dumps({"version": version + 1, "name": "Withdrawn", "body": {"amount": event.amount}})
            event = Withdrawn(**orjson.loads(data)["body"])
            account.stored.append(data)
        else:
            account.stored.append(event)
        account.balance -= event.amount
        return account.balance

    async def mailbox(account: _FloorAccount, receive: trio.MemoryReceiveChannel[tuple[Any, _Reply]]) -> None:
        async for message, reply in receive:
            try:
                command = Withdraw(**orjson.loads(message)) if json else message
                reply.value = handle(account, command)
            except OverdrawnError as error:
                reply.error = error
            reply.ended.set()

    async def send(name: str, amount: int) -> int:
        command = Withdraw(name, amount)
        reply = _Reply()
        await mailboxes[name].send((orjson.dumps({"id": name, "amount": amount}) if json else command, reply))
        await reply.ended.wait()
        if reply.error is not None:
            raise reply.error
        return reply.value

    async with trio.open_nursery() as nursery:
        for name, account in accounts.items():
            mailboxes[name], receive = trio.open_memory_channel[tuple[Any, _Reply]](math.inf)
            nursery.start_soon(mailbox, account, receive)
        await trio.testing.wait_all_tasks_blocked()
        seconds = await _send_all(load, send)
        try:
            await send(load.names[0], FUNDS + 1)
        except OverdrawnError:
            refused = True
        else:
            refused = False
        nursery.cancel_scope.cancel()
    if any(len(account.stored) != FUNDS - account.balance for account in accounts.values()):
        raise RuntimeError("a floor has lost an event")
    return Outcome(seconds, [account.balance for account in accounts.values()], refused)


def trio_floor_json(load: Load) -> Outcome:
    """Floor: a Trio task and channel for each account, with JSON."""
    return trio.run(lambda: _floor(load, json=True))


def trio_floor(load: Load) -> Outcome:
    """Floor: the same without JSON."""
    return trio.run(lambda: _floor(load, json=False))


# eventsourcing

if HAS_EVENTSOURCING:

    class EsAccount(EventSourcingAggregate):  # type: ignore[misc,unused-ignore]
        """An account."""

        @es_event("Opened")
        def __init__(self, name: str, funds: int) -> None:
            self.name = name
            self.balance = funds

        @staticmethod
        def create_id(name: str) -> UUID:
            """Make the ID from the name."""
            return uuid5(NAMESPACE, name)

        def withdraw(self, amount: int) -> None:
            """Withdraw."""
            if amount > self.balance:
                raise OverdrawnError
            self._withdraw(amount)

        @es_event("Withdrawn")
        def _withdraw(self, amount: int) -> None:
            self.balance -= amount


def eventsourcing_defaults(load: Load) -> Outcome:
    """eventsourcing: POPO, at its defaults."""
    return _eventsourcing(load, {})


def eventsourcing_fastest(load: Load) -> Outcome:
    """eventsourcing: POPO, with a cache, no deep copy and no fast-forward."""
    return _eventsourcing(
        load,
        {
            "AGGREGATE_CACHE_MAXSIZE": str(2 * load.accounts),
            "DEEPCOPY_FROM_AGGREGATE_CACHE": "n",
            "AGGREGATE_CACHE_FASTFORWARD": "n",
        },
    )


def _eventsourcing(load: Load, settings: dict[str, str]) -> Outcome:
    app: Any = Application(env={**os.environ, **settings})
    ids = {name: EsAccount.create_id(name) for name in load.names}

    def withdraw(name: str, amount: int) -> int:
        account: Any = app.repository.get(ids[name])
        account.withdraw(amount)
        app.save(account)
        return int(account.balance)

    for name in load.names:
        app.save(EsAccount(name=name, funds=FUNDS))
    seconds = _call_all(load, withdraw)
    refused = _is_refused(lambda: withdraw(load.names[0], FUNDS + 1), OverdrawnError)
    stored: Any = app.repository
    return Outcome(seconds, [stored.get(each).balance for each in ids.values()], refused)


# protean


def protean_domain(load: Load) -> Outcome:
    """protean: a command, its handler and an event-sourced aggregate, all in the caller."""
    logging.disable(logging.CRITICAL)  # it logs each command
    try:
        return _protean(load)
    finally:
        logging.disable(logging.NOTSET)


_domains = count()


def _protean(load: Load) -> Outcome:
    domain = protean.Domain(name=f"bank{next(_domains)}")
    identifier, integer = protean_fields.Identifier, protean_fields.Integer

    class Opened:
        name = identifier(identifier=True)
        funds = integer(required=True)

    class Withdrawn:
        name = identifier(identifier=True)
        amount = integer(required=True)

    opened: Any = domain.event(part_of="Account")(Opened)
    withdrawn: Any = domain.event(part_of="Account")(Withdrawn)

    class Account:
        name = identifier(identifier=True)
        balance = integer(default=0)

        @classmethod
        def open(cls, name: str, funds: int) -> Any:
            account: Any = cls._create_new(name=name)  # type: ignore[attr-defined]
            account.raise_(opened(name=name, funds=funds))
            return account

        def withdraw(self, amount: int) -> None:
            account: Any = self  # what protean makes of it
            if amount > account.balance:
                raise OverdrawnError
            account.raise_(withdrawn(name=account.name, amount=amount))

        @protean.apply
        def on_opened(self, event: opened) -> None:  # type: ignore[valid-type,unused-ignore]
            self.name, self.balance = event.name, event.funds

        @protean.apply
        def on_withdrawn(self, event: withdrawn) -> None:  # type: ignore[valid-type,unused-ignore]
            self.balance -= event.amount

    class Withdraw:
        name = identifier(required=True)
        amount = integer(required=True)

    class Handler:
        def withdraw(self, command: Any) -> int:
            accounts = domain.repository_for(account)
            found = accounts.get(command.name)
            found.withdraw(command.amount)
            accounts.add(found)
            return int(found.balance)

    account: Any = domain.aggregate(is_event_sourced=True)(Account)
    command: Any = domain.command(part_of=account)(Withdraw)
    Handler.withdraw = protean.handle(command)(Handler.withdraw)  # type: ignore[method-assign,assignment]
    domain.command_handler(part_of=account)(Handler)
    domain.config["command_processing"] = domain.config["event_processing"] = "sync"
    domain.init(traverse=False)
    with domain.domain_context():

        def withdraw(name: str, amount: int) -> object:
            return domain.process(command(name=name, amount=amount))

        for name in load.names:
            domain.repository_for(account).add(account.open(name, FUNDS))
        seconds = _call_all(load, withdraw)
        refused = _is_refused(lambda: withdraw(load.names[0], FUNDS + 1), OverdrawnError)
        return Outcome(seconds, [domain.repository_for(account).get(name).balance for name in load.names], refused)


# python-event-sourcery

if HAS_SOURCERY:

    class SourceryOpened(SourceryEvent):  # type: ignore[misc,unused-ignore]
        """An account was opened."""

        funds: int

    class SourceryWithdrawn(SourceryEvent):  # type: ignore[misc,unused-ignore]
        """Something was withdrawn."""

        amount: int

    class SourceryAccount(SourceryAggregate):  # type: ignore[misc,unused-ignore]
        """An account."""

        category = "account"

        def __init__(self) -> None:
            self.balance = 0

        def open(self, funds: int) -> None:
            """Open it."""
            self._emit(SourceryOpened(funds=funds))

        def withdraw(self, amount: int) -> None:
            """Withdraw."""
            if amount > self.balance:
                raise OverdrawnError
            self._emit(SourceryWithdrawn(amount=amount))

        def __apply__(self, event: Any) -> None:
            if isinstance(event, SourceryOpened):
                self.balance = event.funds
            else:
                self.balance -= event.amount


def event_sourcery(load: Load) -> Outcome:
    """python-event-sourcery: a repository on its in-memory backend."""
    backend = InMemoryBackend().configure()
    repository: Any = SourceryRepository(backend.event_store)
    ids = {name: StreamUUID(name=name) for name in load.names}

    def withdraw(name: str, amount: int) -> int:
        with repository.aggregate(ids[name], SourceryAccount()) as wrapped:
            wrapped.aggregate.withdraw(amount)
            return int(wrapped.aggregate.balance)

    def balances() -> Iterator[int]:
        for each in ids.values():
            with repository.aggregate(each, SourceryAccount()) as wrapped:
                yield wrapped.aggregate.balance

    for each in ids.values():
        with repository.aggregate(each, SourceryAccount()) as wrapped:
            wrapped.aggregate.open(FUNDS)
    seconds = _call_all(load, withdraw)
    refused = _is_refused(lambda: withdraw(load.names[0], FUNDS + 1), OverdrawnError)
    return Outcome(seconds, list(balances()), refused)


COMMAND_CONTENDERS = (
    CommandContender("trio-wow", trio_wow, concurrent=True),
    CommandContender("floor-json", trio_floor_json, concurrent=True),
    CommandContender("floor", trio_floor, concurrent=True),
    CommandContender("eventsourcing", eventsourcing_defaults, concurrent=False, installed=HAS_EVENTSOURCING),
    CommandContender("eventsourcing-fastest", eventsourcing_fastest, concurrent=False, installed=HAS_EVENTSOURCING),
    CommandContender(
        "protean", protean_domain, concurrent=False, installed=HAS_PROTEAN, most_accounts=20, most_commands=40
    ),
    CommandContender("event-sourcery", event_sourcery, concurrent=False, installed=HAS_SOURCERY),
)
