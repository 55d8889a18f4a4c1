"""Given-when-expect for aggregates: what happened, what is asked, what must come of it. No runtime, no store."""

from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from inspect import isawaitable
from typing import Any

import trio

from trio_wow.dispatch import FunctionRegistry
from trio_wow.domain import AggregateModel, DeleteAggregate, Domain, RecoverAggregate, Reply, aggregate_model
from trio_wow.messages import CommandMessage

__all__ = ["AggregateCase", "given"]


def given(aggregate: type, id: str, *events: object, services: Mapping[type, object] | None = None) -> "AggregateCase":
    """Begin a test of one aggregate to which these events have happened.

    Args:
        aggregate: a class decorated with `@aggregate`.
        id: the aggregate's ID.
        events: the bodies, in order.
        services: what its functions get for parameters that are annotated with a class; by that class.

    Raises:
        ConfigurationError: one of them takes a service that is not there.
        TypeError: it is no aggregate.
        UnsourcedEventError: it cannot source one of the events.
    """
    return AggregateCase(aggregate_model(aggregate), id, events, services)


class AggregateCase:
    """An aggregate under test. Every method returns the case, so that steps can be chained.

    Before and after each command the state is rebuilt from the events alone, as a running application does; what a
    command function changes by itself is lost.

    Attributes:
        state: the aggregate's present state.
        deleted: whether it is deleted.
    """

    def __init__(
        self, model: AggregateModel, id: str, events: Iterable[object], services: Mapping[type, object] | None
    ) -> None:
        self._model = model
        domain = Domain([model.cls])
        self._serializer = domain.serializer
        self._registry = FunctionRegistry(domain, services=services)
        self._registry.seal()
        self._id = model.aggregate_id(id).id
        self._history = [*events]
        self._events: tuple[object, ...] | None = None
        self._value: object = None
        self._error: Exception | None = None
        self.state = self._rebuild()

    def when(self, command: Any) -> "AggregateCase":
        """Give the aggregate a command: it decides, and its events are applied.

        An `Exception` is kept for `expect_error`; the next expectation or command raises it, if it is not expected.

        Raises:
            ValueError: it is for another aggregate.
            TypeError: the aggregate has no function for it; or its `async` function really waits, which needs a
                runtime to test.
        """
        self._raise_unexpected()
        if type(command) in (DeleteAggregate, RecoverAggregate):
            if (command.context, command.aggregate) != (self._model.context, self._model.name):
                raise ValueError(f"the command is for {command.context}.{command.aggregate}, not for {self._model!r}")
        elif type(command) not in self._model.commands:
            raise TypeError(f"{self._model.cls.__name__} has no @on_command function for {type(command).__name__}")
        if command.id != self._id:
            raise ValueError(f"the command is for {command.id!r}, not for {self._id!r}")
        self._events = self._value = None
        state = self._rebuild()
        try:
            function = self._model.command_function(type(command))
            message = CommandMessage(aggregate_id=self._model.aggregate_id(self._id), body=command)
            self._model.check_life(command, message.aggregate_id, len(self._history), deleted=self.deleted)
            decided = function.call(state, command, **self._registry.command_arguments(function).of(message))
            if isawaitable(decided):
                decided = _run_without_waiting(decided, command)
            events = self._model.events_of(command, decided)
            value = self._serializer.plain(decided.value) if isinstance(decided, Reply) else None
            for event in events:
                self._apply(state, event)
        except _WaitsError as error:
            raise TypeError(str(error)) from None
        except Exception as error:
            self._error = error
        else:
            self._events, self._value = events, value
            self._history += events
            self.state = self._rebuild()
        return self

    def expect_events(self, *events: object) -> "AggregateCase":
        """Assert that the last command yielded exactly these events, in this order."""
        self._raise_unexpected()
        if self._events is None:
            raise AssertionError(f"expected the events {list(events)}, but no command has succeeded")
        if self._events != events:
            raise AssertionError(f"expected the events {list(events)}, got {list(self._events)}")
        return self

    def expect_no_events(self) -> "AggregateCase":
        """Assert that the last command succeeded and yielded nothing."""
        return self.expect_events()

    def expect_value(self, value: object) -> "AggregateCase":
        """Assert that the last command succeeded, and returned this for its caller; `None` for nothing."""
        self._raise_unexpected()
        if self._value != value:
            raise AssertionError(f"expected the value {value!r}, got {self._value!r}")
        return self

    def expect_error(self, kind: type[Exception], text: str = "") -> "AggregateCase":
        """Assert that the last command raised an error of this class, with `text` in its text."""
        error, self._error = self._error, None
        if error is None:
            raise AssertionError(f"expected {kind.__name__}, but the command yielded {list(self._events or ())}")
        if not isinstance(error, kind) or text not in str(error):
            raise AssertionError(f"expected {kind.__name__} with {text!r}, got {error!r}") from error
        return self

    def expect_state(self, **fields: object) -> "AggregateCase":
        """Assert that the state's fields have these values."""
        self._raise_unexpected()
        actual = {name: getattr(self.state, name) for name in fields}
        if actual != fields:
            raise AssertionError(f"expected the state {fields}, got {actual}")
        return self

    def _rebuild(self) -> Any:
        state = self._model.new_state(self._id)
        self.deleted = False
        for event in self._history:
            self._apply(state, event)
            self.deleted = self._model.deleted_after(event, self.deleted)
        return state

    def _apply(self, state: Any, event: object) -> None:
        self._model.check_sourced(event)
        self._model.apply(state, self._serializer.copy(event))

    def _raise_unexpected(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


class _WaitsError(Exception):
    pass


def _run_without_waiting(decided: Awaitable[object], command: object) -> object:
    async def main() -> object:
        return _step(_await(decided), command)

    # Trio's own waits show themselves as such only inside a run.
    return _step(_await(decided), command) if trio.lowlevel.in_trio_run() else trio.run(main)


def _step(coroutine: Coroutine[Any, Any, object], command: object) -> object:
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise _WaitsError(f"the function for {type(command).__name__} waits; test it with a runtime")


async def _await(decided: Awaitable[object]) -> object:
    return await decided
