"""KV of another dtype, converted on its way: read into staging memory as it is, then written to the pool as ours.

Only where a worker asks for it (``--kv-convert-dtype``): tokens then depend on numbers that were rounded twice.
"""

import numpy as np
import torch

from twopool.kv_transfer.agent import Post, PreparedList, ReadAgent
from twopool.kv_transfer.dtypes import TORCH_DTYPES, convert_some, most_at_once
from twopool.kv_transfer.layout import Conversion, Index, StridedList
from twopool.kv_transfer.staging import Staging, StagingPool
from twopool.protocol.geometry import DTYPE_BYTES


class Converter:
    """Posts READs that are converted when they have landed. Belongs to the reading thread; ``pool`` is flat uint8."""

    def __init__(self, agent: ReadAgent, pool: torch.Tensor) -> None:
        self._agent = agent
        self._pool = pool
        self._staging = StagingPool(agent, pool.device)

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
        staging = self._staging.take(remote_length * len(remote_index))
        try:
            post = self._agent.post(
                local=staging.prepared(self._agent, remote_length),
                local_index=np.arange(len(remote_index), dtype=np.int32),
                remote=remote,
                remote_index=remote_index,
            )
        except BaseException:
            self._staging.give_back(staging)
            raise
        return _ConvertedPost(self, post, self._staging, staging, local, local_index, conversion)

    def convert(self, staging: Staging, local: StridedList, local_index: Index, conversion: Conversion) -> None:
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


class _ConvertedPost:
    def __init__(
        self,
        converter: Converter,
        post: Post,
        pool: StagingPool,
        staging: Staging,
        local: StridedList,
        local_index: Index,
        conversion: Conversion,
    ) -> None:
        self._converter = converter
        self._post = post
        self._pool = pool
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
            self._pool.give_back(self._staging)
