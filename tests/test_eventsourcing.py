"""The laws of event stores, shown by the memory store, and of rebuilding aggregates."""

import math
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from attrs import define, evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_wow.domain import Domain, aggregate, aggregate_model, on_command, on_sourcing
from trio_wow.errors import (
    AggregateNotReadableError,
    DuplicateRequestIdError,
    SerializationError,
    TenantMismatchError,
    UnknownMessageTypeError,
    UnsourcedEventError,
    VersionConflictError,
)
from trio_wow.eventsourcing import AggregateRepository, EventStore, InMemoryEventStore, RecordedStream
from trio_wow.messages import (
    AggregateId,
    CommandMessage,
    DomainEventStream,
    MessageTypes,
    Serializer,
    message_type,
)

DETERMINISTIC = settings(derandomize=True, deadline=None)


@frozen
class Place:
    id: str


@define
class Placed:
    value: Any


@frozen
class Paid:
    amount: int


@frozen
class Stranger:
    pass


@aggregate(context="shop")
@define
class Order:
    id: str
    values: list[Any] = attrs.field(factory=list)
    paid: int = 0

    @on_command
    def place(self, command: Place) -> Placed:
        return Placed(command.id)

    @on_sourcing
    def placed(self, event: Placed) -> None:
        self.values.append(event.value)

    @on_sourcing
    def was_paid(self, event: Paid) -> None:
        if event.amount < 0:
            raise ZeroDivisionError("negative")
        self.paid += event.amount


@frozen
class Fill:
    id: str


@aggregate(context="shop")
@define
class Cart:
    id: str

    @on_command
    def fill(self, command: Fill) -> None: ...

    @on_sourcing
    def was_paid(self, event: Paid) -> None: ...


A, B, CART = (AggregateId("shop", *names) for names in (("order", "A"), ("order", "B"), ("cart", "A")))


def stream(aggregate_id: AggregateId, version: int, *events: object, **changes: Any) -> DomainEventStream:
    return DomainEventStream(
        **{
            "aggregate_id": aggregate_id,
            "version": version,
            "events": events or (Placed(version), Paid(version)),
            "command_id": f"command {version}",
            "request_id": f"request {version}",
            **changes,
        }
    )


@pytest.fixture
def domain() -> Domain:
    return Domain([Order, Cart])


@pytest.fixture
def store(domain: Domain) -> EventStore:
    return InMemoryEventStore(domain.serializer)


async def read_from(store: EventStore, after: int) -> list[DomainEventStream]:
    return [each.stream for each in await store.read_all(after, 1000)]


async def everything(store: EventStore) -> list[DomainEventStream]:
    return [each.stream for each in await store.read_all(0, 1000)]


