"""The application that the examples beside it embed: votes for options, counted by a projection."""

from attrs import define, frozen

from trio_wow import App, DomainEvent, aggregate, on_command, on_event, on_sourcing, projection


@frozen
class Vote:
    """Vote for an option; `id` names it."""

    id: str


@frozen
class Voted:
    """An option got a vote."""


@aggregate(context="polls")
@define
class Option:
    """What can be voted for."""

    id: str
    votes: int = 0

    @on_command
    def vote(self, command: Vote) -> Voted:  # noqa: ARG002 - the annotation says which command
        """Take every vote."""
        return Voted()

    @on_sourcing
    def voted(self, event: Voted) -> None:  # noqa: ARG002 - the annotation says which event
        """Count it."""
        self.votes += 1


@projection
class Results(dict[str, int]):
    """Option -> votes."""

    @on_event
    def voted(self, event: DomainEvent[Voted]) -> None:
        """Each vote is a version of its option."""
        self[event.aggregate_id.id] = event.version


results = Results()
app = App([Option], [results])
