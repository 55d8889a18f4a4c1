"""The check after a replay: what the file says, worked out anew, against what the store and the projections hold."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fleet_domain import CHECK_INTERVAL, CheckScheduled, FlightLogged, WorkOrderOpened, work_order_id
from flight_data import Flight
from trio_wow.messages import AggregateId, DomainEventStream

__all__ = ["differences"]


def differences(
    flights: Sequence[Flight],
    streams: Iterable[DomainEventStream],
    minutes_by_carrier: Mapping[str, int],
    departures_by_airport: Mapping[str, int],
) -> list[str]:
    """Compare a complete replay with its file. No difference: an empty list.

    Args:
        flights: the accepted rows of the file, in order.
        streams: all streams of the store, in order.
        minutes_by_carrier: the projection's.
        departures_by_airport: the projection's.
    """
    versions: dict[AggregateId, list[int]] = {}
    logged: dict[str, list[str]] = {}
    opened: Counter[str] = Counter()
    scheduled: Counter[str] = Counter()
    for stream in streams:
        own_id = stream.aggregate_id.id
        versions.setdefault(stream.aggregate_id, []).append(stream.version)
        for event in stream.events:
            if isinstance(event, FlightLogged):
                logged.setdefault(own_id, []).append(
                    _flight(stream.request_id, event.carrier, event.origin, event.minutes)
                )
            elif isinstance(event, WorkOrderOpened):
                opened[own_id] += 1
            elif isinstance(event, CheckScheduled):
                scheduled[work_order_id(own_id, event.number)] += 1

    expected: dict[str, list[str]] = {}
    minutes_by_tail: Counter[str] = Counter()
    minutes: Counter[str] = Counter()
    departures: Counter[str] = Counter()
    for flight in flights:
        expected.setdefault(flight.tail, []).append(
            _flight(flight.request_id, flight.carrier, flight.origin, flight.minutes)
        )
        minutes_by_tail[flight.tail] += flight.minutes
        minutes[flight.carrier] += flight.minutes
        departures[flight.origin] += 1
    orders = Counter(
        work_order_id(tail, number)
        for tail, total in minutes_by_tail.items()
        for number in range(1, total // CHECK_INTERVAL + 1)
    )
    return [
        *_flights_differ(expected, logged),
        *_versions_differ(versions),
        *_counts_differ("minutes of carrier", minutes, minutes_by_carrier),
        *_counts_differ("departures from", departures, departures_by_airport),
        *_counts_differ("work order", orders, opened),
        *_counts_differ("check scheduled for work order", orders, scheduled),
    ]


def _flight(request_id: str, carrier: str, origin: str, minutes: int) -> str:
    return f"{request_id} ({carrier} from {origin}, {minutes} minutes)"


def _flights_differ(expected: Mapping[str, Sequence[str]], logged: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for tail in sorted(expected.keys() | logged.keys()):
        wanted, found = expected.get(tail, ()), logged.get(tail, ())
        if wanted == found:
            continue
        counted = list(_counts_differ(f"flight of {tail},", Counter(wanted), Counter(found)))
        yield from counted or [f"the flights of {tail} are recorded in another order than that of the file"]


def _versions_differ(versions: Mapping[AggregateId, Sequence[int]]) -> Iterator[str]:
    for aggregate_id, found in versions.items():
        if list(found) != list(range(1, len(found) + 1)):
            yield f"the versions of {aggregate_id} do not run from 1 to {len(found)}: {list(found)}"


def _counts_differ(what: str, expected: Mapping[str, int], found: Mapping[str, int]) -> Iterator[str]:
    for key in sorted(expected.keys() | found.keys()):
        wanted, counted = expected.get(key, 0), found.get(key, 0)
        if wanted != counted:
            yield f"{what} {key}: recorded {counted:,}, but the file says {wanted:,}"
