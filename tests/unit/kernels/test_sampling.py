"""Every row by its own parameters, and by them alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twopool.kernels.sampling import MAX_TOP_LOGPROBS, ROW_DTYPE, Draws, SamplingBatch, sample

VOCAB_SIZE = 1000
DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Row:
    """One draw's parameters, ids and adjustments."""

    params: dict[str, Any] = field(default_factory=dict)
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    masked: tuple[int, ...] = ()


def ints(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def batch(rows: Sequence[Row]) -> SamplingBatch:
    array = np.zeros(len(rows), dtype=ROW_DTYPE)
    for record, row in zip(array, rows, strict=True):
        for name, value in (DEFAULTS | row.params).items():
            record[name] = value
    histories = [(index, row) for index, row in enumerate(rows) if row.prompt or row.output]
    biases = [(index, *entry) for index, row in enumerate(rows) for entry in row.bias]
    masks = [(index, token) for index, row in enumerate(rows) for token in row.masked]
    return SamplingBatch(
        rows=array,
        history_rows=ints([index for index, _ in histories]),
        history_lens=ints([len(row.prompt) + len(row.output) for _, row in histories]),
        history_prompt_lens=ints([len(row.prompt) for _, row in histories]),
        history_ids=ints([token for _, row in histories for token in row.prompt + row.output]),
        bias_rows=ints([index for index, _, _ in biases]),
        bias_ids=ints([token for _, token, _ in biases]),
        bias_values=np.array([value for _, _, value in biases], dtype=np.float32),
        masked_rows=ints([index for index, _ in masks]),
        masked_ids=ints([token for _, token in masks]),
    )


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits: Tensor, rows: Sequence[Row], **kwargs: int) -> Draws:
    return sample(logits.clone(), batch(rows), **kwargs)


def draw_many(logits: Tensor, row: Row, count: int = 4000) -> npt.NDArray[np.int64]:
    """``count`` draws from one row of logits that differ in their seeds only."""
    rows = [Row({**row.params, "seed": seed}, row.prompt, row.output, row.bias, row.masked) for seed in range(count)]
    return draw(logits.expand(count, -1), rows).token_ids


def penalised(logits: Tensor, row: Row) -> Tensor:
    """What the penalties ought to give, token by token."""
    expected = logits.clone()
    for token in set(row.prompt + row.output):
        value = float(logits[token])
        repetition = row.params.get("repetition_penalty", 1.0)
        value = value / repetition if value > 0 else value * repetition
        count = row.output.count(token)
        value -= row.params.get("frequency_penalty", 0.0) * count
        value -= row.params.get("presence_penalty", 0.0) * (count > 0)
        expected[token] = value
    return expected


# --- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-10, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """API-19, X-temp-tiny: also where logits divided by the temperature would overflow."""
    logits = random_logits(8, scale=1e4)
    rows = [Row({"temperature": temperature, "seed": seed, "wants_logprobs": True}) for seed in range(8)]
    drawn = draw(logits, rows)
    assert drawn.token_ids.tolist() == logits.argmax(dim=-1).tolist()
    assert not drawn.bad.any()
    assert drawn.logprobs is not None and np.isfinite(drawn.logprobs).all()


@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-10}, {"min_p": 1.0}, {"temperature": 0.01}]
)
def test_extreme_truncation_takes_the_best_token(params: dict[str, Any]) -> None:
    logits = random_logits(8)
    logits[:, 500] = 40.0
    assert draw(logits, [Row({**params, "seed": seed}) for seed in range(8)]).token_ids.tolist() == [500] * 8


def test_equal_best_tokens_resolve_to_the_lowest_id() -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, [7, 300, 999]] = 5.0
    rows = [Row({"temperature": 0.0}), Row({"top_k": 1}), Row({"top_p": 1e-9, "seed": 4})]
    assert draw(logits, rows).token_ids.tolist() == [7, 7, 7]


# --- distribution ----------------------------------------------------------------------------------------------------


