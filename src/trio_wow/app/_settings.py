"""Settings: from arguments, then environment variables, then a TOML file; each value with its source."""

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from attrs import Attribute, field, frozen
from attrs.validators import instance_of
from typed_settings.cls_utils import deep_options
from typed_settings.dict_utils import merge_settings
from typed_settings.exceptions import TsError
from typed_settings.loaders import EnvLoader, TomlFormat
from typed_settings.types import LoadedSettings, LoaderMeta

from trio_wow.errors import SettingsError

__all__ = ["DispatchSettings", "Settings", "ShutdownSettings", "load_settings"]

PREFIX = "WOW_"
FILE_VARIABLE = "WOW_SETTINGS"
MAX = sys.float_info.max

_Validator = Callable[[object, "Attribute[Any]", Any], None]


@frozen
class _Legal:
    """What a setting may be.

    Attributes:
        number: `int`, or `float` where an int will do as well.
        holds: whether a number of that kind is in the range.
        range: the range in words.
        none: what `None`, or the word none, stands for; `None` if that is not legal.
    """

    number: type[int] | type[float]
    holds: Callable[[float], bool]
    range: str
    none: str | None = None

    @property
    def rule(self) -> str:
        return f"must be {self.range}" + (f", or none for {self.none}" if self.none else "")

    def parse(self, text: str) -> object:
        """Read a value written as text; text that says nothing comes back as it is."""
        if self.none and text.lower() == "none":
            return None
        try:
            return self.number(text)
        except ValueError:
            return text

    def allows(self, value: object) -> bool:
        if value is None:
            return self.none is not None
        # By type, not by isinstance: a bool is no number here.
        return type(value) in (int, self.number) and self.holds(value)  # type: ignore[arg-type]


@frozen
class _Choice:
    """A setting that is one of some words."""

    words: tuple[str, ...]

    @property
    def rule(self) -> str:
        return f"must be one of {', '.join(self.words)}"

    def parse(self, text: str) -> object:
        return text.lower()

    def allows(self, value: object) -> bool:
        return value in self.words


_COUNT = partial(_Legal, int, lambda value: value >= 1, "a positive int")
_LEGAL: dict[str, _Legal | _Choice] = {
    "dispatch.workers": _COUNT(none="the CPUs that the process may use"),
    "dispatch.max_in_flight": _COUNT(),
    "dispatch.throughput": _COUNT(),
    "dispatch.blocking_calls": _Choice(("allow", "warn", "raise")),
    "shutdown.timeout": _Legal(float, lambda value: 0 < value <= MAX, "a positive, finite number of seconds"),
    "shutdown.quiet_period": _Legal(
        float,
        lambda value: 0 <= value <= MAX,
        "a number of seconds, at least 0 and less than shutdown.timeout",
        none="a tenth of the timeout, at most 1",
    ),
}
_KNOWN = f"is no setting; there are {', '.join(_LEGAL)}"


def _check(setting: str, source: str, value: object) -> None:
    if not _LEGAL[setting].allows(value):
        raise SettingsError(setting, source, value, _LEGAL[setting].rule)


def _check_quiet_period(quiet_period: float | None, source: str, timeout: float, timeout_source: str) -> None:
    if quiet_period is not None and quiet_period >= timeout:
        raise SettingsError(
            "shutdown.quiet_period",
            source,
            quiet_period,
            f"must be less than shutdown.timeout, which is {timeout!r} ({timeout_source})",
        )


def _legal(setting: str) -> _Validator:
    def validate(_: object, __: "Attribute[Any]", value: object) -> None:
        _check(setting, "argument", value)

    return validate


@frozen(kw_only=True)
class DispatchSettings:
    """How the executor of a runtime works; see `KeyedExecutor`.

    Attributes:
        workers: how many handlers may compute at once; a positive int, or `None` for the CPUs that the process may use.
        max_in_flight: messages that one receiver may hold unfinished; a positive int.
        throughput: messages of one aggregate handled in a row; a positive int.
        blocking_calls: what to do about functions that block the event loop: "allow", "warn" or "raise".

    Raises:
        SettingsError: a value is not legal.
    """

    workers: int | None = field(default=None, validator=_legal("dispatch.workers"))
    max_in_flight: int = field(default=256, validator=_legal("dispatch.max_in_flight"))
    throughput: int = field(default=16, validator=_legal("dispatch.throughput"))
    blocking_calls: Literal["allow", "warn", "raise"] = field(
        default="allow", validator=_legal("dispatch.blocking_calls")
    )


@frozen(kw_only=True)
class ShutdownSettings:
    """How a runtime stops; see `Runtime`.

    Attributes:
        timeout: seconds from the stop request until what still runs is cancelled; positive and finite.
        quiet_period: seconds without any running operation before admission closes; at least 0, less than `timeout`;
            `None` for a tenth of the timeout, at most 1.

    Raises:
        SettingsError: a value is not legal.
    """

    timeout: float = field(default=60.0, validator=_legal("shutdown.timeout"))
    quiet_period: float | None = field(default=None, validator=_legal("shutdown.quiet_period"))

    def __attrs_post_init__(self) -> None:
        _check_quiet_period(self.quiet_period, "argument", self.timeout, "argument or default")


@frozen(kw_only=True)
class Settings:
    """The settings of an application. `load_settings` reads them from where an operator writes them.

    Attributes:
        dispatch: how the executor works.
        shutdown: how a runtime stops.
    """

    dispatch: DispatchSettings = field(factory=DispatchSettings, validator=instance_of(DispatchSettings))
    shutdown: ShutdownSettings = field(factory=ShutdownSettings, validator=instance_of(ShutdownSettings))


