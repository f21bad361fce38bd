"""From a schedule to the arrays of a step."""

import numpy as np
import numpy.typing as npt

from twopool.engine.scheduler import Chunk, Schedule, blocks_for
from twopool.engine.sequence import Sequence
from twopool.engine.step import StepPlan
from twopool.kernels.sampling import ROW_DTYPE, SamplingBatch
from twopool.protocol.ids import ChoiceIndex

Ints = npt.NDArray[np.int32]
Draw = tuple[Sequence, ChoiceIndex]


def build_plan(schedule: Schedule, block_size: int) -> StepPlan:
    """The plan of a schedule that is not empty. Its draws are the chunks' draws, in order."""
    chunks = schedule.chunks
    query_lens = [chunk.num_rows for chunk in chunks]
    new_ids = [_new_ids(chunk) for chunk in chunks]
    context_lens = [chunk.sequence.num_computed + chunk.num_rows for chunk in chunks]
    draws = [(chunk.sequence, choice) for chunk in chunks for choice in chunk.draws]
    num_draws = [len(chunk.draws) for chunk in chunks if chunk.draws]
    scored_rows, scored_ids = _scored(chunks if schedule.num_scored else [])
    return StepPlan(
        token_ids=np.concatenate(new_ids),
        query_lens=np.array(query_lens, dtype=np.int32),
        context_lens=np.array(context_lens, dtype=np.int32),
        block_tables=_block_tables(chunks, context_lens, block_size),
        copies=np.array(schedule.copies, dtype=np.int32).reshape(-1, 2),
        logit_sequences=np.array([index for index, chunk in enumerate(chunks) if chunk.draws], dtype=np.int32),
        draw_logits=np.repeat(np.arange(len(num_draws), dtype=np.int32), num_draws),
        sampling=_sampling_batch(draws),
        scored_rows=scored_rows,
        scored_ids=scored_ids,
        scores_with_top=len(scored_rows) > 0
        and any(chunk.sequence.request.sampling.prompt_logprobs for chunk in chunks),
    )


def _new_ids(chunk: Chunk) -> Ints:
    start = chunk.sequence.num_computed
    return chunk.sequence.token_ids[start : start + chunk.num_rows]


def _scored(chunks: list[Chunk]) -> tuple[Ints, Ints]:
    """Rows that tell how likely the next token of a prompt is, and that token, both [N] int32."""
    rows: list[Ints] = []
    ids: list[Ints] = []
    first_row = 0
    for chunk in chunks:
        sequence = chunk.sequence
        if num_scored := sequence.num_scored(chunk.num_rows):
            start = sequence.num_computed + 1
            rows.append(np.arange(first_row, first_row + num_scored, dtype=np.int32))
            ids.append(sequence.token_ids[start : start + num_scored])
        first_row += chunk.num_rows
    return (np.concatenate(rows), np.concatenate(ids)) if rows else (_ints([]), _ints([]))


def _block_tables(chunks: list[Chunk], context_lens: list[int], block_size: int) -> Ints:
    widths = [blocks_for(length, block_size) for length in context_lens]
    tables = np.zeros((len(chunks), max(widths)), dtype=np.int32)
    for row, chunk, width in zip(tables, chunks, widths, strict=True):
        row[:width] = chunk.sequence.table[:width]
    return tables


def _sampling_batch(draws: list[Draw]) -> SamplingBatch:
    if not draws:
        return SamplingBatch(rows=np.empty(0, dtype=ROW_DTYPE))
    rows = np.frombuffer(bytearray().join([sequence.row for sequence, _ in draws]), dtype=ROW_DTYPE)
    rows["choice"] = [choice for _, choice in draws]
    rows["position"] = [sequence.num_outputs for sequence, _ in draws]
    penalised = [(row, sequence) for row, (sequence, _) in enumerate(draws) if sequence.request.penalised]
    biased = [(row, sequence) for row, (sequence, _) in enumerate(draws) if sequence.request.sampling.logit_bias]
    masked = [(row, sequence) for row, (sequence, _) in enumerate(draws) if _too_short_to_stop(sequence)]
    if not (penalised or biased or masked):
        return SamplingBatch(rows=rows)
    biases = [(row, *entry) for row, sequence in biased for entry in sequence.request.sampling.logit_bias]
    masks = [(row, token) for row, sequence in masked for token in sequence.request.stop_ids]
    return SamplingBatch(
        rows=rows,
        history_rows=_ints([row for row, _ in penalised]),
        history_lens=_ints([sequence.num_tokens for _, sequence in penalised]),
        history_prompt_lens=_ints([sequence.request.num_prompt for _, sequence in penalised]),
        history_ids=np.concatenate([sequence.token_ids for _, sequence in penalised]) if penalised else _ints([]),
        bias_rows=_ints([row for row, _, _ in biases]),
        bias_ids=_ints([token for _, token, _ in biases]),
        bias_values=np.array([value for _, _, value in biases], dtype=np.float32),
        masked_rows=_ints([row for row, _ in masks]),
        masked_ids=_ints([token for _, token in masks]),
    )


def _too_short_to_stop(sequence: Sequence) -> bool:
    return bool(sequence.request.stop_ids) and sequence.num_outputs < sequence.request.sampling.min_tokens


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)
