"""Requests waiting for a worker, oldest first; one that comes back keeps its place."""

import heapq
from collections.abc import Iterator

from twopool.router.attempts import Flight, Phase


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
    """Which requests are over their time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Flight]] = []

    def add(self, flight: Flight) -> None:
        heapq.heappush(self._heap, (flight.deadline_s, flight.order, flight))

    def expired(self, now_s: float) -> list[Flight]:
        """Each flight once, finished ones included."""
        flights = []
        while self._heap and self._heap[0][0] <= now_s:
            flights.append(heapq.heappop(self._heap)[2])
        return flights

    def forget_finished(self, num_live: int) -> None:
        """Let go of finished flights once they are the majority."""
        if len(self._heap) > 2 * num_live + 1024:
            self._heap = [entry for entry in self._heap if entry[2].phase is not Phase.DONE]
            heapq.heapify(self._heap)
