"""Penalties and draws on the GPU, one program a row, without a sort and without asking the host anything.

The cut that top-k, min-p and top-p make through a row is found by bisection over the bits of the weights, which for
floats of one sign order as the numbers do: 30 counts over the row for each of top-k and top-p, only for rows that ask.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from twopool.kernels.backend import upload
from twopool.kernels.gpu.compilation import EXACT, Specialisation
from twopool.kernels.gpu.philox import gumbel

_GROUP = 256  # tokens in a group of the two-level draw, as in kernels.sampling
_BLOCK = 4096
_NUM_WARPS = 8
_HISTORY_BLOCK = 1024
_PENALTY_BLOCK = 1024

_PROMPT_BIT: int = 1 << 30
"""Set in a token's count when the prompt holds it; below it stands how often the output does."""


@triton.jit
def _count_history_kernel(
    counts_ptr,  # [P, vocab_size] int32, zeroed
    ids_ptr,  # [tokens] int32
    starts_ptr,  # [P, 3] int64: start in ids, length, how many of those are prompt
    vocab_size,
    PROMPT_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_ptr + row * 3)
    length = tl.load(starts_ptr + row * 3 + 1)
    prompt_len = tl.load(starts_ptr + row * 3 + 2)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length
    ids = tl.load(ids_ptr + start + offsets, mask=inside, other=0)
    inside &= ids < vocab_size
    targets = counts_ptr + row * vocab_size + ids
    is_prompt = offsets < prompt_len
    tl.atomic_or(targets, tl.full([BLOCK], PROMPT_BIT, tl.int32), mask=inside & is_prompt)
    tl.atomic_add(targets, tl.full([BLOCK], 1, tl.int32), mask=inside & (offsets >= prompt_len))


@triton.jit
def _penalise_kernel(
    logits_ptr,  # [R, row_stride] float32
    counts_ptr,  # [P, vocab_size] int32
    rows_ptr,  # [P] int64, rows of the logits
    factors_ptr,  # [P, 3] float64: repetition, presence, frequency
    row_stride,
    vocab_size,
    PROMPT_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    seen = tl.load(counts_ptr + number * vocab_size + tokens, mask=inside, other=0)
    count = seen & (PROMPT_BIT - 1)
    repetition = tl.load(factors_ptr + number * 3).to(tl.float32)
    presence = tl.load(factors_ptr + number * 3 + 1)
    frequency = tl.load(factors_ptr + number * 3 + 2)
    subtract = frequency * count.to(tl.float64) + tl.where(count > 0, presence, 0.0)
    targets = logits_ptr + tl.load(rows_ptr + number) * row_stride + tokens
    values = tl.load(targets, mask=inside & (seen != 0), other=0.0)
    values = tl.where(values > 0, values / repetition, values * repetition)
    tl.store(targets, values - subtract.to(tl.float32), mask=inside & (seen != 0))


@triton.jit
def _at_or_above(weights_ptr, width, threshold, BLOCK: tl.constexpr):
    """How many weights have bits >= threshold, and their sum in float64."""
    counts = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, width, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        weights = tl.load(weights_ptr + tokens, mask=tokens < width, other=0.0)
        above = (weights.to(tl.int32, bitcast=True) >= threshold) & (tokens < width)
        counts += above.to(tl.int32)
        sums += tl.where(above, weights, 0.0).to(tl.float64)
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0)


@triton.jit
def _largest_threshold(weights_ptr, width, wanted_count, wanted_sum, BLOCK: tl.constexpr):
    """The largest bits at or above which there are ``wanted_count`` weights and a sum of ``wanted_sum``; else 0."""
    threshold = (wanted_count * 0).to(tl.int32)
    for step in range(30):  # weights are at most 1, which has bits 0x3f800000
        candidate = threshold | (1 << (29 - step))
        count, total = _at_or_above(weights_ptr, width, candidate, BLOCK)
        threshold = tl.where((count >= wanted_count) & (total >= wanted_sum), candidate, threshold)
    return threshold


