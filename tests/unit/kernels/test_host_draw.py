"""What truncation keeps, token by token, whichever way the edge is found: sorting, bounds, bins."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from twopool.kernels import host_draw
from twopool.kernels.sampling import ROW_DTYPE

Floats = npt.NDArray[np.float32]


def kept(logits: Floats, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The tokens a row may draw, as left in the scratch."""
    scratch = host_draw._Scratch(len(logits))
    row = np.zeros(1, dtype=ROW_DTYPE)[0]
    row["temperature"], row["top_k"], row["top_p"], row["min_p"] = 1.0, top_k, top_p, min_p
    noise = np.zeros(host_draw.GROUP + -(-len(logits) // host_draw.GROUP))
    scratch.draw(logits, logits.max(), row, noise)
    return np.flatnonzero(scratch._weights).tolist()


def expected(logits: Floats, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The same from one stable sort. Draws that hang on rounding are not compared."""
    weights = np.exp(logits - logits.max())
    order = np.argsort(-weights, kind="stable")
    order = order[: top_k or None]
    order = order[(weights[order] >= np.float32(min_p)) & (weights[order] > 0)]
    ordered = weights[order].astype(np.float64)
    before = np.cumsum(ordered) - ordered
    needed = top_p * ordered.sum()
    if top_p < 1.0:
        assume(np.abs(before[1:] - needed).min(initial=1.0) > 1e-7 * needed)
        order = order[: max(1, int((before < needed).sum()))]
    return sorted(order.tolist())


@settings(max_examples=150, deadline=None)
@given(
    width=st.sampled_from([1, 5, 255, 256, 1024, 1500, 5000, 20_000]),
    scale=st.sampled_from([0.0, 0.01, 0.5, 2.0, 5.0]),
    steps=st.sampled_from([0, 2, 64]),
    top_k=st.sampled_from([0, 0, 1, 2, 50, 1000, 1025, 4000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.95, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.9]),
    seed=st.integers(0, 1000),
)
def test_what_stays(width: int, scale: float, steps: int, top_k: int, top_p: float, min_p: float, seed: int) -> None:
    """``steps``: logits are multiples of 1/steps, so that many are equal."""
    logits = np.random.default_rng(seed).normal(0.0, scale, width).astype(np.float32)
    if steps:
        logits = np.round(logits * steps) / np.float32(steps)
    assert kept(logits, top_k, top_p, min_p) == expected(logits, top_k, top_p, min_p)


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_masked_tokens_stay_masked(top_p: float) -> None:
    logits = np.zeros(3000, dtype=np.float32)
    logits[::2] = -np.inf
    assert set(kept(logits, 0, top_p, 0.0)) <= set(range(1, 3000, 2))


def test_a_row_is_not_drawn_from_its_predecessors_weights() -> None:
    """The memory is shared by the rows of a batch."""
    rows = np.zeros(3, dtype=ROW_DTYPE)
    rows["temperature"], rows["top_p"] = 1.0, [1.0, 0.5, 1.0]
    logits = np.full((3, 2000), -np.inf, dtype=np.float32)
    for index, token in enumerate((1999, 3, 700)):
        logits[index, token] = 0.0
    tokens, bad = host_draw.draw(logits, rows, np.ones(3, dtype=np.bool_))
    assert tokens.tolist() == [1999, 3, 700]
    assert not bad.any()
