"""What is done about executions that have failed for good: recording them, and trying one again by its ID."""

import logging
from collections.abc import Iterable
from typing import Protocol

from trio_wow.dispatch._filters import Outcome
from trio_wow.errors import FailureNotRetryableError
from trio_wow.eventsourcing import EventStore, FailedExecution, FailureRecorder, FailureStore, Recording
from trio_wow.messages import DomainEventStream

__all__ = ["FailureRetries", "record"]

_log = logging.getLogger("trio_wow.dispatch")

_OUTCOMES = {
    Recording.RECORDED: Outcome.FAILURE_RECORDED,
    Recording.WAIVED: Outcome.FAILURE_WAIVED,
    Recording.UNRECORDED: Outcome.FAILURE_UNRECORDED,
}


async def record(recorder: FailureRecorder, failure: FailedExecution) -> Outcome:
    """Give a failure to the recorder, and return what that means for the message. Raises no `Exception`."""
    try:
        outcome = _OUTCOMES[await recorder.record(failure)]
    except Exception:
        _log.exception("%s, and recording that failed", _told(failure))
        return Outcome.RECORDING_FAILED
    if outcome is Outcome.FAILURE_RECORDED:
        _log.error("%s; that is recorded", _told(failure))
    return outcome


def _told(failure: FailedExecution) -> str:
    return (
        f"{failure.function} failed on version {failure.version} of {failure.aggregate_id} "
        f"({failure.error}: {failure.text})"
    )


class _Retrying(Protocol):
    async def retry(self, failure: FailedExecution, failures: FailureStore, stream: DomainEventStream, /) -> bool: ...


class FailureRetries:
    """Tries failed executions again while a runtime runs.

    The function that has failed, and no other, is called for its event by the dispatcher that it belongs to, with its
    filters and retries, while nothing else of that aggregate is handled there. What came after the event has been
    handled before: a function that is tried again sees its event late.

    Args:
        failures: keeps the failed executions.
        store: keeps the streams.
    """

    def __init__(self, failures: FailureRecorder, store: EventStore) -> None:
        self._failures = failures
        self._store = store
        self._dispatchers: dict[str, _Retrying] = {}
        self._running: set[str] = set()

    def add(self, functions: Iterable[str], dispatcher: _Retrying) -> None:
        """Take note of functions, by the names that their failures have, and of the dispatcher that runs them now."""
        for function in functions:
            self._dispatchers[function] = dispatcher

    async def retry(self, id: str) -> bool:
        """Try a failed execution again, and wait for it; when it succeeds, the failure is resolved.

        When it fails for good once more, that is recorded: the failure keeps its ID, and the attempts are added.

        Args:
            id: names the failure.

        Returns:
            Whether it has succeeded.

        Raises:
            FailureNotRetryableError: nobody keeps failures, or this one; its function or its event is not there; it is
                being tried already; or the caller is a function that handles a message, which would wait for itself.
            AdmissionClosedError: no runtime runs, or it is ending.
            ExecutorClosedError: a forced stop ended the function; the failure stays open.
            StoreError: the store cannot be used. If that happens when the function has succeeded, the failure stays
                open: a function is called at least once.

        Cancellation: the function is cancelled, if it runs, and the failure stays open.
        """
        if id in self._running:
            raise FailureNotRetryableError(id, "it is being tried already")
        self._running.add(id)
        try:
            return await self._retry(id)
        finally:
            self._running.remove(id)

    async def _retry(self, id: str) -> bool:
        failures = self._failures
        if not isinstance(failures, FailureStore):
            raise FailureNotRetryableError(id, "failures are not kept; give the App a FailureStore as `failures`")
        failure = await failures.failure(id)
        if failure is None:
            raise FailureNotRetryableError(id, "there is none that is open")
        dispatcher = self._dispatchers.get(failure.function)
        if dispatcher is None:
            raise FailureNotRetryableError(id, f"there is no function {failure.function}, or it was never served")
        version = failure.version
        streams = await self._store.load(failure.aggregate_id, after=version - 1, until=version)
        if not streams:
            raise FailureNotRetryableError(id, f"version {version} of {failure.aggregate_id} is not in the store")
        return await dispatcher.retry(failure, failures, streams[0])
