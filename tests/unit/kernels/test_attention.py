"""Paged attention against dense float64 attention, over pools full of NaN where nothing was written."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twopool.kernels.attention import _bucket, paged_attention, plan_attention

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


RAGGED = [(1, 1), (17, 17), (1, 400), (2, 2), (1, 16), (1, 17), (5, 37), (1, 33), (300, 700), (1, 64)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (7, 1), (4, 4), (1, 1)])
def test_any_group_size(heads: int, kv_heads: int) -> None:
    """NUM-03, X-sdpa-masked-row-nan."""
    Problem(Case(RAGGED, num_heads=heads, num_kv_heads=kv_heads)).check()


@pytest.mark.parametrize("window", [1, 8, 16, 33, 1000])
def test_sliding_window(window: int) -> None:
    """NUM-01: windows smaller than a block, equal to one, across several, wider than everything."""
    Problem(Case(RAGGED, window=window)).check()


@pytest.mark.parametrize("window", [None, 33])
def test_soft_cap(window: int | None) -> None:
    Problem(Case(RAGGED, window=window, soft_cap=5.0, spread=8.0)).check()


@pytest.mark.parametrize("window", [None, 16])
def test_bfloat16(window: int | None) -> None:
    """NUM-01: within the rounding of the inputs' type."""
    Problem(Case(RAGGED, window=window, dtype=torch.bfloat16)).check(tolerance=2e-2)


@pytest.mark.parametrize("window", [None, 33])
def test_scores_far_from_zero(window: int | None) -> None:
    """NUM-01: legal scores near -1e5 are neither lost nor mistaken for masked ones."""
    problem = Problem(Case([(1, 40), (20, 70)], window=window, spread=1e-3))
    # Every key is nearly the same large vector: the scores are about -1e5 with small differences.
    for kv in problem.dense:
        kv[0] *= 1e-3
        kv[0, :, :, 0] = 4e5
    problem.queries[:, :, 0] = -1.0
    for row, ((_, context), kv) in enumerate(zip(problem.case.lengths, problem.dense, strict=True)):
        for position in range(context):
            block = int(problem.tables[row, position // 16])
            problem.pool[block, :, LAYER, 0, position % 16] = kv[0, :, position]
    scores = problem.queries[0].double() @ problem.dense[0][0, 0].double().T * problem.scale
    assert scores.max() < -9e4
    problem.check(tolerance=1e-2)  # float32 resolves 0.008 at 1e5


def test_a_sequence_alone_and_in_a_batch() -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        problem = Problem(Case(RAGGED, dtype=dtype))
        together = problem.solve()
        alone = torch.cat([problem.solve(only=number) for number in range(len(RAGGED))])
        torch.testing.assert_close(together, alone, rtol=0, atol=tolerance)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 33])
def test_a_decoding_sequence_has_the_same_bits_in_any_batch(dtype: torch.dtype, window: int | None) -> None:
    lengths = [(1, context) for context in (1, 16, 17, 33, 64, 65, 400, 401)]
    problem = Problem(Case(lengths, dtype=dtype, window=window, num_heads=9, num_kv_heads=3))
    alone = torch.cat([problem.solve(only=number) for number in range(len(lengths))])
    assert torch.equal(problem.solve(), alone)


def test_long_context_in_tiles() -> None:
    Problem(Case([(600, 1900), (1, 1500)], num_heads=2, num_kv_heads=1)).check()


sequence = st.integers(1, 150).flatmap(lambda context: st.tuples(st.integers(1, context), st.just(context)))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(sequence, min_size=1, max_size=6),
    window=st.none() | st.integers(1, 200),
    block_size=st.sampled_from([1, 4, 16, 64]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
)
def test_any_ragged_batch(
    lengths: list[tuple[int, int]], window: int | None, block_size: int, heads: tuple[int, int]
) -> None:
    case = Case(lengths, num_heads=heads[0], num_kv_heads=heads[1], window=window, block_size=block_size)
    Problem(case).check()


@given(st.integers(1, 100_000))
def test_buckets_waste_little(num_blocks: int) -> None:
    padded = _bucket(num_blocks)
    assert num_blocks <= padded <= num_blocks + max(1, num_blocks // 8)
    assert _bucket(padded) == padded
