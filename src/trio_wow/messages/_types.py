"""The registered names of message bodies. What is stored names a type, never an import path."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import attrs
from attrs import frozen

from trio_wow.errors import UnknownMessageTypeError

__all__ = ["EventUpgrader", "MessageType", "MessageTypes", "message_type"]

C = TypeVar("C", bound=type)
_ATTRIBUTE = "__wow_message_type__"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@frozen
class MessageType:
    """What is written beside a body.

    Attributes:
        name: unique in an application.
        revision: of the body's shape, from 1.
        aliases: names under which older bodies of this type are stored.
    """

    name: str
    revision: int = 1
    aliases: tuple[str, ...] = ()


def message_type(name: str, *, revision: int = 1, aliases: Sequence[str] = ()) -> Callable[[C], C]:
    """Name a command's or event's class. Without it, the name is the class's and the revision is 1.

    Args:
        name: 1 to 128 ASCII letters, digits, `_`, `-` or `.`.
        revision: at least 1; raise it when the shape changes, and give an `EventUpgrader` for the older one.
        aliases: former names.

    Raises:
        ValueError: one of them is not legal.
    """
    if isinstance(aliases, str):
        raise ValueError(f"aliases are a sequence of names, not the text {aliases!r}")
    for each in (name, *aliases):
        if _NAME.fullmatch(each) is None:
            raise ValueError(f"message type name {each!r} must be 1 to 128 ASCII letters, digits, '_', '-' or '.'")
    if revision < 1:
        raise ValueError(f"revision must be at least 1, not {revision!r}")

    def decorate(cls: C) -> C:
        setattr(cls, _ATTRIBUTE, MessageType(name, revision, tuple(aliases)))
        return cls

    return decorate


class EventUpgrader(Protocol):
    """Turns a stored body of one revision into the next one, before it becomes an object.

    Attributes:
        name: the registered name it is for.
        revision: the revision that it reads; it returns a body of `revision + 1`.
    """

    @property
    def name(self) -> str: ...

    @property
    def revision(self) -> int: ...

    def upgrade(self, body: dict[str, Any], /) -> dict[str, Any]:
        """Return the body in the shape of the next revision. May change and return `body`."""
        ...


class MessageTypes:
    """One application's message types, both ways: class to name, name or alias to class.

    Attributes:
        problems: a sentence for each class that is no attrs class or shares a name with another.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        self._of_class: dict[type, MessageType] = {}
        self._by_name: dict[str, type] = {}
        self.problems: list[str] = []
        for cls in classes:
            if cls in self._of_class:
                continue
            if not attrs.has(cls):
                self.problems.append(f"{cls.__name__} is no attrs class; decorate it with @attrs.frozen")
            named = cls.__dict__.get(_ATTRIBUTE) or MessageType(cls.__name__)
            self._of_class[cls] = named
            for name in (named.name, *named.aliases):
                other = self._by_name.setdefault(name, cls)
                if other is not cls:
                    self.problems.append(
                        f"{cls.__module__}.{cls.__qualname__} and {other.__module__}.{other.__qualname__} are both "
                        f"named {name!r}; give one another name with @message_type"
                    )

    def of(self, body: object) -> MessageType:
        """Return what is written beside a body.

        Raises:
            UnknownMessageTypeError: its class is not registered.
        """
        try:
            return self._of_class[type(body)]
        except KeyError:
            cls = type(body)
            raise UnknownMessageTypeError(cls.__name__, f"class {cls.__module__}.{cls.__qualname__}") from None

    def knows(self, name: str) -> bool:
        """Return whether a class is registered under this name; aliases do not count."""
        cls = self._by_name.get(name)
        return cls is not None and self._of_class[cls].name == name

    def find(self, name: str, source: str) -> tuple[type, MessageType]:
        """Return the class of a stored name, and what is written beside new bodies of it.

        Raises:
            UnknownMessageTypeError: no class has that name or alias; the error tells `source`.
        """
        cls = self._by_name.get(name)
        if cls is None:
            raise UnknownMessageTypeError(name, source)
        return cls, self._of_class[cls]
