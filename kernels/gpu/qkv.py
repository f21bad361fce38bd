"""Between the QKV projection and attention, in one pass: QK-norm, rotation, and the write into the KV pool."""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from twopool.kernels.gpu.compilation import EXACT, TRITON_TYPES, Specialisation, next_power_of_two

_HEADS_PER_PROGRAM = 8
_NUM_WARPS = 4


@triton.jit
def _normalise(first, second, norm_ptr, dims, inside, eps, HEAD_DIM: tl.constexpr):
    """RMSNorm of heads given as two halves [heads, HALF]; rounded to the model's dtype as a layer of its own would."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    half: tl.constexpr = HEAD_DIM // 2
    weight_first = tl.load(norm_ptr + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
    weight_second = tl.load(norm_ptr + half + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
    dtype = norm_ptr.dtype.element_ty
    first = (first * scale * weight_first).to(dtype).to(tl.float32)
    second = (second * scale * weight_second).to(dtype).to(tl.float32)
    return first, second


@triton.jit(do_not_specialize=["layer"])
def _rotate_and_cache_kernel(
    qkv_ptr,  # [T, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]
    cos_ptr,  # [T, HEAD_DIM]
    signed_sin_ptr,  # [T, HEAD_DIM]
    q_norm_ptr,  # [HEAD_DIM]
    k_norm_ptr,  # [HEAD_DIM]
    pool_rows_ptr,  # [T, 2, NUM_KV_HEADS] int64, rows of layer 0
    queries_ptr,  # [T, NUM_HEADS, HEAD_DIM]
    pool_ptr,  # seen as [rows, HEAD_DIM]
    layer,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QK_NORM: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    HALF: tl.constexpr,  # HEAD_DIM / 2, rounded up to a power of two
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)
    half: tl.constexpr = HEAD_DIM // 2
    first_value: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    num_all: tl.constexpr = first_value + NUM_KV_HEADS
    inside = dims < half
    mask = (heads < num_all)[:, None] & inside[None, :]
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    first = tl.load(qkv_ptr + row * (num_all * HEAD_DIM) + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + row * (num_all * HEAD_DIM) + half + offsets, mask=mask, other=0.0).to(tl.float32)

    is_query = (heads < NUM_HEADS)[:, None]
    turns = (heads < first_value)[:, None]
    normed_first, normed_second = first, second
    if QK_NORM:
        q_first, q_second = _normalise(first, second, q_norm_ptr, dims, inside, eps, HEAD_DIM)
        k_first, k_second = _normalise(first, second, k_norm_ptr, dims, inside, eps, HEAD_DIM)
        normed_first = tl.where(is_query, q_first, k_first)
        normed_second = tl.where(is_query, q_second, k_second)
    angles = row * HEAD_DIM + dims
    cos_first = tl.load(cos_ptr + angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos_ptr + half + angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(signed_sin_ptr + angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(signed_sin_ptr + half + angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    rotated_first = normed_first * cos_first + normed_second * sin_first
    rotated_second = normed_second * cos_second + normed_first * sin_second
    dtype = pool_ptr.dtype.element_ty
    first = tl.where(turns, rotated_first, first).to(dtype)
    second = tl.where(turns, rotated_second, second).to(dtype)

    query_mask = is_query & inside[None, :]
    target = queries_ptr + row * (NUM_HEADS * HEAD_DIM) + offsets
    tl.store(target, first, mask=query_mask)
    tl.store(target + half, second, mask=query_mask)
    # Keys stand before values both among the heads and in the table of rows.
    cached = (heads >= NUM_HEADS) & (heads < num_all)
    places = tl.load(pool_rows_ptr + row * (2 * NUM_KV_HEADS) + heads - NUM_HEADS, mask=cached, other=0)
    places += layer.to(tl.int64) * (2 * BLOCK_SIZE)
    cache_mask = cached[:, None] & inside[None, :]
    target = pool_ptr + places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, first, mask=cache_mask)
    tl.store(target + half, second, mask=cache_mask)


def rotate_and_cache(
    qkv: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    kv_pool: Tensor,
    layer: int,
    rows: Tensor,
    num_heads: int,
) -> Tensor:
    """See ``kernels.qkv``. All tensors contiguous; head_dim even."""
    num_rows, _, head_dim = qkv.shape
    queries = qkv.new_empty(num_rows, num_heads, head_dim)
    if num_rows == 0:
        return queries
    constants = _constants(num_heads, kv_pool.shape[1], head_dim, kv_pool.shape[4], norms is not None)
    q_norm, k_norm = (cos, cos) if norms is None else norms
    grid = (num_rows, triton.cdiv(num_heads + 2 * kv_pool.shape[1], _HEADS_PER_PROGRAM))
    _rotate_and_cache_kernel[grid](
        qkv,
        cos,
        signed_sin,
        q_norm,
        k_norm,
        rows,
        queries,
        kv_pool,
        layer,
        eps,
        **constants,
        num_warps=_NUM_WARPS,
        **EXACT,
    )
    return queries


def _constants(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, qk_norm: bool) -> dict[str, Any]:
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "QK_NORM": qk_norm,
        "HEADS": _HEADS_PER_PROGRAM,
        "HALF": next_power_of_two(head_dim // 2),
    }


def specialisations(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> Iterator[Specialisation]:
    """Every compilation a model with these heads may ask for."""
    pointer = f"*{TRITON_TYPES[dtype]}"
    names = ("qkv_ptr", "cos_ptr", "signed_sin_ptr", "q_norm_ptr", "k_norm_ptr")
    signature = dict.fromkeys(names, pointer) | {
        "pool_rows_ptr": "*i64",
        "queries_ptr": pointer,
        "pool_ptr": pointer,
        "layer": "i32",
        "eps": "fp32",
    }
    for qk_norm in (False, True):
        constants = _constants(num_heads, num_kv_heads, head_dim, block_size, qk_norm)
        yield Specialisation(_rotate_and_cache_kernel, signature, constants, _NUM_WARPS, num_stages=1)
