"""Copying many equal runs of bytes from one piece of host memory to another."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twopool.kernels.native_library import native_library

Index = npt.NDArray[np.int32]


@dataclass(frozen=True)
class RunArray:
    """``count`` runs of ``length`` bytes from ``address`` on, ``stride`` bytes apart. Its owner keeps the memory."""

    address: int
    length: int
    stride: int
    count: int

    def check(self, index: Index) -> None:
        """Raise ``ValueError`` unless every index names a run."""
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.count:
            raise ValueError(f"there are {self.count} runs, asked for {int(index.min())} to {int(index.max())}")

    def rows(self) -> npt.NDArray[np.uint8]:
        """``[count, length]`` uint8 view; of no use to write memory that is mapped for reading."""
        num_bytes = (self.count - 1) * self.stride + self.length
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(self.address))
        return np.lib.stride_tricks.as_strided(memory, shape=(self.count, self.length), strides=(self.stride, 1))


def copy_runs(*, target: RunArray, target_index: Index, source: RunArray, source_index: Index) -> None:
    """Copy run ``source_index[i]`` of ``source`` into run ``target_index[i]`` of ``target``, on this thread.

    Both indices are ``[n]`` int32 and the runs are equally long; the memory must not overlap. The native code releases
    the GIL. Raises ``ValueError`` where an index is out of range or the two sides do not match.
    """
    if target.length != source.length or target_index.shape != source_index.shape or target_index.ndim != 1:
        raise ValueError("both sides of a copy take equally many runs of one length")
    target.check(target_index)
    source.check(source_index)
    target_index, source_index = (np.ascontiguousarray(index, dtype=np.int32) for index in (target_index, source_index))
    try:
        library = native_library()
    except (OSError, RuntimeError):  # not built for this machine: numpy copies twice
        target.rows()[target_index] = source.rows()[source_index]
        return
    library.twopool_copy_runs(
        target.address,
        target.stride,
        target_index.ctypes.data,
        source.address,
        source.stride,
        source_index.ctypes.data,
        source.length,
        len(source_index),
    )
