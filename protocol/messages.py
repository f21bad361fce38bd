"""Every message between twopool's processes, one frozen struct each, grouped by who receives it.

The wire format is MessagePack (``codec.py``). Token ids travel as little-endian int32 bytes (``pack_ids``); KV cache
never rides in a message. Every token is addressed by (request, attempt, choice, index). Each attempt ends in exactly
one of: finish reasons for all of its choices, ``Busy``, or ``AttemptFailed``.

Protocol history
  1  first version
  2  tickets by layer groups and with checksums; prefixes are fetched between any two workers
  3  grammars; log-probabilities of prompts
"""

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Attempt, ChoiceIndex, Epoch, RequestId, RouterId, WorkerId
from twopool.protocol.token_hash import HASH_BYTES, TokenIds

PROTOCOL_VERSION = 3

MAX_PROMPT_TOKENS = 4 * 1024 * 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_PROMPT_LOGPROBS_BYTES = 24 * 1024 * 1024
MAX_PEERS = 4096
MAX_RANKS = 1024

Role = Literal["prefill", "decode"]
KvVerify = Literal["off", "sample", "all"]
FinishReason = Literal["stop", "length"]
ErrorKind = Literal[
    "invalid_request",
    "context_length",
    "peer_lost",
    "transfer",
    "timeout",
    "bad_logits",
    "internal",
]

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Text = Annotated[str, Meta(max_length=4096)]
_Address = Annotated[str, Meta(min_length=1, max_length=1024)]
_Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(ge=0)]
_IdBytes = Annotated[bytes, Meta(max_length=4 * MAX_PROMPT_TOKENS)]
_Tally = Annotated[dict[Annotated[str, Meta(max_length=64)], _Count], Meta(max_length=64)]
_Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
_Metadata = Annotated[bytes, Meta(max_length=256 * 1024)]


def pack_ids(token_ids: TokenIds | list[int]) -> bytes:
    """``[n]`` int32 ids as little-endian bytes."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> TokenIds:
    """The ``[n]`` int32 ids of ``pack_ids``; raises ``ValueError`` when ``data`` is no whole number of them."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


# --- parts -----------------------------------------------------------------------------------------------------------


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Together with the ids this is the whole state of a choice.

    The router fills in everything a client left out, the seed and the model's EOS ids among it. ``logprobs`` is the
    number of alternatives reported for each token; ``None`` reports nothing, 0 the chosen token alone.
    ``grammar``, in llguidance's notation, is what a choice's whole output must be; a choice ends when nothing can
    follow. Where the grammar stands is replayed from the output ids. ``prompt_logprobs`` is ``logprobs`` for the
    prompt's tokens: they come with the first token, and only where no output was accepted before.
    """

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_k: _Count = 0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[tuple[tuple[_Index, float], ...], Meta(max_length=MAX_BIAS_ENTRIES)] = ()
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    min_tokens: _Count = 0
    eos_token_ids: Annotated[tuple[_Index, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    stop_token_ids: Annotated[tuple[_Index, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def all_stop_ids(self) -> tuple[int, ...]:
        return self.eos_token_ids + self.stop_token_ids


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probability of one chosen token and of the most likely ones, best first.

    Taken from the model's logits after penalties and bias, before temperature and truncation.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class PromptLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities of all prompt tokens but the first, by position.

    Little-endian bytes: ``logprobs`` float32 [n - 1], ``ranks`` int32 [n - 1] from 1, ``top_ids`` int32 and
    ``top_logprobs`` float32 [n - 1, ``num_top``], best first.
    """

    num_top: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
    logprobs: Annotated[bytes, Meta(max_length=MAX_PROMPT_LOGPROBS_BYTES)]
    ranks: Annotated[bytes, Meta(max_length=MAX_PROMPT_LOGPROBS_BYTES)]
    top_ids: Annotated[bytes, Meta(max_length=MAX_PROMPT_LOGPROBS_BYTES)]
    top_logprobs: Annotated[bytes, Meta(max_length=MAX_PROMPT_LOGPROBS_BYTES)]


def prompt_logprobs_bytes(num_prompt_tokens: int, num_top: int) -> int:
    """How large a ``PromptLogprobs`` is; at most ``MAX_PROMPT_LOGPROBS_BYTES`` may be asked for."""
    return num_prompt_tokens * (8 + 8 * num_top)


