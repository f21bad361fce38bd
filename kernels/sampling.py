"""Draws the next token of every row of a batch, each row by its own parameters.

A row's token is a pure function of the row's logits, parameters and ids: no neighbour, batch size or thread count
changes it, and its noise is a pure function of (seed, choice, position). Every stage costs only the rows that ask for
it.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twopool.kernels import host_draw
from twopool.kernels.backend import upload, uses_triton

GREEDY_TEMPERATURE = 1e-3
"""At or below this the most likely token is taken: what is left of the noise there is rounding."""

MAX_TOP_LOGPROBS = 20

ROW_DTYPE = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("seed", np.int64),
        ("top_k", np.int32),  # 0: off
        ("choice", np.int32),
        ("position", np.int32),  # output index of the token to draw
        ("num_top_logprobs", np.int32),
        ("wants_logprobs", np.bool_),
    ]
)
"""Parameters of one draw."""

Ints = npt.NDArray[np.int32]


def _no_ints() -> Ints:
    return np.empty(0, dtype=np.int32)


def _no_floats() -> npt.NDArray[np.float32]:
    return np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class SamplingBatch:
    """R draws. What only some rows ask for comes as lists of (row, value); ids beyond the vocabulary are ignored."""

    rows: npt.NDArray[np.void]
    """[R] of ROW_DTYPE"""
    history_rows: Ints = field(default_factory=_no_ints)
    """[P] int32, ascending: the rows with a penalty"""
    history_lens: Ints = field(default_factory=_no_ints)
    """[P] int32: prompt plus output ids of each of them"""
    history_prompt_lens: Ints = field(default_factory=_no_ints)
    """[P] int32: how many of those are prompt"""
    history_ids: Ints = field(default_factory=_no_ints)
    """[sum(history_lens)] int32"""
    bias_rows: Ints = field(default_factory=_no_ints)
    """[B] int32"""
    bias_ids: Ints = field(default_factory=_no_ints)
    """[B] int32"""
    bias_values: npt.NDArray[np.float32] = field(default_factory=_no_floats)
    """[B] float32, added to the logits"""
    masked_rows: Ints = field(default_factory=_no_ints)
    """[M] int32"""
    masked_ids: Ints = field(default_factory=_no_ints)
    """[M] int32: tokens that must not be drawn"""
    allowed_rows: Ints = field(default_factory=_no_ints)
    """[G] int32: the rows in which only some tokens may be drawn"""
    allowed_bits: Ints = field(default_factory=lambda: np.empty((0, 0), dtype=np.int32))
    """[G, words] int32: token t may be drawn where bit t % 32 of word t // 32 is set; none beyond the last word may"""


@dataclass(frozen=True)
class Draws:
    """R drawn tokens, on the host."""

    token_ids: npt.NDArray[np.int64]
    """[R] int64; meaningless where ``bad``"""
    bad: npt.NDArray[np.bool_]
    """[R] bool: the row had no usable logits (NaN, +inf, or nothing finite)"""
    logprobs: npt.NDArray[np.float32] | None = None
    """[R] float32 of the drawn token; rows that did not ask hold 0. None when no row asked"""
    top_ids: npt.NDArray[np.int64] | None = None
    """[R, N] int64, the most likely tokens, best first, ties by id; None when no row asked for any"""
    top_logprobs: npt.NDArray[np.float32] | None = None
    """[R, N] float32"""


def sample(logits: Tensor, batch: SamplingBatch, *, num_valid_tokens: int | None = None) -> Draws:
    """Draw one token a row.

    logits: [R, vocab_size] float32, last dimension contiguous; overwritten. Tokens from ``num_valid_tokens`` on, which
    the tokenizer does not know, are never drawn nor reported.

    Log-probabilities are those after penalties and bias, before the mask, the temperature and truncation.
    """
    rows = batch.rows
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} draws")
    logits = logits[:, :num_valid_tokens]
    _apply_penalties(logits, batch)
    _apply_bias(logits, batch)
    asking = np.flatnonzero(rows["wants_logprobs"])
    log_probs = torch.log_softmax(_select(logits, asking), dim=-1) if len(asking) else None
    _apply_mask(logits, batch)
    _apply_allowed(logits, batch)

    if uses_triton(logits):
        from twopool.kernels.gpu import sampling as gpu

        drawn = gpu.draw(logits, rows, _is_random(rows))
        report = None if log_probs is None else _report(log_probs, drawn[0], asking, rows)
        token_ids, is_bad = drawn.cpu().numpy()  # the one wait for the device, when all it has to do is queued
        bad = is_bad.astype(np.bool_)
    else:
        token_ids, bad = host_draw.draw(logits.numpy(), rows, _is_random(rows))
        report = None if log_probs is None else _report(log_probs, torch.from_numpy(token_ids), asking, rows)
    return Draws(token_ids, bad) if report is None else Draws(token_ids, bad, *_spread(report, asking, len(rows)))


# --- stages ----------------------------------------------------------------------------------------------------------


