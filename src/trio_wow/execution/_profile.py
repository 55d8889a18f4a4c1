"""Where a plain function runs, decided by how long it has taken: settings, one function's profile, all profiles."""

import enum
import logging
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import inf
from statistics import median_low
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from attrs import field, frozen
from attrs import validators as must
from trio.lowlevel import enable_ki_protection

from trio_wow.execution._plain import is_async, name_of
from trio_wow.execution._threads import pin_of

__all__ = [
    "DEFAULTS",
    "DIRECT",
    "INLINE",
    "POOL",
    "AdaptiveSettings",
    "ExecClass",
    "ExecProfile",
    "FunctionStatistics",
    "Profiles",
]

logger = logging.getLogger("trio_wow.execution")


class ExecClass(enum.Enum):
    """Where a plain function runs."""

    INLINE = "inline"
    """On the event loop, in its mailbox's task."""
    DIRECT = "direct"
    """In a thread, which holds the mailbox's worker."""
    POOL = "pool"
    """In a thread of the `ExecPool`, which holds no worker."""


INLINE, DIRECT, POOL = ExecClass.INLINE, ExecClass.DIRECT, ExecClass.POOL


def _at_least(least: int) -> Any:
    return [must.instance_of(int), must.ge(least)]


@frozen(kw_only=True)
class AdaptiveSettings:
    """When a plain function changes its `ExecClass`. Times are seconds, all others whole numbers of runs.

    A function whose speed is not known runs in the pool. The times rise from `inline` to `very_slow`.

    Attributes:
        window: how many of the last runs are looked at; positive.
        suspect_below: with fewer runs than that their median says nothing; positive, at most `window`.
        slow: a function with this median, or a greater one, is promoted: known as slow, and in the pool.
        very_slow: a single run longer than that promotes at once.
        fast: with a full window, a median below this and `fast_streak` runs in a row below it, a function is demoted:
            known as fast, and out of the pool.
        fast_streak: positive, at most `window`.
        inline: a demoted function with a median below this runs on the event loop, others directly.
        inline_limit: a single run on the event loop longer than that promotes at once. What the garbage collector takes
            in between does not count.
        return_after: a function that is promoted for the first time is demoted again after so many runs in a row below
            `fast`; each further promotion doubles it. At least `window`.
        return_after_at_most: the end of the doubling; at least `return_after`.

    Raises:
        ValueError: a number is out of its range.
        TypeError: one is of another type.
    """

    window: int = field(default=32, validator=_at_least(1))
    suspect_below: int = field(default=2, validator=_at_least(1))
    slow: float = field(default=0.050, validator=must.gt(0))
    very_slow: float = field(default=0.100, validator=must.gt(0))
    fast: float = field(default=0.025, validator=must.gt(0))
    fast_streak: int = field(default=10, validator=_at_least(1))
    inline: float = field(default=0.001, validator=must.gt(0))
    inline_limit: float = field(default=0.005, validator=must.gt(0))
    return_after: int = field(default=32, validator=_at_least(1))
    return_after_at_most: int = field(default=4096, validator=_at_least(1))

    def __attrs_post_init__(self) -> None:
        for rising in (
            ("inline", "inline_limit", "fast", "slow", "very_slow"),
            ("suspect_below", "window"),
            ("fast_streak", "window"),
            ("window", "return_after", "return_after_at_most"),
        ):
            for less, more in pairwise(rising):
                if getattr(self, less) > getattr(self, more):
                    raise ValueError(
                        f"{less} must be at most {more}, not {getattr(self, less)!r} with {getattr(self, more)!r}"
                    )


DEFAULTS = AdaptiveSettings()


def _never(_seconds: float) -> float:
    return 0.0


@frozen
class FunctionStatistics:
    """One plain function that an executor has run.

    Attributes:
        name: its qualified name.
        exec_class: `inline`, `direct` or `pool`: where it runs next.
        pinned: whether a decorator says so, rather than its speed.
        p50: the (lower) median of its last runs in seconds; `None` before the first one.
        samples: how many of its runs have been measured.
        promotions: how often it was found to be slow.
        demotions: how often it was found to be fast.
    """

    name: str
    exec_class: str
    pinned: bool
    p50: float | None
    samples: int
    promotions: int
    demotions: int


