"""The laws of the given-when-expect harness: above all, that each expectation fails when it should."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.lowlevel
from attrs import define, field, frozen

from trio_wow.domain import aggregate, on_command, on_sourcing
from trio_wow.errors import (
    AggregateExistsError,
    AggregateNotFoundError,
    CommandRejectedError,
    InvalidIdentifierError,
    SerializationError,
    UnsourcedEventError,
)
from trio_wow.testing import AggregateCase, given


@frozen
class Add:
    id: str
    amounts: tuple[int, ...] = ()


@frozen
class AddLater:
    id: str
    amount: int = 1


@frozen
class Wait:
    id: str
    wait: Callable[[], Any]


@frozen
class Return:
    id: str
    answer: Any


@frozen
class Unknown:
    id: str


@frozen
class Added:
    amount: int


@frozen
class Stranger:
    pass


class TooMuchError(CommandRejectedError):
    pass


@aggregate(context="shop")
@define
class Counter:
    id: str
    total: int = 0
    amounts: list[int] = field(factory=list)

    @on_command
    def add(self, command: Add) -> list[Added]:
        if sum(command.amounts) + self.total > 100:
            raise TooMuchError(f"{sum(command.amounts)} is too much")
        return [Added(amount) for amount in command.amounts]

    @on_command
    async def add_later(self, command: AddLater) -> Added:
        if command.amount > 100:
            raise TooMuchError("later is too much")
        return Added(command.amount)

    @on_command
    async def wait(self, command: Wait) -> Added:
        await command.wait()
        return Added(1)

    @on_command
    def answer(self, command: Return) -> Any:
        return command.answer

    @on_sourcing
    def added(self, event: Added) -> None:
        if event.amount < 0:
            raise ZeroDivisionError("negative")
        self.total += event.amount
        self.amounts.append(event.amount)


ADD = Add("A", (1, 2))


class TestGiven:
    def test_state_is_new_without_events(self) -> None:
        assert given(Counter, "A").state == Counter("A")

    def test_events_are_applied_in_order(self) -> None:
        assert given(Counter, "A", Added(1), Added(2)).state == Counter("A", 3, [1, 2])

    def test_cases_share_no_state(self) -> None:
        one, other = given(Counter, "A", Added(1)), given(Counter, "A", Added(1))
        one.when(ADD)
        other.expect_state(total=1)

    def test_class_that_is_no_aggregate_is_refused(self) -> None:
        with pytest.raises(TypeError, match="Add is no aggregate"):
            given(Add, "A")

    def test_event_that_is_not_sourced_is_refused(self) -> None:
        with pytest.raises(UnsourcedEventError) as caught:
            given(Counter, "A", Added(1), Stranger())
        assert (caught.value.aggregate, caught.value.event_type) == ("Counter", Stranger)

    def test_event_that_cannot_be_applied_raises_its_error(self) -> None:
        with pytest.raises(ZeroDivisionError):
            given(Counter, "A", Added(-1))

    @pytest.mark.parametrize("value", ["", " ", "a\0", "\ud800", "x" * 513], ids=lambda each: ascii(each)[:12])
    def test_fs16_illegal_id_is_refused(self, value: str) -> None:
        with pytest.raises(InvalidIdentifierError) as caught:
            given(Counter, value)
        assert (caught.value.what, caught.value.value) == ("aggregate ID", value)


class TestWhen:
    def test_events_of_the_command_are_applied(self) -> None:
        assert given(Counter, "A", Added(1)).when(ADD).state == Counter("A", 4, [1, 1, 2])

    def test_next_command_sees_what_the_last_one_did(self) -> None:
        case = given(Counter, "A", Added(98)).when(Add("A", (1,))).when(Add("A", (1,)))
        case.expect_events(Added(1)).expect_state(total=100)
        case.when(Add("A", (1,))).expect_error(TooMuchError)

    def test_every_step_returns_the_case(self) -> None:
        case = given(Counter, "A")
        assert isinstance(case, AggregateCase)
        assert case.when(ADD) is case
        assert case.expect_events(Added(1), Added(2)) is case
        assert case.expect_state(total=3) is case
        assert case.when(Add("A")).expect_no_events() is case
        assert case.when(Add("A", (101,))).expect_error(TooMuchError) is case

    def test_unknown_command_is_an_error_naming_class_and_command(self) -> None:
        case = given(Counter, "A")
        for command in (Unknown("A"), Added(1)):
            with pytest.raises(TypeError, match=f"Counter has no @on_command function for {type(command).__name__}"):
                case.when(command)

    def test_async_function_that_does_not_wait_is_run(self) -> None:
        given(Counter, "A").when(AddLater("A", 5)).expect_events(Added(5)).expect_state(total=5)
        given(Counter, "A").when(AddLater("A", 101)).expect_error(TooMuchError, "later")

    async def test_async_function_is_run_inside_trio_too(self) -> None:
        given(Counter, "A").when(AddLater("A", 5)).expect_events(Added(5))

    WAITS = pytest.mark.parametrize(
        "wait",
        [
            trio.lowlevel.checkpoint,
            trio.sleep_forever,
            partial(trio.sleep, 1),
            lambda: trio.Event().wait(),
            lambda: trio.Lock().acquire(),
        ],
        ids=["checkpoint", "sleep_forever", "sleep", "event", "lock"],
    )

    @WAITS
    def test_async_function_that_waits_needs_a_runtime(self, wait: Callable[[], Any]) -> None:
        with pytest.raises(TypeError, match="function for Wait waits; test it with a runtime"):
            given(Counter, "A").when(Wait("A", wait))

    @WAITS
    async def test_async_function_that_waits_needs_a_runtime_inside_trio_too(self, wait: Callable[[], Any]) -> None:
        with pytest.raises(TypeError, match="function for Wait waits; test it with a runtime"):
            given(Counter, "A").when(Wait("A", wait))
        await trio.lowlevel.checkpoint()

    @pytest.mark.parametrize("answer", [5, "Added", Added, [Added(1), None]], ids=str)
    def test_answer_that_is_no_event_is_an_error(self, answer: object) -> None:
        given(Counter, "A").when(Return("A", answer)).expect_error(TypeError, "return an event")

    def test_event_that_is_not_sourced_is_an_error(self) -> None:
        given(Counter, "A").when(Return("A", Stranger())).expect_error(UnsourcedEventError, "Stranger")

    def test_unexpected_error_is_raised_by_the_next_step(self) -> None:
        steps: list[Callable[[AggregateCase], Any]] = [
            lambda case: case.when(ADD),
            lambda case: case.expect_events(),
            lambda case: case.expect_no_events(),
            lambda case: case.expect_state(total=0),
            lambda case: case.expect_state(),
        ]
        for step in steps:
            case = given(Counter, "A").when(Add("A", (101,)))
            with pytest.raises(TooMuchError, match="101 is too much"):
                step(case)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
    def test_what_is_no_exception_comes_out_at_once(self, error: type[BaseException]) -> None:
        async def leave() -> None:
            raise error

        with pytest.raises(error):
            given(Counter, "A").when(Wait("A", leave))

    def test_failed_command_changes_nothing(self) -> None:
        """Not even if an event could be applied before another could not: that state is thrown away."""
        case = given(Counter, "A", Added(5)).when(Return("A", [Added(1), Added(-1)]))
        case.expect_error(ZeroDivisionError).expect_state(total=5, amounts=[5])
        case.when(Add("A", (2,))).expect_state(total=7)

    def test_events_come_back_as_a_store_would_give_them(self) -> None:
        case = given(Counter, "A", Added(1))
        with pytest.raises(SerializationError, match=r"amount=1.5 comes back as 1"):
            given(Counter, "A", Added(1.5))  # type: ignore[arg-type]
        case.when(Add("A", (2,))).expect_state(total=3, amounts=[1, 2])

    def test_whether_it_must_exist_is_checked(self) -> None:
        @aggregate(context="counting")
        @define
        class Made:
            id: str

            @on_command(exists=False)
            def make(self, command: Add) -> Added:
                return Added(1)

            @on_command(exists=True)
            def go_on(self, command: AddLater) -> Added:
                return Added(2)

            @on_sourcing
            def added(self, event: Added) -> None: ...

        case = given(Made, "a").when(AddLater("a")).expect_error(AggregateNotFoundError)
        case.when(Add("a")).expect_events(Added(1)).when(Add("a")).expect_error(AggregateExistsError)
        case.when(AddLater("a")).expect_events(Added(2))

    def test_command_for_another_aggregate_is_refused(self) -> None:
        with pytest.raises(ValueError, match="the command is for 'B', not for 'A'"):
            given(Counter, "A").when(Add("B", (1,)))


class TestExpectEvents:
    def test_same_events_pass(self) -> None:
        given(Counter, "A").when(ADD).expect_events(Added(1), Added(2))

    @pytest.mark.parametrize(
        "events",
        [
            (),
            (Added(1),),
            (Added(2), Added(1)),
            (Added(1), Added(2), Added(2)),
            (Added(1), Added(3)),
            (Added(1), Stranger()),
            ([Added(1), Added(2)],),
        ],
        ids=str,
    )
    def test_others_fail_and_show_both(self, events: tuple[object, ...]) -> None:
        with pytest.raises(AssertionError) as caught:
            given(Counter, "A").when(ADD).expect_events(*events)
        assert str(list(events)) in str(caught.value)
        assert str([Added(1), Added(2)]) in str(caught.value)

    def test_only_the_last_command_counts(self) -> None:
        case = given(Counter, "A", Added(7)).when(ADD).when(Add("A", (5,)))
        case.expect_events(Added(5))
        with pytest.raises(AssertionError):
            case.expect_events(Added(1), Added(2), Added(5))

    def test_what_was_given_does_not_count(self) -> None:
        case = given(Counter, "A", Added(7))
        with pytest.raises(AssertionError):
            case.expect_events(Added(7))

    @pytest.mark.parametrize("answer", [None, [], ()], ids=repr)
    def test_no_events_pass_when_there_are_none(self, answer: object) -> None:
        given(Counter, "A").when(Return("A", answer)).expect_no_events().expect_events()

    def test_no_events_fail_when_there_are_some(self) -> None:
        with pytest.raises(AssertionError, match="Added"):
            given(Counter, "A").when(ADD).expect_no_events()

    def test_no_events_fail_when_there_was_no_command(self) -> None:
        with pytest.raises(AssertionError):
            given(Counter, "A", Added(1)).expect_no_events()

    def test_no_events_fail_when_the_command_failed(self) -> None:
        """Even if its error was expected: "the last command succeeded" is not so."""
        case = given(Counter, "A").when(Add("A", (101,))).expect_error(TooMuchError)
        with pytest.raises(AssertionError):
            case.expect_no_events()

    def test_events_of_the_command_before_are_forgotten_when_one_fails(self) -> None:
        case = given(Counter, "A").when(ADD).when(Add("A", (101,))).expect_error(TooMuchError)
        with pytest.raises(AssertionError):
            case.expect_events(Added(1), Added(2))


class TestExpectError:
    @pytest.mark.parametrize("kind", [TooMuchError, CommandRejectedError, Exception])
    @pytest.mark.parametrize("text", ["", "101", "is too much"])
    def test_its_class_and_part_of_its_text_pass(self, kind: type[Exception], text: str) -> None:
        given(Counter, "A").when(Add("A", (101,))).expect_error(kind, text)

    def test_success_fails_and_shows_the_events(self) -> None:
        with pytest.raises(AssertionError, match=r"expected TooMuchError, but .*Added\(amount=1\)"):
            given(Counter, "A").when(ADD).expect_error(TooMuchError)

    def test_no_command_fails(self) -> None:
        with pytest.raises(AssertionError):
            given(Counter, "A").expect_error(Exception)

    @pytest.mark.parametrize(("kind", "text"), [(KeyError, ""), (TooMuchError, "little"), (TooMuchError, "TOO MUCH")])
    def test_other_error_fails_and_is_the_cause(self, kind: type[Exception], text: str) -> None:
        with pytest.raises(AssertionError, match=rf"expected {kind.__name__} .*got TooMuchError") as caught:
            given(Counter, "A").when(Add("A", (101,))).expect_error(kind, text)
        assert isinstance(caught.value.__cause__, TooMuchError)

    def test_error_of_the_command_before_does_not_count(self) -> None:
        case = given(Counter, "A").when(Add("A", (101,))).expect_error(TooMuchError).when(ADD)
        with pytest.raises(AssertionError):
            case.expect_error(TooMuchError)

    def test_expected_error_is_not_raised_again(self) -> None:
        case = given(Counter, "A").when(Add("A", (101,))).expect_error(TooMuchError)
        case.expect_state(total=0).when(ADD).expect_events(Added(1), Added(2))


class TestExpectState:
    def test_same_values_pass(self) -> None:
        given(Counter, "A", Added(1)).when(ADD).expect_state(id="A", total=4, amounts=[1, 1, 2])

    @pytest.mark.parametrize(
        "fields", [{"total": 3}, {"total": 4, "id": "B"}, {"amounts": []}, {"total": None}], ids=str
    )
    def test_other_values_fail_and_show_both(self, fields: dict[str, object]) -> None:
        case = given(Counter, "A", Added(1)).when(ADD)
        with pytest.raises(AssertionError) as caught:
            case.expect_state(**fields)
        actual = {name: getattr(case.state, name) for name in fields}
        assert str(fields) in str(caught.value)
        assert str(actual) in str(caught.value)

    def test_unknown_field_fails(self) -> None:
        with pytest.raises((AttributeError, AssertionError), match="totl"):
            given(Counter, "A").expect_state(totl=0)

    def test_state_can_be_expected_without_a_command(self) -> None:
        given(Counter, "A", Added(1)).expect_state(total=1)