@triton.jit
def _truncate(weights_ptr, width, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """Set to 0 what top-k, min-p and then top-p leave out of a row. Of equal weights the lower ids stay."""
    no_sum = top_p * 0.0
    threshold = tl.maximum(min_p.to(tl.int32, bitcast=True), 1)  # a weight of 0 never is eligible
    quota = (top_k * 0).to(tl.int32) + 0x7FFFFFFF  # how many with exactly the threshold stay
    if top_k > 0:
        kth = _largest_threshold(weights_ptr, width, top_k.to(tl.int32), no_sum, BLOCK)
        above, _sum = _at_or_above(weights_ptr, width, kth + 1, BLOCK)
        if kth >= threshold:
            threshold = kth
            quota = (top_k.to(tl.int32) - above).to(tl.int32)
    if top_p < 1.0:
        above, above_sum = _at_or_above(weights_ptr, width, threshold + 1, BLOCK)
        count, count_sum = _at_or_above(weights_ptr, width, threshold, BLOCK)
        value = threshold.to(tl.float32, bitcast=True).to(tl.float64)
        eligible_sum = tl.where(count - above > quota, above_sum + quota.to(tl.float64) * value, count_sum)
        wanted = top_p * eligible_sum
        last = _largest_threshold(weights_ptr, width, (top_k * 0).to(tl.int32), wanted, BLOCK)
        _count, last_sum = _at_or_above(weights_ptr, width, tl.maximum(last, threshold) + 1, BLOCK)
        value = tl.maximum(last, threshold).to(tl.float32, bitcast=True).to(tl.float64)
        # Equal weights are taken while what stands before is less than wanted: at least one, at most the quota.
        missing = tl.minimum(tl.maximum((wanted - last_sum) / value, 1.0), 1e9)
        whole = missing.to(tl.int32)
        taken = whole + (whole.to(tl.float64) < missing).to(tl.int32)
        if last > threshold:
            quota = taken
            threshold = last
        else:
            quota = tl.minimum(quota, taken)
    ties = (top_k * 0).to(tl.int32)
    for start in range(0, width, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        weights = tl.load(weights_ptr + tokens, mask=tokens < width, other=0.0)
        bits = weights.to(tl.int32, bitcast=True)
        tie = (bits == threshold).to(tl.int32)
        rank = ties + tl.cumsum(tie, axis=0) - tie
        keep = (bits > threshold) | ((tie == 1) & (rank < quota))
        tl.store(weights_ptr + tokens, tl.where(keep, weights, 0.0), mask=tokens < width)
        ties += tl.sum(tie, axis=0)


@triton.jit
def _log_or_never(weights):
    """float64; -inf for a weight of 0."""
    possible = weights > 0.0
    return tl.where(possible, tl.log(tl.where(possible, weights, 1.0).to(tl.float64)), float("-inf"))


@triton.jit
def _draw_kernel(
    logits_ptr,  # [R, row_stride] float32; rows that draw at random are overwritten
    params_ptr,  # [R, 8] int64: seed, position, choice, top_k, is_random; bits of float64 temperature, top_p, min_p
    drawn_ptr,  # [2, R] int64: tokens, and whether the row is bad
    row_stride,
    width,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    params = params_ptr + row * 8
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    nans = tl.full([], 0, tl.int32)
    for start in range(0, width, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(row_ptr + tokens, mask=tokens < width, other=float("-inf"))
        nans += tl.sum((values != values).to(tl.int32), axis=0)
        values = tl.where(values != values, float("-inf"), values)
        tile_best = tl.max(values, axis=0)
        tile_token = start + tl.argmax(values, axis=0)
        token = tl.where(tile_best > best, tile_token, token)
        best = tl.maximum(best, tile_best)
    bad = (nans > 0) | (best == float("inf")) | (best == float("-inf"))
    is_random = tl.load(params + 4) != 0
    if is_random & (bad == 0):
        seed = tl.load(params)
        position = tl.load(params + 1)
        choice = tl.load(params + 2)
        top_k = tl.load(params + 3)
        temperature = tl.load(params + 5).to(tl.float64, bitcast=True).to(tl.float32)
        top_p = tl.load(params + 6).to(tl.float64, bitcast=True)
        min_p = tl.load(params + 7).to(tl.float64, bitcast=True).to(tl.float32)
        for start in range(0, width, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            values = tl.load(row_ptr + tokens, mask=tokens < width, other=float("-inf"))
            # The maximum is subtracted first: it becomes 0 exactly, and nothing overflows.
            tl.store(row_ptr + tokens, tl.exp((values - best) / temperature), mask=tokens < width)
        tl.debug_barrier()  # other threads of this program read what these wrote
        if ((top_k > 0) & (top_k < width)) | (top_p < 1.0) | (min_p > 0.0):
            _truncate(row_ptr, width, top_k, top_p, min_p, BLOCK)
            tl.debug_barrier()
        best_score = tl.full([], float("-inf"), tl.float64)
        group = tl.full([], 0, tl.int32)
        in_group = tl.arange(0, GROUP)
        for start in range(0, width, BLOCK):
            groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
            tokens = groups[:, None] * GROUP + in_group[None, :]
            masses = tl.sum(tl.load(row_ptr + tokens, mask=tokens < width, other=0.0), axis=1)
            scores = _log_or_never(masses) + gumbel(GROUP + groups, seed, position, choice)
            tile_score = tl.max(scores, axis=0)
            tile_group = start // GROUP + tl.argmax(scores, axis=0)
            group = tl.where(tile_score > best_score, tile_group, group)
            best_score = tl.maximum(best_score, tile_score)
        tokens = group * GROUP + in_group
        weights = tl.load(row_ptr + tokens, mask=tokens < width, other=0.0)
        scores = _log_or_never(weights) + gumbel(in_group, seed, position, choice)
        token = group * GROUP + tl.argmax(scores, axis=0)
    tl.store(drawn_ptr + row, token.to(tl.int64))
    tl.store(drawn_ptr + tl.num_programs(0) + row, bad.to(tl.int64))


def draw(logits: Tensor, rows: npt.NDArray[np.void], is_random: npt.NDArray[np.bool_]) -> Tensor:
    """[2, R] int64 on the device: the tokens, and whether a row had no usable logits (its token is meaningless then).

    logits: [R, vocab_size] float32, last dimension contiguous; overwritten. rows: [R] of ``sampling.ROW_DTYPE``.
    """
    num_rows, width = logits.shape
    params = np.empty((num_rows, 8), dtype=np.int64)
    for column, name in enumerate(("seed", "position", "choice", "top_k")):
        params[:, column] = rows[name]
    params[:, 4] = is_random
    for column, name in enumerate(("temperature", "top_p", "min_p"), start=5):
        params[:, column] = rows[name].astype(np.float64).view(np.int64)
    drawn = torch.empty((2, num_rows), dtype=torch.int64, device=logits.device)
    if num_rows:
        _draw_kernel[(num_rows,)](
            logits,
            upload(params, logits.device),
            drawn,
            logits.stride(0),
            width,
            GROUP=_GROUP,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            **EXACT,
        )
    return drawn


def apply_penalties(
    logits: Tensor,
    rows: npt.NDArray[np.int64],
    factors: npt.NDArray[np.float64],
    lens: npt.NDArray[np.int64],
    prompt_lens: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int32],
) -> None:
    """Repetition over prompt and output, presence and frequency over the output alone; each token once.

    logits: [R, vocab_size] float32. rows: [P], which of them; factors: [P, 3], repetition, presence, frequency;
    lens: [P], prompt_lens: [P], ids: [sum(lens)].
    """
    vocab_size = logits.shape[1]
    device = logits.device
    starts = np.column_stack((np.cumsum(lens) - lens, lens, prompt_lens)).astype(np.int64)
    counts = torch.zeros((len(rows), vocab_size), dtype=torch.int32, device=device)
    _count_history_kernel[(len(rows), triton.cdiv(int(lens.max()), _HISTORY_BLOCK))](
        counts,
        upload(ids, device),
        upload(starts, device),
        vocab_size,
        PROMPT_BIT=_PROMPT_BIT,
        BLOCK=_HISTORY_BLOCK,
        num_warps=4,
        **EXACT,
    )
    _penalise_kernel[(len(rows), triton.cdiv(vocab_size, _PENALTY_BLOCK))](
        logits,
        counts,
        upload(rows, device),
        upload(factors, device),
        logits.stride(0),
        vocab_size,
        PROMPT_BIT=_PROMPT_BIT,
        BLOCK=_PENALTY_BLOCK,
        num_warps=4,
        **EXACT,
    )


def specialisations() -> Iterator[Specialisation]:
    """Every compilation any model may ask for."""
    counting = {"counts_ptr": "*i32", "ids_ptr": "*i32", "starts_ptr": "*i64", "vocab_size": "i32"}
    constants = {"PROMPT_BIT": _PROMPT_BIT, "BLOCK": _HISTORY_BLOCK}
    yield Specialisation(_count_history_kernel, counting, constants, num_warps=4, num_stages=1)
    penalising = {
        "logits_ptr": "*fp32",
        "counts_ptr": "*i32",
        "rows_ptr": "*i64",
        "factors_ptr": "*fp64",
        "row_stride": "i32",
        "vocab_size": "i32",
    }
    constants = {"PROMPT_BIT": _PROMPT_BIT, "BLOCK": _PENALTY_BLOCK}
    yield Specialisation(_penalise_kernel, penalising, constants, num_warps=4, num_stages=1)
    drawing = {
        "logits_ptr": "*fp32",
        "params_ptr": "*i64",
        "drawn_ptr": "*i64",
        "row_stride": "i32",
        "width": "i32",
    }
    yield Specialisation(_draw_kernel, drawing, {"GROUP": _GROUP, "BLOCK": _BLOCK}, _NUM_WARPS, num_stages=3)
