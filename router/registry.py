"""The workers this router knows: who they are, what they last said, and whether they fit together."""

from dataclasses import dataclass, field
from typing import Any

from twopool.protocol.ids import Epoch, RequestId, WorkerId
from twopool.protocol.messages import (
    MAX_PEERS,
    PROTOCOL_VERSION,
    Heartbeat,
    PeerInfo,
    PeerRef,
    Register,
    Role,
    WorkerStats,
)
from twopool.router import stack
from twopool.router.pairing import Candidate


@dataclass(slots=True, eq=False)
class Worker:
    """One life of a registered worker, from ``Register`` to the loss of its connection.

    ``requests`` are those with an attempt on it (insertion ordered). ``heard_s`` is when its last heartbeat came,
    ``progressed_s`` when it was last seen idle or with a step more than before (``time.monotonic``).
    """

    peer: bytes
    info: Register
    candidate: Candidate
    heard_s: float
    progressed_s: float
    stats: WorkerStats | None = None
    requests: dict[RequestId, None] = field(default_factory=dict)
    alive: bool = True

    @property
    def worker_id(self) -> WorkerId:
        return self.info.worker_id

    @property
    def epoch(self) -> Epoch:
        return self.info.epoch

    @property
    def role(self) -> Role:
        return self.info.role

    def on_heartbeat(self, message: Heartbeat, now_s: float) -> None:
        """Take over the figures; the sources a worker lists are those it may read from now on."""
        stats = message.stats
        if self.stats is None or stats.num_running == 0 or stats.num_steps != self.stats.num_steps:
            self.progressed_s = now_s
        self.stats = stats
        self.heard_s = now_s
        self.candidate.sources = set(message.peers)

    def stalled_for_s(self, now_s: float) -> float:
        """Seconds it has had running work without a step, or has not been heard of at all."""
        return max(now_s - self.heard_s, now_s - self.progressed_s if self.stats and self.stats.num_running else 0.0)


class WorkerRegistry:
    """All registered workers. The first one defines the model; the rest must agree with it."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, Worker] = {}
        self._candidates: dict[Role, tuple[Candidate, ...]] = {"prefill": (), "decode": ()}
        self._by_ref: dict[PeerRef, Worker] = {}
        self.max_model_len: int | None = None
        self.vocab_size: int | None = None
        self._fingerprints: dict[tuple[object, object], str] = {}

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    @property
    def prefills(self) -> tuple[Candidate, ...]:
        return self._candidates["prefill"]

    @property
    def decodes(self) -> tuple[Candidate, ...]:
        return self._candidates["decode"]

    def get(self, worker_id: WorkerId) -> Worker | None:
        return self._workers.get(worker_id)

    def worker_of(self, candidate: Candidate) -> Worker:
        """The worker behind a candidate of ``prefills`` or ``decodes``."""
        return self._by_ref[candidate.ref]

    def fingerprint(self, prefill: Worker | None, decode: Worker) -> str:
        """What an answer of this pair came from (``stack.fingerprint``); without ``prefill``, of ``decode`` alone."""
        first = (prefill or decode).info
        kinds = stack.kind(first), stack.kind(decode.info)
        known = self._fingerprints.get(kinds)
        if known is None:
            known = self._fingerprints[kinds] = stack.fingerprint(stack.describe(first, decode.info))
        return known

    def stacks(self) -> dict[str, dict[str, Any]]:
        """By fingerprint, what any pair of these workers may be."""
        pairs = []
        for decode in [w.info for w in self._workers.values() if w.role == "decode"]:
            pairs += [(w.info, decode) for w in self._workers.values() if w.role == "prefill"]
            if decode.local_prefill:
                pairs.append((decode, decode))
        kinds = {(stack.kind(prefill), stack.kind(decode)): (prefill, decode) for prefill, decode in pairs}
        described = [stack.describe(prefill, decode) for prefill, decode in kinds.values()]
        return {stack.fingerprint(each): each for each in described}

    def refusal(self, info: Register) -> str | None:
        """Why ``info`` cannot join, in words, or ``None``. A predecessor of the same name should be gone by now."""
        if info.protocol_version != PROTOCOL_VERSION:
            return f"protocol version {info.protocol_version}: this router speaks {PROTOCOL_VERSION}"
        if len(self._workers) >= MAX_PEERS:
            return f"this router already has {MAX_PEERS} workers"
        first = next(iter(self._workers.values()), None)
        if first is None:
            return None
        for what, theirs, ours in (
            ("model", info.model, first.info.model),
            ("model fingerprint", info.compatibility_hash, first.info.compatibility_hash),
            ("vocabulary size", info.vocab_size, first.info.vocab_size),
        ):
            if theirs != ours:
                return f"{what} {theirs}: the other workers ({first.worker_id} first) have {ours}"
        return None

    def add(self, peer: bytes, info: Register, now_s: float) -> Worker:
        """Admit a worker that ``refusal`` had nothing against and whose name is free."""
        if info.worker_id in self._workers:
            raise ValueError(f"worker {info.worker_id} is already registered")
        ref = PeerRef(info.worker_id, info.epoch)
        candidate = Candidate(
            ref=ref,
            pool_tokens=info.num_blocks * info.block_size,
            max_num_seqs=info.max_num_seqs,
            local_prefill=info.role == "decode" and info.local_prefill,
        )
        worker = Worker(peer, info, candidate, heard_s=now_s, progressed_s=now_s)
        self._workers[info.worker_id] = worker
        self._by_ref[ref] = worker
        self._recompute()
        return worker

    def remove(self, worker: Worker) -> None:
        """Idempotent."""
        worker.alive = False
        if self._workers.get(worker.worker_id) is worker:
            del self._workers[worker.worker_id]
            del self._by_ref[worker.candidate.ref]
            self._recompute()

    def peer_infos(self, reader: Worker) -> tuple[PeerInfo, ...]:
        """All workers but ``reader``, as it is told about them: any may have KV that it wants to read."""
        return tuple(
            PeerInfo(worker_id=w.worker_id, role=w.role, epoch=w.epoch, address=w.info.peer_address)
            for w in self._workers.values()
            if w is not reader
        )

    def _recompute(self) -> None:
        workers = self._workers.values()
        for role in self._candidates:
            self._candidates[role] = tuple(w.candidate for w in workers if w.role == role)
        self.max_model_len = min((w.info.max_model_len for w in workers), default=None)
        self.vocab_size = min((w.info.vocab_size for w in workers), default=None)
        self._fingerprints.clear()
