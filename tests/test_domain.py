"""The laws of aggregates, processors and the application's registry."""

import math
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Generic, Protocol, TypeVar

import attrs
import pytest
from attrs import define, frozen
from cattrs.preconf.orjson import make_converter

from trio_wow.domain import (
    AggregateModel,
    Domain,
    ProcessorKind,
    aggregate,
    aggregate_model,
    event_processor,
    on_command,
    on_event,
    on_sourcing,
    processor_model,
    projection,
    saga,
)
from trio_wow.errors import (
    ConfigurationError,
    InvalidIdentifierError,
    SerializationError,
    UnroutableCommandError,
    UnsourcedEventError,
)
from trio_wow.messages import AggregateId, CommandMessage, DomainEvent, DomainEventStream, StateEvent, message_type

T = TypeVar("T")


@frozen
class Open:
    id: str
    limit: float = 0.0


@frozen
class Close:
    id: str


@frozen
class Opened:
    limit: float


@frozen
class Closed:
    pass


@frozen
class Unsourced:
    pass


@aggregate(context="bank")
@define
class Account:
    id: str
    limit: float = 0.0
    closed: bool = False

    @on_command
    def open(self, command: Open) -> Opened:
        return Opened(command.limit)

    @on_command
    async def close(self, command: Close) -> list[Closed]:
        return [Closed()]

    @on_sourcing
    def opened(self, event: Opened) -> None:
        self.limit = event.limit

    @on_sourcing
    def was_closed(self, event: Closed) -> None:
        self.closed = True


ACCOUNT = aggregate_model(Account)


def decide(model: AggregateModel, state: object, command: object) -> Any:
    return model.command_function(type(command)).call(state, command)


