"""A matrix product whose sums do not depend on the number of rows: y = x W^T + b.

cuBLAS picks a kernel, and with it the order of summation, by the shape of the whole product, so a row's bits change
with its batch. Here K is cut into slices whose number follows from the weight's shape alone; a slice is summed from
zero in steps of BLOCK_K by one kind of MMA, and slices are added one after the other, from zero. With few rows the
slices become programs of their own (there would be too few to fill the GPU) and a second kernel adds them in the same
order.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from twopool.kernels.gpu.compilation import EXACT, IS_AMD, TRITON_TYPES, Specialisation

_BLOCK_M = 64  # the smallest that Hopper's warpgroup MMA takes, so few and many rows share it
_BLOCK_N = 128
_GROUP_M = 8
_MIN_SLICE = 512
_WANTED_PROGRAMS = 256
_REDUCE_BLOCK = 1024


@triton.jit
def _product(
    x_ptr, weight_ptr, rows, columns, num_rows, begin, end,
    N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x[rows, begin:end] @ weight[columns, begin:end]^T, from zero; [BLOCK_M, BLOCK_N] float32."""
    steps = tl.arange(0, BLOCK_K)
    row_offsets = rows.to(tl.int64)[:, None] * K
    column_offsets = columns.to(tl.int64)[:, None] * K
    acc = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for k in range(begin, end, BLOCK_K):
        inside = ((k + steps) < K)[None, :]
        x = tl.load(x_ptr + row_offsets + (k + steps)[None, :], mask=(rows < num_rows)[:, None] & inside, other=0.0)
        weight_mask = (columns < N)[:, None] & inside
        weight = tl.load(weight_ptr + column_offsets + (k + steps)[None, :], mask=weight_mask, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _tiles_kernel(
    x_ptr,  # [num_rows, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N] when HAS_BIAS
    output_ptr,  # [num_rows, N]
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Programs that run together share rows and columns, so that both stay in the L2 cache.
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    per_group: tl.constexpr = GROUP_M * ((N + BLOCK_N - 1) // BLOCK_N)
    group = tl.program_id(0) // per_group
    group_rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + (tl.program_id(0) % per_group) % group_rows
    tile_n = (tl.program_id(0) % per_group) // group_rows
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for number in range(SLICES):
        end = tl.minimum((number + 1) * SLICE, K)
        total += _product(x_ptr, weight_ptr, rows, columns, num_rows, number * SLICE, end, N, K, BLOCK_K, PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    mask = (rows < num_rows)[:, None] & (columns < N)[None, :]
    target = output_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(target, total.to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _slices_kernel(
    x_ptr,
    weight_ptr,
    parts_ptr,  # [SLICES, num_rows, N] float32
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    number = tl.program_id(2)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.minimum((number + 1) * SLICE, K)
    part = _product(x_ptr, weight_ptr, rows, columns, num_rows, number * SLICE, end, N, K, BLOCK_K, PRECISION)
    target = parts_ptr + (number.to(tl.int64) * num_rows + rows)[:, None] * N + columns[None, :]
    tl.store(target, part, mask=(rows < num_rows)[:, None] & (columns < N)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _add_slices_kernel(
    parts_ptr,
    bias_ptr,
    output_ptr,
    num_rows,
    N: tl.constexpr,
    SLICES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(SLICES):
        total += tl.load(parts_ptr + (number * num_rows + row) * N + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output_ptr + row * N + columns, total.to(output_ptr.dtype.element_ty), mask=inside)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] contiguous, weight [N, K] contiguous, bias [N] -> [T, N], all of one dtype."""
    num_rows, num_columns, depth = x.shape[0], weight.shape[0], weight.shape[1]
    output = x.new_empty(num_rows, num_columns)
    if num_rows == 0:
        return output
    constants, options = _configuration(num_columns, depth, x.dtype, amd=IS_AMD)
    slices = num_slices(num_columns, depth)
    tiles_m, tiles_n = triton.cdiv(num_rows, _BLOCK_M), triton.cdiv(num_columns, _BLOCK_N)
    bias_or_any = x if bias is None else bias
    if slices > 1 and tiles_m * tiles_n < _WANTED_PROGRAMS:
        parts = x.new_empty((slices, num_rows, num_columns), dtype=torch.float32)
        _slices_kernel[(tiles_n, tiles_m, slices)](x, weight, parts, num_rows, **constants, **options, **EXACT)
        grid = (num_rows, triton.cdiv(num_columns, _REDUCE_BLOCK))
        _add_slices_kernel[grid](
            parts, bias_or_any, output, num_rows, **_add_constants(num_columns, depth, bias is not None), **EXACT
        )
    else:
        extra = {"SLICES": slices, "HAS_BIAS": bias is not None, "GROUP_M": _GROUP_M}
        _tiles_kernel[(tiles_m * tiles_n,)](
            x, weight, bias_or_any, output, num_rows, **extra, **constants, **options, **EXACT
        )
    return output


def num_slices(num_columns: int, depth: int) -> int:
    """Slices of K for a weight [num_columns, depth]: as many as fill a GPU when there is one tile of rows."""
    wanted: int = _WANTED_PROGRAMS // triton.cdiv(num_columns, _BLOCK_N)
    return max(1, min(wanted, depth // _MIN_SLICE))


def _configuration(
    num_columns: int, depth: int, dtype: torch.dtype, *, amd: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    block_k = 64 if dtype.itemsize == 2 else 32
    steps = triton.cdiv(depth, block_k)
    constants = {
        "N": num_columns,
        "K": depth,
        "SLICE": triton.cdiv(steps, num_slices(num_columns, depth)) * block_k,
        "BLOCK_M": _BLOCK_M,
        "BLOCK_N": _BLOCK_N,
        "BLOCK_K": block_k,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",  # 16-bit MMA ignores this
    }
    return constants, {"num_warps": 4, "num_stages": 2 if amd else 4}


def _add_constants(num_columns: int, depth: int, has_bias: bool) -> dict[str, Any]:
    return {
        "N": num_columns,
        "SLICES": num_slices(num_columns, depth),
        "HAS_BIAS": has_bias,
        "BLOCK": _REDUCE_BLOCK,
    }


def specialisations(num_columns: int, depth: int, dtype: torch.dtype, *, amd: bool) -> Iterator[Specialisation]:
    """Every compilation a projection of this shape may ask for."""
    pointer = f"*{TRITON_TYPES[dtype]}"
    constants, options = _configuration(num_columns, depth, dtype, amd=amd)
    slices = num_slices(num_columns, depth)
    inputs = {"x_ptr": pointer, "weight_ptr": pointer}
    outputs = {"bias_ptr": pointer, "output_ptr": pointer, "num_rows": "i32"}
    for has_bias in (False, True):
        extra = {"SLICES": slices, "HAS_BIAS": has_bias, "GROUP_M": _GROUP_M}
        yield Specialisation(_tiles_kernel, inputs | outputs, extra | constants, **options)
        if slices > 1:
            yield Specialisation(
                _add_slices_kernel,
                {"parts_ptr": "*fp32", **outputs},
                _add_constants(num_columns, depth, has_bias),
                num_warps=4,
                num_stages=3,
            )
    if slices > 1:
        signature = {**inputs, "parts_ptr": "*fp32", "num_rows": "i32"}
        yield Specialisation(_slices_kernel, signature, constants, **options)
