"""The laws of identity, envelopes, registered names and the stored form."""

import copy
import json
import math
import string
import unicodedata
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, StrEnum
from functools import cached_property
from typing import Any
from uuid import UUID

import attrs
import pytest
from attrs import define, field, frozen
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trio_wow.errors import (
    CommandFailedError,
    ConfigurationError,
    InvalidIdentifierError,
    SerializationError,
    StoreLockedError,
    UnknownMessageTypeError,
    VersionConflictError,
    WowError,
)
from trio_wow.messages import (
    DEFAULT_TENANT,
    AggregateId,
    CommandError,
    CommandMessage,
    CommandResult,
    DomainEvent,
    DomainEventStream,
    EventUpgrader,
    MessageTypes,
    Serializer,
    Stage,
    check_identifier,
    check_name,
    interned_id,
    make_converter,
    message_type,
)

DETERMINISTIC = settings(derandomize=True, deadline=None)
ORDER = AggregateId("shop", "order", "A")
NFC, NFD = unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")

LEGAL_IDS = [
    *("a/b", "..", "%2F", "a:b", "b", "1", "01", "A", "a", NFC, NFD, "\N{ROCKET}" * 50, " a", "a ", "a\nb", '"\\'),
    *("x" * 512, "\N{ROCKET}" * 512, "\x7f", "\u200b", "null", "(0)"),
]
ILLEGAL_IDS: list[tuple[object, str]] = [
    ("", "empty or blank"),
    (" ", "empty or blank"),
    ("\t\n", "empty or blank"),
    ("\u3000", "empty or blank"),
    ("a\0b", "NUL"),
    ("\0", "NUL"),
    ("\ud800", "lone surrogate"),
    ("ok\udfff", "lone surrogate"),
    ("x" * 513, "longer than 512"),
    (string.ascii_letters * 120, "longer than 512"),
    (None, "not text"),
    (5, "not text"),
    (b"a", "not text"),
]


def message(**changes: Any) -> CommandMessage:
    return CommandMessage(**{"aggregate_id": ORDER, "body": Line("tea", 1), **changes})


def stream(*events: object, **changes: Any) -> DomainEventStream:
    given_ = {"aggregate_id": ORDER, "version": 1, "events": events, "command_id": "c", "request_id": "r"}
    return DomainEventStream(**{**given_, **changes})


@frozen
class Line:
    name: str
    amount: int


@frozen
class Everything:
    text: str
    number: int
    ratio: float
    flag: bool
    moment: datetime
    data: bytes
    nothing: int | None
    line: Line
    maybe_line: Line | None
    lines: list[Line]
    by_name: dict[str, Line]
    ratios: tuple[float, ...]


@frozen
class Anything:
    value: Any


@frozen
class Moment:
    moment: datetime


def serializer(*classes: type, upgraders: Iterable[EventUpgrader] = ()) -> Serializer:
    return Serializer(MessageTypes(classes or (Line, Everything, Anything, Moment)), upgraders=upgraders)


def there_and_back(body: object) -> Any:
    writes = serializer(type(body))
    writes.copy(body)
    return writes.load_stream(writes.dump_stream(stream(body)), "here").events[0]


class TestIdentifier:
    @pytest.mark.parametrize("value", LEGAL_IDS, ids=ascii)
    def test_fs16_legal_identifier_is_returned_unchanged(self, value: str) -> None:
        assert check_identifier("order ID", value) == value

    @pytest.mark.parametrize(("value", "reason"), ILLEGAL_IDS, ids=lambda each: ascii(each)[:20])
    def test_fs16_illegal_identifier_is_refused_with_what_and_value(self, value: object, reason: str) -> None:
        with pytest.raises(InvalidIdentifierError, match=reason) as caught:
            check_identifier("order ID", value)
        assert (caught.value.what, caught.value.value) == ("order ID", value)
        assert str(caught.value).startswith("order ID ")
        assert len(str(caught.value)) < 150
        assert isinstance(caught.value, WowError)
        assert isinstance(caught.value, ValueError)

    @DETERMINISTIC
    @given(st.text(alphabet=st.characters(codec=None, exclude_characters="\0"), min_size=1, max_size=512))
    def test_verdict_is_that_of_utf8(self, value: str) -> None:
        try:
            value.encode()
        except UnicodeEncodeError:
            encodable = False
        else:
            encodable = True
        assume(not value.isspace())
        try:
            check_identifier("ID", value)
        except InvalidIdentifierError:
            assert not encodable
        else:
            assert encodable

    @pytest.mark.parametrize("value", ["a", "Z", "0", "_", "-", "order_item-2", "x" * 64])
    def test_legal_name_is_returned(self, value: str) -> None:
        assert check_name("context", value) == value

    @pytest.mark.parametrize(
        "value",
        ["", " ", "a.b", "a/b", "a:b", "a b", "ä", "a\n", "\0", "\ud800", "x" * 65, "\N{ARABIC-INDIC DIGIT ONE}"],
    )
    def test_illegal_name_is_refused_with_what_and_value(self, value: str) -> None:
        with pytest.raises(InvalidIdentifierError, match="1 to 64 ASCII letters") as caught:
            check_name("context", value)
        assert (caught.value.what, caught.value.value) == ("context", value)

    @pytest.mark.parametrize("value", [None, 5, b"a", []], ids=repr)
    def test_name_that_is_no_text_is_refused(self, value: Any) -> None:
        with pytest.raises(InvalidIdentifierError):
            check_name("context", value)


