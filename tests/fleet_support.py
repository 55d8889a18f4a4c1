"""Running the fleet example as a user does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import replay

SCRIPT = Path(replay.__file__)
BOUND = 110
"""Seconds after which a subprocess is given up."""

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in {"FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"} and not name.startswith("WOW_")
}

posix = pytest.mark.skipif(os.name != "posix", reason="sends signals to a process")

RETRIES_FOLLOW_AT_ONCE = """
from trio_wow.dispatch import Retry

Retry.__init__.__kwdefaults__.update(backoff=0.0, jitter=0.0)
"""
"""What `conftest.py` says for its own process; a test proves no more by waiting for some seconds."""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the replay to its end."""
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
        env=ENVIRONMENT,
    )


def driver(folder: Path, text: str) -> Path:
    """Write a program that can import the example, and change it."""
    path = folder / "driver.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n{RETRIES_FOLLOW_AT_ONCE}\n{text}")
    return path
