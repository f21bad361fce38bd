"""Known bytes in one block of every pool: a handshake reads them to prove that addresses, layout and epoch are right.

The bytes follow from the pool's epoch and rank alone, so a reader knows what to expect without being told.
"""

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from twopool.kv_transfer.interface import FetchRequest
from twopool.kv_transfer.layout import LayoutPlan, StridedList, plan_layout
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Epoch

Bytes = npt.NDArray[np.uint8]


def canary_bytes(epoch: Epoch, tp_rank: int, num_bytes: int) -> Bytes:
    """``[num_bytes]`` uint8 that follow from epoch and rank: a Philox stream, about 1 GB/s."""
    generator = np.random.Generator(np.random.Philox(key=[epoch, tp_rank]))
    words = generator.integers(0, 2**64, size=-(-num_bytes // 8), dtype=np.uint64)
    return words.astype("<u8", copy=False).view(np.uint8)[:num_bytes]


def fill_canary(pool: torch.Tensor, geometry: KvGeometry, block: int, epoch: Epoch) -> None:
    """Write the canary of ``epoch`` into block ``block`` of ``pool``, a flat uint8 view of the pool, on any device."""
    data = canary_bytes(epoch, geometry.tp_rank, geometry.block_bytes)
    start = block * geometry.block_bytes
    pool[start : start + geometry.block_bytes].copy_(torch.from_numpy(data))


def canary_plan(plan: LayoutPlan) -> LayoutPlan:
    """``plan`` with a single local block, where canary reads land, in the peer's dtype: its bytes are no numbers."""
    return plan_layout(_landing(plan), plan.remotes, spread=plan.spread)


def canary_request(plan: LayoutPlan, canary_block: int) -> FetchRequest:
    """Reads a peer's canary block, all layers, as far as one block of either side goes, into local block 0."""
    return FetchRequest(
        remote_block_ids=np.array([canary_block], dtype=np.int32),
        local_block_ids=np.zeros(1, dtype=np.int32),
        start_token=0,
        end_token=min(plan.local.block_size, plan.remotes[0].block_size),
        layer_start=0,
        layer_end=plan.local.num_layers,
    )


def wrong_canary_ranks(plan: LayoutPlan, epoch: Epoch, landed: Bytes) -> list[int]:
    """The peer's ranks whose bytes in ``landed`` are not their canary's.

    ``landed`` (uint8) begins with our block 0 in their dtype; it was read by ``canary_request``. ``epoch`` is
    the peer's.
    """
    one_block = plan_layout(_landing(plan), [replace(r, num_blocks=1) for r in plan.remotes], spread=plan.spread)
    wrong: set[int] = set()
    for runs in one_block.runs(canary_request(one_block, 0)):
        remote = plan.remotes[runs.rank]
        expected = canary_bytes(epoch, remote.tp_rank, remote.block_bytes)
        if not np.array_equal(
            _rows(landed, runs.local)[runs.local_index], _rows(expected, runs.remote)[runs.remote_index]
        ):
            wrong.add(runs.rank)
    return sorted(wrong)


def _landing(plan: LayoutPlan) -> KvGeometry:
    return replace(plan.local, num_blocks=1, dtype=plan.remotes[0].dtype)


def _rows(block: Bytes, runs: StridedList) -> Bytes:
    """``[runs.count, runs.length]`` view of the runs in one block."""
    return np.lib.stride_tricks.as_strided(
        block[runs.offset :], shape=(runs.count, runs.length), strides=(runs.stride, 1), writeable=False
    )