class PrefillReport(Struct, frozen=True, kw_only=True):
    """What the prefill of an attempt took; rides with the first token of its first choice.

    ``cached_tokens`` were not computed; for ``peer_tokens`` of them another worker's KV was read.
    """

    worker_id: WorkerId
    cached_tokens: _Count
    queue_s: _Seconds
    compute_s: _Seconds
    peer_tokens: _Count = 0


class HandoverReport(Struct, frozen=True, kw_only=True):
    """What moving a prompt's KV took; rides with decode's first message for the attempt.

    ``transfer_s`` is summed over the READs; ``exposed_s`` is what the request waited for after its first token was
    known, ``hidden_s`` the part of ``transfer_s`` that lay before. Of ``held_tokens`` the KV was there already;
    ``num_converted_bytes`` came in another dtype.
    """

    num_bytes: _Count
    num_ranges: _Count
    num_posts: _Count
    transfer_s: _Seconds
    exposed_s: _Seconds
    hidden_s: _Seconds = 0.0
    held_tokens: _Count = 0
    num_converted_bytes: _Count = 0


class TokenDelta(Struct, frozen=True, array_like=True):
    """Consecutive tokens of one choice, the first of which has output index ``index``.

    An empty ``token_ids`` with a ``finish_reason`` ends a choice without a further token. ``prompt_logprobs`` rides
    with the first token of an attempt's first choice.
    """

    request_id: RequestId
    attempt: Attempt
    choice: ChoiceIndex
    index: _Index
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prefill: PrefillReport | None = None
    handover: HandoverReport | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ErrorInfo(Struct, frozen=True, kw_only=True):
    """Why an attempt failed. ``retryable`` says whether another pairing may succeed."""

    kind: ErrorKind
    message: _Text
    param: str | None = None
    retryable: bool = False


class Ticket(Struct, frozen=True, kw_only=True):
    """A source's word that its blocks hold the KV of ``[start_token, end_token)`` of a request's ids.

    ``block_ids`` (int32) and ``generations`` (int64), little-endian bytes, name every block that overlaps the range,
    in order; block *i* covers tokens from ``(start_token // block_size + i) * block_size``. ``token_hash`` is the
    chained hash of the first ``end_token`` ids. It covers layers ``[layer_start, layer_end)``. Valid as long as the
    source's pool epoch and every generation stand, which only the source can say: ``Confirm`` asks it.

    Where the reader asked for checksums, ``checked`` (int32) lists the units that have some, and ``checksums`` (uint64)
    holds one for each of them and each KV head that a rank of the source has, rank by rank. A unit is as many tokens as
    the smaller of both sides' blocks; unit 0 is the one that ``start_token`` is in.
    """

    request_id: RequestId
    attempt: Attempt
    source_epoch: Epoch
    start_token: _Index
    end_token: _Index
    layer_start: _Index
    layer_end: _Index
    block_ids: Annotated[bytes, Meta(max_length=4 * MAX_PROMPT_TOKENS)]
    generations: Annotated[bytes, Meta(max_length=8 * MAX_PROMPT_TOKENS)]
    token_hash: _Hash
    checked: Annotated[bytes, Meta(max_length=4 * MAX_PROMPT_TOKENS)] = b""
    checksums: Annotated[bytes, Meta(max_length=16 * 1024 * 1024)] = b""


class BlockCounts(Struct, frozen=True, kw_only=True):
    """KV blocks by state; the states sum to the pool's size."""

    free: _Count
    cached: _Count
    active: _Count
    pinned: _Count
    fetching: _Count
    quarantined: _Count

    @property
    def total(self) -> int:
        return self.free + self.cached + self.active + self.pinned + self.fetching + self.quarantined