class TestAppend:
    async def test_stream_is_stored_whole_and_unchanged(self, store: EventStore) -> None:
        first = stream(evolve(A, tenant="acme"), 1, headers={"user": "ann"})
        await store.append(first)
        (loaded,) = await store.load(A)
        assert loaded == first
        assert loaded.aggregate_id.tenant == "acme"

    async def test_versions_follow_without_a_gap(self, store: EventStore) -> None:
        streams = [stream(A, version) for version in range(1, 6)]
        for each in streams:
            await store.append(each)
        assert await store.load(A) == streams

    @pytest.mark.parametrize(
        ("present", "version"), [(0, 2), (0, 7), (1, 1), (3, 1), (3, 3), (3, 5), (3, 100)], ids=lambda each: str(each)
    )
    async def test_version_that_is_not_the_next_is_a_conflict(
        self, store: EventStore, present: int, version: int
    ) -> None:
        for each in range(1, present + 1):
            await store.append(stream(A, each))
        before = await everything(store)
        with pytest.raises(VersionConflictError) as caught:
            await store.append(stream(A, version, request_id="new"))
        assert (caught.value.aggregate_id, caught.value.expected, caught.value.actual) == (A, version - 1, present)
        assert await everything(store) == before
        assert await store.load_request(A, "new") is None
        await store.append(stream(A, present + 1, request_id="new"))

    @pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 9])
    @pytest.mark.parametrize("old", [1, 2, 3])
    async def test_fs15_stored_request_is_a_duplicate_whatever_its_version(
        self, store: EventStore, old: int, version: int
    ) -> None:
        for each in range(1, 4):
            await store.append(stream(A, each))
        before = await everything(store)
        with pytest.raises(DuplicateRequestIdError) as caught:
            await store.append(stream(A, version, Placed("other"), request_id=f"request {old}"))
        assert (caught.value.aggregate_id, caught.value.request_id, caught.value.version) == (A, f"request {old}", old)
        assert await everything(store) == before

    async def test_fs15_request_is_remembered_for_one_aggregate(self, store: EventStore) -> None:
        for each in (A, B, CART):
            await store.append(stream(each, 1, Paid(1), request_id="r1"))
        with pytest.raises(DuplicateRequestIdError) as caught:
            await store.append(stream(A, 2, Paid(1), request_id="r1"))
        assert (caught.value.aggregate_id, caught.value.version) == (A, 1)

    async def test_requests_are_compared_exactly(self, store: EventStore) -> None:
        requests = ["r", "R", " r", "r ", "é", "e\u0301", "1", "01"]
        for version, request_id in enumerate(requests, 1):
            await store.append(stream(A, version, request_id=request_id))
        assert [each.request_id for each in await store.load(A)] == requests

    async def test_request_is_remembered_whatever_the_tenant(self, store: EventStore) -> None:
        await store.append(stream(A, 1))
        with pytest.raises(DuplicateRequestIdError):
            await store.append(stream(evolve(A, tenant="acme"), 1))

    async def test_of_two_writers_of_one_version_one_wins(self, store: EventStore) -> None:
        outcomes: list[object] = []

        async def write(request_id: str) -> None:
            try:
                await store.append(stream(A, 1, request_id=request_id))
            except VersionConflictError as error:
                outcomes.append((error.expected, error.actual))
            else:
                outcomes.append("stored")

        async with trio.open_nursery() as nursery:
            for n in range(10):
                nursery.start_soon(write, f"r{n}")
        assert sorted(map(str, outcomes)) == ["(0, 1)"] * 9 + ["stored"]
        assert len(await everything(store)) == 1

    async def test_of_two_writers_of_one_request_one_wins(self, store: EventStore) -> None:
        versions: list[int] = []

        async def write() -> None:
            try:
                await store.append(stream(A, 1, request_id="r"))
            except DuplicateRequestIdError as error:
                versions.append(error.version)

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(write)
        assert versions == [1] * 9
        assert len(await everything(store)) == 1

    @pytest.mark.parametrize(
        "refused",
        [
            stream(A, 1, Placed(1), Placed(math.nan)),
            stream(A, 1, Placed(1), Placed([math.inf])),
            stream(A, 1, Placed(1), Placed(2**64)),
            stream(A, 1, Placed(1), Placed("\ud800")),
            stream(A, 1, Placed(1), Placed({1: object})),
            stream(A, 1, Placed(1), Stranger()),
        ],
        ids=["nan", "infinity", "large integer", "lone surrogate", "class", "unregistered class"],
    )
    async def test_what_json_cannot_hold_is_refused_and_nothing_is_stored(
        self, store: EventStore, refused: DomainEventStream
    ) -> None:
        with pytest.raises(SerializationError):
            await store.append(refused)
        assert await everything(store) == []
        assert await store.load(A) == []
        assert await store.load_request(A, refused.request_id) is None
        await store.append(stream(A, 1))
        with pytest.raises(SerializationError):
            await store.append(evolve(refused, version=2, request_id="second"))
        assert await everything(store) == [*await store.load(A)]
        await store.append(stream(A, 2))

    @pytest.mark.parametrize("value", ["\ud800", math.nan, object], ids=ascii)
    async def test_header_that_went_bad_is_refused_and_nothing_is_stored(self, store: EventStore, value: Any) -> None:
        refused = stream(A, 1)
        refused.headers["user"] = value
        with pytest.raises(SerializationError):
            await store.append(refused)
        assert await everything(store) == []
        await store.append(stream(A, 1))


