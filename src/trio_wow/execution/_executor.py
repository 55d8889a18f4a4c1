"""The public face of keyed execution."""

import time
from collections.abc import AsyncIterable, Callable, Hashable, Mapping
from types import TracebackType
from typing import Any, Literal, TypeVar

import trio
from trio.lowlevel import enable_ki_protection

from trio_wow.errors import ExecutorClosedError, printable
from trio_wow.execution._cpus import usable_cpus
from trio_wow.execution._dispatch import Dispatch
from trio_wow.execution._plain import is_async, name_of, yields
from trio_wow.execution._source import BatchSource, ChannelSource, IterableSource
from trio_wow.execution._statistics import KeyedExecutorStatistics, statistics_of_dispatch, statistics_of_worker
from trio_wow.execution._worker import Workers

__all__ = ["KeyedExecutor"]

T = TypeVar("T")

_shared: trio.lowlevel.RunVar["KeyedExecutor | None"] = trio.lowlevel.RunVar("trio_wow.execution.shared", None)


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
        blocking_calls: what to do about calls that block the event loop while a handler holds it, such as
            `time.sleep`: "raise" a `BlockingCallError` in place of the call, "warn" with a `BlockingCallWarning`, or
            "allow" them. `docs/keyed-execution.md` lists which calls are seen.
        perf_counter: seconds, to measure how long handlers hold the event loop.
        name: what errors and task dumps call it.

    Raises:
        ValueError: a number is not a positive `int`, or `blocking_calls` is none of the three.
        TypeError: `name` is no text, or `perf_counter` cannot be called.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        max_in_flight: int = 256,
        throughput: int = 16,
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
        self._workers = Workers(name, workers)
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
        """Return a new executor with the settings of this one and a life and workers of its own.

        Args:
            name: the new one's.
            workers: how many it has; `None` for as many as this one.

        Raises:
            ValueError: `workers` is not a positive `int`.
        """
        return KeyedExecutor(
            workers=len(self._workers.all) if workers is None else workers,
            max_in_flight=self._max_in_flight,
            throughput=self._throughput,
            blocking_calls=self._blocking_calls,
            perf_counter=self._perf_counter,
            name=name,
        )

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
            handler: called with each item; an `async def` function, or a plain one, which runs on the event loop unless
                it is marked `@direct` or `@blocking`. Each call has context variables of its own: a copy of those in
                which `dispatch` was called.
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

    async def aclose(self) -> None:
        """Refuse new dispatches and wait until the running ones have ended. Idempotent.

        Not for a handler of this executor, which would wait for itself.

        Cancellation: the executor stays closed; running dispatches go on.
        """
        self._closed = True
        while self._dispatches:
            if self._idle.is_set():
                self._idle = trio.Event()
            await self._idle.wait()
        await trio.lowlevel.checkpoint()

    def force_stop(self) -> None:
        """Refuse new dispatches and cancel the running ones, which raise `ExecutorClosedError`. Idempotent.

        Threads of their handlers are left to themselves, and named in the log.
        """
        self._closed = True
        for dispatch in list(self._dispatches):
            dispatch.force_stop()

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
