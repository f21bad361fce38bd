"""Tiny random models in Hugging Face format, and a driver that runs a decoder over a paged pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from twopool.models.batch import ForwardBatch
from twopool.models.decoder import Decoder

VOCAB_SIZE = 131
BLOCK_SIZE = 16

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # far from uniform logits, so that a difference shows
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def _llama(**changes: Any) -> PretrainedConfig:
    return LlamaConfig(**(_SIZES | changes))


# Each call makes a fresh configuration: saving a model alters it.
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: _llama(),
    "llama_tied": lambda: _llama(tie_word_embeddings=True),
    "llama_rope_llama3": lambda: _llama(rope_parameters=dict(_LLAMA3)),
    "llama_rope_linear": lambda: _llama(rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}),
    "llama_rope_yarn": lambda: _llama(
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **_YARN}, max_position_embeddings=256
    ),
    "llama_rope_yarn_mscale": lambda: _llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "mscale": 0.9,
            "mscale_all_dim": 0.4,
            "beta_fast": 24,
            "truncate": False,
            **_YARN,
        },
        max_position_embeddings=256,
    ),
    "llama_attention_bias": lambda: _llama(attention_bias=True),
    "llama_mlp_bias": lambda: _llama(mlp_bias=True),
    "llama_gelu": lambda: _llama(hidden_act="gelu"),
    "llama_gelu_tanh": lambda: _llama(hidden_act="gelu_pytorch_tanh"),
    "llama_small_heads": lambda: _llama(num_key_value_heads=4, head_dim=8),
    "llama_wide_heads": lambda: _llama(num_key_value_heads=1, head_dim=32),
    "llama_9_3": lambda: _llama(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=16),
    "llama_9_3_head_64": lambda: _llama(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=64),
    "llama_7_1_head_128": lambda: _llama(hidden_size=56, num_attention_heads=7, num_key_value_heads=1, head_dim=128),
    "llama_7_1": lambda: _llama(hidden_size=56, num_attention_heads=7, num_key_value_heads=1),
    "mistral_5_1_hidden_96": lambda: MistralConfig(
        **(_SIZES | {"hidden_size": 96, "num_attention_heads": 5, "num_key_value_heads": 1}),
        head_dim=32,
        sliding_window=None,
    ),
    "mistral_window_8": lambda: MistralConfig(**_SIZES, sliding_window=8),
    "mistral_window_16": lambda: MistralConfig(**_SIZES, sliding_window=16),
    "mistral_window_33": lambda: MistralConfig(**_SIZES, sliding_window=33),
    "mistral_window_33_head_64": lambda: MistralConfig(**_SIZES, head_dim=64, sliding_window=33),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen2_upper_windows": lambda: Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=24),
    "qwen3_tied_bias": lambda: Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=True, attention_bias=True),
}


@dataclass(frozen=True)
class TinyModel:
    """A saved model and the logits transformers gives for one prompt."""

    folder: Path
    prompt: list[int]
    logits: torch.Tensor
    """[len(prompt), vocab_size] float32"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Make (once a session) the model of that name."""
    made: dict[str, TinyModel] = {}

    def make(name: str) -> TinyModel:
        if name not in made:
            made[name] = _make(MODELS[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return make


def _make(config: PretrainedConfig, folder: Path) -> TinyModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start at 1 and 0, which would hide a swap
                parameter.add_(torch.randn_like(parameter) * 0.3)
        prompt = torch.randint(VOCAB_SIZE, (210,))
        logits = model(prompt[None]).logits[0]
    model.save_pretrained(folder)
    return TinyModel(folder, prompt.tolist(), logits)


@dataclass
class Driver:
    """Runs a decoder over a pool that is NaN wherever nothing was written.

    Sequence s owns its own blocks, in no particular order; block 0 belongs to nobody.
    """

    decoder: Decoder
    max_sequences: int = 1
    max_length: int = 256
    pool: torch.Tensor = field(init=False)
    tables: np.ndarray[Any, np.dtype[np.int32]] = field(init=False)

    def __post_init__(self) -> None:
        config = self.decoder.config
        per_sequence = -(-self.max_length // BLOCK_SIZE)
        num_blocks = self.max_sequences * per_sequence + 1
        shape = (num_blocks, self.decoder.num_kv_heads_local, config.num_layers, 2, BLOCK_SIZE, config.head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=self.decoder.dtype)
        order = np.random.default_rng(0).permutation(num_blocks - 1) + 1
        self.tables = order.reshape(self.max_sequences, per_sequence).astype(np.int32)

    def step(self, parts: Sequence[tuple[int, Sequence[int], int]], rows: list[int] | None = None) -> torch.Tensor:
        """parts: (sequence, token ids, position of the first). -> logits of all rows, or of `rows`."""
        sequences = np.array([sequence for sequence, _, _ in parts])
        query_lens = np.array([len(ids) for _, ids, _ in parts], dtype=np.int32)
        context_lens = np.array([first + len(ids) for _, ids, first in parts], dtype=np.int32)
        positions = np.concatenate([np.arange(first, first + len(ids)) for _, ids, first in parts])
        owners = np.repeat(sequences, query_lens)
        blocks = self.tables[owners, positions // BLOCK_SIZE].astype(np.int64)
        tables = self.tables[sequences].copy()
        used = -(-context_lens // BLOCK_SIZE)
        tables[np.arange(tables.shape[1]) >= used[:, None]] = 0
        wanted = list(range(len(positions))) if rows is None else rows
        batch = ForwardBatch(
            token_ids=torch.tensor([token for _, ids, _ in parts for token in ids]),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
            cu_seqlens=torch.from_numpy(np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)),
            context_lens=torch.from_numpy(context_lens),
            block_tables=torch.from_numpy(tables),
            logit_rows=torch.tensor(wanted, dtype=torch.int64),
            query_lens_host=query_lens,
            context_lens_host=context_lens,
        )
        return self.decoder.forward(batch, self.pool)

    def in_chunks(self, ids: Sequence[int], chunk: int, sequence: int = 0) -> torch.Tensor:
        """Logits of every position, `chunk` tokens a step."""
        steps = [self.step([(sequence, ids[i : i + chunk], i)]) for i in range(0, len(ids), chunk)]
        return torch.cat(steps)


@pytest.fixture(scope="session")
def make_driver() -> type[Driver]:
    return Driver


@pytest.fixture(scope="session")
def model_names() -> list[str]:
    return list(MODELS)