@types.coroutine
def cancelled_at(call: Coroutine[Any, Any, Any], step: int, scope: trio.CancelScope) -> Generator[Any, Any, Any]:
    """Run an async call, and cancel this scope when the call waits for the nth time."""
    resume: Callable[[], Any] = lambda: call.send(None)  # noqa: E731
    while True:
        try:
            waits_for = resume()
        except StopIteration as stop:
            return stop.value
        if step == 0:
            scope.cancel()
        step -= 1
        try:
            value = yield waits_for
        except BaseException as error:
            resume = lambda error=error: call.throw(error)  # type: ignore[misc]  # noqa: E731
        else:
            resume = lambda value=value: call.send(value)  # type: ignore[misc]  # noqa: E731


class TestCancellation:
    async def test_cancelled_append_has_stored_the_stream_whole_or_not_at_all(self, domain: Domain) -> None:
        outcomes: list[tuple[bool, bool, bool]] = []
        for step in range(100):
            store = InMemoryEventStore(domain.serializer)
            await store.append(stream(A, 1))
            written = stream(A, 2)
            with trio.CancelScope() as scope:
                await cancelled_at(store.append(written), step, scope)
            stored = len(await store.load(A)) == 2
            outcomes.append((scope.cancel_called, scope.cancelled_caught, stored))
            assert (await store.load_request(A, written.request_id) == written) is stored
            assert await everything(store) == list(await store.load(A))
            if stored:
                assert (await store.load(A))[1] == written
                with pytest.raises(DuplicateRequestIdError):
                    await store.append(written)
            else:
                await store.append(written)
            if not scope.cancel_called:
                break
        assert outcomes[0] == (True, True, False), "the first wait could not be cancelled"
        assert outcomes[-1] == (False, False, True)

    async def test_append_in_a_cancelled_scope_stores_nothing(self, store: EventStore) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.append(stream(A, 1))
        assert scope.cancelled_caught
        assert await everything(store) == []
        await store.append(stream(A, 1))

    @pytest.mark.parametrize(
        "call",
        [
            lambda store: store.append(stream(B, 1)),
            lambda store: store.load(A),
            lambda store: store.load(B),
            lambda store: store.load_request(A, "request 1"),
            lambda store: store.load_request(B, "none"),
            lambda store: store.read_all(0, 10),
            lambda store: store.read_all(10, 10),
        ],
        ids=["append", "load", "load none", "load_request", "load_request none", "read_all", "read_all none"],
    )
    async def test_every_call_is_a_checkpoint(self, store: EventStore, call: Callable[[EventStore], Any]) -> None:
        await store.append(stream(A, 1))
        with trio.testing.assert_checkpoints():
            await call(store)
        with trio.CancelScope() as scope:
            scope.cancel()
            await call(store)
        assert scope.cancelled_caught

    async def test_failing_append_is_a_checkpoint(self, store: EventStore) -> None:
        await store.append(stream(A, 1))
        for refused in (stream(A, 1), stream(A, 5, request_id="new"), stream(A, 2, Stranger())):
            with trio.testing.assert_checkpoints():
                try:
                    await store.append(refused)
                except (DuplicateRequestIdError, VersionConflictError, SerializationError):
                    pass
                else:
                    pytest.fail("was stored")