class TestAggregateId:
    def test_text_names_context_aggregate_and_id(self) -> None:
        assert str(AggregateId("shop", "order", "a/b")) == "shop.order/a/b"

    @pytest.mark.parametrize(
        ("id", "shown"),
        [
            ("a\nb", r"a\nb"),
            ("\x1b[2J", r"\x1b[2J"),
            ("\x7f", r"\x7f"),
            ("\x9b1m", r"\x9b1m"),
            ("a\u2028", r"a\u2028"),
            ("a\u202eb", r"a\u202eb"),
            ("\N{ROCKET} é", "\N{ROCKET} é"),
        ],
        ids=ascii,
    )
    def test_text_keeps_to_its_line_and_commands_no_terminal(self, id: str, shown: str) -> None:
        aggregate_id = AggregateId("shop", "order", id)
        assert str(aggregate_id) == f"shop.order/{shown}"
        assert aggregate_id.id == id

    def test_tenant_has_a_default(self) -> None:
        assert ORDER.tenant == DEFAULT_TENANT == "(0)"

    def test_tenant_is_data_and_not_identity(self) -> None:
        other = AggregateId("shop", "order", "A", "acme")
        assert other == ORDER
        assert hash(other) == hash(ORDER)
        assert other.tenant == "acme"

    @pytest.mark.parametrize("changed", [{"context": "shop2"}, {"aggregate": "cart"}, {"id": "a"}])
    def test_context_aggregate_and_id_are_identity(self, changed: dict[str, str]) -> None:
        assert attrs.evolve(ORDER, **changed) != ORDER

    def test_is_frozen(self) -> None:
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            ORDER.id = "B"  # type: ignore[misc]

    @pytest.mark.parametrize(
        ("arguments", "what"),
        [
            (("a.b", "order", "A"), "context"),
            (("", "order", "A"), "context"),
            (("shop", "t:a", "b"), "aggregate name"),
            (("shop", "", "b"), "aggregate name"),
        ],
    )
    def test_illegal_name_is_refused(self, arguments: tuple[str, str, str], what: str) -> None:
        with pytest.raises(InvalidIdentifierError) as caught:
            AggregateId(*arguments)
        assert caught.value.what == what

    @pytest.mark.parametrize(("value", "reason"), ILLEGAL_IDS, ids=lambda each: ascii(each)[:20])
    @pytest.mark.parametrize(("name", "what"), [("id", "aggregate ID"), ("tenant", "tenant")])
    @pytest.mark.parametrize("make", [AggregateId, interned_id])
    def test_fs16_illegal_id_or_tenant_is_refused(
        self, make: Callable[..., AggregateId], name: str, what: str, value: object, reason: str
    ) -> None:
        arguments: dict[str, Any] = {"context": "shop", "aggregate": "order", "id": "A", name: value}
        with pytest.raises(InvalidIdentifierError, match=reason) as caught:
            make(**arguments)
        assert (caught.value.what, caught.value.value) == (what, value)

    def test_fs16_legal_ids_stay_distinct_and_come_back_unchanged(self) -> None:
        ids = [AggregateId("shop", aggregate, each) for aggregate in ("t", "t-a") for each in LEGAL_IDS]
        assert len(set(ids)) == len(ids)
        writes = serializer()
        written = [writes.dump_stream(stream(Line("tea", 1), aggregate_id=each, id="s")) for each in ids]
        assert len(set(written)) == len(ids)
        assert [writes.load_stream(data, "here").aggregate_id for data in written] == ids

    def test_interned_it_is_one_object_for_what_is_the_same_text_in_all_its_parts(self) -> None:
        class Text(str):
            pass

        subclassed = interned_id("shop", "order", Text("interned"), "acme")
        plain = interned_id("shop", "order", "interned", "acme")
        assert type(plain.id) is str
        assert plain is interned_id("shop", "order", "interned", "acme")
        assert subclassed == plain == AggregateId("shop", "order", "interned", "acme")
        assert interned_id("shop", "order", "interned").tenant == DEFAULT_TENANT

    names = st.sampled_from(["a", "b", "a-b", "A"])
    triples = st.tuples(names, names, st.text("ab-/.:A", min_size=1, max_size=4))

    @DETERMINISTIC
    @given(triples, triples)
    def test_ids_are_equal_exactly_when_their_three_parts_are(
        self, one: tuple[str, str, str], other: tuple[str, str, str]
    ) -> None:
        assert (AggregateId(*one) == AggregateId(*other)) is (one == other)
        assert one != other or hash(AggregateId(*one)) == hash(AggregateId(*other))
        assert (str(AggregateId(*one)) == str(AggregateId(*other))) is (one == other)


class TestCommandMessage:
    def test_request_id_is_the_id_by_default(self) -> None:
        assert message(id="m").request_id == "m"
        assert message(id="m", request_id="r").request_id == "r"

    def test_id_is_new_each_time(self) -> None:
        made = [message() for _ in range(100)]
        assert len({each.id for each in made}) == 100
        assert all(each.request_id == each.id for each in made)

    def test_is_made_now_in_utc(self) -> None:
        before = datetime.now(UTC)
        made = message().created_at
        assert before <= made <= datetime.now(UTC)
        assert made.utcoffset() == timedelta(0)

    @pytest.mark.parametrize(("value", "reason"), ILLEGAL_IDS, ids=lambda each: ascii(each)[:20])
    @pytest.mark.parametrize(("name", "what"), [("id", "command ID"), ("request_id", "request ID")])
    def test_fs16_illegal_id_is_refused(self, name: str, what: str, value: object, reason: str) -> None:
        with pytest.raises(InvalidIdentifierError, match=reason) as caught:
            message(**{name: value})
        assert (caught.value.what, caught.value.value) == (what, value)

    def test_is_frozen(self) -> None:
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            message().id = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "make", [message, lambda **changes: stream(Line("tea", 1), **changes)], ids=["command", "stream"]
)
class TestHeaders:
    def test_are_a_copy_of_what_the_message_was_made_with(self, make: Callable[..., Any]) -> None:
        headers = {"user": "ann"}
        made = make(headers=headers)
        headers["user"] = "bob"
        assert made.headers == {"user": "ann"}

    def test_are_not_shared_by_default(self, make: Callable[..., Any]) -> None:
        make().headers["user"] = "ann"
        assert make().headers == {}

    @pytest.mark.parametrize(
        "headers", [{"a": "\ud800"}, {"\ud800": "a"}, {"a": math.nan}, {1: "a"}, {"a": None}], ids=ascii
    )
    def test_fs16_what_is_no_legal_text_is_refused(self, make: Callable[..., Any], headers: Any) -> None:
        with pytest.raises(SerializationError):
            make(headers=headers)

    def test_routed_copy_is_equal_and_has_headers_of_its_own(self, make: Callable[..., Any]) -> None:
        made = make(headers={"user": "ann"})
        routed = made.routed()
        assert routed == made
        routed.headers["user"] = "bob"
        assert made.headers == {"user": "ann"}


