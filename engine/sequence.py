"""One growing sequence of tokens, and the request it belongs to.

::

    WAITING ──admitted──▶ RUNNING ──▶ FINISHED
       ▲                     │
       └──────preempted──────┘        (its ids are its state; its KV is computed anew)
"""

import copy
import time
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from twopool.engine.block_pool import Reservation
from twopool.engine.grammar import RequestGrammar
from twopool.engine.prompt_logprobs import PromptScores
from twopool.engine.requests import AttemptKey
from twopool.kernels.sampling import ROW_DTYPE
from twopool.protocol.ids import BlockId, ChoiceIndex
from twopool.protocol.messages import FinishReason, PromptLogprobs, SamplingParams, TokenLogprobs
from twopool.protocol.token_hash import HashChain, TokenIds

Ints = npt.NDArray[np.int32]


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class _GrowingInts:
    """An int32 array with room to grow; ``view`` is what it holds now."""

    def __init__(self, values: npt.ArrayLike, extra: int) -> None:
        start = np.asarray(values, dtype=np.int32)
        self._buffer = np.empty(len(start) + extra, dtype=np.int32)
        self._buffer[: len(start)] = start
        self.length = len(start)

    @property
    def view(self) -> Ints:
        return self._buffer[: self.length]

    def append(self, value: int) -> None:
        if self.length == len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty(max(self.length, 16), dtype=np.int32)))
        self._buffer[self.length] = value
        self.length += 1


@dataclass(eq=False)
class ChoiceOutput:
    """What the engine knows of one choice's output, kept for resending.

    ``base`` outputs came with the request; ``logprobs``, where asked for, starts after them.
    """

    choice: ChoiceIndex
    output_ids: list[int]
    base: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cancelled: bool = False

    @property
    def ended(self) -> bool:
        return self.cancelled or self.finish_reason is not None


@dataclass(eq=False)
class RequestState:
    """A request in the engine."""

    key: AttemptKey
    arrival: int
    """steps computed before it came: what comes within one step comes at once, as far as the next one can tell"""
    number: int
    """ascending in the order of coming"""
    num_prompt: int
    sampling: SamplingParams
    salt: bytes
    prefill_only: bool
    outputs: dict[ChoiceIndex, ChoiceOutput]
    reservation: Reservation | None
    max_len: int
    """prompt plus output may not exceed this many tokens"""
    sequences: list["Sequence"] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.monotonic)
    first_scheduled_at: float | None = None
    missing_tokens: int = 0
    """what had to be computed when it came; does not change, as the order of requests must not"""
    cached_tokens: int = 0
    prefill_reported: bool = False
    """its first tokens are out: what came before them is no longer news"""
    abandoned: bool = False
    """cancelled or failed: whatever a step still brings for it is dropped"""
    grammar: RequestGrammar | None = None
    prompt_scores: PromptScores | None = None
    """gathered until the first tokens are drawn"""
    prompt_logprobs: PromptLogprobs | None = None
    """kept for resending"""
    ready: bool = True
    """False while the grammar is being compiled: nothing of the request is scheduled"""

    def __post_init__(self) -> None:
        sampling = self.sampling
        self.stop_ids = frozenset(sampling.all_stop_ids)
        self.penalised = bool(
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
        )

    @property
    def ended(self) -> bool:
        return all(output.ended for output in self.outputs.values())

    @property
    def times_s(self) -> tuple[float, float]:
        """(seconds queued, seconds since the first step)"""
        started = self.first_scheduled_at or self.submitted_at
        return started - self.submitted_at, time.monotonic() - started

    def release_reservation(self) -> None:
        if self.reservation is not None:
            self.reservation.release()


