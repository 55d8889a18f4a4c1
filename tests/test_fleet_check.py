from collections import Counter
from collections.abc import Sequence

import pytest
from attrs import evolve

from fleet_check import DETAILED, FleetCheck, FlightList
from fleet_domain import CheckDue, CheckScheduled, FlightLogged, WorkOrderOpened
from flight_data import Flight
from trio_wow import AggregateId
from trio_wow.messages import DomainEventStream

FLIGHTS = [
    Flight(2, "N1", "UA", "EWR", 2_000, "UA-1"),
    Flight(3, "N2", "AA", "JFK", 500, "AA-1"),
    Flight(4, "N1", "UA", "LGA", 1_000, "UA-2"),
]


class Recording:
    """What a replay of `FLIGHTS` without a fault leaves behind, to be damaged by a test."""

    def __init__(self) -> None:
        self.streams = [
            stream("N1", 1, FlightLogged("UA", "EWR", 2_000), request="UA-1"),
            stream("N2", 1, FlightLogged("AA", "JFK", 500), request="AA-1"),
            stream("N1", 2, FlightLogged("UA", "LGA", 1_000), CheckDue(1), request="UA-2"),
            stream("N1-1", 1, WorkOrderOpened("N1", 1), aggregate=("maintenance", "work_order")),
            stream("N1", 3, CheckScheduled(1)),
        ]
        self.minutes = Counter(UA=3_000, AA=500)
        self.departures = Counter(EWR=1, JFK=1, LGA=1)
        self.aircraft = Counter(N1=3_000, N2=500)

    def differences(self, flights: Sequence[Flight] = FLIGHTS) -> list[str]:
        check = FleetCheck()
        self.tell(check, flights)
        details = FlightList(check.suspects()[:DETAILED])
        self.tell(details, flights)
        return check.differences(self.minutes, self.departures, self.aircraft, details)

    def tell(self, check: FleetCheck | FlightList, flights: Sequence[Flight]) -> None:
        for flight in flights:
            check.expect(flight)
        for each in self.streams:
            check.record(each)


def stream(
    id: str,
    version: int,
    *events: object,
    request: str = "from the saga",
    aggregate: tuple[str, str] = ("fleet", "aircraft"),
) -> DomainEventStream:
    return DomainEventStream(
        aggregate_id=AggregateId(*aggregate, id), version=version, events=events, command_id="c", request_id=request
    )


@pytest.fixture
def recording() -> Recording:
    return Recording()


def test_a_faultless_replay_has_no_difference(recording: Recording) -> None:
    assert recording.differences() == []


def test_a_lost_flight(recording: Recording) -> None:
    del recording.streams[1]
    assert recording.differences() == [
        "flight of N2, AA-1 (AA from JFK, 500 minutes): recorded 0, but the file says 1",
    ]


def test_a_doubled_flight(recording: Recording) -> None:
    recording.streams.append(evolve(recording.streams[1], version=2))
    assert recording.differences() == [
        "flight of N2, AA-1 (AA from JFK, 500 minutes): recorded 2, but the file says 1",
    ]


def test_a_changed_flight(recording: Recording) -> None:
    recording.streams[1] = stream("N2", 1, FlightLogged("AA", "JFK", 501), request="AA-1")
    assert recording.differences() == [
        "flight of N2, AA-1 (AA from JFK, 500 minutes): recorded 0, but the file says 1",
        "flight of N2, AA-1 (AA from JFK, 501 minutes): recorded 1, but the file says 0",
    ]


def test_flights_of_one_aircraft_out_of_order(recording: Recording) -> None:
    first, _, second, *_ = recording.streams
    recording.streams[0], recording.streams[2] = evolve(second, version=1), evolve(first, version=2)
    assert recording.differences() == ["the flights of N1 are recorded in another order than that of the file"]


@pytest.mark.parametrize("version", [1, 4])
def test_versions_with_a_gap_or_a_repetition(recording: Recording, version: int) -> None:
    recording.streams[4] = evolve(recording.streams[4], version=version)
    assert recording.differences() == [f"version {version} of fleet.aircraft/N1 follows 2"]


def test_wrong_minutes_of_an_aircraft(recording: Recording) -> None:
    recording.aircraft["N1"] = 1
    assert recording.differences() == ["minutes of aircraft N1: recorded 1, but the file says 3,000"]


def test_of_many_aircraft_that_differ_only_the_first_are_told_flight_by_flight(recording: Recording) -> None:
    flights = [Flight(n, f"N{n:02}", "UA", "EWR", 1, "UA-1") for n in range(10, 10 + DETAILED + 5)]
    found = recording.differences([*FLIGHTS, *flights])
    assert sum(each.startswith("flight of ") for each in found) == DETAILED
    assert "the flights of 5 more aircraft differ, of N30 to begin with" in found


def test_wrong_minutes_of_a_carrier(recording: Recording) -> None:
    recording.minutes["UA"] += 60
    recording.minutes["XX"] = 1
    assert recording.differences() == [
        "minutes of carrier UA: recorded 3,060, but the file says 3,000",
        "minutes of carrier XX: recorded 1, but the file says 0",
    ]


def test_wrong_departures_of_an_airport(recording: Recording) -> None:
    del recording.departures["LGA"]
    assert recording.differences() == ["departures from LGA: recorded 0, but the file says 1"]


def test_a_missing_work_order(recording: Recording) -> None:
    del recording.streams[3]
    assert recording.differences() == ["work order N1-1: recorded 0, but the file says 1"]


def test_a_work_order_too_many(recording: Recording) -> None:
    recording.streams.append(stream("N2-1", 1, WorkOrderOpened("N2", 1), aggregate=("maintenance", "work_order")))
    assert recording.differences() == ["work order N2-1: recorded 1, but the file says 0"]


def test_a_check_that_was_not_scheduled(recording: Recording) -> None:
    del recording.streams[4]
    assert recording.differences() == ["check scheduled for work order N1-1: recorded 0, but the file says 1"]


def test_a_check_scheduled_twice(recording: Recording) -> None:
    recording.streams.append(evolve(recording.streams[4], version=4))
    assert recording.differences() == ["check scheduled for work order N1-1: recorded 2, but the file says 1"]
