"""The `trio-wow` command, in processes of its own."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
from support import PythonProcess

COMMAND = ("-W", "error", "-m", "trio_wow.cli")

# A store that is a component, so that a test sees each step, and can act as a client of the application.
MODULE = """
import os, sys
import trio
from attrs import define, frozen
from trio_wow import App, DomainEvent, InMemoryEventStore, Settings, aggregate, event_processor, on_command
from trio_wow import on_event, on_sourcing
from trio_wow.app import DispatchSettings, ShutdownSettings
from trio_wow.domain import Domain

@frozen
class Open:
    id: str
    what: str = "nothing"

@frozen
class Opened:
    what: str

@aggregate(context="shop", name="door")
@define
class Door:
    id: str
    opened: int = 0

    @on_command
    def open(self, command: Open) -> Opened:
        return Opened(command.what)

    @on_sourcing
    def is_open(self, event: Opened) -> None:
        self.opened += 1

@event_processor
class Porter:
    @on_event
    async def opened(self, event: Opened) -> None:
        print("porter", event.what, flush=True)
        if event.what == "exit":
            raise SystemExit(0)
        if event.what == "slow":
            await trio.sleep_forever()
        if event.what == "deaf":
            with trio.CancelScope(shield=True):
                await trio.sleep_forever()

class Store(InMemoryEventStore):
    name = "client"
    command = Open("front", os.environ.get("WHAT", "nothing"))

    async def prepare(self, context):
        print("preparing", flush=True)
        self.context = context
        if os.environ.get("PREPARE") == "slow":
            await trio.sleep_forever()
        if os.environ.get("PREPARE") == "broken":
            raise ValueError("no such shelf")

    def start(self):
        self.context.nursery.start_soon(self.act)

    async def act(self):
        opened = trio.Event()
        self.context.admission.watch(opened.set)
        await opened.wait()
        executor = self.context.executor
        print("serving", repr(executor), flush=True)
        await app.gateway.send(self.command)
        await self.context.stop_requested.wait()
        print("asked to stop", flush=True)

    def quiesce(self):
        print("quiesced", flush=True)

    async def stop(self):
        print("stopped", flush=True)

    def force_stop(self):
        print("forced", flush=True)

domain = Domain([Door])
app = App(domain, [Porter()], store=Store(domain.serializer))

class holder:
    own = App(
        domain, [Porter()], store=Store(domain.serializer),
        settings=Settings(dispatch=DispatchSettings(workers=3), shutdown=ShutdownSettings(quiet_period=0)),
    )

