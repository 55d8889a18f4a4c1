"""The public face of keyed execution."""

import time
from collections.abc import AsyncIterable, Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

import trio
from trio.lowlevel import enable_ki_protection

from trio_wow.errors import ExecutorClosedError, printable
from trio_wow.execution._calls import enter
from trio_wow.execution._cpus import usable_cpus
from trio_wow.execution._dispatch import Dispatch
from trio_wow.execution._lane import current_lane
from trio_wow.execution._pauses import paused_within, watch_pauses
from trio_wow.execution._plain import is_async, name_of, yields
from trio_wow.execution._pool import ExecPool
from trio_wow.execution._profile import DEFAULTS, INLINE, POOL, AdaptiveSettings, ExecClass, ExecProfile, Profiles
from trio_wow.execution._source import BatchSource, ChannelSource, IterableSource
from trio_wow.execution._statistics import KeyedExecutorStatistics, statistics_of_dispatch, statistics_of_worker
from trio_wow.execution._threads import ThreadCall, Threads
from trio_wow.execution._worker import Workers

__all__ = ["KeyedExecutor", "synchronous"]

T = TypeVar("T")

_shared: trio.lowlevel.RunVar["KeyedExecutor | None"] = trio.lowlevel.RunVar("trio_wow.execution.shared", None)


_synchronous: ContextVar[bool] = ContextVar("trio_wow.execution.synchronous", default=False)


@contextmanager
def synchronous() -> Iterator[None]:
    """Let `KeyedExecutor.call` run every plain function on the event loop, until the block is left.

    Whatever its profile or its mark. For tests, and for callers that need the effect before they go on. Such runs are
    not measured.
    """
    token = _synchronous.set(True)
    try:
        yield
    finally:
        _synchronous.reset(token)


