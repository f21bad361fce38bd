"""Philox4x32-10: random numbers that are a pure function of a key and a counter (Salmon et al., SC 2011)."""

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_2 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of noise for each counter.

    All tensors int64 holding 32-bit unsigned values, of shapes that broadcast together; so are the results.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product of two 32-bit values wraps in int64, but its 64 bits are right: mask what the shift sign-extends.
        product_0 = c0 * _MULTIPLIER_0
        product_2 = c2 * _MULTIPLIER_2
        high_0 = (product_0 >> 32) & _LOW_32
        high_2 = (product_2 >> 32) & _LOW_32
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, product_2 & _LOW_32, high_0 ^ c3 ^ k1, product_0 & _LOW_32
        k0 = (k0 + _WEYL_0) & _LOW_32
        k1 = (k1 + _WEYL_1) & _LOW_32
    return c0, c1, c2, c3


def gumbel_noise(seed: Tensor, position: Tensor, choice: Tensor, num_values: int) -> Tensor:
    """[N, num_values] float64 standard Gumbel noise, finite; value i depends on its row's key and on i alone.

    seed, position, choice: [N] int64. ``num_values`` is rounded up to a multiple of 4 inside, so any prefix of a
    longer draw equals a shorter one.
    """
    num_lanes = -(-num_values // 4)
    lanes = torch.arange(num_lanes, device=seed.device)[None, :]
    key = (seed[:, None] & _LOW_32, (seed[:, None] >> 32) & _LOW_32)
    counter = (lanes, position[:, None] & _LOW_32, choice[:, None] & _LOW_32, torch.zeros_like(lanes))
    words = torch.stack(philox4x32(counter, key), dim=-1)  # [N, lanes, 4]
    uniform = (words.flatten(1)[:, :num_values].double() + 0.5) * 2.0**-32  # never 0 or 1
    return -torch.log(-torch.log(uniform))
