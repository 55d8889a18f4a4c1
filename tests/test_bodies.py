"""Bodies that somebody else has written: read strictly, so that nothing in them is dropped."""

from typing import Any

import orjson
import pytest
from attrs import define, field, frozen

from trio_wow import aggregate, on_command
from trio_wow.domain import Domain
from trio_wow.errors import SerializationError, UnknownMessageTypeError


@frozen
class Line:
    count: int
    note: str = ""


@frozen
class Order:
    id: str
    lines: list[Line]
    sizes: list[int] = field(factory=list)
    rest: dict[str, Any] = field(factory=dict)


@aggregate(context="shop")
@define
class Cart:
    id: str

    @on_command
    def order(self, command: Order) -> None: ...


SERIALIZER = Domain([Cart]).serializer


def test_what_is_written_is_read() -> None:
    order = Order("a", [Line(1), Line(2, "x")], [1, 2], {"a": [1.5, {"b": None}]})
    form = orjson.loads(SERIALIZER.dump_body(order))
    assert (form["name"], form["revision"]) == ("Order", 1)
    assert SERIALIZER.load_body(form, "the test") == order


def test_what_has_a_default_may_be_left_out_and_so_may_the_revision() -> None:
    form = {"name": "Order", "body": {"id": "a", "lines": [{"count": 1}]}}
    assert SERIALIZER.load_body(form, "the test") == Order("a", [Line(1)])


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"id": "a", "lines": [], "more": 1}, "there is no body.more"),
        ({"id": "a", "lines": [{"count": 1, "more": 1}]}, r"there is no body.lines\[0\].more"),
        ({"id": "a", "lines": [{"count": 1.5}]}, r"body.lines\[0\].count=1.5 is read as 1"),
        ({"id": "a", "lines": [], "sizes": [1, 2.5]}, r"body.sizes\[1\]=2.5"),
        ({"id": "a"}, "lines"),
    ],
)
def test_what_would_be_lost_is_refused(body: dict[str, Any], where: str) -> None:
    with pytest.raises(SerializationError, match=where):
        SERIALIZER.load_body({"name": "Order", "body": body}, "the test")


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ({"body": {}}, "name of the test"),
        ({"name": "Order", "body": []}, "body of the test"),
        ({"name": "Order", "body": {}, "revision": 0}, "revision of the test"),
        ({"name": "Order", "body": {}, "revision": "1"}, "revision of the test"),
    ],
)
def test_what_is_no_body_is_refused(form: dict[str, Any], what: str) -> None:
    with pytest.raises(SerializationError, match=what):
        SERIALIZER.load_body(form, "the test")


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(UnknownMessageTypeError, match="'Nothing' \\(the test\\)"):
        SERIALIZER.load_body({"name": "Nothing", "body": {}}, "the test")
