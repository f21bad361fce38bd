"""Philox4x32-10: random numbers that are a pure function of a key and a counter (Salmon et al., SC 2011)."""

import numpy as np
import numpy.typing as npt

_LOW_32 = 0xFFFFFFFF
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_ROUNDS = 10

Longs = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


def philox4x32(counter: Words, key: Words) -> Words:
    """[4, N, M], four words of noise for each counter; counter: [4, N, M], key: [2, N]. All hold 32-bit values.

    Both products of a round are one operation: on a few thousand values it is their number that costs.
    """
    low_32, shift = np.uint64(_LOW_32), np.uint64(32)
    even, odd = counter[0::2].copy(), counter[1::2].copy()
    for number in range(_ROUNDS):
        even *= _MULTIPLIERS[:, None, None]  # the products of words 0 and 2, 64 bits each
        odd ^= ((key + np.uint64(number) * _WEYL[:, None]) & low_32)[:, :, None]
        odd ^= (even >> shift)[::-1]
        even &= low_32
        even, odd = odd, even[::-1]
    return np.stack((even[0], odd[0], even[1], odd[1]))


def gumbel_noise(seed: Longs, position: Longs, choice: Longs, num_values: int) -> npt.NDArray[np.float64]:
    """[N, num_values] standard Gumbel noise, finite; value i depends on its row's key and on i alone.

    seed, position, choice: [N]. Any prefix of a longer draw equals a shorter one.
    """
    num_rows, num_lanes = len(seed), -(-num_values // 4)
    counter = np.zeros((4, num_rows, num_lanes), dtype=np.uint64)
    counter[0] = np.arange(num_lanes)
    counter[1] = (position & _LOW_32)[:, None]
    counter[2] = (choice & _LOW_32)[:, None]
    key = np.stack((seed & _LOW_32, (seed >> 32) & _LOW_32)).astype(np.uint64)
    words = philox4x32(counter, key).transpose(1, 2, 0).reshape(num_rows, -1)  # four words a lane
    uniform = words[:, :num_values].astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-32  # never 0 or 1
    for _ in range(2):
        np.log(uniform, out=uniform)
        np.negative(uniform, out=uniform)
    return uniform
