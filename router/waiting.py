"""Requests waiting for a worker, oldest first; one that comes back keeps its place.

A worker says that it is full, never that it is not. So a request that was refused once is still waiting while it is
tried again, until tokens come: else each attempt in vain would make room for one more, and the queue had no bound.
"""

import heapq
import math
from collections.abc import Iterator

from twopool.router.attempts import Flight
from twopool.router.queue_lengths import QueueLength

_MAX_RETRY_AFTER_S = 60


def retry_after_s(oldest_wait_s: float) -> int:
    """When to come back to a queue that is full: it takes about as long as the one whose turn is next has waited."""
    return min(max(1, math.ceil(oldest_wait_s)), _MAX_RETRY_AFTER_S)


class WaitQueue:
    """First come, first served by ``Flight.order``."""

    def __init__(self, length: QueueLength | None = None) -> None:
        """``length`` is where other processes of the same router see how many wait here."""
        self._length = length
        self._on_trial: set[int] = set()  # granted after a refusal
        self._flights: dict[int, Flight] = {}
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def num_everywhere(self) -> int:
        """How many wait here and in the other processes of this router, those on trial with them."""
        if self._length is not None:
            return self._length.everywhere()
        return len(self._flights) + len(self._on_trial)

    def __iter__(self) -> Iterator[Flight]:
        """A snapshot, in no particular order."""
        return iter(list(self._flights.values()))

    def __contains__(self, flight: Flight) -> bool:
        return flight.order in self._flights

    def add(self, flight: Flight) -> None:
        if flight.order not in self._flights:
            self._flights[flight.order] = flight
            heapq.heappush(self._heap, flight.order)
            self._on_trial.discard(flight.order)
            self._tell()

    def grant(self, flight: Flight) -> None:
        """Its turn has come: no longer in line, but on trial where it was refused before."""
        del self._flights[flight.order]
        if flight.refused:
            self._on_trial.add(flight.order)
        self._tell()

    def remove(self, flight: Flight) -> None:
        """It does not wait any more: it has tokens, or is over. Idempotent."""
        self._on_trial.discard(flight.order)
        self._flights.pop(flight.order, None)
        self._tell()

    def newest(self) -> Flight | None:
        """The one that came last of those whose answer has not begun."""
        orders = [order for order, flight in self._flights.items() if not flight.started]
        return self._flights[max(orders)] if orders else None

    def first(self) -> Flight | None:
        while self._heap and self._heap[0] not in self._flights:
            heapq.heappop(self._heap)
        return self._flights[self._heap[0]] if self._heap else None

    def _tell(self) -> None:
        if self._length is not None:
            self._length.set(len(self._flights) + len(self._on_trial))


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
