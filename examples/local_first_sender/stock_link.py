"""The local-first sender: decides here first, and sends to the server whenever there is a connection."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from math import inf
from typing import Any, Protocol

import stamina
import trio

from stock_outbox import Entry, Outbox, State
from trio_wow import CommandResult, Domain, KeyedExecutor
from trio_wow.errors import (
    AdmissionClosedError,
    ConnectionLostError,
    ConnectionRefusedByServerError,
    DuplicateRequestIdError,
    InvalidCommandError,
    WaitAbandonedError,
    WaitTimeoutError,
    WowError,
)
from trio_wow.messages import CommandError, CommandMessage

IN_FLIGHT = 64
"""Commands that one connection has in hand: being sent, or behind another one of their aggregate."""

LINK_TROUBLE = (ConnectionRefusedByServerError, WaitAbandonedError, WaitTimeoutError, AdmissionClosedError)
"""What says nothing of a command, but that another connection is needed."""


class Gateway(Protocol):
    """What is used of a command gateway, be it the local one or the server's."""

    async def send_and_wait(self, command: Any, *, request_id: str, timeout: float = 30.0) -> CommandResult:  # noqa: ASYNC109 - as there
        """See `CommandGateway.send_and_wait`."""
        ...


class LinkDownError(Exception):
    """A connection could not be opened, or was of no use; the cause says why."""


class UndecidedError(Exception):
    """The server has neither taken a command nor refused it."""


