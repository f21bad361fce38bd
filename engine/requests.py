"""What goes into the engine and what comes out of it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from twopool.protocol.ids import Attempt, BlockId, RequestId
from twopool.protocol.messages import ChoiceState, ErrorInfo, SamplingParams, TokenDelta
from twopool.protocol.token_hash import TokenIds


class AttemptKey(NamedTuple):
    """One attempt at one request: what every call to the engine names."""

    request_id: RequestId
    attempt: Attempt


@dataclass(frozen=True)
class EngineRequest:
    """A request as its tokens.

    ``prompt_ids`` is [n] int32. ``choices`` are the unfinished choices with the output ids accepted before. With
    ``prefill_only`` the engine computes the KV cache of prompt and output, samples one token a choice and hands the
    pinned blocks over (``PrefillResult``); the choices then have equal outputs (all empty, or there is one choice).
    """

    key: AttemptKey
    prompt_ids: TokenIds
    choices: tuple[ChoiceState, ...]
    sampling: SamplingParams
    salt: bytes = b""
    prefill_only: bool = False


@dataclass(frozen=True)
class PrefillProgress:
    """A ``prefill_only`` request advanced, without finishing, in the step just over.

    The KV cache of tokens [0, ``num_computed``) is complete in ``block_table`` (the blocks of the whole prompt, in
    order). Should the request be preempted, a later report counts from a lower ``num_computed`` in other blocks.
    """

    key: AttemptKey
    block_table: tuple[BlockId, ...]
    num_computed: int


@dataclass(frozen=True)
class LayerProgress:
    """The step under way computes the last tokens of a ``prefill_only`` request; layers below ``layer_end`` are done.

    For those the KV cache of all ``num_tokens`` tokens is complete in ``block_table``.
    """

    key: AttemptKey
    block_table: tuple[BlockId, ...]
    num_tokens: int
    layer_end: int


@dataclass(frozen=True)
class PrefillResult:
    """A ``prefill_only`` request is over: the engine has forgotten it.

    Every block of ``block_table`` is pinned once for whoever receives this (``BlockPool.unpin`` gives it back).
    ``deltas`` holds one delta with one token for each choice, in the order of the request's choices.
    """

    key: AttemptKey
    block_table: tuple[BlockId, ...]
    num_tokens: int
    deltas: tuple[TokenDelta, ...]
    cached_tokens: int
    queue_s: float
    compute_s: float


@dataclass(frozen=True)
class LocalPrefill:
    """The prefill of a submitted full request came to its end: what its ``PrefillReport`` tells, but for the worker.

    Reported once a request, in the step that gives its first token.
    """

    key: AttemptKey
    cached_tokens: int
    queue_s: float
    compute_s: float


@dataclass(frozen=True)
class StepOutput:
    """What one step brought. ``deltas`` belong to full requests; each list is in the order things happened.

    ``finished``: full requests all of whose choices ended. ``failed``: requests of either kind that ended without an
    answer. After either the engine holds nothing of the request.
    """

    deltas: list[TokenDelta] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)
    prefilled: list[PrefillResult] = field(default_factory=list)
    local_prefills: list[LocalPrefill] = field(default_factory=list)
    finished: list[AttemptKey] = field(default_factory=list)
    failed: list[tuple[AttemptKey, ErrorInfo]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.deltas or self.progress or self.prefilled or self.local_prefills or self.finished or self.failed
        )


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Gauges (``num_running``, ``num_waiting``: sequences) and monotonic counters.

    ``num_prepared_steps``: of ``num_steps`` those whose inputs were made while the step before computed.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_prepared_steps: int
    prefill_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
