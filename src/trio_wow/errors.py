"""Every error the library raises on purpose; one tree, rooted in `WowError`. And what it warns with."""

from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = [
    "AdmissionClosedError",
    "AggregateDeletedError",
    "AggregateExistsError",
    "AggregateNotDeletedError",
    "AggregateNotFoundError",
    "AggregateNotReadableError",
    "AggregateVersionError",
    "AppendOutcomeUnknownError",
    "AsyncioCallCancelledError",
    "BlockingCallError",
    "BlockingCallWarning",
    "CancelScopeLeakError",
    "CommandFailedError",
    "CommandRejectedError",
    "ConfigurationError",
    "ConnectionLostError",
    "ConnectionRefusedByServerError",
    "DuplicateRequestIdError",
    "ExecutorClosedError",
    "ExpectedVersionError",
    "FailureNotRetryableError",
    "HandlerExitError",
    "HandlerInterruptedError",
    "HopLimitError",
    "InvalidCommandError",
    "InvalidIdentifierError",
    "NoSubscriberError",
    "RemoteError",
    "RuntimeStateError",
    "SchedulerClosedError",
    "SelfWaitError",
    "SerializationError",
    "SettingsError",
    "ShutdownDeadlineError",
    "StageUnavailableError",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreLockedError",
    "StoreReadOnlyError",
    "StoreVersionError",
    "TenantMismatchError",
    "UnknownMessageTypeError",
    "UnroutableCommandError",
    "UnsourcedEventError",
    "VersionConflictError",
    "WaitAbandonedError",
    "WaitTimeoutError",
    "WowError",
]


class WowError(Exception):
    """Base of every error that the library raises on purpose."""


def printable(value: object) -> str:
    """Return a user's value as text, also when it refuses to be printed."""
    try:
        return str(value)
    except Exception:
        return object.__repr__(value)


