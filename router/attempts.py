"""One request on its way through the workers: its automaton, and the tokens accepted for each choice.

::

    QUEUED ──grant: attempt k──► GRANTED ──first delta──► STREAMING ──last choice ends──► DONE
      ▲                             │                         │
      └── Busy, retryable failure, worker lost: attempt k+1 ◄─┘

    any ──cancel, deadline, failure for good, too long without a worker──► DONE

In QUEUED no worker holds anything of the request. An attempt ends where it leaves GRANTED or STREAMING; whatever still
arrives for it is not accepted, so two histories are never spliced.
"""

import enum
from array import array
from dataclasses import dataclass, field

import msgspec

from twopool.protocol.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    TwopoolError,
    WorkerFailedError,
)
from twopool.protocol.ids import Attempt, ChoiceIndex, WorkerId
from twopool.protocol.messages import ChoiceState, ErrorInfo, Generate, PeerRef, TokenDelta, pack_ids
from twopool.router.interface import RoutedRequest, TokenLane, TokenSink
from twopool.router.pairing import Need, Pairing, Reservation
from twopool.router.registry import Worker
from twopool.router.timings import Grant


class Phase(enum.Enum):
    QUEUED = "queued"
    GRANTED = "granted"
    STREAMING = "streaming"
    DONE = "done"


@dataclass(slots=True, eq=False)
class ChoiceProgress:
    """One choice: the output ids accepted so far (int32) and, while tokens are missing, since when."""

    index: ChoiceIndex
    output_ids: "array[int]" = field(default_factory=lambda: array("i"))
    ended: bool = False
    gap: "Gap | None" = None


@dataclass(slots=True)
class Gap:
    """Tokens from ``index`` on are missing; asked for at ``asked_s``, first missed at ``since_s``."""

    index: int
    since_s: float
    asked_s: float


@dataclass(slots=True, eq=False)
class Flight:
    """A request and where it stands. ``order`` is its place among all requests, by arrival.

    ``submitted_s`` is when it came, ``queued_s`` when it began to wait for its present or next attempt, ``waited_s``
    how long its waits that are over took. ``source`` is the worker whose deltas are being accepted, ``taken_over``
    whether the decode worker has sent one in this attempt (from then on the prefill worker no longer matters).
    ``failures`` counts attempts that ended in one, ``refused`` says that one met a full worker; ``avoid`` names the
    workers to blame. ``wait_until_s`` bounds the present wait for a worker. ``lane`` is open where there is one.
    ``fingerprint`` is of the present pair, ``fingerprints`` are of those whose tokens were accepted before it.
    """

    request: RoutedRequest
    sink: TokenSink
    order: int
    deadline_s: float
    choices: list[ChoiceProgress]
    num_open: int
    submitted_s: float = 0.0
    queued_s: float = 0.0
    waited_s: float = 0.0
    fingerprint: str = ""
    fingerprints: frozenset[str] = frozenset()
    wait_until_s: float | None = None
    phase: Phase = Phase.QUEUED
    attempt: Attempt | None = None
    decode: Worker | None = None
    prefill: Worker | None = None
    reservation: Reservation | None = None
    source: Worker | None = None
    taken_over: bool = False
    started: bool = False
    failures: int = 0
    refused: bool = False
    avoid: set[WorkerId] = field(default_factory=set)
    prefill_reported: bool = False
    handover_reported: bool = False
    lane: TokenLane | None = None

    @classmethod
    def of(cls, request: RoutedRequest, sink: TokenSink, order: int) -> "Flight":
        n = request.sampling.n
        return cls(
            request=request,
            sink=sink,
            order=order,
            deadline_s=request.arrived_s + request.timeout_s,
            choices=[ChoiceProgress(ChoiceIndex(i)) for i in range(n)],
            num_open=n,
        )

    @property
    def unfinished(self) -> list[ChoiceProgress]:
        return [choice for choice in self.choices if not choice.ended]

    def need(self) -> Need:
        """What the next attempt asks of its workers."""
        num_prompt_tokens = len(self.request.prompt_ids)
        if self.attempt is None:
            return Need(num_tokens=num_prompt_tokens + 1, turn=self.order)
        unfinished = self.unfinished
        accepted = max(len(choice.output_ids) for choice in unfinished)
        return Need(
            num_tokens=num_prompt_tokens + accepted + 1,
            turn=self.order + self.attempt + 1,
            # One prefill serves several choices only while all of them are the prompt and nothing else.
            local_only=accepted > 0 and len(unfinished) > 1,
            avoid=frozenset(self.avoid),
        )

    def begin_attempt(self, pairing: Pairing, decode: Worker, prefill: Worker | None, fingerprint: str) -> None:
        """QUEUED → GRANTED."""
        unfinished = self.unfinished
        self.phase = Phase.GRANTED
        self.attempt = Attempt(0 if self.attempt is None else self.attempt + 1)
        self.decode, self.prefill, self.source = decode, prefill, None
        self.taken_over = False
        self.fingerprint = fingerprint
        num_tokens = len(self.request.prompt_ids) + sum(len(choice.output_ids) for choice in unfinished)
        self.reservation = Reservation(pairing, num_tokens, len(unfinished))
        for choice in unfinished:
            choice.gap = None
        for worker in (decode, prefill):
            if worker is not None:
                worker.requests[self.request.request_id] = None

    def end_attempt(self) -> list[Worker]:
        """→ QUEUED, from any phase but DONE; returns the workers that may still hold something of the attempt."""
        workers = [self.decode] if self.decode is not None else []
        if self.prefill is not None and self.prefill is not self.decode and not self.taken_over:
            workers.append(self.prefill)
        for worker in (self.decode, self.prefill):
            if worker is not None:
                worker.requests.pop(self.request.request_id, None)
        if self.reservation is not None:
            self.reservation.release()
        if self.source is not None:
            self.fingerprints |= {self.fingerprint}
        self.phase = Phase.QUEUED
        self.decode = self.prefill = self.source = self.reservation = None
        return workers

    def generate(self, now_s: float) -> Generate:
        """The grant of the present attempt."""
        assert self.attempt is not None
        prefill = self.prefill
        return Generate(
            request_id=self.request.request_id,
            attempt=self.attempt,
            prompt_ids=pack_ids(self.request.prompt_ids),
            choices=tuple(ChoiceState(choice.index, _packed(choice.output_ids)) for choice in self.unfinished),
            sampling=self.request.sampling,
            salt=self.request.salt,
            prefill=PeerRef(prefill.worker_id, prefill.epoch) if prefill is not None else None,
            timeout_s=max(self.deadline_s - now_s, 0.001),
        )


