"""The feed-forward block's gated activation in one pass over memory."""

from collections.abc import Iterator
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from twopool.kernels.gpu.compilation import EXACT, TRITON_TYPES, Specialisation

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr,  # [T, 2 * NUM_COLUMNS], gate before up
    output_ptr,  # [T, NUM_COLUMNS]
    NUM_COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < NUM_COLUMNS
    gate_ptr = gate_up_ptr + row * (2 * NUM_COLUMNS) + columns
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + NUM_COLUMNS, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        activated = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = gate * tl.sigmoid(2.0 * inner)  # (1 + tanh(a)) / 2 = sigmoid(2 a)
    tl.store(output_ptr + row * NUM_COLUMNS + columns, (activated * up).to(output_ptr.dtype.element_ty), mask=inside)


def gated_activation(gate_up: Tensor, activation: Literal["silu", "gelu", "gelu_tanh"]) -> Tensor:
    """gate_up [T, 2 * n] contiguous -> activation(gate) * up [T, n]."""
    num_rows, width = gate_up.shape
    output = gate_up.new_empty(num_rows, width // 2)
    if num_rows:
        grid = (num_rows, triton.cdiv(width // 2, _BLOCK))
        _gated_activation_kernel[grid](
            gate_up.contiguous(), output, width // 2, activation, BLOCK=_BLOCK, num_warps=_NUM_WARPS, **EXACT
        )
    return output


def specialisations(num_columns: int, dtype: torch.dtype) -> Iterator[Specialisation]:
    """Every compilation a model with this intermediate size may ask for."""
    signature = dict.fromkeys(("gate_up_ptr", "output_ptr"), f"*{TRITON_TYPES[dtype]}")
    for activation in ("silu", "gelu", "gelu_tanh"):
        constants = {"NUM_COLUMNS": num_columns, "ACTIVATION": activation, "BLOCK": _BLOCK}
        yield Specialisation(_gated_activation_kernel, signature, constants, _NUM_WARPS, num_stages=1)
