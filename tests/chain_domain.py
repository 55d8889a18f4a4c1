"""A domain for tests: each step of a chain yields an event, and a saga answers it with the next step."""

from attrs import define, field, frozen

from trio_wow import CommandRejectedError, DomainEvent, aggregate, on_command, on_event, on_sourcing, projection, saga
from trio_wow.dispatch import FunctionRegistry
from trio_wow.domain import Domain


@frozen
class Step:
    id: str
    number: int = 0


@frozen
class Refuse:
    id: str
    reason: str = "by a rule"


@frozen
class Break:
    id: str


@frozen
class Ignore:
    id: str


@frozen
class Twice:
    id: str


@frozen
class Unwritable:
    id: str


@frozen
class Stepped:
    number: int


@frozen
class Measured:
    value: float


@aggregate(context="chains")
@define
class Chain:
    id: str
    steps: list[int] = field(factory=list)

    @on_command
    async def step(self, command: Step) -> Stepped:
        return Stepped(command.number)

    @on_command
    def twice(self, command: Twice) -> list[Stepped]:
        return [Stepped(100), Stepped(101)]

    @on_command
    def refuse(self, command: Refuse) -> None:
        raise CommandRejectedError(command.reason)

    @on_command
    def fail(self, command: Break) -> Stepped:
        return Stepped(-1)

    @on_command
    def ignore(self, command: Ignore) -> None:
        return None

    @on_command
    def unwritable(self, command: Unwritable) -> Measured:
        return Measured(float("nan"))

    @on_sourcing
    def stepped(self, event: Stepped) -> None:
        if event.number < 0:
            raise ZeroDivisionError("cannot be applied")
        self.steps.append(event.number)

    @on_sourcing
    def measured(self, event: Measured) -> None:
        pass


@frozen
class Note:
    id: str
    text: str


@frozen
class Noted:
    text: str


@aggregate(context="notes")
@define
class Notebook:
    id: str
    last: str = ""

    @on_command
    def note(self, command: Note) -> Noted:
        return Noted(command.text)

    @on_sourcing
    def noted(self, event: Noted) -> None:
        self.last = event.text


@saga
class Answering:
    """Answers the first `answers` events of each chain with the next step."""

    def __init__(self, answers: int) -> None:
        self.answers = answers

    @on_event
    async def stepped(self, event: DomainEvent[Stepped]) -> Step | None:
        number = event.body.number
        return Step(event.aggregate_id.id, number + 1) if number < self.answers else None


@projection
class Steps:
    """Keeps the steps of each chain in the order in which their events arrived."""

    def __init__(self) -> None:
        self.of: dict[str, list[int]] = {}
        self.versions: dict[str, list[int]] = {}

    @on_event
    def stepped(self, event: DomainEvent[Stepped]) -> None:
        self.of.setdefault(event.aggregate_id.id, []).append(event.body.number)
        self.versions.setdefault(event.aggregate_id.id, []).append(event.version)


@projection
class Everything:
    """Handles events of both contexts."""

    @on_event
    def stepped(self, event: Stepped) -> None:
        pass

    @on_event
    def noted(self, event: Noted) -> None:
        pass


def registry_of(domain: Domain, *processors: object) -> FunctionRegistry:
    registry = FunctionRegistry(domain)
    for processor in processors:
        registry.register(processor)
    return registry
