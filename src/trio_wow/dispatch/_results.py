"""Who waits for which command, and what became of it."""

from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from types import TracebackType
from typing import Any

import trio
from attrs import evolve, field, frozen

from trio_wow.errors import WaitAbandonedError, WaitTimeoutError
from trio_wow.execution import lent
from trio_wow.messages import CommandError, CommandResult, Stage, StateEvent

__all__ = ["CommandResults", "CommandWait", "StagePart"]


_LOST = CommandError("lost", "what the command has led to was let go")


@frozen(eq=False)
class StagePart:
    """One of those who have to be done before a command has reached a stage beyond `PROCESSED`.

    Attributes:
        stage: the stage.
        name: tells it from the others of that stage.
        concerns: says whether it has anything to do for what a command has led to. Plain, quick, and never raises.
    """

    stage: Stage
    name: str
    concerns: Callable[[StateEvent[Any]], bool] = field(repr=False)


class CommandWait:
    """One command that somebody waits for: an async iterator of its signals. Made by `CommandResults.expecting`.

    `SENT` comes first, `PROCESSED` second, then the later stages as they are reached, each at most once. It ends with
    the stage that is waited for, or with a `PROCESSED` that has an error. Signals are taken while its `with` block
    runs. One task at a time waits or iterates.

    Attributes:
        command_id: the message's ID.
        until: the stage.
        timeout: seconds that it was given.
        deadline: when they end, on Trio's clock.
    """

    __slots__ = (
        "_abandoned",
        "_each",
        "_early",
        "_ended",
        "_last",
        "_parked",
        "_parts",
        "_pending",
        "_processed",
        "_signals",
        "_waits",
        "command_id",
        "deadline",
        "timeout",
        "until",
    )

    def __init__(
        self,
        command_id: str,
        until: Stage,
        timeout: float,
        each: bool,
        waits: dict[str, "CommandWait"],
        parts: Mapping[Stage, Mapping[str, StagePart]],
    ) -> None:
        self.command_id = command_id
        self.until = until
        self.timeout = timeout
        self.deadline = inf if timeout == inf else trio.current_time() + timeout
        self._each = each
        self._waits = waits
        self._parts = parts
        self._signals: deque[CommandResult] = deque()
        self._last: CommandResult | None = None
        self._processed: CommandResult | None = None
        # What the later stages wait for is known with PROCESSED; what comes before that is kept.
        self._pending: dict[Stage, set[str]] = {}
        self._early: list[tuple[StagePart, CommandError | None]] = []
        self._ended = False
        self._abandoned = False
        self._parked: trio.lowlevel.Task | None = None

    def __enter__(self) -> "CommandWait":
        self._waits[self.command_id] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self._waits[self.command_id]
        self._end()

    async def wait(self) -> CommandResult:
        """Wait for the last signal, however long that takes, and return it.

        Raises:
            WaitAbandonedError: the runtime has ended, or is ending, before it came.
        """
        while not self._ended:
            await self._park()
        if self._abandoned or self._last is None:
            raise WaitAbandonedError(self.command_id, self._reached)
        return self._last

    def __aiter__(self) -> "CommandWait":
        return self

    async def __anext__(self) -> CommandResult:
        """Return the next signal.

        Raises:
            WaitTimeoutError: the last one has not come in time.
            WaitAbandonedError: the runtime has ended, or is ending, before the last one came.
            HandlerInterruptedError: (in a thread, which lends its worker meanwhile) the message was cancelled.
        """
        await trio.lowlevel.checkpoint()
        if not self._signals and not self._ended:
            await lent(self._wait_for_next)
        if self._signals:
            return self._signals.popleft()
        if self._abandoned:
            raise WaitAbandonedError(self.command_id, self._reached)
        if self._ended:
            raise StopAsyncIteration
        raise self.timed_out()

    async def _wait_for_next(self) -> None:
        with trio.move_on_at(self.deadline):
            while not self._signals and not self._ended:
                await self._park()

    async def _park(self) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            self._parked = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._parked = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake(self) -> None:
        if self._parked is not None:
            trio.lowlevel.reschedule(self._parked)
            self._parked = None

    def timed_out(self) -> WaitTimeoutError:
        """Return the error that says that the time is up."""
        return WaitTimeoutError(self.command_id, self.until.name, self.timeout, self._reached)

    @property
    def _reached(self) -> str | None:
        return None if self._last is None else self._last.stage.name

    @property
    def _is_over(self) -> bool:
        return self._ended or (self.deadline != inf and trio.current_time() >= self.deadline)

    def sent(self, result: CommandResult) -> None:
        """Take note of `SENT`."""
        if self._last is None and not self._ended:
            self._signal(result)

    def processed(self, result: CommandResult, stored: StateEvent[Any] | None) -> None:
        """Take note of `PROCESSED`: the first time counts."""
        if self._is_over or self._processed is not None:
            return
        if self._last is None and (self._each or self.until is Stage.SENT):
            self._signal(evolve(result, stage=Stage.SENT, version=None, error=None, value=None))
        self._processed = result
        self._signal(result)
        if result.error is not None:
            self._end()
        if self._ended:
            return
        for stage, parts in self._parts.items():
            self._pending[stage] = {
                name for name, part in parts.items() if stored is not None and part.concerns(stored)
            }
            if not self._pending[stage]:
                self._reach(stage, None)
        for part, error in self._early:
            self.done(part, error)

    def done(self, part: StagePart, error: CommandError | None) -> None:
        """Take note that a part is done, or has failed."""
        if self._processed is None:
            self._early.append((part, error))
            return
        pending = self._pending.get(part.stage)
        if self._is_over or pending is None or part.name not in pending:
            return
        pending.remove(part.name)
        if error is not None or not pending:
            self._reach(part.stage, error)

    def abandon(self) -> None:
        """Take note that no further signal will come."""
        if not self._ended:
            self._abandoned = True
            self._end()

    def _reach(self, stage: Stage, error: CommandError | None) -> None:
        self._pending[stage] = set()
        if error is _LOST:
            if stage is self.until:
                self.abandon()
        elif self._processed is not None:
            self._signal(evolve(self._processed, stage=stage, error=error))

    def _signal(self, result: CommandResult) -> None:
        if self._ended:
            return
        self._last = result
        if self._each:
            self._signals.append(result)
        if result.stage is self.until:
            self._ended = True
        self._wake()

    def _end(self) -> None:
        self._ended = True
        self._wake()


