"""The next step's inputs, made while this one computes.

Most steps of a decode worker differ from the one before by a token and a position a sequence. So all of the next plan
but the tokens is laid out ahead. The thread that computes fills them in when they are drawn and goes on at once; what
they mean for their requests is worked out on the event loop meanwhile. The device waits for a batch's ids, not for its
bookkeeping.

A prepared plan is used only where it is the one that scheduling anew would give: whatever comes, ends, is cancelled or
is out of the ordinary goes the long way.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from twopool.engine.block_pool import BlockPool
from twopool.engine.scheduler import Schedule, Scheduler, blocks_for
from twopool.engine.sequence import Sequence
from twopool.engine.step import StepPlan
from twopool.kernels.sampling import Draws, SamplingBatch

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class NextStep:
    """One more token for each of the S sequences of the step under way, which decodes them."""

    schedule: Schedule
    _scheduler_changes: int
    _plan: StepPlan
    _history_places: npt.NDArray[np.int64]
    """[P] where in the plan's penalty histories the drawn tokens belong"""

    def plan(self, draws: Draws, scheduler: Scheduler) -> StepPlan | None:
        """With the tokens of the step under way; None when they end or fail a sequence, or some came or went.

        Called on the thread that computes, and changes nothing but the plan.
        """
        if scheduler.num_changes != self._scheduler_changes or draws.bad.any():
            return None
        drawn = zip(self.schedule.chunks, draws.token_ids.tolist(), strict=True)
        if any(token in chunk.sequence.request.stop_ids for chunk, token in drawn):
            return None
        sampling = self._plan.sampling
        self._plan.token_ids[:] = draws.token_ids
        sampling.history_ids[self._history_places] = draws.token_ids[sampling.history_rows]
        return self._plan


def prepare_next(schedule: Schedule, plan: StepPlan, scheduler: Scheduler, pool: BlockPool) -> NextStep | None:
    """What follows the step under way if nothing happens; None where it does more than decode every sequence once.

    The sequences get the blocks they grow into, as long as nobody has to give way for that.
    """
    chunks = schedule.chunks
    if scheduler.waiting or len(scheduler.running) != len(chunks):
        return None
    if not len(plan.token_ids) == len(plan.draw_logits) == len(chunks):
        return None  # a prefill, or several choices that begin
    sequences = [chunk.sequence for chunk in chunks]
    if not all(map(_decodes_on, sequences)):
        return None
    grown = np.flatnonzero(plan.context_lens % pool.block_size == 0).tolist()
    if not _grow((sequences[index] for index in grown), pool):
        return None
    context_lens = plan.context_lens + 1
    width = blocks_for(int(context_lens.max()), pool.block_size)
    tables = np.zeros((len(chunks), width), dtype=np.int32)
    tables[:, : plan.block_tables.shape[1]] = plan.block_tables
    for index in grown:
        place = int(plan.context_lens[index]) // pool.block_size
        tables[index, place] = sequences[index].blocks[place]
    sampling, places = _one_position_on(plan.sampling)
    following = replace(
        plan,
        token_ids=np.empty_like(plan.token_ids),
        context_lens=context_lens,
        block_tables=tables,
        copies=np.empty((0, 2), dtype=np.int32),
        sampling=sampling,
    )
    return NextStep(Schedule(chunks, num_tokens=len(chunks)), scheduler.num_changes, following, places)


def _decodes_on(sequence: Sequence) -> bool:
    """Whether a sequence, once it has the token being drawn, needs just one row and one plain draw."""
    request = sequence.request
    sampling = request.sampling
    num_outputs, num_tokens = sequence.num_outputs + 1, sequence.num_tokens + 1
    return (
        not request.prefill_only
        and request.grammar is None
        and request.prompt_scores is None
        and num_outputs < sampling.max_tokens
        and num_tokens < request.max_len
        # At min_tokens the ids that must not be drawn change; up to there they are a list for each step.
        and (not request.stop_ids or num_outputs > sampling.min_tokens)
    )


def _grow(sequences: Iterable[Sequence], pool: BlockPool) -> bool:
    """Give each sequence a block more, unless it has one; False, leaving some without, when none is to be had."""
    for sequence in sequences:
        if len(sequence.blocks) > sequence.num_tokens // pool.block_size:
            continue
        reservation = sequence.request.reservation
        if not pool.num_obtainable and not (reservation and reservation.remaining):
            return False
        sequence.append_blocks(pool.allocate(1, reservation))
    return True


def _one_position_on(sampling: SamplingBatch) -> tuple[SamplingBatch, npt.NDArray[np.int64]]:
    """The same draws for the next position, and the places in ``history_ids`` where the token before it belongs."""
    rows = sampling.rows.copy()
    rows["position"] += 1
    if not len(sampling.history_rows):
        return replace(sampling, rows=rows), np.empty(0, dtype=np.int64)
    ends = np.cumsum(sampling.history_lens, dtype=np.int64)
    moved = replace(
        sampling,
        rows=rows,
        history_lens=sampling.history_lens + 1,
        history_ids=np.insert(sampling.history_ids, ends, 0),
    )
    return moved, ends + np.arange(len(ends))