class TestDomainEventStream:
    @pytest.mark.parametrize(("value", "reason"), ILLEGAL_IDS, ids=lambda each: ascii(each)[:20])
    @pytest.mark.parametrize(
        ("name", "what"), [("id", "stream ID"), ("command_id", "command ID"), ("request_id", "request ID")]
    )
    def test_fs16_illegal_id_is_refused(self, name: str, what: str, value: object, reason: str) -> None:
        with pytest.raises(InvalidIdentifierError, match=reason) as caught:
            stream(Line("tea", 1), **{name: value})
        assert (caught.value.what, caught.value.value) == (what, value)

    @pytest.mark.parametrize("version", [0, -1])
    def test_version_that_is_not_positive_is_refused(self, version: int) -> None:
        with pytest.raises(ValueError, match=rf"shop\.order/A must be an int from 1 to 2\*\*63-1, not {version}"):
            stream(Line("tea", 1), version=version)

    def test_no_event_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"shop\.order/A must hold at least one event"):
            stream()

    def test_events_become_a_tuple_of_its_own(self) -> None:
        events = [Line("tea", 1), Line("jam", 2)]
        made = stream(events=events)
        events.clear()
        assert made.events == (Line("tea", 1), Line("jam", 2))

    def test_id_is_new_each_time(self) -> None:
        assert len({stream(Line("tea", 1)).id for _ in range(100)}) == 100

    def test_is_frozen(self) -> None:
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            stream(Line("tea", 1)).version = 2  # type: ignore[misc]

    def test_event_knows_its_stream(self) -> None:
        whole = stream(Line("tea", 1), Line("jam", 2), version=7, headers={"user": "ann"})
        event = DomainEvent(whole.events[1], 2, whole)
        assert event.body == Line("jam", 2)
        assert event.sequence == 2
        assert event.aggregate_id is whole.aggregate_id
        assert event.version == 7
        assert event.headers == {"user": "ann"}


class TestResult:
    def result(self, error: CommandError | None) -> CommandResult:
        return CommandResult(command_id="c", request_id="r", aggregate_id=ORDER, stage=Stage.PROCESSED, error=error)

    def test_success_returns_itself(self) -> None:
        result = self.result(None)
        assert result.raise_for_error() is result

    def test_error_is_raised_with_code_and_text(self) -> None:
        result = self.result(CommandError.of(ZeroDivisionError("by none")))
        with pytest.raises(CommandFailedError, match="ZeroDivisionError: by none") as caught:
            result.raise_for_error()
        assert (caught.value.code, caught.value.text) == ("ZeroDivisionError", "by none")

    def test_a_group_is_undecided_only_where_every_leaf_is(self) -> None:
        locked, conflict = StoreLockedError("here", "locked"), VersionConflictError("a", 1, 2)
        group = ExceptionGroup("outer", [conflict, ExceptionGroup("inner", [locked])])
        assert CommandError.of(group).undecided
        assert not CommandError.of(ExceptionGroup("mixed", [group, ValueError()])).undecided

    def test_stage_travels_by_its_name(self) -> None:
        assert [stage.value for stage in Stage] == [stage.name for stage in Stage]


class TestMessageType:
    def test_without_decorator_the_name_is_the_class_and_the_revision_is_one(self) -> None:
        named = MessageTypes([Line]).of(Line("tea", 1))
        assert (named.name, named.revision, named.aliases) == ("Line", 1, ())

    def test_decorator_gives_name_revision_and_aliases_and_returns_the_class(self) -> None:
        decorated = message_type("shop.line", revision=3, aliases=["line", "Row"])(frozen(type("Renamed", (), {})))
        named = MessageTypes([decorated]).of(decorated())
        assert (named.name, named.revision, named.aliases) == ("shop.line", 3, ("line", "Row"))

    def test_subclass_does_not_inherit_the_name(self) -> None:
        @message_type("base", aliases=["old"])
        @frozen
        class Base:
            pass

        @frozen
        class Derived(Base):
            pass

        types = MessageTypes([Base, Derived])
        assert types.problems == []
        assert types.of(Derived()).name == "Derived"

    @pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "x" * 129, "a\n", "\0", "a:b"])
    def test_illegal_name_or_alias_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="1 to 128 ASCII letters"):
            message_type(name)
        with pytest.raises(ValueError, match="1 to 128 ASCII letters"):
            message_type("line", aliases=["fine", name])

    @pytest.mark.parametrize("name", ["a", "Z9_-.", "x" * 128])
    def test_legal_name_is_taken(self, name: str) -> None:
        decorated = message_type(name, aliases=[name + "x"] if len(name) < 128 else [])(frozen(type("Any", (), {})))
        assert MessageTypes([decorated]).of(decorated()).name == name

    def test_aliases_given_as_one_text_are_refused(self) -> None:
        with pytest.raises(ValueError, match="aliases are a sequence of names, not the text 'Old'"):
            message_type("New", aliases="Old")

    @pytest.mark.parametrize("revision", [0, -1])
    def test_revision_below_one_is_refused(self, revision: int) -> None:
        with pytest.raises(ValueError, match=f"at least 1, not {revision}"):
            message_type("line", revision=revision)


