"""A histogram of plain numbers for one thread: an observation is a binary search and two additions, where
prometheus_client's own takes locks.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily, Metric

_FEW = 12
"""Up to here a search a value is cheaper."""


class Histogram:
    """Counts by upper bound (inclusive), and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: list[float]) -> None:
        """Many at once, at the cost of a sort and one search a bound. Sorts ``values``."""
        if len(values) < _FEW:
            for value in values:
                self.observe(value)
            return
        values.sort()
        counts = self._counts
        before = 0
        for index, bound in enumerate(self._bounds):
            upto = bisect_right(values, bound, before)
            counts[index] += upto - before
            before = upto
        counts[-1] += len(values) - before
        self._sum += sum(values)

    @property
    def count(self) -> int:
        return sum(self._counts)

    def family(self, name: str, documentation: str) -> Metric:
        buckets, sum_value = self.buckets()
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=sum_value)

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound as Prometheus wants them, and the sum."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == math.inf else repr(float(bound)), total))
        return buckets, self._sum