class CommandResults:
    """Brings to those who wait for commands what became of them, inside one process.

    Nothing is kept: what nobody waits for is dropped. What is told here changes nothing for the command.
    """

    def __init__(self) -> None:
        self._waits: dict[str, CommandWait] = {}
        self._parts: dict[Stage, dict[str, StagePart]] = {}

    @property
    def waiting(self) -> int:
        """How many commands are waited for."""
        return len(self._waits)

    def serve(self, part: StagePart, /) -> None:
        """Take note of a part that will tell of commands from now on. One of the same stage and name is replaced."""
        self._parts.setdefault(part.stage, {})[part.name] = part

    def serves(self, stage: Stage, /) -> bool:
        """Whether anybody here tells that a command has reached a stage."""
        return stage in (Stage.SENT, Stage.PROCESSED) or stage in self._parts

    def expecting(
        self, command_id: str, until: Stage = Stage.PROCESSED, timeout: float = inf, *, each: bool = False
    ) -> CommandWait:
        """Expect the signals of a command that is about to be sent: enter what this returns, then send.

        Args:
            command_id: the message's ID.
            until: the last stage.
            timeout: seconds from now on for all of them together.
            each: whether it is iterated, rather than only the last signal waited for.

        Raises:
            ValueError: that command is waited for already.
        """
        if command_id in self._waits:
            raise ValueError(f"command {command_id} is waited for already; send another message with its request ID")
        return CommandWait(command_id, until, timeout, each, self._waits, self._parts)

    def processed(self, result: CommandResult, stored: StateEvent[Any] | None = None, /) -> None:
        """Take note of a result of stage `PROCESSED`, and of what the command has led to. Never raises."""
        if (wait := self._waits.get(result.command_id)) is not None:
            wait.processed(result, stored)

    def done(self, part: StagePart, command_id: str, error: CommandError | None = None, /) -> None:
        """Take note that a part is done with what a command has led to, or has failed at it. Never raises."""
        if (wait := self._waits.get(command_id)) is not None:
            wait.done(part, error)

    def lost(self, part: StagePart, command_id: str, /) -> None:
        """Take note that a part has let go of what a command has led to, unhandled or half handled. Never raises."""
        self.done(part, command_id, _LOST)

    def abandoned(self, command_id: str, /) -> None:
        """Take note that a command has been let go unhandled, or half handled. Never raises."""
        if (wait := self._waits.get(command_id)) is not None:
            wait.abandon()

    def abandon_all(self) -> None:
        """Take note that no further signal will come for any command."""
        for wait in self._waits.values():
            wait.abandon()
