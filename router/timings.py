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
    "prefill_queue",
    "prefill",
    "first_token_delivery",
    "transfer_hidden",
    "transfer_exposed",
    "handover",
    "decode",
)
"""The names that figures and metrics use. The first seven sum to the TTFT."""

_NUM_BEFORE_FIRST = 7


class Arrival(msgspec.Struct, frozen=True):
    """``time.monotonic()`` stamps of one HTTP request: its first byte, its last, and when it was tokenised."""

    began_s: float
    received_s: float
    prepared_s: float


class Grant(msgspec.Struct, frozen=True):
    """An attempt's workers. ``queued_s`` is how long the request waited for it, ``at_s`` when it had been sent."""

    attempt: int
    decode: WorkerId
    prefill: WorkerId | None
    queued_s: float
    at_s: float


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
        parts["route"] = max(0.0, grant.at_s - arrival.prepared_s - grant.queued_s)
        parts["queue"] = grant.queued_s
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

    def to_json(self) -> dict[str, Any]:
        """What an answer carries on request; times in milliseconds."""
        seconds = self.seconds()
        figures: dict[str, Any] = {f"{name}_ms": _ms(seconds[name]) for name in PHASES if name in seconds}
        ttft_s, handover, grant = self.ttft_s, self.handover, self.last_grant
        figures["ttft_ms"] = None if ttft_s is None else _ms(ttft_s)
        if self.last_s is not None:
            figures["total_ms"] = _ms(max(0.0, self.last_s - self.arrival.began_s))
        if handover is not None:
            figures["transfer_ms"] = _ms(handover.transfer_s)
        figures["kv_bytes_moved"] = 0 if handover is None else handover.num_bytes
        figures["kv_ranges"] = 0 if handover is None else handover.num_ranges
        figures["kv_posts"] = 0 if handover is None else handover.num_posts
        peer_tokens = 0 if self.prefill is None else self.prefill.peer_tokens
        figures["cached_tokens"] = {
            "prefill": self.num_cached_tokens - peer_tokens,
            "peer": peer_tokens,
            "decode": 0 if handover is None else handover.held_tokens,
        }
        if grant is not None:
            figures["attempts"] = grant.attempt + 1
            figures["decode_worker"] = grant.decode
            figures["prefill_worker"] = grant.prefill if grant.prefill is not None else grant.decode
        return figures

    def server_timing(self) -> bytes:
        """The value of a ``Server-Timing`` header; durations in milliseconds."""
        entries = [*self.seconds().items()]
        ttft_s = self.ttft_s
        if ttft_s is not None:
            entries.append(("ttft", ttft_s))
        return ", ".join([f"{name};dur={seconds * 1e3:.3f}" for name, seconds in entries]).encode()


def timing_headers(timelines: list[Timeline]) -> list[tuple[bytes, bytes]]:
    """Response headers of an answer: ``Server-Timing``, and who served it. Of several prompts, the first."""
    if not timelines:
        return []
    first = timelines[0]
    headers = [(b"server-timing", first.server_timing())]
    grant = first.last_grant
    if grant is not None:
        prefill = grant.prefill if grant.prefill is not None else grant.decode
        headers += [(b"x-prefill-worker", prefill.encode()), (b"x-decode-worker", grant.decode.encode())]
    return headers


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
