"""Workers' CPUs: equal, disjoint, never more than there are."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twopool.scripts.placement import CpuShare, computes_on_cpu, share_cpus


def test_two_cores_one_worker_each() -> None:
    shares = share_cpus([0, 1], [1, 1], pin=True)
    assert shares == (CpuShare(cpus=(0,), num_threads=1), CpuShare(cpus=(1,), num_threads=1))


def test_a_worker_gets_cpus_for_each_of_its_ranks() -> None:
    shares = share_cpus(range(9), [1, 3], pin=True)
    assert shares == (CpuShare(cpus=(0, 1), num_threads=2), CpuShare(cpus=(2, 3, 4, 5, 6, 7), num_threads=2))


@given(
    cpus=st.sets(st.integers(0, 500), min_size=1),
    ranks=st.lists(st.integers(1, 8), min_size=1, max_size=20),
    pin=st.booleans(),
)
def test_shares_are_equal_and_disjoint(cpus: set[int], ranks: list[int], pin: bool) -> None:
    shares = share_cpus(sorted(cpus), ranks, pin=pin)
    assert len(shares) == len(ranks)
    assert len({share.num_threads for share in shares}) == 1
    pinned = [cpu for share in shares for cpu in share.cpus or ()]
    assert len(pinned) == len(set(pinned))
    assert set(pinned) <= cpus
    enough = len(cpus) >= sum(ranks)
    for share, count in zip(shares, ranks, strict=True):
        assert (share.cpus is not None) == (pin and enough)
        assert share.cpus is None or len(share.cpus) == share.num_threads * count
    assert shares[0].num_threads == max(1, len(cpus) // sum(ranks))


@pytest.mark.parametrize(
    ("device", "has_gpu", "expected"),
    [
        ("cpu", True, True),
        ("auto", True, False),
        ("auto", False, True),
        ("cuda", False, False),
        ("cuda:1", True, False),
    ],
)
def test_computes_on_cpu(tmp_path: Path, device: str, has_gpu: bool, expected: bool) -> None:
    gpu = tmp_path / "gpu"
    if has_gpu:
        gpu.touch()
    assert computes_on_cpu(device, [gpu]) is expected
