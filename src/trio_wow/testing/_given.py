"""Given-when-expect for aggregates: what happened, what is asked, what must come of it. No runtime, no store."""

from collections.abc import Coroutine
from inspect import iscoroutine
from typing import Any

from trio_wow.domain import AggregateModel, aggregate_model

__all__ = ["AggregateCase", "given"]


def given(aggregate: type, id: str, *events: object) -> "AggregateCase":
    """Begin a test of one aggregate to which these events have happened.

    Args:
        aggregate: a class decorated with `@aggregate`.
        id: the aggregate's ID.
        events: the bodies, in order.

    Raises:
        TypeError: it is no aggregate.
        UnsourcedEventError: it cannot source one of the events.
    """
    model = aggregate_model(aggregate)
    state = model.new_state(model.aggregate_id(id).id)
    for event in events:
        model.apply(state, event)
    return AggregateCase(model, state)


class AggregateCase:
    """An aggregate under test. Every method returns the case, so that steps can be chained.

    Attributes:
        state: the aggregate's present state.
    """

    def __init__(self, model: AggregateModel, state: Any) -> None:
        self.state = state
        self._model = model
        self._events: tuple[object, ...] = ()
        self._error: Exception | None = None

    def when(self, command: object) -> "AggregateCase":
        """Give the aggregate a command: it decides, and its events are applied.

        An `Exception` is kept for `expect_error`; the next expectation or command raises it, if it is not expected.

        Raises:
            TypeError: the aggregate has no function for it; or its `async` function really waits, which needs a
                runtime to test.
        """
        self._raise_unexpected()
        if type(command) not in self._model.commands:
            raise TypeError(f"{self._model.cls.__name__} has no @on_command function for {type(command).__name__}")
        self._events = ()
        try:
            decided = self._model.decide(self.state, command)
            if iscoroutine(decided):
                decided = _run_without_waiting(decided, command)
            events = self._model.events_of(command, decided)
            for event in events:
                self._model.apply(self.state, event)
        except _WaitsError as error:
            raise TypeError(str(error)) from None
        except Exception as error:
            self._error = error
        else:
            self._events = events
        return self

    def expect_events(self, *events: object) -> "AggregateCase":
        """Assert that the last command yielded exactly these events, in this order."""
        self._raise_unexpected()
        if self._events != events:
            raise AssertionError(f"expected the events {list(events)}, got {list(self._events)}")
        return self

    def expect_no_events(self) -> "AggregateCase":
        """Assert that the last command succeeded and yielded nothing."""
        return self.expect_events()

    def expect_error(self, kind: type[Exception], text: str = "") -> "AggregateCase":
        """Assert that the last command raised an error of this class, with `text` in its text."""
        error, self._error = self._error, None
        if error is None:
            raise AssertionError(f"expected {kind.__name__}, but the command yielded {list(self._events)}")
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

    def _raise_unexpected(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


class _WaitsError(Exception):
    pass


def _run_without_waiting(coroutine: Coroutine[Any, Any, object], command: object) -> object:
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise _WaitsError(f"the function for {type(command).__name__} waits; test it with a runtime")