class ConfigurationError(WowError):
    """The parts of a program do not fit together; all problems found are listed, none is repaired.

    Attributes:
        problems: one sentence for each problem, naming the thing and the fix.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class SettingsError(WowError, ValueError):
    """A setting, or the file that settings are read from, is not legal. Nothing is guessed or ignored.

    Attributes:
        setting: its name, such as `dispatch.workers`; `None` where it is the source as a whole that is at fault.
        source: where it came from: an argument, an environment variable or a file.
        value: as it was found; `None` with `setting`.
        problem: what is wrong with it, and what would be right.
    """

    def __init__(self, setting: str | None, source: str, value: object, problem: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        super().__init__(f"{source} {problem}" if setting is None else f"{setting} = {shown} ({source}) {problem}")
        self.setting = setting
        self.source = source
        self.value = value
        self.problem = problem


class ExecutorClosedError(WowError):
    """Work was offered to a closed executor, or a forced stop ended a dispatch. Nothing was taken from the source.

    Attributes:
        executor: the executor's name.
    """

    def __init__(self, executor: str, what: str) -> None:
        super().__init__(f"executor {executor!r} is closed: {what}")
        self.executor = executor


class SchedulerClosedError(WowError):
    """An aggregate scheduler, or the supplier of several, was asked for more after it had ended. Nothing was taken.

    Attributes:
        name: the scheduler's or the supplier's.
    """

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"scheduler {name!r} is closed: {what}")
        self.name = name


class CancelScopeLeakError(WowError):
    """A handler returned while a cancel scope that it had entered was still open.

    Usually an async generator with a scope inside it was left unfinished: close it with `contextlib.aclosing`.
    Only the item of that handler fails. What the handler itself raised, if anything, is the `__cause__`.

    Attributes:
        handler: the qualified name of the handler, or of the function that a dispatcher called.
        key: the key of the item it handled.
    """

    def __init__(self, handler: str, key: object) -> None:
        super().__init__(
            f"handler {handler} left a cancel scope open when it handled an item of key {printable(key)}; "
            "leave every scope in the handler that entered it"
        )
        self.handler = handler
        self.key = key


class SelfWaitError(WowError):
    """A function would wait for a command to an aggregate that itself waits for the function. Nothing was sent.

    The command could not begin before the function has returned. Send it without waiting, or decide in one command.

    Attributes:
        aggregate_id: the aggregate.
        chain: the aggregates that wait, outermost first, as text.
    """

    def __init__(self, aggregate_id: object, chain: Sequence[str]) -> None:
        super().__init__(
            f"waiting for a command to {aggregate_id} would never end, because that aggregate waits for this one: "
            f"{' > '.join(chain)}; send it without waiting"
        )
        self.aggregate_id = aggregate_id
        self.chain = tuple(chain)


class HandlerInterruptedError(WowError):
    """A plain function's thread was waiting for something in the library when the dispatch of its item was cancelled.

    Raised in the thread, in place of `trio.Cancelled`: the function should clean up and let it pass. Where the thread
    was waited for, it is `trio.Cancelled` again.

    Attributes:
        handler: the function's qualified name.
    """

    def __init__(self, handler: str) -> None:
        super().__init__(f"the dispatch that runs {handler} was cancelled while its thread waited")
        self.handler = handler


class BlockingCallError(WowError):
    """A handler made a call that would have blocked the event loop, and every other handler with it. It was not made.

    Attributes:
        handler: the qualified name of the handler, or of the function that a dispatcher called.
        key: the key of the item it handled.
        call: the name of what it called, such as `time.sleep`.
    """

    def __init__(self, handler: str, key: object, call: str) -> None:
        super().__init__(_blocking_call(handler, key, call))
        self.handler = handler
        self.key = key
        self.call = call


class BlockingCallWarning(RuntimeWarning):
    """A handler makes a call that may block the event loop, and every other handler with it.

    Attributes:
        handler: the qualified name of the handler, or of the function that a dispatcher called.
        key: the key of the item it handles.
        call: the name of what it calls, such as `time.sleep`.
    """

    def __init__(self, handler: str, key: object, call: str) -> None:
        super().__init__(_blocking_call(handler, key, call))
        self.handler = handler
        self.key = key
        self.call = call


def _blocking_call(handler: str, key: object, call: str) -> str:
    return (
        f"handler {handler} called {call}, which blocks the event loop, when it handled an item of key "
        f"{printable(key)}; await an async call or trio.to_thread.run_sync instead, or pin a plain function with "
        "@blocking or @direct"
    )


class RuntimeStateError(WowError):
    """A runtime was asked for something that its state does not allow, such as a second `serve`.

    Attributes:
        state: the name of the state it was in.
    """

    def __init__(self, message: str, state: str) -> None:
        super().__init__(f"{message} (the runtime is {state})")
        self.state = state


class ShutdownDeadlineError(WowError):
    """A stop was forced: work was interrupted and its messages stay unacknowledged.

    Attributes:
        reason: what forced the stop.
        held: component name -> the step that it was in and names of the tasks it still ran when it was forced; the text
            shows the first few.
        operations: name and age in seconds of each operation that was still open, oldest first.
    """

    def __init__(
        self, reason: str, held: Mapping[str, Sequence[str]], operations: Sequence[tuple[str, float]] = ()
    ) -> None:
        shown = self.describe(held, operations)
        super().__init__(f"the stop was forced by {reason}" + (f": {shown}" if shown else ""))
        self.reason = reason
        self.held = {name: tuple(tasks) for name, tasks in held.items()}
        self.operations = tuple(operations)

    @staticmethod
    def describe(held: Mapping[str, Sequence[str]], operations: Sequence[tuple[str, float]]) -> str:
        """Say in one line what is held and which operations are open; of many, the first few."""
        parts = [f"{name} held {_some(_counted(tasks))}" for name, tasks in held.items()]
        if operations:
            parts.append(f"open operations: {_some(_aged(operations))}")
        return "; ".join(parts)


def _some(texts: Sequence[str]) -> str:
    shown = [*texts[:8], f"{len(texts) - 8} more"] if len(texts) > 9 else texts
    return ", ".join(shown) or "nothing"


def _counted(names: Sequence[str]) -> list[str]:
    return [name if count == 1 else f"{name} ({count} times)" for name, count in Counter(names).items()]


def _aged(operations: Sequence[tuple[str, float]]) -> list[str]:
    """Give each name once, with the age of the oldest of that name: the first."""
    counts = Counter(name for name, _ in operations)
    oldest = dict(reversed(operations))
    return [
        f"{name} ({oldest[name]:.1f} s)" if count == 1 else f"{name} ({count} times, up to {oldest[name]:.1f} s)"
        for name, count in counts.items()
    ]


class HandlerExitError(WowError):
    """A handler raised `SystemExit`. The exit code of the process is not a handler's to choose.

    Attributes:
        code: the code that the handler asked for.
    """

    def __init__(self, code: object) -> None:
        super().__init__(
            f"a handler raised SystemExit({code!r}); raise an ordinary error or call request_stop() instead"
        )
        self.code = code


class AdmissionClosedError(WowError):
    """Work from outside was offered before the runtime took any, or after its stop was requested. Nothing was sent.

    Attributes:
        where: the part that refused.
    """

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} takes nothing: the runtime has not started or is stopping; send again to a running one"
        )
        self.where = where


class InvalidIdentifierError(WowError, ValueError):
    """An identifier that no backend could keep unchanged was refused before anything was sent or stored.

    Attributes:
        what: which identifier.
        value: the refused value.
    """

    def __init__(self, what: str, value: object, reason: str) -> None:
        shown = repr(value)
        super().__init__(f"{what} {shown if len(shown) <= 80 else shown[:77] + '...'} {reason}")
        self.what = what
        self.value = value


class SerializationError(WowError):
    """A message cannot be written as JSON without loss, or stored JSON does not fit its type."""


class UnknownMessageTypeError(SerializationError):
    """A message type is not registered, so its name or its class is unknown.

    Attributes:
        name: the registered name looked for, or the class that has none.
        source: where it came from.
    """

    def __init__(self, name: str, source: str) -> None:
        super().__init__(
            f"message type {name!r} ({source}) is not registered; let an aggregate handle or source it, "
            "or add the old name to @message_type(aliases=...)"
        )
        self.name = name
        self.source = source


class UnroutableCommandError(WowError):
    """No registered aggregate has a function for this command. Nothing was sent.

    Attributes:
        command_type: the command's class.
        aggregate: the context and name of the aggregate that it names itself, and that is not registered; or `None`.
    """

    def __init__(self, command_type: type, aggregate: str | None = None) -> None:
        super().__init__(
            f"no aggregate handles {command_type.__name__}; add an @on_command function for it "
            "and give its aggregate to the Domain"
            if aggregate is None
            else f"{command_type.__name__} names the aggregate {aggregate!r}, which the Domain has not; give it to it"
        )
        self.command_type = command_type
        self.aggregate = aggregate


class NoSubscriberError(WowError):
    """A command found no dispatcher on its bus. Nothing was sent.

    Attributes:
        aggregate_id: the aggregate that the command is for.
    """

    def __init__(self, aggregate_id: object) -> None:
        super().__init__(
            f"nobody receives commands for {aggregate_id}; put a CommandDispatcher on this bus in the runtime"
        )
        self.aggregate_id = aggregate_id


class VersionConflictError(WowError):
    """Another writer has appended to this aggregate first. Nothing was stored; load again and decide again.

    Attributes:
        aggregate_id: the aggregate.
        expected: the version that the writer had loaded.
        actual: the version in the store.
        retryable: true.
    """

    retryable = True

    def __init__(self, aggregate_id: object, expected: int, actual: int) -> None:
        super().__init__(f"{aggregate_id} is at version {actual}, not {expected}: another writer was first")
        self.aggregate_id = aggregate_id
        self.expected = expected
        self.actual = actual


class DuplicateRequestIdError(WowError):
    """The aggregate has already stored the events of this request. Nothing was stored again.

    Attributes:
        aggregate_id: the aggregate.
        request_id: the request.
        version: the version at which its events are stored.
    """

    def __init__(self, aggregate_id: object, request_id: str, version: int) -> None:
        super().__init__(f"{aggregate_id} already stored request {request_id!r} as version {version}")
        self.aggregate_id = aggregate_id
        self.request_id = request_id
        self.version = version


class StoreError(WowError):
    """A store cannot do what it was asked for. Nothing was written; the driver's error is the `__cause__`.

    Attributes:
        store: where it is kept.
        retryable: whether the same call may succeed later without anybody's help.
    """

    retryable = False

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(f"{store}: {problem}")
        self.store = store


class StoreFormatError(StoreError):
    """The file is no store: something else, or damaged."""


class StoreVersionError(StoreError):
    """The store was written by a newer version of this package, whose schema is not known here.

    Attributes:
        found: the schema's version.
        known: the newest one known here.
    """

    def __init__(self, store: str, found: int, known: int) -> None:
        super().__init__(
            store, f"its schema has version {found}; this version of trio-wow reads up to {known}: install a newer one"
        )
        self.found = found
        self.known = known


class StoreReadOnlyError(StoreError):
    """The store, or the folder that it is in, cannot be written."""


class StoreFullError(StoreError):
    """There is no room left to write to. The same call succeeds once there is."""


class StoreLockedError(StoreError):
    """Somebody else held the store's write lock longer than the busy timeout."""

    retryable = True