class TestMessageTypes:
    def test_class_is_found_by_name_and_by_alias(self) -> None:
        cls = message_type("line", aliases=["row"])(frozen(type("Renamed", (), {})))
        types = MessageTypes([cls])
        assert types.find("line", "here") == types.find("row", "here") == (cls, types.of(cls()))

    def test_class_may_be_given_twice(self) -> None:
        assert MessageTypes([Line, Line]).problems == []

    def test_unknown_name_is_an_error_with_name_and_source(self) -> None:
        with pytest.raises(UnknownMessageTypeError, match=r"'Gone' .*the attic.*aliases") as caught:
            MessageTypes([Line]).find("Gone", "the attic")
        assert (caught.value.name, caught.value.source) == ("Gone", "the attic")
        assert isinstance(caught.value, SerializationError)

    def test_unknown_class_is_an_error_with_name_and_import_path(self) -> None:
        with pytest.raises(UnknownMessageTypeError) as caught:
            MessageTypes([]).of(Line("tea", 1))
        assert (caught.value.name, caught.value.source) == ("Line", f"class {__name__}.Line")

    def test_class_without_attrs_is_a_problem_naming_the_fix(self) -> None:
        class Plain:
            pass

        (problem,) = MessageTypes([Line, Plain, Plain]).problems
        assert "Plain is no attrs class" in problem
        assert "@attrs.frozen" in problem

    @pytest.mark.parametrize(
        ("one", "other", "shared"),
        [
            (message_type("line"), message_type("line"), "line"),
            (message_type("line"), message_type("row", aliases=["line"]), "line"),
            (message_type("line", aliases=["old"]), message_type("row", aliases=["old"]), "old"),
            (message_type("Twin"), lambda cls: cls, "Twin"),
        ],
    )
    def test_shared_name_is_a_problem_naming_both_classes(
        self, one: Callable[[type], type], other: Callable[[type], type], shared: str
    ) -> None:
        classes = [one(frozen(type("First", (), {}))), other(frozen(type("Twin", (), {})))]
        (problem,) = MessageTypes(classes).problems
        assert repr(shared) in problem
        assert f"{__name__}.First" in problem
        assert f"{__name__}.Twin" in problem
        assert "@message_type" in problem


INTEGERS = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([-(2**63), 2**63 - 1, 2**63, 2**64 - 1])
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [-0.0, 5e-324, 1.7976931348623157e308, 1e22]
)
TEXTS = st.text() | st.sampled_from(["\0", NFC, NFD, "null", "NaN", "\u2028", "\uffff", "\N{ROCKET}", '"\\/'])
ZONES = st.none() | st.just(UTC) | st.integers(-1439, 1439).map(lambda each: timezone(timedelta(minutes=each)))
LINES = st.builds(Line, TEXTS, INTEGERS)
BODIES = st.builds(
    Everything,
    text=TEXTS,
    number=INTEGERS,
    ratio=FLOATS,
    flag=st.booleans(),
    moment=st.datetimes(timezones=ZONES),
    data=st.binary(),
    nothing=st.none() | INTEGERS,
    line=LINES,
    maybe_line=st.none() | LINES,
    lines=st.lists(LINES, max_size=3),
    by_name=st.dictionaries(TEXTS, LINES, max_size=3),
    ratios=st.lists(FLOATS, max_size=3).map(tuple),
)
TREES = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)
LOST_NUMBERS = st.sampled_from([math.nan, math.inf, -math.inf])
LARGE_INTEGERS = st.integers(min_value=2**64) | st.integers(max_value=-(2**63) - 1) | st.just(10**30)
BROKEN_TEXTS = st.tuples(st.text(), st.sampled_from("\ud800\udbff\udc00\udfff"), st.text()).map("".join)
WRAPPERS: list[Callable[[Any], Any]] = [
    lambda inner: [inner],
    lambda inner: (None, inner),
    lambda inner: {"null": None, "in": inner},
    lambda inner: Anything(inner),
    lambda inner: Line("tea", inner),
]


class TestRoundTrip:
    @DETERMINISTIC
    @given(BODIES)
    def test_typed_body_comes_back_unchanged(self, body: Everything) -> None:
        loaded = there_and_back(body)
        assert loaded == body
        assert loaded.moment.isoformat() == body.moment.isoformat()
        assert repr((loaded.ratio, loaded.ratios, loaded.flag)) == repr((body.ratio, body.ratios, body.flag))

    @DETERMINISTIC
    @given(TREES)
    def test_untyped_json_value_comes_back_unchanged(self, value: object) -> None:
        assert repr(there_and_back(Anything(value)).value) == repr(value)

    @DETERMINISTIC
    @given(TREES, TREES)
    def test_distinct_values_stay_distinct(self, one: object, other: object) -> None:
        assume(repr(one) != repr(other))
        writes = serializer()
        assert writes.dump_stream(stream(Anything(one), id="s")) != writes.dump_stream(stream(Anything(other), id="s"))

    @DETERMINISTIC
    @given(BODIES, BODIES)
    def test_distinct_bodies_stay_distinct(self, one: Everything, other: Everything) -> None:
        assume(one != other)
        writes = serializer()
        assert writes.dump_stream(stream(one, id="s")) != writes.dump_stream(stream(other, id="s"))

    @DETERMINISTIC
    @given(
        version=st.integers(1, 2**63 - 1),
        headers=st.dictionaries(TEXTS, TEXTS, max_size=3),
        created_at=st.datetimes(timezones=st.just(UTC)),
        events=st.lists(LINES | BODIES, min_size=1, max_size=3),
        tenant=st.sampled_from(LEGAL_IDS),
        ids=st.tuples(*[st.sampled_from(LEGAL_IDS)] * 4),
    )
    def test_stream_comes_back_unchanged(
        self,
        version: int,
        headers: dict[str, str],
        created_at: datetime,
        events: list[object],
        tenant: str,
        ids: tuple[str, str, str, str],
    ) -> None:
        written = stream(
            version=version,
            headers=headers,
            created_at=created_at,
            events=events,
            aggregate_id=AggregateId("shop", "order", ids[0], tenant),
            id=ids[1],
            command_id=ids[2],
            request_id=ids[3],
        )
        writes = serializer()
        loaded = writes.load_stream(writes.dump_stream(written), "here")
        assert loaded == written
        assert loaded.aggregate_id.tenant == tenant
        assert loaded.created_at.isoformat() == created_at.isoformat()

    def test_writing_changes_neither_body_nor_headers(self) -> None:
        body = Anything({"list": [1, {"deep": None}]})
        before = copy.deepcopy(body)
        written = stream(body, headers={"user": "ann"})
        serializer().copy(body)
        serializer().dump_stream(written)
        assert body == before
        assert written.headers == {"user": "ann"}

    def test_own_converter_adds_types(self) -> None:
        @frozen
        class Wave:
            phase: complex

        converter = make_converter()
        converter.register_unstructure_hook(complex, str)
        converter.register_structure_hook(complex, lambda text, _: complex(text))
        writes = Serializer(MessageTypes([Wave]), converter=converter)
        body = Wave(1 + 2j)
        assert writes.load_stream(writes.dump_stream(stream(body)), "here").events == (body,)
        with pytest.raises(SerializationError):
            Serializer(MessageTypes([Wave])).copy(body)