number = 3
"""


def environment(**extra: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WOW_")}
    return {**clean, "WOW_SHUTDOWN_QUIET_PERIOD": "0", "COLUMNS": "80", **extra}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(MODULE)
    return tmp_path


def shown_on_terminal(*arguments: str, cwd: Path, columns: int) -> str:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, *COMMAND, *arguments],
        stdout=theirs,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env=environment(TERM="xterm-256color", COLUMNS=str(columns)),
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 4096):
                shown += block
        except OSError:
            pass  # how Linux says that the other end has been closed
        os.close(ours)
        assert process.wait() == 0
    return shown.decode()


def trio_wow(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *COMMAND, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=env if env is not None else environment(),
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def running(folder: Path, *arguments: str, **extra: str) -> PythonProcess:
    return PythonProcess(*COMMAND, "run", "shop:app", *arguments, cwd=folder, env=environment(**extra))


def one_line(errors: str) -> str:
    assert errors.startswith("trio-wow: ")
    assert errors.count("\n") == 1, errors
    return errors.removeprefix("trio-wow: ").rstrip()


class TestRun:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_stops_it_in_order(self, folder: Path, number: signal.Signals) -> None:
        with running(folder) as process:
            process.read_until("porter nothing")
            process.send(number)
            code, output, errors = process.finish()
        assert code == 0
        assert sorted(output.split("\n")[:-2]) == ["asked to stop", "quiesced"]
        assert output.endswith("\nstopped\n")
        assert "INFO trio_wow.cli: shop:app is served; SIGINT or SIGTERM stops it" in errors
        assert f"INFO trio_wow.runtime: {number.name}: stopping within 60.0 s; once more forces it" in errors
        assert "ERROR" not in errors

    def test_a_second_signal_forces_a_slow_drain(self, folder: Path) -> None:
        with running(folder, "--log-level", "error", WHAT="slow") as process:
            process.read_until("porter slow")
            process.send(signal.SIGINT)
            process.read_until("asked to stop")
            process.send(signal.SIGINT)
            code, output, errors = process.finish()
        assert code == 1
        assert "forced" in output
        assert "the stop was forced by a second signal (SIGINT): " in errors
        assert "Traceback" not in errors

    def test_a_deadline_that_passes_is_a_failure(self, folder: Path) -> None:
        with running(folder, "--shutdown-timeout", "0.2", WHAT="slow") as process:
            process.read_until("porter slow")
            process.send(signal.SIGTERM)
            code, _, errors = process.finish()
        assert code == 1
        assert errors.splitlines()[-1].startswith("trio-wow: the stop was forced by its deadline (0.2 s): ")

    def test_a_task_that_shields_itself_is_named_and_left_behind(self, folder: Path) -> None:
        with running(folder, "--shutdown-timeout", "0.2", WHAT="deaf") as process:
            process.read_until("porter deaf")
            process.send(signal.SIGTERM)
            code, _, errors = process.finish()
        assert code == 1
        named = re.search(r"ERROR trio_wow.runtime: the stop was forced by its deadline \(0.2 s\): (.*)", errors)
        assert named is not None
        assert "mailbox shop.door/front" in named[1]
        assert "ERROR trio_wow.cli: what was forced to stop has not ended within 1.0 s" in errors

    def test_a_handler_that_raises_system_exit_does_not_choose_the_code(self, folder: Path) -> None:
        with running(folder, WHAT="exit") as process:
            code, _, errors = process.finish()
        assert code == 1
        assert errors.splitlines()[-1].startswith("trio-wow: HandlerExitError: a handler raised SystemExit(0)")
        assert "raise SystemExit(0)" in errors  # the traceback says where

    def test_an_unexpected_error_of_a_component_keeps_its_traceback(self, folder: Path) -> None:
        with running(folder, PREPARE="broken") as process:
            code, output, errors = process.finish()
        assert (code, output) == (1, "preparing\nquiesced\nstopped\n")
        assert "Traceback" in errors
        assert errors.splitlines()[-1] == "trio-wow: ValueError: no such shelf"

    def test_several_errors_are_all_shown(self, folder: Path) -> None:
        broken = MODULE.replace('print("stopped", flush=True)', 'raise KeyError("second")')
        (folder / "shop.py").write_text(broken)
        with running(folder, PREPARE="broken") as process:
            code, _, errors = process.finish()
        assert code == 1
        assert "ValueError: no such shelf" in errors
        assert "KeyError: 'second'" in errors
        assert errors.splitlines()[-1] == "trio-wow: ExceptionGroup: errors in a runtime (2 sub-exceptions)"

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_during_the_start_rolls_it_back(self, folder: Path, number: signal.Signals) -> None:
        with running(folder, PREPARE="slow") as process:
            process.read_until("preparing")
            process.send(number)
            code, output, errors = process.finish()
        assert (code, output) == (0, "quiesced\nstopped\n")
        assert "is served" not in errors

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_signal_during_the_import_ends_it(self, tmp_path: Path, number: signal.Signals, code: int) -> None:
        (tmp_path / "shop.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
        with running(tmp_path) as process:
            process.read_until("importing")
            process.send(number)
            assert process.finish() == (code, "", f"trio-wow: ended by {number.name} before it served\n")

    def test_a_signal_between_import_and_start_stops_it_in_order(self, folder: Path) -> None:
        program = """
            import signal
            class Early(App):
                def runtime(self, **options):
                    runtime = super().runtime(**options)
                    serve = runtime.serve
                    async def early(**options):
                        signal.raise_signal(signal.SIGTERM)
                        await serve(**options)
                    runtime.serve = early
                    return runtime
            app = Early(domain, store=Store(domain.serializer))
        """
        (folder / "shop.py").write_text(MODULE + textwrap.dedent(program))
        with running(folder) as process:
            assert process.finish() == (0, "", "")

    def test_a_program_that_has_set_up_logging_keeps_it(self, folder: Path) -> None:
        own = "import logging\nlogging.basicConfig(level='INFO', format='mine: %(message)s')\n"
        (folder / "shop.py").write_text(own + MODULE)
        with running(folder) as process:
            process.read_until("serving")
            process.send(signal.SIGTERM)
            code, _, errors = process.finish()
        assert code == 0
        assert "mine: shop:app is served" in errors
        assert "INFO" not in errors


class TestSettings:
    def test_an_option_beats_a_variable_which_beats_the_file(self, folder: Path) -> None:
        (folder / "wow.toml").write_text("[dispatch]\nworkers = 5\nmax_in_flight = 55\nthroughput = 6\n")
        with running(
            folder, "--settings", "wow.toml", "--workers", "7", WOW_DISPATCH_WORKERS="9", WOW_DISPATCH_THROUGHPUT="8"
        ) as process:
            line = process.read_until("serving").splitlines()[-1]
            process.send(signal.SIGTERM)
            assert process.finish()[0] == 0
        assert "workers=7, max_in_flight=55, throughput=8" in line

    def test_an_option_beats_a_bad_variable_and_a_file_the_one_of_the_environment(self, folder: Path) -> None:
        (folder / "wow.toml").write_text("[dispatch]\nthroughput = 6\n")
        with running(
            folder, "--settings", "wow.toml", "--workers", "7", WOW_DISPATCH_WORKERS="0", WOW_SETTINGS="none.toml"
        ) as process:
            line = process.read_until("serving").splitlines()[-1]
            process.send(signal.SIGTERM)
            assert process.finish()[0] == 0
        assert "workers=7, max_in_flight=256, throughput=6" in line

    def test_only_options_go_before_the_settings_of_a_program(self, folder: Path) -> None:
        own = MODULE.replace("app = App(", "other = App(") + "\napp = holder.own\n"
        (folder / "shop.py").write_text(own)
        with running(folder, "--max-in-flight", "44", WOW_DISPATCH_WORKERS="9") as process:
            line = process.read_until("serving").splitlines()[-1]
            process.send(signal.SIGTERM)
            assert process.finish()[0] == 0
        assert "workers=3, max_in_flight=44, throughput=16" in line

    @pytest.mark.parametrize(
        ("arguments", "extra", "line"),
        [
            (
                ["--workers", "0"],
                {},
                "dispatch.workers = 0 (option --workers) must be a positive int, or none for the CPUs that the process "
                "may use",
            ),
            (
                ["--shutdown-timeout", "3", "--shutdown-quiet-period", "4"],
                {},
                "shutdown.quiet_period = 4.0 (option --shutdown-quiet-period) must be less than shutdown.timeout, "
                "which is 3.0 (option --shutdown-timeout)",
            ),
            (
                [],
                {"WOW_DISPATCH_MAX_IN_FLIGHT": "x"},
                "dispatch.max_in_flight = 'x' (environment variable WOW_DISPATCH_MAX_IN_FLIGHT) must be a positive int",
            ),
            (
                ["--settings", "none.toml"],
                {},
                "file none.toml cannot be read as TOML: No such file or directory",
            ),
        ],
    )
    def test_a_bad_one_is_one_line(self, folder: Path, arguments: list[str], extra: dict[str, str], line: str) -> None:
        code, _, errors = trio_wow("run", "shop:app", *arguments, cwd=folder, env=environment(**extra))
        assert (code, one_line(errors)) == (2, line)


class TestTarget:
    @pytest.mark.parametrize("command", [["run"], ["events"]])
    @pytest.mark.parametrize(
        ("target", "code", "line"),
        [
            ("shop", 2, "'shop' names no application; write MODULE:APP, such as shop.main:app"),
            ("shop.py:app", 2, "'shop.py:app' names no application"),
            ("shop:", 2, "'shop:' names no application"),
            ("shop:a b", 2, "'shop:a b' names no application"),
            ("nowhere:app", 2, "there is no module 'nowhere' in "),
            ("shop.main:app", 2, "there is no module 'shop.main' in "),
            ("shop:other", 2, "'shop:other' names no application: module shop has no 'other'"),
            ("shop:holder.x", 2, "'shop:holder.x' names no application: type shop.holder has no 'x'"),
            ("shop:number", 2, "'shop:number' is no trio_wow.App but of type int"),
        ],
    )
    def test_what_is_no_application_is_one_line(
        self, folder: Path, command: list[str], target: str, code: int, line: str
    ) -> None:
        rest = ["shop.door", "front"] if command == ["events"] else []
        found = trio_wow(*command, target, *rest, cwd=folder)
        assert (found[0], found[1]) == (code, "")
        assert one_line(found[2]).startswith(line)

    @pytest.mark.parametrize(
        ("program", "line"),
        [
            ("\nraise ValueError('a\\nb')", "ValueError: a b ({path}, line 2)"),
            ("import sys\nsys.exit(0)", "SystemExit: 0 ({path}, line 2)"),
            ("x = = 3", "SyntaxError: invalid syntax ({path}, line 1)"),
            ("\nimport nowhere", "ModuleNotFoundError: No module named 'nowhere' ({path}, line 2)"),
            ("import json\n\njson.loads('')", "json.decoder.JSONDecodeError: {anything} ({path}, line 3)"),
        ],
    )
    def test_a_module_that_fails_is_named_with_the_place(self, tmp_path: Path, program: str, line: str) -> None:
        path = tmp_path / "shop.py"
        path.write_text(program)
        code, output, errors = trio_wow("run", "shop:app", cwd=tmp_path)
        assert (code, output) == (1, "")
        expected = re.escape(f"importing 'shop' failed: {line.replace('{path}', str(path))}; --traceback shows more")
        assert re.fullmatch(expected.replace(re.escape("{anything}"), ".*"), one_line(errors))
        code, _, errors = trio_wow("run", "shop:app", "--traceback", cwd=tmp_path)
        assert code == 1
        assert "Traceback" in errors or "SyntaxError" in errors

    def test_a_failed_import_does_not_wait_for_the_threads_that_it_started(self, tmp_path: Path) -> None:
        program = """
            import threading
            threading.Thread(target=threading.Event().wait).start()
            raise ValueError("too late")
        """
        (tmp_path / "shop.py").write_text(textwrap.dedent(program))
        code, _, errors = trio_wow("run", "shop:app", cwd=tmp_path)
        assert code == 1
        assert "too late" in one_line(errors)


HISTORY = """
import trio
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.messages import AggregateId, DomainEventStream
from shop import App, Opened, domain