class TestLoad:
    async def test_unknown_aggregate_has_no_streams(self, store: EventStore) -> None:
        await store.append(stream(A, 1))
        assert await store.load(B) == []
        assert await store.load(CART) == []

    @pytest.mark.parametrize(
        ("after", "versions"), [(-1, [1, 2, 3]), (0, [1, 2, 3]), (1, [2, 3]), (3, []), (9, [])], ids=str
    )
    async def test_streams_above_a_version(self, store: EventStore, after: int, versions: list[int]) -> None:
        for version in (1, 2, 3):
            await store.append(stream(A, version))
        assert [each.version for each in await store.load(A, after=after)] == versions

    async def test_aggregates_are_kept_apart(self, store: EventStore) -> None:
        for each in (A, B, CART):
            await store.append(stream(each, 1, Paid(1), id=str(each)))
        for each in (A, B, CART):
            assert [loaded.id for loaded in await store.load(each)] == [str(each)]

    async def test_fs16_ids_are_kept_apart(self, store: EventStore) -> None:
        names = [("t", "a:b"), ("t-a", "b"), ("t", "a/b"), ("t", "A"), ("t", "a"), ("t", "é"), ("t", "e\u0301")]
        ids = [AggregateId("shop", *each) for each in names] + [AggregateId("shop-t", "t", "a")]
        for each in ids:
            await store.append(stream(each, 1))
        for each in ids:
            (loaded,) = await store.load(each)
            assert loaded.aggregate_id == each

    async def test_request_is_found(self, store: EventStore) -> None:
        streams = [stream(A, version) for version in (1, 2, 3)]
        for each in streams:
            await store.append(each)
        for each in streams:
            assert await store.load_request(A, each.request_id) == each

    async def test_unknown_request_is_none(self, store: EventStore) -> None:
        await store.append(stream(A, 1))
        assert await store.load_request(A, "command 1") is None
        assert await store.load_request(B, "request 1") is None


class TestReadAll:
    async def filled(self, store: EventStore) -> list[DomainEventStream]:
        order = [stream(A, 1), stream(B, 1), stream(CART, 1, Paid(1)), stream(B, 2), stream(A, 2), stream(B, 3)]
        for each in order:
            await store.append(each)
        return order

    async def test_order_is_that_of_storing(self, store: EventStore) -> None:
        order = await self.filled(store)
        assert await everything(store) == order

    async def test_positions_grow_from_one(self, store: EventStore) -> None:
        await self.filled(store)
        positions = [each.position for each in await store.read_all(0, 100)]
        assert positions[0] >= 1
        assert positions == sorted(set(positions))

    @pytest.mark.parametrize("limit", [1, 2, 4, 5, 6, 7, 1000])
    async def test_pages_hold_everything_once(self, store: EventStore, limit: int) -> None:
        order = await self.filled(store)
        seen: list[RecordedStream] = []
        last = 0
        while page := await store.read_all(last, limit):
            assert len(page) <= limit
            assert page[0].position > last
            last = page[-1].position
            seen.extend(page)
        assert [each.stream for each in seen] == order
        assert seen == await store.read_all(0, 100)

    async def test_page_starts_above_a_position(self, store: EventStore) -> None:
        await self.filled(store)
        whole = await store.read_all(0, 100)
        for n, each in enumerate(whole, 1):
            assert await store.read_all(each.position, 100) == whole[n:]

    async def test_position_below_the_first_reads_from_the_start(self, store: EventStore) -> None:
        await self.filled(store)
        assert await store.read_all(-1, 100) == await store.read_all(0, 100)
        assert await store.read_all(-1, 2) == await store.read_all(0, 2)

    async def test_page_beyond_the_end_is_empty(self, store: EventStore) -> None:
        assert await store.read_all(0, 10) == []
        order = await self.filled(store)
        assert await store.read_all(len(order) + 100, 10) == []

    async def test_no_room_is_an_empty_page(self, store: EventStore) -> None:
        await self.filled(store)
        assert await store.read_all(0, 0) == []

    async def test_refused_streams_leave_no_trace(self, store: EventStore) -> None:
        order = await self.filled(store)
        for refused in (stream(A, 1), stream(A, 9, request_id="new")):
            with pytest.raises((DuplicateRequestIdError, VersionConflictError)):
                await store.append(refused)
        await store.append(stream(A, 3))
        assert [each.id for each in await everything(store)][:-1] == [each.id for each in order]

    @DETERMINISTIC
    @given(st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 4), st.integers(0, 6)), max_size=20))
    def test_store_agrees_with_a_simple_model(self, appends: list[tuple[str, int, int]]) -> None:
        async def run() -> None:
            store = InMemoryEventStore(Domain([Order]).serializer)
            model: list[tuple[str, int, str]] = []
            for name, version, request in appends:
                request_id = f"r{request}"
                of_name = [each for each in model if each[0] == name]
                old = [each[1] for each in of_name if each[2] == request_id]
                expected = ("duplicate", *old) if old else ("conflict", len(of_name)) if version != len(of_name) else ()
                outcome: tuple[object, ...] = ()
                try:
                    await store.append(stream(AggregateId("shop", "order", name), version + 1, request_id=request_id))
                except DuplicateRequestIdError as error:
                    outcome = ("duplicate", error.version)
                except VersionConflictError as error:
                    outcome = ("conflict", error.actual)
                else:
                    model.append((name, version + 1, request_id))
                assert outcome == expected
            stored = await everything(store)
            assert [(each.aggregate_id.id, each.version, each.request_id) for each in stored] == model

        trio.run(run)


