"""Paged attention on GPUs: one algorithm a row, whether the row is prefilled or decoded.

Order of summation. The positions of a sequence are cut into *splits* of SPLIT tokens, and a split into tiles of
BLOCK_N, both at absolute positions. A row's scores are reduced tile by tile within a split (online softmax, from
empty), and the splits' results are merged one after the other, from empty. That order, the tile sizes, the kind of MMA
and the number of warps follow from head_dim, group size and dtype alone, so a row's bits depend neither on its batch
nor on chunk boundaries nor on the way it took through the two paths below. Tiles and splits a row does not see add
exact zeros.

- *Tiles of rows* (`_attend_tiles_kernel`): a program walks all splits of BLOCK_M rows and merges as it goes; chunks.
- *Splits* (`_attend_splits_kernel`, `_combine_splits_kernel`): a program computes one split of a sequence whose rows
  fit into one tile, and a second kernel merges; decodes and short chunks, which would not fill the GPU otherwise.

The query heads that share a KV head stand as rows of its tile, row = query * GROUP + head, for any GROUP. Where a
multiply and an add are to be one rounding that is written as `tl.fma`, so that both paths round alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from twopool.kernels.backend import upload
from twopool.kernels.gpu.compilation import EXACT, IS_AMD, TRITON_TYPES, Specialisation, next_power_of_two

HostInts = npt.NDArray[np.int32]

SPLIT = 256  # tokens
_BLOCK_M = 64  # rows: the smallest tile that Hopper's warpgroup MMA takes, so decode and prefill share it
_MAX_PROGRAMS = 2048  # of the persistent split kernel
_MAX_QUERY_BYTES = 64 * 1024  # of a tile, all that an MI300 has
_NO_WINDOW = 2**31 - 1
_LOG2_E = 1.4426950408889634
_LISTS = [
    "tables_ptr",
    "row_starts_ptr",
    "context_lens_ptr",
    "first_slots_ptr",
    "tiles_ptr",
    "items_ptr",
    "num_items_ptr",
    "rows_ptr",
]
"""Parts of one buffer: where they begin changes from step to step, which must not compile a kernel anew."""


@triton.jit
def _merge(peak, total, acc, part_peak, part_total, part_acc):
    """Merge a split's result into what came before it. [rows], [rows], [rows, dims] each; peaks in log2."""
    merged = tl.maximum(peak, part_peak)
    safe = tl.where(merged == float("-inf"), 0.0, merged)  # nothing seen yet: -inf - -inf would be NaN
    keep = tl.exp2(peak - safe)
    add = tl.exp2(part_peak - safe)
    total = tl.fma(total, keep, part_total * add)
    acc = tl.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), part_acc * add[:, None])
    return merged, total, acc


