"""Registered memory for READs whose bytes do not land where they belong at once. Belongs to the reading thread."""

from dataclasses import dataclass

import torch

from twopool.kv_transfer.agent import PreparedList, ReadAgent
from twopool.kv_transfer.layout import StridedList

STAGING_BYTES = 2 * 1024 * 1024
"""What one piece holds, or more for a READ of more: a working set that caches keep."""


@dataclass(frozen=True, eq=False)
class Staging:
    """``memory`` is flat uint8. ``lists``: by the length of their runs, side by side."""

    memory: torch.Tensor
    lists: dict[int, PreparedList]

    def prepared(self, agent: ReadAgent, length: int) -> PreparedList:
        if length not in self.lists:
            runs = StridedList(0, length, length, self.memory.nbytes // length)
            self.lists[length] = agent.prepare_local(self.memory.data_ptr(), runs)
        return self.lists[length]


class StagingPool:
    """Pieces of staging memory on ``device``, made when needed and kept; registered with ``agent``."""

    def __init__(self, agent: ReadAgent, device: torch.device) -> None:
        self._agent = agent
        self._device = device
        self._free: list[Staging] = []

    def take(self, num_bytes: int) -> Staging:
        for number, staging in enumerate(self._free):
            if staging.memory.nbytes >= num_bytes:
                return self._free.pop(number)
        memory = torch.zeros(max(num_bytes, STAGING_BYTES), dtype=torch.uint8, device=self._device)
        self._agent.register(memory)
        return Staging(memory, {})

    def give_back(self, staging: Staging) -> None:
        """Once nothing writes it any more."""
        self._free.append(staging)
