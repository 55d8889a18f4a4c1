import pytest
from attrs import evolve

from fleet_domain import (
    Aircraft,
    CheckDue,
    CheckScheduled,
    DeparturesByAirport,
    FlightLogged,
    LogFlight,
    Maintenance,
    MinutesByCarrier,
    OpenWorkOrder,
    ScheduleCheck,
    WorkOrder,
    WorkOrderOpened,
)
from trio_wow import AggregateId, App, CommandRejectedError, DomainEvent
from trio_wow.messages import DomainEventStream
from trio_wow.testing import given

TAIL = "N14228"


def log(minutes: int) -> LogFlight:
    return LogFlight(TAIL, "UA", "EWR", minutes)


def logged(minutes: int) -> FlightLogged:
    return FlightLogged("UA", "EWR", minutes)


def test_a_flight_is_logged() -> None:
    given(Aircraft, TAIL).when(log(227)).expect_events(logged(227)).expect_state(minutes=227)


@pytest.mark.parametrize(
    ("before", "minutes", "due"),
    [
        pytest.param(2_800, 199, [], id="one minute short"),
        pytest.param(2_800, 200, [1], id="reaches it exactly"),
        pytest.param(2_800, 201, [1], id="passes it"),
        pytest.param(3_000, 1, [], id="has reached it before"),
        pytest.param(5_900, 100, [2], id="the second"),
        pytest.param(2_999, 3_002, [1, 2], id="two in one flight"),
        pytest.param(0, 9_000, [1, 2, 3], id="three, the last exactly"),
    ],
)
def test_a_check_is_due_at_each_multiple_of_the_interval(before: int, minutes: int, due: list[int]) -> None:
    (
        given(Aircraft, TAIL, logged(before))
        .when(log(minutes))
        .expect_events(logged(minutes), *(CheckDue(number) for number in due))
        .expect_state(minutes=before + minutes)
    )


def test_a_check_is_scheduled() -> None:
    (
        given(Aircraft, TAIL, logged(3_000), CheckDue(1))
        .when(ScheduleCheck(TAIL, 1))
        .expect_events(CheckScheduled(1))
        .expect_state(minutes=3_000, checks_scheduled=1)
    )


def test_a_work_order_is_opened_once() -> None:
    order = OpenWorkOrder("N14228-1", TAIL, 1)
    (
        given(WorkOrder, "N14228-1")
        .when(order)
        .expect_events(WorkOrderOpened(TAIL, 1))
        .expect_state(is_open=True)
        .when(order)
        .expect_error(CommandRejectedError, "N14228-1 is already open")
    )


def test_the_saga_leads_to_maintenance_and_back() -> None:
    stream = DomainEventStream(
        aggregate_id=AggregateId("fleet", "aircraft", TAIL),
        version=9,
        events=(logged(300), CheckDue(2)),
        command_id="c",
        request_id="r",
    )
    saga = Maintenance()
    assert saga.check_due(DomainEvent(CheckDue(2), 2, stream)) == OpenWorkOrder("N14228-2", TAIL, 2)
    assert saga.work_order_opened(WorkOrderOpened(TAIL, 2)) == ScheduleCheck(TAIL, 2)


def test_the_projections_add_up() -> None:
    minutes, departures = MinutesByCarrier(), DeparturesByAirport()
    for event in (logged(100), logged(50), evolve(logged(7), carrier="AA"), evolve(logged(1), origin="JFK")):
        minutes.flight_logged(event)
        departures.flight_logged(event)
    assert minutes.minutes == {"UA": 151, "AA": 7}
    assert departures.departures == {"EWR": 3, "JFK": 1}


async def test_in_a_runtime_one_flight_leads_to_its_work_orders_and_back() -> None:
    minutes = MinutesByCarrier()
    app = App([Aircraft, WorkOrder], [minutes, Maintenance()])
    async with app.serving(app.runtime(shutdown_quiet_period=0)) as gateway:
        (await gateway.send_and_wait(log(6_500))).raise_for_error()
    streams = [each.stream for each in await app.store.read_all(0, 100)]
    aircraft = [stream.events for stream in streams if stream.aggregate_id.context == "fleet"]
    orders = [stream.aggregate_id.id for stream in streams if stream.aggregate_id.context == "maintenance"]
    assert aircraft[0] == (logged(6_500), CheckDue(1), CheckDue(2))
    assert sorted(event.number for (event,) in aircraft[1:]) == [1, 2]
    assert sorted(orders) == ["N14228-1", "N14228-2"]
    assert minutes.minutes == {"UA": 6_500}
