"""KV of another dtype, converted on its way: read into staging memory as it is, then written to the pool as ours.

Only where a worker asks for it (``--kv-convert-dtype``): tokens then depend on numbers that were rounded twice.
"""

from dataclasses import dataclass

import numpy as np
import torch

from twopool.kv_transfer.agent import Post, PreparedList, ReadAgent
from twopool.kv_transfer.dtypes import TORCH_DTYPES, convert_some, most_at_once
from twopool.kv_transfer.layout import Conversion, Index, StridedList
from twopool.protocol.geometry import DTYPE_BYTES

STAGING_BYTES = 2 * 1024 * 1024
"""Most bytes of one READ that is converted (or one run): converting holds the reading thread up for about a ms."""


class Converter:
    """Posts READs that are converted when they have landed. Belongs to the reading thread; ``pool`` is flat uint8."""

    def __init__(self, agent: ReadAgent, pool: torch.Tensor) -> None:
        self._agent = agent
        self._pool = pool
        self._free: list[_Staging] = []

    def post(
        self,
        *,
        local: StridedList,
        local_index: Index,
        remote: PreparedList,
        remote_length: int,
        remote_index: Index,
        conversion: Conversion,
    ) -> Post:
        """As ``ReadAgent.post``; ``local`` are runs of the pool, ``remote_length`` is what a run has over there."""
        staging = self._take(remote_length * len(remote_index))
        try:
            post = self._agent.post(
                local=staging.prepared(self._agent, remote_length),
                local_index=np.arange(len(remote_index), dtype=np.int32),
                remote=remote,
                remote_index=remote_index,
            )
        except BaseException:
            self._free.append(staging)
            raise
        return _ConvertedPost(self, post, staging, local, local_index, conversion)

    def convert(self, staging: "_Staging", local: StridedList, local_index: Index, conversion: Conversion) -> None:
        """Raises ``KvConversionError`` where a number has no place in the pool's dtype; some are written then."""
        source, target = TORCH_DTYPES[conversion.source], TORCH_DTYPES[conversion.target]
        num_elements = local.length // DTYPE_BYTES[conversion.target]
        count = len(local_index)
        landed = staging.memory[: count * num_elements * source.itemsize].view(source).view(count, num_elements)
        runs = self._pool.as_strided((local.count, local.length), (local.stride, 1), local.offset).view(target)
        at_once = most_at_once(landed)
        rows = max(1, at_once // num_elements)
        index = torch.from_numpy(local_index.astype(np.int64)).to(self._pool.device)
        for row in range(0, count, rows):
            for start in range(0, num_elements, at_once):
                part = landed[row : row + rows, start : start + at_once]
                runs[:, start : start + at_once].index_copy_(0, index[row : row + rows], convert_some(part, target))

    def give_back(self, staging: "_Staging") -> None:
        self._free.append(staging)

    def _take(self, num_bytes: int) -> "_Staging":
        for number, staging in enumerate(self._free):
            if staging.memory.nbytes >= num_bytes:
                return self._free.pop(number)
        memory = torch.zeros(max(num_bytes, STAGING_BYTES), dtype=torch.uint8, device=self._pool.device)
        self._agent.register(memory)
        return _Staging(memory, {})


@dataclass(frozen=True, eq=False)
class _Staging:
    memory: torch.Tensor
    lists: dict[int, PreparedList]
    """By the length of their runs, side by side."""

    def prepared(self, agent: ReadAgent, length: int) -> PreparedList:
        if length not in self.lists:
            runs = StridedList(0, length, length, self.memory.nbytes // length)
            self.lists[length] = agent.prepare_local(self.memory.data_ptr(), runs)
        return self.lists[length]


class _ConvertedPost:
    def __init__(
        self,
        converter: Converter,
        post: Post,
        staging: _Staging,
        local: StridedList,
        local_index: Index,
        conversion: Conversion,
    ) -> None:
        self._converter = converter
        self._post = post
        self._staging = staging
        self._target = (local, local_index, conversion)

    def poll(self) -> bool:
        if not self._post.poll():
            return False
        self._converter.convert(self._staging, *self._target)
        return True

    def release(self) -> None:
        try:
            self._post.release()
        finally:
            self._converter.give_back(self._staging)
