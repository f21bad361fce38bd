"""These tests run Triton's kernels in its interpreter, which has to be chosen before a kernel is defined.

So they are collected only in a process that was started with TRITON_INTERPRET=1; ``test_interpreted.py`` one folder up
starts one for each file here.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from twopool.kernels.backend import INTERPRETED

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def _float32(handle: Any) -> npt.NDArray[Any]:
    import triton.language as tl

    data: npt.NDArray[Any] = handle.data
    return (data.astype(np.uint32) << 16).view(np.float32) if handle.dtype.scalar == tl.bfloat16 else data


@pytest.fixture(autouse=True)
def products_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as 16-bit integers, and its `dot` multiplies those: give it the numbers.

    And what a row's products add up to depends on no other row, as on a GPU: the BLAS library below `np.matmul` orders
    its sums by the number of rows, and by the CPU.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        dtype = d.data.dtype
        left, right = _float32(a).astype(dtype, copy=False), _float32(b).astype(dtype, copy=False)
        product = np.zeros_like(d.data)
        for k in range(left.shape[-1]):
            product += left[..., :, k, None] * right[..., None, k, :]
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