class TestAggregateModel:
    def test_knows_class_names_commands_and_events(self) -> None:
        assert isinstance(ACCOUNT, AggregateModel)
        assert (ACCOUNT.cls, ACCOUNT.context, ACCOUNT.name) == (Account, "bank", "account")
        assert ACCOUNT.commands == (Open, Close)
        assert ACCOUNT.events == (Opened, Closed)
        assert repr(ACCOUNT) == "<aggregate bank.account: Account>"

    @pytest.mark.parametrize(
        ("cls", "name"),
        [
            ("Account", "account"),
            ("SavingsAccount", "savings_account"),
            ("Account2Old", "account2_old"),
            ("A_B", "a_b"),
        ],
    )
    def test_name_is_the_class_in_lower_case_joined_by_underscores(self, cls: str, name: str) -> None:
        assert aggregate_model(built(cls, handle=deciding(Open))).name == name

    def test_name_may_be_given(self) -> None:
        model = aggregate_model(built("Account", name="konto-2", handle=deciding(Open)))
        assert model.name == "konto-2"
        assert model.aggregate_id("A") == AggregateId("bank", "konto-2", "A")

    def test_aggregate_id_carries_context_name_id_and_tenant(self) -> None:
        made = ACCOUNT.aggregate_id("A", "acme")
        assert (made.context, made.aggregate, made.id, made.tenant) == ("bank", "account", "A", "acme")

    def test_new_state_has_the_id_and_defaults(self) -> None:
        assert ACCOUNT.new_state("A") == Account("A", 0.0, False)

    def test_new_states_are_not_shared(self) -> None:
        assert ACCOUNT.new_state("A") is not ACCOUNT.new_state("A")

    def test_command_is_decided_by_its_function(self) -> None:
        assert decide(ACCOUNT, Account("A"), Open("A", 5.0)) == Opened(5.0)

    async def test_async_decision_is_awaited_by_the_caller(self) -> None:
        decided: Any = decide(ACCOUNT, Account("A"), Close("A"))
        assert ACCOUNT.events_of(Close("A"), await decided) == (Closed(),)

    def test_unknown_command_is_a_key_error(self) -> None:
        with pytest.raises(KeyError):
            decide(ACCOUNT, Account("A"), Opened(1.0))

    def test_command_of_a_subclass_is_another_command(self) -> None:
        @frozen
        class OpenSpecial(Open):
            pass

        with pytest.raises(KeyError):
            decide(ACCOUNT, Account("A"), OpenSpecial("A"))

    @pytest.mark.parametrize(
        ("decided", "events"),
        [
            (None, ()),
            ([], ()),
            ((), ()),
            (Closed(), (Closed(),)),
            ([Opened(1.0), Closed()], (Opened(1.0), Closed())),
            ((Closed(), Opened(1.0)), (Closed(), Opened(1.0))),
        ],
        ids=repr,
    )
    def test_events_of_a_decision(self, decided: object, events: tuple[object, ...]) -> None:
        assert ACCOUNT.events_of(Open("A"), decided) == events

    @pytest.mark.parametrize(
        "decided",
        [5, "Closed", Closed, {"closed": True}, [Closed(), None], [[Closed()]], (each for each in [Closed()]), False],
    )
    def test_decision_that_is_no_event_is_an_error_naming_class_command_and_fix(self, decided: object) -> None:
        with pytest.raises(TypeError, match="Account answered Open with .*; return an event"):
            ACCOUNT.events_of(Open("A"), decided)

    def test_event_changes_the_state(self) -> None:
        state = Account("A")
        ACCOUNT.apply(state, Opened(7.0))
        ACCOUNT.apply(state, Closed())
        assert state == Account("A", 7.0, True)

    def test_event_without_sourcing_function_is_an_error_with_aggregate_and_event(self) -> None:
        with pytest.raises(UnsourcedEventError, match="Account has no @on_sourcing function for Unsourced") as caught:
            ACCOUNT.apply(Account("A"), Unsourced())
        assert (caught.value.aggregate, caught.value.event_type) == ("Account", Unsourced)

    def test_subclass_is_no_aggregate_until_it_is_decorated(self) -> None:
        @define
        class Savings(Account):
            pass

        with pytest.raises(TypeError, match=r"Savings is no aggregate; decorate it with @aggregate"):
            aggregate_model(Savings)
        assert aggregate_model(aggregate(context="bank")(Savings)).cls is Savings

    def test_class_that_is_not_decorated_is_no_aggregate(self) -> None:
        with pytest.raises(TypeError, match="Open is no aggregate"):
            aggregate_model(Open)

    def test_subclass_inherits_and_overrides_functions(self) -> None:
        @aggregate(context="bank")
        @define
        class Savings(Account):
            @on_command
            def open(self, command: Open) -> Opened:
                return Opened(command.limit * 2)

            @on_command
            def freeze(self, command: Freeze) -> None:
                return None

        model = aggregate_model(Savings)
        assert model.commands == (Open, Close, Freeze)
        assert model.events == (Opened, Closed)
        assert decide(model, Savings("A"), Open("A", 2.0)) == Opened(4.0)
        assert ACCOUNT.commands == (Open, Close)

    def test_wrapped_function_keeps_its_message(self) -> None:
        def doubled(function: Callable[..., Opened]) -> Callable[..., Opened]:
            @wraps(function)
            def wrapper(*arguments: Any) -> Opened:
                return Opened(function(*arguments).limit * 2)

            return wrapper

        model = aggregate_model(built("Account", handle=doubled(deciding(Open, Opened(3.0)))))
        assert decide(model, Account("A"), Open("A")) == Opened(6.0)

    def test_wrapper_of_another_module_keeps_its_message(self) -> None:
        """A text annotation is resolved where the function stands, not where its wrapper does."""
        function = taking("Open", Opened(3.0))
        scope: dict[str, Any] = {"function": function}
        exec("def wrapper(*arguments): return function(*arguments)", scope)
        model = aggregate_model(built("Account", handle=on_command(wraps(function)(scope["wrapper"]))))
        assert model.commands == (Open,)
        assert decide(model, Account("A"), Open("A")) == Opened(3.0)

    def test_annotation_may_be_text_or_annotated(self) -> None:
        model = aggregate_model(built("Account", one=deciding("Open"), two=deciding(Annotated[Close, "really"])))
        assert model.commands == (Open, Close)


@frozen
class Freeze:
    id: str


def taking(annotation: object, answer: object = None) -> Callable[..., Any]:
    """Return a method whose one message has this annotation."""

    def function(self: object, message: object) -> object:
        return answer

    function.__annotations__ = {"message": annotation}
    return function


def deciding(annotation: object, answer: object = None) -> Callable[..., Any]:
    return on_command(taking(annotation, answer))


