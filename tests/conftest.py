"""What holds for every test."""

import os
from collections.abc import Iterator

import pytest
import stamina
from thread_support import Gates

from trio_wow import KeyedExecutor
from trio_wow.dispatch import Retry
from trio_wow.execution._threads import pin_of


@pytest.fixture(scope="session", autouse=True)
def no_settings_of_the_developer() -> Iterator[None]:
    """Applications read their settings from the environment; these tests bring their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WOW_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def blocking_calls_are_refused() -> Iterator[None]:
    """Every executor that a test does not say otherwise for refuses blocking calls."""
    defaults = KeyedExecutor.__init__.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "blocking_calls", "raise")
        yield


@pytest.fixture(scope="session", autouse=True)
def retries_follow_at_once() -> Iterator[None]:
    """Retries that a test does not say otherwise for do not wait, and are not logged."""
    defaults = Retry.__init__.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "backoff", 0.0)
        patch.setitem(defaults, "jitter", 0.0)
        stamina.instrumentation.set_on_retry_hooks([])
        yield
        stamina.instrumentation.set_on_retry_hooks(None)


@pytest.fixture(autouse=True)
def unmarked_functions_stay_on_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plain functions without a mark run on the event loop, unless the test is marked as one of adaptive execution.

    Else they would begin in threads, and a clock that jumps does not wait for those.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.get_closest_marker("adaptive"):
            patch.setattr("trio_wow.execution._profile.pin_of", lambda function: pin_of(function) or "inline")
        yield


@pytest.fixture
def gates() -> Iterator[Gates]:
    """Threads that stay until the test lets them go, or ends."""
    gates = Gates()
    yield gates
    gates.open_all()
