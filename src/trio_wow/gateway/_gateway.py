"""The command gateway."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import trio
from attrs import evolve

from trio_wow.buses import CommandBus
from trio_wow.dispatch import WAITS, CommandResults, waits_for
from trio_wow.domain import Domain
from trio_wow.errors import AdmissionClosedError, NoSubscriberError, StageUnavailableError
from trio_wow.execution import lent
from trio_wow.messages import DEFAULT_TENANT, CommandMessage, CommandResult, Stage
from trio_wow.runtime import Admission, RuntimeContext

__all__ = ["CommandGateway", "check_wait"]


def check_wait(until: Stage, timeout: float) -> None:
    """Refuse a wait that no gateway could keep.

    Raises:
        TypeError: `until` is no `Stage`.
        ValueError: `timeout` is not a positive number of seconds.
    """
    if not isinstance(until, Stage):
        raise TypeError(f"until must be a Stage, not {until!r}")
    if not 0 < timeout <= inf:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")


class CommandGateway:
    """Sends commands into a runtime, and tells their senders what became of them.

    A runtime component: put it last, so that it stops first. Before the runtime runs and after its stop was requested,
    it refuses commands from outside.

    Args:
        domain: knows where commands go.
        bus: where they go.
        results: those that the command dispatcher reports to; by default new ones, to be given to it.
        name: the component's name.

    Attributes:
        name: the component's name.
        results: brings results to those who wait.
    """

    def __init__(
        self, domain: Domain, bus: CommandBus, *, results: CommandResults | None = None, name: str = "command-gateway"
    ) -> None:
        self.name = name
        self.results = results if results is not None else CommandResults()
        self._domain = domain
        self._bus = bus
        self._admission: Admission | None = None

    async def send(
        self,
        command: Any,
        *,
        request_id: str | None = None,
        tenant: str = DEFAULT_TENANT,
        headers: Mapping[str, str] | None = None,
        expected_version: int | None = None,
    ) -> CommandResult:
        """Send a command, and return once the bus has taken it.

        Waits while the receiver's window is full, unless it is called while a message is being handled.

        Args:
            command: an attrs object whose `id` names the aggregate. Before it is sent, the validators of its fields
                are run, and its `validate()`, if it has that: a plain method that raises to refuse it, and returns
                `None`.
            request_id: names what is wanted: an aggregate stores the events of one request once. By default a new one.
            tenant: the tenant who sends it.
            headers: copied, but for `wow-waits`.
            expected_version: the version at which the aggregate must be, or the command fails with
                `ExpectedVersionError`; 0 for one to which nothing has happened. `None` for any.

        Returns:
            A result of stage `SENT`.

        Raises:
            AdmissionClosedError: the runtime does not run, or its stop was requested.
            UnroutableCommandError: no aggregate handles this class.
            NoSubscriberError: no dispatcher receives it.
            InvalidCommandError: a validator of one of its fields, or its own `validate()`, refuses it.
            InvalidIdentifierError: the command's `id`, the request ID or the tenant is not legal.
            SerializationError: JSON cannot hold one of the command's values.
            ValueError: `expected_version` is no version.

        Cancellation: a cancelled call has sent nothing; on a local-first bus it may have (`docs/local-first.md`).
        Ordering: commands that one task sends one after the other reach an aggregate in that order.
        """
        return await self._send(self._message(command, request_id, tenant, headers, expected_version))

    async def send_and_wait(
        self,
        command: Any,
        *,
        until: Stage = Stage.PROCESSED,
        timeout: float = 30.0,  # noqa: ASYNC109 - the wait's deadline belongs to the command
        request_id: str | None = None,
        tenant: str = DEFAULT_TENANT,
        headers: Mapping[str, str] | None = None,
        expected_version: int | None = None,
    ) -> CommandResult:
        """Send a command, and wait until it has reached a stage.

        Called by a plain function in its thread, through `trio.from_thread.run`, the thread lends its worker or its
        place in the pool meanwhile. A command function must not wait for a command to its own aggregate, nor to one
        whose command function waits for it: that one could not begin before this one has returned.
        Nor for a stage to which the calling function itself contributes.

        Args:
            command: as for `send`.
            until: the stage.
            timeout: seconds for sending and waiting together; positive.
            request_id: as for `send`.
            tenant: as for `send`.
            headers: as for `send`.
            expected_version: as for `send`.

        Returns:
            The result of that stage; of stage `PROCESSED` at once when the command has failed. That is a result with an
            `error`, not an exception here; see `CommandResult.raise_for_error`. What a stage proves, and that it is
            reached at once where nobody has anything to do for the command: `docs/waiting.md`.

        Raises:
            WaitTimeoutError: the stage was not reached in time.
            WaitAbandonedError: the runtime stopped first.
            StageUnavailableError: nobody in this process tells of that stage. Nothing was sent.
            SelfWaitError: the aggregate is one of those that wait for the caller.
            HandlerInterruptedError: (in a thread) the message that the function handles was cancelled.
            ValueError: `timeout` is not a positive number, or `expected_version` no version.
            TypeError: `until` is no `Stage`.
            WowError: as for `send`.

        Cancellation: the command may have been sent, and is then handled all the same; nothing waits for it any more.
        """
        self._check_wait(until, timeout)
        message = self._waited_for(self._message(command, request_id, tenant, headers, expected_version), until)

        async def send_and_wait() -> CommandResult:
            with self.results.expecting(message.id, until, timeout) as wait:
                with trio.CancelScope(deadline=wait.deadline):  # `move_on_at` adds a generator to each command
                    wait.sent(await self._send(message))
                    return await wait.wait()
                raise wait.timed_out()

        return await lent(send_and_wait)

    @asynccontextmanager
    async def stream(
        self,
        command: Any,
        *,
        until: Stage = Stage.PROCESSED,
        timeout: float = 30.0,  # noqa: ASYNC109 - as for `send_and_wait`
        request_id: str | None = None,
        tenant: str = DEFAULT_TENANT,
        headers: Mapping[str, str] | None = None,
        expected_version: int | None = None,
    ) -> AsyncGenerator[AsyncIterator[CommandResult], None]:
        """Send a command, and follow it stage by stage.

            async with gateway.stream(command, until=Stage.PROJECTED) as signals:
                async for result in signals:
                    ...

        The command is sent when the block is entered. The iterator, for one task, yields a result for each stage of
        which anybody in this process tells, and ends with that for `until`, or with a failed `PROCESSED`. A later stage
        that has failed is a result with an `error`; the others still come.

        Args:
            command: as for `send`.
            until: the last stage.
            timeout: seconds from entering the block to the last signal, whatever comes in between; positive. What has
                come by then can still be read.
            request_id: as for `send`.
            tenant: as for `send`.
            headers: as for `send`.
            expected_version: as for `send`.

        Raises:
            WaitTimeoutError: on entering, it could not be sent in time; from the iterator, `until` was not reached.
            WaitAbandonedError: from the iterator, the runtime stopped first.
            HandlerInterruptedError: (in a thread) from the iterator, as for `send_and_wait`.
            WowError: on entering, as for `send_and_wait`; so are `ValueError` and `TypeError`.

        Cancellation: as for `send_and_wait`. Leaving the block early ends the waiting, not the command.
        Ordering: `SENT`, `PROCESSED`, then the others as they are reached, each at most once.
        """
        self._check_wait(until, timeout)
        message = self._waited_for(self._message(command, request_id, tenant, headers, expected_version), until)
        with self.results.expecting(message.id, until, timeout, each=True) as wait:
            with trio.move_on_at(wait.deadline) as sending:
                wait.sent(await self._send(message))
            if sending.cancelled_caught:
                raise wait.timed_out()
            yield wait

    async def prepare(self, context: RuntimeContext, /) -> None:
        """See `RuntimeComponent.prepare`."""
        self._admission = context.admission

    def start(self) -> None:
        """See `RuntimeComponent.start`. The runtime's intake is the gateway's door."""

    def quiesce(self) -> None:
        """See `RuntimeComponent.quiesce`. The runtime's intake is the gateway's door."""

    async def stop(self) -> None:
        """See `RuntimeComponent.stop`. Who waits for a command goes on waiting: its dispatcher stops later."""
        await trio.lowlevel.checkpoint()

    def force_stop(self) -> None:
        """See `RuntimeComponent.force_stop`. Nothing is held."""

    def _message(
        self,
        command: Any,
        request_id: str | None,
        tenant: str,
        headers: Mapping[str, str] | None,
        expected_version: int | None,
    ) -> CommandMessage:
        self._check_admission()
        message = self._domain.command_message(
            command, request_id=request_id, tenant=tenant, headers=headers, expected_version=expected_version
        )
        if WAITS in message.headers:  # of a message whose headers are handed on: who waits for that does not for this
            message = evolve(message, headers={k: v for k, v in message.headers.items() if k != WAITS})
        return message

    def _waited_for(self, message: CommandMessage, until: Stage) -> CommandMessage:
        if until is not Stage.SENT and self._admission is not None and self._admission.is_inside():
            return evolve(message, headers={**message.headers, **waits_for(message.aggregate_id)})
        return message

    def _check_admission(self) -> None:
        admission = self._admission
        if admission is None or not (admission.intake_is_open or admission.is_inside()):
            raise AdmissionClosedError(self.name)

    def _check_wait(self, until: Stage, timeout: float) -> None:
        check_wait(until, timeout)
        if not self.results.serves(until):
            self._check_admission()  # before a runtime has run, nobody tells of anything
            raise StageUnavailableError(until.name)

    async def _send(self, message: CommandMessage) -> CommandResult:
        if not await self._bus.send_if_subscribed(message):
            self._check_admission()  # its receivers may have left because the runtime began to stop meanwhile
            raise NoSubscriberError(message.aggregate_id)
        return CommandResult(
            command_id=message.id,
            request_id=message.request_id,
            aggregate_id=message.aggregate_id,
            stage=Stage.SENT,
        )