def assert_follows(tokens: npt.NDArray[np.int64], weights: Tensor) -> None:
    """A chi-squared test over the tokens expected at least 20 times, the others taken together."""
    expected = (weights.double() / weights.double().sum() * len(tokens)).numpy()
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any()
    common = expected >= 20
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    statistic = float(((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum())
    freedom = int(common.sum())
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    logits = random_logits(1, seed=1, scale=2.0)
    tokens = draw_many(logits, Row({"temperature": temperature}))
    assert_follows(tokens, torch.softmax(logits[0] / temperature, dim=-1))


def reference_truncation(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities after top-k, min-p and top-p, token by token."""
    probabilities = torch.softmax(logits.double(), dim=-1)
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    kept = order[: top_k or len(order)]
    kept = [token for token in kept if probabilities[token] >= min_p * probabilities.max()]
    total, cumulative = sum(float(probabilities[token]) for token in kept), 0.0
    nucleus: list[int] = []
    for token in kept:
        if nucleus and cumulative >= top_p * total:
            break
        nucleus.append(token)
        cumulative += float(probabilities[token])
    result = torch.zeros_like(probabilities)
    result[nucleus] = probabilities[nucleus]
    return result


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (5, 1.0, 0.0),
        (0, 0.7, 0.0),
        (0, 1.0, 0.05),
        (40, 0.8, 0.01),
        (300, 0.999, 0.0),
        (0, 0.9999, 0.0),
        (900, 0.5, 0.0),
    ],
)
def test_truncation(top_k: int, top_p: float, min_p: float) -> None:
    """Short and long nuclei: few candidates suffice for some, others need the whole vocabulary sorted."""
    logits = random_logits(1, seed=2, scale=1.5)
    tokens = draw_many(logits, Row({"top_k": top_k, "top_p": top_p, "min_p": min_p}))
    assert_follows(tokens, reference_truncation(logits[0], top_k, top_p, min_p))


def test_ties_at_the_edge_of_top_k_keep_exactly_k() -> None:
    """Also where the tie reaches beyond the candidates looked at first."""
    logits = torch.zeros(1, VOCAB_SIZE)
    for top_k in (3, 256, 400):
        assert set(draw_many(logits, Row({"top_k": top_k}), 8000)) == set(range(top_k))


@pytest.mark.parametrize("top_k", [0, VOCAB_SIZE, 10**6])
def test_top_k_off(top_k: int) -> None:
    """X-topk0-disable"""
    logits = random_logits(1, scale=0.1)
    rows = [Row({"top_k": top_k, "seed": seed}) for seed in range(16)]
    tokens = draw(logits.expand(16, -1), rows).token_ids
    assert len(set(tokens)) > 8
    assert (
        tokens.tolist() == draw(logits.expand(16, -1), [Row({"seed": seed}) for seed in range(16)]).token_ids.tolist()
    )


# --- noise -----------------------------------------------------------------------------------------------------------


def test_seed_choice_and_position_decide() -> None:
    logits = random_logits(1, scale=0.1).expand(60, -1)
    base = {"seed": 7, "choice": 2, "position": 30}
    assert len(set(draw(logits, [Row(base)] * 60).token_ids)) == 1
    for name in base:
        assert len(set(draw(logits, [Row({**base, name: value}) for value in range(60)]).token_ids)) > 40


# --- independence ----------------------------------------------------------------------------------------------------

rows_strategy = st.lists(
    st.builds(
        Row,
        params=st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
                "seed": st.integers(-(2**63), 2**63 - 1),
                "position": st.integers(0, 2**31 - 1),
                "choice": st.integers(0, 127),
                "top_k": st.sampled_from([0, 1, 7, 300]),
                "top_p": st.sampled_from([0.0, 0.5, 0.99, 1.0]),
                "min_p": st.sampled_from([0.0, 0.02, 1.0]),
                "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
                "presence_penalty": st.sampled_from([0.0, -2.0, 1.5]),
                "frequency_penalty": st.sampled_from([0.0, 0.7]),
                "wants_logprobs": st.booleans(),
                "num_top_logprobs": st.sampled_from([0, 1, 5, MAX_TOP_LOGPROBS]),
            }
        ),
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30).map(tuple),
        output=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30).map(tuple),
        bias=st.lists(st.tuples(st.integers(0, 2 * VOCAB_SIZE), st.floats(-100, 100)), max_size=5).map(tuple),
        masked=st.lists(st.integers(0, 2 * VOCAB_SIZE), max_size=5).map(tuple),
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(rows=rows_strategy, seed=st.integers(0, 2**31))
def test_a_row_alone_and_in_a_batch(rows: list[Row], seed: int) -> None:
    """API-24, X-temp-mixed-batch, API-15: bit for bit, whatever the neighbours ask."""
    logits = random_logits(len(rows), seed=seed)
    together = draw(logits, rows)
    for index, row in enumerate(rows):
        alone = draw(logits[index : index + 1], [row])
        assert alone.token_ids[0] == together.token_ids[index]
        if row.params["wants_logprobs"]:
            assert alone.logprobs is not None and together.logprobs is not None
            assert alone.logprobs[0] == together.logprobs[index]
        if row.params["wants_logprobs"] and row.params["num_top_logprobs"]:
            assert alone.top_ids is not None and together.top_ids is not None
            assert alone.top_logprobs is not None and together.top_logprobs is not None
            assert np.array_equal(alone.top_ids[0], together.top_ids[index])
            assert np.array_equal(alone.top_logprobs[0], together.top_logprobs[index])


def test_a_large_vocabulary_alone_and_in_a_batch() -> None:
    """Large enough that torch would split one row's sum between threads."""
    logits = random_logits(6, vocab_size=150_000, scale=1.0)
    rows = [Row({"seed": 3, "top_p": top_p, "wants_logprobs": True}) for top_p in (1.0, 0.9, 0.99, 1.0, 0.5, 0.3)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        together = draw(logits, rows)
        alone = [draw(logits[index : index + 1], [row]) for index, row in enumerate(rows)]
    finally:
        torch.set_num_threads(threads)
    assert together.logprobs is not None
    for index, one in enumerate(alone):
        assert one.logprobs is not None
        assert (one.token_ids[0], one.logprobs[0]) == (together.token_ids[index], together.logprobs[index])


def test_a_bad_row_harms_nobody() -> None:
    logits = random_logits(6)
    logits[1, 17] = torch.nan
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    rows = [Row({"seed": seed, "top_p": 0.9}) for seed in range(6)]
    drawn = draw(logits, rows)
    assert drawn.bad.tolist() == [False, True, True, True, False, False]
    for index in (0, 4, 5):
        assert drawn.token_ids[index] == draw(logits[index : index + 1], rows[index : index + 1]).token_ids[0]


# --- penalties, bias, masks ------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(rows=rows_strategy, seed=st.integers(0, 2**31))
def test_penalties_against_a_plain_loop(rows: list[Row], seed: int) -> None:
    """X-penalty-batch-padding, API-22: repetition over prompt and output, the others over the output alone."""
    logits = random_logits(len(rows), seed=seed)
    rows = [Row({**row.params, "wants_logprobs": True, "num_top_logprobs": 20}, row.prompt, row.output) for row in rows]
    drawn = draw(logits, rows)
    assert drawn.top_ids is not None and drawn.top_logprobs is not None
    for index, row in enumerate(rows):
        expected = torch.log_softmax(penalised(logits[index], row), dim=-1)
        assert np.allclose(drawn.top_logprobs[index], expected.topk(20).values.numpy(), atol=1e-5)
        assert np.allclose(expected[drawn.top_ids[index]].numpy(), drawn.top_logprobs[index], atol=1e-5)


def test_bias() -> None:
    logits = random_logits(3)
    best = int(logits[1].argmax())
    rows = [Row({"temperature": 0.0}, bias=((3, 100.0),)), Row({"temperature": 0.0}), Row({}, bias=((9, 100.0),))]
    assert draw(logits, rows).token_ids.tolist() == [3, best, 9]


def test_bias_and_mask_beyond_the_vocabulary_are_ignored() -> None:
    """API-13, X-stop-token-ids-oov"""
    logits = random_logits(2)
    odd = Row({"temperature": 0.0}, bias=((VOCAB_SIZE, 50.0), (10**9, 50.0)), masked=(VOCAB_SIZE, 2**31 - 1))
    assert draw(logits, [odd, odd]).token_ids.tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_never_drawn(temperature: float) -> None:
    """API-23: even with a bias of 100. Log-probabilities are those of the model and stay finite."""
    logits = random_logits(1)
    row = Row(
        {"temperature": temperature, "wants_logprobs": True, "num_top_logprobs": 3}, bias=((4, 100.0),), masked=(4,)
    )
    assert 4 not in set(draw_many(logits, row, 200))
    drawn = draw(logits, [row])
    assert drawn.top_ids is not None and drawn.logprobs is not None
    assert drawn.top_ids[0, 0] == 4 and np.isfinite(drawn.logprobs).all()


def test_a_row_with_everything_masked_is_bad() -> None:
    row = Row({}, masked=tuple(range(VOCAB_SIZE)))
    assert draw(random_logits(2), [row, Row({})]).bad.tolist() == [True, False]


def test_tokens_the_tokenizer_does_not_know() -> None:
    """NUM-05: padded rows of the model's head are neither drawn nor reported, whatever their logits or bias."""
    logits = random_logits(64)
    logits[:, 900:] = 50.0
    params = {"temperature": 2.0, "wants_logprobs": True, "num_top_logprobs": 20}
    rows = [Row({**params, "seed": seed}, prompt=(950,), bias=((950, 100.0),)) for seed in range(64)]
    drawn = draw(logits, rows, num_valid_tokens=900)
    assert drawn.token_ids.max() < 900
    assert drawn.top_ids is not None and drawn.top_ids.max() < 900
    assert drawn.logprobs is not None
    expected = torch.log_softmax(logits[:, :900], dim=-1)[torch.arange(64), torch.from_numpy(drawn.token_ids)]
    assert np.allclose(drawn.logprobs, expected.numpy(), atol=1e-5)


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_taken_before_temperature_and_truncation() -> None:
    logits = random_logits(3)
    params = {"temperature": 0.4, "top_k": 5, "wants_logprobs": True, "num_top_logprobs": 4}
    rows = [Row({**params, "seed": 1}), Row({"seed": 1}), Row({**params, "num_top_logprobs": 0})]
    drawn = draw(logits, rows)
    expected = torch.log_softmax(logits, dim=-1)
    assert drawn.logprobs is not None and drawn.top_ids is not None and drawn.top_logprobs is not None
    for index in (0, 2):
        assert drawn.logprobs[index] == pytest.approx(float(expected[index, drawn.token_ids[index]]), abs=1e-5)
    assert drawn.logprobs[1] == 0
    assert drawn.top_ids[0].tolist() == expected[0].topk(20).indices.tolist()
    assert np.allclose(drawn.top_logprobs[0], expected[0].topk(20).values.numpy(), atol=1e-5)


def test_nobody_asks_for_logprobs() -> None:
    drawn = draw(random_logits(2), [Row({}), Row({"temperature": 0.0})])
    assert (drawn.logprobs, drawn.top_ids, drawn.top_logprobs) == (None, None, None)


def test_tiny_vocabulary_and_no_rows() -> None:
    """Fewer tokens than candidates, groups or reported alternatives."""
    params = {"wants_logprobs": True, "num_top_logprobs": 20, "top_p": 0.9}
    drawn = draw(random_logits(5, vocab_size=7), [Row({**params, "seed": seed}) for seed in range(5)])
    assert drawn.top_ids is not None and drawn.top_ids.shape == (5, 7)
    assert drawn.token_ids.max() < 7
    assert len(draw(torch.empty(0, 7), []).token_ids) == 0


def test_rows_and_logits_must_match() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1 draws"):
        draw(random_logits(2), [Row({})])


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_only_allowed_tokens_are_drawn(data: st.DataObject) -> None:
    """NUM-05: whatever the mask does not reach, vocabulary padding among it, is not drawn; neighbours do not notice."""
    vocab_size = data.draw(st.integers(33, 200))
    num_words = data.draw(st.integers(1, -(-vocab_size // 32) + 1))
    allowed = sorted(data.draw(st.sets(st.integers(0, min(vocab_size, num_words * 32) - 1), min_size=1, max_size=5)))
    words = np.zeros((1, num_words), dtype=np.uint32)
    for token in allowed:
        words[0, token // 32] |= np.uint32(1 << token % 32)
    rows = [Row({"temperature": 1.5, "seed": seed, "wants_logprobs": True}) for seed in range(3)]
    logits = random_logits(3, vocab_size)
    plain = sample(logits.clone(), batch(rows))
    masked = sample(logits.clone(), replace(batch(rows), allowed_rows=ints([1]), allowed_bits=words.view(np.int32)))
    assert masked.token_ids[1] in allowed
    assert not masked.bad.any()
    assert masked.token_ids[[0, 2]].tolist() == plain.token_ids[[0, 2]].tolist()
    expected_logprob = torch.log_softmax(logits[1], dim=-1)[int(masked.token_ids[1])]
    assert plain.logprobs is not None and masked.logprobs is not None
    assert masked.logprobs[1] == pytest.approx(float(expected_logprob), abs=1e-5)
