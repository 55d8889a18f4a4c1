"""What the README shows, as it stands, and what the docs must say."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fleet_support import ENVIRONMENT, posix
from sender_support import Link
from support import PythonProcess

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMPLETE, KEYED = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TERMINALS = re.findall(r"```console\n(.*?)```", README, re.DOTALL)


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_complete_program_runs_and_has_at_most_30_lines() -> None:
    assert len(COMPLETE.splitlines()) <= 30
    assert run(COMPLETE) == "{'tea': 2, 'coffee': 1}\n"
    assert "{'tea': 2, 'coffee': 1}" in README


def test_ctrl_c_stops_the_complete_program_in_order() -> None:
    program = COMPLETE.replace("    print(results)", "        print('sent', flush=True); await trio.sleep_forever()")
    with PythonProcess("-c", program) as process:
        process.read_until("sent")
        process.send(signal.SIGINT)
        code, _, errors = process.finish()
    assert code != 0
    assert "KeyboardInterrupt" in errors
    assert "Error" not in errors


def test_the_executor_without_aggregates_runs_and_has_at_most_10_lines() -> None:
    assert len(KEYED.splitlines()) <= 10
    lines = run(KEYED).split()
    assert sorted(lines) == ["a1", "a2", "b1", "b2"]
    assert set(lines[:2]) == {"a1", "b1"}


@posix
def test_the_local_first_sender_says_what_is_shown(tmp_path: Path) -> None:
    port = str(Link().port)
    device, server, delivered, compared = (block.replace("8080", port).splitlines(keepends=True) for block in TERMINALS)

    def program(command: str, *options: str) -> PythonProcess:
        prompt, python, script, *rest = command.split()
        assert (prompt, python) == ("$", ".venv/bin/python")
        return PythonProcess(ROOT / script, *rest, *options, env=ENVIRONMENT, cwd=tmp_path, stdin=subprocess.PIPE)

    with program(device[0], "--url", f"ws://127.0.0.1:{port}/") as sender:
        for line in device[1:]:
            if line.startswith(("receive", "pick")):
                sender.write(line.rstrip())
            else:
                assert sender.read_until("\n") == line
        with program(server[0], "--port", port) as serving:
            for line in server[1:]:
                assert serving.read_until("\n") == line
            # A server that is still starting refuses, and the device then says so, and comes again.
            said = iter(lambda: sender.read_until("\n"), "")
            for line in delivered:
                assert next(each for each in said if not each.startswith("offline: ")) == line
            for each in (sender, serving):
                each.send(signal.SIGINT)
                code, _, errors = each.finish()
                assert (code, errors) == (0, "")
    with program(compared[0]) as comparing:
        assert comparing.finish() == (0, "".join(compared[1:]), "")


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+\.md)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize(
    "words",
    [
        "an aggregate ID bound to a worker or a thread",
        "order across dispatchers, runtimes, partitions or services",
        "declaration order of several functions that handle one event",
        "anything that replaces the version check of the store, or idempotent side effects",
    ],
)
def test_k12_the_docs_say_what_is_not_promised(words: str) -> None:
    not_promised = (ROOT / "docs/concepts.md").read_text().partition("Not promised:")[2].partition("\n## ")[0]
    assert f"- {words}" in not_promised
