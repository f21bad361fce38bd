"""Attention over a paged pool that is NaN wherever nothing was written, and the same in dense float64."""

from dataclasses import dataclass

import numpy as np
import torch

from twopool.kernels.attention import paged_attention, plan_attention

LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Case:
    """Sequences as (query rows, context length), and the shape of the heads."""

    lengths: list[tuple[int, int]]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32
    spread: float = 1.0
    """scale of the queries: large ones give scores far from zero"""


class Problem:
    """A filled pool and its dense counterpart."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(sum(q + 7 * c for q, c in case.lengths))
        self.case = case
        blocks_needed = [-(-context // case.block_size) for _, context in case.lengths]
        num_blocks = sum(blocks_needed) + 3
        shape = (num_blocks, case.num_kv_heads, LAYERS, 2, case.block_size, case.head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=case.dtype)
        order = torch.randperm(num_blocks - 1, generator=generator).add(1).tolist()
        # Block 0, which pads the tables, stays NaN.
        self.tables = torch.zeros(len(blocks_needed), max(blocks_needed) + 1, dtype=torch.int32)
        self.dense: list[torch.Tensor] = []
        for row, ((_, context), count) in enumerate(zip(case.lengths, blocks_needed, strict=True)):
            blocks, order = order[:count], order[count:]
            self.tables[row, :count] = torch.tensor(blocks)
            kv = torch.randn(2, case.num_kv_heads, context, case.head_dim, generator=generator)
            kv = kv.to(case.dtype)
            self.dense.append(kv)
            for position in range(context):
                block, offset = blocks[position // case.block_size], position % case.block_size
                self.pool[block, :, LAYER, :, offset] = kv[:, :, position].transpose(0, 1)
        num_rows = sum(query_len for query_len, _ in case.lengths)
        queries = torch.randn(num_rows, case.num_heads, case.head_dim, generator=generator)
        self.queries = (queries * case.spread).to(case.dtype)
        self.scale = case.head_dim**-0.5

    def solve(self, only: int | None = None) -> torch.Tensor:
        """paged_attention over all sequences, or over one alone."""
        lengths = np.array(self.case.lengths, dtype=np.int32)
        queries, tables = self.queries, self.tables
        if only is not None:
            first = int(lengths[:only, 0].sum())
            queries = queries[first : first + int(lengths[only, 0])].clone()
            lengths, tables = lengths[only : only + 1], tables[only : only + 1]
        plan = plan_attention(
            query_lens=lengths[:, 0],
            context_lens=lengths[:, 1],
            block_tables=tables,
            kv_pool=self.pool,
            num_heads=self.case.num_heads,
            sliding_window=self.case.window,
            dtype=self.case.dtype,
        )
        return paged_attention(queries, self.pool, LAYER, plan, scale=self.scale, soft_cap=self.case.soft_cap)

    def reference(self) -> torch.Tensor:
        """Dense attention in float64."""
        outputs, first = [], 0
        for (query_len, context), kv in zip(self.case.lengths, self.dense, strict=True):
            group = self.case.num_heads // self.case.num_kv_heads
            keys, values = kv.double().repeat_interleave(group, dim=1)
            queries = self.queries[first : first + query_len].double().transpose(0, 1)
            first += query_len
            scores = queries @ keys.transpose(-1, -2) * self.scale
            if self.case.soft_cap is not None:
                scores = torch.tanh(scores / self.case.soft_cap) * self.case.soft_cap
            distance = torch.arange(context - query_len, context)[:, None] - torch.arange(context)
            hidden = distance < 0
            if self.case.window is not None:
                hidden |= distance >= self.case.window
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
            outputs.append((weights @ values).transpose(0, 1))
        return torch.cat(outputs)

    def check(self, tolerance: float = 1e-5) -> None:
        got = self.solve()
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), self.reference(), rtol=0, atol=tolerance)