class TestRefused:
    def refuses(self, body: object) -> None:
        writes = serializer()
        with pytest.raises(SerializationError):
            writes.copy(body)
        with pytest.raises(SerializationError):
            writes.dump_stream(stream(Line("tea", 1), body))

    @DETERMINISTIC
    @given(LOST_NUMBERS | LARGE_INTEGERS | BROKEN_TEXTS, st.lists(st.sampled_from(WRAPPERS), max_size=6))
    def test_value_that_json_cannot_hold_is_refused_at_any_depth(
        self, value: object, wrappers: list[Callable[[Any], Any]]
    ) -> None:
        for wrap in wrappers:
            value = wrap(value)
        self.refuses(Anything(value))

    @DETERMINISTIC
    @given(BODIES, LOST_NUMBERS)
    def test_lost_number_in_a_typed_field_is_refused(self, body: Everything, lost: float) -> None:
        self.refuses(attrs.evolve(body, ratio=lost))
        self.refuses(attrs.evolve(body, ratios=(*body.ratios, lost)))

    @DETERMINISTIC
    @given(BODIES, LARGE_INTEGERS)
    def test_large_integer_in_a_typed_field_is_refused(self, body: Everything, large: int) -> None:
        self.refuses(attrs.evolve(body, number=large))
        self.refuses(attrs.evolve(body, lines=[Line("tea", large)]))

    @DETERMINISTIC
    @given(BODIES, BROKEN_TEXTS)
    def test_lone_surrogate_in_a_typed_field_is_refused(self, body: Everything, broken: str) -> None:
        self.refuses(attrs.evolve(body, text=broken))
        self.refuses(attrs.evolve(body, by_name={broken: Line("tea", 1)}))

    @pytest.mark.parametrize(
        ("name", "value"), [("a", "\ud800"), ("\ud800", "a"), ("a", math.nan), (1, "a")], ids=ascii
    )
    def test_header_that_went_bad_is_refused(self, name: Any, value: Any) -> None:
        written = stream(Line("tea", 1))
        written.headers[name] = value
        with pytest.raises(SerializationError):
            serializer().dump_stream(written)

    @pytest.mark.parametrize("version", [2**63, 1.5, True, "1"])
    def test_version_that_no_store_could_hold_is_refused(self, version: Any) -> None:
        with pytest.raises(ValueError, match=r"must be an int from 1 to 2\*\*63-1"):
            stream(Line("tea", 1), version=version)

    @pytest.mark.parametrize(
        ("body", "shown"), [(Anything(math.nan), "nan"), (Anything([-math.inf]), "-inf"), (Line("x", 2**64), "64-bit")]
    )
    def test_error_names_what_was_refused(self, body: object, shown: str) -> None:
        with pytest.raises(SerializationError) as caught:
            serializer().copy(body)
        assert shown in str(caught.value)
        assert type(body).__name__ in str(caught.value)

    @pytest.mark.parametrize("value", [None, [None, 1.5], {"null": None}, "null"], ids=repr)
    def test_null_is_no_lost_number(self, value: object) -> None:
        assert there_and_back(Anything(value)) == Anything(value)

    def test_unregistered_class_is_refused_with_its_name(self) -> None:
        writes = serializer(Line)
        for refused in (lambda: writes.copy(Anything(1)), lambda: writes.dump_stream(stream(Anything(1)))):
            with pytest.raises(UnknownMessageTypeError) as caught:
                refused()
            assert (caught.value.name, caught.value.source) == ("Anything", f"class {__name__}.Anything")

    def test_nesting_too_deep_is_refused(self) -> None:
        deep: list[Any] = []
        for _ in range(5000):
            deep = [deep]
        self.refuses(Anything(deep))

    def test_value_that_holds_itself_is_refused(self) -> None:
        endless: list[Any] = []
        endless.append(endless)
        self.refuses(Anything(endless))


class Colour(Enum):
    RED = "red"


class TestNothingIsChanged:
    """What is not refused comes back as it was: a value may be refused or kept, but never changed or lost."""

    @staticmethod
    def is_refused_or_kept(body: Any) -> None:
        writes = serializer(type(body))
        try:
            writes.copy(body)
        except SerializationError:
            return
        loaded: Any = writes.load_stream(writes.dump_stream(stream(body)), "here").events[0]
        assert loaded == body
        assert type(attrs.astuple(loaded, recurse=False)[0]) is type(attrs.astuple(body, recurse=False)[0])

    @pytest.mark.parametrize(
        "value",
        [
            b"abc",
            datetime(2024, 2, 29, tzinfo=UTC),
            {1, 2},
            (1, 2),
            {1: "a"},
            {1: "a", "1": "b"},
            {None: 1},
            UUID(int=1),
            Colour.RED,
            Line("tea", 1),
        ],
        ids=repr,
    )
    def test_in_an_untyped_field(self, value: object) -> None:
        self.is_refused_or_kept(Anything(value))

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            (UUID, UUID(int=1)),
            (time, time(12, 30)),
            (Decimal, Decimal("1.10")),
            (timedelta, timedelta(microseconds=1)),
            (Colour, Colour.RED),
            (dict[Colour, int], {Colour.RED: 1}),
            (dict[int, str], {2**70: "a"}),
            (float, 2**53 + 1),
        ],
        ids=str,
    )
    def test_in_a_typed_field(self, kind: Any, value: object) -> None:
        self.is_refused_or_kept(attrs.make_class("Typed", {"value": attrs.field(type=kind)}, frozen=True)(value))

    @pytest.mark.parametrize(
        ("kind", "value"),
        [(int, None), (int, "x"), (int, 1.5), (str, 1), (bytes, None), (datetime, "x"), (set[str], 3), (Line, None)],
        ids=str,
    )
    def test_in_a_field_of_another_type(self, kind: Any, value: object) -> None:
        self.is_refused_or_kept(attrs.make_class("Mistyped", {"value": attrs.field(type=kind)}, frozen=True)(value))

    def test_offset_with_seconds(self) -> None:
        self.is_refused_or_kept(Moment(datetime(1850, 1, 1, tzinfo=timezone(timedelta(minutes=20, seconds=28)))))

    def test_subclass_in_a_field_of_its_base(self) -> None:
        @frozen
        class LongLine(Line):
            note: str

        body = attrs.make_class("Typed", {"value": attrs.field(type=Line)}, frozen=True)(LongLine("tea", 1, "hot"))
        self.is_refused_or_kept(body)


