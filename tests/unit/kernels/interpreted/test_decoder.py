"""A whole decoder on the Triton kernels: equal to torch, and the same bits however a position came to be computed."""

import numpy as np
import pytest
import torch

from twopool.kernels import backend
from twopool.models.batch import DecodeInputs
from twopool.models.config import DecoderConfig
from twopool.models.decode_graphs import StaticStep
from twopool.models.decoder import Decoder
from twopool.models.random_decoder import random_decoder
from twopool_testing.forward import block_tables, empty_pool, forward

LENGTH = 45


def config(window: int | None = None) -> DecoderConfig:
    return DecoderConfig.from_dict(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 300,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": 1,
        }
    )


def decoder(window: int | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    return random_decoder(config(window), dtype=dtype, device=torch.device("cpu"), deterministic_gemm=True)


def tokens(seed: int, count: int = LENGTH) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 300, count)]


def test_equal_to_torch() -> None:
    """The packed CPU products and the torch attention serve as the reference, on the same weights."""
    prompts = [tokens(1), tokens(2, 7), tokens(3, 1)]
    results = []
    for interpreted in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "INTERPRETED", interpreted)
            model = decoder(window=9)
            pool = empty_pool(model, 8)
            results.append(forward(model, pool, [(prompt, 0) for prompt in prompts]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_a_position_has_the_same_bits_however_it_is_computed() -> None:
    """Whole, in chunks, one by one over a cached prefix, alone and among neighbours; with a window in one layer."""
    model = decoder(window=9, dtype=torch.bfloat16)
    prompt = tokens(1)
    whole = forward(model, empty_pool(model, 8), [(prompt, 0)])[0]
    for ends in ([16, 32, LENGTH], [37, *range(LENGTH - 3, LENGTH + 1)]):
        pool = empty_pool(model, 8)
        for start, end in zip([0, *ends], ends, strict=False):
            logits = forward(model, pool, [(prompt[:end], start)])[0]
        assert torch.equal(logits, whole), ends
    neighbours = [(tokens(seed, 3 + seed), 0) for seed in range(2, 6)]
    pool = empty_pool(model, 16)
    assert torch.equal(forward(model, pool, [neighbours[0], (prompt, 0), *neighbours[1:]])[1], whole)


def test_the_static_step_of_a_graph_computes_what_forward_does() -> None:
    """Three sequences in a bucket of four, twice on the same buffers, so that nothing of a step stays behind."""
    model = decoder(window=9)
    pool = empty_pool(model, 12)
    step = StaticStep(model, pool, bucket=4, max_blocks=4, max_items=6, num_slots=6)
    lengths = [20, 3, 45]
    prompts = [tokens(seed, length) for seed, length in enumerate(lengths)]
    tables = block_tables([length + 2 for length in lengths])
    forward(model, pool, [(prompt, 0) for prompt in prompts], tables=tables)
    for number, members in enumerate(([0, 1, 2], [2])):
        prompts = [[*prompt, 7 + number] for prompt in prompts]
        inputs = DecodeInputs(
            token_ids=np.array([7 + number for _ in members], dtype=np.int32),
            context_lens=np.array([len(prompts[member]) for member in members], dtype=np.int32),
            block_tables=tables[members],
        )
        assert step.accepts(inputs)
        step.fill(inputs)
        with torch.inference_mode():
            got = step.compute()
        after = pool.clone()
        ended = [(prompts[member], len(prompts[member]) - 1) for member in members]
        wanted = forward(model, pool, ended, tables=tables[members])
        assert torch.equal(got[: len(members)], wanted)
        assert torch.equal(got[len(members) :], wanted[:1].expand(4 - len(members), -1))
        assert torch.equal(after.view(torch.int32), pool.view(torch.int32))
        assert not step.accepts(
            DecodeInputs(inputs.token_ids, inputs.context_lens, np.zeros((len(members), 5), dtype=np.int32))
        )
