"""The items of one key that wait to be started."""

from collections import deque
from collections.abc import Hashable
from typing import TypeVar

from trio_wow.errors import printable

__all__ = ["Mailbox"]

T = TypeVar("T")


class Mailbox(deque[T]):
    """The items of one key that have not been started, in the order received. Exists only while it has work.

    Attributes:
        key: the items' key.
        running: whether an item of it runs that has given control to the event loop or is in a thread.
    """

    __slots__ = ("key", "running")

    key: Hashable
    running: bool

    @property
    def label(self) -> str:
        """The key as text, also when it refuses to be printed."""
        return printable(self.key)

    @property
    def name(self) -> str:
        """The name of its task."""
        return f"mailbox {self.label}"

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self)} queued{', 1 running' if self.running else ''}>"