class TestNoSharedObjects:
    async def test_what_is_changed_after_storing_is_not_stored(self, store: EventStore) -> None:
        value: list[Any] = [1]
        headers = {"user": "ann"}
        written = stream(A, 1, Placed(value), headers=headers)
        await store.append(written)
        value.append(2)
        headers["user"] = written.headers["user"] = "bob"
        (loaded,) = await store.load(A)
        assert loaded.events == (Placed([1]),)
        assert loaded.headers == {"user": "ann"}

    async def test_readers_share_nothing(self, store: EventStore) -> None:
        await store.append(stream(A, 1, Placed([1]), headers={"user": "ann"}))

        async def read(how: int) -> DomainEventStream:
            found = await store.load_request(A, "request 1")
            assert found is not None
            return [found, (await store.load(A))[0], (await store.read_all(0, 1))[0].stream][how]

        for first in range(3):
            for second in range(3):
                changed: Any = await read(first)
                changed.events[0].value.append(2)
                changed.headers["user"] = "bob"
                untouched = await read(second)
                assert untouched.events == (Placed([1]),)
                assert untouched.headers == {"user": "ann"}

    async def test_two_stores_share_nothing(self, domain: Domain) -> None:
        one, other = InMemoryEventStore(domain.serializer), InMemoryEventStore(domain.serializer)
        await one.append(stream(A, 1))
        assert await everything(other) == []


class Migrating(Serializer):
    """Writes as one version of a program and reads as another."""

    def __init__(self, writes: Serializer, reads: Serializer) -> None:
        super().__init__(MessageTypes([]))
        self.dump_stream = writes.dump_stream  # type: ignore[method-assign]
        self.load_stream = reads.load_stream  # type: ignore[method-assign]


@frozen
class OrderPlaced:
    total: int


@message_type("OrderOpened", aliases=["OrderPlaced"])
@frozen
class OrderOpened:
    total: int


@frozen
class LegacyThing:
    pass


def aggregate_of(name: str, *events: type) -> type:
    """Return an aggregate class whose state is the list of the events that happened."""

    def sourcing(event: type) -> Callable[..., Any]:
        def source(self: Any, message: object) -> None:
            self.seen.append(message)

        source.__annotations__ = {"message": event}
        return on_sourcing(source)

    command = attrs.make_class(f"Change{name}", {"id": attrs.field(type=str)}, frozen=True)

    def change(self: object, message: object) -> None: ...

    change.__annotations__ = {"message": command}
    body = {f"source_{n}": sourcing(event) for n, event in enumerate(events)}
    fields = {"id": attrs.field(type=str), "seen": attrs.field(factory=list)}
    cls: type = attrs.make_class(name, fields, class_body={"change": on_command(change), **body})
    return aggregate(context="shop", name="order")(cls)


