"""The decoder computes what transformers computes, however the work is cut into steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from twopool.models.decoder import Decoder

CPU = torch.device("cpu")
FAMILIES = (
    "llama",
    "llama_tied",
    "llama_rope_llama3",
    "llama_rope_linear",
    "llama_rope_yarn",
    "llama_rope_yarn_mscale",
    "llama_attention_bias",
    "llama_mlp_bias",
    "llama_gelu",
    "llama_gelu_tanh",
    "llama_small_heads",
    "llama_wide_heads",
    "llama_9_3",
    "llama_7_1",
    "llama_9_3_head_64",
    "llama_7_1_head_128",
    "mistral_5_1_hidden_96",
    "mistral_window_8",
    "mistral_window_16",
    "mistral_window_33",
    "mistral_window_33_head_64",
    "qwen2",
    "qwen2_upper_windows",
    "qwen3",
    "qwen3_tied_bias",
)


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder.load(folder, dtype=dtype, device=CPU)


def _differ(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    assert got.dtype == torch.float32
    return (got - wanted).abs().max().item()


def test_every_tiny_model_is_compared(model_names: list[str]) -> None:
    assert set(model_names) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(
    name: str, tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]
) -> None:
    """NUM-01, NUM-03: whole, then in chunks of each size, over a pool of NaN."""
    model = tiny_model(name)
    decoder = _load(model.folder)
    assert _differ(make_driver(decoder).step([(0, model.prompt, 0)]), model.logits) < 1e-4
    for chunk in (7, 16):
        assert _differ(make_driver(decoder).in_chunks(model.prompt, chunk), model.logits) < 1e-4


@pytest.mark.parametrize("name", ["llama_9_3", "mistral_window_8", "mistral_window_33", "qwen2_upper_windows", "qwen3"])
def test_one_token_at_a_time(name: str, tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]) -> None:
    model = tiny_model(name)
    got = make_driver(_load(model.folder)).in_chunks(model.prompt, 1)
    assert _differ(got, model.logits) < 1e-4


@pytest.mark.parametrize("name", ["llama_9_3", "mistral_window_16"])
def test_a_ragged_batch_equals_each_sequence_alone(
    name: str, tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]
) -> None:
    """X-sdpa-masked-row-nan: prompts, chunks and decodes of unequal lengths in one step."""
    model = tiny_model(name)
    decoder = _load(model.folder)
    ids = model.prompt
    # (tokens already in the cache, tokens of this step)
    sequences = [(0, 1), (0, 2), (16, 1), (0, 17), (40, 9), (209, 1), (15, 1), (100, 60)]
    together = make_driver(decoder, max_sequences=len(sequences))
    alone = make_driver(decoder, max_sequences=len(sequences))
    for number, (cached, _) in enumerate(sequences):
        if cached:
            together.step([(number, ids[:cached], 0)])
            alone.step([(number, ids[:cached], 0)])
    parts = [(number, ids[cached : cached + new], cached) for number, (cached, new) in enumerate(sequences)]
    got = together.step(parts)
    wanted = torch.cat([alone.step([part]) for part in parts])
    assert got.isfinite().all()
    assert _differ(got, wanted) < 1e-5
    reference = torch.cat([model.logits[cached : cached + new] for cached, new in sequences])
    assert _differ(got, reference) < 1e-4


def test_only_the_wanted_rows(tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    decoder = _load(model.folder)
    some = make_driver(decoder).step([(0, model.prompt, 0)], rows=[209, 3, 3])
    assert _differ(some, model.logits[[209, 3, 3]]) < 1e-4
    driver = make_driver(decoder)
    none = driver.step([(0, model.prompt[:100], 0)], rows=[])
    assert none.shape == (0, decoder.config.vocab_size)
    # A chunk nobody wants logits of still fills the cache.
    rest = driver.step([(0, model.prompt[100:], 100)])
    assert _differ(rest, model.logits[100:]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_no_worse_than_transformers(
    dtype: torch.dtype, tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]
) -> None:
    model = tiny_model("llama_9_3")
    got = make_driver(_load(model.folder, dtype)).step([(0, model.prompt, 0)])
    theirs = AutoModelForCausalLM.from_pretrained(model.folder, dtype=dtype).eval()
    with torch.no_grad():
        peer = theirs(torch.tensor([model.prompt])).logits[0].float()
    ours, peers = ((logits - model.logits).square().mean().sqrt().item() for logits in (got, peer))
    assert 0 < ours < 1.2 * peers


def test_fingerprint_tells_models_apart(tiny_model: Callable[[str], Any]) -> None:
    prints = {name: _load(tiny_model(name).folder).fingerprint() for name in FAMILIES}
    assert len(set(prints.values())) == len(FAMILIES)
    again = _load(tiny_model("llama").folder, torch.bfloat16)
    assert again.fingerprint() == prints["llama"], "the dtype served in is not part of the model"


def test_a_pool_of_another_model_is_refused(tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]) -> None:
    driver = make_driver(_load(tiny_model("llama").folder))
    driver.pool = driver.pool[:, :1].contiguous()
    with pytest.raises(ValueError, match="KV pool"):
        driver.step([(0, [1, 2], 0)])
