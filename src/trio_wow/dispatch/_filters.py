"""Filters around handlers: the chain, and the filters that dispatchers have by default."""

import enum
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from math import inf
from typing import Any, Protocol

import stamina
from attrs import define

from trio_wow.buses import MessageExchange
from trio_wow.dispatch._results import CommandResults
from trio_wow.errors import WowError, printable
from trio_wow.execution import is_async
from trio_wow.messages import CommandResult, StateEvent

__all__ = [
    "Filter",
    "FilterChain",
    "Handler",
    "Handling",
    "Outcome",
    "Retry",
    "StageNotifier",
    "is_retryable",
    "leaves",
]

_log = logging.getLogger("trio_wow.dispatch")


class Outcome(enum.Enum):
    """What has become of a message in a dispatcher. The later ones outweigh the earlier where functions differ."""

    HANDLED = 0
    """Every function has succeeded. Acknowledged."""
    FAILURE_RECORDED = 1
    """A function has failed for good, and the failure recorder keeps that. Acknowledged."""
    FAILURE_WAIVED = 2
    """A function has failed for good, and the failure recorder need not keep that. Acknowledged."""
    FAILURE_UNRECORDED = 3
    """A function has failed for good, and nobody keeps that but a log. Acknowledged, unless the dispatcher does not."""
    RECORDING_FAILED = 4
    """A function has failed for good, and so has the failure recorder. Not acknowledged."""
    UNFINISHED = 5
    """The runtime is ending, or what is needed cannot be read. Not acknowledged."""

    @property
    def settles(self) -> bool:
        """Whether the message needs nothing more: a checkpoint may pass it."""
        return self.value <= Outcome.FAILURE_WAIVED.value


@define(eq=False)
class Handling:
    """One message on its way through a dispatcher, or one call of a function for it.

    Attributes:
        dispatcher: the dispatcher's name.
        message: the envelope.
        function: the class and the method that is called; `None` around the message as a whole.
        attempts: how often the function has been called for this, this time included.
        exchange: the delivery, around the message as a whole.
        outcome: what has become of the message, when it has been handled, and around the message as a whole.
        acknowledged: whether it has been acknowledged.
        result: of a command that has been handled, around the message as a whole.
        stored: what that command has led to, in this delivery or a former one; `None` for nothing, or not known.
    """

    dispatcher: str
    message: Any
    function: str | None = None
    attempts: int = 0
    exchange: MessageExchange[Any] | None = None
    outcome: Outcome | None = None
    acknowledged: bool = False
    result: CommandResult | None = None
    stored: StateEvent[Any] | None = None


class Handler(Protocol):
    """What comes next in a chain: another filter, or what handles the message or calls the function."""

    def __call__(self, handling: Handling, /) -> Awaitable[object]:
        """Go on."""
        ...


class Filter(Protocol):
    """See `FilterChain`."""

    def __call__(self, handling: Handling, proceed: Handler, /) -> Awaitable[object]:
        """Do something around what comes next."""
        ...


class FilterChain:
    """An ordered list of filters, the first outermost.

    A filter is an `async` callable that takes a `Handling` and what comes next, and calls that once, as a rule:

        async def timed(handling: Handling, proceed: Handler) -> object:
            with span(handling.function):
                return await proceed(handling)

    One that does not call it, or swallows its error, decides so about the message. The list may be changed at any time:
    what is under way keeps the filters it began with. The chain around a handler is composed once for each version of
    the list, not for each message.

    Args:
        filters: the first is outermost.

    Attributes:
        version: of the list; grows with each change.

    Raises:
        TypeError: one is not `async`.
    """

    def __init__(self, filters: Iterable[Filter] = ()) -> None:
        self._filters = tuple(map(_checked, filters))
        self.version = 0

    def __iter__(self) -> Iterator[Filter]:
        return iter(self._filters)

    def __len__(self) -> int:
        return len(self._filters)

    def append(self, filter: Filter) -> None:
        """Put a filter innermost, next to the handler.

        Raises:
            TypeError: it is not `async`.
        """
        self.insert(len(self._filters), filter)

    def insert(self, index: int, filter: Filter) -> None:
        """Put a filter before the one at `index`, as for a list; 0 for outermost.

        Raises:
            TypeError: it is not `async`.
        """
        filters = [*self._filters]
        filters.insert(index, _checked(filter))
        self._change(filters)

    def remove(self, filter: Filter) -> None:
        """Take a filter out.

        Raises:
            ValueError: it is not there.
        """
        filters = [*self._filters]
        filters.remove(filter)
        self._change(filters)

    def around(self, handler: Handler) -> Handler:
        """Return a handler that goes through the filters, as they are at each call, to this one."""
        composed, version = handler, -1

        def handle(handling: Handling) -> Awaitable[object]:
            nonlocal composed, version
            if version != self.version:
                composed = handler
                for each in reversed(self._filters):
                    composed = _linked(each, composed)
                version = self.version
            return composed(handling)

        return handle

    def _change(self, filters: Iterable[Filter]) -> None:
        self._filters = tuple(filters)
        self.version += 1


