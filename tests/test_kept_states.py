"""States that a repository keeps between commands: always the caller's own copy, never behind the store."""

from datetime import datetime
from functools import cached_property
from threading import Lock
from typing import Any

import pytest
import trio
from attrs import define, evolve, field, frozen

from trio_wow import App, Reply, Stage, aggregate, on_command, on_event, on_sourcing, projection
from trio_wow.domain import Domain
from trio_wow.errors import TenantMismatchError
from trio_wow.eventsourcing import AggregateRepository, InMemoryEventStore
from trio_wow.eventsourcing._repository import _copied
from trio_wow.messages import AggregateId, CommandMessage, DomainEventStream


@frozen
class Add:
    id: str
    text: str


@frozen
class Spoil:
    id: str


@frozen
class Added:
    text: str


@aggregate(context="lists")
@define
class Texts:
    id: str
    texts: list[str] = field(factory=list)

    @on_command
    def add(self, command: Add) -> Added:
        return Added(command.text + str(len(self.texts)))

    @on_command
    def spoil(self, command: Spoil) -> None:
        self.texts.append("spoilt")  # which it must not

    @on_sourcing
    def added(self, event: Added) -> None:
        self.texts.append(event.text)


@aggregate(context="locks")
@define
class Locked:
    id: str
    lock: Any = field(factory=Lock)
    texts: list[str] = field(factory=list)

    @on_command
    def add(self, command: Add) -> Added:
        return Added(command.text + str(len(self.texts)))

    @on_sourcing
    def added(self, event: Added) -> None:
        self.texts.append(event.text)


@frozen
class Drain:
    id: str


@frozen
class Drained:
    texts: list[str]


@aggregate(context="numbers")
@define
class Careless:
    id: str
    count: int = 0

    @on_command
    def add(self, command: Add) -> Reply[Added, int]:
        self.count += 1  # which it must not
        return Reply(Added(command.text), self.count)

    @on_sourcing
    def added(self, event: Added) -> None:
        self.count += 1


class _Caching:
    count: int

    @on_command
    def add(self, command: Add) -> Reply[Added, int]:
        return Reply(Added(command.text), self.count_after)  # type: ignore[attr-defined]

    @on_sourcing
    def added(self, event: Added) -> None:
        self.count += 1


@aggregate(context="numbers")
@define
class CachingInSlots(_Caching):
    id: str
    count: int = 0

    @cached_property
    def count_after(self) -> int:
        return self.count + 1


@aggregate(context="numbers")
@define(slots=False)
class Caching(_Caching):
    id: str
    count: int = 0

    @cached_property
    def count_after(self) -> int:
        return self.count + 1


@aggregate(context="lists")
@define
class Drains:
    id: str
    texts: list[str] = field(factory=list)

    @on_command
    def add(self, command: Add) -> Added:
        return Added(command.text)

    @on_command
    def drain(self, command: Drain) -> Drained:
        return Drained(self.texts)

    @on_sourcing
    def added(self, event: Added) -> None:
        self.texts.append(event.text)

    @on_sourcing
    def drained(self, event: Drained) -> None:
        self.texts.clear()


@projection
class Seen:
    def __init__(self) -> None:
        self.drained: list[list[str]] = []

    @on_event
    def on_drained(self, event: Drained) -> None:
        self.drained.append(list(event.texts))


class Counting(InMemoryEventStore):
    """Counts the streams that are read."""

    read = 0

    def _read(self, aggregate_id: AggregateId, version: int) -> DomainEventStream:
        self.read += 1
        return super()._read(aggregate_id, version)


def counted(cls: type, **options: Any) -> tuple[AggregateRepository, Counting]:
    domain = Domain([cls])
    store = Counting(domain.serializer)
    return AggregateRepository(domain, store, **options), store


def id_of(cls: type, name: str, **tenant: str) -> AggregateId:
    return Domain([cls]).aggregates[0].aggregate_id(name, **tenant)


async def add(repository: AggregateRepository, store: InMemoryEventStore, id: AggregateId, text: str = "t") -> None:
    loaded = await repository.load_to_decide(id)
    stream = loaded.advance(CommandMessage(aggregate_id=id, body=Add(id.id, text)), (Added(text),))
    await store.append(stream)
    repository.keep(loaded)


async def test_what_is_kept_is_not_read_again() -> None:
    repository, store = counted(Texts)
    for _ in range(5):
        await add(repository, store, id_of(Texts, "a"))
    assert store.read == 0
    assert (await repository.load_to_decide(id_of(Texts, "a"))).version == 5


async def test_what_others_have_appended_is_seen() -> None:
    repository, store = counted(Texts)
    other = AggregateRepository(Domain([Texts]), store)
    await add(repository, store, id_of(Texts, "a"), "mine")
    await add(other, store, id_of(Texts, "a"), "another's")
    loaded = await repository.load_to_decide(id_of(Texts, "a"))
    assert (loaded.version, loaded.state.texts) == (2, ["mine", "another's"])


async def test_each_caller_has_a_state_of_his_own() -> None:
    repository, store = counted(Texts)
    await add(repository, store, id_of(Texts, "a"))
    (await repository.load_to_decide(id_of(Texts, "a"))).state.texts.append("spoilt")
    assert (await repository.load_to_decide(id_of(Texts, "a"))).state.texts == ["t"]


