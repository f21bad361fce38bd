"""Philox4x32-10: random numbers that are a pure function of a key and a counter (Salmon et al., SC 2011)."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_2 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10

HostWords = npt.NDArray[np.int64]
Words = TypeVar("Words", HostWords, Tensor)


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four words of noise for each counter.

    All arrays or tensors int64 holding 32-bit unsigned values, of shapes that broadcast together; so are the results.
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


def gumbel_noise(
    seed: HostWords, position: HostWords, choice: HostWords, num_values: int, device: torch.device
) -> Tensor:
    """[N, num_values] float64 standard Gumbel noise, finite; value i depends on its row's key and on i alone.

    seed, position, choice: [N] int64, on the host; the result is on ``device``. Any prefix of a longer draw equals a
    shorter one.
    """
    lanes = np.arange(-(-num_values // 4))[None, :]
    key = (seed[:, None] & _LOW_32, (seed[:, None] >> 32) & _LOW_32)
    counter = (lanes, position[:, None] & _LOW_32, choice[:, None] & _LOW_32, np.zeros_like(lanes))
    if device.type == "cpu":  # a hundred operations on a few thousand values: numpy's cost a tenth of torch's
        words = torch.from_numpy(np.stack(philox4x32(counter, key), axis=-1))
    else:
        c0, c1, c2, c3 = (torch.from_numpy(part).to(device) for part in counter)
        k0, k1 = (torch.from_numpy(part).to(device) for part in key)
        words = torch.stack(philox4x32((c0, c1, c2, c3), (k0, k1)), dim=-1)
    uniform = (words.flatten(1)[:, :num_values].double() + 0.5) * 2.0**-32  # [N, num_values], never 0 or 1
    return -torch.log(-torch.log(uniform))
