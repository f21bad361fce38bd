"""Kernels against what the device can do, measured in the same run: its copy, torch's attention, cuBLAS."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from twopool.kernels.activation import gated_activation
from twopool.kernels.attention import paged_attention, plan_attention
from twopool.kernels.kv_cache import slot_rows
from twopool.kernels.linear import linear, pack_linear
from twopool.kernels.qkv import rotate_and_cache
from twopool.kernels.rms_norm import add_rms_norm_
from twopool.kernels.sampling import ROW_DTYPE, SamplingBatch, sample
from twopool.scripts.gpu_check_report import Result, median_seconds

DTYPE = torch.bfloat16
BLOCK_SIZE = 16


@dataclass(frozen=True)
class KernelSizes:
    """How much each measurement moves."""

    copy_bytes: int = 1 << 30
    rows: int = 16_384
    hidden_size: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    decode: tuple[tuple[int, int], ...] = ((1, 8192), (64, 4096))
    """(sequences, context) each"""
    prefill: int = 8192
    products: tuple[tuple[int, int, int], ...] = ((1, 4096, 14_336), (64, 4096, 14_336), (4096, 4096, 14_336))
    """(rows, columns, depth) each"""
    vocab_size: int = 128_256


@torch.inference_mode()
def kernel_speed(device: torch.device, sizes: KernelSizes) -> Iterator[Result]:
    """All measurements."""
    copy = _copy(device, sizes.copy_bytes)
    yield Result("bandwidth", "device copy, read + write", value=copy, unit="GB/s")
    yield from _fused(device, sizes, copy)
    for num_seqs, context in sizes.decode:
        yield _decode(device, sizes, num_seqs, context, copy)
    yield _prefill(device, sizes)
    for product in sizes.products:
        yield _product(device, *product)
    yield from _sampling(device, sizes)


def _copy(device: torch.device, num_bytes: int) -> float:
    """GB/s"""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_seconds(lambda: target.copy_(source), device) / 1e9


def _bandwidth(name: str, num_bytes: int, seconds: float, copy: float) -> Result:
    value = num_bytes / seconds / 1e9
    return Result("bandwidth", name, value=value, unit="GB/s", reference=copy, reference_name="copy")


def _fused(device: torch.device, sizes: KernelSizes, copy: float) -> Iterator[Result]:
    rows, width, size = sizes.rows, sizes.hidden_size, DTYPE.itemsize
    x, residual = (torch.randn(rows, width, device=device).to(DTYPE) for _ in range(2))
    weight = torch.ones(width, dtype=DTYPE, device=device)
    seconds = median_seconds(lambda: add_rms_norm_(x, residual, weight, 1e-5), device)
    yield _bandwidth("residual + RMSNorm", 4 * x.numel() * size, seconds, copy)
    seconds = median_seconds(lambda: gated_activation(x, "silu"), device)
    yield _bandwidth("gated SiLU", x.numel() * size * 3 // 2, seconds, copy)
    heads, kv_heads, dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    num_blocks = -(-rows // BLOCK_SIZE)
    pool = torch.zeros(num_blocks, kv_heads, 1, 2, BLOCK_SIZE, dim, dtype=DTYPE, device=device)
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, device=device).to(DTYPE)
    angles = torch.ones(rows, 1, dim, dtype=DTYPE, device=device)
    places = slot_rows(torch.arange(rows, device=device), pool)
    seconds = median_seconds(
        lambda: rotate_and_cache(
            qkv, angles, angles, norms=None, eps=1e-5, kv_pool=pool, layer=0, rows=places, num_heads=heads
        ),
        device,
    )
    yield _bandwidth("rotation + cache write", 2 * qkv.numel() * size, seconds, copy)


def _decode(device: torch.device, sizes: KernelSizes, num_seqs: int, context: int, copy: float) -> Result:
    blocks = -(-context // BLOCK_SIZE)
    pool = torch.randn(num_seqs * blocks, sizes.num_kv_heads, 1, 2, BLOCK_SIZE, sizes.head_dim, device=device).to(DTYPE)
    order = torch.randperm(num_seqs * blocks, device=device).to(torch.int32)
    queries = torch.randn(num_seqs, sizes.num_heads, sizes.head_dim, device=device).to(DTYPE)
    plan = plan_attention(
        query_lens=np.ones(num_seqs, dtype=np.int32),
        context_lens=np.full(num_seqs, context, dtype=np.int32),
        block_tables=order.view(num_seqs, blocks),
        kv_pool=pool,
        num_heads=sizes.num_heads,
        sliding_window=None,
        dtype=DTYPE,
    )
    scale = sizes.head_dim**-0.5
    seconds = median_seconds(lambda: paged_attention(queries, pool, 0, plan, scale=scale), device)
    num_bytes = num_seqs * context * sizes.num_kv_heads * sizes.head_dim * 2 * DTYPE.itemsize
    return _bandwidth(f"paged decode, {num_seqs} x {context}", num_bytes, seconds, copy)


def _prefill(device: torch.device, sizes: KernelSizes) -> Result:
    """Causal attention over a whole prompt; flops are those of the causal half."""
    length, dim = sizes.prefill, sizes.head_dim
    blocks = -(-length // BLOCK_SIZE)
    pool = torch.randn(blocks, sizes.num_kv_heads, 1, 2, BLOCK_SIZE, dim, device=device).to(DTYPE)
    queries = torch.randn(length, sizes.num_heads, dim, device=device).to(DTYPE)
    plan = plan_attention(
        query_lens=np.array([length], dtype=np.int32),
        context_lens=np.array([length], dtype=np.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        kv_pool=pool,
        num_heads=sizes.num_heads,
        sliding_window=None,
        dtype=DTYPE,
    )
    scale = dim**-0.5
    seconds = median_seconds(lambda: paged_attention(queries, pool, 0, plan, scale=scale), device, repeats=7)
    q = queries.transpose(0, 1)[None].contiguous()
    k, v = (torch.randn(1, sizes.num_kv_heads, length, dim, device=device).to(DTYPE) for _ in range(2))
    reference = median_seconds(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), device, repeats=7
    )
    flops = 2 * length * length * dim * sizes.num_heads
    return Result(
        "flops",
        f"prefill attention of {length}",
        value=flops / seconds / 1e12,
        unit="TF/s",
        reference=flops / reference / 1e12,
        reference_name="torch SDPA",
    )


def _product(device: torch.device, rows: int, columns: int, depth: int) -> Result:
    x = torch.randn(rows, depth, device=device).to(DTYPE)
    weight = torch.randn(columns, depth, device=device).to(DTYPE)
    ours = pack_linear(weight, deterministic=True)
    seconds = median_seconds(lambda: linear(x, ours), device)
    reference = median_seconds(lambda: F.linear(x, weight), device)
    flops = 2 * rows * columns * depth
    return Result(
        "flops",
        f"batch-invariant product {rows} x {columns} x {depth}",
        value=flops / seconds / 1e12,
        unit="TF/s",
        reference=flops / reference / 1e12,
        reference_name="cuBLAS",
    )


def _sampling(device: torch.device, sizes: KernelSizes) -> Iterator[Result]:
    logits = torch.randn(64, sizes.vocab_size, device=device)
    for name, top_k, top_p in (("temperature", 0, 1.0), ("top-k 50, top-p 0.9", 50, 0.9)):
        rows = np.zeros(64, dtype=ROW_DTYPE)
        rows["temperature"], rows["repetition_penalty"], rows["top_k"], rows["top_p"] = 1.0, 1.0, top_k, top_p
        batch = SamplingBatch(rows=rows)
        seconds = median_seconds(lambda batch=batch: sample(logits.clone(), batch), device)  # type: ignore[misc]
        yield Result("sampling", f"64 draws, {name}", value=seconds * 1e3, unit="ms")
