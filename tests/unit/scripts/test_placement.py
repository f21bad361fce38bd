"""Workers' CPUs: equal, disjoint, never more than there are."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twopool.scripts.placement import CpuShare, computes_on_cpu, share_cpus


def test_two_cores_one_worker_each() -> None:
    shares = share_cpus([0, 1], 2, pin=True)
    assert shares == (CpuShare(cpus=(0,), num_threads=1), CpuShare(cpus=(1,), num_threads=1))


@given(cpus=st.sets(st.integers(0, 500), min_size=1), num_workers=st.integers(1, 64), pin=st.booleans())
def test_shares_are_equal_and_disjoint(cpus: set[int], num_workers: int, pin: bool) -> None:
    shares = share_cpus(sorted(cpus), num_workers, pin=pin)
    assert len(shares) == num_workers
    assert len({share.num_threads for share in shares}) == 1
    pinned = [cpu for share in shares for cpu in share.cpus or ()]
    assert len(pinned) == len(set(pinned))
    assert set(pinned) <= cpus
    enough = len(cpus) >= num_workers
    for share in shares:
        assert (share.cpus is not None) == (pin and enough)
        assert share.cpus is None or len(share.cpus) == share.num_threads
    assert shares[0].num_threads == max(1, len(cpus) // num_workers)


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
