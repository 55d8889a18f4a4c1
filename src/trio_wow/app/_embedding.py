"""The runtime inside programs whose main loop is not Trio's: threads, or an asyncio loop."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import trio
from anyio.from_thread import BlockingPortal

from trio_wow.errors import AsyncioCallCancelledError, RuntimeStateError
from trio_wow.execution import split_cancelled
from trio_wow.runtime import Runtime

__all__ = ["AsyncioGuest", "call_asyncio", "serving_in_asyncio", "serving_in_thread"]

P = ParamSpec("P")
T = TypeVar("T")


class _Service:
    """A runtime in a Trio run that is made for it, and what there is to raise at its end."""

    def __init__(self, runtime: Runtime) -> None:
        if not isinstance(runtime, Runtime):
            raise TypeError(f"only a Runtime can be served, not {runtime!r}; an App makes one: app.runtime()")
        self.runtime = runtime
        self.errors: list[BaseException] = []
        self.has_started = False

    async def serve(self, on_started: Callable[[], object]) -> None:
        self._on_started = on_started
        try:
            await self.runtime.serve(task_status=self)
        except BaseException as error:
            cancelled, failure = split_cancelled(error)
            if failure is not None:
                self.errors.append(failure)
            if cancelled is not None:
                raise cancelled from None

    def started(self, value: object = None) -> None:  # noqa: ARG002 - of a task status; here the runtime, which is known
        self.has_started = True
        self._on_started()

    def raise_after(self, errors: list[BaseException]) -> None:
        """Raise what there is: errors of the host, then of the runtime and its run, or that it has never served."""
        errors = [*errors, *self.errors]
        if len(errors) > 1:
            raise BaseExceptionGroup("errors in a block and in the runtime that it served", errors) from None
        if errors:
            raise errors[0]
        if not self.has_started:
            raise RuntimeStateError("a stop was requested before it could serve", self.runtime.state.name)


@contextmanager
def serving_in_thread(runtime: Runtime) -> Iterator[BlockingPortal]:
    """Serve in a Trio thread while the `with` block runs; for programs made of threads: Django, Flask, any WSGI server.

    The block begins when the runtime serves, and gets an anyio `BlockingPortal`: in any other thread
    `portal.call(app.gateway.send_and_wait, command)` runs an async function over there, in the caller's context, and
    waits for it. Keywords need a `functools.partial`.

    At the end of the block the runtime stops in order; then what is left of the calls is cancelled, and raises
    `concurrent.futures.CancelledError`; later ones raise `RuntimeError`. If the runtime stops or fails before, the
    block goes on: its gateway refuses with `AdmissionClosedError`, and `portal.call(runtime.wait_stopped)` returns.

    Enter it in the process that uses it: in one that is forked later the thread is missing, and a call waits for ever.
    A program that ends inside the block cuts the runtime off, as `kill -9` would.

    Args:
        runtime: served here alone. Its thread is not the main one, so that signals are left to the host.

    Raises:
        TypeError: it is no `Runtime`.
        RuntimeStateError: a stop was requested before it could serve.
        BaseException: what the block raised, what `Runtime.serve` raised, and a group of what calls raised that is no
            `Exception`, such as `SystemExit`, which stops the runtime too. One itself, more as a group, in this order.

    Cancellation: a `KeyboardInterrupt` (or what else a signal handler raises) in the block ends it as any error does; a
    call that was waited for goes on until the runtime has stopped. One during the stop forces the stop, then is raised.
    """
    service = _Service(runtime)
    ready: Future[BlockingPortal | None] = Future()
    left, ended = threading.Event(), threading.Event()

    async def main() -> None:
        async with BlockingPortal() as portal:
            await service.serve(lambda: ready.set_result(portal))
            if service.has_started and not left.is_set():
                await trio.to_thread.run_sync(left.wait)
            await portal.stop(cancel_remaining=True)

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            service.errors.append(error)
        finally:
            if not service.has_started:
                ready.set_result(None)
            ended.set()

    # Not anyio's `start_blocking_portal`: it drops what breaks a Trio run, and one never left keeps Python from ending.
    threading.Thread(target=run, name="trio-wow", daemon=True).start()
    errors: list[BaseException] = []
    try:
        if (portal := ready.result()) is not None:
            yield portal
    except BaseException as error:
        if sys.is_finalizing():
            raise  # of a generator that nobody has closed: the thread runs no more
        errors.append(error)
    try:
        left.set()
        runtime.request_stop()
        ended.wait()
    except BaseException as error:
        errors.append(error)
        runtime.force_stop()
        ended.wait()
    service.raise_after(errors)


class AsyncioGuest:
    """A Trio run inside an asyncio loop, in the loop's own thread. Made by `serving_in_asyncio`."""

    _calls: trio.Nursery

    def __init__(self, service: _Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()

    async def call(self, async_fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a Trio function as a Trio task, in a copy of the caller's context, and wait for it.

        Returns:
            What the function returned.

        Raises:
            RuntimeStateError: the block was left, or the runtime failed, before the call had ended. What it failed with
                is the `__cause__`.
            RuntimeError: it was called from Trio code, or in another loop.
            BaseException: what the function raised.

        Cancellation: cancels the Trio function, waits until it has ended, then raises `CancelledError`, whatever the
        function has returned; what it has raised goes before that.
        """
        if trio.lowlevel.in_trio_task() or asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "AsyncioGuest.call is for asyncio code in the loop that it is a guest of; in Trio code await the "
                "function itself, from another thread use asyncio.run_coroutine_threadsafe"
            )
        answer: asyncio.Future[T] = self._loop.create_future()
        scope = trio.CancelScope()
        cancelled: asyncio.CancelledError | None = None

        async def run() -> None:
            try:
                with scope:
                    answer.set_result(await async_fn(*args, **kwargs))
            except BaseException as error:
                # Trio's cancellation says nothing to who waits in asyncio; and a stale one must not end the run.
                _, failure = split_cancelled(error)
                if failure is not None:
                    answer.set_exception(failure)
                await trio.lowlevel.checkpoint_if_cancelled()
            finally:
                answer.cancel()  # unless there is one

        if self._calls.cancel_scope.cancel_called:
            answer.cancel()
        else:
            self._calls.start_soon(run, name=async_fn)
        while not answer.done():
            try:
                await asyncio.wait([answer])
            except asyncio.CancelledError as error:
                cancelled = error
                scope.cancel()
        if not answer.cancelled():
            result = answer.result()
            if cancelled is None:
                return result
        if cancelled is not None:
            raise cancelled
        raise RuntimeStateError(
            "an AsyncioGuest takes calls only while its runtime is served", self._service.runtime.state.name
        ) from next(iter(self._service.errors), None)


@asynccontextmanager
async def serving_in_asyncio(runtime: Runtime) -> AsyncIterator[AsyncioGuest]:
    """Serve inside the running asyncio loop while the `async with` block runs; for programs that need asyncio.

    The block begins when the runtime serves, and gets an `AsyncioGuest`: any task of the loop awaits
    `guest.call(app.gateway.send_and_wait, command)`. At its end the runtime stops in order; then what is left of the
    calls is cancelled. If the runtime fails before, the task that entered the block is cancelled, and the block raises
    what it failed with: enter and leave it in one task. If it stops before, the block goes on: its gateway refuses with
    `AdmissionClosedError`, and `guest.call(runtime.wait_stopped)` returns.

    Args:
        runtime: served here alone. With `signals=False` Ctrl+C stays the host's: `asyncio.run` cancels its main task,
            and that stops the runtime in order. Without `asyncio.run`, Trio takes Ctrl+C: it stops the runtime in order
            too, and the block raises it in a group of its own.

    Raises:
        TypeError: it is no `Runtime`.
        RuntimeStateError: a stop was requested before the runtime could serve.
        RuntimeError: the thread has a Trio run already, and it can have only one.
        BaseException: what the block raised, and what `Runtime.serve` raised. One itself, both as a group, in this
            order. Either goes before a cancellation, as in asyncio's own task groups.

    Cancellation: the first, in the block or at its end, lets the stop go on in order; a further one forces it.
    """
    service = _Service(runtime)
    guest = AsyncioGuest(service)
    ready, ended, left = asyncio.Event(), asyncio.Event(), trio.Event()
    owner = cast("asyncio.Task[Any]", asyncio.current_task())
    in_block = cancelled_owner = False

    async def main() -> None:
        async with trio.open_nursery() as guest._calls:
            # A task of its own, since Trio raises Ctrl+C in the main one: cancelled, the runtime stops in order.
            guest._calls.start_soon(serve, name="runtime")

    async def serve() -> None:
        try:
            await service.serve(ready.set)
            if service.has_started and not service.errors:
                await left.wait()
        finally:
            guest._calls.cancel_scope.cancel()

    def finish(outcome: Any) -> None:
        nonlocal cancelled_owner
        try:
            outcome.unwrap()
        except BaseException as error:
            service.errors.append(error)
        ended.set()
        ready.set()
        if in_block and service.errors:
            cancelled_owner = owner.cancel()

    trio.lowlevel.start_guest_run(
        main,
        run_sync_soon_threadsafe=guest._loop.call_soon_threadsafe,
        run_sync_soon_not_threadsafe=guest._loop.call_soon,
        done_callback=finish,
        host_uses_signal_set_wakeup_fd=True,
    )
    errors: list[BaseException] = []
    cancelled: asyncio.CancelledError | None = None
    try:
        await ready.wait()
        in_block = service.has_started and not ended.is_set()
        if in_block:
            yield guest
    except asyncio.CancelledError as error:
        cancelled = error
    except BaseException as error:
        errors.append(error)
    in_block = False
    if cancelled_owner:
        owner.uncancel()
    left.set()
    runtime.request_stop()
    while not ended.is_set():
        try:
            await ended.wait()
        except asyncio.CancelledError as error:
            if cancelled is not None:
                runtime.force_stop()
            cancelled = cancelled or error
    if cancelled is not None and not (errors or service.errors):
        raise cancelled
    service.raise_after(errors)


async def call_asyncio(async_fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run an asyncio function from Trio code inside `serving_in_asyncio`, such as a handler, and wait for it.

    It runs as an asyncio task, in a copy of the caller's context: what it sends through the guest still counts as sent
    by the handler.

    Returns:
        What the function returned.

    Raises:
        AsyncioCallCancelledError: asyncio cancelled the task, or the function raised asyncio's `CancelledError`, though
            nothing in Trio was cancelled.
        RuntimeError: it was not called from Trio code inside an asyncio loop.
        BaseException: what the function raised. A `SystemExit` or `KeyboardInterrupt` ends the asyncio loop as well, as
            from any asyncio task.

    Cancellation: cancels the asyncio task once, and waits until it has ended. What it returns or raises all the same is
    returned or raised; one that never ends holds its caller, as a shielded Trio task would.
    """
    name = getattr(async_fn, "__qualname__", None) or repr(async_fn)
    try:
        caller, loop = trio.lowlevel.current_task(), asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(f"call_asyncio is for Trio code inside serving_in_asyncio; await {name} itself") from None
    raise_cancelled: Callable[[], NoReturn] | None = None

    def abort(raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        nonlocal raise_cancelled
        raise_cancelled = raise_cancel
        task.cancel()
        return trio.lowlevel.Abort.FAILED

    # Not by `create_task`: an eager task would begin to run in the middle of a Trio task.
    task = asyncio.Task(async_fn(*args, **kwargs), loop=loop, name=f"call {name}")
    task.add_done_callback(lambda _: trio.lowlevel.reschedule(caller))
    await trio.lowlevel.wait_task_rescheduled(abort)
    try:
        return task.result()
    except asyncio.CancelledError as error:
        if raise_cancelled is not None:
            raise_cancelled()
        raise AsyncioCallCancelledError(name) from error
