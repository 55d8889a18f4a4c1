"""Finding the application that an argument names."""

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from trio_wow.app import App
from trio_wow.cli._failure import FAILED, USAGE, Failure, Interrupted
from trio_wow.errors import SettingsError

__all__ = ["load_app"]


def load_app(target: str, *, show_traceback: bool) -> App:
    """Import the application that `MODULE:APP` names; the current directory is importable.

    Raises:
        Failure: there is none.
        Interrupted, KeyboardInterrupt: a signal came meanwhile.
    """
    module_name, colon, name = target.partition(":")
    if not colon or module_name.endswith(".py") or not _is_dotted(module_name) or not _is_dotted(name):
        raise Failure(f"{target!r} names no application; write MODULE:APP, such as shop.main:app", USAGE)
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    found: object = _imported(module_name, show_traceback=show_traceback)
    seen = module_name
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            kind = "module" if isinstance(found, ModuleType) else type(found).__name__
            raise Failure(f"{target!r} names no application: {kind} {seen} has no {part!r}", USAGE) from None
        seen = f"{seen}.{part}"
    if not isinstance(found, App):
        raise Failure(f"{target!r} is no trio_wow.App but of type {type(found).__name__}", USAGE)
    return found


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _imported(name: str, *, show_traceback: bool) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (KeyboardInterrupt, Interrupted):
        raise
    except SettingsError as error:
        raise Failure(str(error), USAGE, cause=error if show_traceback else None) from error
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            problem = f"there is no module {error.name!r} in {Path.cwd()} or among the installed packages"
            code = USAGE
        else:
            problem = f"importing {name!r} failed: {_one_line(error)}; --traceback shows more"
            code = FAILED
        raise Failure(problem, code, cause=error if show_traceback else None) from error


def _one_line(error: BaseException) -> str:
    """Say what was raised, and in which line of the program."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    summary = "".join(traceback.format_exception_only(error)).strip()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    # The program's own line says more than one of a library that it calls.
    own = [
        frame
        for frame in frames
        if Path.cwd() in Path(frame.filename).parents and "site-packages" not in frame.filename
    ]
    for frame in reversed(own or frames):
        return f"{summary} ({frame.filename}, line {frame.lineno})"
    return summary