class TestFs17History:
    async def migrated(self, before: Domain, after: Domain, *streams: DomainEventStream) -> EventStore:
        store = InMemoryEventStore(Migrating(before.serializer, after.serializer))
        for each in streams:
            await store.append(each)
        return store

    async def test_renamed_event_loads_by_its_alias(self) -> None:
        before, after = Domain([aggregate_of("Old", OrderPlaced)]), Domain([aggregate_of("New", OrderOpened)])
        store = await self.migrated(before, after, stream(A, 1, OrderPlaced(5)))
        loaded = await AggregateRepository(after, store).load(A)
        assert loaded.state.seen == [OrderOpened(5)]
        assert loaded.version == 1

    async def test_deleted_event_makes_only_its_own_aggregate_unreadable(self) -> None:
        before = Domain([aggregate_of("Old", OrderPlaced, LegacyThing)])
        after = Domain([aggregate_of("New", OrderOpened)])
        history = [stream(A, 1, OrderPlaced(1)), stream(A, 2, LegacyThing()), stream(B, 1, OrderPlaced(2))]
        store = await self.migrated(before, after, *history)
        repository = AggregateRepository(after, store)
        with pytest.raises(UnknownMessageTypeError) as caught:
            await repository.load(A)
        assert caught.value.name == "LegacyThing"
        assert (await repository.load(B)).state.seen == [OrderOpened(2)]

    @pytest.mark.parametrize(
        "read",
        [
            lambda store: store.load(A),
            lambda store: store.load(A, after=1),
            lambda store: store.load_request(A, "request 2"),
            lambda store: read_from(store, 1),
        ],
        ids=["load", "load after", "load_request", "read_all"],
    )
    async def test_unreadable_stream_is_named_by_name_and_place(self, read: Callable[[EventStore], Any]) -> None:
        before = Domain([aggregate_of("Old", OrderPlaced, LegacyThing)])
        after = Domain([aggregate_of("New", OrderOpened)])
        store = await self.migrated(before, after, stream(A, 1, OrderPlaced(1)), stream(A, 2, LegacyThing()))
        with pytest.raises(UnknownMessageTypeError) as caught:
            await read(store)
        assert caught.value.name == "LegacyThing"
        assert "position 2" in caught.value.source or str(A) in caught.value.source

    async def test_unreadable_stream_is_named_by_its_version(self) -> None:
        before = Domain([aggregate_of("Old", OrderPlaced, LegacyThing)])
        after = Domain([aggregate_of("New", OrderOpened)])
        store = await self.migrated(
            before, after, stream(A, 1, OrderPlaced(1)), stream(A, 2, LegacyThing()), stream(A, 3, OrderPlaced(1))
        )
        for read in (lambda: store.load(A), lambda: store.load(A, after=1), lambda: store.load_request(A, "request 2")):
            with pytest.raises(UnknownMessageTypeError) as caught:
                await read()
            assert str(A) in caught.value.source
            assert "version 2" in caught.value.source

    async def test_readable_streams_are_read_around_an_unreadable_one(self) -> None:
        before = Domain([aggregate_of("Old", OrderPlaced, LegacyThing)])
        after = Domain([aggregate_of("New", OrderOpened)])
        store = await self.migrated(
            before, after, stream(A, 1, OrderPlaced(1)), stream(A, 2, LegacyThing()), stream(A, 3, OrderPlaced(3))
        )
        assert [each.version for each in await store.load(A, after=2)] == [3]
        assert len(await store.read_all(0, 1)) == len(await store.read_all(2, 1)) == 1

    async def test_failed_read_leaves_the_store_as_it_was(self) -> None:
        before = Domain([aggregate_of("Old", OrderPlaced, LegacyThing)])
        after = Domain([aggregate_of("New", OrderOpened)])
        store = await self.migrated(before, after, stream(A, 1, LegacyThing()))
        for _ in range(2):
            with pytest.raises(UnknownMessageTypeError):
                await store.load(A)
        with pytest.raises(DuplicateRequestIdError):
            await store.append(stream(A, 1, OrderPlaced(1)))
        await store.append(stream(A, 2, OrderPlaced(1)))


