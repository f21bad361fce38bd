"""Every kernel on the device against its torch reference on the host, and the bits of a position in any batch."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twopool.kernels.activation import gated_activation
from twopool.kernels.attention import paged_attention, plan_attention
from twopool.kernels.kv_cache import copy_blocks, slot_rows
from twopool.kernels.linear import linear, pack_linear
from twopool.kernels.qkv import rotate_and_cache
from twopool.kernels.rms_norm import add_rms_norm_, rms_norm
from twopool.kernels.rows import gather_rows
from twopool.kernels.sampling import ROW_DTYPE, SamplingBatch, sample
from twopool.scripts.gpu_check_report import Result

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
BLOCK_SIZE = 16

Compute = Callable[[Callable[[Tensor], Tensor]], Tensor]
"""Given a function that moves a tensor to a device, the result computed there."""


def compare(name: str, compute: Compute, device: torch.device, tolerance: float) -> Result:
    """Compute on the host and on ``device``; equal up to ``tolerance``, relative to the largest value."""
    wanted = compute(lambda tensor: tensor.clone()).double()
    got = compute(lambda tensor: tensor.clone().to(device)).double().cpu()
    error = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))  # NaN stays NaN
    return Result("correctness", name, passed=error <= tolerance, value=error, unit="relative error")


@torch.inference_mode()
def correctness(device: torch.device) -> Iterator[Result]:
    """All kernels, in float32 and bfloat16."""
    for dtype, tolerance in TOLERANCE.items():
        label = str(dtype).removeprefix("torch.")
        for name, compute in (*_elementwise(dtype), *_attention(dtype)):
            yield compare(f"{name}, {label}", compute, device, tolerance)
    yield _draws(device)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _elementwise(dtype: torch.dtype) -> Iterator[tuple[str, Compute]]:
    x, other, weight = (_random(37, 576, dtype=dtype, seed=seed) for seed in range(3))
    yield "RMSNorm", lambda to: rms_norm(to(x), to(weight[0]), 1e-5)
    yield "residual + RMSNorm", lambda to: add_rms_norm_(to(x), to(other), to(weight[0]), 1e-5)
    for activation in ("silu", "gelu", "gelu_tanh"):
        yield f"gated {activation}", lambda to, kind=activation: gated_activation(to(x), kind)  # type: ignore[misc]
    rows = torch.tensor([5, 0, 36, 5])
    yield "row gather", lambda to: gather_rows(to(x), to(rows))
    matrix, bias = _random(320, 576, dtype=dtype, seed=3) / 24, _random(320, dtype=dtype, seed=4)
    yield "batch-invariant product", lambda to: linear(to(x), pack_linear(to(matrix), to(bias), deterministic=True))
    pool = _random(8, 3, 2, 2, BLOCK_SIZE, 64, dtype=dtype, seed=5)

    def copied(to: Callable[[Tensor], Tensor]) -> Tensor:
        target = to(pool)
        copy_blocks(target, to(torch.tensor([1, 2])), to(torch.tensor([2, 5])))
        return target

    yield "block copy", copied
    qkv = _random(21, 9 + 2 * 3, 64, dtype=dtype, seed=6)
    angles = _random(21, 1, 32, dtype=torch.float32, seed=7)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    norms = _random(2, 64, dtype=dtype, seed=8)

    def rotated(to: Callable[[Tensor], Tensor]) -> Tensor:
        target, slots = to(pool), to(torch.arange(21) * 5)
        queries = rotate_and_cache(
            to(qkv),
            to(cos),
            to(sin),
            norms=(to(norms[0]), to(norms[1])),
            eps=1e-6,
            kv_pool=target,
            layer=1,
            rows=slot_rows(slots, target),
            num_heads=9,
        )
        return torch.cat((queries.reshape(-1), target.reshape(-1)))

    yield "QK-norm + rotation + cache write", rotated


def _attention(dtype: torch.dtype) -> Iterator[tuple[str, Compute]]:
    lengths = np.array([(1, 1), (17, 17), (1, 400), (5, 37), (300, 700), (1, 600)], dtype=np.int32)
    for num_heads, num_kv_heads, head_dim, window, soft_cap in (
        (9, 3, 64, None, None),
        (7, 1, 128, 33, None),
        (4, 2, 96, None, 20.0),
    ):
        counts = -(-lengths[:, 1] // BLOCK_SIZE)
        tables = np.zeros((len(lengths), counts.max()), dtype=np.int32)
        for row, first, count in zip(tables, np.cumsum(counts) - counts, counts, strict=True):
            row[:count] = np.arange(first, first + count)
        pool = _random(int(counts.sum()), num_kv_heads, 2, 2, BLOCK_SIZE, head_dim, dtype=dtype)
        for row, (_, context), count in zip(tables, lengths, counts, strict=True):
            pool[row[count - 1], :, :, :, context - count * BLOCK_SIZE + BLOCK_SIZE :] = torch.nan  # stale bytes
        queries = _random(int(lengths[:, 0].sum()), num_heads, head_dim, dtype=dtype, seed=1)

        def attend(
            to: Callable[[Tensor], Tensor],
            queries: Tensor = queries,
            pool: Tensor = pool,
            tables: Any = tables,
            window: int | None = window,
            soft_cap: float | None = soft_cap,
        ) -> Tensor:
            on_device = to(pool)
            plan = plan_attention(
                query_lens=lengths[:, 0],
                context_lens=lengths[:, 1],
                block_tables=to(torch.from_numpy(tables)),
                kv_pool=on_device,
                num_heads=queries.shape[1],
                sliding_window=window,
                dtype=dtype,
            )
            scale = queries.shape[2] ** -0.5
            return paged_attention(to(queries), on_device, 1, plan, scale=scale, soft_cap=soft_cap)

        extras = (f", window {window}" if window else "") + (", soft cap" if soft_cap else "")
        yield f"paged attention {num_heads}/{num_kv_heads} heads of {head_dim}{extras}", attend


def _draws(device: torch.device) -> Result:
    """Tokens drawn with every kind of truncation: the same on the host and on the device, but for rounding."""
    rows = np.zeros(256, dtype=ROW_DTYPE)
    rows["seed"] = np.arange(256)
    rows["repetition_penalty"] = 1.0
    rows["temperature"] = np.tile([0.0, 0.7, 1.0, 1.5], 64)
    rows["top_k"] = np.repeat([0, 1, 50, 1000], 64)
    rows["top_p"] = np.tile(np.repeat([1.0, 0.9, 0.5, 0.1], 4), 16)
    rows["min_p"] = np.tile(np.repeat([0.0, 0.05], 16), 8)
    logits = _random(256, 50_001, dtype=torch.float32) * 3
    host = sample(logits.clone(), SamplingBatch(rows=rows)).token_ids
    drawn = sample(logits.to(device), SamplingBatch(rows=rows)).token_ids
    differing = int((host != drawn).sum())
    # A last-bit difference of a weight turns a draw with a probability of that order only.
    return Result("correctness", "draws", passed=differing <= 1, value=differing, unit="of 256 differ")
