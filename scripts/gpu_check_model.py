"""A random decoder on the device: bits of a position in any batch, and the speed of decode and prefill."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twopool.models.batch import DecodeInputs, ForwardBatch
from twopool.models.config import DecoderConfig
from twopool.models.decoder import Decoder
from twopool.models.random_decoder import random_decoder
from twopool.scripts.gpu_check_report import Result, median_seconds

BLOCK_SIZE = 16


@dataclass(frozen=True)
class ModelSizes:
    """The shape of the random model and what is measured with it."""

    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_layers: int = 16
    num_heads: int = 32
    num_kv_heads: int = 8
    vocab_size: int = 128_256
    decode_batches: tuple[int, ...] = (1, 8, 64)
    decode_context: int = 1024
    prefill_lengths: tuple[int, ...] = (2048, 8192)

    def config(self) -> DecoderConfig:
        """A Llama of these sizes; the defaults are those of a model of 1.2 billion weights."""
        return DecoderConfig.from_dict(self.hf_config())

    def hf_config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 16_384,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        }


Span = tuple[int, int, int]
"""A sequence's number, how many of its tokens are cached, and how many it has after the step."""


class Harness:
    """Sequences of random tokens over one pool; sequence i owns an equal share of the blocks."""

    def __init__(self, decoder: Decoder, *, num_seqs: int, max_tokens: int) -> None:
        config = decoder.config
        self.decoder = decoder
        self._blocks_each = -(-max_tokens // BLOCK_SIZE)
        shape = (num_seqs * self._blocks_each, config.num_kv_heads, config.num_layers, 2, BLOCK_SIZE, config.head_dim)
        self.pool = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self._ids = np.random.default_rng(0).integers(0, config.vocab_size, (num_seqs, max_tokens))

    def tables(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """[S, blocks]"""
        return (sequences[:, None] * self._blocks_each + np.arange(self._blocks_each)).astype(np.int32)

    def token(self, sequence: int, position: int) -> int:
        return int(self._ids[sequence, position])

    def batch(self, spans: list[Span]) -> ForwardBatch:
        """The rows of ``spans``, with the logits of each one's last."""
        sequences, cached, ends = np.array(spans, dtype=np.int64).T
        query_lens = (ends - cached).astype(np.int32)
        positions = np.concatenate([np.arange(first, end) for _, first, end in spans])
        owners = np.repeat(np.arange(len(spans)), query_lens)
        tables = self.tables(sequences)
        slots = tables[owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        row_ends = np.cumsum(query_lens)
        device = self.decoder.device

        def move(array: npt.NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(array).to(device)

        return ForwardBatch(
            token_ids=move(self._ids[sequences[owners], positions].astype(np.int64)),
            positions=move(positions.astype(np.int64)),
            slots=move(slots),
            cu_seqlens=move(np.concatenate(([0], row_ends)).astype(np.int32)),
            context_lens=move(ends.astype(np.int32)),
            block_tables=move(tables),
            logit_rows=move(row_ends.astype(np.int64) - 1),
            query_lens_host=query_lens,
            context_lens_host=ends.astype(np.int32),
        )

    def forward(self, spans: list[Span]) -> Tensor:
        return self.decoder.forward(self.batch(spans), self.pool)


def invariance(device: torch.device, sizes: ModelSizes) -> Iterator[Result]:
    """Logits of one position: whole, in chunks, decoded, alone and in batches, by plain and by invariant products."""
    length = 600
    for deterministic in (True, False):
        decoder = random_decoder(sizes.config(), dtype=torch.bfloat16, device=device, deterministic_gemm=deterministic)
        harness = Harness(decoder, num_seqs=34, max_tokens=length)
        whole = harness.forward([(0, 0, length)])[0].clone()
        outcomes = {}
        for chunk in (16, 37, 512):
            for first in range(0, length, chunk):
                logits = harness.forward([(0, first, min(first + chunk, length))])
            outcomes[f"chunks of {chunk}"] = torch.equal(logits[0], whole)
        outcomes["decoded"] = torch.equal(harness.forward([(0, length - 1, length)])[0], whole)
        for neighbours in (1, 7, 33):
            others = [(number, 0, 3 + 5 * number) for number in range(1, 1 + neighbours)]
            logits = harness.forward([*others, (0, length - 1, length)])
            outcomes[f"beside {neighbours} others"] = torch.equal(logits[-1], whole)
        for name, equal in outcomes.items():
            # With cuBLAS the order of summation follows the number of rows: differences are expected there.
            section = "invariance, deterministic_gemm" if deterministic else "invariance, cuBLAS"
            note = "" if deterministic else "same bits" if equal else "other bits, as cuBLAS may"
            yield Result(section, name, passed=equal if deterministic else None, note=note)


def model_speed(device: torch.device, sizes: ModelSizes) -> Iterator[Result]:
    """Tokens a second of prefill and decode through ``Decoder.forward``, and of decode through graphs."""
    for deterministic in (False, True):
        suffix = ", deterministic_gemm" if deterministic else ""
        decoder = random_decoder(sizes.config(), dtype=torch.bfloat16, device=device, deterministic_gemm=deterministic)
        longest = max(sizes.decode_context, *sizes.prefill_lengths)
        harness = Harness(decoder, num_seqs=1, max_tokens=longest)
        for length in sizes.prefill_lengths:
            batch = harness.batch([(0, 0, length)])
            seconds = _forward_seconds(harness, batch, repeats=5)
            yield Result("model", f"prefill of {length}{suffix}", value=length / seconds, unit="tok/s")
        num_seqs, context = max(sizes.decode_batches), sizes.decode_context
        harness = Harness(decoder, num_seqs=num_seqs, max_tokens=context)
        for size in sizes.decode_batches:
            batch = harness.batch([(number, context - 1, context) for number in range(size)])
            eager = size / _forward_seconds(harness, batch)
            yield Result("model", f"decode of {size}{suffix}, eager", value=eager, unit="tok/s")
            if device.type == "cuda":
                yield _graph_speed(harness, batch, size, context, eager, suffix)


def _forward_seconds(harness: Harness, batch: ForwardBatch, *, repeats: int = 15) -> float:
    decoder, pool = harness.decoder, harness.pool
    return median_seconds(lambda: decoder.forward(batch, pool), decoder.device, repeats=repeats)


def _graph_speed(harness: Harness, batch: ForwardBatch, size: int, context: int, eager: float, suffix: str) -> Result:
    """The same decode by a captured graph, and whether it gives the same logits."""
    from twopool.models.decode_graphs import DecodeGraphs

    pool = torch.zeros_like(harness.pool)
    graphs = DecodeGraphs(harness.decoder, pool, max_num_seqs=size, max_model_len=context)
    graphs.capture()
    pool.copy_(harness.pool)  # capturing wrote to it
    sequences = np.arange(size)
    inputs = DecodeInputs(
        token_ids=np.array([harness.token(number, context - 1) for number in range(size)], dtype=np.int32),
        context_lens=np.full(size, context, dtype=np.int32),
        block_tables=harness.tables(sequences),
    )
    seconds = median_seconds(lambda: graphs.run(inputs), harness.decoder.device)
    wanted = harness.decoder.forward(batch, harness.pool)
    return Result(
        "model",
        f"decode of {size}{suffix}, graph",
        passed=torch.allclose(graphs.run(inputs), wanted, rtol=0, atol=0 if suffix else 0.05),
        value=size / seconds,
        unit="tok/s",
        reference=eager,
        reference_name="eager",
    )