class AppendOutcomeUnknownError(WowError):
    """An append was cut off between the write and its answer: its stream is stored, or it is not.

    Ask `load_request`, or send the command again with its request ID: it is never stored twice.

    Attributes:
        aggregate_id: the aggregate.
        version: the version that the stream would have.
    """

    def __init__(self, aggregate_id: object, version: int) -> None:
        super().__init__(
            f"whether version {version} of {aggregate_id} is stored is not known: the append was cut off; "
            "send the command again with its request ID"
        )
        self.aggregate_id = aggregate_id
        self.version = version


class AggregateVersionError(WowError):
    """A version was asked for that the aggregate has not reached.

    Attributes:
        aggregate_id: the aggregate.
        version: the version asked for.
        last: the version that it has reached; 0 if nothing has happened to it.
    """

    def __init__(self, aggregate_id: object, version: int, last: int) -> None:
        super().__init__(f"{aggregate_id} has no version {version}; its last one is {last}")
        self.aggregate_id = aggregate_id
        self.version = version
        self.last = last


class AggregateNotFoundError(WowError):
    """A command is for an aggregate that must exist, and nothing has happened to it yet. Nothing was stored.

    Attributes:
        aggregate_id: the aggregate.
    """

    def __init__(self, aggregate_id: object) -> None:
        super().__init__(f"{aggregate_id} does not exist: nothing has happened to it; check the ID, or create it first")
        self.aggregate_id = aggregate_id