class TestStoredForm:
    def test_holds_name_and_revision_and_body(self) -> None:
        cls = message_type("shop.moved", revision=4)(attrs.make_class("Moved", {"to": attrs.field(type=str)}))
        written = json.loads(serializer(cls, Line).dump_stream(stream(Line("tea", 1), cls("attic"), version=3)))
        assert written["format"] == 1
        assert written["version"] == 3
        assert written["events"] == [
            {"name": "Line", "revision": 1, "body": {"name": "tea", "amount": 1}},
            {"name": "shop.moved", "revision": 4, "body": {"to": "attic"}},
        ]

    def test_fs17_holds_no_import_path(self) -> None:
        data = serializer().dump_stream(stream(Line("tea", 1), Moment(datetime(2024, 1, 1))))
        assert __name__.encode() not in data
        assert b"trio_wow" not in data

    def test_fs17_class_may_move_to_another_module(self) -> None:
        def in_module(module: str) -> type:
            cls = attrs.make_class("OrderPlaced", {"total": attrs.field(type=int)})
            cls.__module__ = module
            return cls

        before, after = in_module("shop.events"), in_module("shop.history.events")
        data = serializer(before).dump_stream(stream(before(5)))
        assert serializer(after).load_stream(data, "here").events == (after(5),)

    def test_fs17_renamed_class_loads_by_its_alias(self) -> None:
        data = serializer(OrderPlaced).dump_stream(stream(OrderPlaced(5)))
        assert serializer(OrderOpened).load_stream(data, "here").events == (OrderOpened(5),)

    def test_fs17_renamed_class_is_written_by_its_new_name(self) -> None:
        data = serializer(OrderOpened).dump_stream(stream(OrderOpened(5)))
        assert json.loads(data)["events"][0]["name"] == "OrderOpened"

    def test_fs17_deleted_class_is_an_error_with_name_and_source(self) -> None:
        data = serializer(OrderPlaced, Line).dump_stream(stream(Line("tea", 1), OrderPlaced(5)))
        with pytest.raises(UnknownMessageTypeError) as caught:
            serializer(Line).load_stream(data, "version 3 of A")
        assert (caught.value.name, caught.value.source) == ("OrderPlaced", "version 3 of A")


@frozen
class OrderPlaced:
    total: int


@message_type("OrderOpened", aliases=["OrderPlaced"])
@frozen
class OrderOpened:
    total: int


@message_type("Order", revision=3, aliases=["OldOrder"])
@frozen
class Order:
    cents: int
    currency: str


@message_type("Order")
@frozen
class OrderV1:
    total: int


@define
class Upgrade:
    name: str
    revision: int
    change: Callable[[dict[str, Any]], dict[str, Any]] = field(default=dict)

    def upgrade(self, body: dict[str, Any], /) -> dict[str, Any]:
        return self.change(body)


TO_2 = Upgrade("Order", 1, lambda body: {"cents": body["total"] * 100})
TO_3 = Upgrade("Order", 2, lambda body: {**body, "currency": "EUR"})


def stored(name: str, revision: object, body: object) -> bytes:
    form = json.loads(serializer(Line).dump_stream(stream(Line("tea", 1))))
    return json.dumps({**form, "events": [{"name": name, "revision": revision, "body": body}]}).encode()


class TestUpgraders:
    def test_each_revision_is_left_behind_in_turn(self) -> None:
        data = serializer(OrderV1).dump_stream(stream(OrderV1(5)))
        assert serializer(Order, upgraders=[TO_3, TO_2]).load_stream(data, "here").events == (Order(500, "EUR"),)

    def test_only_those_that_are_needed_run(self) -> None:
        reads = serializer(Order, upgraders=[TO_2, TO_3])
        assert reads.load_stream(stored("Order", 2, {"cents": 7}), "here").events == (Order(7, "EUR"),)
        present = reads.dump_stream(stream(Order(1, "USD")))
        assert reads.load_stream(present, "here").events == (Order(1, "USD"),)

    def test_upgraders_run_for_an_alias(self) -> None:
        reads = serializer(Order, upgraders=[TO_2, TO_3])
        assert reads.load_stream(stored("OldOrder", 1, {"total": 5}), "here").events == (Order(500, "EUR"),)

    def test_missing_one_is_an_error_naming_source_revision_and_name(self) -> None:
        for upgraders, revision in (([TO_3], 1), ([TO_2], 2), ([], 1)):
            with pytest.raises(SerializationError, match=f"the attic holds revision {revision} of 'Order'"):
                serializer(Order, upgraders=upgraders).load_stream(stored("Order", 1, {"total": 5}), "the attic")

    @pytest.mark.parametrize("revision", [0, -1])
    def test_revision_before_the_first_is_an_error(self, revision: int) -> None:
        with pytest.raises(SerializationError, match=f"revision {revision} of 'Order'"):
            serializer(Order, upgraders=[TO_2, TO_3]).load_stream(stored("Order", revision, {"total": 5}), "here")

    def test_newer_revision_is_an_error_naming_both_revisions(self) -> None:
        data = stored("Order", 4, {"cents": 5, "currency": "EUR"})
        with pytest.raises(SerializationError, match="the attic holds revision 4 of 'Order', newer than 3"):
            serializer(Order, upgraders=[TO_2, TO_3]).load_stream(data, "the attic")

    def test_two_for_one_revision_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="two upgraders read revision 1 of 'Order'") as caught:
            serializer(Order, upgraders=[TO_2, TO_3, Upgrade("Order", 1)])
        assert len(caught.value.problems) == 1

    def test_result_that_does_not_fit_is_an_error(self) -> None:
        reads = serializer(Order, upgraders=[TO_2, Upgrade("Order", 2)])
        with pytest.raises(SerializationError, match="the attic holds a 'Order' that does not fit Order"):
            reads.load_stream(stored("Order", 1, {"total": 5}), "the attic")

    @pytest.mark.parametrize("body", [{}, [], "total", None, 5], ids=repr)
    @pytest.mark.parametrize(
        "change",
        [lambda body: {"cents": body["total"]}, lambda body: {"cents": body.pop("total")}, lambda body: body.popitem()],
        ids=["item", "pop", "popitem"],
    )
    def test_one_that_fails_on_a_broken_body_is_an_error_with_its_cause(
        self, change: Callable[[Any], Any], body: object
    ) -> None:
        reads = serializer(Order, upgraders=[Upgrade("Order", 1, change), TO_3])
        with pytest.raises(SerializationError, match="the attic") as caught:
            reads.load_stream(stored("Order", 1, body), "the attic")
        assert caught.value.__cause__ is not None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FORM = json.loads(serializer(Line).dump_stream(stream(Line("tea", 1))))