def built(cls: str, *, name: str | None = None, **body: object) -> type:
    """Decorate an attrs class with these attributes."""
    made: type = attrs.make_class(cls, {"id": attrs.field(type=str)}, class_body=body)
    return aggregate(context="bank", name=name)(made)


async def waits(self: object, event: Opened) -> None: ...


class Plain:
    id: str


@frozen
class NoId:
    amount: int


@frozen
class Parcel(Generic[T]):
    id: T


class Sized(Protocol):
    size: int


UNUSABLE = [
    pytest.param(Open | None, "must name one message class", id="optional"),
    pytest.param(list[Open], "must name one message class", id="list"),
    pytest.param(type[Open], "must name one message class", id="type"),
    pytest.param(Parcel[str], "must name one message class", id="generic"),
    pytest.param(T, "must name one message class", id="type variable"),
    pytest.param(object, "must name one message class", id="object"),
    pytest.param(Any, "must name one message class", id="any"),
    pytest.param(None, "must name one message class", id="none"),
    pytest.param("Missing", "import the class at module level", id="unknown name"),
    pytest.param("attrs.Missing", "import the class at module level", id="unknown attribute"),
    pytest.param("Open |", "", id="no expression"),
    pytest.param(
        CommandMessage, "not CommandMessage; what a message travels in may be a further", id="command message"
    ),
    pytest.param(DomainEventStream, "not DomainEventStream; what a message travels in", id="stream"),
    pytest.param(StateEvent[Plain], "not StateEvent; what a message travels in", id="envelope of another kind"),
    pytest.param(Sized, "Sized cannot say which classes inherit from it", id="protocol"),
]
MARKS = pytest.mark.parametrize("mark", [on_command, on_sourcing, on_event], ids=lambda mark: mark.__name__)


def decorated(mark: Callable[..., Any], function: Callable[..., Any]) -> type:
    """Decorate a class in which `wrong` is the function with this mark."""
    if mark is on_event:
        return projection(type("Account", (), {"wrong": on_event(function)}))
    return built("Account", wrong=mark(function), right=deciding(Close))


