"""The ranks of a tensor-parallel group as threads of one process: cheap, and no less strict."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from twopool.kernels.collectives import SharedMemoryCollective, create_segment
from twopool.protocol.errors import CollectiveError

Result = TypeVar("Result")


def shared_collectives(
    size: int, max_bytes: int = 1 << 20, *, timeout_s: float = 60.0, spin_us: int | None = 0
) -> list[SharedMemoryCollective]:
    """One for each rank, over a segment of their own; spin_us is 0 as threads may outnumber the CPUs."""
    fd = create_segment(size, max_bytes)
    try:
        return [
            SharedMemoryCollective(fd, rank, size, max_bytes, timeout_s=timeout_s, spin_us=spin_us)
            for rank in range(size)
        ]
    finally:
        os.close(fd)


def on_every_rank(size: int, call: Callable[[int], Result]) -> list[Result]:
    """``call(rank)`` on all ranks at once -> what each returned, or the error that made the others' waits fail."""
    with ThreadPoolExecutor(size) as threads:
        calls = [threads.submit(call, rank) for rank in range(size)]
    errors = [error for one in calls if (error := one.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, CollectiveError)), errors[0])
    return [call.result() for call in calls]
