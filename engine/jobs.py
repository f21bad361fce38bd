"""What a role has open: its jobs by attempt."""

import asyncio
from typing import Generic, TypeVar

from twopool.engine.requests import AttemptKey

J = TypeVar("J")


class JobTable(Generic[J]):
    """A job is in here as long as anything is held for it."""

    def __init__(self) -> None:
        self._jobs: dict[AttemptKey, J] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._jobs

    def add(self, key: AttemptKey, job: J) -> None:
        self._jobs[key] = job
        self._empty.clear()

    def get(self, key: AttemptKey) -> J | None:
        return self._jobs.get(key)

    def pop(self, key: AttemptKey) -> J | None:
        """Take a job out; ``None`` when it is out already, so that only one of two endings counts."""
        job = self._jobs.pop(key, None)
        if not self._jobs:
            self._empty.set()
        return job

    def all(self) -> list[J]:
        """A snapshot: jobs may leave while the caller walks it."""
        return list(self._jobs.values())

    async def emptied(self) -> None:
        """Wait until nothing is open."""
        await self._empty.wait()
