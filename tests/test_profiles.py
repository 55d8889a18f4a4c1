"""Where a plain function runs next, decided by its run times alone. Source document: seed 004."""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import pytest

from trio_wow.execution import AdaptiveSettings, ExecClass, ExecProfile, blocking, direct, inline
from trio_wow.execution._profile import Profiles

pytestmark = pytest.mark.adaptive

INLINE, DIRECT, POOL = ExecClass.INLINE, ExecClass.DIRECT, ExecClass.POOL
MS = 0.001
QUICK = [0.5 * MS] * 32  # demotes to the event loop
FAST = [10 * MS] * 32  # demotes to a worker's thread
SLOW = [60 * MS] * 2  # promotes


def profile_after(*runs: Sequence[float]) -> ExecProfile:
    profile = ExecProfile(lambda: None)
    for run in runs:
        for seconds in run:
            profile.record(seconds)
    return profile


def lost(times: int) -> list[float]:
    """Runs after which a function on the event loop has been lost, and has come back, so often."""
    runs = list(QUICK)
    for n in range(times):
        runs += [6 * MS] + [0.5 * MS] * (32 << n)
    return runs


@pytest.mark.parametrize(
    ("runs", "expected", "promotions", "demotions"),
    [
        # Fresh, and fewer than two: suspect until known.
        ([], POOL, 0, 0),
        ([0.01 * MS], POOL, 0, 0),
        ([60 * MS], POOL, 0, 0),
        ([0.01 * MS] * 2, POOL, 0, 0),
        # The median on each side of 50 ms.
        ([49.9 * MS] * 2, POOL, 0, 0),
        ([50 * MS] * 2, POOL, 1, 0),
        ([49.9 * MS, 60 * MS], POOL, 0, 0),
        ([0.01 * MS] * 15 + [60 * MS] * 15, POOL, 0, 0),
        ([0.01 * MS] * 15 + [60 * MS] * 16, POOL, 1, 0),
        # A single very slow one.
        ([99 * MS], POOL, 0, 0),
        ([100 * MS], POOL, 0, 0),
        ([101 * MS], POOL, 1, 0),
        # A full window of fast ones, not one less.
        ([0.5 * MS] * 31, POOL, 0, 0),
        ([0.5 * MS] * 32, INLINE, 0, 1),
        # The median on each side of 25 ms.
        ([24.9 * MS] * 32, DIRECT, 0, 1),
        ([25 * MS] * 32, POOL, 0, 0),
        ([30 * MS] * 17 + [24.9 * MS] * 15, POOL, 0, 0),
        ([30 * MS] * 16 + [24.9 * MS] * 16, DIRECT, 0, 1),
        # The last ten all fast, nine will not do.
        ([1 * MS] * 22 + [30 * MS] + [1 * MS] * 9, POOL, 0, 0),
        ([1 * MS] * 22 + [30 * MS] + [1 * MS] * 10, DIRECT, 0, 1),
        ([0.5 * MS] * 22 + [30 * MS] + [0.5 * MS] * 10, INLINE, 0, 1),
        # The median on each side of 1 ms.
        ([1 * MS] * 32, DIRECT, 0, 1),
        ([0.99 * MS] * 32, INLINE, 0, 1),
        ([0.99 * MS] * 15 + [2 * MS] * 17, DIRECT, 0, 1),
        ([0.99 * MS] * 16 + [2 * MS] * 16, INLINE, 0, 1),
        # On the event loop one run of 4 ms, and of 6 ms.
        ([*QUICK, 4 * MS], INLINE, 0, 1),
        ([*QUICK, 5 * MS], INLINE, 0, 1),
        ([*QUICK, 6 * MS], POOL, 1, 1),
        # In a worker's thread one run of 99 ms, and of 101 ms.
        ([*FAST, 99 * MS], DIRECT, 0, 1),
        ([*FAST, 101 * MS], POOL, 1, 1),
        # Promoted, and 31 or 32 fast ones in a row.
        ([*SLOW, *[24.9 * MS] * 31], POOL, 1, 0),
        ([*SLOW, *[24.9 * MS] * 32], DIRECT, 1, 1),
        ([*SLOW, *[0.5 * MS] * 32], INLINE, 1, 1),
        ([*SLOW, *[0.5 * MS] * 31, 25 * MS, *[0.5 * MS] * 31], POOL, 1, 0),
        ([*SLOW, *[0.5 * MS] * 31, 25 * MS, *[0.5 * MS] * 32], INLINE, 1, 1),
        # Promoted stays promoted, and is promoted once.
        ([*SLOW, 101 * MS, 60 * MS], POOL, 1, 0),
        # A known function whose median has changed: looked at once in a window.
        ([*QUICK, *[2 * MS] * 31], INLINE, 0, 1),
        ([*QUICK, *[2 * MS] * 32], DIRECT, 0, 1),
        ([*FAST, *[0.5 * MS] * 32], INLINE, 0, 1),
        ([*FAST, *[60 * MS] * 32], POOL, 1, 1),
    ],
)
def test_the_decision_table(runs: list[float], expected: ExecClass, promotions: int, demotions: int) -> None:
    profile = profile_after(runs)
    assert profile.exec_class is expected
    seen = profile.statistics()
    assert (seen.promotions, seen.demotions, seen.samples) == (promotions, demotions, len(runs))
    assert seen.exec_class == expected.value


