"""Settings: where they come from, which goes first, and what a bad one says."""

import os
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from attrs import define, frozen
from trio.testing import MockClock

from trio_wow import App, Settings, aggregate, on_command, on_sourcing
from trio_wow.app import DispatchSettings, ShutdownSettings, load_settings
from trio_wow.errors import SettingsError
from trio_wow.execution import KeyedExecutor

GOOD = """
[dispatch]
workers = 2
max-in-flight = 20
throughput = 3
blocking_calls = "warn"
[shutdown]
timeout = 7
quiet_period = 0.5
"""
FROM_FILE = Settings(
    dispatch=DispatchSettings(workers=2, max_in_flight=20, throughput=3, blocking_calls="warn"),
    shutdown=ShutdownSettings(timeout=7, quiet_period=0.5),
)


@frozen
class Rise:
    id: str


@frozen
class Risen: ...


@aggregate(context="bakery")
@define
class Dough:
    id: str
    height: int = 0

    @on_command
    def rise(self, command: Rise) -> Risen:
        return Risen()

    @on_sourcing
    def risen(self, event: Risen) -> None:
        self.height += 1


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("WOW_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "wow.toml"
    path.write_text(GOOD)
    return path


def test_nothing_needs_to_be_configured() -> None:
    assert load_settings() == Settings()
    assert attrs.asdict(Settings()) == {
        "dispatch": {"workers": None, "max_in_flight": 256, "throughput": 16, "blocking_calls": "allow"},
        "shutdown": {"timeout": 60.0, "quiet_period": None},
    }


def test_everything_may_come_from_a_file(file: Path) -> None:
    assert load_settings(file=file) == FROM_FILE


def test_the_file_may_be_named_by_a_variable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOW_SETTINGS", str(file))
    assert load_settings() == FROM_FILE
    other = file.with_name("other!.toml")
    other.write_text("[dispatch]\nworkers = 9\n")
    assert load_settings(file=other) == Settings(dispatch=DispatchSettings(workers=9))
    monkeypatch.setenv("WOW_SETTINGS", "")
    assert load_settings() == Settings()


def test_an_argument_beats_a_variable_which_beats_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOW_DISPATCH_WORKERS", "3")
    monkeypatch.setenv("WOW_DISPATCH_MAX_IN_FLIGHT", "30")
    settings = load_settings(file=file, arguments={"dispatch.workers": 4})
    assert settings.dispatch == DispatchSettings(workers=4, max_in_flight=30, throughput=3, blocking_calls="warn")


def test_every_setting_has_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WOW_DISPATCH_WORKERS": "2",
        "WOW_DISPATCH_MAX_IN_FLIGHT": "20",
        "WOW_DISPATCH_THROUGHPUT": "3",
        "WOW_DISPATCH_BLOCKING_CALLS": "Warn",
        "WOW_SHUTDOWN_TIMEOUT": "7",
        "WOW_SHUTDOWN_QUIET_PERIOD": "0.5",
    }.items():
        monkeypatch.setenv(name, value)
    assert load_settings() == FROM_FILE