class TestDecoratorErrors:
    """Each is a `TypeError` when the class is decorated, and names class, method and fix."""

    @MARKS
    @pytest.mark.parametrize(("annotation", "fix"), UNUSABLE)
    def test_unusable_annotation(self, mark: Callable[..., Any], annotation: object, fix: str) -> None:
        with pytest.raises(TypeError, match=r"Account\.wrong") as caught:
            decorated(mark, taking(annotation))
        assert fix in str(caught.value)

    @MARKS
    def test_missing_annotation(self, mark: Callable[..., Any]) -> None:
        def wrong(self, message):  # type: ignore[no-untyped-def]
            return None

        with pytest.raises(TypeError, match=r"Account\.wrong: annotate 'message' with the class of the message"):
            decorated(mark, wrong)

    @MARKS
    def test_other_annotations_need_not_be_resolvable(self, mark: Callable[..., Any]) -> None:
        """A class that is imported under `TYPE_CHECKING` may be what a function returns."""
        function = taking(Opened if mark is not on_command else Open)
        function.__annotations__["return"] = "Missing"
        assert decorated(mark, function).__name__ == "Account"

    @MARKS
    def test_no_parameter(self, mark: Callable[..., Any]) -> None:
        def none(self: object) -> None: ...

        with pytest.raises(TypeError, match=r"Account\.wrong must take self and a message"):
            decorated(mark, none)

    def test_a_sourcing_function_takes_nothing_but_its_event(self) -> None:
        def two(self: object, message: Opened, extra: int = 0) -> None: ...

        with pytest.raises(TypeError, match=r"Account\.wrong must take self and one event, and nothing else"):
            decorated(on_sourcing, two)

    @MARKS
    @pytest.mark.parametrize("kind", ["keyword-only", "variable", "keywords"])
    def test_parameter_that_takes_no_positional_message(self, mark: Callable[..., Any], kind: str) -> None:
        def keyword_only(self: object, *, message: Freeze) -> None: ...

        def variable(self: object, *message: Freeze) -> None: ...

        def keywords(self: object, **message: Freeze) -> None: ...

        functions: dict[str, Callable[..., Any]] = {
            "keyword-only": keyword_only,
            "variable": variable,
            "keywords": keywords,
        }
        with pytest.raises(TypeError, match=r"Account\.wrong"):
            decorated(mark, functions[kind])

    @MARKS
    @pytest.mark.parametrize("kind", [staticmethod, classmethod], ids=lambda kind: kind.__name__)
    def test_static_or_class_method(self, mark: Callable[..., Any], kind: Callable[[Any], Any]) -> None:
        """Skipping it silently would leave a message without its function."""
        body = {"wrong": kind(mark(taking(Open))), "right": mark(taking(Close)), "decides": deciding(Freeze)}
        with pytest.raises(TypeError, match=r"Account\.wrong"):
            if mark is on_event:
                projection(type("Account", (), {"wrong": body["wrong"], "right": body["right"]}))
            else:
                built("Account", **body)

    @MARKS
    @pytest.mark.parametrize(
        "thing", [Open, staticmethod(len), property(len), 5], ids=["class", "static", "property", "int"]
    )
    def test_mark_on_something_else_than_a_method(self, mark: Callable[..., Any], thing: object) -> None:
        with pytest.raises(TypeError, match=f"@{mark.__name__} decorates a method, not"):
            mark(thing)

    def test_event_function_in_an_aggregate(self) -> None:
        with pytest.raises(TypeError, match=r"Account\.wrong is marked @on_event.* class marked @aggregate"):
            built("Account", wrong=on_event(taking(Opened)), right=deciding(Open))

    @pytest.mark.parametrize("kind", [event_processor, projection, saga], ids=lambda kind: kind.__name__)
    @pytest.mark.parametrize("mark", [on_command, on_sourcing], ids=lambda mark: mark.__name__)
    def test_aggregate_function_in_a_processor(
        self, kind: Callable[[type], type], mark: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        body = {"wrong": mark(taking(Open)), "right": on_event(taking(Opened))}
        with pytest.raises(
            TypeError, match=rf"Mailer\.wrong is marked @{mark.__name__}.* class marked @{kind.__name__}"
        ):
            kind(type("Mailer", (), body))

    def test_two_command_functions_for_one_command(self) -> None:
        with pytest.raises(TypeError, match=r"Account\.two is a second @on_command function for Open; keep one"):
            built("Account", one=deciding(Open), two=deciding(Open))

    def test_two_sourcing_functions_for_one_event(self) -> None:
        with pytest.raises(TypeError, match=r"Account\.two is a second @on_sourcing function for Opened; keep one"):
            built("Account", one=on_sourcing(taking(Opened)), two=on_sourcing(taking(Opened)), right=deciding(Open))

    def test_one_class_may_be_command_and_event(self) -> None:
        model = aggregate_model(built("Account", one=deciding(Open), two=on_sourcing(taking(Open))))
        assert (model.commands, model.events) == ((Open,), (Open,))

    def test_async_sourcing_function(self) -> None:
        with pytest.raises(TypeError, match=r"Account\.wrong .*must be a plain function, not `async def`"):
            built("Account", wrong=on_sourcing(waits), right=deciding(Open))

    def test_sourcing_function_that_yields(self) -> None:
        def yields(self: object, event: Opened) -> Any:
            yield

        async def yields_async(self: object, event: Opened) -> Any:
            yield

        for wrong in (yields, yields_async):
            with pytest.raises(TypeError, match=r"Account\.wrong"):
                built("Account", wrong=on_sourcing(wrong), right=deciding(Open))

    def test_no_command_function(self) -> None:
        with pytest.raises(TypeError, match="Account has no @on_command function"):
            built("Account", opened=on_sourcing(taking(Opened)))

    def test_no_attrs_class(self) -> None:
        with pytest.raises(TypeError, match=r"Account is no attrs class; put @attrs\.define below @aggregate"):
            aggregate(context="bank")(type("Account", (), {"handle": deciding(Open)}))

    def test_no_id(self) -> None:
        cls = attrs.make_class("Account", {"limit": attrs.field(default=0)}, class_body={"handle": deciding(Open)})
        with pytest.raises(TypeError, match="Account has no field `id` that can be given by this name; add `id: str`"):
            aggregate(context="bank")(cls)

    def test_field_without_default(self) -> None:
        fields = {
            "id": attrs.field(),
            "limit": attrs.field(),
            "owner": attrs.field(),
            "open": attrs.field(default=True),
        }
        cls = attrs.make_class("Account", fields, class_body={"handle": deciding(Open)})
        with pytest.raises(
            TypeError, match="Account needs a default for limit, owner: a new aggregate has only its id"
        ):
            aggregate(context="bank")(cls)

    @pytest.mark.parametrize("id_field", [attrs.field(init=False), attrs.field(alias="key")], ids=["no init", "alias"])
    def test_id_that_cannot_be_given(self, id_field: Any) -> None:
        cls = attrs.make_class("Account", {"id": id_field}, class_body={"handle": deciding(Open)})
        with pytest.raises(TypeError, match="Account"):
            aggregate(context="bank")(cls)

    def test_fields_with_defaults_factories_or_outside_init_are_fine(self) -> None:
        fields = {
            "id": attrs.field(),
            "limit": attrs.field(default=0),
            "lines": attrs.field(factory=list),
            "cache": attrs.field(init=False),
        }
        cls = attrs.make_class("Account", fields, class_body={"handle": deciding(Open)})
        assert aggregate_model(aggregate(context="bank")(cls)).new_state("A").lines == []
        with pytest.raises(TypeError, match=r"Account has snapshots, which would lose cache: .* remove `init=False`"):
            aggregate(context="bank", snapshot_every=9)(cls)

    def test_command_without_attrs(self) -> None:
        with pytest.raises(
            TypeError, match=r"Account\.wrong: Plain is no attrs class; decorate it with @attrs\.frozen"
        ):
            built("Account", wrong=deciding(Plain))

    def test_command_without_id(self) -> None:
        with pytest.raises(TypeError, match=r"Account\.wrong: NoId has no field `id`, which names the aggregate"):
            built("Account", wrong=deciding(NoId))

    @pytest.mark.parametrize("name", ["", "a.b", "a:b", "ä", "x" * 65])
    def test_illegal_name_is_refused(self, name: str) -> None:
        with pytest.raises(InvalidIdentifierError) as caught:
            built("Account", name=name, handle=deciding(Open))
        assert (caught.value.what, caught.value.value) == ("aggregate name", name)
        with pytest.raises(InvalidIdentifierError) as caught:
            aggregate(context=name)(attrs.make_class("Account", ["id"], class_body={"handle": deciding(Open)}))
        assert (caught.value.what, caught.value.value) == ("context", name)


@projection
class Balances:
    @on_event
    def opened(self, event: Opened) -> None: ...

    @on_event
    async def closed(self, event: DomainEvent[Closed]) -> None: ...

    @on_event
    def opened_again(self, event: DomainEvent[Opened]) -> None: ...

    def helper(self, event: Unsourced) -> None: ...

    def test_override_without_the_decorator_is_refused(self) -> None:
        class Base:
            @on_event
            def handle(self, event: Opened) -> None: ...

        class Silent(Base):
            def handle(self, event: Opened) -> None: ...

        with pytest.raises(TypeError, match=r"Silent\.handle overrides a message function; give it the decorator"):
            projection(Silent)


def functions_of(processor: object) -> tuple[tuple[str, tuple[type, ...], bool], ...]:
    return tuple((each.name, each.handles, each.takes_envelope) for each in processor_model(processor).event_functions)


class TestProcessorModel:
    @pytest.mark.parametrize(
        ("decorator", "kind"),
        [(event_processor, ProcessorKind.EVENT), (projection, ProcessorKind.PROJECTION), (saga, ProcessorKind.SAGA)],
        ids=["event_processor", "projection", "saga"],
    )
    def test_knows_kind_and_name(self, decorator: Callable[[type], type], kind: ProcessorKind) -> None:
        cls = decorator(type("Mailer", (), {"opened": on_event(taking(Opened))}))
        model = processor_model(cls())
        assert (model.kind, model.name) == (kind, "Mailer")
        assert kind.value == decorator.__name__

    def test_functions_stand_in_the_order_of_their_definition(self) -> None:
        assert functions_of(Balances()) == (
            ("opened", (Opened,), False),
            ("closed", (Closed,), True),
            ("opened_again", (Opened,), True),
        )

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="`type` statements came with Python 3.12")
    def test_type_aliases_are_resolved_wherever_they_stand(self) -> None:
        scope: dict[str, Any] = {"Opened": Opened, "Closed": Closed, "DomainEvent": DomainEvent}
        exec("type One = Opened; type Two = One | Closed; type Envelope = DomainEvent[Two]; type No = Missing", scope)
        one, two, domain_event = scope["One"], scope["Two"], scope["DomainEvent"]
        for annotation, handles, takes_envelope in (
            (two, (Opened, Closed), False),
            (one | Closed, (Opened, Closed), False),
            (domain_event[one], (Opened,), True),
            (domain_event[Closed | one], (Closed, Opened), True),
            (scope["Envelope"], (Opened, Closed), True),
        ):
            cls = projection(type("Listing", (), {"on": on_event(taking(annotation))}))
            assert functions_of(cls()) == (("on", handles, takes_envelope),)
        with pytest.raises(TypeError, match=r"Listing.on: .* cannot be resolved \(name 'Missing' is not defined\)"):
            projection(type("Listing", (), {"on": on_event(taking(domain_event[scope["No"]]))}))

    def test_subclass_inherits_and_overrides_functions(self) -> None:
        @projection
        class More(Balances):
            @on_event
            def opened(self, event: DomainEvent[Opened]) -> None: ...  # type: ignore[override]

            @on_event
            def unsourced(self, event: Unsourced) -> None: ...

        assert functions_of(More()) == (
            ("opened", (Opened,), True),
            ("closed", (Closed,), True),
            ("opened_again", (Opened,), True),
            ("unsourced", (Unsourced,), False),
        )

    def test_subclass_is_no_processor_until_it_is_decorated(self) -> None:
        class More(Balances):
            pass

        with pytest.raises(TypeError, match="is no processor; decorate its class with @event_processor, @projection"):
            processor_model(More())

    def test_class_in_place_of_an_instance_is_an_error_with_a_hint(self) -> None:
        with pytest.raises(TypeError, match="give an instance, not the class"):
            processor_model(Balances)

    def test_other_object_is_no_processor(self) -> None:
        with pytest.raises(TypeError, match="5 is no processor") as caught:
            processor_model(5)
        assert "not the class" not in str(caught.value)

    @pytest.mark.parametrize("kind", [event_processor, projection, saga], ids=lambda kind: kind.__name__)
    def test_no_event_function_is_refused(self, kind: Callable[[type], type]) -> None:
        with pytest.raises(TypeError, match="Mailer has no @on_event or @on_state_event function"):
            kind(type("Mailer", (), {"helper": taking(Opened)}))

    def test_bare_envelope_is_refused(self) -> None:
        with pytest.raises(
            TypeError, match=r"Mailer\.wrong: write DomainEvent\[\.\.\.\] with the class of what it handles"
        ):
            projection(type("Mailer", (), {"wrong": on_event(taking(DomainEvent))}))

    @pytest.mark.parametrize("inner", [object, Any, T, list[Opened], DomainEvent, DomainEvent[Opened]], ids=str)
    def test_envelope_around_no_single_class_is_refused(self, inner: Any) -> None:
        with pytest.raises(TypeError, match=r"Mailer\.wrong.*must name one message class"):
            projection(type("Mailer", (), {"wrong": on_event(taking(DomainEvent[inner]))}))


