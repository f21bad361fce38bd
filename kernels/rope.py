"""Rotary position embedding, neox style: dimension i turns together with i + head_dim / 2."""

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate each head: x [T, heads, head_dim] (last dimension contiguous) -> a new tensor.

    cos, signed_sin: [T, 1, head_dim] of x's dtype; each half repeats the angles of the other, and
    the first half of the sine is negated, so that swapping halves is all the rotation needs.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, signed_sin)
