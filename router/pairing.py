"""Which workers serve an attempt: least outstanding work. No I/O, no clock; everything is passed in.

The work counted is what this router granted and has not seen the end of, not what workers last reported: a report is
old when it arrives, and many requests may be granted between two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from twopool.protocol.ids import WorkerId
from twopool.protocol.messages import PeerRef
from twopool.router.admission import AdmissionWindow, Breaker


@dataclass(slots=True)
class Load:
    """What one worker has been granted and not finished. Changed by ``Reservation`` only.

    ``prefill_tokens`` are prompt tokens whose first output token has not been seen, ``sequences`` and ``tokens`` the
    choices it decodes and the tokens of their prompts and accepted outputs.
    """

    attempts: int = 0
    prefill_tokens: int = 0
    sequences: int = 0
    tokens: int = 0


@dataclass(slots=True, eq=False)
class Candidate:
    """What pairing knows about a worker. ``sources``: those it has shaken hands with."""

    ref: PeerRef
    pool_tokens: int
    max_num_seqs: int
    local_prefill: bool = False
    sources: set[PeerRef] = field(default_factory=set)
    draining: bool = False
    load: Load = field(default_factory=Load)
    window: AdmissionWindow = field(default_factory=AdmissionWindow)
    breaker: Breaker = field(default_factory=Breaker)

    def serves(self, num_tokens: int, now_s: float) -> bool:
        """Whether it takes sequences of ``num_tokens`` at all; it may still have no room at the moment."""
        return not self.draining and num_tokens <= self.pool_tokens and self.breaker.allows(now_s)

    def has_room(self, now_s: float) -> bool:
        return self.window.is_open(self.load.attempts, now_s)


class Pairing(msgspec.Struct, frozen=True):
    """``prefill`` is ``None`` when the decode worker prefills for itself."""

    decode: Candidate
    prefill: Candidate | None


class Need(msgspec.Struct, frozen=True):
    """What an attempt asks of its workers.

    ``num_tokens`` is the length its KV has at the start, the first new token included. ``local_only``: no remote
    prefill can serve it. ``turn`` breaks ties, so it should differ from one attempt to the next. ``avoid`` names
    workers to use only if there is nothing else.
    """

    num_tokens: int
    turn: int = 0
    local_only: bool = False
    avoid: frozenset[WorkerId] = frozenset()


class Reservation:
    """One attempt's share of its workers' loads; each part is taken back exactly once, whoever asks."""

    def __init__(self, pairing: Pairing, num_tokens: int, num_sequences: int) -> None:
        self._decode = pairing.decode.load
        self._prefill: Load | None = (pairing.prefill or pairing.decode).load
        self._remote = pairing.prefill is not None
        self._num_tokens = num_tokens
        self._num_sequences = num_sequences
        self._held = True
        self._decode.attempts += 1
        self._decode.sequences += num_sequences
        self._decode.tokens += num_tokens
        self._prefill.prefill_tokens += num_tokens
        self._prefill.attempts += self._remote

    def prefill_done(self) -> None:
        if self._prefill is not None:
            self._prefill.prefill_tokens -= self._num_tokens
            self._prefill.attempts -= self._remote
            self._prefill = None

    def release(self) -> None:
        self.prefill_done()
        if self._held:
            self._held = False
            self._decode.attempts -= 1
            self._decode.sequences -= self._num_sequences
            self._decode.tokens -= self._num_tokens


def choose(decodes: Sequence[Candidate], prefills: Sequence[Candidate], need: Need, now_s: float) -> Pairing | None:
    """The pairing for one more attempt, or ``None`` when nobody who could serve it has room now."""
    if need.avoid:
        pairing = _choose(
            [c for c in decodes if c.ref.worker_id not in need.avoid],
            [c for c in prefills if c.ref.worker_id not in need.avoid],
            need,
            now_s,
        )
        if pairing is not None:
            return pairing
    return _choose(decodes, prefills, need, now_s)


def can_serve(decodes: Sequence[Candidate], prefills: Sequence[Candidate], need: Need, now_s: float) -> bool:
    """Whether waiting for room makes sense: some pairing serves ``need`` once its workers have room."""
    num_tokens = need.num_tokens
    for decode in decodes:
        if decode.serves(num_tokens, now_s):
            if need.local_only or decode.local_prefill:
                return True
            for prefill in prefills:
                if prefill.ref in decode.sources and prefill.serves(num_tokens, now_s):
                    return True
    return False


def _choose(decodes: Sequence[Candidate], prefills: Sequence[Candidate], need: Need, now_s: float) -> Pairing | None:
    serving = [c for c in decodes if c.serves(need.num_tokens, now_s)]
    ranked = _by_load([c for c in serving if c.has_room(now_s)], need.turn)
    if need.local_only:
        # Any decode worker recomputes what it preempts, so each can; those that prefill by choice come first.
        local = next((c for c in ranked if c.local_prefill), next(iter(ranked), None))
        return Pairing(local, None) if local else None
    sources = [c for c in prefills if c.serves(need.num_tokens, now_s)]
    open_sources = [c for c in sources if c.has_room(now_s)]
    for decode in ranked:
        known = [c for c in open_sources if c.ref in decode.sources]
        if known:
            return Pairing(decode, _least_prefill(known, need.turn))
    # Prefill workers that are only busy are waited for; decode workers prefill when there is none to wait for.
    if _any_pair(serving, sources):
        return None
    local = next((c for c in ranked if c.local_prefill), None)
    return Pairing(local, None) if local else None


def _any_pair(decodes: Sequence[Candidate], prefills: Sequence[Candidate]) -> bool:
    return any(prefill.ref in decode.sources for decode in decodes for prefill in prefills)


def _by_load(decodes: list[Candidate], turn: int) -> list[Candidate]:
    """Least share of its sequences first, then fewest tokens, then whose turn it is."""
    count = len(decodes)
    if count <= 1:
        return decodes
    order = sorted(
        range(count),
        key=lambda i: (
            decodes[i].load.sequences / decodes[i].max_num_seqs,
            decodes[i].load.tokens + decodes[i].load.prefill_tokens,
            (i - turn) % count,
        ),
    )
    return [decodes[i] for i in order]


def _least_prefill(prefills: list[Candidate], turn: int) -> Candidate:
    count = len(prefills)
    if count == 1:
        return prefills[0]
    best = min(
        range(count),
        key=lambda i: (prefills[i].load.prefill_tokens, prefills[i].load.attempts, (i - turn) % count),
    )
    return prefills[best]
