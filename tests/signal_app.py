"""An application that tests serve in a process of its own and end with signals.

It writes one line for whatever somebody has been told: what is on a line must be in its store.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

import trio
from chain_domain import Answering, Chain, Step, Stepped

from trio_wow import App, DomainEvent, event_processor, on_event, projection, saga
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.dispatch import Handler, Handling
from trio_wow.domain import Domain
from trio_wow.errors import AdmissionClosedError, WaitAbandonedError
from trio_wow.messages import DomainEventStream
from trio_wow.runtime import RuntimeContext

ANSWERS = 2
"""Steps that the saga adds to each chain."""
SENDERS = 8
HELD = 3
"""Chains that come no further than to where the test holds them."""

DOMAIN = Domain([Chain])


def create(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE effects (chain, version, number)")


def say(*words: object) -> None:
    print(*words, flush=True)


class Hold:
    """Keeps the second step of some chains at one place."""

    def __init__(self, place: str) -> None:
        self.place = place

    async def at(self, place: str, id: str, number: int) -> None:
        if place == self.place and number == 1 and id.startswith("held"):
            say("held", id)
            await trio.sleep_forever()


@projection
class Rows:
    def __init__(self) -> None:
        self.calls = 0

    @on_event
    def stepped(self, event: DomainEvent[Stepped], connection: sqlite3.Connection) -> None:
        self.calls += 1
        row = (event.aggregate_id.id, event.version, event.body.number)
        connection.execute("INSERT INTO effects VALUES (?, ?, ?)", row)


@event_processor
class Mails:
    def __init__(self, hold: Hold) -> None:
        self.hold = hold

    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> None:
        await self.hold.at("in the event processor", event.aggregate_id.id, event.body.number)
        say("mailed", event.aggregate_id.id, event.version)


@saga
class Held(Answering):
    def __init__(self, hold: Hold) -> None:
        super().__init__(ANSWERS)
        self.hold = hold
        self.calls = 0

    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> Step | None:
        self.calls += 1
        await self.hold.at("in the saga", event.aggregate_id.id, event.body.number)
        return await super().stepped(event)


class Store(SqliteStore):
    """A store that is also the application's only client, in the component that outlives all others."""

    app: App

    def __init__(self, path: Path, hold: Hold, traffic: str) -> None:
        super().__init__(path, DOMAIN.serializer)
        self.hold = hold
        self.traffic = traffic
        self.context: RuntimeContext | None = None

    async def prepare(self, context: RuntimeContext, /) -> None:
        await super().prepare(context)
        self.context = context

    def start(self) -> None:
        super().start()
        if self.context is not None and self.traffic:
            self.context.nursery.start_soon(self.send, self.context)

    async def append(self, stream: DomainEventStream) -> None:
        (event,) = stream.events
        await self.hold.at("before the append", stream.aggregate_id.id, event.number)
        await super().append(stream)
        await self.hold.at("after the append", stream.aggregate_id.id, event.number)

    async def send(self, context: RuntimeContext) -> None:
        opened = trio.Event()
        context.admission.watch(opened.set)
        await opened.wait()
        if self.traffic == "idle":
            await self.send_one("only")
            await context.admission.wait_quiet(0)
            say("idle")
        else:
            for n in range(HELD):
                await self.app.gateway.send(Step(f"held-{n}"), request_id="first")
            for n in range(SENDERS):
                context.nursery.start_soon(self.send_many, n)
        await context.stop_requested.wait()
        say("asked to stop")

    async def send_many(self, sender: int) -> None:
        number = 0
        while await self.send_one(f"{sender}-{number}"):
            number += 1

    async def send_one(self, id: str) -> bool:
        try:
            result = await self.app.gateway.send_and_wait(Step(id), request_id="first")
        except AdmissionClosedError:
            say("refused", id)
            return False
        except WaitAbandonedError:
            say("abandoned", id)
            return False
        say("told", id, result.version)
        return True


async def tell(handling: Handling, proceed: Handler) -> object:
    """Write of each message whether it was acknowledged."""
    try:
        return await proceed(handling)
    finally:
        word = "acknowledged" if handling.acknowledged else "unfinished"
        message = handling.message
        what = message.version if isinstance(message, DomainEventStream) else message.body.number + 1
        say(word, handling.dispatcher, message.aggregate_id.id, what)


def application(path: Path, *, hold: str = "", traffic: str = "") -> tuple[App, Rows, Mails, Held]:
    held = Hold(hold)
    store, rows, mails, answering = Store(path, held, traffic), Rows(), Mails(held), Held(held)
    store.app = App(DOMAIN, [rows, mails, answering], store=store, filters=[tell] if traffic else [])
    return store.app, rows, mails, answering