@pytest.fixture
def domain() -> Domain:
    return Domain([Account])


class TestDomain:
    def test_knows_its_aggregates(self, domain: Domain) -> None:
        assert domain.aggregates == (ACCOUNT,)
        assert domain.model_of(AggregateId("bank", "account", "A", "acme")) is ACCOUNT

    def test_takes_any_iterable(self) -> None:
        assert Domain(each for each in [Account]).aggregates == (ACCOUNT,)

    @pytest.mark.parametrize("names", [("bank", "cart"), ("shop", "account")])
    def test_unknown_kind_is_a_key_error(self, domain: Domain, names: tuple[str, str]) -> None:
        with pytest.raises(KeyError):
            domain.model_of(AggregateId(*names, "A"))

    def test_publishers_of_an_event(self, domain: Domain) -> None:
        other = built("Loan", handle=deciding(Freeze), opened=on_sourcing(taking(Opened)))
        both = Domain([Account, other])
        assert both.publishers_of(Opened) == (ACCOUNT, aggregate_model(other))
        assert both.publishers_of(Closed) == (ACCOUNT,)
        assert both.publishers_of(Open) == ()
        assert domain.publishers_of(Opened) == (ACCOUNT,)

    def test_class_given_twice_counts_once_or_is_refused(self) -> None:
        try:
            twice = Domain([Account, Account])
        except ConfigurationError:
            return
        assert twice.aggregates == (ACCOUNT,)
        assert twice.publishers_of(Opened) == (ACCOUNT,)

    def test_class_that_is_no_aggregate_is_refused(self) -> None:
        with pytest.raises(TypeError, match="Open is no aggregate"):
            Domain([Account, Open])

    def test_serializer_knows_commands_and_events(self, domain: Domain) -> None:
        for body in (Open("A"), Close("A"), Opened(1.0), Closed()):
            domain.serializer.copy(body)
        with pytest.raises(SerializationError):
            domain.serializer.copy(Unsourced())

    def test_upgraders_reach_the_serializer(self) -> None:
        @define
        class Upgrade:
            name: str = "Opened"
            revision: int = 1

            def upgrade(self, body: dict[str, Any], /) -> dict[str, Any]:
                return {"limit": body["limit"] * 2}

        newer = message_type("Opened", revision=2)(attrs.make_class("Newer", {"limit": attrs.field(type=float)}))
        loan = built("Loan", handle=deciding(Freeze), opened=on_sourcing(taking(newer)))
        stream = DomainEventStream(
            aggregate_id=ACCOUNT.aggregate_id("A"), version=1, events=(Opened(2.0),), command_id="c", request_id="r"
        )
        data = Domain([Account]).serializer.dump_stream(stream)
        assert Domain([loan], upgraders=[Upgrade()]).serializer.load_stream(data, "here").events == (newer(4.0),)
        with pytest.raises(ConfigurationError, match="two upgraders"):
            Domain([loan], upgraders=[Upgrade(), Upgrade(revision=1)])

    def test_converter_reaches_the_serializer(self) -> None:
        wave = attrs.make_class("Wave", {"id": attrs.field(type=str), "phase": attrs.field(type=complex)})
        loan = built("Loan", handle=deciding(wave))
        converter = make_converter()
        converter.register_unstructure_hook(complex, str)
        converter.register_structure_hook(complex, lambda text, _: complex(text))
        body = wave("A", 1 + 2j)
        assert Domain([loan], converter=converter).command_message(body).body == body
        with pytest.raises(SerializationError):
            Domain([loan]).command_message(body)


