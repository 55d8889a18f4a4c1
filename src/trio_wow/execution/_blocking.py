"""Finding calls that block the event loop while a handler holds it."""

import os
import socket
import ssl
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from threading import RLock, get_ident
from types import ModuleType, coroutine
from typing import Any, Literal

from trio.lowlevel import enable_ki_protection

from trio_wow.errors import BlockingCallError, BlockingCallWarning
from trio_wow.execution._lane import run_async, run_plain
from trio_wow.execution._mailbox import Mailbox

__all__ = ["BlockingCallGuard", "running_function"]

running_function: ContextVar[str | None] = ContextVar("trio_wow_running_function", default=None)
"""The name of the function that a handler calls for somebody else: that is the one to look at, not the handler."""

_EVENTS = frozenset({"sqlite3.connect", "subprocess.Popen", "time.sleep"})  # the last one from Python 3.13 on

_live: "set[BlockingCallGuard]" = set()
_lock = RLock()  # not a Lock: the garbage collector may end a dispatch while its thread changes the wrappers
# The wrapper last put in each place, and what it replaced there; `None` if the name was inherited.
_wrappers: dict[tuple[type | ModuleType, str], tuple[object, object]] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_live.clear)  # a child that a handler forks holds nobody's event loop


class BlockingCallGuard:
    """Refuses or reports the blocking calls that one dispatch's handler makes while it holds the event loop.

    A context manager, to be entered in the thread of the event loop. Its `run_plain` and `run_async` run the handler.

    Seen in such a step, each once however many layers it passes through, and also if a finalizer or a signal handler
    makes it there:

    - `time.sleep`;
    - on a `socket.socket` with `gettimeout() != 0`, `ssl.SSLSocket` included: `accept`, `connect`, `connect_ex`, every
      `recv...` and every `send...` method, also through `makefile()` or `socket.create_connection`;
    - `subprocess.Popen`, also through `subprocess.run` and its like;
    - `sqlite3.connect`.

    Not seen:

    - what other threads do, and so everything in `trio.to_thread.run_sync`; other tasks, the handler's own child tasks
      included; the source and its key function, `on_error` and `on_discard`;
    - a function that was taken out of its place while no guard was there, such as by `from time import sleep`; from
      Python 3.13 on that one is seen;
    - sockets below or beside `socket.socket`: a subclass's method that does not call its base's, `_socket.socket`, file
      descriptors, and the handshake, `read`, `write` and `unwrap` of an `ssl.SSLSocket`;
    - other extensions that wait in C, such as database drivers; and what an open SQLite connection does;
    - name look-ups (`socket.getaddrinfo`), `select`, files, pipes, locks, queues, `Popen.communicate`, `os.system`;
    - plain computation.

    Only calls are looked at, never how long they take: a `recv` with data at hand is one too.

    As long as any guard is entered, `time.sleep` (before Python 3.13) and the socket methods are wrapped where they
    are. The audit hook for the others stays for good.

    Args:
        mode: "raise" raises `BlockingCallError` in place of the call. "warn" warns with `BlockingCallWarning`, each
            time, at the innermost line outside the standard library; then it makes the call, unless the filters have
            made the warning an error.
        handler: the handler's name; `running_function` goes before it.
    """

    __slots__ = ("_handler", "_mailbox", "_mode", "_thread")

    def __init__(self, mode: Literal["raise", "warn"], handler: str) -> None:
        self._mode = mode
        self._handler = handler
        self._mailbox: Mailbox[Any] | None = None  # whose step runs
        self._thread = 0

    @enable_ki_protection
    def __enter__(self) -> "BlockingCallGuard":
        self._thread = get_ident()
        with _lock:
            _add_audit_hook()
            if not _live:
                _wrap()
            _live.add(self)
        return self

    @enable_ki_protection
    def __exit__(self, *_: object) -> None:
        with _lock:
            _live.discard(self)
            if not _live:
                _unwrap()

    @enable_ki_protection
    def run_plain(self, function: Callable[[Any], object], item: object, mailbox: Mailbox[Any]) -> object:
        """Call `function(item)` as the handler of a mailbox's item. Returns and raises what it does."""
        self._mailbox = mailbox
        try:
            return run_plain(function, item, mailbox)
        finally:
            self._mailbox = None

    @enable_ki_protection
    @coroutine
    def run_async(self, work: Any, mailbox: Mailbox[Any]) -> Generator[Any, Any, None]:
        """Await a coroutine as the handler of a mailbox's item. Raises what it does."""
        handling = run_async(work, mailbox)
        step: Callable[[Any], object] = handling.send
        value: Any = None
        while True:
            self._mailbox = mailbox
            try:
                trap = step(value)
            except StopIteration:
                return
            finally:
                self._mailbox = None
            try:
                step, value = handling.send, (yield trap)
            except BaseException as error:
                step, value = handling.throw, error


