"""What device and server share: shelves, and what happens to the pieces on them."""

from attrs import define, field, frozen, validators

from trio_wow import CommandRejectedError, Domain, Reply, aggregate, on_command, on_sourcing

SHELF = validators.matches_re("[A-Za-z0-9._-]{1,64}")


@frozen
class Receive:
    """Pieces have come in for the shelf `id`."""

    id: str = field(validator=SHELF)
    quantity: int = field(validator=validators.gt(0))


@frozen
class Pick:
    """Pieces are taken from the shelf `id`."""

    id: str = field(validator=SHELF)
    quantity: int = field(validator=validators.gt(0))


@frozen
class Count:
    """Somebody has counted: so many are on the shelf `id`, whatever is on record."""

    id: str = field(validator=SHELF)
    quantity: int = field(validator=validators.ge(0))


@frozen
class Received:
    """So many have come in."""

    quantity: int


@frozen
class Picked:
    """So many were taken."""

    quantity: int


@frozen
class Counted:
    """So many are there."""

    quantity: int


class ShortError(CommandRejectedError):
    """There are fewer on the shelf."""

    code = "shelf.short"


@aggregate(context="stock")
@define
class Shelf:
    """The pieces of one article. Each command is answered with how many there are after it."""

    id: str
    quantity: int = 0

    @on_command
    def receive(self, command: Receive) -> Reply[Received, int]:
        """Take every delivery."""
        return Reply(Received(command.quantity), self.quantity + command.quantity)

    @on_command
    def pick(self, command: Pick) -> Reply[Picked, int]:
        """Refuse to take what is not there."""
        if command.quantity > self.quantity:
            raise ShortError(f"there are {self.quantity}")
        return Reply(Picked(command.quantity), self.quantity - command.quantity)

    @on_command
    def count(self, command: Count) -> Reply[Counted, int]:
        """Believe who has counted."""
        return Reply(Counted(command.quantity), command.quantity)

    @on_sourcing
    def received(self, event: Received) -> None:
        """Add them."""
        self.quantity += event.quantity

    @on_sourcing
    def picked(self, event: Picked) -> None:
        """Take them away."""
        self.quantity -= event.quantity

    @on_sourcing
    def counted(self, event: Counted) -> None:
        """Forget what was on record."""
        self.quantity = event.quantity


def stock_domain() -> Domain:
    """Return a domain of its own for each program, and each test."""
    return Domain([Shelf])
