"""Which sequences advance in the next step, and which give way when KV blocks run out.

Running decodes go first, a token each; what is left of the step's budget goes to prefills, chunk by chunk, in order of
arrival; of those that came during the same step the shortest first. So a short prompt does not wait for a long one that
came no earlier, and nobody waits for what came later. When a decode needs a block and there is none, the latest arrival
gives up its blocks and computes them anew later; the earliest never does, and alone it always fits, so there is always
progress.
"""

import bisect
from dataclasses import dataclass, field

from twopool.engine.block_pool import BlockPool
from twopool.engine.sequence import RequestState, Sequence, Status
from twopool.protocol.ids import BlockId, ChoiceIndex

MAX_SCORED_ROWS = 256
"""Prompt rows of one step whose logits are wanted: each is as wide as the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Bounds of a step and of a request. ``vocab_size``: ids from 0 up to it are valid in prompts."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    max_model_len: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "max_model_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class Chunk:
    """The next ``num_rows`` uncomputed tokens of a sequence; ``draws`` the next token of these choices at its end."""

    sequence: Sequence
    num_rows: int
    draws: tuple[ChoiceIndex, ...]


@dataclass
class Schedule:
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    """(source, destination), done before the step writes; a reference on each source is held until the step is over"""
    num_tokens: int = 0
    num_scored: int = 0
    """rows whose logits tell how likely a prompt token is"""


class Scheduler:
    """Waiting and running sequences, in order of arrival. Called between steps only, never while one is under way."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_changes = 0
        """moves whenever a sequence comes, goes or changes between waiting and running"""

    @property
    def starved(self) -> bool:
        """Whether preempted sequences wait for blocks: they come before anything new."""
        return any(sequence.preempted for sequence in self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Into the waiting or the running sequences, whichever its status says."""
        self.num_changes += 1
        queue = self.running if sequence.status is Status.RUNNING else self.waiting
        bisect.insort(queue, sequence, key=_order)

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and release its blocks. Idempotent."""
        if sequence.status is Status.FINISHED:
            return
        self.num_changes += 1
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        sequence.status = Status.FINISHED
        self._pool.release(sequence.take_blocks())

    def schedule(self) -> Schedule:
        schedule = Schedule()
        for sequence in [one for one in self.running if one.num_uncomputed == 1]:
            if self._full(schedule):
                break
            # A sequence may have been preempted by one before it in this very loop.
            if sequence.status is Status.RUNNING and sequence.request.ready and self._grow(sequence, schedule):
                self._take(sequence, 1, schedule)
        room = self._config.max_num_seqs - sum(len(one.choices) for one in self.running)
        for sequence in self._prefills(schedule):
            if self._full(schedule):
                break
            if not sequence.request.ready or (sequence.num_scored(1) and schedule.num_scored >= MAX_SCORED_ROWS):
                continue
            if sequence.status is Status.WAITING:
                # A request of more choices than fit a step runs when there is no other.
                if (room <= 0 and self.running) or not self._admit(sequence):
                    continue
                room -= len(sequence.choices)
            self._take(sequence, self._chunk_rows(sequence, schedule), schedule)
        return schedule

    # --- private

    def _full(self, schedule: Schedule) -> bool:
        config = self._config
        return len(schedule.chunks) >= config.max_num_seqs or schedule.num_tokens >= config.max_num_batched_tokens

    def _take(self, sequence: Sequence, num_rows: int, schedule: Schedule) -> None:
        draws = sequence.open_choices if num_rows == sequence.num_uncomputed else ()
        schedule.chunks.append(Chunk(sequence, num_rows, draws))
        schedule.num_tokens += num_rows
        if sequence.request.prompt_scores is not None:
            schedule.num_scored += sequence.num_scored(num_rows)

    def _prefills(self, schedule: Schedule) -> list[Sequence]:
        """Running and waiting sequences with more than a decode's work, in order of arrival."""
        taken = {id(chunk.sequence) for chunk in schedule.chunks}
        running = [one for one in self.running if one.num_uncomputed > 1 and id(one) not in taken]
        return sorted(running + self.waiting, key=_order)

    def _chunk_rows(self, sequence: Sequence, schedule: Schedule) -> int:
        """As many rows as the budget allows, ending on a block boundary where the sequence does not end before."""
        left = sequence.num_uncomputed
        rows = min(left, self._config.max_num_batched_tokens - schedule.num_tokens)
        if sequence.num_scored(rows):
            rows = min(rows, max(MAX_SCORED_ROWS - schedule.num_scored, 1))
        overhang = (sequence.num_computed + rows) % self._pool.block_size
        return rows if rows == left or rows <= overhang else rows - overhang

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the blocks of all of its tokens, cached ones first, or leave it waiting."""
        pool, request = self._pool, sequence.request
        tokens, limit = sequence.token_ids, sequence.cacheable_tokens
        num_blocks = blocks_for(sequence.num_tokens, pool.block_size)
        # Held blocks are found again (no block of a live chain is displaced), so they cost nothing.
        missing = pool.num_missing(sequence.chain, tokens, limit, num_blocks)
        if sequence.preempted:  # others reserved their growth, or need none
            longest = min(sequence.num_tokens + 1, request.max_len - 1)
            missing += max(blocks_for(longest, pool.block_size) - num_blocks, 0)
        if missing > self._available(request):
            return False
        held = sequence.take_blocks()
        matched = pool.match(sequence.chain, tokens, limit, request.reservation)
        pool.release(held)
        sequence.append_blocks(matched)
        sequence.append_blocks(pool.allocate(num_blocks - len(matched), request.reservation))
        sequence.num_computed = len(matched) * pool.block_size
        sequence.num_published = len(matched)
        if not sequence.preempted:
            self.num_cached_tokens += sequence.num_computed
            request.cached_tokens = max(request.cached_tokens, min(sequence.num_computed, request.num_prompt))
            self._trim_reservation(request)
        sequence.preempted = False
        self.waiting.remove(sequence)
        sequence.status = Status.RUNNING
        self.add(sequence)
        return True

    def _trim_reservation(self, request: RequestState) -> None:
        """Once a request's only sequence has its blocks, what hits spared goes back; a growth block a choice stays."""
        if request.reservation is not None and len(request.sequences) == 1:
            request.reservation.shrink_to(0 if request.prefill_only else len(request.sequences[0].choices))

    def _available(self, request: RequestState) -> int:
        return self._pool.num_obtainable + (request.reservation.remaining if request.reservation else 0)

    def _grow(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Make room for one more token; False when the sequence itself had to give way."""
        index = sequence.num_computed // self._pool.block_size
        shared = sequence.cow_index
        if shared is None and index < len(sequence.blocks):
            return True
        block = self._obtain_block(sequence)
        if block is None:
            return False
        if shared is None:
            sequence.append_blocks([block])
        else:
            schedule.copies.append((sequence.blocks[shared], block))
            sequence.replace_block(shared, block)
            sequence.cow_index = None
        return True

    def _obtain_block(self, sequence: Sequence) -> BlockId | None:
        while not self._available(sequence.request):
            victim = max(filter(_holds, (*self.waiting, *self.running)), key=_order)
            self._preempt(victim)
            if victim is sequence:
                return None
        return self._pool.allocate(1, sequence.request.reservation)[0]

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything from a sequence but its ids; it goes ahead of whatever arrived later."""
        self._pool.release(sequence.take_blocks())
        sequence.preempted = True
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            sequence.status = Status.WAITING
            self.add(sequence)
            self.num_preemptions += 1
        if not _shares_reservation(sequence):
            sequence.request.release_reservation()


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens``."""
    return -(-num_tokens // block_size)


def _order(sequence: Sequence) -> tuple[int, int, int, int]:
    return sequence.order


def _shares_reservation(sequence: Sequence) -> bool:
    """Whether a running sibling may still draw on the request's reservation."""
    return any(one is not sequence and one.status is Status.RUNNING for one in sequence.request.sequences)


def _holds(sequence: Sequence) -> bool:
    """Whether preempting the sequence can set blocks free."""
    reservation = sequence.request.reservation
    reserved = reservation is not None and reservation.remaining > 0
    return bool(sequence.blocks) or (reserved and not _shares_reservation(sequence))
