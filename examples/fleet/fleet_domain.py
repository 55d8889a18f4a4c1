"""The fleet's domain: aircraft that log flights, work orders for the checks that fall due, and three projections."""

from collections import Counter

from attrs import define, frozen

from trio_wow import (
    CommandRejectedError,
    DomainEvent,
    StateEvent,
    aggregate,
    on_command,
    on_event,
    on_sourcing,
    on_state_event,
    projection,
    saga,
)

CHECK_INTERVAL = 3_000
"""Minutes in the air after which an aircraft is due for its next check."""


@frozen
class LogFlight:
    """A flight has been flown by the aircraft `id`."""

    id: str
    carrier: str
    origin: str
    minutes: int


@frozen
class FlightLogged:
    """The aircraft has flown."""

    carrier: str
    origin: str
    minutes: int


@frozen
class CheckDue:
    """The aircraft's total has reached `number` times the check interval."""

    number: int


@frozen
class ScheduleCheck:
    """A work order for check `number` of the aircraft `id` is open."""

    id: str
    number: int


@frozen
class CheckScheduled:
    """The aircraft knows of the work order for its check `number`."""

    number: int


@frozen
class OpenWorkOrder:
    """The aircraft needs a work order, `id`, for its check `number`."""

    id: str
    aircraft: str
    number: int


@frozen
class WorkOrderOpened:
    """The work order is open."""

    aircraft: str
    number: int


def work_order_id(aircraft: str, number: int) -> str:
    """Return the ID of the work order for one check of one aircraft."""
    return f"{aircraft}-{number}"


@aggregate(context="fleet", snapshot_every=20)
@define
class Aircraft:
    """An aircraft; its ID is the tail number."""

    id: str
    minutes: int = 0
    checks_scheduled: int = 0

    @on_command
    def log_flight(self, command: LogFlight) -> list[FlightLogged | CheckDue]:
        """Log a flight, and every check whose multiple of the interval it reaches."""
        before, after = self.minutes, self.minutes + command.minutes
        checks = range(before // CHECK_INTERVAL + 1, after // CHECK_INTERVAL + 1)
        return [FlightLogged(command.carrier, command.origin, command.minutes), *map(CheckDue, checks)]

    @on_command
    def schedule_check(self, command: ScheduleCheck) -> CheckScheduled:
        """Take note of the work order."""
        return CheckScheduled(command.number)

    @on_sourcing
    def flight_logged(self, event: FlightLogged) -> None:
        """Add up."""
        self.minutes += event.minutes

    @on_sourcing
    def check_due(self, event: CheckDue) -> None:
        """Nothing: which checks are due follows from the minutes."""

    @on_sourcing
    def check_scheduled(self, event: CheckScheduled) -> None:  # noqa: ARG002 - the annotation says which event
        """Count."""
        self.checks_scheduled += 1


@aggregate(context="maintenance")
@define
class WorkOrder:
    """A work order for one check of one aircraft; its ID is `<tail number>-<check number>`."""

    id: str
    is_open: bool = False

    @on_command
    def open(self, command: OpenWorkOrder) -> WorkOrderOpened:
        """Open it, once."""
        if self.is_open:
            raise CommandRejectedError(f"work order {self.id} is already open; each check has one")
        return WorkOrderOpened(command.aircraft, command.number)

    @on_sourcing
    def opened(self, event: WorkOrderOpened) -> None:  # noqa: ARG002 - the annotation says which event
        """Remember it."""
        self.is_open = True


@saga
class Maintenance:
    """Leads from the aircraft to maintenance and back: a check that is due gets a work order, then is scheduled."""

    @on_event
    def check_due(self, event: DomainEvent[CheckDue]) -> OpenWorkOrder:
        """Ask for a work order."""
        tail, number = event.aggregate_id.id, event.body.number
        return OpenWorkOrder(work_order_id(tail, number), tail, number)

    @on_event
    def work_order_opened(self, event: WorkOrderOpened) -> ScheduleCheck:
        """Tell the aircraft."""
        return ScheduleCheck(event.aircraft, event.number)


@projection
class MinutesByCarrier:
    """Minutes in the air of each carrier."""

    def __init__(self) -> None:
        self.minutes: Counter[str] = Counter()

    @on_event
    def flight_logged(self, event: FlightLogged) -> None:
        """Add up."""
        self.minutes[event.carrier] += event.minutes


@projection
class DeparturesByAirport:
    """Departures from each airport."""

    def __init__(self) -> None:
        self.departures: Counter[str] = Counter()

    @on_event
    def flight_logged(self, event: FlightLogged) -> None:
        """Count."""
        self.departures[event.origin] += 1


@projection
class MinutesByAircraft:
    """Minutes in the air of each aircraft, from its state."""

    def __init__(self) -> None:
        self.minutes: Counter[str] = Counter()

    @on_state_event
    def aircraft(self, event: StateEvent[Aircraft]) -> None:
        """Take over the total."""
        self.minutes[event.aggregate_id.id] = event.state.minutes
