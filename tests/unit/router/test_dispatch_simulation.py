"""Random histories of a whole cluster: whatever workers do, tokens are right and every request ends exactly once."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twopool.protocol.errors import TwopoolError
from twopool.protocol.ids import Attempt, ChoiceIndex, RequestId
from twopool.protocol.messages import (
    AttemptFailed,
    Busy,
    Cancel,
    CancelChoice,
    Draining,
    ErrorInfo,
    Generate,
    Register,
    ReRegister,
    ResendFrom,
    Role,
    RouterToWorker,
    TokenDelta,
    Tokens,
    WorkerToRouter,
    unpack_ids,
)
from twopool_testing.mock_control import MockCluster, MockWorker, RecordingSink, defects_surface, token_at


@dataclass
class Job:
    """An attempt on a decode worker: for each choice where it began, how far it is and whether it goes on."""

    generate: Generate
    position: dict[int, int]
    running: bool
    cancelled: set[int] = field(default_factory=set)


class SimWorker:
    """A worker that does its work step by step; ``inbox`` and ``outbox`` are its connection, in order both ways."""

    def __init__(self, sim: "Simulation", worker_id: str, role: Role, epoch: int) -> None:
        self.sim = sim
        self.mock: MockWorker = sim.cluster.worker(worker_id, role, epoch, local_prefill=sim.local_prefill)
        self.outbox: list[WorkerToRouter] = [self.mock.registration()]
        self.jobs: dict[RequestId, Job] = {}
        self.prefills: dict[RequestId, tuple[Generate, SimWorker]] = {}
        self.alive = True
        self.draining = False

    def receive(self) -> None:
        """Handle the oldest message from the router."""
        mailbox = self.sim.cluster.socket.sent.get(self.mock.peer)
        if mailbox:
            self._handle(mailbox.pop(0))

    def deliver(self) -> None:
        """Let the router have the oldest message to it."""
        if self.outbox:
            message = self.outbox.pop(0)
            self.mock.say(message)
            if isinstance(message, Register):
                self.beat()

    def drain(self) -> None:
        self.draining = True
        self.outbox.append(Draining(self.mock.epoch))

    def beat(self) -> None:
        peers = self.sim.alive("prefill") if self.mock.role == "decode" else []
        self.mock.heartbeat(*(peer.mock for peer in peers))

    def step(self) -> None:
        rng = self.sim.rng
        for request_id, (generate, decode) in list(self.prefills.items()):
            if rng.random() < 0.5:
                del self.prefills[request_id]
                self._first_tokens(generate, decode)
        for job in list(self.jobs.values()):
            if job.running and rng.random() < 0.7:
                self._decode(job)

    def fail_something(self) -> None:
        """End a random attempt with ``Busy`` or ``AttemptFailed``."""
        if not self.jobs:
            return
        rng = self.sim.rng
        job = self.jobs.pop(rng.choice(sorted(self.jobs)))
        generate = job.generate
        culprit = generate.prefill.worker_id if generate.prefill and rng.random() < 0.5 else self.mock.worker_id
        if rng.random() < 0.5 and not job.running:
            self.outbox.append(Busy(request_id=generate.request_id, attempt=generate.attempt, worker_id=culprit))
        else:
            error = ErrorInfo(kind="transfer", message="mock", retryable=rng.random() < 0.9)
            self.outbox.append(
                AttemptFailed(request_id=generate.request_id, attempt=generate.attempt, error=error, blame=culprit)
            )

    def peer_lost(self, peer: "SimWorker") -> None:
        for request_id, job in list(self.jobs.items()):
            prefill = job.generate.prefill
            if not job.running and prefill is not None and prefill.worker_id == peer.mock.worker_id:
                del self.jobs[request_id]
                self._lost_peer(job.generate)

    def _handle(self, message: RouterToWorker) -> None:
        match message:
            case Generate():
                self._accept(message)
            case Cancel():
                job = self.jobs.get(message.request_id)
                if job is not None and job.generate.attempt <= message.attempt:
                    del self.jobs[message.request_id]
                prefill = self.prefills.get(message.request_id)
                if prefill is not None and prefill[0].attempt <= message.attempt:
                    del self.prefills[message.request_id]
            case CancelChoice():
                job = self.jobs.get(message.request_id)
                if job is not None and job.generate.attempt == message.attempt:
                    job.cancelled.add(message.choice)
            case ResendFrom():
                job = self.jobs.get(message.request_id)
                if job is not None and job.generate.attempt == message.attempt:
                    self._send_range(job, message.choice, message.index, job.position[message.choice])
            case ReRegister():
                # A worker that was declared lost comes back over a new connection.
                self.sim.kill(self)
                self.sim.start(self.mock.role, self.mock.worker_id)

    def _accept(self, generate: Generate) -> None:
        self.sim.check_history(generate)
        position: dict[int, int] = {choice.choice: len(unpack_ids(choice.output_ids)) for choice in generate.choices}
        self.jobs[generate.request_id] = Job(generate, position, running=generate.prefill is None)
        if generate.prefill is not None:
            source = self.sim.workers.get(generate.prefill.worker_id)
            if source is None or not source.alive or source.mock.epoch != generate.prefill.epoch:
                del self.jobs[generate.request_id]
                self._lost_peer(generate)
            else:
                source.prefills[generate.request_id] = (generate, self)

    def _lost_peer(self, generate: Generate) -> None:
        assert generate.prefill is not None
        error = ErrorInfo(kind="peer_lost", message="mock", retryable=True)
        blame = generate.prefill.worker_id
        self.outbox.append(
            AttemptFailed(request_id=generate.request_id, attempt=generate.attempt, error=error, blame=blame)
        )

    def _first_tokens(self, generate: Generate, decode: "SimWorker") -> None:
        deltas = []
        for choice in generate.choices:
            index = len(unpack_ids(choice.output_ids))
            deltas.append(self._delta(generate, choice.choice, index, index + 1))
        self.outbox.append(Tokens(tuple(deltas)))
        job = decode.jobs.get(generate.request_id) if decode.alive else None
        if job is not None and job.generate.attempt == generate.attempt:
            job.running = True

    def _decode(self, job: Job) -> None:
        rng = self.sim.rng
        length = self.sim.length
        for choice, position in job.position.items():
            if choice not in job.cancelled and position < length:
                job.position[choice] = min(position + rng.randint(1, 3), length)
                # A message may be lost, or sent twice; the router asks for the one and drops the other.
                for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 2)) if self.sim.chaos else 1):
                    self._send_range(job, choice, position, job.position[choice])
        if self.sim.chaos or any(p < length for c, p in job.position.items() if c not in job.cancelled):
            return
        # Calm: the last message of a choice may have been lost before, so its end is said until it is heard.
        for choice, position in job.position.items():
            self._send_range(job, choice, position - 1, position)

    def _send_range(self, job: Job, choice: int, start: int, stop: int) -> None:
        if start < stop:
            self.outbox.append(Tokens((self._delta(job.generate, choice, start, stop),)))

    def _delta(self, generate: Generate, choice: int, start: int, stop: int) -> TokenDelta:
        return TokenDelta(
            request_id=generate.request_id,
            attempt=Attempt(generate.attempt),
            choice=ChoiceIndex(choice),
            index=start,
            token_ids=tuple(token_at(generate.request_id, choice, i) for i in range(start, stop)),
            finish_reason="length" if stop >= self.sim.length else None,
        )


class Simulation:
    """A cluster of two prefill and two decode workers under a random schedule."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.chaos = True
        self.length = rng.randint(1, 12)
        self.local_prefill = rng.random() < 0.5
        self.cluster = MockCluster(max_queue_wait_s=20, resume_timeout_s=20, max_attempts=rng.choice((2, 4, 50)))
        self.workers: dict[str, SimWorker] = {}
        self.sinks: dict[RequestId, RecordingSink] = {}
        self.cancelled: set[RequestId] = set()
        self.stopped: set[tuple[RequestId, int]] = set()
        self._epochs = 0
        for role, name in self.roster():
            self.start(role, name)

    @staticmethod
    def roster() -> tuple[tuple[Role, str], ...]:
        return ("prefill", "p0"), ("prefill", "p1"), ("decode", "d0"), ("decode", "d1")

    def alive(self, role: Role) -> list[SimWorker]:
        return [worker for worker in self.workers.values() if worker.alive and worker.mock.role == role]

    def start(self, role: Role, name: str) -> None:
        self._epochs += 1
        self.workers[name] = SimWorker(self, name, role, self._epochs)

    def kill(self, worker: SimWorker) -> None:
        """Its connection breaks; some of what it had sent still arrives."""
        for _ in range(self.rng.randint(0, len(worker.outbox))):
            worker.deliver()
        worker.alive = False
        worker.outbox.clear()
        worker.jobs.clear()
        worker.mock.die()
        for decode in self.alive("decode"):
            decode.peer_lost(worker)

    def submit(self) -> None:
        request = self.cluster.request(n=self.rng.randint(1, 3), max_tokens=self.length)
        sink = RecordingSink(request.sampling.n, has_lanes=self.rng.random() < 0.5)
        try:
            self.cluster.dispatcher.submit(request, sink)
        except TwopoolError:
            assert not sink.errors and not sink.deltas
            return
        self.sinks[request.request_id] = sink

    def check_history(self, generate: Generate) -> None:
        """What the router lets a worker go on from is the one true history, and one prefill serves it."""
        lengths = []
        for choice in generate.choices:
            ids = unpack_ids(choice.output_ids).tolist()
            assert ids == [token_at(generate.request_id, choice.choice, i) for i in range(len(ids))]
            lengths.append(len(ids))
        assert generate.prefill is None or len(lengths) == 1 or not any(lengths)

    def act(self) -> None:
        rng = self.rng
        worker = rng.choice(list(self.workers.values()))
        kind = rng.random()
        if not worker.alive:
            if kind < 0.2:
                self.start(worker.mock.role, worker.mock.worker_id)
        elif kind < 0.3:
            worker.receive()
        elif kind < 0.6:
            worker.deliver()
        elif kind < 0.8:
            worker.step()
        elif kind < 0.83:
            worker.fail_something()
        elif kind < 0.835:
            self.kill(worker)
        elif kind < 0.837:
            worker.drain()
        elif kind < 0.86:
            self.cluster.dispatcher.on_message(worker.mock.peer, rng.randbytes(rng.randint(0, 20)))
        elif kind < 0.92:
            if not any(isinstance(message, Register) for message in worker.outbox):
                worker.beat()
        elif kind < 0.96:
            self.cluster.advance(rng.choice((0.01, 0.05, 0.3, 1.0)))
        else:
            self.stop_something()
        if rng.random() < 0.08:
            self.submit()

    def stop_something(self) -> None:
        if not self.sinks:
            return
        request_id = self.rng.choice(sorted(self.sinks))
        if self.rng.random() < 0.3:
            self.cancelled.add(request_id)
            self.cluster.dispatcher.cancel(request_id)
            self.cluster.dispatcher.cancel(request_id)
        else:
            choice = self.rng.randrange(len(self.sinks[request_id].output_ids))
            self.stopped.add((request_id, choice))
            self.cluster.dispatcher.finish_choice(request_id, ChoiceIndex(choice))

    def check_loads(self) -> None:
        for worker in self.cluster.dispatcher.workers.workers:
            load = worker.candidate.load
            assert min(load.attempts, load.prefill_tokens, load.sequences, load.tokens) >= 0

    def settle(self) -> None:
        """No more mishaps: everybody is up, everything is delivered, until nothing is under way."""
        self.chaos = False
        for role, name in self.roster():
            worker = self.workers[name]
            if worker.draining or not worker.alive or self.rng.random() < 0.2:
                self.kill(worker)
                self.start(role, name)
        for _ in range(400):
            for worker in list(self.workers.values()):
                for _ in range(50):
                    worker.receive()
                    worker.deliver()
                worker.step()
                worker.beat()
            self.cluster.advance(0.1)
            if self.cluster.metric("twopool_attempts_in_flight") == self.cluster.metric("twopool_queue_length") == 0:
                return
        raise AssertionError("requests did not end")

    def check_ends(self) -> None:
        for request_id, sink in self.sinks.items():
            for choice, ids in enumerate(sink.output_ids):
                assert ids == [token_at(request_id, choice, i) for i in range(len(ids))]
                if choice in sink.finish_reasons:
                    assert len(ids) == self.length
            if request_id not in self.cancelled and not sink.errors:
                for choice in range(len(sink.output_ids)):
                    assert choice in sink.finish_reasons or (request_id, choice) in self.stopped


@pytest.mark.parametrize("num_actions", [60, 400])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_histories(num_actions: int, seed: int) -> None:
    """RT-04, RT-08, X-pd-decode-dispatch-fails, X-pd-prefill-death-recover: no history loses or doubles a token."""
    with defects_surface():
        sim = Simulation(random.Random(seed))
        for _ in range(num_actions):
            sim.act()
            sim.check_loads()
        sim.settle()
        sim.check_ends()
        sim.cluster.assert_idle()
