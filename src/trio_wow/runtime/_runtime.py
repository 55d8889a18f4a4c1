"""The lifecycle: one nursery tree, ordered start, ordered stop, one deadline."""

import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from math import inf

import trio

from trio_wow.errors import HandlerExitError, RuntimeStateError, ShutdownDeadlineError
from trio_wow.execution import KeyedExecutor, split_cancelled
from trio_wow.runtime._admission import Admission
from trio_wow.runtime._component import RuntimeComponent, RuntimeContext
from trio_wow.runtime._state import ComponentStatistics, LeaseStatistics, RuntimeState, RuntimeStatistics

__all__ = ["Runtime"]

_log = logging.getLogger("trio_wow.runtime")

# Signals belong to the process. Two owners whose lives overlap would put each other's handlers back.
_signals_free = threading.Lock()

# By the component's `id`, which is its own for as long as the runtime holds it. Of the whole process: stopping a
# component that lives in another thread's runtime would be worse still.
_owners: dict[int, "Runtime"] = {}


class _Slot:
    """A component's place in the tree: its cancel scope, its nursery once it has one, and how far it has come."""

    nursery: trio.Nursery

    def __init__(self, component: RuntimeComponent, name: str) -> None:
        self.component = component
        self.name = name
        self.scope = trio.CancelScope()
        self.prepared = False
        self.step: str | None = None
        self.cut_off = False
        self.released = trio.Event()
        self.left = trio.Event()

    @property
    def waiting_for(self) -> str | None:
        """The step that it is in, or that a forced stop has just interrupted."""
        return "stop" if self.cut_off else self.step


