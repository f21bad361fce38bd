"""RMSNorm of rows, fused with the residual addition before it. One program a row: a row's bits are its own."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from twopool.kernels.gpu.compilation import EXACT, TRITON_TYPES, Specialisation, next_power_of_two


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, NUM_COLUMNS]
    residual_ptr,  # [T, NUM_COLUMNS], read and written when HAS_RESIDUAL
    weight_ptr,  # [NUM_COLUMNS]
    output_ptr,  # [T, NUM_COLUMNS]
    eps,
    NUM_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * NUM_COLUMNS
    columns = tl.arange(0, BLOCK)
    inside = columns < NUM_COLUMNS
    x = tl.load(x_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + start + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)  # what the next layer will read
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / NUM_COLUMNS + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output_ptr + start + columns, (x * scale * weight).to(output_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] -> [..., n] contiguous, normalised in float32; weight [n]."""
    rows = x.reshape(-1, x.shape[-1])
    output = torch.empty_like(rows)
    _launch(rows, None, weight, output, eps)
    return output.view(x.shape)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x [T, n] to ``residual`` [T, n] (contiguous) in place; return the normalised sum."""
    output = torch.empty_like(residual)
    _launch(x.contiguous(), residual, weight, output, eps)
    return output


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, output: Tensor, eps: float) -> None:
    num_rows, num_columns = x.shape
    if num_rows == 0:
        return
    constants, num_warps = _configuration(num_columns, residual is not None)
    _rms_norm_kernel[(num_rows,)](
        x, x if residual is None else residual, weight, output, eps, **constants, num_warps=num_warps, **EXACT
    )


def _configuration(num_columns: int, has_residual: bool) -> tuple[dict[str, int | bool], int]:
    block = next_power_of_two(num_columns)
    num_warps = min(16, max(4, block // 1024))
    return {"NUM_COLUMNS": num_columns, "BLOCK": block, "HAS_RESIDUAL": has_residual}, num_warps


def specialisations(num_columns: int, dtype: torch.dtype) -> Iterator[Specialisation]:
    """Every compilation a model with this hidden size may ask for."""
    pointer = f"*{TRITON_TYPES[dtype]}"
    signature = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "output_ptr"), pointer) | {"eps": "fp32"}
    for has_residual in (False, True):
        constants, num_warps = _configuration(num_columns, has_residual)
        yield Specialisation(_rms_norm_kernel, signature, constants, num_warps, num_stages=1)