@triton.jit
def _attend(
    queries,  # [BLOCK_M, BLOCK_D]
    positions,  # [BLOCK_M], -1 for rows that do not exist
    pool_ptr,  # at this head's and layer's keys in block 0
    table_ptr,  # the sequence's blocks
    context_len,
    begin,  # first position to look at, a multiple of BLOCK_N
    end,  # one beyond the last
    window,
    score_factor,
    cap_factor,
    block_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MERGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The part of begin ... end - 1 that lies in the last split touched, and all before it merged (when MERGE)."""
    dims = tl.arange(0, BLOCK_D)
    in_head = (dims < HEAD_DIM)[None, :]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    all_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    all_total = tl.zeros([BLOCK_M], tl.float32)
    all_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        if MERGE:  # noqa: SIM102 - decided when compiling, the inner one when running
            if (start % SPLIT == 0) & (start > begin):
                all_peak, all_total, all_acc = _merge(all_peak, all_total, all_acc, peak, total, acc)
                peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        keys_at = start + tl.arange(0, BLOCK_N)
        written = keys_at < context_len  # beyond may be NaN, in V as well
        block = tl.load(table_ptr + keys_at // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        offsets = block * block_stride + (keys_at % BLOCK_SIZE) * HEAD_DIM
        key_ptrs = pool_ptr + offsets[:, None] + dims[None, :]
        mask = written[:, None] & in_head
        keys = tl.load(key_ptrs, mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if SOFT_CAP:
            shrunk = tl.exp2(-tl.abs(scores * (2.0 * score_factor)))  # tanh(x) = (1 - e^-2x) / (1 + e^-2x), x >= 0
            bent = (1.0 - shrunk) / (1.0 + shrunk) * cap_factor
            scores = tl.where(scores < 0.0, -bent, bent)
        seen = (keys_at[None, :] <= positions[:, None]) & (keys_at[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        factor = 1.0 if SOFT_CAP else score_factor
        new_peak = tl.maximum(peak, tl.max(scores, axis=1) * factor)
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        if SOFT_CAP:
            weights = tl.exp2(scores - safe[:, None])
        else:
            shape: tl.constexpr = scores.shape
            weights = tl.exp2(
                tl.fma(scores, tl.full(shape, 1.0, tl.float32) * factor, tl.broadcast_to(-safe[:, None], shape))
            )
        keep = tl.exp2(peak - safe)
        total = tl.fma(total, keep, tl.sum(weights, axis=1))
        acc = acc * keep[:, None]
        values = tl.load(key_ptrs + BLOCK_SIZE * HEAD_DIM, mask=mask, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        peak = new_peak
    return peak, total, acc, all_peak, all_total, all_acc


@triton.jit
def _first_position(first_query, window):
    """The oldest position that a query at ``first_query`` sees."""
    return tl.maximum(first_query - window + 1, 0)


@triton.jit(do_not_specialize=["layer", "window", "table_stride"], do_not_specialize_on_alignment=_LISTS)
def _attend_tiles_kernel(
    queries_ptr,  # [T, NUM_KV_HEADS * GROUP, HEAD_DIM]
    output_ptr,  # the same
    pool_ptr,
    tables_ptr,  # [S, table_stride] int32
    row_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    tiles_ptr,  # [programs, 2] int32: sequence, tile of its rows
    layer,
    table_stride,
    window,
    score_factor,
    cap_factor,
    NUM_KV_HEADS: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence = tl.load(tiles_ptr + 2 * tl.program_id(0))
    tile = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    first_row = tl.load(row_starts_ptr + sequence)
    query_len = tl.load(row_starts_ptr + sequence + 1) - first_row
    context_len = tl.load(context_lens_ptr + sequence)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = rows // GROUP
    exists = query < query_len
    start_position = context_len - query_len
    positions = tl.where(exists, start_position + query, -1)
    offset = (first_row + query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    row_offsets = offset[:, None] * HEAD_DIM + dims[None, :]
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(queries_ptr + row_offsets, mask=mask, other=0.0)

    oldest = _first_position(start_position + (tile * BLOCK_M) // GROUP, window)
    newest = tl.minimum(start_position + (tile * BLOCK_M + BLOCK_M - 1) // GROUP, context_len - 1)
    block_stride: tl.constexpr = NUM_KV_HEADS * NUM_LAYERS * 2 * BLOCK_SIZE * HEAD_DIM
    plane = head.to(tl.int64) * NUM_LAYERS + layer
    peak, total, acc, all_peak, all_total, all_acc = _attend(
        queries,
        positions,
        pool_ptr + plane * (2 * BLOCK_SIZE * HEAD_DIM),
        tables_ptr + sequence.to(tl.int64) * table_stride,
        context_len,
        oldest // BLOCK_N * BLOCK_N,
        newest + 1,
        window,
        score_factor,
        cap_factor,
        block_stride,
        HEAD_DIM,
        BLOCK_SIZE,
        SPLIT,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        SOFT_CAP,
        True,
        PRECISION,
    )
    _, total, acc = _merge(all_peak, all_total, all_acc, peak, total, acc)
    output = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(output_ptr + row_offsets, output.to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer", "window", "table_stride"], do_not_specialize_on_alignment=_LISTS)
def _attend_splits_kernel(
    queries_ptr,
    pool_ptr,
    tables_ptr,
    row_starts_ptr,
    context_lens_ptr,
    first_slots_ptr,  # [S] int32, the first of a sequence's slots: one a split and query, queries innermost
    items_ptr,  # [items, 2] int32: sequence, split
    num_items_ptr,  # [1] int32
    part_acc_ptr,  # [slots, NUM_KV_HEADS * GROUP, HEAD_DIM] float32
    part_sums_ptr,  # [slots, NUM_KV_HEADS * GROUP, 2] float32: peak, total
    layer,
    table_stride,
    window,
    score_factor,
    cap_factor,
    NUM_KV_HEADS: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    block_stride: tl.constexpr = NUM_KV_HEADS * NUM_LAYERS * 2 * BLOCK_SIZE * HEAD_DIM
    rows = tl.arange(0, BLOCK_M)
    query = rows // GROUP
    dims = tl.arange(0, BLOCK_D)
    num_work = tl.load(num_items_ptr) * NUM_KV_HEADS
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = work // NUM_KV_HEADS
        head = work % NUM_KV_HEADS
        sequence = tl.load(items_ptr + 2 * item)
        split = tl.load(items_ptr + 2 * item + 1)
        first_row = tl.load(row_starts_ptr + sequence)
        query_len = tl.load(row_starts_ptr + sequence + 1) - first_row
        context_len = tl.load(context_lens_ptr + sequence)
        exists = query < query_len
        start_position = context_len - query_len
        positions = tl.where(exists, start_position + query, -1)
        in_row = head * GROUP + rows % GROUP
        mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
        offset = (first_row + query).to(tl.int64) * num_heads + in_row
        queries = tl.load(queries_ptr + offset[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)

        oldest = _first_position(start_position, window)
        plane = tl.cast(head, tl.int64) * NUM_LAYERS + layer
        peak, total, acc, _peak, _total, _acc = _attend(
            queries,
            positions,
            pool_ptr + plane * (2 * BLOCK_SIZE * HEAD_DIM),
            tables_ptr + sequence.to(tl.int64) * table_stride,
            context_len,
            tl.maximum(oldest // BLOCK_N * BLOCK_N, split * SPLIT),
            tl.minimum(context_len, (split + 1) * SPLIT),
            window,
            score_factor,
            cap_factor,
            block_stride,
            HEAD_DIM,
            BLOCK_SIZE,
            SPLIT,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            SOFT_CAP,
            False,
            PRECISION,
        )
        slot = tl.load(first_slots_ptr + sequence) + (split - oldest // SPLIT) * query_len + query
        part = slot.to(tl.int64) * num_heads + in_row
        tl.store(part_acc_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        tl.store(part_sums_ptr + part * 2, peak, mask=exists)
        tl.store(part_sums_ptr + part * 2 + 1, total, mask=exists)


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=_LISTS)
def _combine_splits_kernel(
    output_ptr,  # [T, NUM_KV_HEADS * GROUP, HEAD_DIM]
    row_starts_ptr,
    context_lens_ptr,
    first_slots_ptr,
    rows_ptr,  # [programs, 3] int32: sequence, query of it, row of the output
    part_acc_ptr,
    part_sums_ptr,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    sequence = tl.load(rows_ptr + 3 * tl.program_id(0))
    query = tl.load(rows_ptr + 3 * tl.program_id(0) + 1)
    output_row = tl.load(rows_ptr + 3 * tl.program_id(0) + 2)
    query_len = tl.load(row_starts_ptr + sequence + 1) - tl.load(row_starts_ptr + sequence)
    context_len = tl.load(context_lens_ptr + sequence)
    first_slot = tl.load(first_slots_ptr + sequence)
    in_group = tl.arange(0, BLOCK_G)
    heads = tl.program_id(1) * GROUP + in_group
    dims = tl.arange(0, BLOCK_D)
    mask = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    first_split = _first_position(context_len - query_len, window) // SPLIT
    for split in range(first_split, tl.cdiv(context_len, SPLIT)):
        slot = first_slot + (split - first_split) * query_len + query
        part = slot.to(tl.int64) * num_heads + heads
        part_peak = tl.load(part_sums_ptr + part * 2, mask=in_group < GROUP, other=float("-inf"))
        part_total = tl.load(part_sums_ptr + part * 2 + 1, mask=in_group < GROUP, other=0.0)
        part_acc = tl.load(part_acc_ptr + part[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        peak, total, acc = _merge(peak, total, acc, part_peak, part_total, part_acc)
    output = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    target = output_ptr + (output_row.to(tl.int64) * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, output.to(output_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class TritonAttentionPlan:
    """One step's attention for one sliding window. All tensors int32 on the pool's device, contiguous."""

    block_tables: Tensor
    """[S, max_blocks]"""
    row_starts: Tensor
    """[S + 1]"""
    context_lens: Tensor
    """[S]"""
    first_slots: Tensor
    """[S]: where a sequence's partial results begin; meaningless for sequences served by tiles"""
    tiles: Tensor
    """[programs, 2]: sequence, tile of its rows"""
    split_items: Tensor
    """[items, 2]: sequence, split"""
    num_split_items: Tensor
    """[1]: how many of ``split_items`` count"""
    split_rows: Tensor
    """[rows, 3]: sequence, query of it, row of the batch"""
    num_slots: int
    """partial results to make room for"""
    num_rows: int
    group: int
    """query heads a KV head"""
    sliding_window: int | None


def plan_attention(
    *,
    query_lens: HostInts,
    context_lens: HostInts,
    block_tables: Tensor,
    num_kv_heads: int,
    num_heads: int,
    sliding_window: int | None,
) -> TritonAttentionPlan:
    """See ``kernels.attention.plan_attention``. Copies one small array to the device."""
    group = num_heads // num_kv_heads
    lists = work_lists(query_lens, context_lens, group=group, sliding_window=sliding_window)
    parts = {
        "row_starts": lists.row_starts,
        "context_lens": context_lens,
        "first_slots": lists.first_slots,
        "tiles": lists.tiles,
        "split_items": lists.split_items,
        "num_split_items": np.array([len(lists.split_items)]),
        "split_rows": lists.split_rows,
    }
    flat = np.concatenate([part.reshape(-1) for part in parts.values()]).astype(np.int32)
    device = iter(upload(flat, block_tables.device).split([part.size for part in parts.values()]))
    tensors = {name: next(device).view(part.shape) for name, part in parts.items()}
    return TritonAttentionPlan(
        block_tables=block_tables.to(torch.int32).contiguous(),
        **tensors,
        num_slots=lists.num_slots,
        num_rows=int(lists.row_starts[-1]),
        group=group,
        sliding_window=sliding_window,
    )


@dataclass(frozen=True)
class WorkLists:
    """Who does what in one step, on the host. int32 arrays, named as in ``TritonAttentionPlan``."""

    row_starts: HostInts
    first_slots: HostInts
    tiles: HostInts
    split_items: HostInts
    split_rows: HostInts
    num_slots: int


def work_lists(query_lens: HostInts, context_lens: HostInts, *, group: int, sliding_window: int | None) -> WorkLists:
    """Sequences whose rows fit one tile go by splits, the others by tiles, those with most keys first."""
    lens, contexts = query_lens.astype(np.int64), context_lens.astype(np.int64)
    row_starts = np.concatenate(([0], np.cumsum(lens)))
    block_m = block_rows(group)
    oldest = np.zeros_like(contexts)
    if sliding_window is not None:
        oldest = np.maximum(0, contexts - lens - sliding_window + 1)
    by_splits = lens * group <= block_m
    num_splits = np.where(by_splits, -(-contexts // SPLIT) - oldest // SPLIT, 0)
    slots = num_splits * lens
    items = _numbered(num_splits)
    items[:, 1] += (oldest // SPLIT)[items[:, 0]]
    rows = _numbered(np.where(by_splits, lens, 0))
    tiles = _numbered(np.where(by_splits, 0, -(-lens * group // block_m)))
    # The last tile of the longest context takes longest: begin with it, so that short ones fill the end.
    newest = (contexts - lens)[tiles[:, 0]] + tiles[:, 1] * block_m // group
    return WorkLists(
        row_starts=row_starts.astype(np.int32),
        first_slots=(np.cumsum(slots) - slots).astype(np.int32),
        tiles=tiles[np.argsort(-newest, kind="stable")].astype(np.int32),
        split_items=items.astype(np.int32),
        split_rows=np.column_stack((rows, row_starts[rows[:, 0]] + rows[:, 1])).astype(np.int32),
        num_slots=int(slots.sum()),
    )


def _numbered(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[sum(counts), 2]: (i, 0) ... (i, counts[i] - 1) for every i."""
    owners = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.column_stack((owners, numbers))


def paged_attention(
    queries: Tensor,
    kv_pool: Tensor,
    layer: int,
    plan: TritonAttentionPlan,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """See ``kernels.attention.paged_attention``."""
    _, num_kv_heads, num_layers, _, block_size, head_dim = kv_pool.shape
    num_heads = queries.shape[1]
    group = num_heads // num_kv_heads
    if group != plan.group:
        raise ValueError(f"{group} query heads a KV head, but {plan.group} when this was planned")
    queries = queries.contiguous()
    output = torch.empty_like(queries)
    window = _NO_WINDOW if plan.sliding_window is None else plan.sliding_window
    # Scores are kept in log2 units; a soft cap c bends s to c * tanh(s / c) first.
    factor = scale * _LOG2_E if soft_cap is None else scale / soft_cap * _LOG2_E
    scalars = (layer, plan.block_tables.stride(0), window, factor, (soft_cap or 0.0) * _LOG2_E)
    sequences = (plan.block_tables, plan.row_starts, plan.context_lens)
    constants, options = _configuration(
        num_kv_heads, num_layers, group, head_dim, block_size, queries.dtype, soft_cap is not None, amd=IS_AMD
    )
    if len(plan.tiles):
        grid = (len(plan.tiles), num_kv_heads)
        _attend_tiles_kernel[grid](
            queries, output, kv_pool, *sequences, plan.tiles, *scalars, **constants, **options, **EXACT
        )
    if len(plan.split_rows):
        acc = queries.new_empty((plan.num_slots, num_heads, head_dim), dtype=torch.float32)
        sums = queries.new_empty((plan.num_slots, num_heads, 2), dtype=torch.float32)
        programs = (min(len(plan.split_items) * num_kv_heads, _MAX_PROGRAMS),)
        lists = (plan.first_slots, plan.split_items, plan.num_split_items)
        _attend_splits_kernel[programs](
            queries, kv_pool, *sequences, *lists, acc, sums, *scalars, **constants, **options, **EXACT
        )
        grid = (len(plan.split_rows), num_kv_heads)
        _combine_splits_kernel[grid](
            output,
            plan.row_starts,
            plan.context_lens,
            plan.first_slots,
            plan.split_rows,
            acc,
            sums,
            window,
            **_combine_constants(num_kv_heads, group, head_dim),
            num_warps=4,
            **EXACT,
        )
    return output


def block_rows(group: int) -> int:
    """Rows (query x head of the group) of a tile."""
    return max(_BLOCK_M, next_power_of_two(group))


def _configuration(
    num_kv_heads: int,
    num_layers: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    soft_cap: bool,
    *,
    amd: bool,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Constants and launch options of both attention kernels, which have to be equal for their bits to be."""
    block_d = max(16, next_power_of_two(head_dim))
    row_bytes = block_d * dtype.itemsize
    if head_dim > 256 or block_rows(group) * row_bytes > _MAX_QUERY_BYTES:
        raise ValueError(f"attention of {group} heads a KV head of {head_dim} in {dtype} does not fit a GPU's memory")
    constants = {
        "NUM_KV_HEADS": num_kv_heads,
        "NUM_LAYERS": num_layers,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "SPLIT": SPLIT,
        "BLOCK_M": block_rows(group),
        "BLOCK_N": 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16,
        "BLOCK_D": block_d,
        "SOFT_CAP": soft_cap,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",  # TF32 is never asked for; 16-bit MMA ignores this
    }
    options = {"num_warps": 8 if block_d > 128 else 4, "num_stages": 1 if amd else 2}
    return constants, options


def _combine_constants(num_kv_heads: int, group: int, head_dim: int) -> dict[str, int]:
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "SPLIT": SPLIT,
        "BLOCK_G": next_power_of_two(group),
        "BLOCK_D": max(16, next_power_of_two(head_dim)),
    }


def specialisations(
    num_heads: int, num_kv_heads: int, num_layers: int, head_dim: int, block_size: int, dtype: torch.dtype, *, amd: bool
) -> Iterator[Specialisation]:
    """Every compilation a model with these heads may ask for."""
    pointer = f"*{TRITON_TYPES[dtype]}"
    group = num_heads // num_kv_heads
    sequences = dict.fromkeys(("tables_ptr", "row_starts_ptr", "context_lens_ptr"), "*i32")
    scalars = {
        "layer": "i32",
        "table_stride": "i32",
        "window": "i32",
        "score_factor": "fp32",
        "cap_factor": "fp32",
    }
    parts = {"part_acc_ptr": "*fp32", "part_sums_ptr": "*fp32"}
    tiles = {"queries_ptr": pointer, "output_ptr": pointer, "pool_ptr": pointer, **sequences, "tiles_ptr": "*i32"}
    lists = dict.fromkeys(("first_slots_ptr", "items_ptr", "num_items_ptr"), "*i32")
    splits = {"queries_ptr": pointer, "pool_ptr": pointer, **sequences, **lists, **parts}
    for soft_cap in (False, True):
        constants, options = _configuration(
            num_kv_heads, num_layers, group, head_dim, block_size, dtype, soft_cap, amd=amd
        )
        yield Specialisation(_attend_tiles_kernel, tiles | scalars, constants, **options)
        yield Specialisation(_attend_splits_kernel, splits | scalars, constants, **options)
    combine = {
        "output_ptr": pointer,
        **dict.fromkeys(("row_starts_ptr", "context_lens_ptr", "first_slots_ptr", "rows_ptr"), "*i32"),
        **parts,
        "window": "i32",
    }
    yield Specialisation(
        _combine_splits_kernel, combine, _combine_constants(num_kv_heads, group, head_dim), num_warps=4, num_stages=2
    )