@pytest.mark.parametrize("losses", range(11))
def test_each_further_loss_doubles_what_it_takes_to_return(losses: int) -> None:
    profile = ExecProfile(lambda: None)
    for seconds in QUICK:
        profile.record(seconds)
    for loss in range(losses + 1):
        profile.record(6 * MS)
        assert profile.exec_class is POOL
        takes = min(32 << loss, 4096)
        for _ in range(takes - 1):
            profile.record(0.5 * MS)
        assert profile.exec_class is POOL, "one less does not do"
        profile.record(0.5 * MS)
        assert profile.exec_class is INLINE
    assert profile.statistics().promotions == losses + 1


@pytest.mark.parametrize("before", [[], SLOW], ids=["new", "promoted"])
def test_a_run_that_goes_on_counts_as_slow_once_it_has_lasted_as_long(before: list[float]) -> None:
    """Of runs side by side the fast ones end first: they alone would say that the function is fast."""
    profile = profile_after(before)
    profile.begin("slow", 10.0)
    for _ in range(40):
        profile.record(0.5 * MS, 10.0 + 25 * MS)
    assert profile.exec_class is POOL
    profile.end("slow")
    profile.record(0.5 * MS, 10.0 + 25 * MS)
    assert profile.exec_class is INLINE


def test_a_run_that_goes_on_and_is_not_slow_yet_keeps_nothing_back() -> None:
    profile = ExecProfile(lambda: None)
    profile.begin("quick", 10.0)
    for _ in range(32):
        profile.record(0.5 * MS, 10.0 + 24 * MS)
    assert profile.exec_class is INLINE


def test_fs08_a_function_that_has_become_slow_leaves_the_loop_after_one_run() -> None:
    """By its median alone it would take seventeen."""
    profile = profile_after([0.1 * MS] * 32)
    assert profile.exec_class is INLINE
    profile.record(1.5)
    assert profile.exec_class is POOL
    p50 = profile_after([0.1 * MS] * 32 + [1.5] * 16).statistics().p50
    assert p50 == 0.1 * MS


def test_one_that_is_slow_in_a_twentieth_of_its_calls_is_soon_left_in_the_pool() -> None:
    """The source engine lets a function that was once known as fast hold its thread each time."""
    profile = profile_after(QUICK)
    stalls = 0
    for n in range(20_000):
        slow = n % 20 == 0
        stalls += slow and profile.exec_class is INLINE
        profile.record(60 * MS if slow else 0.02 * MS)
    assert stalls == 1
    assert profile.exec_class is POOL


