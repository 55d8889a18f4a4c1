"""Taking cancellation and failure apart when both arrive in one group."""

import trio

__all__ = ["split_cancelled"]


def split_cancelled(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Split what was raised into its cancellation and its failure; either part may be `None`.

    A group that holds both is split with its structure kept, so that no error in it is lost and no `Cancelled` is
    swallowed. The caller re-raises the first part and reports the second.
    """
    if isinstance(error, trio.Cancelled):
        return error, None
    if isinstance(error, BaseExceptionGroup):
        cancelled, failure = error.split(trio.Cancelled)
        return (cancelled, failure) if cancelled is not None else (None, error)
    return None, error
