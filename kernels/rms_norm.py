"""Root-mean-square normalisation, alone or after a residual addition."""

import torch.nn.functional as F
from torch import Tensor

from twopool.kernels.backend import uses_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] -> [..., n], normalised over the last dimension in float32; weight [n]."""
    if uses_triton(x):
        from twopool.kernels.gpu import rms_norm as gpu

        return gpu.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x [T, n] to `residual` [T, n] in place; return the normalised sum, a new tensor."""
    if uses_triton(x):
        from twopool.kernels.gpu import rms_norm as gpu

        return gpu.add_rms_norm_(x, residual, weight, eps)
    residual.add_(x)
    return rms_norm(residual, weight, eps)
