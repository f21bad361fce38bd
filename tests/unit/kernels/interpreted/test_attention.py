"""Paged attention: right over any ragged batch, and the same bits however a position came to be computed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twopool.kernels.attention import paged_attention, plan_attention
from twopool.kernels.gpu.attention import SPLIT, work_lists
from twopool_testing.attention_problem import LAYER, Case, Problem

RAGGED = [(1, 1), (17, 17), (1, 270), (2, 2), (1, 16), (5, 37), (60, 90)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (7, 1, 40), (2, 2, 16)])
def test_any_group_size(heads: int, kv_heads: int, head_dim: int) -> None:
    """NUM-03, X-sdpa-masked-row-nan."""
    Problem(Case(RAGGED, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)).check()


def test_more_heads_than_a_tile_has_rows() -> None:
    Problem(Case([(1, 20), (3, 30)], num_heads=71, num_kv_heads=1)).check()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Problem(Case([(1, 20)], num_heads=71, num_kv_heads=1, head_dim=256)).solve()
    with pytest.raises(ValueError, match="does not fit"):
        Problem(Case([(1, 20)], num_heads=1, num_kv_heads=1, head_dim=288)).solve()


@pytest.mark.parametrize("head_dim", [128, 256])
def test_large_heads(head_dim: int) -> None:
    Problem(Case([(1, 20), (40, 70)], num_heads=2, num_kv_heads=1, head_dim=head_dim)).check()


@pytest.mark.parametrize("window", [1, 8, 33])
def test_sliding_window(window: int) -> None:
    """NUM-01: windows smaller than a block, equal to one, across several, wider than everything."""
    Problem(Case(RAGGED, window=window)).check()


@pytest.mark.parametrize("window", [None, 33])
def test_soft_cap(window: int | None) -> None:
    Problem(Case(RAGGED, window=window, soft_cap=5.0, spread=8.0)).check()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    """NUM-01: within the rounding of the inputs' type."""
    Problem(Case(RAGGED, window=33, dtype=dtype)).check(tolerance=tolerance)


def test_scores_far_from_zero() -> None:
    """NUM-01: legal scores near -1e5 are neither lost nor mistaken for masked ones."""
    problem = Problem(Case([(1, 40), (20, 70)], spread=0.0))
    problem.queries[:, :, 0] = -1.0
    for row, kv in enumerate(problem.dense):
        kv[0, :, :, 0] = 4e5
        for position in range(kv.shape[2]):
            problem.pool[problem.tables[row, position // 16], :, LAYER, 0, position % 16, 0] = 4e5
    problem.check(tolerance=1e-2)  # float32 resolves 0.008 at 1e5


sequence = st.integers(1, 120).flatmap(lambda context: st.tuples(st.integers(1, context), st.just(context)))


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(sequence, min_size=1, max_size=4),
    window=st.none() | st.integers(1, 150),
    block_size=st.sampled_from([1, 4, 16, 64]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    head_dim=st.sampled_from([16, 24]),
)
def test_any_ragged_batch(
    lengths: list[tuple[int, int]], window: int | None, block_size: int, heads: tuple[int, int], head_dim: int
) -> None:
    Problem(
        Case(
            lengths,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            window=window,
            block_size=block_size,
        )
    ).check()


@pytest.mark.parametrize(
    ("dtype", "window", "soft_cap"),
    [(torch.float32, None, None), (torch.float16, 70, None), (torch.bfloat16, 330, 3.0)],
)
def test_a_position_has_the_same_bits_however_it_is_computed(
    dtype: torch.dtype, window: int | None, soft_cap: float | None
) -> None:
    """Prefilled whole, in chunks of any size, decoded one by one; alone and among neighbours; across splits."""
    context = SPLIT + 100
    problem = Problem(
        Case([(context, context)], num_heads=3, num_kv_heads=1, window=window, soft_cap=soft_cap, dtype=dtype)
    )
    whole = problem.solve()

    def solve(spans: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Each span of positions as a sequence of its own, all in one batch."""
        plan = plan_attention(
            query_lens=np.array([end - first for first, end in spans], dtype=np.int32),
            context_lens=np.array([end for _, end in spans], dtype=np.int32),
            block_tables=problem.tables.expand(len(spans), -1),
            kv_pool=problem.pool,
            num_heads=3,
            sliding_window=window,
            dtype=dtype,
        )
        queries = torch.cat([problem.queries[first:end] for first, end in spans])
        got = paged_attention(queries, problem.pool, LAYER, plan, scale=problem.scale, soft_cap=soft_cap)
        return list(got.split([end - first for first, end in spans]))  # type: ignore[no-untyped-call]

    interesting = [0, 64, 70, SPLIT - 1, SPLIT, context - 1]
    for position, decoded in zip(interesting, solve([(p, p + 1) for p in interesting]), strict=True):
        assert torch.equal(decoded[0], whole[position]), position
        assert torch.equal(solve([(position, position + 1)])[0], decoded), position
    for size in (37, 200):
        spans = [(first, min(first + size, context)) for first in range(0, context, size)]
        assert torch.equal(torch.cat(solve(spans)), whole), size


@given(
    lengths=st.lists(
        st.integers(1, 3000).flatmap(lambda context: st.tuples(st.integers(1, context), st.just(context))), max_size=6
    ),
    group=st.integers(1, 70),
    window=st.none() | st.integers(1, 1000),
)
def test_work_lists_cover_every_row_once(lengths: list[tuple[int, int]], group: int, window: int | None) -> None:
    query_lens, contexts = np.array(lengths, dtype=np.int32).reshape(-1, 2).T
    lists = work_lists(query_lens, contexts, group=group, sliding_window=window)
    by_splits = set(lists.split_rows[:, 0].tolist())
    assert not by_splits & set(lists.tiles[:, 0].tolist())
    rows = [row for _, _, row in lists.split_rows.tolist()]
    slots = 0
    for sequence, (query_len, context) in enumerate(lengths):
        first_row = int(lists.row_starts[sequence])
        if sequence in by_splits:
            splits = sorted(split for owner, split in lists.split_items.tolist() if owner == sequence)
            oldest = 0 if window is None else max(0, context - query_len - window + 1)
            assert splits == list(range(oldest // SPLIT, (context - 1) // SPLIT + 1))
            assert lists.first_slots[sequence] == slots
            slots += len(splits) * query_len
        else:
            tiles = sorted(tile for owner, tile in lists.tiles.tolist() if owner == sequence)
            block = 64 if group <= 64 else 128
            assert tiles == list(range(-(-query_len * group // block)))
            rows.extend(range(first_row, first_row + query_len))
    assert slots == lists.num_slots
    assert sorted(rows) == list(range(int(query_lens.sum())))
