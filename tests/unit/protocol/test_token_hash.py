"""Chained hashes name prefixes, the same in every process."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twopool.protocol.geometry import KvGeometry
from twopool.protocol.token_hash import HashChain

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=100).map(lambda ids: np.array(ids, dtype=np.int32))


@given(IDS, st.integers(0, 100))
def test_growing_step_by_step_equals_hashing_at_once(
    ids: "np.ndarray[tuple[int], np.dtype[np.int32]]", cut: int
) -> None:
    grown, whole = HashChain(b"s"), HashChain(b"s")
    grown.extend(ids[:cut])
    grown.extend(ids)
    whole.extend(ids)
    assert grown.num_granules == whole.num_granules == len(ids) // 16
    for count in range(whole.num_granules + 1):
        assert grown.after_granules(count) == whole.after_granules(count)
    for num_tokens in range(len(ids) + 1):
        assert HashChain(b"s").at(num_tokens, ids) == whole.at(num_tokens, ids)


def test_a_hash_depends_on_all_before_it_and_on_the_salt() -> None:
    """PD-24: equal second blocks after different first ones do not collide."""
    first, other, second = np.arange(16), np.arange(1, 17), np.arange(100, 116)
    hashes = set()
    for start in (first, other):
        for salt in (b"", b"tenant"):
            chain = HashChain(salt)
            chain.extend(np.concatenate([start, second]).astype(np.int32))
            hashes.add(chain.after_granules(2))
    assert len(hashes) == 4


def test_processes_agree_whatever_their_hash_seed() -> None:
    """PD-24: hashes agree between workers."""
    code = (
        "import numpy as np; from twopool.protocol.token_hash import HashChain;"
        "print(HashChain(b'x').at(20, np.arange(20, dtype=np.int32)).hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(printed) == 1


def test_geometry_is_checked_and_counts_bytes() -> None:
    good = {"num_blocks": 4, "block_size": 16, "num_layers": 30, "num_kv_heads": 3, "num_kv_heads_local": 3}
    geometry = KvGeometry(**good, head_dim=64, dtype="bfloat16")  # type: ignore[arg-type]
    assert geometry.shape == (4, 3, 30, 2, 16, 64)
    assert geometry.block_bytes == 3 * 30 * 2 * 16 * 64 * 2
    assert geometry.pool_bytes == 4 * geometry.block_bytes
    for wrong in ({"block_size": 24}, {"kv_head_start": 1}, {"tp_rank": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
            KvGeometry(**(good | {"head_dim": 64, "dtype": "bfloat16"} | wrong))  # type: ignore[arg-type]