store = SqliteStore("shop.db", domain.serializer)
app = App(domain, store=store)
LAST = "c\\x1b[31m\\x9bé"

async def fill():
    door = AggregateId("shop", "door", "front", tenant="acme")
    async with store:
        for version, events in enumerate(([Opened("a" * 300)], [Opened("[red]b[/red]"), Opened(LAST)]), 1):
            await store.append(DomainEventStream(
                aggregate_id=door, version=version, events=events, command_id=f"c{version}", request_id=f"r{version}"
            ))

if __name__ == "__main__":
    trio.run(fill)
"""


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history")
    (folder / "shop.py").write_text(MODULE)
    (folder / "shop_history.py").write_text(HISTORY)
    subprocess.run([sys.executable, "-m", "shop_history"], check=True, cwd=folder, env=environment(), timeout=60)
    return folder


NO_HISTORY = "shop.door/back has no history in the store of shop_history:app"


def events(folder: Path, *arguments: str, **extra: str) -> tuple[int, str, str]:
    return trio_wow("events", "shop_history:app", *arguments, cwd=folder, env=environment(**extra))


class TestEvents:
    def test_a_history_is_a_plain_table_where_no_terminal_is(self, history: Path) -> None:
        code, output, errors = events(history, "shop.door", "front", FORCE_COLOR="1")
        assert (code, errors) == (0, "")
        head, *rows = output.splitlines()
        assert head.split() == ["VERSION", "WHEN", "EVENT", "BODY"]
        assert [row.split()[0] for row in rows] == ["1", "2", "2"]
        assert all(row.split()[2] == "Opened" for row in rows)
        assert rows[0].endswith(json.dumps({"what": "a" * 300}))  # nothing is cut
        assert rows[1].endswith('{"what": "[red]b[/red]"}')
        assert rows[2].endswith('{"what": "c\\u001b[31m\\x9bé"}')
        assert {row.index("Opened") for row in rows} == {head.index("EVENT")}
        assert not (history / "shop.db-wal").exists()  # the store has been closed

    def test_what_stdout_cannot_encode_is_escaped(self, history: Path) -> None:
        code, output, _ = events(history, "shop.door", "front", PYTHONIOENCODING="ascii")
        assert code == 0
        assert "\\xe9" in output

    def test_json_is_one_document_a_line(self, history: Path) -> None:
        code, output, errors = events(history, "shop.door", "front", "--json")
        assert (code, errors) == (0, "")
        first, second, third = map(json.loads, output.splitlines())
        assert first.keys() == third.keys()
        assert (second["version"], second["sequence"], third["sequence"]) == (2, 1, 2)
        assert third["body"] == {"what": "c\x1b[31m\x9bé"}
        assert {key: first[key] for key in ("context", "aggregate", "id", "tenant", "event", "request_id")} == {
            "context": "shop",
            "aggregate": "door",
            "id": "front",
            "tenant": "acme",
            "event": "Opened",
            "request_id": "r1",
        }

    def test_settings_are_not_read(self, history: Path) -> None:
        assert events(history, "shop.door", "front", WOW_DISPATCH_WORKERS="0", WOW_SETTINGS="none.toml")[0] == 0

    @pytest.mark.parametrize("version", [2**63 - 1, 2**63, 10**30])
    def test_a_version_beyond_every_history_is_one_line(self, history: Path, version: int) -> None:
        code, _, errors = events(history, "shop.door", "front", "--state", str(version))
        assert code == 1
        assert one_line(errors) == f"shop.door/front has no version {version}; its history ends at 2"

    @pytest.mark.parametrize("arguments", [[], ["--state", "1"], ["--json"]])
    def test_an_output_that_cannot_be_written_is_one_line(self, history: Path, arguments: list[str]) -> None:
        command = [sys.executable, *COMMAND, "events", "shop_history:app", "shop.door", "front", *arguments]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=history, env=environment(), timeout=60
            )
        assert done.returncode == 1
        assert one_line(done.stderr) == "the output cannot be written: No space left on device"

    def test_a_signal_while_the_module_is_imported_is_one_line(self, history: Path) -> None:
        (history / "slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
        command = (*COMMAND, "events", "slow:app", "shop.door", "front")
        with PythonProcess(*command, cwd=history, env=environment()) as process:
            process.read_until("importing")
            process.send(signal.SIGTERM)
            code, _, errors = process.finish()
        assert (code, one_line(errors)) == (143, "ended by SIGTERM before it served")

    @pytest.mark.parametrize("columns", [80, 20])
    def test_a_terminal_gets_a_table_that_cuts_nothing(self, history: Path, columns: int) -> None:
        text = shown_on_terminal("events", "shop_history:app", "shop.door", "front", cwd=history, columns=columns)
        assert ("─" in text) is (columns == 80)  # a narrow one would show next to nothing
        assert text.count("a") >= 300
        assert "[red]b[/red]" in text
        assert "\x1b[31m" not in text

    @pytest.mark.parametrize("version", [0, 1, 2])
    def test_the_state_at_a_version(self, history: Path, version: int) -> None:
        code, output, errors = events(history, "shop.door", "front", "--state", str(version))
        assert (code, errors) == (0, "")
        first, *rest = output.splitlines()
        assert first == f"shop.door/front at version {version}"
        state = {"id": "front", "opened": (0, 1, 3)[version]}
        assert json.loads("\n".join(rest)) == state
        code, output, _ = events(history, "shop.door", "front", "--state", str(version), "--json")
        assert code == 0
        assert json.loads(output) == {
            "context": "shop",
            "aggregate": "door",
            "id": "front",
            "tenant": "acme",
            "version": version,
            "state": state,
        }

    @pytest.mark.parametrize(
        ("arguments", "code", "line"),
        [
            (["shop.door", "front", "--state", "3"], 1, "shop.door/front has no version 3; its history ends at 2"),
            (["shop.door", "back"], 1, NO_HISTORY),
            (
                ["shop.door", "back", "--state", "0"],
                1,
                "shop.door/back has no history in the store of shop_history:app",
            ),
            (["shop.window", "x"], 2, "shop_history:app has no aggregate 'shop.window'; there are shop.door"),
            (["door", "x"], 2, "shop_history:app has no aggregate 'door'; there are shop.door"),
            (["shop.door", " "], 2, "aggregate ID ' ' is empty or blank"),
        ],
    )
    def test_what_is_not_there_is_one_line(self, history: Path, arguments: list[str], code: int, line: str) -> None:
        found = events(history, *arguments)
        assert (found[0], found[1], one_line(found[2])) == (code, "", line)

    def test_a_store_that_cannot_be_read_is_one_line(self, history: Path, tmp_path: Path) -> None:
        for name in ("shop.py", "shop_history.py"):
            (tmp_path / name).write_text((history / name).read_text())
        (tmp_path / "shop.db").write_text("no database" * 100)
        code, _, errors = events(tmp_path, "shop.door", "front")
        assert code == 1
        assert one_line(errors).startswith(f"{tmp_path / 'shop.db'}: it is no SQLite database")

    def test_a_reader_that_leaves_is_no_traceback(self, history: Path) -> None:
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [sys.executable, *COMMAND, "events", "shop_history:app", "shop.door", "front"],
            stdout=write,
            stderr=subprocess.PIPE,
            cwd=history,
            env=environment(),
            timeout=60,
        )
        os.close(write)
        assert (done.returncode, done.stderr) == (1, b"")


FAILURES = """
import trio
from trio_wow.adapters.sqlite import SqliteStore
from trio_wow.eventsourcing import FailedExecution
from trio_wow.messages import AggregateId
from shop import App, domain