class TestConfigurationErrors:
    def test_two_aggregates_of_one_name(self) -> None:
        one, two = built("Loan", handle=deciding(Open)), built("Loans", name="loan", handle=deciding(Close))
        with pytest.raises(ConfigurationError) as caught:
            Domain([one, two])
        (problem,) = caught.value.problems
        assert "bank.loan: Loan>" in problem
        assert "bank.loan: Loans>" in problem
        assert "@aggregate(name=...)" in problem

    def test_one_name_in_two_contexts_is_fine(self) -> None:
        one = built("Loan", handle=deciding(Open))
        cls = attrs.make_class("Loan", {"id": attrs.field(type=str)}, class_body={"handle": deciding(Close)})
        two = aggregate(context="shop")(cls)
        both = Domain([one, two])
        assert both.model_of(AggregateId("bank", "loan", "A")).cls is one
        assert both.model_of(AggregateId("shop", "loan", "A")).cls is two

    def test_two_aggregates_for_one_command(self) -> None:
        with pytest.raises(ConfigurationError) as caught:
            Domain([built("Loan", handle=deciding(Open)), built("Deposit", handle=deciding(Open))])
        (problem,) = caught.value.problems
        assert "Open is handled by" in problem
        assert "Loan" in problem
        assert "Deposit" in problem

    def test_event_that_is_no_attrs_class(self) -> None:
        with pytest.raises(ConfigurationError) as caught:
            Domain([built("Loan", handle=deciding(Open), plain=on_sourcing(taking(Plain)))])
        (problem,) = caught.value.problems
        assert "Plain is no attrs class; decorate it with @attrs.frozen" in problem

    def test_two_messages_of_one_name(self) -> None:
        twin = message_type("Opened")(frozen(type("Twin", (), {})))
        with pytest.raises(ConfigurationError) as caught:
            Domain([Account, built("Loan", handle=deciding(Freeze), twin=on_sourcing(taking(twin)))])
        (problem,) = caught.value.problems
        assert "'Opened'" in problem
        assert f"{__name__}.Opened" in problem
        assert f"{__name__}.Twin" in problem
        assert "@message_type" in problem

    def test_all_are_listed_together(self) -> None:
        twin = message_type("Opened")(frozen(type("Twin", (), {})))
        loan = built("Loan", name="account", one=deciding(Open), two=deciding(Close))
        deposit = built("Deposit", h=deciding(Freeze), t=on_sourcing(taking(twin)), p=on_sourcing(taking(Plain)))
        with pytest.raises(ConfigurationError) as caught:
            Domain([Account, loan, deposit])
        problems = caught.value.problems
        for part in (
            "share a name",
            "Open is handled by",
            "Close is handled by",
            "Plain is no attrs",
            "both named 'Ope",
        ):
            assert len([each for each in problems if part in each]) == 1, part
            assert part in str(caught.value)
        assert len(problems) == 5