class ExecProfile:
    """What is known of one function's speed, and so where it runs next. Safe to use from several threads.

    A function is promoted when it is found to be slow, and demoted when it is found to be fast. Promotion takes one
    bad run, demotion a full window of good ones: a thread too many costs little, a held event loop much. Which runs
    those are is for `AdaptiveSettings` to say; those of the executor that runs it, and the defaults before.

    Args:
        function: whose speed it is; a mark (`@inline`, `@direct`, `@blocking`) pins it. It is not kept. An `async def`
            cannot leave the event loop, and its runs are not to be recorded.
        name: for logs and statistics; by default the function's own.
        exec_class: where it runs, whatever is measured, if it has no mark; `None` to let its speed decide.

    Attributes:
        name: as given.
        pinned: whether `exec_class` never changes.
        exec_class: where the function runs next. To read it costs nothing.
        is_async: whether the function is an `async def`.
    """

    __slots__ = (
        "__weakref__",
        "_demotions",
        "_limit",
        "_lock",
        "_next",
        "_promoted",
        "_promotions",
        "_ring",
        "_running",
        "_samples",
        "_streak",
        "exec_class",
        "is_async",
        "name",
        "owner",
        "pinned",
        "settings",
    )

    def __init__(
        self, function: Callable[..., object], name: str | None = None, *, exec_class: ExecClass | None = None
    ) -> None:
        self.name = name_of(function) if name is None else name
        self.is_async = is_async(function)
        pin = "inline" if self.is_async else pin_of(function)
        self.pinned = pin is not None or exec_class is not None
        by_pin = {"blocking": POOL, "direct": DIRECT, "inline": INLINE}
        self.exec_class = by_pin[pin] if pin is not None else exec_class or POOL
        self.settings = DEFAULTS
        self.owner: Profiles | None = None  # the executor's
        self._lock = Lock()
        self._ring: list[float] = []
        self._next = 0  # counts down, over and over
        self._samples = 0
        self._promoted = False
        self._limit = -inf  # of a demoted function: one run that is longer promotes it
        self._streak = 0  # of runs below `fast`, of a function that is not demoted
        self._promotions = self._demotions = 0
        self._running: dict[object, float] = {}  # in threads, and when each has begun

    def __repr__(self) -> str:
        return f"<ExecProfile of {self.name}: {'pinned to ' if self.pinned else ''}{self.exec_class.value}>"

    @enable_ki_protection
    def begin(self, run: object, now: float) -> None:
        """Take note that a run has begun in a thread.

        While it lasts longer than `fast`, the function is not demoted: of runs side by side the fast ones end first.
        """
        with self._lock:
            self._running[run] = now

    @enable_ki_protection
    def end(self, run: object) -> None:
        """Take note that a run has ended in its thread; it may still be recorded."""
        with self._lock:
            del self._running[run]

    @enable_ki_protection
    def record(self, seconds: float, now: float = -inf) -> None:
        """Take note of how long a run has taken, and decide anew where the next one goes.

        A promotion is logged, with its reason.

        Args:
            seconds: from its begin to its end, without what it waited for a thread. On the event loop it has ended now.
            now: on the clock of `begin`; needed only where runs are in threads.
        """
        with self._lock:
            if seconds > self._limit > -inf and self.exec_class is INLINE and self.owner is not None:
                seconds -= self.owner.paused_within(seconds)
            if seconds <= self._limit:
                at = self._next
                self._ring[at] = seconds
                if at:
                    self._next = at - 1
                    return
                # Once in a window, so that a function whose speed is known needs no sorting at each run.
                reason = self._review()
            else:
                reason = self._record(seconds, now)
        if reason is not None:
            logger.info("%s goes to the pool: %s", self.name, reason)

    @enable_ki_protection
    def statistics(self) -> FunctionStatistics:
        """Return what is known at this moment."""
        with self._lock:
            return FunctionStatistics(
                name=self.name,
                exec_class=self.exec_class.value,
                pinned=self.pinned,
                p50=median_low(self._ring) if self._ring else None,
                samples=self._samples + self._since_review(),
                promotions=self._promotions,
                demotions=self._demotions,
            )

    def _record(self, seconds: float, now: float) -> str | None:
        settings, ring, at = self.settings, self._ring, self._next
        self._samples += 1 + self._since_review()
        if len(ring) < settings.window:
            ring.append(seconds)
        else:
            ring[at] = seconds
            self._next = (at or len(ring)) - 1
        if self.pinned:
            return None
        if self._limit > -inf:
            return self._promote(f"a run took {seconds:.3g} s")
        self._streak = self._streak + 1 if seconds < settings.fast else 0
        if self._promoted:
            doubled = settings.return_after << min(self._promotions - 1, 32)
            if self._streak >= min(doubled, settings.return_after_at_most) and self._is_fast(now):
                self._demote(median_low(ring))
            return None
        if seconds > settings.very_slow:
            return self._promote(f"a run took {seconds:.3g} s")
        if len(ring) < settings.suspect_below:
            return None
        p50 = median_low(ring)
        if p50 >= settings.slow:
            return self._promote(f"half of its last {len(ring)} runs took {p50:.3g} s or more")
        is_known = len(ring) >= settings.window and p50 < settings.fast and self._streak >= settings.fast_streak
        if is_known and self._is_fast(now):
            self._demote(p50)
        return None

    def _is_fast(self, now: float) -> bool:
        """Whether none of the runs that go on in threads is slow already."""
        return all(now - began < self.settings.fast for began in self._running.values())

    def _review(self) -> str | None:
        self._samples += len(self._ring)
        self._next = len(self._ring) - 1
        p50 = median_low(self._ring)
        if p50 >= self.settings.slow:
            return self._promote(f"half of its last {len(self._ring)} runs took {p50:.3g} s or more")
        self._place(p50)
        return None

    def _promote(self, reason: str) -> str:
        self.exec_class = POOL
        self._promoted = True
        self._limit = -inf
        self._streak = 0
        self._promotions += 1
        return reason

    def _since_review(self) -> int:
        """Return how many runs of a demoted function are counted by the place in the ring alone."""
        return len(self._ring) - 1 - self._next if self._limit > -inf else 0

    def _demote(self, p50: float) -> None:
        self._promoted = False
        self._demotions += 1
        self._next = len(self._ring) - 1
        self._place(p50)

    def _place(self, p50: float) -> None:
        if p50 < self.settings.inline:
            self.exec_class, self._limit = INLINE, self.settings.inline_limit
        else:
            self.exec_class, self._limit = DIRECT, self.settings.very_slow


