"""Draws by the kernels against draws by torch, which has tests of its own: the same tokens from the same noise."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twopool.kernels import backend, philox
from twopool.kernels.sampling import ROW_DTYPE, SamplingBatch, sample

DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}


def parameters(rows: list[dict[str, Any]]) -> npt.NDArray[np.void]:
    array = np.zeros(len(rows), dtype=ROW_DTYPE)
    for record, row in zip(array, rows, strict=True):
        for name, value in (DEFAULTS | row).items():
            record[name] = value
    return array


def both(logits: torch.Tensor, batch: SamplingBatch, **kwargs: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """[R, 2] each: token and badness, by the kernels and by torch."""
    results = []
    for interpreted in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "INTERPRETED", interpreted)
            draws = sample(logits.clone(), batch, **kwargs)
        results.append(np.column_stack((np.where(draws.bad, 0, draws.token_ids), draws.bad)))
    return results[0], results[1]


row = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.2, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 7, 50, 10_000]),
        "top_p": st.sampled_from([0.0, 1e-9, 0.3, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "choice": st.integers(0, 127),
        "position": st.integers(0, 2**31 - 1),
    }
)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(row, min_size=1, max_size=3),
    vocab_size=st.sampled_from([1, 7, 256, 300, 4096, 5000]),
    coarse=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_draws_are_those_of_torch(rows: list[dict[str, Any]], vocab_size: int, coarse: bool, seed: int) -> None:
    """Coarse logits have many ties, also at the edges of what truncation keeps."""
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    if coarse:
        logits = logits.round()
    kernels, reference = both(logits, SamplingBatch(rows=parameters(rows)))
    assert kernels.tolist() == reference.tolist()


@pytest.mark.parametrize("top_p", [0.5, 0.75])
def test_ties_at_the_edge_of_top_p(top_p: float) -> None:
    """Four equal tokens and top-p of a half: the two lower ids, nothing else."""
    logits = torch.full((8, 700), -50.0)
    logits[:, [3, 300, 400, 699]] = 1.0
    rows = parameters([{"top_p": top_p, "seed": seed} for seed in range(8)])
    drawn = sample(logits, SamplingBatch(rows=rows)).token_ids
    assert set(drawn.tolist()) == set([3, 300, 400][: round(4 * top_p)])


def test_ties_at_the_edge_of_top_k() -> None:
    logits = torch.zeros(12, 700)
    logits[:, 650] = 1.0
    rows = parameters([{"top_k": 3, "seed": seed} for seed in range(12)])
    assert set(sample(logits, SamplingBatch(rows=rows)).token_ids.tolist()) == {0, 1, 650}


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_bad_rows(poison: float) -> None:
    """X-sdpa-masked-row-nan: a row without usable logits is reported and harms nobody."""
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    logits[1, 4500] = poison
    logits[2] = -torch.inf
    kernels, reference = both(logits, SamplingBatch(rows=parameters([{"seed": seed} for seed in range(4)])))
    assert kernels.tolist() == reference.tolist()
    assert kernels[:, 1].tolist() == [0, 1, 1, 0]


tokens = st.lists(st.integers(0, 40), max_size=12)


@settings(max_examples=10, deadline=None)
@given(
    histories=st.lists(st.tuples(tokens, tokens), min_size=1, max_size=3),
    bias=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from([-100.0, 0.5, 30.0])), max_size=3, unique_by=lambda x: x[0]
    ),
    num_valid_tokens=st.sampled_from([30, 50]),
)
def test_penalties_bias_and_masks(
    histories: list[tuple[list[int], list[int]]], bias: list[tuple[int, float]], num_valid_tokens: int
) -> None:
    """The first row has no history. Tokens beyond those the tokenizer knows are ignored and never drawn."""
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.3, "wants_logprobs": True}
    rows = parameters([{}] + [params | {"seed": number} for number, _ in enumerate(histories)])
    count = len(histories)
    batch = SamplingBatch(
        rows=rows,
        history_rows=np.arange(1, count + 1, dtype=np.int32),
        history_lens=np.array([len(prompt) + len(output) for prompt, output in histories], dtype=np.int32),
        history_prompt_lens=np.array([len(prompt) for prompt, _ in histories], dtype=np.int32),
        history_ids=np.array([token for prompt, output in histories for token in prompt + output], dtype=np.int32),
        bias_rows=np.full(len(bias), count, dtype=np.int32),
        bias_ids=np.array([token for token, _ in bias], dtype=np.int32),
        bias_values=np.array([value for _, value in bias], dtype=np.float32),
        masked_rows=np.array([0], dtype=np.int32),
        masked_ids=np.array([3], dtype=np.int32),
    )
    logits = torch.randn(count + 1, 61, generator=torch.Generator().manual_seed(7)) * 2
    kernels, reference = both(logits, batch, num_valid_tokens=num_valid_tokens)
    assert kernels.tolist() == reference.tolist()
    changed = []
    for interpreted in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "INTERPRETED", interpreted)
            changed.append(sample(logits.clone(), batch, num_valid_tokens=num_valid_tokens).logprobs)
    assert changed[0] is not None and changed[1] is not None
    np.testing.assert_allclose(changed[0], changed[1], rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
    choice=st.integers(0, 2**31 - 1),
    num_values=st.integers(1, 40),
)
def test_noise_has_the_bits_of_the_reference(seed: int, position: int, choice: int, num_values: int) -> None:
    import triton

    from twopool_testing.philox_kernel import gumbel_kernel

    key = torch.tensor([seed, position, choice])
    got = torch.empty(num_values, dtype=torch.float64)
    gumbel_kernel[(1,)](key, got, num_values, BLOCK=triton.next_power_of_2(num_values))
    wanted = philox.gumbel_noise(np.array([seed]), np.array([position]), np.array([choice]), num_values)[0]
    torch.testing.assert_close(got, torch.from_numpy(wanted), rtol=1e-12, atol=1e-12)