class TestCommandMessage:
    def test_is_addressed_by_class_and_id(self, domain: Domain) -> None:
        command = Open("A", 5.0)
        message = domain.command_message(command, request_id="r", tenant="acme", headers={"user": "ann"})
        assert message.aggregate_id == AggregateId("bank", "account", "A")
        assert message.aggregate_id.tenant == "acme"
        assert message.body == command
        assert message.request_id == "r"
        assert message.headers == {"user": "ann"}

    def test_default_request_is_a_new_one(self, domain: Domain) -> None:
        messages = [domain.command_message(Open("A")) for _ in range(10)]
        assert len({each.request_id for each in messages}) == 10
        assert all(each.request_id == each.id for each in messages)
        assert messages[0].aggregate_id.tenant == "(0)"
        assert messages[0].headers == {}

    def test_same_request_is_another_message(self, domain: Domain) -> None:
        one, two = (domain.command_message(Open("A"), request_id="r") for _ in range(2))
        assert one.id != two.id

    def test_headers_are_copied(self, domain: Domain) -> None:
        headers = {"user": "ann"}
        for request_id in (None, "r"):
            message = domain.command_message(Open("A"), request_id=request_id, headers=headers)
            assert message.headers == headers
            message.headers["user"] = "bob"
        assert headers == {"user": "ann"}

    def test_command_that_no_aggregate_handles_is_refused_with_its_class(self, domain: Domain) -> None:
        for command in (Freeze("A"), Opened(1.0)):
            with pytest.raises(UnroutableCommandError, match=type(command).__name__) as caught:
                domain.command_message(command)
            assert caught.value.command_type is type(command)

    @pytest.mark.parametrize(
        "value", ["", " ", "a\0b", "\ud800", "x" * 513, None, 5], ids=lambda each: ascii(each)[:12]
    )
    def test_fs16_illegal_identifier_is_refused(self, domain: Domain, value: Any) -> None:
        with pytest.raises(InvalidIdentifierError) as caught:
            domain.command_message(Open(value))
        assert (caught.value.what, caught.value.value) == ("aggregate ID", value)
        if value is not None:
            with pytest.raises(InvalidIdentifierError) as caught:
                domain.command_message(Open("A"), request_id=value)
            assert caught.value.what == "request ID"
        with pytest.raises(InvalidIdentifierError) as caught:
            domain.command_message(Open("A"), tenant=value)
        assert caught.value.what == "tenant"

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2**64, -(2**63) - 1, 10**30, "\ud800"], ids=ascii)
    def test_fs16_value_that_json_cannot_hold_is_refused(self, domain: Domain, value: Any) -> None:
        with pytest.raises(SerializationError):
            domain.command_message(Open("A", value))

    @pytest.mark.parametrize("headers", [{"a": "\ud800"}, {"\udfff": "a"}, {"a": math.nan}, {"a": {1}}], ids=ascii)
    def test_fs16_header_that_json_cannot_hold_is_refused(self, domain: Domain, headers: Any) -> None:
        """Otherwise it is refused by the store only, out of a mailbox."""
        with pytest.raises(SerializationError):
            domain.command_message(Open("A"), headers=headers)