@pytest.fixture
def repository(domain: Domain, store: EventStore) -> AggregateRepository:
    return AggregateRepository(domain, store)


def command(aggregate_id: AggregateId, **changes: Any) -> CommandMessage:
    return CommandMessage(aggregate_id=aggregate_id, body=Place(aggregate_id.id), **changes)


class TestRepository:
    async def test_aggregate_to_which_nothing_happened_is_new(self, repository: AggregateRepository) -> None:
        loaded = await repository.load(A)
        assert (loaded.id, loaded.model, loaded.version) == (A, aggregate_model(Order), 0)
        assert loaded.state == Order("A")

    async def test_state_is_rebuilt_in_order(self, repository: AggregateRepository, store: EventStore) -> None:
        await store.append(stream(A, 1, Placed("a"), Paid(1), Placed("b")))
        await store.append(stream(B, 1, Placed("other")))
        await store.append(stream(A, 2, Paid(2), Placed("c")))
        loaded = await repository.load(A)
        assert loaded.state == Order("A", ["a", "b", "c"], 3)
        assert loaded.version == 2

    async def test_loads_share_no_state(self, repository: AggregateRepository, store: EventStore) -> None:
        await store.append(stream(A, 1, Placed("a")))
        first, second = await repository.load(A), await repository.load(A)
        first.state.values.append("spoiled")
        assert second.state.values == ["a"]
        assert (await repository.load(A)).state.values == ["a"]

    async def test_aggregate_keeps_its_tenant(self, repository: AggregateRepository, store: EventStore) -> None:
        acme = evolve(A, tenant="acme")
        await store.append(stream(acme, 1, Placed("a")))
        loaded = await repository.load(acme)
        assert loaded.id.tenant == "acme"
        assert loaded.state.values == ["a"]

    async def test_other_tenant_is_refused(self, repository: AggregateRepository, store: EventStore) -> None:
        await store.append(stream(evolve(A, tenant="acme"), 1, Placed("a")))
        for tenant in ("(0)", "other", "ACME"):
            with pytest.raises(TenantMismatchError, match=r"shop\.order/A does not belong") as caught:
                await repository.load(evolve(A, tenant=tenant))
            assert (caught.value.aggregate_id, caught.value.tenant) == (A, tenant)

    async def test_other_tenant_learns_nothing_of_an_unreadable_history(
        self, repository: AggregateRepository, store: EventStore
    ) -> None:
        await store.append(stream(evolve(A, tenant="acme"), 1, Paid(-1)))
        with pytest.raises(TenantMismatchError):
            await repository.load(A)

    async def test_event_that_cannot_be_applied_is_an_error_with_version_and_cause(
        self, repository: AggregateRepository, store: EventStore
    ) -> None:
        await store.append(stream(A, 1, Placed("a")))
        await store.append(stream(A, 2, Placed("b"), Paid(-1)))
        await store.append(stream(A, 3, Placed("c")))
        with pytest.raises(AggregateNotReadableError, match=r"version 2 of shop\.order/A") as caught:
            await repository.load(A)
        assert (caught.value.aggregate_id, caught.value.version) == (A, 2)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    async def test_event_that_is_not_sourced_any_more_is_an_error_with_its_cause(
        self, repository: AggregateRepository, store: EventStore
    ) -> None:
        await store.append(stream(CART, 1, Placed("a")))
        with pytest.raises(AggregateNotReadableError) as caught:
            await repository.load(CART)
        assert isinstance(caught.value.__cause__, UnsourcedEventError)
        assert caught.value.version == 1

    async def test_loading_stores_nothing(self, repository: AggregateRepository, store: EventStore) -> None:
        await repository.load(A)
        assert await everything(store) == []


