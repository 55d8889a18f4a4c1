"""Who waits for whom: a handler that waits for a command to an aggregate up the chain would wait for itself."""

import json
from contextvars import ContextVar

from trio_wow.errors import SelfWaitError
from trio_wow.messages import AggregateId, CommandMessage

__all__ = ["WAITS", "handles", "waits_for"]

WAITS = "wow-waits"
"""The header of a command whose sender waits: the aggregates whose command functions wait for it, outermost first."""

Chain = tuple[tuple[str, ...], ...]

_chain: ContextVar[Chain] = ContextVar("trio_wow.dispatch.waits", default=())


def handles(message: CommandMessage) -> None:
    """Take note that the command is handled from now on, in the present context."""
    _chain.set((*_read(message.headers.get(WAITS)), _key(message.aggregate_id)))


def waits_for(aggregate_id: AggregateId) -> dict[str, str]:
    """Return the headers of a command to an aggregate for which the present context is going to wait.

    Raises:
        SelfWaitError: that aggregate is one of those which wait already.
    """
    chain = _chain.get()
    if _key(aggregate_id) in chain:
        raise SelfWaitError(aggregate_id, ["/".join(each) for each in chain])
    return {WAITS: json.dumps(chain)} if chain else {}


def _key(aggregate_id: AggregateId) -> tuple[str, ...]:
    return aggregate_id.context, aggregate_id.aggregate, aggregate_id.id


def _read(text: str | None) -> Chain:
    if text is None:
        return ()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # the latter of a text that is deeply nested
        return ()  # anybody may write headers; the wait then ends by its timeout
    if not isinstance(found, list):
        return ()
    return tuple(
        tuple(each) for each in found if isinstance(each, list) and all(isinstance(part, str) for part in each)
    )