class Profiles:
    """The profiles of the functions that an executor runs. It keeps none alive but by its function.

    Args:
        settings: the executor's.
        paused_within: how many of the last so many seconds were no function's own, on the executor's clock.

    Attributes:
        settings: as given.
        paused_within: as given.
    """

    def __init__(self, settings: AdaptiveSettings, paused_within: Callable[[float], float] = _never) -> None:
        self.settings = settings
        self.paused_within = paused_within
        self._lock = Lock()
        self._of_functions: WeakKeyDictionary[Any, ExecProfile] = WeakKeyDictionary()
        self._of_methods: WeakKeyDictionary[Any, WeakKeyDictionary[type, ExecProfile]] = WeakKeyDictionary()
        self._adopted: WeakSet[ExecProfile] = WeakSet()

    @enable_ki_protection
    def of(self, function: Any) -> ExecProfile:
        """Return the profile of a raw handler: of its function, or of its method and class, through any `partial`."""
        bare = function
        while isinstance(bare, partial):
            bare = bare.func
        # A mark on a `partial` is not one of the function in it.
        pinned = pin_of(function) != pin_of(bare)
        instance = getattr(bare, "__self__", None)
        method = getattr(bare, "__func__", None)
        with self._lock:
            try:
                if pinned:
                    table, key = self._of_functions, function
                elif method is not None and instance is not None:
                    cls = instance if isinstance(instance, type) else type(instance)
                    table, key = self._of_methods.setdefault(method, WeakKeyDictionary()), cls
                else:
                    table, key = self._of_functions, bare
                profile = table.get(key)
                if profile is None:
                    table[key] = profile = ExecProfile(function)
            except TypeError:  # it cannot be referred to weakly, or not be hashed
                profile = ExecProfile(function)
        if profile.owner is not self:
            self.adopt(profile)
        return profile

    @enable_ki_protection
    def adopt(self, profile: ExecProfile) -> None:
        """Count a profile among this executor's, and let its settings decide."""
        with self._lock:
            profile.settings = self.settings
            profile.owner = self
            self._adopted.add(profile)

    @enable_ki_protection
    def statistics(self) -> tuple[FunctionStatistics, ...]:
        """Return what is known of each plain function, by name."""
        with self._lock:
            adopted = [each for each in self._adopted if not each.is_async]
        return tuple(sorted((each.statistics() for each in adopted), key=lambda each: each.name))