def _checked(filter: Filter) -> Filter:
    if not is_async(filter):
        raise TypeError(f"a filter is an async callable that takes a Handling and what comes next, not {filter!r}")
    return filter


def _linked(filter: Filter, proceed: Handler) -> Handler:
    def handle(handling: Handling) -> Awaitable[object]:
        return filter(handling, proceed)

    return handle


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield what a group holds, however deep, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


def is_retryable(error: BaseException) -> bool:
    """Say whether the same call may succeed when it is tried again.

    An error says so itself with an attribute `retryable`. Without it, one that this package raises on purpose may not,
    and any other `Exception` may, as nobody knows better. Of a group every leaf must be.
    """
    return all(map(_may_pass, leaves(error)))


def _may_pass(error: BaseException) -> bool:
    if (said := getattr(error, "retryable", None)) is not None:
        return bool(said)
    return isinstance(error, Exception) and not isinstance(error, WowError)


class Retry:
    """A filter that tries again, after a backoff that doubles each time, while only what shares its mailbox waits.

    Args:
        on: says of an error whether to try again after it; by default `is_retryable`.
        retries: how often after the first time; at least 0, or `None` for no end.
        backoff: seconds before the first retry; at least 0.
        max_backoff: seconds before any retry at most; at least `backoff`.
        jitter: up to so many seconds, by chance, are added to each backoff; at least 0.

    Raises:
        ValueError: a number is out of its range.

    The error of the last time is raised as it is. Cancellation: a backoff ends at once.
    """

    def __init__(
        self,
        on: Callable[[Exception], bool] = is_retryable,
        *,
        retries: int | None = 3,
        backoff: float = 2.0,
        max_backoff: float = 30.0,
        jitter: float = 0.5,
    ) -> None:
        if retries is not None and (type(retries) is not int or retries < 0):
            raise ValueError(f"retries must be an int of at least 0, or None, not {retries!r}")
        for name, value, least in (
            ("backoff", backoff, 0.0),
            ("max_backoff", max_backoff, backoff),
            ("jitter", jitter, 0.0),
        ):
            if not least <= value < inf:
                raise ValueError(f"{name} must be a number of seconds of at least {least}, not {value!r}")
        self._on = on
        self._attempts = None if retries is None else retries + 1
        self._backoff = backoff
        self._max_backoff = max_backoff
        self._jitter = jitter

    async def __call__(self, handling: Handling, proceed: Handler) -> object:
        """See `FilterChain`."""
        try:
            return await proceed(handling)
        except Exception as error:
            # What has failed for good before, and is tried again because the next message has come, has one attempt.
            # What failed in a filter before it came to the call has had one all the same.
            left = None if self._attempts is None else self._attempts - max(handling.attempts, 1)
            if (left is not None and left < 1) or not self._may_try_again(error):
                raise
            failed = error
        try:
            # The time that has failed already is the first attempt: most calls never pay for the machinery.
            async for attempt in stamina.retry_context(
                on=self._may_try_again,
                attempts=None if left is None else left + 1,
                timeout=None,
                wait_initial=self._backoff,
                wait_max=self._max_backoff,
                wait_jitter=self._jitter,
            ):
                with attempt:
                    if attempt.num == 1:
                        _log.info(
                            "%s failed (%s: %s); it is tried again",
                            handling.function or handling.dispatcher,
                            type(failed).__name__,
                            printable(failed),
                        )
                        raise failed
                    return await proceed(handling)
        finally:
            del failed
        raise AssertionError("stamina neither succeeded nor raised")

    def _may_try_again(self, error: BaseException) -> bool:
        # stamina asks of a cancellation and a `SystemExit` too, which no answer may hold up.
        return isinstance(error, Exception) and self._on(error)


class StageNotifier:
    """A filter that tells those who wait for commands how they ended, once they are acknowledged.

    Args:
        results: who waits.
    """

    def __init__(self, results: CommandResults) -> None:
        self._results = results

    async def __call__(self, handling: Handling, proceed: Handler) -> object:
        """See `FilterChain`."""
        await proceed(handling)
        if handling.acknowledged and handling.result is not None:
            self._results.processed(handling.result, handling.stored)
        return None