@pytest.mark.parametrize("cls", [Texts, Locked])
async def test_commands_see_the_state_and_not_what_a_function_has_spoilt(cls: type) -> None:
    domain = Domain([cls])
    app = App(domain)
    async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
        for _ in range(3):
            (await gateway.send_and_wait(Add("a", "t"))).raise_for_error()
            if cls is Texts:
                (await gateway.send_and_wait(Spoil("a"))).raise_for_error()
    streams = await app.store.load(domain.aggregates[0].aggregate_id("a"))
    assert [stream.events for stream in streams] == [(Added("t0"),), (Added("t1"),), (Added("t2"),)]


@pytest.mark.parametrize("cls", [Careless, CachingInSlots, Caching])
async def test_nothing_that_a_function_does_to_a_state_is_kept(cls: type) -> None:
    app = App([cls])
    async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
        values = [(await gateway.send_and_wait(Add("a", "t"))).value for _ in range(3)]
    assert values == [1, 2, 3]


async def test_an_event_is_published_as_it_is_stored_though_it_holds_a_part_of_the_state() -> None:
    seen = Seen()
    app = App([Drains], [seen])
    async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
        await gateway.send_and_wait(Add("a", "t"))
        await gateway.send_and_wait(Drain("a"), until=Stage.PROJECTED)
    assert seen.drained == [["t"]]


async def test_a_state_that_cannot_be_copied_is_made_from_events() -> None:
    repository, store = counted(Locked)
    for _ in range(3):
        await add(repository, store, id_of(Locked, "a"))
    assert store.read == 1 + 2


async def test_another_tenant_is_refused() -> None:
    repository, store = counted(Texts)
    await add(repository, store, id_of(Texts, "a", tenant="one"))
    with pytest.raises(TenantMismatchError):
        await repository.load_to_decide(id_of(Texts, "a", tenant="two"))


@pytest.mark.parametrize(("cached", "read"), [(0, 2), (1, 2), (2, 0)])
async def test_the_least_recently_used_is_let_go(cached: int, read: int) -> None:
    repository, store = counted(Texts, cached=cached)
    for name in ("a", "b", "a", "b"):
        await add(repository, store, id_of(Texts, name))
    assert store.read == read


async def test_a_forgotten_one_is_read() -> None:
    repository, store = counted(Texts)
    await add(repository, store, id_of(Texts, "a"))
    repository.forget(id_of(Texts, "a"))
    assert (await repository.load_to_decide(id_of(Texts, "a"))).version == 1
    assert store.read == 1


@pytest.mark.parametrize("cached", [-1, 1.0, True])
def test_a_bad_number_is_refused(cached: Any) -> None:
    with pytest.raises(ValueError, match="cached must be an int of at least 0, not"):
        counted(Texts, cached=cached)
    with pytest.raises(ValueError, match="cached must be an int of at least 0, not"):
        App([Texts], cached=cached)


async def test_a_stream_made_from_another_one_is_written_with_its_own_events() -> None:
    repository, store = counted(Texts)
    id = id_of(Texts, "a")
    loaded = await repository.load_to_decide(id)
    stream = loaded.advance(CommandMessage(aggregate_id=id, body=Add("a", "t")), (Added("t"),))
    await store.append(evolve(stream, events=[Added("other")]))
    assert (await store.load(id))[0].events == (Added("other"),)
    assert store._serializer.dump_stream(stream.routed()) == store._serializer.dump_stream(stream)


async def test_a_function_that_asks_the_store_again_and_again_lets_others_run() -> None:
    """Only the dispatcher's own calls do not give way: its executor does that between turns."""

    @aggregate(context="polls")
    @define
    class Poll:
        id: str

        @on_command
        async def add(self, command: Add) -> None:
            while not ready:
                await app.store.load(AggregateId("polls", "poll", "x"))

        @on_sourcing
        def added(self, event: Added) -> None: ...

    ready: list[bool] = []
    app = App([Poll])

    async def let_go() -> None:
        await trio.lowlevel.checkpoint()
        ready.append(True)

    async with app.serving(app.runtime(signals=False, shutdown_quiet_period=0)) as gateway:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(let_go)
            with trio.fail_after(60):
                assert (await gateway.send_and_wait(Add("a", "t"))).error is None


@define
class Flat:
    id: str
    amount: int | None = None
    when: datetime = datetime(2026, 1, 1)


@define(slots=False)
class WithDict:
    id: str
    amount: int = 0


@frozen
class Frozen:
    id: str


@define
class Inherited(Flat):
    more: bool = True


@define
class Nested:
    id: str
    inner: Flat
    texts: list[str]


class Setting:
    """Is told when it is restored."""

    def __init__(self) -> None:
        self.id = "a"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, restored=True)


@pytest.mark.parametrize(
    "state",
    [Flat("a", 5), WithDict("a", 5), Frozen("a"), Inherited("a", 1), Nested("a", Flat("b"), ["c"])],
    ids=lambda state: type(state).__name__,
)
def test_a_copy_is_equal_and_shares_nothing_that_changes(state: Any) -> None:
    copy = _copied(state)
    assert copy == state
    assert type(copy) is type(state)
    assert copy is not state
    if isinstance(state, Nested):
        assert copy.inner is not state.inner
        assert copy.texts is not state.texts
    if isinstance(state, WithDict):
        copy.amount = 6
        assert state.amount == 5


def test_a_class_that_copies_in_its_own_way_is_let() -> None:
    assert _copied(Setting()).restored