class Sender:
    """Takes commands whether or not the server can be reached.

    Each command is kept in the outbox, then decided by the local model, then sent; after each step it is marked, and
    whatever is cut short is done again with the same request ID. So the server gets it at least once, and stores it
    once. Commands of one aggregate are sent in their order, each when the one before has its answer; those of different
    ones at the same time, up to `IN_FLIGHT`.

    The server has the last word. What it refuses, though the local model has taken it, is marked and told, and not sent
    again; the commands after it are sent all the same, for the server to decide by what it knows. From then on the
    device's copy of that aggregate differs, until a command is sent that does not build on it (`Count`). A server
    remembers what it has stored, not what it has refused: a copy of a refused command that is still on its way, from a
    connection that was lost, is decided once more when it arrives.

    What the server can decide neither way (its store is locked, it does not know the class) stays, holds up what comes
    after it for the same aggregate, and is tried again. Up to `IN_FLIGHT` commands can be held up so; then those of
    other aggregates wait as well. That an idle connection is lost is noticed with the next command.

    One task calls `recover`, then `submit`; another one runs `keep_sending`.

    Args:
        domain: checks commands.
        outbox: keeps them.
        local: decides them here.
        connect: opens a connection to the server.
        backoff_max: seconds that the pauses between two attempts grow to.
        say: is told, line by line, what becomes of the commands.
    """

    def __init__(
        self,
        domain: Domain,
        outbox: Outbox,
        local: Gateway,
        connect: Callable[[], AbstractAsyncContextManager[Gateway]],
        *,
        backoff_max: float = 5.0,
        say: Callable[[str], object],
    ) -> None:
        self._domain = domain
        self._outbox = outbox
        self._local = local
        self._connect = connect
        self._backoff_max = backoff_max
        self._say = say
        self._changed = trio.Event()
        self._told: str | None = None
        self._has_worked = False

    async def recover(self) -> None:
        """Decide what was kept and perhaps not decided, before anything else is: it is older.

        Raises:
            CommandFailedError: as for `submit`.
        """
        while entries := await self._outbox.entries(State.NEW):
            for entry in entries:
                await self._decide(entry)

    def checked(self, command: Any) -> CommandMessage:
        """Return a command as it can be kept and sent, with a new request ID.

        Raises:
            WowError: it is not legal.
        """
        return self._domain.command_message(command)

    async def submit(self, message: CommandMessage) -> None:
        """Keep a command, let the local model decide it, and have it sent if that takes it.

        Raises:
            CommandFailedError: the local model could not decide it, because the disk is full, say. It is kept, and
                decided by the next `recover`.

        Cancellation: it is kept, or not; what is kept is decided and sent some time.
        """
        await self._decide(await self._outbox.append(message))

    async def keep_sending(self) -> None:
        """Send what is pending, over one connection after the other. Runs until it is cancelled."""
        while True:
            # One that has worked ends this round, and with it the growth of the pauses.
            async for attempt in self._attempts(LinkDownError):
                with attempt:
                    await self._use_connection()

    async def wait_sent(self) -> None:
        """Wait until every command that was taken here has its answer from the server."""
        while True:
            changed = self._changed
            if not await self._outbox.entries(State.PENDING, limit=1):
                return
            await changed.wait()

    async def next_pending(self, after: int, limit: int) -> Sequence[Entry]:
        """Wait until there is something to send beyond an ordinal, and return the first of it."""
        while True:
            changed = self._changed
            if entries := await self._outbox.entries(State.PENDING, after=after, limit=limit):
                return entries
            await changed.wait()

    async def _decide(self, entry: Entry) -> None:
        result = await self._local.send_and_wait(entry.command, request_id=entry.request_id, timeout=inf)
        error = refusal(result)
        if error is None:
            await self._mark(entry, State.PENDING)
            left = "decided before" if result.value is None else f"{result.value} left"
            self._say(f"{shown(entry)}: {left}")
        elif error.undecided:
            result.raise_for_error()
        else:
            await self._mark(entry, State.REJECTED, error)
            self._say(f"{shown(entry)}: not done: {error.text} ({error.code})")

    async def _use_connection(self) -> None:
        """Send over one connection until it is of no more use.

        Raises:
            LinkDownError: it was of none: no command has got its answer, and it did not last.
        """
        self._has_worked = False
        began = trio.current_time()
        trouble: ExceptionGroup[Exception] | None = None
        try:
            async with self._connect() as gateway:
                self._told = None
                self._say("connected")
                async with KeyedExecutor(name="link", max_in_flight=IN_FLIGHT) as executor:
                    await executor.dispatch(
                        _Pending(self), key=lambda entry: entry.aggregate_id, handler=partial(self._send, gateway)
                    )
        except* LINK_TROUBLE as group:
            trouble = group
            self._tell_offline(group.exceptions[0])
        if not self._has_worked and trio.current_time() - began <= self._backoff_max:
            raise LinkDownError from trouble

    async def _send(self, gateway: Gateway, entry: Entry) -> None:
        async for attempt in self._attempts(UndecidedError):
            with attempt:
                try:
                    await self._send_once(gateway, entry)
                except UndecidedError as error:
                    if attempt.num == 1:
                        self._say(f"{shown(entry)}: the server cannot decide it now, so it waits: {error}")
                    raise

    async def _send_once(self, gateway: Gateway, entry: Entry) -> None:
        try:
            error = refusal(await gateway.send_and_wait(entry.command, request_id=entry.request_id))
        except LINK_TROUBLE:
            raise
        except InvalidCommandError as invalid:
            error = CommandError.of(invalid)
        except WowError as trouble:
            raise UndecidedError(str(trouble)) from trouble
        if error is None:
            await self._mark(entry, State.DELIVERED)
            self._say(f"{shown(entry)}: delivered")
        elif error.undecided:
            raise UndecidedError(f"{error.text} ({error.code})")
        else:
            await self._mark(entry, State.REFUSED, error)
            why = f"{error.text} ({error.code})"
            self._say(f"{shown(entry)}: refused by the server: {why}; the record here differs now")
        self._has_worked = True

    async def _mark(self, entry: Entry, state: State, error: CommandError | None = None) -> None:
        await self._outbox.mark(entry, state, *((error.code, error.text) if error is not None else ()))
        self._changed.set()
        self._changed = trio.Event()

    def _attempts(self, on: type[Exception]) -> Any:
        """Return attempts without end, with pauses that grow."""
        return stamina.retry_context(
            on, attempts=None, timeout=None, wait_initial=0.1, wait_max=self._backoff_max, wait_jitter=0.1
        )

    def _tell_offline(self, error: BaseException) -> None:
        why = f"the connection was lost: {error.reason}" if isinstance(error, ConnectionLostError) else str(error)
        why = why.partition("\n")[0][:300]  # whoever has answered may have sent a whole page
        if self._told != why:
            self._told = why
            self._say(f"offline: {why}")


class _Pending:
    """What is to be sent over one connection, in order: a `BatchSource` without an end."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._last = 0

    async def receive_batch(self, limit: int, /) -> Sequence[Entry]:
        """See `BatchSource`."""
        batch = await self._sender.next_pending(self._last, limit)
        self._last = batch[-1].ordinal
        return batch


def refusal(result: CommandResult) -> CommandError | None:
    """Return why a command was not taken; `None` if it was, this time or before."""
    error = result.error
    return None if error is None or error.code == DuplicateRequestIdError.__name__ else error


def shown(entry: Entry) -> str:
    """Return a command as it was typed, with its number."""
    command = entry.command
    return f"#{entry.ordinal} {type(command).__name__.lower()} {command.id} {command.quantity}"