class TestAdvance:
    async def test_events_are_applied_and_become_the_next_stream(
        self, repository: AggregateRepository, store: EventStore
    ) -> None:
        acme = evolve(A, tenant="acme")
        await store.append(stream(acme, 1, Placed("a")))
        loaded = await repository.load(acme)
        message = command(acme, request_id="r", headers={"user": "ann"})
        advanced = loaded.advance(message, (Placed("b"), Paid(3)))
        assert loaded.state == Order("A", ["a", "b"], 3)
        assert loaded.version == 2
        assert (advanced.aggregate_id, advanced.version, advanced.events) == (A, 2, (Placed("b"), Paid(3)))
        assert advanced.aggregate_id.tenant == "acme"
        assert (advanced.command_id, advanced.request_id) == (message.id, "r")
        assert advanced.headers == {"user": "ann"}
        await store.append(advanced)
        assert (await repository.load(acme)).state == loaded.state

    async def test_headers_are_not_shared_with_the_command(self, repository: AggregateRepository) -> None:
        message = command(A, headers={"user": "ann"})
        (await repository.load(A)).advance(message, (Paid(1),)).headers["user"] = "bob"
        assert message.headers == {"user": "ann"}

    async def test_every_stream_is_new(self, repository: AggregateRepository) -> None:
        loaded = await repository.load(A)
        one, two = loaded.advance(command(A), (Paid(1),)), loaded.advance(command(A), (Paid(1),))
        assert one.id != two.id
        assert (one.version, two.version) == (1, 2)

    async def test_event_without_sourcing_function_is_an_error(self, repository: AggregateRepository) -> None:
        with pytest.raises(UnsourcedEventError) as caught:
            (await repository.load(A)).advance(command(A), (Paid(1), Stranger()))
        assert (caught.value.aggregate, caught.value.event_type) == ("Order", Stranger)

    async def test_error_of_a_sourcing_function_comes_out_as_it_is(self, repository: AggregateRepository) -> None:
        with pytest.raises(ZeroDivisionError, match="negative"):
            (await repository.load(A)).advance(command(A), (Paid(-1),))

    async def test_nothing_is_stored_by_advancing(self, repository: AggregateRepository, store: EventStore) -> None:
        (await repository.load(A)).advance(command(A), (Paid(1),))
        assert await everything(store) == []
        assert (await repository.load(A)).version == 0


class TestHistory:
    @pytest.fixture
    async def store(self) -> InMemoryEventStore:
        store = InMemoryEventStore(Domain([aggregate_of("Some", OrderPlaced)]).serializer)
        for aggregate_id, version in ((A, 1), (B, 1), (A, 2), (A, 3)):
            await store.append(stream(aggregate_id, version, OrderPlaced(1)))
        return store

    async def test_a_part_of_a_history_is_read_between_two_versions(self, store: InMemoryEventStore) -> None:
        async def versions(**bounds: int) -> list[int]:
            return [each.version for each in await store.load(A, **bounds)]

        assert await versions(after=1, until=2) == [2]
        assert await versions(until=2) == [1, 2]
        assert await versions(after=2, until=9) == [3]
        assert await versions(after=2, until=2) == []

    async def test_version_at_a_position(self, store: InMemoryEventStore) -> None:
        assert [await store.version_at(A, position) for position in range(6)] == [0, 1, 1, 2, 3, 3]
        assert [await store.version_at(B, position) for position in range(3)] == [0, 0, 1]

    async def test_what_is_recorded_can_be_counted_without_being_read(self, store: InMemoryEventStore) -> None:
        store._serializer = Domain([aggregate_of("Other", LegacyThing)]).serializer
        page = await store.read_all(0, 10)
        assert [(each.position, each.aggregate_id, each.version) for each in page] == [
            (1, A, 1),
            (2, B, 1),
            (3, A, 2),
            (4, A, 3),
        ]
        with pytest.raises(UnknownMessageTypeError):
            _ = page[0].stream