store = SqliteStore("failures.db", domain.serializer)
app = App(domain, store=store, failures=store)

async def fill():
    async with store:
        for version, function in enumerate(("p/Mailer.opened", "p/Porter.opened", "p/Mailer.opened"), 1):
            error = ConnectionError("[red]no[/red]\\n\x1b[31m\x9bé" if version == 2 else "a" * 300)
            await store.record(FailedExecution.of(
                error, function=function, aggregate_id=AggregateId("shop", "door", "front", "acme"),
                version=version, sequence=2, attempts=4,
            ))

if __name__ == "__main__":
    trio.run(fill)
"""


@pytest.fixture
def failed(folder: Path) -> Path:
    (folder / "shop_failures.py").write_text(FAILURES)
    subprocess.run([sys.executable, "-m", "shop_failures"], check=True, cwd=folder, env=environment(), timeout=60)
    return folder


def failures(folder: Path, *arguments: str, **extra: str) -> tuple[int, str, str]:
    return trio_wow("failures", "shop_failures:app", *arguments, cwd=folder, env=environment(**extra))


class TestFailures:
    def test_they_are_a_plain_table_where_no_terminal_is(self, failed: Path) -> None:
        code, output, errors = failures(failed)
        assert (code, errors) == (0, "")
        head, *rows = output.splitlines()
        assert head.split() == ["ID", "WHEN", "FUNCTION", "EVENT", "ATTEMPTS", "ERROR"]
        assert [row.split()[2:6] for row in rows] == [
            ["p/Mailer.opened", "shop.door/front", "1.2", "4"],
            ["p/Porter.opened", "shop.door/front", "2.2", "4"],
            ["p/Mailer.opened", "shop.door/front", "3.2", "4"],
        ]
        assert rows[0].endswith(f"  ConnectionError: {'a' * 300}")  # nothing is cut
        assert rows[1].endswith("  ConnectionError: [red]no[/red]\\n\\x1b[31m\\x9bé")
        assert not (failed / "failures.db-wal").exists()  # the store has been closed

    def test_a_terminal_gets_a_table(self, failed: Path) -> None:
        text = shown_on_terminal("failures", "shop_failures:app", cwd=failed, columns=140)
        assert "─" in text
        assert len(re.findall(r"\b[0-9a-f]{32}\b", text)) == 3  # to be copied
        assert "\x1b[31m" not in text

    def test_what_is_listed_can_be_selected(self, failed: Path) -> None:
        def versions(*arguments: str) -> list[int]:
            code, output, errors = failures(failed, "--json", *arguments)
            assert (code, errors) == (0, "")
            return [json.loads(line)["version"] for line in output.splitlines()]

        assert versions() == [1, 2, 3]
        assert versions("--limit", "2") == [1, 2]
        assert versions("--function", "p/Mailer.opened") == [1, 3]
        assert versions("--function", "p/Mailer.opened", "--limit", "1") == [1]
        assert versions("--function", "none") == []
        assert failures(failed, "--function", "none") == (0, "no open failures\n", "")

    def test_one_is_shown_whole_and_resolved(self, failed: Path) -> None:
        _, output, _ = failures(failed, "--json")
        listed = [json.loads(line) for line in output.splitlines()]
        id = listed[1]["id"]
        assert listed[1] == {
            "id": id,
            "function": "p/Porter.opened",
            "context": "shop",
            "aggregate": "door",
            "aggregate_id": "front",
            "tenant": "acme",
            "version": 2,
            "sequence": 2,
            "error": "ConnectionError",
            "text": "[red]no[/red]\n\x1b[31m\x9bé",
            "traceback": "ConnectionError: [red]no[/red]\n\x1b[31m\x9bé\n",
            "attempts": 4,
            "failed_at": listed[1]["failed_at"],
        }
        code, output, errors = failures(failed, "--show", id, "--json")
        assert (code, json.loads(output), errors) == (0, listed[1], "")
        code, output, errors = failures(failed, "--show", id)
        assert (code, errors) == (0, "")
        assert output.splitlines() == [
            *(
                f"{name}: {value}"
                for name, value in {**listed[1], "text": "[red]no[/red]\\n\\x1b[31m\\x9bé"}.items()
                if name != "traceback"
            ),
            "",
            "ConnectionError: [red]no[/red]",
            "\\x1b[31m\\x9bé",
        ]
        assert failures(failed, "--resolve", id) == (0, f"resolved {id}\n", "")
        gone = f"there is no open failure '{id}' of shop_failures:app"
        for option in ("--resolve", "--show"):
            code, output, errors = failures(failed, option, id)
            assert (code, output, one_line(errors)) == (1, "", gone)
        code, output, _ = failures(failed, "--resolve", listed[0]["id"], "--json")
        assert (code, json.loads(output)) == (0, {"id": listed[0]["id"], "resolved": True})
        _, output, _ = failures(failed, "--json")
        assert [json.loads(line) for line in output.splitlines()] == listed[2:]

    @pytest.mark.parametrize(
        "arguments",
        [["--show", "a", "--resolve", "a"], ["--show", "a", "--limit", "1"], ["--resolve", "a", "--function", "f"]],
    )
    def test_options_that_exclude_one_another(self, failed: Path, arguments: list[str]) -> None:
        code, output, errors = failures(failed, *arguments)
        assert (code, output) == (2, "")
        assert "exclude one another" in errors
        assert failures(failed, "--limit", "0")[0] == 2

    def test_an_application_that_keeps_none_is_one_line(self, folder: Path) -> None:
        code, output, errors = trio_wow("failures", "shop:app", cwd=folder)
        assert (code, output) == (2, "")
        assert one_line(errors) == (
            "shop:app keeps no failures; give its App a FailureStore, such as SqliteStore, as `failures`"
        )

    def test_a_store_that_cannot_be_read_is_one_line(self, failed: Path) -> None:
        (failed / "failures.db").write_text("no database" * 100)
        code, output, errors = failures(failed)
        assert (code, output) == (1, "")
        assert one_line(errors).startswith(f"{failed / 'failures.db'}: it is no SQLite database")


class TestHelp:
    @pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["events", "--help"], ["failures", "--help"]])
    def test_each_level_has_its_exit_codes(self, tmp_path: Path, arguments: list[str]) -> None:
        code, output, errors = trio_wow(*arguments, cwd=tmp_path)
        assert (code, errors) == (0, "")
        assert "  130  Ctrl+C (SIGINT) before it served" in output
        assert "\x1b" not in output
        assert "..." not in output.replace("[ARGS]...", "")

    def test_the_version(self, tmp_path: Path) -> None:
        assert trio_wow("--version", cwd=tmp_path)[:2] == (0, "trio-wow 0.1.0\n")

    def test_bad_usage_is_2(self, tmp_path: Path) -> None:
        assert trio_wow("run", "--nonsense", cwd=tmp_path)[0] == 2
        assert trio_wow("events", "shop:app", "shop.door", "x", "--state", "-1", cwd=tmp_path)[0] == 2

    def test_the_script_is_installed(self) -> None:
        script = Path(sys.executable).with_name("trio-wow")
        done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
        assert done.stdout == "trio-wow 0.1.0\n"

    @pytest.mark.parametrize("missing", ["click", "rich"])
    def test_without_its_extra_it_says_how_to_get_it(self, tmp_path: Path, missing: str) -> None:
        program = f"import sys; sys.modules[{missing!r}] = None; from trio_wow.cli import main; sys.exit(main())"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert one_line(done.stderr) == 'the command needs an extra: pip install "trio-wow[cli]"'
