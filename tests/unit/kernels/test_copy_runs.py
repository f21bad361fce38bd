"""Copies of runs equal numpy's, in native code and without it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from twopool.kernels import copy_runs as module
from twopool.kernels.copy_runs import RunArray, copy_runs


def run_array(memory: NDArray[np.uint8], offset: int, length: int, stride: int) -> RunArray:
    return RunArray(memory.ctypes.data + offset, length, stride, (len(memory) - offset - length) // stride + 1)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("length", "source_stride", "target_stride"), [(64, 64, 64), (5, 9, 7), (1, 1, 1)])
def test_equals_a_plain_copy(
    native: bool, length: int, source_stride: int, target_stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(module, "native_library", _not_built)
    rng = np.random.default_rng(length)
    source, target = (rng.integers(0, 256, 3000, dtype=np.uint8) for _ in range(2))
    before = source.copy()
    expected = target.copy()
    source_index = rng.permutation(40).astype(np.int32)
    target_index = rng.permutation(40).astype(np.int32)
    for at, to in zip(source_index, target_index, strict=True):
        expected[3 + to * target_stride :][:length] = source[2 + at * source_stride :][:length]
    copy_runs(
        target=run_array(target, 3, length, target_stride),
        target_index=target_index,
        source=run_array(source, 2, length, source_stride),
        source_index=source_index,
    )
    assert np.array_equal(target, expected) and np.array_equal(source, before)


@pytest.mark.parametrize("bad", [-1, 10])
def test_an_index_out_of_range_copies_nothing(bad: int) -> None:
    source, target = np.ones(640, dtype=np.uint8), np.zeros(640, dtype=np.uint8)
    runs = [run_array(memory, 0, 64, 64) for memory in (source, target)]
    good, wrong = np.array([0, 1], dtype=np.int32), np.array([0, bad], dtype=np.int32)
    for source_index, target_index in ((good, wrong), (wrong, good)):
        with pytest.raises(ValueError, match="10 runs"):
            copy_runs(target=runs[1], target_index=target_index, source=runs[0], source_index=source_index)
    assert not target.any()


def _not_built() -> None:
    raise OSError("not built")