class TestBrokenForm:
    @pytest.mark.parametrize(
        "data",
        [b"", b" ", b"null", b"5", b'"text"', b"[]", b"{}", b"\xff", b"\0", b"NaN", b'{"format": 1}', b"not json"],
        ids=repr,
    )
    def test_foreign_data_is_an_error_with_its_source(self, data: bytes) -> None:
        with pytest.raises(SerializationError, match="the attic"):
            serializer().load_stream(data, "the attic")

    def test_every_truncation_is_an_error(self) -> None:
        data = serializer().dump_stream(stream(Line("tea", 1), headers={"a": "b"}))
        for end in range(len(data)):
            with pytest.raises(SerializationError, match="the attic"):
                serializer().load_stream(data[:end], "the attic")

    @pytest.mark.parametrize("name", sorted(FORM))
    def test_every_missing_field_is_an_error(self, name: str) -> None:
        form = {key: value for key, value in FORM.items() if key != name}
        with pytest.raises(SerializationError, match="the attic"):
            serializer().load_stream(json.dumps(form).encode(), "the attic")

    @pytest.mark.parametrize("name", ["name", "revision", "body"])
    def test_every_missing_field_of_an_event_is_an_error(self, name: str) -> None:
        event = {key: value for key, value in FORM["events"][0].items() if key != name}
        with pytest.raises(SerializationError, match="the attic"):
            serializer().load_stream(json.dumps({**FORM, "events": [event]}).encode(), "the attic")

    @pytest.mark.parametrize("form", [2, 0, "1", None, [1]], ids=repr)
    def test_other_format_is_an_error_naming_both_formats(self, form: object) -> None:
        data = json.dumps({**FORM, "format": form}).encode()
        with pytest.raises(SerializationError) as caught:
            serializer().load_stream(data, "the attic")
        assert str(caught.value) == f"the attic has format {form!r}; this version reads 1"

    @pytest.mark.parametrize(
        "changed",
        [
            {"version": 0},
            {"version": "1"},
            {"version": None},
            {"version": 1.5},
            {"events": []},
            {"events": {}},
            {"events": "Line"},
            {"events": [5]},
            {"events": None},
            {"id": ""},
            {"command_id": 5},
            {"request_id": None},
            {"context": "a.b"},
            {"context": 5},
            {"aggregate": []},
            {"aggregate_id": "\0"},
            {"tenant": " "},
            {"headers": "ab"},
            {"headers": None},
            {"headers": {"a": 1}},
            {"headers": [["a", "b"]]},
            {"created_at": "yesterday"},
            {"created_at": 5},
        ],
        ids=repr,
    )
    def test_field_that_does_not_fit_is_an_error(self, changed: dict[str, object]) -> None:
        with pytest.raises(SerializationError, match="the attic"):
            serializer().load_stream(json.dumps({**FORM, **changed}).encode(), "the attic")

    @pytest.mark.parametrize(
        "body", [None, 5, [], "tea", {}, {"name": "tea"}, {"name": "tea", "amount": "x"}], ids=repr
    )
    def test_body_that_does_not_fit_is_an_error_with_its_cause(self, body: object) -> None:
        with pytest.raises(SerializationError, match="the attic holds a 'Line' that does not fit Line") as caught:
            serializer().load_stream(stored("Line", 1, body), "the attic")
        assert caught.value.__cause__ is not None

    @pytest.mark.parametrize("revision", ["1", None, [1]], ids=repr)
    def test_revision_that_is_no_number_is_an_error(self, revision: object) -> None:
        with pytest.raises(SerializationError, match="the attic"):
            serializer().load_stream(stored("Line", revision, {"name": "tea", "amount": 1}), "the attic")

    @DETERMINISTIC
    @given(st.sampled_from(sorted(FORM)), JSON)
    def test_any_change_of_a_field_is_read_or_an_error_of_ours(self, name: str, value: object) -> None:
        try:
            loaded = serializer().load_stream(json.dumps({**FORM, name: value}).encode(), "here")
        except SerializationError:
            return
        assert isinstance(loaded, DomainEventStream)

    @DETERMINISTIC
    @given(st.sampled_from(["name", "revision", "body"]), JSON)
    def test_any_change_of_an_event_is_read_or_an_error_of_ours(self, name: str, value: object) -> None:
        event = {**FORM["events"][0], name: value}
        try:
            loaded = serializer().load_stream(json.dumps({**FORM, "events": [event]}).encode(), "here")
        except SerializationError:
            return
        assert isinstance(loaded.events[0], Line)

    @DETERMINISTIC
    @given(st.binary(max_size=100))
    def test_any_bytes_are_an_error_of_ours(self, data: bytes) -> None:
        with pytest.raises(SerializationError):
            serializer().load_stream(data, "here")


