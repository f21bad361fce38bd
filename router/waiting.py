"""Requests waiting for a worker, oldest first; one that comes back keeps its place."""

import heapq
import math
from collections.abc import Iterator

from twopool.router.attempts import Flight

_MAX_RETRY_AFTER_S = 60


def retry_after_s(oldest_wait_s: float) -> int:
    """When to come back to a queue that is full: it takes about as long as the one whose turn is next has waited."""
    return min(max(1, math.ceil(oldest_wait_s)), _MAX_RETRY_AFTER_S)


class WaitQueue:
    """First come, first served by ``Flight.order``."""

    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        """A snapshot, in no particular order."""
        return iter(list(self._flights.values()))

    def __contains__(self, flight: Flight) -> bool:
        return flight.order in self._flights

    def add(self, flight: Flight) -> None:
        if flight.order not in self._flights:
            self._flights[flight.order] = flight
            heapq.heappush(self._heap, flight.order)

    def remove(self, flight: Flight) -> None:
        """Idempotent."""
        self._flights.pop(flight.order, None)

    def first(self) -> Flight | None:
        while self._heap and self._heap[0] not in self._flights:
            heapq.heappop(self._heap)
        return self._flights[self._heap[0]] if self._heap else None


class Deadlines:
    """Which requests are over their time. Finished ones are let go of at once: kept for their deadline, thousands of
    them would be dead weight in memory and for the garbage collector.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._flights: dict[int, Flight] = {}

    def add(self, flight: Flight) -> None:
        self._flights[flight.order] = flight
        heapq.heappush(self._heap, (flight.deadline_s, flight.order))

    def remove(self, flight: Flight) -> None:
        """Idempotent."""
        self._flights.pop(flight.order, None)
        if len(self._heap) > 2 * len(self._flights) + 1024:
            self._heap = [entry for entry in self._heap if entry[1] in self._flights]
            heapq.heapify(self._heap)

    def expired(self, now_s: float) -> list[Flight]:
        """Each flight once."""
        flights = []
        while self._heap and self._heap[0][0] <= now_s:
            flight = self._flights.pop(heapq.heappop(self._heap)[1], None)
            if flight is not None:
                flights.append(flight)
        return flights
