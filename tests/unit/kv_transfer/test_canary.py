import numpy as np
import pytest
import torch
from msgspec.structs import replace

from twopool.kv_transfer.canary import canary_bytes, fill_canary, wrong_canary_ranks
from twopool.kv_transfer.layout import plan_layout
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Epoch

GEOMETRY = KvGeometry(
    num_blocks=4, block_size=16, num_layers=2, num_kv_heads=2, num_kv_heads_local=2, head_dim=4, dtype="bfloat16"
)


def test_bytes_follow_from_epoch_and_rank() -> None:
    data = canary_bytes(Epoch(7), 0, 1001)
    assert data.shape == (1001,)
    assert np.array_equal(data, canary_bytes(Epoch(7), 0, 1001))
    assert not np.array_equal(data, canary_bytes(Epoch(8), 0, 1001))
    assert not np.array_equal(data, canary_bytes(Epoch(7), 1, 1001))


def test_largest_epoch() -> None:
    assert canary_bytes(Epoch(2**63 - 1), 1023, 8).shape == (8,)


def test_fill_writes_one_block_only() -> None:
    pool = torch.zeros(GEOMETRY.pool_bytes, dtype=torch.uint8)
    fill_canary(pool, GEOMETRY, 3, Epoch(5))
    start = 3 * GEOMETRY.block_bytes
    assert not pool[:start].any()
    assert np.array_equal(pool[start:].numpy(), canary_bytes(Epoch(5), 0, GEOMETRY.block_bytes))


def test_one_wrong_byte_is_seen_and_its_rank_named() -> None:
    halves = [replace(GEOMETRY, kv_head_start=rank, num_kv_heads_local=1, tp_rank=rank, tp_size=2) for rank in range(2)]
    plan = plan_layout(GEOMETRY, halves)
    landed = np.concatenate([canary_bytes(Epoch(5), rank, GEOMETRY.head_bytes) for rank in range(2)])
    assert wrong_canary_ranks(plan, Epoch(5), landed) == []
    assert wrong_canary_ranks(plan, Epoch(6), landed) == [0, 1]
    landed[-1] ^= 1
    assert wrong_canary_ranks(plan, Epoch(5), landed) == [1]


@pytest.mark.parametrize("remote_size", [16, 32, 64])
def test_part_of_a_larger_block(remote_size: int) -> None:
    remote = replace(GEOMETRY, block_size=remote_size)
    plan = plan_layout(GEOMETRY, [remote])
    block = canary_bytes(Epoch(5), 0, remote.block_bytes).reshape(*remote.shape[1:-1], -1)
    landed = np.ascontiguousarray(block[..., :16, :]).reshape(-1)
    assert wrong_canary_ranks(plan, Epoch(5), landed) == []
