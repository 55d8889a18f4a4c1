"""Profiles and the pool without the GIL: what the tests of threads hammer, on a free-threaded interpreter."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("python3.14t", "python3.13t")
READY = "import pytest, sys, trio_wow.execution; assert not sys._is_gil_enabled(), 'an extension has enabled the GIL'"
HAMMER = """
import test_exec_pool, test_profiles
for seed in range(20):
    test_profiles.hammer(8, 5_000)
    test_exec_pool.hammer(seed, loops=6)
"""


@pytest.mark.timeout(300)
def test_profile_and_pool_are_safe_without_the_gil() -> None:
    python = next(filter(None, map(shutil.which, NAMES)), None)
    if python is None:
        pytest.skip(f"no free-threaded interpreter on the path: {' or '.join(NAMES)}")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ready = subprocess.run([python, "-c", READY], capture_output=True, text=True, env=environment)
    if ready.returncode:
        pytest.skip(f"{python} cannot run it: {ready.stderr.strip().splitlines()[-1]}")
    done = subprocess.run([python, "-c", HAMMER], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_run_there_runs_here() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    once = HAMMER.replace("range(20)", "range(1)")
    done = subprocess.run([sys.executable, "-c", once], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
