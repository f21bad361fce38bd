"""A dispatcher with an in-memory control socket, a hand-driven clock and workers that say what a test tells them."""

import logging
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from twopool.protocol.codec import encode, router_to_worker_decoder
from twopool.protocol.config import RouterConfig
from twopool.protocol.errors import TwopoolError
from twopool.protocol.ids import Attempt, ChoiceIndex, Epoch, RequestId, RouterId, WorkerId
from twopool.protocol.messages import (
    PROTOCOL_VERSION,
    AttemptFailed,
    BlockCounts,
    Busy,
    ErrorInfo,
    ErrorKind,
    FinishReason,
    Generate,
    HandoverReport,
    Heartbeat,
    PeerRef,
    PrefillReport,
    Register,
    Role,
    RouterToWorker,
    SamplingParams,
    TokenDelta,
    Tokens,
    WorkerStats,
    WorkerToRouter,
)
from twopool.router.dispatcher import RequestDispatcher
from twopool.router.interface import RoutedRequest
from twopool.router.queue_lengths import QueueLength
from twopool.router.registry import Worker
from twopool.router.timings import Grant

VOCAB_SIZE = 1000


def token_at(request_id: RequestId, choice: int, index: int) -> int:
    """The token every worker draws there: noise is a function of the address alone."""
    return zlib.crc32(f"{request_id}/{choice}/{index}".encode()) % VOCAB_SIZE