class Sequence:
    """Tokens with one KV block table. Serves several choices until the first token is drawn, then one.

    KV of [0, ``num_computed``) is complete; the rest of ``token_ids`` is to be computed.
    """

    def __init__(
        self, request: RequestState, choices: tuple[ChoiceIndex, ...], token_ids: TokenIds, chain: HashChain
    ) -> None:
        self.request = request
        self.choices = choices
        self.chain = chain
        self.status = Status.WAITING
        self.num_computed = 0
        self.num_published = 0
        self.cow_index: int | None = None
        """index in ``blocks`` of a block that others write too: to be copied before this sequence writes"""
        self.preempted = False
        self.blocks: list[BlockId] = []
        self._token_ids = _GrowingInts(token_ids, min(request.sampling.max_tokens, 1024))
        self._table = _GrowingInts((), 0)
        self.row = _sampling_row(request.sampling).tobytes()
        """one of ROW_DTYPE; choice and position are filled in for each draw"""

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Who goes first and, backwards, who is preempted first: by arrival, then by length where that is equal."""
        request = self.request
        return (request.arrival, request.missing_tokens, request.number, self.choices[0])

    @property
    def token_ids(self) -> Ints:
        """[num_tokens] int32"""
        return self._token_ids.view

    @property
    def num_tokens(self) -> int:
        return self._token_ids.length

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self.request.num_prompt

    @property
    def open_choices(self) -> tuple[ChoiceIndex, ...]:
        outputs = self.request.outputs
        if len(self.choices) == 1:  # asked for every sequence in every step
            return () if outputs[self.choices[0]].ended else self.choices
        return tuple(choice for choice in self.choices if not outputs[choice].ended)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def table(self) -> Ints:
        """[len(blocks)] int32, the same as ``blocks``"""
        return self._table.view

    @property
    def cacheable_tokens(self) -> int:
        """How many tokens' KV may be taken from the cache: the last one's logits are wanted, or all of the prompt's."""
        return 0 if self.request.prompt_scores is not None else self.num_tokens - 1

    def num_scored(self, num_rows: int) -> int:
        """How many of the next ``num_rows`` rows tell how likely a prompt token is."""
        scores = self.request.prompt_scores
        return 0 if scores is None else scores.rows_of(self.num_computed, num_rows)

    def append_token(self, token_id: int) -> None:
        self._token_ids.append(token_id)

    def append_blocks(self, blocks: list[BlockId]) -> None:
        self.blocks.extend(blocks)
        for block in blocks:
            self._table.append(block)

    def replace_block(self, index: int, block: BlockId) -> None:
        self.blocks[index] = block
        self.table[index] = block

    def take_blocks(self) -> list[BlockId]:
        """All blocks, which the sequence no longer has: it will compute from the start."""
        blocks, self.blocks = self.blocks, []
        self._table.length = 0
        self.num_computed = self.num_published = 0
        self.cow_index = None
        return blocks

    def fork(self, choice: ChoiceIndex, block_size: int) -> "Sequence":
        """A sequence for ``choice`` with the same tokens and blocks; the caller takes references on the blocks.

        Written to by both, a half-filled last block is copied by the fork before its first write: what it shares lies
        before any position written from now on.
        """
        # The hashes of the common part are computed once; from here on the chains part.
        twin = Sequence(self.request, (choice,), self.token_ids, copy.deepcopy(self.chain))
        twin.append_blocks(self.blocks)
        twin.num_computed = self.num_computed
        twin.num_published = self.num_published
        twin.status = self.status
        twin.cow_index = len(self.blocks) - 1 if self.num_computed % block_size else None
        return twin


def _sampling_row(sampling: SamplingParams) -> npt.NDArray[np.void]:
    """[1] of ROW_DTYPE"""
    row = np.zeros(1, dtype=ROW_DTYPE)
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
    ):
        row[name] = getattr(sampling, name)
    row["top_k"] = min(sampling.top_k, np.iinfo(np.int32).max)
    row["num_top_logprobs"] = sampling.logprobs or 0
    row["wants_logprobs"] = sampling.logprobs is not None
    return row