class AggregateExistsError(WowError):
    """A command is for a new aggregate, and something has happened to this one. Nothing was stored.

    Attributes:
        aggregate_id: the aggregate.
        version: the version that it has reached.
    """

    def __init__(self, aggregate_id: object, version: int) -> None:
        super().__init__(f"{aggregate_id} exists already, at version {version}; choose another ID")
        self.aggregate_id = aggregate_id
        self.version = version


class AggregateDeletedError(WowError):
    """A command is for an aggregate that is deleted. Nothing was stored.

    Attributes:
        aggregate_id: the aggregate.
        version: the version that it has reached.
    """

    def __init__(self, aggregate_id: object, version: int) -> None:
        super().__init__(f"{aggregate_id} is deleted, at version {version}; send RecoverAggregate first")
        self.aggregate_id = aggregate_id
        self.version = version


class AggregateNotDeletedError(WowError):
    """An aggregate is to be recovered that is not deleted. Nothing was stored.

    Attributes:
        aggregate_id: the aggregate.
        version: the version that it has reached.
    """

    def __init__(self, aggregate_id: object, version: int) -> None:
        super().__init__(f"{aggregate_id} is not deleted, at version {version}; there is nothing to recover")
        self.aggregate_id = aggregate_id
        self.version = version


class ExpectedVersionError(WowError):
    """A command expects its aggregate at another version. Nothing was stored; look at the aggregate and decide anew.

    Attributes:
        aggregate_id: the aggregate.
        expected: the version that the command names.
        actual: the version that the aggregate has reached.
    """

    def __init__(self, aggregate_id: object, expected: int, actual: int) -> None:
        super().__init__(f"{aggregate_id} is at version {actual}, and the command expects {expected}")
        self.aggregate_id = aggregate_id
        self.expected = expected
        self.actual = actual


