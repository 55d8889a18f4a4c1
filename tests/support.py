"""Helpers shared by the tests."""

import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import trio


def itself(item: Any) -> Any:
    """A key function."""
    return item


def first(item: Sequence[Any]) -> Any:
    """A key function."""
    return item[0]


async def forever(_item: object) -> None:
    """A handler that waits until it is cancelled."""
    await trio.sleep_forever()


class ListSource:
    """A `BatchSource` over a list, which records each limit it was asked with."""

    def __init__(self, items: Sequence[Any], *, batch: int | None = None) -> None:
        self.rest = list(items)
        self.batch = batch
        self.limits: list[int] = []

    async def receive_batch(self, limit: int, /) -> list[Any]:
        self.limits.append(limit)
        await trio.lowlevel.checkpoint()
        if not self.rest:
            raise trio.EndOfChannel
        count = min(limit, self.batch or limit)
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken


class EndlessSource(ListSource):
    """A `ListSource` that waits for ever, instead of ending."""

    async def receive_batch(self, limit: int, /) -> list[Any]:
        if not self.rest:
            self.limits.append(limit)
            await trio.sleep_forever()
        return await super().receive_batch(limit)


def task_names() -> list[str]:
    """Names of all tasks of this run."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    return [task.name for task in _tasks(root)]


def _tasks(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _tasks(child)


async def collect(
    run: Callable[[], Awaitable[object]], into: list[BaseException | None] | None = None
) -> BaseException | None:
    """Return what an async call raised; as a task, put it into a list."""
    raised: BaseException | None = None
    try:
        await run()
    except BaseException as error:
        raised = error
    if into is not None:
        into.append(raised)
    return raised


async def a_cancelled() -> BaseException:
    """Return a `Cancelled` of a scope that is gone, for who wants to raise it where nothing is cancelled."""
    raised: BaseException | None = None
    with trio.CancelScope() as scope:
        scope.cancel()
        raised = await collect(trio.sleep_forever)
    assert isinstance(raised, trio.Cancelled)
    return raised


class PythonProcess:
    """A Python subprocess, read line by line up to where the test wants to act, and then to its end.

    Leaving the `with` block kills it, so that none outlives its test.
    """

    def __init__(
        self,
        *command: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | None = None,
    ) -> None:
        # Errors go to a file: a pipe that nobody reads could fill up and stall the process.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=env,
            cwd=cwd,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._errors.close()

    def read_until(self, text: str) -> str:
        """Read lines up to one that contains `text`."""
        seen = ""
        while text not in (line := self._output.readline()):
            seen += line
            if not line:
                raise AssertionError(f"the output ended without {text!r}: {seen}{self.finish()}")
        return seen + line

    def write(self, line: str) -> None:
        """Type a line; the process was made with `stdin=subprocess.PIPE`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def end_input(self) -> None:
        """Type no more."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end. Returns the exit code, the rest of the output, and the errors."""
        rest = self._output.read()
        code = self._process.wait()
        self._errors.seek(0)
        return code, rest, self._errors.read()


@contextmanager
def interleaving(seed: int) -> Iterator[None]:
    """Let a seed decide in which order Trio takes the tasks that can run, so that a failure can be had again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING", True)  # shuffles, not only turns around
        patch.setattr("trio._core._run._r", random.Random(seed))
        yield