def _guard_here() -> BlockingCallGuard | None:
    """Return the guard in whose step this thread is."""
    thread = get_ident()
    for guard in _live.copy():
        if guard._thread == thread and guard._mailbox is not None:
            return guard
    return None


@contextmanager
def _reported(guard: BlockingCallGuard, call: str) -> Iterator[None]:
    """Report a call, and let it go on unguarded: the layers below are the same call."""
    mailbox: Any = guard._mailbox
    guard._mailbox = None
    handler = running_function.get() or guard._handler
    try:
        if guard._mode == "raise":
            raise BlockingCallError(handler, mailbox.key, call)
        frame = sys._getframe()
        while frame.f_back is not None and _is_library(frame.f_globals.get("__name__")):
            frame = frame.f_back
        # Without a registry, which would keep the text of every key.
        warning = BlockingCallWarning(handler, mailbox.key, call)
        warnings.warn_explicit(warning, None, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"))
        yield
    finally:
        guard._mailbox = mailbox


def _is_library(module: object) -> bool:
    return module == __name__ or str(module).partition(".")[0] in sys.stdlib_module_names


@cache
def _add_audit_hook() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, _arguments: tuple[Any, ...]) -> None:
    if _live and event in _EVENTS:
        guard = _guard_here()
        if guard is not None:
            with _reported(guard, event):
                pass


def _places() -> Iterator[tuple[type | ModuleType, str, str]]:
    if sys.version_info < (3, 13):  # later ones have an audit event for it
        yield time, "sleep", "time.sleep"
    for name in dir(socket.socket):
        if name.startswith(("accept", "connect", "recv", "send")):
            yield socket.socket, name, f"socket.socket.{name}"
            if name in vars(ssl.SSLSocket):
                yield ssl.SSLSocket, name, f"ssl.SSLSocket.{name}"


def _wrap() -> None:
    for where, name, call in _places():
        present = vars(where).get(name)
        if (where, name) not in _wrappers or _wrappers[where, name][0] is not present:
            wrapper = _wrapped(getattr(where, name), call)
            _wrappers[where, name] = (wrapper, present)
            setattr(where, name, wrapper)


def _unwrap() -> None:
    """Put everything back, except what others have replaced; they may go on calling a wrapper, which does nothing."""
    for (where, name), (wrapper, replaced) in list(_wrappers.items()):
        if vars(where).get(name) is wrapper:
            del _wrappers[where, name]
            if replaced is None:
                delattr(where, name)
            else:
                setattr(where, name, replaced)


def _wrapped(original: Callable[..., Any], call: str) -> Callable[..., Any]:
    of_socket = call != "time.sleep"

    @wraps(original)
    def wrapper(first: Any, /, *args: Any, **kwargs: Any) -> Any:
        guard = None if of_socket and first.gettimeout() == 0 else _guard_here()
        if guard is None:
            return original(first, *args, **kwargs)
        with _reported(guard, call):
            return original(first, *args, **kwargs)

    return wrapper