class HopLimitError(WowError):
    """A saga would send a command as one link too many of a chain of events and commands. It was not sent.

    A saga that answers its own command's event feeds itself for ever. Break the circle, or raise `max_hops`.

    Attributes:
        aggregate_id: the aggregate whose event was to be answered.
        max_hops: how many links a chain may have.
    """

    def __init__(self, aggregate_id: object, max_hops: int) -> None:
        super().__init__(
            f"an event of {aggregate_id} is link {max_hops} of a chain of sagas' commands, which may have no more; "
            "break the circle, or raise max_hops"
        )
        self.aggregate_id = aggregate_id
        self.max_hops = max_hops


class FailureNotRetryableError(WowError):
    """A failed execution cannot be tried again. It stays as it is.

    Attributes:
        failure_id: names the failed execution.
    """

    def __init__(self, failure_id: str, reason: str) -> None:
        super().__init__(f"the failure {failure_id!r} cannot be tried again: {reason}")
        self.failure_id = failure_id


class TenantMismatchError(WowError):
    """A command names another tenant than the one that owns the aggregate. Nothing was stored.

    Attributes:
        aggregate_id: the aggregate.
        tenant: the tenant that the command named.
    """

    def __init__(self, aggregate_id: object, tenant: str) -> None:
        super().__init__(f"{aggregate_id} does not belong to tenant {tenant!r}")
        self.aggregate_id = aggregate_id
        self.tenant = tenant


class AggregateNotReadableError(WowError):
    """Stored events could not be turned back into state. Nothing was stored; the `__cause__` is what was raised.

    Attributes:
        aggregate_id: the aggregate.
        version: the version that could not be applied.
    """

    def __init__(self, aggregate_id: object, version: int, reason: BaseException) -> None:
        super().__init__(f"version {version} of {aggregate_id} cannot be applied any more: {reason!r}")
        self.aggregate_id = aggregate_id
        self.version = version


class UnsourcedEventError(WowError):
    """A command function returned an event for which its aggregate has no `@on_sourcing` function. Nothing was stored.

    Attributes:
        aggregate: the aggregate's class name.
        event_type: the event's class.
    """

    def __init__(self, aggregate: str, event_type: type) -> None:
        super().__init__(
            f"{aggregate} has no @on_sourcing function for {event_type.__name__}; add one (it may do nothing)"
        )
        self.aggregate = aggregate
        self.event_type = event_type


class InvalidCommandError(WowError, ValueError):
    """A command is not valid in itself, whatever its aggregate's state: it was not sent. Mend the command.

    What its `validate()` method, or a validator of one of its fields, raised is the `__cause__`.

    Attributes:
        command_type: the command's class.
        reason: the text of what was raised.
    """

    def __init__(self, command_type: type, reason: str) -> None:
        super().__init__(f"{command_type.__name__} is not valid: {reason}")
        self.command_type = command_type
        self.reason = reason


