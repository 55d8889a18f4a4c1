"""Identity of aggregates. One verdict for all backends, given when an identifier is made."""

import re
from functools import lru_cache

from attrs import field, frozen

from trio_wow.errors import InvalidIdentifierError

__all__ = ["DEFAULT_TENANT", "AggregateId", "check_identifier", "check_name", "interned_id"]

DEFAULT_TENANT = "(0)"
MAX_IDENTIFIER = 512


def check_identifier(what: str, value: object) -> str:
    """Return `value` if it can identify something unchanged on every backend.

    Legal is any text of 1 to 512 characters that is not blank and has neither NUL nor lone surrogates. Nothing is
    normalised: `A` is not `a`, and a composed letter is not its decomposed form.

    Raises:
        InvalidIdentifierError: it is something else; the error names `what`.
    """
    if not isinstance(value, str):
        raise InvalidIdentifierError(what, value, "is not text")
    if not value or value.isspace():
        raise InvalidIdentifierError(what, value, "is empty or blank")
    if len(value) > MAX_IDENTIFIER:
        raise InvalidIdentifierError(what, value, f"is longer than {MAX_IDENTIFIER} characters")
    if "\0" in value:
        raise InvalidIdentifierError(what, value, "contains NUL")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidIdentifierError(what, value, "contains a lone surrogate") from None
    return value


_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_name(what: str, value: object) -> str:
    """Return `value` if it can name a context or an aggregate: 1 to 64 ASCII letters, digits, `_` or `-`.

    Raises:
        InvalidIdentifierError: it is something else.
    """
    if not isinstance(value, str) or not _is_name(value):
        raise InvalidIdentifierError(what, value, "must be 1 to 64 ASCII letters, digits, '_' or '-'")
    return value


@lru_cache(maxsize=1024)
def _is_name(value: str) -> bool:
    return _NAME.fullmatch(value) is not None


@frozen(cache_hash=True)
class AggregateId:
    """Names one aggregate: `context.aggregate/id`.

    Equality leaves the tenant out: context, aggregate and id are unique across tenants, so they alone key mailboxes
    and streams. The tenant is data, checked when the aggregate is loaded.

    Attributes:
        context: the bounded context's name.
        aggregate: the aggregate's name in its context.
        id: see `check_identifier`.
        tenant: who owns the aggregate; see `check_identifier`.

    Raises:
        InvalidIdentifierError: one of them is not legal.
    """

    context: str
    aggregate: str
    id: str
    tenant: str = field(default=DEFAULT_TENANT, eq=False)

    def __attrs_post_init__(self) -> None:
        check_name("context", self.context)
        check_name("aggregate name", self.aggregate)
        check_identifier("aggregate ID", self.id)
        if self.tenant is not DEFAULT_TENANT:
            check_identifier("tenant", self.tenant)

    def __str__(self) -> str:
        # Names of tasks and lines of logs are made of it, and an ID may hold a line's end or a terminal's commands.
        id = self.id if self.id.isprintable() else self.id.encode("unicode_escape").decode()
        return f"{self.context}.{self.aggregate}/{id}"


_interned = lru_cache(maxsize=1024)(AggregateId)


def interned_id(context: str, aggregate: str, id: str, tenant: str = DEFAULT_TENANT) -> AggregateId:
    """Return an `AggregateId`, and for other messages of that aggregate the same object: checked once, found sooner.

    The last 1,024 are kept.

    Raises:
        InvalidIdentifierError: as for `AggregateId`.
    """
    if type(id) is str and type(tenant) is str:
        return _interned(context, aggregate, id, tenant)
    return AggregateId(context, aggregate, id, tenant)  # not everything that is no plain text has a hash