def load_settings(
    *,
    file: str | os.PathLike[str] | None = None,
    arguments: Mapping[str, object] | None = None,
    base: Settings | None = None,
) -> Settings:
    """Read the settings: an argument beats an environment variable, which beats the file, which beats the default.

    A variable has the name of its setting: `WOW_DISPATCH_MAX_IN_FLIGHT` is `dispatch.max_in_flight`. So has a key of
    the TOML file: `max_in_flight` in the table `[dispatch]` (`max-in-flight` will do). Where `None` is legal, the word
    `none` says it. Only the value that wins is checked, but every name in the file has to be known, and every variable
    that begins with `WOW_DISPATCH_` or `WOW_SHUTDOWN_`.

    Args:
        file: a TOML file; by default the one that the variable `WOW_SETTINGS` names, if it is set and not empty.
        arguments: setting -> value, such as `{"dispatch.workers": 4}`; text is read as in a variable.
        base: used instead of the environment and the defaults, for a program that has settings of its own.

    Raises:
        SettingsError: a value or a name is not legal, or the file cannot be read. It names the setting, the source, the
            value and what is legal.
    """
    options = deep_options(Settings)
    variables = EnvLoader(PREFIX)
    loaded = []
    if base is None:
        _refuse_unknown_variables({variables.get_envvar(option) for option in options})
        if file is None and (named := os.environ.get(FILE_VARIABLE)):
            loaded.append(_from_file(Path(named), f" (environment variable {FILE_VARIABLE})"))
    if file is not None:
        loaded.append(_from_file(Path(file)))
    if base is None:
        loaded.append(variables(Settings, options))
    loaded.append(_from_arguments(arguments or {}))

    sections: dict[str, dict[str, Any]] = {"dispatch": {}, "shutdown": {}}
    sources = {}
    names = {option.path: variables.get_envvar(option) for option in options}
    for setting, (value, meta) in merge_settings(options, loaded).items():
        source = meta.name
        if source == "EnvLoader":
            source = f"environment variable {names[setting]}"
        elif source == "argument":
            source = f"argument {setting}"
        is_text = isinstance(value, str) and (not source.startswith("file ") or value.lower() == "none")
        read = _LEGAL[setting].parse(value) if is_text else value
        _check(setting, source, read)
        section, _, name = setting.partition(".")
        sections[section][name] = read
        sources[setting] = source
    return _assembled(sections, sources, base if base is not None else Settings())


def _assembled(sections: Mapping[str, Mapping[str, Any]], sources: Mapping[str, str], base: Settings) -> Settings:
    """Put values over a base, the one value that depends on another checked last."""
    shutdown = {"timeout": base.shutdown.timeout, "quiet_period": base.shutdown.quiet_period, **sections["shutdown"]}
    _check_quiet_period(
        shutdown["quiet_period"],
        sources.get("shutdown.quiet_period", "given by the program"),
        shutdown["timeout"],
        sources.get("shutdown.timeout", "default or given by the program"),
    )
    dispatch = base.dispatch
    return Settings(
        dispatch=DispatchSettings(
            **{
                "workers": dispatch.workers,
                "max_in_flight": dispatch.max_in_flight,
                "throughput": dispatch.throughput,
                "blocking_calls": dispatch.blocking_calls,
                **sections["dispatch"],
            }
        ),
        shutdown=ShutdownSettings(**shutdown),
    )


def _refuse_unknown_variables(known: set[str]) -> None:
    problem = f"is no setting; there are {', '.join(sorted(known))}"
    for name, value in sorted(os.environ.items()):
        if name.startswith((f"{PREFIX}DISPATCH_", f"{PREFIX}SHUTDOWN_")) and name not in known:
            raise SettingsError(name, "environment variable", value, problem)


def _from_file(path: Path, named_by: str = "") -> LoadedSettings:
    source = f"file {path}{named_by}"
    try:
        tables = TomlFormat(None)(path, Settings, deep_options(Settings))
    except (OSError, TsError, ValueError) as error:
        reason = error.__cause__ or error
        text = reason.strerror if isinstance(reason, OSError) else reason
        raise SettingsError(None, source, None, f"cannot be read as TOML: {text}") from error
    found: dict[str, dict[str, object]] = {"dispatch": {}, "shutdown": {}}
    for section, values in tables.items():
        if section not in found or not isinstance(values, dict):
            raise SettingsError(section, source, values, f"{_KNOWN}; each in its table, [dispatch] or [shutdown]")
        for key, value in values.items():
            name = key.replace("-", "_")
            if f"{section}.{name}" not in _LEGAL:
                raise SettingsError(f"{section}.{key}", source, value, _KNOWN)
            if name in found[section]:
                raise SettingsError(f"{section}.{key}", source, value, "is there twice, with _ and with -")
            found[section][name] = value
    return LoadedSettings(found, LoaderMeta(source))


def _from_arguments(arguments: Mapping[str, object]) -> LoadedSettings:
    found: dict[str, dict[str, object]] = {"dispatch": {}, "shutdown": {}}
    for setting, value in arguments.items():
        if setting not in _LEGAL:
            raise SettingsError(setting, "argument", value, _KNOWN)
        section, _, name = setting.partition(".")
        found[section][name] = value
    return LoadedSettings(found, LoaderMeta("argument"))