class WorkerStats(Struct, frozen=True, kw_only=True):
    """A worker's gauges and monotonic counters, sent with every heartbeat.

    ``kv_failures`` counts failed transfers by kind (``TransferError.kind``), ``kv_reclaimed`` the ends of pins by
    reason. ``canary_age_s`` is the time since the oldest link's canary was read; ``None`` without links.
    """

    blocks: BlockCounts
    num_running: _Count = 0
    num_waiting: _Count = 0
    num_steps: _Count = 0
    prefill_tokens: _Count = 0
    cached_tokens: _Count = 0
    generated_tokens: _Count = 0
    local_prefills: _Count = 0
    preemptions: _Count = 0
    kv_transfer_bytes: _Count = 0
    kv_transfers: _Count = 0
    kv_transfer_s: _Seconds = 0.0
    stale_tickets: _Count = 0
    rejected_messages: _Count = 0
    kv_ranges: _Count = 0
    kv_posts: _Count = 0
    kv_hidden_s: _Seconds = 0.0
    kv_exposed_s: _Seconds = 0.0
    kv_verified_bytes: _Count = 0
    kv_converted_bytes: _Count = 0
    kv_prefix_tokens: _Count = 0
    kv_failures: _Tally = {}
    kv_reclaimed: _Tally = {}
    handshakes_refused: _Count = 0
    pairs_quarantined: _Count = 0
    canary_age_s: _Seconds | None = None


class SharedPool(Struct, frozen=True, kw_only=True):
    """Where a process of the same host finds a pool to map: file ``fd`` of process ``pid``, called ``token``.

    ``boot_id`` is the kernel's: equal on one host only.
    """

    boot_id: _Name
    pid: _Index
    fd: _Index
    token: _Name


class RankPool(Struct, frozen=True, kw_only=True):
    """One rank's KV pool and how to read from it. ``agent_metadata`` is the transport's own, opaque here.

    The pool holds one block more than the worker uses: ``canary_block`` keeps known bytes for the handshake.
    ``shared`` is there where processes of the same host may map the pool.
    """

    geometry: KvGeometry
    base_address: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    canary_block: _Index
    agent_metadata: _Metadata
    shared: SharedPool | None = None


class PeerIdentity(Struct, frozen=True, kw_only=True):
    """The inner half of a handshake, read only after version and compatibility hash agree."""

    worker_id: WorkerId
    role: Role
    epoch: Epoch
    transport: _Name
    ranks: Annotated[tuple[RankPool, ...], Meta(min_length=1, max_length=MAX_RANKS)]


class PeerInfo(Struct, frozen=True, kw_only=True):
    """A worker as the router introduces it to another."""

    worker_id: WorkerId
    role: Role
    epoch: Epoch
    address: _Address


class PeerRef(Struct, frozen=True):
    worker_id: WorkerId
    epoch: Epoch


class PrefixHint(Struct, frozen=True):
    """``source`` is thought to hold the KV of the first ``num_tokens`` ids; it need not be true."""

    source: PeerRef
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]


class ChoiceState(Struct, frozen=True):
    """One unfinished choice and the output ids the router has accepted for it."""

    choice: ChoiceIndex
    output_ids: _IdBytes = b""


# --- worker → router -------------------------------------------------------------------------------------------------


class Register(Struct, frozen=True, kw_only=True, tag="register"):
    """A worker's first message. It is refused unless version, model and fingerprint agree with the pool's."""

    protocol_version: int
    worker_id: WorkerId
    role: Role
    epoch: Epoch
    model: _Name
    compatibility_hash: _Name
    peer_address: _Address
    max_model_len: Annotated[int, Meta(ge=1)]
    max_num_seqs: Annotated[int, Meta(ge=1)]
    vocab_size: Annotated[int, Meta(ge=1)]
    block_size: Annotated[int, Meta(ge=1)]
    num_blocks: Annotated[int, Meta(ge=1)]
    tp_size: Annotated[int, Meta(ge=1)]
    dtype: _Name
    kernel_backend: _Name
    local_prefill: bool


