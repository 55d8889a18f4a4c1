"""What the README shows, as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMPLETE, KEYED = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_complete_program_runs_and_has_at_most_30_lines() -> None:
    assert len(COMPLETE.splitlines()) <= 30
    assert run(COMPLETE) == "{'tea': 2, 'coffee': 1}\n"
    assert "{'tea': 2, 'coffee': 1}" in README


def test_the_executor_without_aggregates_runs_and_has_at_most_10_lines() -> None:
    assert len(KEYED.splitlines()) <= 10
    lines = run(KEYED).split()
    assert sorted(lines) == ["a1", "a2", "b1", "b2"]
    assert set(lines[:2]) == {"a1", "b1"}


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+\.md)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()