class Runtime:
    """Starts components in order, serves until told to stop, and stops them in reverse order under one deadline.

    One-shot: make a new one to start again.

    Args:
        components: prepared and started in this order, stopped in the reverse order.
        executor: the executor that all components share; the runtime owns it and closes it last. `None` makes one.
        shutdown_timeout: seconds from the stop request until what still runs is cancelled; positive and finite.
        shutdown_quiet_period: seconds without any running operation before admission closes, so that the events of
            the last commands still reach their processors. At least 0, less than `shutdown_timeout`; `None` for
            a tenth of it, at most 1.
        signals: whether SIGINT and SIGTERM ask for a stop and, the second time, force it. Only in the main thread;
            elsewhere, and with `False`, signals are left to the host.

    Raises:
        ValueError: a number is out of its range, or two components have one name.
        TypeError: a component lacks a method of `RuntimeComponent`.
    """

    def __init__(
        self,
        components: Sequence[RuntimeComponent],
        *,
        executor: KeyedExecutor | None = None,
        shutdown_timeout: float = 60.0,
        shutdown_quiet_period: float | None = None,
        signals: bool = True,
    ) -> None:
        if not 0 < shutdown_timeout < inf:
            raise ValueError(f"shutdown_timeout must be a positive number of seconds, not {shutdown_timeout!r}")
        if shutdown_quiet_period is None:
            shutdown_quiet_period = min(1.0, shutdown_timeout / 10)
        if not 0 <= shutdown_quiet_period < shutdown_timeout:
            raise ValueError(
                f"shutdown_quiet_period must be at least 0 and less than shutdown_timeout ({shutdown_timeout!r}), "
                f"not {shutdown_quiet_period!r}"
            )
        for component in components:
            if not isinstance(component, RuntimeComponent):
                raise TypeError(
                    f"{component!r} is no RuntimeComponent: it lacks one of prepare, start, quiesce, stop, force_stop"
                )
        self._slots = [_Slot(component, name) for component, name in zip(components, _names(components), strict=True)]
        self._executor = executor if executor is not None else KeyedExecutor()
        self._timeout = shutdown_timeout
        self._quiet_period = shutdown_quiet_period
        self._signals = signals
        self._state = RuntimeState.NEW
        self._admission = Admission()
        self._token: trio.lowlevel.TrioToken | None = None
        self._asked_early: str | None = None
        self._stop_requested = trio.Event()
        self._stopped = trio.Event()
        self._served = False
        self._start_scope = trio.CancelScope()
        self._quiet_scope = trio.CancelScope()
        self._graceful = trio.CancelScope()
        self._drained = False
        self._force_asked = trio.Event()
        self._forced = trio.Event()
        self._forced_by: str | None = None
        self._errors: list[BaseException] = []
        self._reported: list[BaseException] = []

    @property
    def state(self) -> RuntimeState:
        """Where the runtime is in its life."""
        return self._state

    def statistics(self) -> RuntimeStatistics:
        """Return what it does at this moment: what runs, and while it stops, what it waits for.

        Costs nothing until called, and then time for each open operation and each task. From the runtime's own thread.
        """
        seconds_left = None
        if self._state is RuntimeState.STOPPING:
            seconds_left = max(0.0, self._graceful.deadline - trio.current_time())
        elif self._state is RuntimeState.FORCE_STOPPING:
            seconds_left = 0.0
        return RuntimeStatistics(
            self._state,
            seconds_left,
            tuple(LeaseStatistics(*operation) for operation in self._operations()),
            tuple(
                ComponentStatistics(
                    slot.name, slot.step, slot.left.is_set(), tuple(_task_names(slot.nursery)) if slot.prepared else ()
                )
                for slot in self._slots
            ),
        )

    async def serve(self, *, task_status: trio.TaskStatus["Runtime"] = trio.TASK_STATUS_IGNORED) -> None:
        """Start, serve until a stop is requested, stop in order, return.

        `task_status.started(runtime)` is called when work from outside is taken. A stop request during the start rolls
        the start back, and `serve` returns without having called it.

        Raises:
            RuntimeStateError: it was called before. Or another runtime of this process takes the signals, or has one of
                the components: nothing was called then, and this one can be served when that one has stopped.
            ShutdownDeadlineError: the stop was forced, by its deadline or by `force_stop`.
            BaseException: what a component raised. A single error itself; several, a forced stop included, as a group
                with the first one first. A `SystemExit` comes as `HandlerExitError`.

        Cancellation: asks for a stop, finishes in order within the deadline, then `Cancelled` is raised. A
            `KeyboardInterrupt`, where this is the main task and takes no signals, asks for a stop too, or forces one
            that has begun, and is raised.
        """
        if self._state is not RuntimeState.NEW:
            raise RuntimeStateError("serve can be called only once; make a new Runtime", self._state.name)
        takes_signals = self._signals and threading.current_thread() is threading.main_thread()
        if takes_signals and not _signals_free.acquire(blocking=False):
            raise RuntimeStateError(
                "another runtime takes this process's signals; pass signals=False", self._state.name
            )
        try:
            self._own_components()
            try:
                await self._serve(task_status, takes_signals=takes_signals)
            finally:
                self._disown_components()
                self._state = RuntimeState.STOPPED
                self._stopped.set()
        finally:
            if takes_signals:
                _signals_free.release()

    def _own_components(self) -> None:
        for slot in self._slots:
            if _owners.setdefault(id(slot.component), self) is not self:
                self._disown_components()
                raise RuntimeStateError(
                    f"{slot.name} belongs to another runtime until that has stopped", self._state.name
                )

    def _disown_components(self) -> None:
        for slot in self._slots:
            if _owners.get(id(slot.component)) is self:
                del _owners[id(slot.component)]

    async def _serve(self, task_status: trio.TaskStatus["Runtime"], *, takes_signals: bool) -> None:
        self._state = RuntimeState.STARTING
        self._token = trio.lowlevel.current_trio_token()
        if self._asked_early is not None:
            self._begin_stop()
            if self._asked_early == "force":
                self._force("force_stop()")
        cancelled: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                # Not in this task: where it is the main one, Trio raises Ctrl+C in the middle of what it waits for.
                nursery.start_soon(self._run_shielded, task_status, takes_signals, nursery.cancel_scope, name="runtime")
                while True:
                    try:
                        await trio.sleep_forever()
                    except trio.Cancelled:
                        self._begin_stop()
                        raise
                    except BaseException as error:
                        if self._state is RuntimeState.STOPPING:
                            self._force(type(error).__name__)
                        self._fail(error)
        except BaseException as error:
            cancelled, failure = split_cancelled(error)
            if failure is not None:
                self._errors.append(_without_exit(failure))
        if cancelled is not None:
            if not self._errors:
                await trio.lowlevel.checkpoint_if_cancelled()
                raise cancelled
            self._errors.append(cancelled)
        if len(self._errors) > 1:
            raise BaseExceptionGroup("errors in a runtime", self._errors)
        if self._errors:
            raise self._errors[0]

    def request_stop(self) -> None:
        """Ask for an ordered stop. Synchronous, idempotent, from any task or thread; before `serve`, it stops at once.

        The deadline runs from the first request; a further one moves nothing.
        """
        self._ask("stop")

    def force_stop(self) -> None:
        """Cancel what still runs, now. Synchronous, idempotent, from any task or thread."""
        self._ask("force")

    async def wait_stopped(self) -> None:
        """Wait until `serve` has ended, however it ended. Cancelling the wait moves nothing."""
        await self._stopped.wait()

    async def wait_forced(self) -> None:
        """Wait until a stop is forced, by its deadline, `force_stop` or a second signal; for ever if none is.

        What still runs has then been named in the log and cancelled. A task that shields itself goes on all the same,
        and `serve` cannot return before it ends: a host that must not wait for it ends the process. Cancelling the
        wait moves nothing.
        """
        await self._forced.wait()

    def _ask(self, what: str) -> None:
        # Written before the token is read, as `serve` reads it after it wrote the token: one of the two sees the other.
        self._asked_early = "force" if self._asked_early == "force" else what
        if self._token is None:
            return
        act = self._begin_stop if what == "stop" else self._force_by_request
        # Not between tasks: a signal handler may have interrupted Trio's own scheduling there.
        if trio.lowlevel.in_trio_task() and trio.lowlevel.current_trio_token() is self._token:
            act()
            return
        try:
            self._token.run_sync_soon(act, idempotent=True)
        except trio.RunFinishedError:
            return

    def _force_by_request(self) -> None:
        self._force("force_stop()")

    def _begin_stop(self) -> None:
        if self._state not in (RuntimeState.STARTING, RuntimeState.RUNNING):
            return
        self._state = RuntimeState.STOPPING
        self._graceful.deadline = trio.current_time() + self._timeout
        self._admission.close_intake()
        self._stop_requested.set()
        self._start_scope.cancel()

    def _force(self, reason: str) -> None:
        self._begin_stop()
        if self._state is RuntimeState.STOPPING:
            self._forced_by = self._forced_by or reason
            self._graceful.cancel()
            self._force_asked.set()

    def _fail(self, error: BaseException) -> None:
        """Take note of a fatal error, once: admission closes at once and nobody waits for quiet."""
        rest = self._not_reported(error)
        if rest is not None:
            self._reported.extend(_leaves(rest))
            self._errors.append(_without_exit(rest))
        self._begin_to_fail()

    def _begin_to_fail(self) -> None:
        self._admission.close()
        self._begin_stop()
        self._start_scope.cancel()
        self._quiet_scope.cancel()

    def _not_reported(self, error: BaseException) -> BaseException | None:
        """Leave out what was reported when it happened and arrives again with the task that it ended.

        By its leaves: a group that passes a cancelled scope on its way is another group afterwards.
        """
        if not isinstance(error, BaseExceptionGroup):
            return None if any(error is each for each in self._reported) else error
        known, rest = error.split(lambda part: any(part is each for each in self._reported))
        return error if known is None else rest

    def _absorb(self, error: BaseException, scope: trio.CancelScope, what: str) -> None:
        """Take note of the failure in what was raised, and raise the cancellation in it that `scope` asked for."""
        cancelled, failure = split_cancelled(error)
        if failure is not None:
            self._fail(failure)
        if cancelled is not None:
            if scope.cancel_called:
                raise cancelled
            self._fail(RuntimeError(f"{what} raised trio.Cancelled although nothing had been cancelled"))

    async def _watch_deadline(self) -> None:
        """Force the stop where a step that shields itself keeps `_start` or `_stop` from doing so."""
        await self._stop_requested.wait()
        with trio.CancelScope(deadline=self._graceful.deadline - self._timeout / 2):
            await self._force_asked.wait()
        if not (self._drained or self._force_asked.is_set() or self._forced.is_set()):
            _log.warning(
                "half of the time to stop (%s s) is over; still waiting: %s",
                self._timeout,
                ShutdownDeadlineError.describe(self._held(), self._operations()) or "for the runtime itself",
            )
        with trio.CancelScope(deadline=self._graceful.deadline):
            await self._force_asked.wait()
        # What is cancelled or done in this very moment has its turn first.
        await trio.lowlevel.checkpoint()
        if not self._drained:
            self._cancel_what_runs()

    async def _watch_signals(self, *, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
            task_status.started()
            first = signal.Signals(await anext(received)).name
            _log.info("%s: stopping within %s s; once more forces it", first, self._timeout)
            self._begin_stop()
            async for number in received:
                self._force(f"a second signal ({signal.Signals(number).name})")

    async def _run_shielded(
        self, task_status: trio.TaskStatus["Runtime"], takes_signals: bool, until: trio.CancelScope
    ) -> None:
        with trio.CancelScope(shield=True):
            await self._run(task_status, takes_signals=takes_signals)
        until.cancel()

    async def _run(self, task_status: trio.TaskStatus["Runtime"], *, takes_signals: bool) -> None:
        async with trio.open_nursery() as tree:
            if takes_signals:
                await tree.start(self._watch_signals, name="runtime signals")
            tree.start_soon(self._watch_deadline, name="runtime deadline")
            for slot in self._slots:
                await tree.start(self._host, slot, name=f"component {slot.name}")
            with self._start_scope:
                await self._start()
                self._state = RuntimeState.RUNNING
                self._served = True
                self._admission.open_intake()
                self._guarded(partial(task_status.started, self))
            await self._stop_requested.wait()
            await self._stop()
            tree.cancel_scope.cancel()

    async def _host(self, slot: _Slot, *, task_status: trio.TaskStatus[None]) -> None:
        try:
            with slot.scope:
                async with trio.open_nursery(strict_exception_groups=True) as slot.nursery:
                    task_status.started()
                    try:
                        await slot.released.wait()
                    except trio.Cancelled:
                        # A task has failed. What it raised comes when the others have left, which may take its time.
                        if slot.step != "stop" and not slot.scope.cancel_called:
                            self._begin_to_fail()
                        raise
        except BaseExceptionGroup as group:
            # The nursery's own group, one layer: what a task raised stays as it is, groups included.
            for error in group.exceptions:
                self._fail(error)
        else:
            # A component may end its own tasks by cancelling its nursery when it stops.
            if slot.step != "stop" and not slot.released.is_set() and not slot.scope.cancel_called:
                self._fail(
                    RuntimeError(f"a task of {slot.name} raised trio.Cancelled although nothing had been cancelled")
                )
        finally:
            slot.left.set()

    async def _start(self) -> None:
        try:
            for slot in self._slots:
                await trio.lowlevel.checkpoint_if_cancelled()
                slot.prepared = True
                context = RuntimeContext(
                    slot.nursery, self._executor, self._stop_requested, self._admission, self._fail
                )
                await self._in_step(slot, "prepare", partial(slot.component.prepare, context))
            await trio.lowlevel.checkpoint_if_cancelled()
            for slot in self._slots:
                if not self._stop_requested.is_set():
                    slot.component.start()
            await trio.lowlevel.checkpoint_if_cancelled()
            await self._catch_up()
        except BaseException as error:
            self._absorb(error, self._start_scope, "the start of a component")
        # A failure cancels the start scope; leave through it.
        await trio.lowlevel.checkpoint_if_cancelled()

    async def _catch_up(self) -> None:
        waits = [
            partial(self._in_step, slot, "caught_up", wait)
            for slot in self._slots
            if (wait := getattr(slot.component, "caught_up", None)) is not None
        ]
        try:
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                for wait in waits:
                    nursery.start_soon(wait)
            if nursery.cancel_scope.cancel_called:
                raise RuntimeError("caught_up of a component raised trio.Cancelled although nothing had been cancelled")
        except BaseExceptionGroup as group:
            # All failures before the cancellation, which ends this.
            cancelled, failures = group.split(trio.Cancelled)
            for error in () if failures is None else failures.exceptions:
                self._fail(error)
            if cancelled is not None:
                self._absorb(cancelled, self._start_scope, "caught_up of a component")

    async def _stop(self) -> None:
        prepared = [slot for slot in self._slots if slot.prepared]
        with self._graceful:
            if not self._errors:
                with self._quiet_scope:
                    # Before it serves, only catching up can hold leases, and nothing follows them from outside.
                    await self._admission.wait_quiet(self._quiet_period if self._served else 0)
            self._admission.close()
            for slot in prepared:
                self._guarded(slot.component.quiesce)
            for slot in reversed(prepared):
                forced = self._graceful.cancel_called
                try:
                    await self._in_step(slot, "stop", slot.component.stop)
                except BaseException as error:
                    slot.cut_off = self._graceful.cancel_called and not forced
                    self._absorb(error, self._graceful, f"stop of {slot.name}")
                slot.released.set()
                await slot.left.wait()
            await self._executor.aclose()
            self._drained = True
        if self._graceful.cancelled_caught:
            await self._stop_by_force(prepared)
        for slot in self._slots:
            slot.released.set()

    async def _stop_by_force(self, prepared: Sequence[_Slot]) -> None:
        self._cancel_what_runs()
        for slot in prepared:
            await slot.left.wait()

    def _cancel_what_runs(self) -> None:
        if self._forced.is_set():
            return
        self._state = RuntimeState.FORCE_STOPPING
        self._admission.close()
        reason = self._forced_by or f"its deadline ({self._timeout} s)"
        prepared = [slot for slot in self._slots if slot.prepared]
        error = ShutdownDeadlineError(reason, self._held(), self._operations())
        _log.error("%s", error)
        for failure in self._errors:  # a task that shields itself may keep `serve` from ever raising them
            _log.error("before that a component had failed", exc_info=failure)
        self._errors.append(error)
        for slot in reversed(prepared):
            self._guarded(slot.component.force_stop)
            slot.scope.cancel()
        self._executor.force_stop()
        self._forced.set()

    def _held(self) -> dict[str, tuple[str, ...]]:
        """Return what each component has not finished, those that stop first in front, or else what the executor runs.

        A component that has left holds nothing. The executor is the last to be waited for.
        """
        slots = [slot for slot in reversed(self._slots) if slot.prepared and not slot.left.is_set()]
        held = {
            slot.name: (*((f"its {step}()",) if (step := slot.waiting_for) else ()), *_task_names(slot.nursery))
            for slot in slots
        }
        if not held and (dispatches := self._executor.statistics().dispatches):
            held["the executor"] = tuple(dispatch.handler for dispatch in dispatches)
        return held

    def _operations(self) -> list[tuple[str, float]]:
        """Return name and age of each open operation, oldest first."""
        leases = self._admission.leases
        now = trio.current_time() if leases else 0.0
        return [(lease.name, now - lease.since) for lease in leases]

    async def _in_step(self, slot: _Slot, step: str, function: Callable[[], Awaitable[object]]) -> None:
        slot.step = step
        try:
            await function()
        finally:
            slot.step = None

    def _guarded(self, step: Callable[[], object]) -> None:
        """Run one step that does not wait; its failure must not keep components from stopping."""
        try:
            step()
        except BaseException as error:
            self._fail(error)


def _names(components: Sequence[object]) -> Iterator[str]:
    """Yield a name for each component: its own `name`, else its class's, numbered where that is taken."""
    own = [str(name) for component in components if (name := getattr(component, "name", None))]
    for name in own:
        if own.count(name) > 1:
            # Dispatchers of one name would also share a consumer group, and each would miss what the other gets.
            raise ValueError(f"two components are named {name!r}; give one another name")
    taken = set(own)
    for component in components:
        base = name = str(getattr(component, "name", None) or type(component).__name__)
        if not getattr(component, "name", None):
            number = 1
            while name in taken:
                number += 1
                name = f"{base} {number}"
            taken.add(name)
        yield name


def _task_names(nursery: trio.Nursery) -> Iterator[str]:
    for task in sorted(nursery.child_tasks, key=lambda task: task.name):
        yield task.name
        for inner in task.child_nurseries:
            yield from _task_names(inner)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _without_exit(error: BaseException) -> BaseException:
    """Replace each `SystemExit` in what was raised by a `HandlerExitError` that has it as its cause."""
    if isinstance(error, SystemExit):
        replaced = HandlerExitError(error.code)
        replaced.__cause__ = error
        return replaced
    if isinstance(error, BaseExceptionGroup):
        inner = [_without_exit(leaf) for leaf in error.exceptions]
        if any(new is not old for new, old in zip(inner, error.exceptions, strict=True)):
            group = BaseExceptionGroup(error.message, inner).with_traceback(error.__traceback__)
            group.__cause__, group.__context__ = error.__cause__, error.__context__
            group.__suppress_context__ = error.__suppress_context__
            for note in getattr(error, "__notes__", ()):  # says of which message it came
                group.add_note(note)
            return group
    return error