class EarlySink:
    """Stands in for a request's sink until ``submit`` returns: what ends the request by then is raised instead."""

    def __init__(self) -> None:
        self.error: TwopoolError | None = None
        self.grants: list[Grant] = []

    def on_tokens(self, delta: TokenDelta) -> None:
        raise RuntimeError("a control socket must not deliver messages from within send")

    def lane(self) -> None:
        """There are no tokens yet."""

    def close_lane(self) -> None:
        """There is none."""

    def on_granted(self, grant: Grant) -> None:
        self.grants.append(grant)

    def on_error(self, error: TwopoolError) -> None:
        self.error = error


def unrepeated(flight: Flight, delta: TokenDelta, next_index: int) -> TokenDelta | None:
    """What of ``delta``, which starts before ``next_index``, is new: later tokens, a finish, a first report."""
    skip = min(next_index - delta.index, len(delta.token_ids))
    complete = delta.index + len(delta.token_ids) >= next_index
    rest = msgspec.structs.replace(
        delta,
        index=next_index,
        token_ids=delta.token_ids[skip:],
        logprobs=delta.logprobs[skip:] if delta.logprobs is not None else None,
        finish_reason=delta.finish_reason if complete else None,
        stop_token_id=delta.stop_token_id if complete else None,
        prefill=None if flight.prefill_reported else delta.prefill,
        handover=None if flight.handover_reported else delta.handover,
    )
    news = rest.token_ids or rest.finish_reason or rest.prefill is not None or rest.handover is not None
    return rest if news else None


def to_error(info: ErrorInfo) -> TwopoolError:
    """A worker's word on a request that failed for good, as the client will read it."""
    match info.kind:
        case "invalid_request":
            return InvalidRequestError(info.message, param=info.param)
        case "context_length":
            return ContextLengthError(info.message, param=info.param)
        case "timeout":
            return DeadlineError(info.message)
        case _:
            return WorkerFailedError(info.message, param=info.param)


def _packed(output_ids: "array[int]") -> bytes:
    return pack_ids(output_ids.tolist()) if output_ids else b""
