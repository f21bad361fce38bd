"""Paged attention against dense float64 attention, over pools full of NaN where nothing was written."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twopool.kernels.attention import _bucket
from twopool_testing.attention_problem import LAYER, Case, Problem

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
