"""A kernel that writes out the noise the sampling kernels draw inside."""

import triton
import triton.language as tl

from twopool.kernels.gpu.philox import gumbel


@triton.jit  # type: ignore[untyped-decorator]
def gumbel_kernel(key_ptr, output_ptr, num_values, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """key_ptr: [3] int64, seed, position, choice; output_ptr: [num_values] float64."""
    index = tl.arange(0, BLOCK)
    noise = gumbel(index, tl.load(key_ptr), tl.load(key_ptr + 1), tl.load(key_ptr + 2))
    tl.store(output_ptr + index, noise, mask=index < num_values)