def _is_random(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """[R] bool: rows for which anything but the most likely token may be drawn."""
    random: npt.NDArray[np.bool_] = rows["temperature"] > GREEDY_TEMPERATURE
    if random.any():
        random &= (rows["top_k"] != 1) & (rows["top_p"] > 0) & (rows["min_p"] < 1)
    return random


def _apply_penalties(logits: Tensor, batch: SamplingBatch) -> None:
    """Repetition over prompt and output, frequency and presence over the output alone; each token once."""
    if not len(batch.history_rows):
        return
    vocab_size = logits.shape[1]
    lens = batch.history_lens.astype(np.int64)
    if uses_triton(logits):
        from twopool.kernels.gpu import sampling as gpu

        params = batch.rows[batch.history_rows]
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        gpu.apply_penalties(
            logits,
            batch.history_rows.astype(np.int64),
            np.column_stack([params[name] for name in names]),
            lens,
            batch.history_prompt_lens.astype(np.int64),
            batch.history_ids,
        )
        return
    offsets = np.arange(int(lens.sum())) - np.repeat(np.cumsum(lens) - lens, lens)
    is_output = offsets >= np.repeat(batch.history_prompt_lens, lens)
    known = batch.history_ids < vocab_size
    places = np.repeat(batch.history_rows.astype(np.int64), lens) * vocab_size + batch.history_ids
    unique, inverse = np.unique(places[known], return_inverse=True)
    counts = np.bincount(inverse, weights=is_output[known], minlength=len(unique))
    row, token = np.divmod(unique, vocab_size)
    params = batch.rows[row]

    where = (_to(row, logits), _to(token, logits))
    repetition = _to(params["repetition_penalty"], logits).float()
    subtract = params["frequency_penalty"] * counts + params["presence_penalty"] * (counts > 0)
    values = logits[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[where] = values - _to(subtract, logits).float()


def _apply_bias(logits: Tensor, batch: SamplingBatch) -> None:
    if not len(batch.bias_ids):
        return
    known = batch.bias_ids < logits.shape[1]
    if known.any():
        where = (_to(batch.bias_rows[known], logits).long(), _to(batch.bias_ids[known], logits).long())
        logits.index_put_(where, _to(batch.bias_values[known], logits), accumulate=True)


def _apply_mask(logits: Tensor, batch: SamplingBatch) -> None:
    if not len(batch.masked_ids):
        return
    known = batch.masked_ids < logits.shape[1]
    if known.any():
        where = (_to(batch.masked_rows[known], logits).long(), _to(batch.masked_ids[known], logits).long())
        logits[where] = -torch.inf


def _apply_allowed(logits: Tensor, batch: SamplingBatch) -> None:
    num_rows, width = len(batch.allowed_rows), logits.shape[1]
    if not num_rows:
        return
    table = _byte_penalties(logits.device)
    packed = _to(np.ascontiguousarray(batch.allowed_bits).view(np.uint8), logits).int()  # [G, words * 4]
    rows = _to(batch.allowed_rows, logits).long()
    at_once = num_rows if logits.is_cuda else 1  # on a CPU a row's penalties stay in its cache
    for start in range(0, num_rows, at_once):
        part = packed[start : start + at_once]
        penalties = table.index_select(0, part.view(-1)).view(len(part), -1)[:, :width]
        if penalties.shape[1] < width:
            penalties = torch.nn.functional.pad(penalties, (0, width - penalties.shape[1]), value=-torch.inf)
        logits.index_add_(0, rows[start : start + at_once], penalties)


@functools.cache
def _byte_penalties(device: torch.device) -> Tensor:
    """[256, 8] float32: for each byte of a bit mask what its eight tokens' logits are to gain, 0 or -inf.

    Looking bytes up and adding is several times as fast on a CPU as unpacking bits and filling.
    """
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.zeros(256, 8).masked_fill_(bits == 0, -torch.inf).to(device)


def likeliest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row, largest first, ties by index: ([N, count], [N, count] int64)."""
    tokens = values.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered = values.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
    return ordered.values, tokens.gather(1, ordered.indices)


def _report(
    log_probs: Tensor, tokens: Tensor, asking: npt.NDArray[np.intp], rows: npt.NDArray[np.void]
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor]:
    """Of the ``asking`` rows (``log_probs``: [A, vocab_size]): log-probability of the drawn token, [A], and where any
    row wants them the likeliest tokens and their log-probabilities, [A, N] each. Nothing waits for the device.
    """
    chosen = log_probs.gather(1, tokens[_to(asking, tokens)][:, None])[:, 0]
    if not rows["num_top_logprobs"].any():
        return (chosen,)
    # Always as many as anyone may ask for, so that how many a neighbour wants cannot matter.
    top_values, top_tokens = likeliest(log_probs, min(MAX_TOP_LOGPROBS, log_probs.shape[1]))
    return chosen, top_tokens, top_values


def _spread(report: tuple[Tensor, ...], asking: npt.NDArray[np.intp], num_rows: int) -> Iterator[npt.NDArray[Any]]:
    """What ``_report`` gave, on the host and with zeros for the rows that did not ask."""
    for part in report:
        host = part.cpu().numpy()
        spread = np.zeros((num_rows, *host.shape[1:]), dtype=host.dtype)
        spread[asking] = host
        yield spread


def _select(values: Tensor, index: npt.NDArray[np.intp]) -> Tensor:
    """The rows ``index`` (ascending) of ``values``; no copy when they are all."""
    return values if len(index) == values.shape[0] else values.index_select(0, _to(index, values))


def _to(array: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    # A field of a structured array has odd strides, even where numpy calls it contiguous.
    return upload(array.copy(), like.device)
