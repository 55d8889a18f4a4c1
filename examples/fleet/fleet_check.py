"""The check after a replay: what the file says, worked out anew, against what the store and the projections hold.

Both are read row by row, and nothing is kept of a row but what it adds to its aircraft, carrier or airport.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from hashlib import blake2b

from fleet_domain import CHECK_INTERVAL, CheckScheduled, FlightLogged, WorkOrderOpened, work_order_id
from flight_data import Flight
from trio_wow.messages import AggregateId, DomainEventStream

__all__ = ["DETAILED", "FleetCheck", "FlightList"]

DETAILED = 20
"""Aircraft whose flights are compared one by one when they differ."""


class FleetCheck:
    """Takes the flights of a file and the streams of a store, each in order, and tells how they differ.

    Attributes:
        flights: how many flights are recorded.
        work_orders: how many work orders are recorded as opened.
    """

    def __init__(self) -> None:
        self._expected = _Trails()
        self._logged = _Trails()
        self._minutes_by_tail: Counter[str] = Counter()
        self._minutes: Counter[str] = Counter()
        self._departures: Counter[str] = Counter()
        self._versions: dict[AggregateId, int] = {}
        self._out_of_order: dict[AggregateId, str] = {}
        self._opened: Counter[str] = Counter()
        self._scheduled: Counter[str] = Counter()
        self.flights = 0

    @property
    def work_orders(self) -> int:
        """How many work orders are recorded as opened."""
        return self._opened.total()

    def expect(self, flight: Flight) -> None:
        """Take the next flight of the file."""
        self._expected.add(flight.tail, _told(flight))
        self._minutes_by_tail[flight.tail] += flight.minutes
        self._minutes[flight.carrier] += flight.minutes
        self._departures[flight.origin] += 1

    def record(self, stream: DomainEventStream) -> None:
        """Take the next stream of the store."""
        aggregate_id, last = stream.aggregate_id, self._versions.get(stream.aggregate_id, 0)
        if stream.version != last + 1:
            self._out_of_order.setdefault(aggregate_id, f"version {stream.version} of {aggregate_id} follows {last}")
        self._versions[aggregate_id] = stream.version
        for event in stream.events:
            if isinstance(event, FlightLogged):
                self.flights += 1
                self._logged.add(aggregate_id.id, _recorded(stream, event))
            elif isinstance(event, WorkOrderOpened):
                self._opened[aggregate_id.id] += 1
            elif isinstance(event, CheckScheduled):
                self._scheduled[work_order_id(aggregate_id.id, event.number)] += 1

    def suspects(self) -> list[str]:
        """Return the tail numbers of aircraft whose flights differ."""
        return self._expected.differing(self._logged)

    def differences(
        self,
        minutes_by_carrier: Mapping[str, int],
        departures_by_airport: Mapping[str, int],
        minutes_by_aircraft: Mapping[str, int],
        details: "FlightList",
    ) -> list[str]:
        """Compare. No difference: an empty list.

        Args:
            minutes_by_carrier: the projection's.
            departures_by_airport: the projection's.
            minutes_by_aircraft: the projection's.
            details: the flights of the first suspects, in both.
        """
        orders = Counter(
            work_order_id(tail, number)
            for tail, total in self._minutes_by_tail.items()
            for number in range(1, total // CHECK_INTERVAL + 1)
        )
        rest = [tail for tail in self.suspects() if tail not in details.tails]
        return [
            *details.differences(),
            *([f"the flights of {len(rest):,} more aircraft differ, of {rest[0]} to begin with"] if rest else []),
            *self._out_of_order.values(),
            *_counts_differ("minutes of carrier", self._minutes, minutes_by_carrier),
            *_counts_differ("departures from", self._departures, departures_by_airport),
            *_counts_differ("minutes of aircraft", self._minutes_by_tail, minutes_by_aircraft),
            *_counts_differ("work order", orders, self._opened),
            *_counts_differ("check scheduled for work order", orders, self._scheduled),
        ]


class FlightList:
    """The flights of a few aircraft, one by one, in the file and in the store.

    Attributes:
        tails: the aircraft.
    """

    def __init__(self, tails: Collection[str]) -> None:
        self.tails = tails
        self._expected: dict[str, list[str]] = {tail: [] for tail in tails}
        self._logged: dict[str, list[str]] = {tail: [] for tail in tails}

    def expect(self, flight: Flight) -> None:
        """Take the next flight of the file."""
        if flight.tail in self._expected:
            self._expected[flight.tail].append(_told(flight))

    def record(self, stream: DomainEventStream) -> None:
        """Take the next stream of the store."""
        tail = stream.aggregate_id.id
        if tail in self._logged:
            self._logged[tail] += [
                _recorded(stream, event) for event in stream.events if isinstance(event, FlightLogged)
            ]

    def differences(self) -> Iterator[str]:
        """Yield what is missing, too much, or out of order."""
        for tail in sorted(self.tails):
            wanted, found = self._expected[tail], self._logged[tail]
            if wanted == found:
                continue
            counted = list(_counts_differ(f"flight of {tail},", Counter(wanted), Counter(found)))
            yield from counted or [f"the flights of {tail} are recorded in another order than that of the file"]


class _Trails:
    """For each aircraft a fingerprint of its flights in their order."""

    def __init__(self) -> None:
        self._trails: dict[str, bytes] = {}

    def add(self, tail: str, flight: str) -> None:
        before = self._trails.get(tail, b"")
        self._trails[tail] = blake2b(before + flight.encode(), digest_size=16).digest()

    def differing(self, other: "_Trails") -> list[str]:
        tails = self._trails.keys() | other._trails.keys()
        return sorted(tail for tail in tails if self._trails.get(tail) != other._trails.get(tail))


def _told(flight: Flight) -> str:
    return f"{flight.request_id} ({flight.carrier} from {flight.origin}, {flight.minutes} minutes)"


def _recorded(stream: DomainEventStream, event: FlightLogged) -> str:
    return f"{stream.request_id} ({event.carrier} from {event.origin}, {event.minutes} minutes)"


def _counts_differ(what: str, expected: Mapping[str, int], found: Mapping[str, int]) -> Iterator[str]:
    for key in sorted(expected.keys() | found.keys()):
        wanted, counted = expected.get(key, 0), found.get(key, 0)
        if wanted != counted:
            yield f"{what} {key}: recorded {counted:,}, but the file says {wanted:,}"
