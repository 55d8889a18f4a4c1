"""What holds for every test."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_settings_of_the_developer() -> Iterator[None]:
    """Applications read their settings from the environment; these tests bring their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WOW_")]:
            patch.delenv(name)
        yield
