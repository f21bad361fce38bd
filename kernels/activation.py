"""The gated activation of the feed-forward block."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from twopool.kernels.backend import uses_triton


def gated_activation(gate_up: Tensor, activation: Literal["silu", "gelu", "gelu_tanh"]) -> Tensor:
    """gate_up [T, 2 * n], gate before up -> activation(gate) * up [T, n] contiguous."""
    if uses_triton(gate_up):
        from twopool.kernels.gpu import activation as gpu

        return gpu.gated_activation(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return F.gelu(gate, approximate=approximate).mul_(up)