@pytest.mark.parametrize(
    ("settings", "runs", "expected"),
    [
        (AdaptiveSettings(window=4, fast_streak=4, return_after=4), [0.5 * MS] * 4, INLINE),
        (AdaptiveSettings(suspect_below=3), [60 * MS] * 2, POOL),
        (AdaptiveSettings(slow=0.030), [31 * MS] * 2, POOL),
        (AdaptiveSettings(very_slow=0.060), [*FAST, 61 * MS], POOL),
        (AdaptiveSettings(fast=0.010, inline_limit=0.005), [11 * MS] * 32, POOL),
        (AdaptiveSettings(fast_streak=3), [1 * MS] * 28 + [30 * MS] + [1 * MS] * 3, DIRECT),
        (AdaptiveSettings(inline=0.003), [2 * MS] * 32, INLINE),
        (AdaptiveSettings(inline_limit=0.004), [*QUICK, 4.5 * MS], POOL),
        (AdaptiveSettings(return_after=40), [*SLOW, *[1 * MS] * 39], POOL),
        (AdaptiveSettings(return_after_at_most=32), [*QUICK, 6 * MS, *QUICK, 6 * MS, *QUICK], INLINE),
    ],
)
def test_every_number_is_a_setting(settings: AdaptiveSettings, runs: list[float], expected: ExecClass) -> None:
    def function() -> None: ...

    profile = Profiles(settings).of(function)
    for seconds in runs:
        profile.record(seconds)
    assert profile.exec_class is expected
    default = profile_after(runs)
    assert (default.exec_class, default.statistics().promotions) != (expected, profile.statistics().promotions)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"window": 0}, ValueError, "'window' must be >= 1"),
        ({"window": 3.5}, TypeError, "'window' must be <class 'int'>"),
        ({"slow": 0}, ValueError, "'slow' must be > 0"),
        ({"slow": 0.2}, ValueError, "slow must be at most very_slow, not 0.2 with 0.1"),
        ({"inline": 0.006}, ValueError, "inline must be at most inline_limit"),
        ({"fast_streak": 33}, ValueError, "fast_streak must be at most window, not 33 with 32"),
        ({"window": 64}, ValueError, "window must be at most return_after, not 64 with 32"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        AdaptiveSettings(**wrong)


def test_a_promotion_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trio_wow.execution")
    profile_after([60 * MS] * 10)
    profile_after([*QUICK, 6 * MS])
    assert [record.getMessage() for record in caplog.records] == [
        "profile_after.<locals>.<lambda> goes to the pool: half of its last 2 runs took 0.06 s or more",
        "profile_after.<locals>.<lambda> goes to the pool: a run took 0.006 s",
    ]


@pytest.mark.parametrize(("pin", "expected"), [(inline, INLINE), (direct, DIRECT), (blocking, POOL)])
@pytest.mark.parametrize("runs", [[0.1 * MS] * 64, [0.2] * 64])
def test_a_mark_pins_whatever_is_measured(
    pin: Callable[[Any], Any], expected: ExecClass, runs: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    profile = ExecProfile(pin(lambda: None), "named")
    for seconds in runs:
        profile.record(seconds)
    assert profile.exec_class is expected
    seen = profile.statistics()
    assert (seen.name, seen.pinned, seen.p50, seen.samples) == ("named", True, runs[0], 64)
    assert (seen.promotions, seen.demotions, caplog.records) == (0, 0, [])


class Handlers:
    def method(self, item: object) -> None: ...

    @classmethod
    def of_class(cls, item: object) -> None: ...

    def __call__(self, item: object) -> None: ...


class Others(Handlers): ...


@pytest.mark.parametrize(
    ("runs", "paused", "expected", "promotions"),
    [
        ([*QUICK, 7 * MS], 3 * MS, INLINE, 0),
        ([*QUICK, 7 * MS], 1 * MS, POOL, 1),
        # Only what has just ended on the event loop can be told from a pause.
        ([*FAST, 101 * MS], 100 * MS, POOL, 1),
        ([101 * MS], 100 * MS, POOL, 1),
    ],
)
def test_what_is_no_functions_own_time_is_taken_off_a_run_that_would_promote_it(
    runs: list[float], paused: float, expected: ExecClass, promotions: int
) -> None:
    def function() -> None: ...

    profile = Profiles(AdaptiveSettings(), lambda _seconds: paused).of(function)
    for seconds in runs:
        profile.record(seconds)
    assert (profile.exec_class, profile.statistics().promotions) == (expected, promotions)


class TestWhoseProfile:
    def test_a_function_has_one_whatever_partial_it_is_in(self) -> None:
        profiles = Profiles(AdaptiveSettings())

        def function(extra: object, item: object) -> None: ...

        assert profiles.of(function) is profiles.of(partial(partial(function), 1))
        assert profiles.of(partial(function)).name == function.__qualname__

    def test_a_mark_of_the_partial_is_its_own(self) -> None:
        profiles = Profiles(AdaptiveSettings())

        def function(item: object) -> None: ...

        marked = direct(partial(function))
        assert profiles.of(marked).exec_class is DIRECT
        assert profiles.of(marked) is profiles.of(marked)
        assert profiles.of(function).exec_class is POOL

    def test_a_method_has_one_for_each_class(self) -> None:
        profiles = Profiles(AdaptiveSettings())
        assert profiles.of(Handlers().method) is profiles.of(Handlers().method)
        assert profiles.of(Others().method) is not profiles.of(Handlers().method)
        assert profiles.of(Handlers.of_class) is not profiles.of(Others.of_class)

    def test_a_callable_object_keeps_its_own(self) -> None:
        profiles = Profiles(AdaptiveSettings())
        handler = Handlers()
        assert profiles.of(handler) is profiles.of(handler)

    def test_what_cannot_be_referred_to_weakly_gets_one_each_time(self) -> None:
        class Slotted:
            __slots__ = ()

            def __call__(self, item: object) -> None: ...

        profiles = Profiles(AdaptiveSettings())
        assert profiles.of(Slotted()).exec_class is POOL

    def test_it_is_gone_with_its_function(self) -> None:
        profiles = Profiles(AdaptiveSettings())

        def function(item: object) -> None: ...

        profiles.of(function).record(0.1 * MS)
        assert [each.samples for each in profiles.statistics()] == [1]
        del function
        assert profiles.statistics() == ()

    def test_an_async_function_has_one_that_is_not_shown(self) -> None:
        async def function(item: object) -> None: ...

        @wraps(function)
        async def wrapper(item: object) -> None: ...

        profiles = Profiles(AdaptiveSettings())
        assert profiles.of(function).is_async
        assert profiles.of(wrapper).exec_class is INLINE
        assert profiles.statistics() == ()

    def test_statistics_are_by_name(self) -> None:
        def b(item: object) -> None: ...

        def a(item: object) -> None: ...

        profiles = Profiles(AdaptiveSettings())
        kept = profiles.of(b), profiles.of(a)
        assert [each.name.rpartition(".")[2] for each in profiles.statistics()] == ["a", "b"]
        assert len(kept) == 2


def hammer(threads: int = 4, runs: int = 2_000) -> None:
    """Record in several threads at once: no run is lost, and what is decided agrees with the last runs."""
    profile = ExecProfile(lambda: None)
    begin = threading.Barrier(threads)

    def record(number: int) -> None:
        begin.wait(10)
        for n in range(runs):
            profile.record(0.2 if (n + number) % 97 == 0 else 0.1 * MS)
            assert profile.statistics().exec_class in ("inline", "direct", "pool")

    workers = [threading.Thread(target=record, args=(number,)) for number in range(threads)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(60)
    seen = profile.statistics()
    assert seen.samples == threads * runs
    assert abs(seen.promotions - seen.demotions) <= 1
    for _ in range(4096):
        profile.record(0.1 * MS)
    assert profile.exec_class is INLINE
    assert profile.statistics().p50 == 0.1 * MS


def test_threads_that_record_at_once_lose_nothing() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        hammer()
    finally:
        sys.setswitchinterval(interval)
