"""How many requests wait for workers in each of a router's processes, known to all of them.

One page of memory that the parent makes before it forks. Each process writes its own number only, so there is nothing
to lock; two that look in the same instant may both take the last place, so the bound holds but for as many requests as
there are other processes.
"""

import mmap

_NUM_BYTES = 8


class QueueLengths:
    """Of ``num_processes``, all of them 0."""

    def __init__(self, num_processes: int) -> None:
        # Anonymous and shared: forked children have the same page.
        self._lengths = memoryview(mmap.mmap(-1, num_processes * _NUM_BYTES)).cast("q")

    def of(self, index: int) -> "QueueLength":
        return QueueLength(self._lengths, index)


class QueueLength:
    """One process's number."""

    def __init__(self, lengths: "memoryview[int]", index: int) -> None:
        self._lengths = lengths
        self._index = index

    def set(self, length: int) -> None:
        """Only in that process, or when it is gone."""
        self._lengths[self._index] = length

    def everywhere(self) -> int:
        """The sum over all processes."""
        return sum(self._lengths)
