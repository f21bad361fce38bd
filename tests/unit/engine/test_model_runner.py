"""Which steps a captured decode computes, and what is never drawn."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from twopool.engine.loading import load_model
from twopool.engine.model_runner import ModelRunner
from twopool.engine.step import StepPlan
from twopool.kernels.sampling import ROW_DTYPE, SamplingBatch
from twopool.models.batch import DecodeInputs, ForwardBatch
from twopool.protocol.config import DecodeConfig
from twopool_testing.tiny_model import build_tiny_llama

VOCAB_SIZE = 40
BLOCK_SIZE = 16


def _logits(token_ids: Tensor) -> Tensor:
    """The token after t is t + 1; the last one, 39, is the likeliest of all nevertheless."""
    logits = torch.zeros(len(token_ids), VOCAB_SIZE)
    logits[torch.arange(len(token_ids)), token_ids.long() + 1] = 1.0
    logits[:, -1] = 2.0
    return logits


class _Model:
    device = torch.device("cpu")

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def forward(self, batch: ForwardBatch, kv_pool: Tensor) -> Tensor:
        self._log.append(f"model {batch.query_lens_host.tolist()}")
        return _logits(batch.token_ids[batch.logit_rows])


class _Captured:
    """Takes up to two sequences."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._captured = False

    def capture(self) -> None:
        self._captured = True
        self._log.append("capture")

    def accepts(self, inputs: DecodeInputs) -> bool:
        return self._captured and len(inputs.token_ids) <= 2

    def run(self, inputs: DecodeInputs) -> Tensor:
        self._log.append(f"captured {inputs.token_ids.tolist()} {inputs.context_lens.tolist()}")
        assert inputs.block_tables.shape[0] == len(inputs.token_ids)
        return _logits(torch.from_numpy(inputs.token_ids))


def _plan(query_lens: list[int], draws: list[int], *, scored: bool = False) -> StepPlan:
    """Sequences of 20 tokens; ``draws``: the sequences each draw is from."""
    num_rows, num_seqs = sum(query_lens), len(query_lens)
    rows = np.zeros(len(draws), dtype=ROW_DTYPE)
    rows["repetition_penalty"] = rows["top_p"] = 1.0
    drawn_from = sorted(set(draws))
    return StepPlan(
        token_ids=np.arange(num_rows, dtype=np.int32),
        query_lens=np.array(query_lens, dtype=np.int32),
        context_lens=np.full(num_seqs, 20, dtype=np.int32),
        block_tables=np.arange(2 * num_seqs, dtype=np.int32).reshape(num_seqs, 2),
        copies=np.empty((0, 2), dtype=np.int32),
        logit_sequences=np.array(drawn_from, dtype=np.int32),
        draw_logits=np.array([drawn_from.index(draw) for draw in draws], dtype=np.int32),
        sampling=SamplingBatch(rows=rows),
        scored_rows=np.zeros(int(scored), dtype=np.int32),
        scored_ids=np.ones(int(scored), dtype=np.int32),
    )


def _runner(log: list[str]) -> ModelRunner:
    pool = torch.zeros(16, 1, 1, 2, BLOCK_SIZE, 4)
    return ModelRunner(_Model(log), pool, num_valid_tokens=VOCAB_SIZE - 1, captured=_Captured(log))


def test_capturing_comes_after_the_kernels_were_tried_and_before_the_first_request() -> None:
    log: list[str] = []
    _runner(log).warm_up()
    assert log == ["model [1]", "model [128]", "capture", "captured [0] [1]"]


@pytest.mark.parametrize(
    ("query_lens", "draws", "scored", "by"),
    [
        ([1], [0], False, "captured [0] [20]"),
        ([1, 1], [0, 1], False, "captured [0, 1] [20, 20]"),
        ([1, 1], [0, 0, 1], False, "captured [0, 1] [20, 20]"),
        ([1, 1, 1], [0, 1, 2], False, "model [1, 1, 1]"),
        ([1, 3], [0, 1], False, "model [1, 3]"),
        ([2], [0], False, "model [2]"),
        ([1, 1], [1], False, "model [1, 1]"),
        ([1], [0], True, "model [1]"),
    ],
    ids=["one", "two", "two choices", "too many", "with a chunk", "a chunk", "one draws nothing", "scored"],
)
def test_who_computes(query_lens: list[int], draws: list[int], scored: bool, by: str) -> None:
    """Whoever does, the tokens are those of the sequences' last rows; the last token of the vocabulary is unknown."""
    log: list[str] = []
    runner = _runner(log)
    runner.warm_up()
    result = runner.run(_plan(query_lens, draws, scored=scored))
    assert log[4:] == [by]
    ends = np.cumsum(query_lens)
    assert result.draws.token_ids.tolist() == [ends[draw] for draw in draws]


@pytest.mark.parametrize(("draws", "waits"), [([], 1), ([0], 0)])
def test_a_chunk_that_draws_nothing_is_waited_for(
    draws: list[int], waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What peers are told they may read has to be in memory; where ids are fetched from the device, it is."""
    waited = list[ModelRunner]()
    monkeypatch.setattr(ModelRunner, "wait_written", lambda self: waited.append(self))
    _runner([]).run(_plan([3], draws))
    assert len(waited) == waits


def test_rows_that_no_token_of_the_tokenizer_stands_for_are_never_drawn(tmp_path: Path) -> None:
    """A whole worker's model, whose logits are wider than its tokenizer; the padded rows are the likeliest ones."""
    build_tiny_llama(tmp_path, vocab_size=512)
    config = DecodeConfig(dtype="float32", device="cpu", num_threads=1, kv_cache_memory=1 << 22)
    loaded = load_model(config, tmp_path)
    assert loaded.num_valid_tokens == 400 < loaded.decoder.config.vocab_size

    class Padded:
        device = torch.device("cpu")

        def forward(self, batch: ForwardBatch, kv_pool: Tensor) -> Tensor:
            logits = loaded.decoder.forward(batch, kv_pool)
            logits[:, loaded.num_valid_tokens :] = 100.0
            return logits

    plan = _plan([1], [0] * 64)
    plan.sampling.rows["temperature"] = np.repeat([0.0, 5.0], 32)
    plan.sampling.rows["seed"] = np.arange(64)
    result = loaded.runner(config, model=Padded()).run(plan)
    assert not result.draws.bad.any()
    assert result.draws.token_ids.max() < loaded.num_valid_tokens
    assert len(set(result.draws.token_ids.tolist())) > 10
