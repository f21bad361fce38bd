"""Causal grouped-query attention over the paged KV pool, for a ragged batch of prompts and decodes.

`plan_attention` turns block tables and lengths into index tensors and masks, once a step and window;
`paged_attention` is then called for every layer with the same plan.

How it works: blocks are gathered into contiguous keys and values (whole blocks are contiguous in the
pool, so this runs at the speed of a copy), bytes beyond a sequence's end, which may be NaN, are set to
zero, and scaled_dot_product_attention does the rest. All sequences with one query row are served
together, grouped by length; every prompt chunk is served by itself, in tiles of query rows.

Sameness of bits: a decode's padded length follows from its own length alone, each (sequence, head) is
a product of its own, and masked positions add exact zeros, so on CPU with one thread a sequence has the
same bits alone and in any batch. Not promised: float32 on several threads (MKL splits a lone product
over threads, one of many it does not), and one position prefilled in chunks of other sizes or decoded,
as the GEMM below sums in another order for another number of query rows.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from twopool.kernels.backend import uses_triton

if TYPE_CHECKING:
    from twopool.kernels.gpu.attention import TritonAttentionPlan

HostInts = npt.NDArray[np.int32]

_TILE_ROWS = 256  # query rows of a prompt chunk that share one mask
_MIN_BUCKET_STEP = 2  # blocks


@dataclass(frozen=True)
class _Gather:
    """Which keys and values to bring together for n sequences, C = blocks x block_size tokens each."""

    rows: Tensor
    """[n * num_kv_heads * blocks] int64, rows of the pool seen as [-1, block_size * head_dim]: the
    keys of layer 0; the values are one row further, the next layer two"""
    stale: Tensor | None
    """[m] int64, tokens of the gathered [n * num_kv_heads * C] that lie beyond their sequence's end"""
    keys: Tensor
    values: Tensor
    """[n, num_kv_heads, C, head_dim] each: workspace that every layer fills anew, so that it stays
    in the processor's caches and is not faulted in again"""


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences with one query row and the same padded length."""

    query_rows: Tensor
    """[n] int64"""
    gather: _Gather
    mask: Tensor
    """[n, 1, 1, C] of the query's dtype: 0 or -inf"""


@dataclass(frozen=True)
class _Tile:
    """Consecutive query rows of a chunk and the keys any of them sees."""

    rows: slice
    """rows of the flat batch"""
    keys: slice
    """positions within the chunk's gathered keys"""
    mask: Tensor | None
    """[rows, keys] of the query's dtype, or None: causal from the first key on"""


@dataclass(frozen=True)
class _Chunk:
    gather: _Gather
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True)
class TorchAttentionPlan:
    """What `plan_attention` gives where torch attends."""

    decode_groups: tuple[_DecodeGroup, ...]
    chunks: tuple[_Chunk, ...]
    num_rows: int


AttentionPlan: TypeAlias = "TorchAttentionPlan | TritonAttentionPlan"
"""What one step's attention has to do, the same for every layer with the same window; of the device it was made for."""