class CommandRejectedError(WowError):
    """Raise it (or a subclass) in a command function to refuse a command by a rule of the domain.

    It ends as the command's result and is never logged as a fault.

    Args:
        args: as for any exception: the text for the sender.
        code: the domain's own name for the rule, which the result's error has as its `code`. A subclass may have it as
            a class attribute instead. Without one the code is the name of the class.
    """

    code: str | None = None

    def __init__(self, *args: object, code: str | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code


class CommandFailedError(WowError):
    """A command's result is an error; raised by `CommandResult.raise_for_error`.

    Attributes:
        code: the error's code.
        text: the error's text.
        retryable: whether nothing was decided, so that the same command may still succeed.
        stage: the stage at which it failed. After `PROCESSED` the command itself stands: do not send it again.
    """

    def __init__(self, code: str, text: str, *, retryable: bool = False, stage: str = "PROCESSED") -> None:
        super().__init__(f"{code}: {text}" + ("" if stage == "PROCESSED" else f" (at {stage}; the command stands)"))
        self.code = code
        self.text = text
        self.retryable = retryable
        self.stage = stage


class StageUnavailableError(WowError):
    """A wait is for a stage of which nobody in this process can tell. The command was not sent.

    Attributes:
        until: the stage.
    """

    def __init__(self, until: str) -> None:
        super().__init__(
            f"nobody in this process tells when a command has reached {until}: it has no dispatcher for that; "
            "wait for PROCESSED, or add what is to handle events"
        )
        self.until = until


class WaitTimeoutError(WowError):
    """The wanted stage was not reached in time. The command may still be handled; only the waiting ended.

    Attributes:
        command_id: the command that was waited for.
        until: the stage waited for.
        timeout: seconds.
        reached: the last stage that was reached; `None` when it was not sent.
    """

    def __init__(self, command_id: str, until: str, timeout: float, reached: str | None = None) -> None:
        far = "was not sent" if reached is None else "may still be handled"
        if reached not in (None, "SENT"):
            far = f"has reached {reached}"
        super().__init__(f"command {command_id} did not reach {until} within {timeout} s; it {far}")
        self.command_id = command_id
        self.until = until
        self.timeout = timeout
        self.reached = reached


class AsyncioCallCancelledError(WowError):
    """Asyncio cancelled what a Trio task waited for in `call_asyncio`, though nothing in Trio was cancelled.

    An `Exception`, unlike asyncio's own `CancelledError`, so that it fails the one command whose handler waited.

    Attributes:
        function: the qualified name of the asyncio function.
    """

    def __init__(self, function: str) -> None:
        super().__init__(f"the asyncio task of {function} was cancelled, by asyncio and not by Trio")
        self.function = function


class WaitAbandonedError(WowError):
    """The runtime stopped before the wanted stage was reported. What became of the command after `reached` is unknown.

    Attributes:
        command_id: the command that was waited for.
        reached: the last stage that was reached; `None` when it was not even sent.
    """

    def __init__(self, command_id: str, reached: str | None = None) -> None:
        super().__init__(
            f"the runtime stopped while command {command_id} was waited for; "
            + ("send it again with its request ID" if reached in (None, "SENT") else f"it stands: it reached {reached}")
        )
        self.command_id = command_id
        self.reached = reached


class ConnectionLostError(WaitAbandonedError):
    """The connection to a remote gateway is gone. Send the command again with its request ID: it has effect once.

    Attributes:
        request_id: of the command.
        reason: how the connection ended.
    """

    def __init__(self, command_id: str, request_id: str, reached: str | None, reason: str) -> None:
        WowError.__init__(
            self,
            f"the connection was lost ({reason}) while command {command_id} was waited for; "
            + (f"it reached {reached}; " if reached else "")
            + f"if in doubt, send it again with its request ID {request_id!r}",
        )
        self.command_id = command_id
        self.reached = reached
        self.request_id = request_id
        self.reason = reason


class ConnectionRefusedByServerError(WowError):
    """A connection to a remote gateway could not be opened. Nothing was sent.

    Attributes:
        url: of the gateway.
        status: of the server's HTTP answer: 401 not authenticated, 503 not yet or no more; `None` if it gave none.
    """

    def __init__(self, url: str, reason: str, status: int | None = None) -> None:
        super().__init__(f"{url} cannot be connected to: {reason}")
        self.url = url
        self.status = status


class RemoteError(WowError):
    """A remote gateway refused something for a reason that has no class of its own here.

    Attributes:
        code: the name of the error's class there.
        field: the path of the field at fault, or `None`.
    """

    def __init__(self, code: str, text: str, field: str | None = None) -> None:
        super().__init__(f"{code}: {text}" + (f" ({field})" if field else ""))
        self.code = code
        self.field = field