class Heartbeat(Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Load and progress. ``peers`` lists the sources this worker has shaken hands with, canary included."""

    epoch: Epoch
    stats: WorkerStats
    peers: Annotated[tuple[PeerRef, ...], Meta(max_length=MAX_PEERS)] = ()


class Tokens(Struct, frozen=True, tag="tokens"):
    """All new tokens of one step for one router."""

    deltas: tuple[TokenDelta, ...]


class Busy(Struct, frozen=True, kw_only=True, tag="busy"):
    """``worker_id`` has no room for the attempt now; nothing of it is held anywhere."""

    request_id: RequestId
    attempt: Attempt
    worker_id: WorkerId


class AttemptFailed(Struct, frozen=True, kw_only=True, tag="attempt_failed"):
    """The attempt is over without an answer; nothing of it is held. ``blame`` is the worker at fault, if one is."""

    request_id: RequestId
    attempt: Attempt
    error: ErrorInfo
    blame: WorkerId | None = None


class Draining(Struct, frozen=True, tag="draining"):
    """The worker finishes what it has and takes no new requests."""

    epoch: Epoch


WorkerToRouter = Register | Heartbeat | Tokens | Busy | AttemptFailed | Draining


# --- router → worker -------------------------------------------------------------------------------------------------


class Registered(Struct, frozen=True, kw_only=True, tag="registered"):
    router_id: RouterId
    peers: Annotated[tuple[PeerInfo, ...], Meta(max_length=MAX_PEERS)] = ()


class Refused(Struct, frozen=True, tag="refused"):
    """The registration is turned down for good, in words."""

    reason: _Text


class ReRegister(Struct, frozen=True, tag="re_register"):
    """The router does not know this worker (it was declared dead, or the router is new): register anew."""

    router_id: RouterId


class Peers(Struct, frozen=True, tag="peers"):
    """All workers the receiver may read KV from, replacing the list before."""

    peers: Annotated[tuple[PeerInfo, ...], Meta(max_length=MAX_PEERS)]


class Generate(Struct, frozen=True, kw_only=True, tag="generate"):
    """One attempt at a request, granted to a decode worker.

    ``choices`` are the unfinished ones with their accepted output ids. ``prefill`` names the worker to prefill on;
    ``None`` means prefill here. A remote prefill is granted only when the choices' outputs are all empty or there is
    one choice, so that one pass over prompt and output serves all of them. Whoever prefills reads the KV that
    ``prefix`` names from there, if that saves it work, and computes whatever it does not get.
    """

    request_id: RequestId
    attempt: Attempt
    prompt_ids: _IdBytes
    choices: Annotated[tuple[ChoiceState, ...], Meta(min_length=1, max_length=MAX_CHOICES)]
    sampling: SamplingParams
    salt: Annotated[bytes, Meta(max_length=64)] = b""
    prefill: PeerRef | None = None
    prefix: PrefixHint | None = None
    timeout_s: Annotated[float, Meta(gt=0)]


class Cancel(Struct, frozen=True, kw_only=True, tag="cancel"):
    """Stop working on a request: the attempt given and all before it."""

    request_id: RequestId
    attempt: Attempt


class CancelChoice(Struct, frozen=True, kw_only=True, tag="cancel_choice"):
    """Stop one choice (the router matched a stop string); the others go on."""

    request_id: RequestId
    attempt: Attempt
    choice: ChoiceIndex


class ResendFrom(Struct, frozen=True, kw_only=True, tag="resend_from"):
    """The router misses this choice's tokens from output index ``index`` on."""

    request_id: RequestId
    attempt: Attempt
    choice: ChoiceIndex
    index: _Index


class Drain(Struct, frozen=True, tag="drain"):
    """Finish what runs, take nothing new, then leave."""


RouterToWorker = Registered | Refused | ReRegister | Peers | Generate | Cancel | CancelChoice | ResendFrom | Drain


# --- reader → source (a worker that wants KV, to the one that has or makes it) ---------------------------------------


class PeerHello(Struct, frozen=True, kw_only=True, tag="peer_hello"):
    """First half of the handshake: ``identity`` (a packed ``PeerIdentity``) is read only if the rest agrees."""

    protocol_version: int
    compatibility_hash: _Name
    identity: Annotated[bytes, Meta(max_length=1024 * 1024)]


class Prefill(Struct, frozen=True, kw_only=True, tag="prefill"):
    """Prefill ``token_ids``, sample the first token of every choice in ``choices``, keep the KV pinned for the sender.

    ``source_epoch`` is the epoch the sender believes the receiver has. ``num_prompt_tokens`` of the ids are prompt;
    the rest, if any, is output accepted before, so the sampled token has output index
    ``len(token_ids) - num_prompt_tokens``. Positions below ``skip_tokens`` need not be offered: the sender has them.
    Tokens also go straight to router ``router_id``. ``prefix`` is as in ``Generate``; ``verify`` says which blocks'
    checksums the sender wants with the tickets.
    """

    request_id: RequestId
    attempt: Attempt
    source_epoch: Epoch
    router_id: RouterId
    token_ids: _IdBytes
    num_prompt_tokens: Annotated[int, Meta(ge=1)]
    choices: Annotated[tuple[ChoiceIndex, ...], Meta(min_length=1, max_length=MAX_CHOICES)]
    sampling: SamplingParams
    salt: Annotated[bytes, Meta(max_length=64)] = b""
    skip_tokens: _Index = 0
    prefix: PrefixHint | None = None
    verify: KvVerify = "off"
    timeout_s: Annotated[float, Meta(gt=0)]


class FetchPrefix(Struct, frozen=True, kw_only=True, tag="fetch_prefix"):
    """Offer what you hold published of these ids' KV, from ``start_token`` on, and pin it for the sender.

    The answer is one ``KvReady``, which ``Confirm`` or ``ReleasePrefill`` ends, or ``PrefixMissing``. Ids are sent and
    not their hashes alone, so that a hash collision cannot pass for a hit.
    """

    request_id: RequestId
    attempt: Attempt
    source_epoch: Epoch
    token_ids: _IdBytes
    salt: Annotated[bytes, Meta(max_length=64)] = b""
    start_token: _Index = 0
    verify: KvVerify = "off"


class Confirm(Struct, frozen=True, kw_only=True, tag="confirm"):
    """The sender has read what these tickets name: do they still hold? The pins end with the answer."""

    request_id: RequestId
    attempt: Attempt
    tickets: tuple[Ticket, ...]


class ReleasePrefill(Struct, frozen=True, kw_only=True, tag="release_prefill"):
    """The sender wants nothing more of this attempt, prefill or prefix: stop computing, unpin."""

    request_id: RequestId
    attempt: Attempt


ReaderToSource = PeerHello | Prefill | FetchPrefix | Confirm | ReleasePrefill


# --- source → reader -------------------------------------------------------------------------------------------------


class PeerWelcome(Struct, frozen=True, kw_only=True, tag="peer_welcome"):
    protocol_version: int
    compatibility_hash: _Name
    identity: Annotated[bytes, Meta(max_length=1024 * 1024)]


class PeerRefused(Struct, frozen=True, tag="peer_refused"):
    reason: _Text


class PrefillAccepted(Struct, frozen=True, kw_only=True, tag="prefill_accepted"):
    """The whole prompt has its blocks; KV and tokens will follow."""

    request_id: RequestId
    attempt: Attempt


class PrefillBusy(Struct, frozen=True, kw_only=True, tag="prefill_busy"):
    request_id: RequestId
    attempt: Attempt


class PrefillFailed(Struct, frozen=True, kw_only=True, tag="prefill_failed"):
    """The prefill is over without a result and holds nothing."""

    request_id: RequestId
    attempt: Attempt
    error: ErrorInfo


class KvReady(Struct, frozen=True, tag="kv_ready"):
    """A range of KV is complete on every rank and may be read."""

    ticket: Ticket


class FirstTokens(Struct, frozen=True, kw_only=True, tag="first_tokens"):
    """The sampled tokens, one delta a choice; no more ``KvReady`` follows for the attempt."""

    request_id: RequestId
    attempt: Attempt
    deltas: Annotated[tuple[TokenDelta, ...], Meta(min_length=1, max_length=MAX_CHOICES)]


class PrefixMissing(Struct, frozen=True, kw_only=True, tag="prefix_missing"):
    """Nothing of what ``FetchPrefix`` asked for is here; nothing is held."""

    request_id: RequestId
    attempt: Attempt


class Confirmed(Struct, frozen=True, kw_only=True, tag="confirmed"):
    """Answer to ``Confirm``: whether every ticket held when it arrived."""

    request_id: RequestId
    attempt: Attempt
    valid: bool


SourceToReader = (
    PeerWelcome
    | PeerRefused
    | PrefillAccepted
    | PrefillBusy
    | PrefillFailed
    | KvReady
    | FirstTokens
    | PrefixMissing
    | Confirmed
)
