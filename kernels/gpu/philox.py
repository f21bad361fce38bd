"""Philox4x32-10 inside kernels: the same bits as ``kernels.philox``."""

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, k0, k1):
    """Four words of noise for each counter (c0, c1, c2, 0) under the key (k0, k1); all uint32, same shapes."""
    c3 = c0 ^ c0  # zeros of the same shape
    for _ in tl.static_range(10):
        product_0 = c0 * 0xD2511F53
        product_2 = c2 * 0xCD9E8D57
        high_0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        high_2 = tl.umulhi(c2, tl.full(c2.shape, 0xCD9E8D57, tl.uint32))
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, product_2, high_0 ^ c3 ^ k1, product_0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def gumbel(index, seed, position, choice):
    """Standard Gumbel noise of a row's values ``index`` (int32, one dimension), float64; the scalars int64."""
    zeros = (index * 0).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        (index // 4).to(tl.uint32),
        zeros + position.to(tl.uint32),
        zeros + choice.to(tl.uint32),
        zeros + seed.to(tl.uint32),
        zeros + (seed >> 32).to(tl.uint32),
    )
    lane = index % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32; never 0 or 1
    return -tl.log(-tl.log(uniform))