class _Defects(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.first: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and self.first is None:
            self.first = record.exc_info[1]


@contextmanager
def defects_surface() -> Iterator[None]:
    """The router logs exceptions of handlers and sinks and goes on; here they are raised at the end.

    Nested, the inner one takes the exceptions.
    """
    handler = _Defects()
    logger = logging.getLogger("twopool.router")
    former, logger.handlers = logger.handlers, [handler]
    try:
        yield
    finally:
        logger.handlers = former
    if handler.first is not None:
        raise handler.first


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FakeSocket:
    """Keeps what is sent until the worker takes it; peers in ``deaf`` cannot be sent to."""

    def __init__(self) -> None:
        self.sent: dict[bytes, list[RouterToWorker]] = {}
        self.deaf: set[bytes] = set()
        self._decoder = router_to_worker_decoder()

    def send(self, peer: bytes, payload: bytes) -> bool:
        if peer in self.deaf:
            return False
        self.sent.setdefault(peer, []).append(self._decoder.decode(payload))
        return True


class RecordingLane:
    """The short way into one choice of a sink; told apart by ``num_taken``, and strict about ``wake``."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.attempt = Attempt(0)
        self.output_ids: array[int] = array("i")
        self.is_marked = False
        self.mark: Callable[[Any], None] = self._mark
        self.num_taken = 0
        self._num_seen = 0

    def open(self, worker: Worker, attempt: Attempt, output_ids: "array[int]") -> None:
        assert self.worker is None, "opened twice"
        self.worker, self.attempt, self.output_ids = worker, attempt, output_ids
        self._num_seen = len(output_ids)

    def _mark(self, lane: Any) -> None:
        assert lane is self and self.is_marked

    def take(self) -> list[int]:
        """What came this way since the last time."""
        new = self.output_ids[self._num_seen :].tolist() if self.worker is not None else []
        self._num_seen += len(new)
        self.num_taken += len(new)
        self.is_marked = False
        return new


class RecordingSink:
    """Checks what every sink is promised and keeps what came."""

    def __init__(self, num_choices: int, *, has_lanes: bool = False) -> None:
        """With ``has_lanes`` single tokens may come the short way."""
        self._output_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self.short_way = RecordingLane() if has_lanes and num_choices == 1 else None
        self.finish_reasons: dict[int, FinishReason] = {}
        self.errors: list[TwopoolError] = []
        self.deltas: list[TokenDelta] = []
        self.grants: list[Grant] = []

    @property
    def output_ids(self) -> list[list[int]]:
        if self.short_way is not None:
            self._output_ids[0] += self.short_way.take()
        return self._output_ids

    def lane(self) -> RecordingLane | None:
        return self.short_way

    def close_lane(self) -> None:
        if self.short_way is not None:
            self._output_ids[0] += self.short_way.take()
            self.short_way.worker = None

    def on_granted(self, grant: Grant) -> None:
        assert not self.errors, "a grant after the end"
        self.grants.append(grant)

    def on_tokens(self, delta: TokenDelta) -> None:
        assert not self.errors, "tokens after the end"
        assert delta.choice not in self.finish_reasons, "tokens after a finish"
        assert delta.index == len(self.output_ids[delta.choice])
        assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
        assert self.short_way is None or self.short_way.worker is None, "the long way while the short one is open"
        self.deltas.append(delta)
        self._output_ids[delta.choice].extend(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish_reasons[delta.choice] = delta.finish_reason

    def on_error(self, error: TwopoolError) -> None:
        assert not self.errors, "two errors"
        assert len(self.finish_reasons) < len(self.output_ids), "an error after the end"
        self.errors.append(error)

    @property
    def error(self) -> TwopoolError:
        [error] = self.errors
        return error


class MockWorker:
    """One connection of a worker. Says only what it is told to."""

    def __init__(self, cluster: "MockCluster", worker_id: str, role: Role, epoch: int, **info: Any) -> None:
        self.cluster = cluster
        self.worker_id = WorkerId(worker_id)
        self.role = role
        self.epoch = Epoch(epoch)
        self.peer = f"{worker_id}#{cluster.next_peer()}".encode()
        self.info = info
        self.steps = 0

    @property
    def ref(self) -> PeerRef:
        return PeerRef(self.worker_id, self.epoch)

    def say(self, message: WorkerToRouter) -> None:
        self.cluster.dispatcher.on_message(self.peer, encode(message))

    def take(self) -> list[RouterToWorker]:
        """What the router has sent since the last time."""
        return self.cluster.socket.sent.pop(self.peer, [])

    def take_of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.take() if isinstance(message, kind)]

    def take_generate(self) -> Generate:
        """The one ``Generate`` among what came."""
        [message] = self.take_of(Generate)
        assert isinstance(message, Generate)
        return message

    def registration(self) -> Register:
        fields: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "worker_id": self.worker_id,
            "role": self.role,
            "epoch": self.epoch,
            "model": "tiny",
            "compatibility_hash": "abc",
            "peer_address": f"tcp://127.0.0.1:{9000 + self.cluster.next_peer()}",
            "max_model_len": 512,
            "max_num_seqs": 8,
            "vocab_size": VOCAB_SIZE,
            "block_size": 16,
            "num_blocks": 64,
            "tp_size": 1,
            "dtype": "float32",
            "kernel_backend": "torch",
            "local_prefill": False,
        }
        return Register(**(fields | self.info))

    def register(self) -> "MockWorker":
        self.say(self.registration())
        return self

    def heartbeat(self, *peers: "MockWorker", num_running: int = 0, num_steps: int | None = None) -> None:
        self.steps = self.steps + 1 if num_steps is None else num_steps
        blocks = BlockCounts(free=60, cached=4, active=0, pinned=0, fetching=0, quarantined=0)
        stats = WorkerStats(blocks=blocks, num_running=num_running, num_steps=self.steps)
        self.say(Heartbeat(epoch=self.epoch, stats=stats, peers=tuple(peer.ref for peer in peers)))

    def tokens(
        self,
        generate: Generate,
        start: int,
        stop: int,
        *,
        choice: int = 0,
        finish: FinishReason | None = None,
        attempt: int | None = None,
        prefill: PrefillReport | None = None,
        handover: HandoverReport | None = None,
    ) -> None:
        """Send the right tokens ``[start, stop)`` of one choice."""
        delta = TokenDelta(
            request_id=generate.request_id,
            attempt=generate.attempt if attempt is None else Attempt(attempt),
            choice=ChoiceIndex(choice),
            index=start,
            token_ids=tuple(token_at(generate.request_id, choice, i) for i in range(start, stop)),
            finish_reason=finish,
            prefill=prefill,
            handover=handover,
        )
        self.say(Tokens((delta,)))

    def busy(self, generate: Generate, full: "MockWorker | None" = None) -> None:
        full = full or self
        self.say(Busy(request_id=generate.request_id, attempt=generate.attempt, worker_id=full.worker_id))

    def failed(
        self,
        generate: Generate,
        kind: ErrorKind = "internal",
        *,
        retryable: bool = True,
        blame: "MockWorker | None" = None,
        param: str | None = None,
    ) -> None:
        error = ErrorInfo(kind=kind, message=f"mock {kind}", param=param, retryable=retryable)
        blamed = blame.worker_id if blame is not None else None
        self.say(AttemptFailed(request_id=generate.request_id, attempt=generate.attempt, error=error, blame=blamed))

    def die(self) -> None:
        self.cluster.socket.deaf.add(self.peer)
        self.cluster.dispatcher.on_lost(self.peer)


class MockCluster:
    """The dispatcher under test and its surroundings."""

    def __init__(self, *, queue_length: QueueLength | None = None, **config: Any) -> None:
        self.clock = ManualClock()
        self.socket = FakeSocket()
        self.metrics = CollectorRegistry()
        self.dispatcher = RequestDispatcher(
            RouterConfig(**{"min_prefill": 0, "min_decode": 0, **config}),
            RouterId("router-test"),
            self.socket,
            metrics=self.metrics,
            clock=self.clock,
            queue_length=queue_length,
        )
        self._num_peers = 0
        self._num_requests = 0

    def next_peer(self) -> int:
        self._num_peers += 1
        return self._num_peers

    def worker(self, worker_id: str, role: Role, epoch: int = 1, **info: Any) -> MockWorker:
        return MockWorker(self, worker_id, role, epoch, **info)

    def pair(self, **decode_info: Any) -> tuple[MockWorker, MockWorker]:
        """A prefill and a decode worker, registered and shaken hands; their mailboxes empty."""
        prefill = self.worker("p0", "prefill").register()
        decode = self.worker("d0", "decode", **decode_info).register()
        decode.heartbeat(prefill)
        prefill.take()
        decode.take()
        return prefill, decode

    def request(
        self, *, num_prompt: int = 8, n: int = 1, max_tokens: int = 16, timeout_s: float = 100, age_s: float = 0
    ) -> RoutedRequest:
        self._num_requests += 1
        return RoutedRequest(
            request_id=RequestId(f"req-{self._num_requests}"),
            prompt_ids=np.arange(num_prompt, dtype=np.int32),
            sampling=SamplingParams(n=n, seed=7, max_tokens=max_tokens),
            salt=b"",
            timeout_s=timeout_s,
            arrived_s=self.clock() - age_s,
        )

    def submit(self, *, has_lanes: bool = False, **request: Any) -> tuple[RequestId, RecordingSink]:
        routed = self.request(**request)
        sink = RecordingSink(routed.sampling.n, has_lanes=has_lanes)
        self.dispatcher.submit(routed, sink)
        return routed.request_id, sink

    def advance(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.dispatcher.tick()

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.get_sample_value(name, labels)

    def assert_idle(self) -> None:
        """Nothing is under way and no worker counts any load."""
        assert self.metric("twopool_queue_length") == 0
        assert self.metric("twopool_attempts_in_flight") == 0
        for worker in self.dispatcher.workers.workers:
            load = worker.candidate.load
            assert (load.attempts, load.prefill_tokens, load.sequences, load.tokens) == (0, 0, 0, 0), worker.worker_id
            assert not worker.requests