def test_none_puts_back_the_default_rule(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOW_DISPATCH_WORKERS", "none")
    monkeypatch.setenv("WOW_SHUTDOWN_QUIET_PERIOD", "None")
    settings = load_settings(file=file)
    assert settings.dispatch.workers is None
    assert settings.shutdown.quiet_period is None
    file.write_text("[dispatch]\nworkers = 'none'\n")
    monkeypatch.setenv("WOW_DISPATCH_WORKERS", "3")
    assert load_settings(file=file, arguments={"dispatch.workers": None}).dispatch.workers is None
    monkeypatch.delenv("WOW_DISPATCH_WORKERS")
    assert load_settings(file=file).dispatch.workers is None


def test_a_base_stands_for_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOW_DISPATCH_WORKERS", "3")
    monkeypatch.setenv("WOW_SETTINGS", "nowhere.toml")
    base = Settings(dispatch=DispatchSettings(throughput=5), shutdown=ShutdownSettings(timeout=4))
    assert load_settings(base=base) == base
    settings = load_settings(base=base, arguments={"dispatch.workers": "8"})
    assert settings == Settings(dispatch=DispatchSettings(workers=8, throughput=5), shutdown=base.shutdown)
    assert load_settings(base=base, file=file) == FROM_FILE


def test_only_the_value_that_wins_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOW_DISPATCH_WORKERS", "many")
    assert load_settings(arguments={"dispatch.workers": 4}).dispatch.workers == 4


BAD: list[tuple[str, str, str]] = [
    ("dispatch.workers", "0", "must be a positive int, or none for the CPUs that the process may use"),
    ("dispatch.workers", "", "must be a positive int"),
    ("dispatch.max_in_flight", "-1", "must be a positive int"),
    ("dispatch.max_in_flight", "none", "must be a positive int"),
    ("dispatch.throughput", "1.5", "must be a positive int"),
    ("dispatch.blocking_calls", "never", "must be one of allow, warn, raise"),
    ("dispatch.blocking_calls", "none", "must be one of allow, warn, raise"),
    ("shutdown.timeout", "0", "must be a positive, finite number of seconds"),
    ("shutdown.timeout", "inf", "must be a positive, finite number of seconds"),
    ("shutdown.timeout", "nan", "must be a positive, finite number of seconds"),
    ("shutdown.quiet_period", "-0.1", "must be a number of seconds, at least 0 and less than shutdown.timeout"),
    ("shutdown.quiet_period", "60", "must be less than shutdown.timeout, which is 60.0"),
]


def variable(setting: str) -> str:
    return "WOW_" + setting.upper().replace(".", "_")


@pytest.mark.parametrize(("setting", "value", "rule"), BAD)
def test_a_bad_variable_is_named_with_what_is_legal(
    setting: str, value: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable(setting), value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert caught.value.setting == setting
    assert caught.value.source == f"environment variable {variable(setting)}"
    assert f"{setting} = " in str(caught.value)
    assert f"({caught.value.source}) {rule}" in str(caught.value)


@pytest.mark.parametrize(("setting", "value", "rule"), BAD)
def test_a_bad_argument_is_named_with_what_is_legal(setting: str, value: str, rule: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"(argument {setting}) {rule}")):
        load_settings(arguments={setting: value})


@pytest.mark.parametrize(
    ("setting", "toml", "value"),
    [
        ("dispatch.workers", "0", 0),
        ("dispatch.workers", "true", True),
        ("dispatch.workers", "'4'", "4"),
        ("dispatch.throughput", "2.0", 2.0),
        ("dispatch.blocking_calls", "['warn']", ["warn"]),
        ("dispatch.blocking_calls", "true", True),
        ("shutdown.timeout", "inf", float("inf")),
        ("shutdown.timeout", "[1]", [1]),
        ("shutdown.quiet_period", "60", 60),
    ],
)
def test_a_bad_value_in_a_file_is_named_with_the_file(setting: str, toml: str, value: object, file: Path) -> None:
    section, name = setting.split(".")
    file.write_text(f"[{section}]\n{name} = {toml}\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(file=file)
    assert (caught.value.setting, caught.value.source) == (setting, f"file {file}")
    assert caught.value.value == value


@pytest.mark.parametrize(
    ("toml", "name"),
    [
        ("[dispatch]\nworker = 3", "dispatch.worker"),
        ("[dispach]\nworkers = 3", "dispach"),
        ("workers = 3", "workers"),
        ("dispatch = 3", "dispatch"),
        ("[dispatch.workers]\nx = 1", "dispatch.workers"),
    ],
)
def test_an_unknown_name_in_a_file_is_refused(toml: str, name: str, file: Path) -> None:
    file.write_text(toml)
    with pytest.raises(SettingsError, match=rf"^{re.escape(name)} = .*\(file {re.escape(str(file))}\)"):
        load_settings(file=file)


def test_one_setting_spelled_twice_is_refused(file: Path) -> None:
    file.write_text("[dispatch]\nmax_in_flight = 1\nmax-in-flight = 2")
    with pytest.raises(SettingsError, match="is there twice"):
        load_settings(file=file)


@pytest.mark.parametrize("content", [b"workers = ", b"\xff = 1"])
def test_a_file_that_is_no_toml_is_named(content: bytes, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(content)
    monkeypatch.setenv("WOW_SETTINGS", str(file))
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert str(caught.value).startswith(f"file {file} (environment variable WOW_SETTINGS) cannot be read as TOML: ")
    assert caught.value.setting is None


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"file nowhere.toml cannot be read as TOML: No such file or directory"):
        load_settings(file="nowhere.toml")
    with pytest.raises(SettingsError, match="Is a directory"):
        load_settings(file=tmp_path)


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOW_ELSEWHERE", "fine")
    load_settings()
    monkeypatch.setenv("WOW_DISPATCH_WORKER", "3")
    with pytest.raises(SettingsError, match=r"WOW_DISPATCH_WORKER = '3' .* there are WOW_DISPATCH_BLOCKING_CALLS, "):
        load_settings()


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"workers = 3 \(argument\) is no setting; there are dispatch.workers, "):
        load_settings(arguments={"workers": 3})


def test_two_values_that_do_not_go_together_are_named_with_both_sources(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WOW_SHUTDOWN_QUIET_PERIOD", "9")
    with pytest.raises(SettingsError) as caught:
        load_settings(file=file)
    assert str(caught.value) == (
        "shutdown.quiet_period = 9.0 (environment variable WOW_SHUTDOWN_QUIET_PERIOD) must be less than "
        f"shutdown.timeout, which is 7 (file {file})"
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DispatchSettings(workers=0), "dispatch.workers = 0 (argument) must be a positive int, or none"),
        (lambda: DispatchSettings(max_in_flight=True), "dispatch.max_in_flight = True (argument)"),
        (
            lambda: DispatchSettings(throughput="3"),  # type: ignore[arg-type]
            "dispatch.throughput = '3' (argument)",
        ),
        (lambda: ShutdownSettings(timeout=10**400), "shutdown.timeout = 1000"),
        (lambda: ShutdownSettings(timeout=1, quiet_period=1), "shutdown.quiet_period = 1 (argument) must be less than"),
    ],
)
def test_the_classes_refuse_bad_values(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        make()
    assert isinstance(caught.value, SettingsError)
    with pytest.raises(TypeError):
        Settings(dispatch=3)  # type: ignore[arg-type]


class TestApp:
    def test_reads_the_environment_unless_its_program_gave_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WOW_DISPATCH_WORKERS", "3")
        app = App([Dough])
        assert app.settings.dispatch.workers == 3
        assert not app.has_own_settings
        own = App([Dough], settings=Settings())
        assert own.settings == Settings()
        assert own.has_own_settings

    def test_a_bad_setting_is_found_when_it_is_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WOW_DISPATCH_WORKERS", "0")
        app = App([Dough])
        app.runtime(settings=Settings())
        for _ in range(2):
            with pytest.raises(SettingsError):
                app.runtime()

    def test_its_runtimes_use_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[dict[str, object]] = []
        original = KeyedExecutor.__init__

        def spy(self: KeyedExecutor, **arguments: Any) -> None:
            made.append(arguments)
            original(self, **arguments)

        monkeypatch.setattr(KeyedExecutor, "__init__", spy)
        app = App([Dough], settings=FROM_FILE)
        app.runtime()
        app.runtime(settings=Settings())
        assert made == [
            {"workers": 2, "max_in_flight": 20, "throughput": 3, "blocking_calls": "warn"},
            {"workers": None, "max_in_flight": 256, "throughput": 16, "blocking_calls": "allow"},
        ]
        app.runtime(executor=KeyedExecutor(workers=1))
        assert len(made) == 3

    @pytest.mark.parametrize(
        ("arguments", "seconds"),
        [
            ({}, 2),
            ({"settings": Settings(shutdown=ShutdownSettings(quiet_period=5))}, 5),
            ({"shutdown_quiet_period": 1}, 1),
            ({"shutdown_timeout": 3}, 2),
        ],
    )
    async def test_a_stop_takes_the_quiet_period(
        self, arguments: dict[str, Any], seconds: float, autojump_clock: MockClock
    ) -> None:
        app = App([Dough], settings=Settings(shutdown=ShutdownSettings(timeout=30, quiet_period=2)))
        async with app.serving(app.runtime(signals=False, **arguments)):
            start = trio.current_time()
        assert trio.current_time() - start == pytest.approx(seconds)

    async def test_serving_takes_them_too(self, autojump_clock: MockClock) -> None:
        app = App([Dough], settings=Settings(shutdown=ShutdownSettings(timeout=30, quiet_period=2)))
        async with app.serving() as gateway:
            await gateway.send_and_wait(Rise("rye"))
            start = trio.current_time()
        assert trio.current_time() - start == pytest.approx(2)