class KeyedExecutor:
    """Runs items of one key in order and items of different keys in parallel.

    Each key that has items has a mailbox; a mailbox without items does not exist. Handlers start on the event loop, in
    the dispatch's own nursery. One that returns without waiting costs no task; one that waits keeps its task, which
    bears the mailbox's name, and delays no other key. Between dispatches an executor holds no task and no thread. It
    belongs to one Trio run. Source documents: seeds 000 and 002.

    Args:
        workers: how many handlers may compute at once, over all dispatches; `None` for the CPUs that this process may
            use, by its affinity and its control group's quota. The event loop runs one computation at a time whatever
            the number is, so it bounds the threads of `@direct` handlers; waiting handlers are not counted.
        max_in_flight: items that one dispatch may hold unfinished, running or queued. When a single key holds nearly
            all of them, the dispatch asks its source for nothing more until that key moves on.
        throughput: items of one key handled in a row, while they complete without waiting, before the other keys and
            the event loop get their turn.
        pool: bounds the slow plain functions that run in threads without a worker. By default one of its own, of the
            usual size; one that is given is shared, and its owner closes it; with `None` every plain function runs on
            the event loop, whatever its mark, which is for tests.
        adaptive: when plain functions leave the event loop; see `ExecProfile`.
        blocking_calls: what to do about calls that block the event loop while a handler holds it, such as
            `time.sleep`: "raise" a `BlockingCallError` in place of the call, "warn" with a `BlockingCallWarning`, or
            "allow" them. `docs/keyed-execution.md` lists which calls are seen.
        perf_counter: seconds, to measure how long handlers hold the event loop, and how long plain functions take. It
            is called in threads too. Only with the default one are the garbage collector's pauses no function's time.
        name: what errors and task dumps call it.

    Raises:
        ValueError: a number is not a positive `int`, or `blocking_calls` is none of the three.
        TypeError: `name` is no text, `perf_counter` cannot be called, or `pool` or `adaptive` is of another class.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        max_in_flight: int = 256,
        throughput: int = 16,
        pool: ExecPool | Literal["own"] | None = "own",
        adaptive: AdaptiveSettings = DEFAULTS,
        blocking_calls: Literal["raise", "warn", "allow"] = "allow",
        perf_counter: Callable[[], float] = time.perf_counter,
        name: str = "wow-dispatch",
    ) -> None:
        if workers is None:
            workers = usable_cpus()
        for argument, value in (("workers", workers), ("max_in_flight", max_in_flight), ("throughput", throughput)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{argument} must be a positive int, not {value!r}")
        if blocking_calls not in ("raise", "warn", "allow"):
            raise ValueError(f"blocking_calls must be 'raise', 'warn' or 'allow', not {blocking_calls!r}")
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {name!r}")
        if not callable(perf_counter):
            raise TypeError(f"perf_counter must be a function that returns seconds, not {perf_counter!r}")
        if not (pool is None or pool == "own" or isinstance(pool, ExecPool)):
            raise TypeError(f"pool must be an ExecPool, or None for the event loop alone, not {pool!r}")
        if not isinstance(adaptive, AdaptiveSettings):
            raise TypeError(f"adaptive must be AdaptiveSettings, not {adaptive!r}")
        self._workers = Workers(name, workers)
        self._owns_pool = pool == "own"
        self._pool = ExecPool() if pool == "own" else pool
        # Pauses are measured on the real clock, and mean nothing on another one.
        if perf_counter is time.perf_counter:
            watch_pauses()
            self._profiles = Profiles(adaptive, paused_within)
        else:
            self._profiles = Profiles(adaptive)
        self._threads = Threads(perf_counter)
        self._max_in_flight = max_in_flight
        self._throughput = throughput
        self._blocking_calls = blocking_calls
        self._perf_counter = perf_counter
        self._name = name
        self._closed = False
        self._dispatches: set[Dispatch[Any]] = set()
        self._idle = trio.Event()

    @classmethod
    def shared(cls) -> "KeyedExecutor":
        """Return the executor that all of this Trio run share: the same at each call, until somebody closes it.

        Made with all defaults at the first call, and again when the last one is closed. For parts of a program that
        should share workers and have no common owner to hand them an executor.

        Raises:
            RuntimeError: not inside a Trio run.
        """
        executor = _shared.get()
        if executor is None or executor._closed:
            executor = cls()
            _shared.set(executor)
        return executor

    def sibling(self, name: str, workers: int | None = None) -> "KeyedExecutor":
        """Return a new executor with the settings and the pool of this one, and a life and workers of its own.

        A handler of it may use `call` of this one: what runs directly holds the worker of the new one.

        Args:
            name: the new one's.
            workers: how many it has; `None` for as many as this one.

        Raises:
            ValueError: `workers` is not a positive `int`.
        """
        sibling = KeyedExecutor(
            workers=len(self._workers.all) if workers is None else workers,
            max_in_flight=self._max_in_flight,
            throughput=self._throughput,
            pool=self._pool,
            adaptive=self._profiles.settings,
            blocking_calls=self._blocking_calls,
            perf_counter=self._perf_counter,
            name=name,
        )
        sibling._workers.family = self._workers.family
        return sibling

    def profile_of(self, function: Callable[..., object]) -> ExecProfile:
        """Return what says where a raw function runs; the same each time, as long as the function lives."""
        return self._profiles.of(function)

    @property
    def perf_counter(self) -> Callable[[], float]:
        """As given."""
        return self._perf_counter

    def __repr__(self) -> str:
        return (
            f"<KeyedExecutor {self._name!r}: workers={len(self._workers.all)}, max_in_flight={self._max_in_flight}, "
            f"throughput={self._throughput}, {'closed, ' if self._closed else ''}{len(self._dispatches)} dispatches>"
        )

    def statistics(self) -> KeyedExecutorStatistics:
        """Return what it does at this moment. Costs nothing until called, and then time for each active key.

        From the executor's own thread. Asked from `key` or a callback, the items of a batch that is being taken are in
        flight already, and those not yet in a mailbox in no backlog.
        """
        return KeyedExecutorStatistics(
            workers=tuple(map(statistics_of_worker, self._workers.all)),
            dispatches=tuple(map(statistics_of_dispatch, self._dispatches)),
            functions=self._profiles.statistics(),
            pool=None if self._pool is None else self._pool.statistics(),
            threads_abandoned=self._threads.abandoned,
            late_results=self._threads.late,
            closed=self._closed,
        )

    @enable_ki_protection
    async def dispatch(
        self,
        source: trio.MemoryReceiveChannel[T] | AsyncIterable[T] | BatchSource[T],
        *,
        key: Callable[[T], Hashable],
        handler: Callable[[T], object],
        on_error: Callable[[T, Exception], object] | None = None,
        on_discard: Callable[[T], object] | None = None,
    ) -> None:
        """Handle all items of `source`: one key's one at a time and in order, different keys in parallel.

        Every item ends in exactly one of five states: handled; failed (given to `on_error`, or raised); interrupted
        (its handler was cancelled); discarded (accepted, never started, given to `on_discard`); still in the source.

        Args:
            source: a `trio.MemoryReceiveChannel`, which is left open; a `BatchSource`; or any async iterable, of which
                an async generator is closed at the end.
            key: gives an item's key. A plain, quick function.
            handler: called with each item; an `async def` function, or a plain one, which runs where its `ExecProfile`
                says: on the event loop if it is known to be quick, else in a thread. Its profile outlasts the dispatch.
                Each call has context variables of its own: a copy of those in which `dispatch` was called.
            on_error: takes an item and the `Exception` its handler raised; the dispatch then goes on. Without it, and
                for what is not an `Exception`, a failing handler ends the dispatch.
            on_discard: takes each item that was accepted and will not be started. Both callbacks are plain functions;
                what they raise joins the errors of the dispatch and stops no other hand-over.

        Raises:
            ExecutorClosedError: the executor is closed, or a forced stop ended the dispatch.
            TypeError: `source` is of no known kind; `handler` cannot be called; `key` or a callback is no plain
                function; or a plain handler returned an awaitable.
            CancelScopeLeakError: (to `on_error`, if given) a handler left a cancel scope open.
            BlockingCallError: (in the handler) it made a blocking call, and `blocking_calls` is "raise".
            BaseException: what the source, `key` or the handler raised: a single error itself, several as a group with
                the first one first. Before that the running handlers are cancelled, the items not yet started are
                discarded, and all tasks have left.

        Cancellation: as for an error, and `Cancelled` is raised again; errors of the same moment come with it in a
            group. An item whose handler was cancelled counts as interrupted, never as handled. Handlers in threads
            cannot be interrupted and are waited for.
        Ordering: per key, as received. None between keys.
        Ownership: items are this call's from the moment the source returns them.
        """
        if self._closed:
            raise ExecutorClosedError(self._name, "it refuses new dispatches")
        _check_functions(handler, {"key": key, "on_error": on_error, "on_discard": on_discard})
        dispatch = Dispatch(
            executor=self._name,
            workers=self._workers,
            pool=self._pool,
            profiles=self._profiles,
            threads=self._threads,
            max_in_flight=self._max_in_flight,
            throughput=self._throughput,
            blocking_calls=self._blocking_calls,
            perf_counter=self._perf_counter,
            source=_as_batch_source(source),
            key=key,
            handler=handler,
            on_error=on_error,
            on_discard=on_discard,
        )
        self._dispatches.add(dispatch)
        try:
            await dispatch.run()
        finally:
            self._dispatches.discard(dispatch)
            if not self._dispatches:
                self._idle.set()

    async def call(self, profile: ExecProfile, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> object:
        """Call a plain function where its profile says, for an `async def` handler of this executor.

        A thread that runs it directly holds the worker of the mailbox in whose task, or whose child task, it is called;
        elsewhere it holds none. Every call has context variables of its own: a copy of the caller's, made before
        anything else. It is no checkpoint if it need not wait.

        Args:
            profile: the function's. One that is not of this executor becomes so.
            function: a plain one. An `async def` is called here, and its coroutine returned.
            args: for it.
            kwargs: for it.

        Returns:
            What the function does.

        Raises:
            BaseException: what the function does.

        Cancellation: the function has not started. Once it has, in a thread, it is waited for, and its result is
            returned; only a forced stop leaves it to itself.
        """
        if profile.is_async:
            return function(*args, **kwargs)
        if profile.owner is not self._profiles:
            self._profiles.adopt(profile)
        context, pool, exec_class = copy_context(), self._pool, profile.exec_class
        if pool is None or _synchronous.get():
            return context.run(function, *args, **kwargs)
        if exec_class is INLINE:
            perf_counter = self._perf_counter
            began = perf_counter()
            try:
                return context.run(function, *args, **kwargs)
            finally:
                profile.record(perf_counter() - began)
        return await self._call_in_thread(pool, exec_class, profile, context, partial(function, *args, **kwargs))

    def uses_pool(self, profile: ExecProfile) -> bool:
        """Whether `call` would send the function to the pool now, so that others can run beside it."""
        return profile.exec_class is POOL and self._pool is not None and not _synchronous.get()

    def call_here(self, profile: ExecProfile, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> object:
        """Call a plain function in the present thread, and take note in its profile of how long that took.

        For functions whose thread is somebody else's choice, such as a store's. Returns and raises what it does.
        """
        if profile.owner is not self._profiles:
            self._profiles.adopt(profile)
        began = self._perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            profile.record(self._perf_counter() - began)

    @enable_ki_protection
    async def _call_in_thread(
        self,
        pool: ExecPool,
        exec_class: ExecClass,
        profile: ExecProfile,
        context: Context,
        function: Callable[[], object],
    ) -> object:
        lane = current_lane.get()
        if lane is not None and lane.workers.family is not self._workers.family:  # another executor's handler calls us
            lane = None
        task = trio.lowlevel.current_task()
        name = task.name if lane is None else lane.name_of(task)
        hold = await enter(pool, exec_class, lane)
        calls: set[ThreadCall] = set() if lane is None else lane.calls
        call = ThreadCall(self._threads, calls, profile, name.removeprefix("mailbox "), hold, context, function)
        try:
            return await call.run(name)
        finally:
            if not call.abandoned:
                if hold is not None:
                    hold.end()
                call.record()

    async def aclose(self) -> None:
        """Refuse new dispatches and wait until the running ones have ended. Idempotent.

        A pool of its own is closed with it, a shared one is not.

        Not for a handler of this executor, which would wait for itself.

        Cancellation: the executor stays closed; running dispatches go on.
        """
        self._closed = True
        while self._dispatches:
            if self._idle.is_set():
                self._idle = trio.Event()
            await self._idle.wait()
        self._close_pool()
        await trio.lowlevel.checkpoint()

    def force_stop(self) -> None:
        """Refuse new dispatches and cancel the running ones, which raise `ExecutorClosedError`. Idempotent.

        Threads of their handlers are left to themselves, and named in the log.
        """
        self._closed = True
        for dispatch in list(self._dispatches):
            dispatch.force_stop()
        self._threads.abandon()
        self._close_pool()

    def _close_pool(self) -> None:
        if self._owns_pool and self._pool is not None:
            self._pool.close()

    async def __aenter__(self) -> "KeyedExecutor":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


def _check_functions(handler: object, plain: Mapping[str, object]) -> None:
    if not callable(handler) or yields(handler):
        raise TypeError(f"handler must be a function of one item that does not yield, not {_shown(handler)}")
    for name, function in plain.items():
        if function is None and name != "key":
            continue
        if not callable(function) or is_async(function) or yields(function):
            raise TypeError(f"{name} must be a plain function, not {_shown(function)}")


def _shown(function: object) -> str:
    return name_of(function) if callable(function) else printable(function)


def _as_batch_source(source: object) -> BatchSource[Any]:
    if isinstance(source, trio.MemoryReceiveChannel):
        return ChannelSource(source)
    if isinstance(source, BatchSource):
        return source
    if isinstance(source, AsyncIterable):
        return IterableSource(source)
    raise TypeError(
        f"cannot dispatch from {type(source).__name__}: give a trio.MemoryReceiveChannel, an async iterable or an "
        f"object with `async receive_batch(limit)`"
    )