class Shade(StrEnum):
    RED = "red"


@frozen(cache_hash=True)
class Tag:
    name: str
    weight: float = field(default=0.0, eq=False)
    seen: int = field(init=False, default=0, eq=False)

    @cached_property
    def heading(self) -> str:
        return self.name.upper()


@dataclass
class Place:
    name: str
    visits: int = dataclass_field(default=0, init=False, compare=False)


class Slotted:
    __slots__ = ("hidden",)
    hidden: int


@define(slots=False)
class Board(Slotted):
    id: str = "b"
    name: str = ""
    ratio: float = 0
    loose: int = field(default=0, eq=False)
    index: dict[str, int] = field(init=False, eq=False)
    last: deque[int] = field(factory=deque)
    tags: set[Tag] = field(factory=set)
    by_name: dict[str, Tag] = field(factory=dict)
    places: list[Place] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.index = {tag.name: 1 for tag in self.tags}

    @cached_property
    def names(self) -> list[str]:
        return sorted(self.by_name)


def visited() -> Place:
    place = Place("here")
    place.visits = 1
    return place


def seen(tag: Tag) -> Tag:
    object.__setattr__(tag, "seen", 1)
    return tag


class TestStates:
    """What a state holds comes back whole, or is refused; `==` does not see all of it."""

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda board: setattr(board, "plain", 5), "plain=5 comes back as NOTHING; only what __init__ takes"),
            (lambda board: setattr(board, "hidden", 5), "hidden=5 comes back as NOTHING"),
            (lambda board: board.index.update(x=1), r"len\(index\)=1 comes back as 0"),
            (lambda board: setattr(board, "loose", 1.5), "loose=1.5 comes back as 1"),
            (lambda board: setattr(board, "name", Shade.RED), "name=<Shade.RED: 'red'> comes back as 'red'"),
            (lambda board: setattr(board, "by_name", defaultdict(list)), "by_name=defaultdict.* comes back as {}"),
            (lambda board: setattr(board, "last", deque([1], 5)), r"last\.maxlen=5 comes back as None"),
            (lambda board: board.places.append(visited()), r"places\[0\]\.visits=1 comes back as 0"),
            (lambda board: board.tags.add(seen(Tag("a"))), r"tags\[0\]\.seen=1 comes back as 0"),
            (lambda board: board.by_name.update(a=seen(Tag("a"))), r"by_name\['a'\]\.seen=1 comes back as 0"),
            (
                lambda board: board.by_name.update({Shade.RED: Tag("a")}),
                r"by_name\[0\]=<Shade.RED: 'red'> comes back",
            ),
            (lambda board: (board.names, board.by_name.update(a=Tag("a"))), r"len\(names\)=0 comes back as 1"),
        ],
    )
    def test_what_would_be_lost_is_refused_and_named(self, change: Callable[[Board], object], text: str) -> None:
        board = Board()
        change(board)
        with pytest.raises(SerializationError, match=f"Board does not come back from JSON as it was: {text}"):
            serializer().dump_state(board)

    def test_what_comes_back_whole_is_kept(self) -> None:
        tag = Tag("a", 3)
        board = Board("x", "y", 2, 3, deque([1, 2]), {tag, Tag("b")}, {"b": tag, "a": tag}, [Place("here")])
        assert (hash(tag), tag.heading, board.names) == (hash(Tag("a")), "A", ["a", "b"])
        back = serializer().load_state(serializer().dump_state(board), Board, "it")
        assert (back, back.index, back.loose) == (board, {"a": 1, "b": 1}, 3)

    def test_one_that_holds_itself_is_refused(self) -> None:
        @define
        class Ring:
            next: Any = field(init=False, eq=False)

            def __attrs_post_init__(self) -> None:
                self.next = self

        with pytest.raises(SerializationError, match="Ring cannot be kept as JSON: maximum recursion depth"):
            serializer().dump_state(Ring())


class TestExplanations:
    @pytest.mark.parametrize(
        ("body", "text"),
        [
            (
                Line("tea", 2**64),
                r"Line cannot be kept as JSON: amount=18446744073709551616: Integer exceeds 64-bit range",
            ),
            (Line("\ud800", 1), r"name='\\ud800': str is not valid UTF-8"),
            (Anything(timedelta(1)), r"value=datetime.timedelta\(days=1\): .* with hooks for timedelta"),
            (Anything(math.nan), r"Anything does not come back from JSON as it was: value=nan comes back as None"),
        ],
    )
    def test_an_error_names_the_field_the_value_and_the_way_out(self, body: object, text: str) -> None:
        with pytest.raises(SerializationError, match=text):
            serializer().copy(body)

    def test_a_stored_body_that_does_not_fit_is_told_field_by_field(self) -> None:
        data = serializer().dump_stream(stream(Line("tea", 1))).replace(b'"amount":1', b'"amount":"x"')
        with pytest.raises(SerializationError, match=r"does not fit Line: invalid value for type.* @ .*amount"):
            serializer().load_stream(data, "here")

    def test_an_upgrader_for_an_unknown_name_is_refused(self) -> None:
        class Upgrader:
            name = "Lime"
            revision = 1

            def upgrade(self, body: dict[str, Any], /) -> dict[str, Any]:
                return body

        with pytest.raises(ConfigurationError, match="an upgrader reads 'Lime', which is no registered name"):
            Serializer(MessageTypes([Line]), upgraders=[Upgrader()])

    def test_hooks_of_ones_own_join_those_of_the_library(self) -> None:
        converter = make_converter()
        converter.register_unstructure_hook(timedelta, lambda value: value.total_seconds())
        converter.register_structure_hook(timedelta, lambda value, _: timedelta(seconds=value))

        @frozen
        class Long:
            duration: timedelta
            price: Decimal

        body = Long(timedelta(days=1), Decimal("0.10"))
        assert Serializer(MessageTypes([Long]), converter=converter).copy(body) == body
