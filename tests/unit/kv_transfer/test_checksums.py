"""Checksums agree wherever two pools hold the same KV, and differ where a byte does."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from twopool.kv_transfer.checksums import SAMPLE_EVERY, ChecksumRequest, unit_checksums, units_to_check
from twopool.protocol.geometry import KvGeometry

GEOMETRY = KvGeometry(
    num_blocks=8, block_size=32, num_layers=4, num_kv_heads=3, num_kv_heads_local=3, head_dim=8, dtype="bfloat16"
)


def random_pool(geometry: KvGeometry) -> torch.Tensor:
    rng = np.random.default_rng(0)
    data = torch.from_numpy(rng.integers(0, 2**15, geometry.pool_bytes // 2, dtype=np.int16))
    return data.view(torch.bfloat16).view(geometry.shape)


def halved(pool: torch.Tensor) -> torch.Tensor:
    """The same KV in blocks of half the size: block b becomes blocks 2b and 2b+1."""
    blocks, heads, layers, two, size, dim = pool.shape
    split = pool.view(blocks, heads, layers, two, 2, size // 2, dim).movedim(4, 1)
    return split.reshape(blocks * 2, heads, layers, two, size // 2, dim).contiguous()


@pytest.mark.parametrize("layers", [(0, 4), (1, 3)])
def test_block_size_does_not_matter(layers: tuple[int, int]) -> None:
    pool, units = random_pool(GEOMETRY), np.array([0, 1, 3], dtype=np.int32)
    small = replace(GEOMETRY, block_size=16, num_blocks=16)
    large = unit_checksums(
        pool,
        GEOMETRY,
        ChecksumRequest(
            block_ids=np.array([5, 2], dtype=np.int32),
            start_token=32,
            unit_tokens=16,
            layers=layers,
            units=units,
        ),
    )
    ours = unit_checksums(
        halved(pool),
        small,
        ChecksumRequest(
            block_ids=np.array([10, 11, 4, 5], dtype=np.int32),
            start_token=32,
            unit_tokens=16,
            layers=layers,
            units=units,
        ),
    )
    assert large.shape == (3, 3) and np.array_equal(large, ours)


def test_every_byte_counts() -> None:
    pool = random_pool(GEOMETRY)

    def sums() -> np.ndarray:
        return unit_checksums(
            pool,
            GEOMETRY,
            ChecksumRequest(
                block_ids=np.array([1], dtype=np.int32),
                start_token=0,
                unit_tokens=32,
                layers=(0, 4),
                units=np.array([0], dtype=np.int32),
            ),
        )

    before = sums()
    pool.view(torch.int16)[1, 2, 3, 1, 31, 7] ^= 1
    assert (before != sums()).tolist() == [[False, False, True]]


@pytest.mark.parametrize("num_units", [1, 2, 16, 17, 100])
def test_samples_hold_both_ends(num_units: int) -> None:
    assert len(units_to_check("off", num_units)) == 0
    assert units_to_check("all", num_units).tolist() == list(range(num_units))
    sample = units_to_check("sample", num_units).tolist()
    assert sample[0] == 0 and sample[-1] == num_units - 1
    assert sample == sorted(set(sample)) and len(sample) <= num_units // SAMPLE_EVERY + 2
