"""Where a prompt's time went: stamps taken on the way, and the figures made of them.

The parts before the first token follow one another without gaps, so they sum to the TTFT at the router's socket: from
the first byte of the request to the write of the first token. What a worker reports of its own time is taken as it is;
``first_token_delivery`` is what is left of the time between grant and write: wires, event loops, detokenising.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from twopool.protocol.ids import WorkerId
from twopool.protocol.messages import HandoverReport, PrefillReport

PHASES = (
    "receive",
    "tokenize",
    "route",
    "queue",
    "retry",
    "prefill_queue",
    "prefill",
    "first_token_delivery",
    "transfer_hidden",
    "transfer_exposed",
    "handover",
    "decode",
)
"""The names that figures and metrics use."""

BEFORE_FIRST = PHASES[:8]
"""Those that sum to the TTFT; each is there at most once."""


class Arrival(msgspec.Struct, frozen=True):
    """``time.monotonic()`` stamps of one HTTP request: its first byte, its last, and when it was tokenised."""

    began_s: float
    received_s: float
    prepared_s: float


class Grant(msgspec.Struct, frozen=True):
    """An attempt's workers. ``queued_s`` is how long the request has waited for workers, all waits together,
    ``retried_s`` how long it was with workers that came to nothing, ``at_s`` when this attempt had been sent.
    ``fingerprints`` are of the pairs that have a part in the answer: this one, and those whose tokens it goes on from.
    """

    attempt: int
    decode: WorkerId
    prefill: WorkerId | None
    queued_s: float
    retried_s: float
    at_s: float
    fingerprints: frozenset[str]

    @property
    def prefilled_by(self) -> WorkerId:
        """A decode worker may prefill for itself."""
        return self.decode if self.prefill is None else self.prefill


@dataclass(slots=True)
class Timeline:
    """One prompt's stamps; ``None`` until it happens. Of several attempts the one that gave the first token counts."""

    arrival: Arrival
    grant: Grant | None = None
    last_grant: Grant | None = None
    prefill: PrefillReport | None = None
    handover: HandoverReport | None = None
    first_s: float | None = None
    written_s: float | None = None
    taken_over_s: float | None = None
    last_s: float | None = None

    def granted(self, grant: Grant) -> None:
        """An attempt was granted; once tokens have come, only the names of the workers change."""
        self.last_grant = grant
        if self.first_s is None:
            self.grant = grant

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefill found in a prefix cache."""
        return 0 if self.prefill is None else self.prefill.cached_tokens

    @property
    def num_bytes_moved(self) -> int:
        """Bytes of KV that travelled."""
        return 0 if self.handover is None else self.handover.num_bytes

    def cached_by_source(self) -> dict[str, int]:
        """Prompt tokens that were in the prefill worker's cache, in a peer's, in the decode worker's."""
        peer_tokens = 0 if self.prefill is None else self.prefill.peer_tokens
        return {
            "prefill": self.num_cached_tokens - peer_tokens,
            "peer": peer_tokens,
            "decode": 0 if self.handover is None else self.handover.held_tokens,
        }

    @property
    def ttft_s(self) -> float | None:
        """From the first byte of the request to the write of its first token, or to its arrival here."""
        end_s = self.written_s if self.written_s is not None else self.first_s
        return None if end_s is None else max(0.0, end_s - self.arrival.began_s)

    def seconds(self) -> dict[str, float]:
        """By phase, those that happened."""
        parts: dict[str, float] = {}
        arrival, grant, ttft_s = self.arrival, self.grant, self.ttft_s
        parts["receive"] = max(0.0, arrival.received_s - arrival.began_s)
        parts["tokenize"] = max(0.0, arrival.prepared_s - arrival.received_s)
        if grant is None or ttft_s is None:
            return parts
        parts["route"] = max(0.0, grant.at_s - arrival.prepared_s - grant.queued_s - grant.retried_s)
        parts["queue"] = grant.queued_s
        if grant.attempt:
            parts["retry"] = grant.retried_s
        left_s = max(0.0, arrival.began_s + ttft_s - grant.at_s)
        if self.prefill is not None:
            parts["prefill_queue"] = min(left_s, self.prefill.queue_s)
            parts["prefill"] = min(left_s - parts["prefill_queue"], self.prefill.compute_s)
            left_s -= parts["prefill_queue"] + parts["prefill"]
        parts["first_token_delivery"] = left_s
        if self.handover is not None:
            parts["transfer_hidden"] = self.handover.hidden_s
            parts["transfer_exposed"] = self.handover.exposed_s
        if self.first_s is not None:
            if self.taken_over_s is not None:
                parts["handover"] = max(0.0, self.taken_over_s - self.first_s)
            if self.last_s is not None:
                parts["decode"] = max(0.0, self.last_s - self.first_s)
        return parts

    def totals(self) -> dict[str, float]:
        """Seconds of what spans several phases, as far as it is over."""
        totals: dict[str, float] = {}
        ttft_s = self.ttft_s
        if ttft_s is not None:
            totals["ttft"] = ttft_s
        if self.last_s is not None:
            totals["total"] = max(0.0, self.last_s - self.arrival.began_s)
        if self.handover is not None:
            totals["transfer"] = self.handover.transfer_s
        return totals

    def to_json(self) -> dict[str, Any]:
        """What an answer carries on request; times in milliseconds."""
        seconds, totals, grant = self.seconds(), self.totals(), self.last_grant
        figures: dict[str, Any] = {f"{name}_ms": _ms(seconds[name]) for name in PHASES if name in seconds}
        figures["ttft_ms"] = None
        figures |= {f"{name}_ms": _ms(value) for name, value in totals.items()}
        figures["kv_bytes_moved"] = self.num_bytes_moved
        figures["kv_ranges"] = 0 if self.handover is None else self.handover.num_ranges
        figures["kv_posts"] = 0 if self.handover is None else self.handover.num_posts
        figures["cached_tokens"] = self.cached_by_source()
        if grant is not None:
            figures["attempts"] = grant.attempt + 1
            figures["decode_worker"] = grant.decode
            figures["prefill_worker"] = grant.prefilled_by
        return figures


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