def plan_attention(
    *,
    query_lens: HostInts,
    context_lens: HostInts,
    block_tables: Tensor,
    kv_pool: Tensor,
    num_heads: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Plan the attention of one step.

    query_lens, context_lens: [S] on the host; sequence s owns the next query_lens[s] rows of the
        batch, whose positions end at context_lens[s] - 1.
    block_tables: [S, max_blocks] integers on the pool's device, padded with any valid block.
    num_heads: query heads, a multiple of the pool's KV heads.
    sliding_window: a position sees itself and the sliding_window - 1 before it; None sees all.
    dtype: that of the queries and of the pool.
    """
    if uses_triton(kv_pool):
        from twopool.kernels.gpu import attention as gpu

        return gpu.plan_attention(
            query_lens=query_lens,
            context_lens=context_lens,
            block_tables=block_tables,
            num_kv_heads=kv_pool.shape[1],
            num_heads=num_heads,
            sliding_window=sliding_window,
        )
    first_rows = np.concatenate(([0], np.cumsum(query_lens)))
    planner = _Planner(block_tables, context_lens, kv_pool, sliding_window, dtype)
    return TorchAttentionPlan(
        decode_groups=planner.decode_groups(query_lens, first_rows),
        chunks=planner.chunks(query_lens, first_rows),
        num_rows=int(first_rows[-1]),
    )


def paged_attention(
    queries: Tensor,
    kv_pool: Tensor,
    layer: int,
    plan: AttentionPlan,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """queries [T, num_heads, head_dim] -> [T, num_heads, head_dim], both of the pool's dtype.

    The step's own K and V must already be in `kv_pool`. soft_cap c bends scores to c * tanh(s / c).
    """
    if uses_triton(queries):
        from twopool.kernels.gpu import attention as gpu

        return gpu.paged_attention(
            queries, kv_pool, layer, cast("TritonAttentionPlan", plan), scale=scale, soft_cap=soft_cap
        )
    assert isinstance(plan, TorchAttentionPlan)  # plans are made for the device they are used on
    num_kv_heads = kv_pool.shape[1]
    num_rows, num_heads, head_dim = queries.shape
    # query head h belongs to KV head h // group_size
    grouped = queries.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    output = queries.new_empty(grouped.shape)
    for group in plan.decode_groups:
        keys, values = _gather(kv_pool, layer, group.gather)  # [n, kv_heads, C, head_dim]
        # The heads that share a KV head stand as its query rows: K and V are read once for all.
        attended = _attend(grouped.index_select(0, group.query_rows), keys, values, group.mask, scale, soft_cap)
        output.index_copy_(0, group.query_rows, attended)
    for chunk in plan.chunks:
        keys, values = _gather(kv_pool, layer, chunk.gather)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)  # [kv_heads, 1, C, head_dim]
        for tile in chunk.tiles:
            attended = _attend(
                grouped[tile.rows].permute(1, 2, 0, 3),  # [kv_heads, group, rows, head_dim]
                keys[:, :, tile.keys],
                values[:, :, tile.keys],
                tile.mask,
                scale,
                soft_cap,
            )
            output[tile.rows] = attended.permute(2, 0, 1, 3)
    return output.view(num_rows, num_heads, head_dim)


def _gather(kv_pool: Tensor, layer: int, gather: _Gather) -> tuple[Tensor, Tensor]:
    """-> keys, values: [n, num_kv_heads, C, head_dim] each, zero where stale."""
    block_size, head_dim = kv_pool.shape[-2:]
    blocks = kv_pool.view(-1, block_size * head_dim)
    key_rows = gather.rows + 2 * layer
    for rows, workspace in ((key_rows, gather.keys), (key_rows + 1, gather.values)):
        torch.index_select(blocks, 0, rows, out=workspace.view(-1, block_size * head_dim))
        if gather.stale is not None:
            workspace.view(-1, head_dim).index_fill_(0, gather.stale, 0)
    return gather.keys, gather.values


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """queries [a, b, rows, d]; keys, values [a, b or 1, C, d]; mask broadcasts to [a, b, rows, C].

    No mask means causal from the first key on. Every row sees at least its own position.
    """
    if soft_cap is not None:
        return _attend_capped(queries, keys, values, mask, scale, soft_cap)
    broadcast = (queries.shape[0], queries.shape[1], *keys.shape[2:])  # no copy: stride 0
    return F.scaled_dot_product_attention(
        queries,
        keys.expand(broadcast),
        values.expand(broadcast),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )


def _attend_capped(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    soft_cap: float,
) -> Tensor:
    """`_attend` with bent scores, which scaled_dot_product_attention does not offer."""
    num_rows, num_keys = queries.shape[2], keys.shape[2]
    output = torch.empty_like(queries)
    for first in range(0, num_rows, _TILE_ROWS):  # bounds the scores' memory
        rows = slice(first, min(first + _TILE_ROWS, num_rows))
        scores = torch.matmul(queries[:, :, rows].float(), keys.float().transpose(-1, -2)) * scale
        scores = torch.tanh(scores / soft_cap) * soft_cap
        if mask is None:
            hidden = scores.new_full((rows.stop - first, num_keys), -torch.inf).triu_(first + 1)
        else:
            hidden = mask if mask.shape[-2] == 1 else mask[rows]
        weights = torch.softmax(scores + hidden, dim=-1)
        output[:, :, rows] = torch.matmul(weights, values.float()).to(queries.dtype)
    return output


def _bucket(num_blocks: int) -> int:
    """Round up so that padding wastes an eighth at most and few group sizes exist.

    A function of the sequence's own length only: its neighbours never change its sums.
    """
    step = max(_MIN_BUCKET_STEP, (1 << (num_blocks - 1).bit_length()) // 16)
    return -(-num_blocks // step) * step


class _Planner:
    def __init__(
        self,
        block_tables: Tensor,
        context_lens: HostInts,
        kv_pool: Tensor,
        sliding_window: int | None,
        dtype: torch.dtype,
    ) -> None:
        self._block_tables = block_tables
        self._context_lens = context_lens
        _, self._num_kv_heads, self._num_layers, _, self._block_size, self._head_dim = kv_pool.shape
        self._window = sliding_window
        self._dtype = dtype
        self._device = kv_pool.device

    def decode_groups(self, query_lens: HostInts, first_rows: npt.NDArray[np.int64]) -> tuple[_DecodeGroup, ...]:
        sequences = np.flatnonzero(query_lens == 1)
        members: dict[int, list[int]] = defaultdict(list)
        for sequence in sequences.tolist():
            context = int(self._context_lens[sequence])
            first, end = self._block_range(context - 1, context)
            members[_bucket(end - first)].append(sequence)
        return tuple(
            self._decode_group(np.array(group), num_blocks, first_rows) for num_blocks, group in sorted(members.items())
        )

    def chunks(self, query_lens: HostInts, first_rows: npt.NDArray[np.int64]) -> tuple[_Chunk, ...]:
        sequences = np.flatnonzero(query_lens > 1).tolist()
        spans = {s: self._chunk_span(s, int(query_lens[s])) for s in sequences}
        widths = [end - first for first, end in spans.values()]
        band = self._band(max(widths, default=0) * self._block_size)
        return tuple(self._chunk(s, spans[s], int(query_lens[s]), int(first_rows[s]), band) for s in sequences)

    def _block_range(self, first_query: int, context: int) -> tuple[int, int]:
        """Blocks that hold what the positions first_query ... context - 1 see."""
        oldest = 0 if self._window is None else max(0, first_query - self._window + 1)
        return oldest // self._block_size, -(-context // self._block_size)

    def _decode_group(
        self, sequences: npt.NDArray[np.int64], num_blocks: int, first_rows: npt.NDArray[np.int64]
    ) -> _DecodeGroup:
        context = self._context_lens[sequences].astype(np.int64)
        oldest = np.zeros_like(context)
        if self._window is not None:
            oldest = np.maximum(0, context - self._window)
        first_blocks = oldest // self._block_size
        offsets = np.arange(num_blocks * self._block_size)
        positions = first_blocks[:, None] * self._block_size + offsets  # [n, C]
        hidden = (positions < oldest[:, None]) | (positions >= context[:, None])
        mask = torch.zeros(hidden.shape, dtype=self._dtype)
        mask.masked_fill_(torch.from_numpy(hidden), -torch.inf)
        return _DecodeGroup(
            query_rows=torch.from_numpy(first_rows[sequences]).to(self._device),
            gather=self._gather_plan(sequences, first_blocks, num_blocks),
            mask=mask[:, None, None, :].to(self._device),
        )

    def _gather_plan(
        self,
        sequences: npt.NDArray[np.int64],
        first_blocks: npt.NDArray[np.int64],
        num_blocks: int,
    ) -> _Gather:
        context = self._context_lens[sequences].astype(np.int64)
        # Padding repeats the sequence's own first block: nobody else's memory is touched, and a full
        # block needs no cleaning.
        last_blocks = (context - 1) // self._block_size
        columns = first_blocks[:, None] + np.arange(num_blocks)  # [n, num_blocks]
        columns = np.where(columns <= last_blocks[:, None], columns, first_blocks[:, None])
        tables = self._block_tables[torch.from_numpy(sequences).to(self._device)]
        blocks = tables.long().gather(1, torch.from_numpy(columns).to(self._device))
        heads = torch.arange(self._num_kv_heads, device=self._device)
        head_rows = blocks[:, None, :] * self._num_kv_heads + heads[:, None]  # [n, heads, blocks]
        positions = columns[:, :, None] * self._block_size + np.arange(self._block_size)
        beyond = (positions >= context[:, None, None]).reshape(len(sequences), -1)  # [n, C]
        beyond_by_head = np.repeat(beyond[:, None, :], self._num_kv_heads, axis=1)
        stale = np.flatnonzero(beyond_by_head)
        num_tokens = num_blocks * self._block_size
        shape = (len(sequences), self._num_kv_heads, num_tokens, self._head_dim)
        return _Gather(
            rows=(head_rows * (2 * self._num_layers)).reshape(-1),
            stale=torch.from_numpy(stale).to(self._device) if stale.size else None,
            keys=torch.empty(shape, dtype=self._dtype, device=self._device),
            values=torch.empty(shape, dtype=self._dtype, device=self._device),
        )

    def _chunk_span(self, sequence: int, query_len: int) -> tuple[int, int]:
        context = int(self._context_lens[sequence])
        return self._block_range(context - query_len, context)

    def _band(self, width: int) -> Tensor:
        """[_TILE_ROWS, width + _TILE_ROWS + block_size]: row i, column j says whether a query i rows
        into its tile sees the key at j - width positions from the tile's first query. A tile's mask
        is a window of columns of it, whatever the tile's place."""
        if width == 0:
            return torch.empty(0)
        row = torch.arange(_TILE_ROWS)[:, None]
        column = torch.arange(width + _TILE_ROWS + self._block_size)
        distance = row - (column - width)  # query position minus key position
        hidden = distance < 0
        if self._window is not None:
            hidden |= distance >= self._window
        band = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return band.to(self._device)

    def _chunk(self, sequence: int, span: tuple[int, int], query_len: int, first_row: int, band: Tensor) -> _Chunk:
        context = int(self._context_lens[sequence])
        start = context - query_len
        gather = self._gather_plan(np.array([sequence]), np.array([span[0]]), span[1] - span[0])
        origin = span[0] * self._block_size  # position of the first gathered key
        if self._window is None and start == 0:
            rows = slice(first_row, first_row + query_len)
            return _Chunk(gather, (_Tile(rows, slice(0, query_len), None),))
        tiles = []
        width = band.shape[1] - _TILE_ROWS - self._block_size
        for offset in range(0, query_len, _TILE_ROWS):
            num_rows = min(_TILE_ROWS, query_len - offset)
            first_query = start + offset
            first_block, end_block = self._block_range(first_query, first_query + num_rows)
            keys = slice(first_block * self._block_size - origin, end_block * self._block_size - origin)
            shift = width - first_query + origin  # band column of the first gathered key
            mask = band[:num_rows, shift + keys.start : shift + keys.stop]
            rows = slice(first_row + offset, first_row + offset + num_rows)
            tiles.append(_Tile(rows, keys, mask))
        return _Chunk(gather, tuple(tiles))
