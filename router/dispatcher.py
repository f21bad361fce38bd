"""Gives requests to workers and brings their tokens back: each token once and in order, each request ended once.

Everything runs on the router's event loop in direct calls: what arrives on the control socket is handled to its end
before the next message, and one periodic tick serves every timer. See ``attempts.py`` for a request's automaton.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from twopool.protocol.config import RouterConfig
from twopool.protocol.errors import (
    DeadlineError,
    OverloadedError,
    TwopoolError,
    UnavailableError,
    WorkerFailedError,
)
from twopool.protocol.ids import ChoiceIndex, RequestId, RouterId
from twopool.protocol.messages import AttemptFailed, Busy, Cancel, CancelChoice, PeerRef, TokenDelta
from twopool.router.attempts import EarlySink, Flight, Phase, to_error
from twopool.router.availability import RETRY_AFTER_S, Availability
from twopool.router.control import ControlPlane, ControlSocket
from twopool.router.granting import Granting
from twopool.router.interface import RoutedRequest, TokenSink
from twopool.router.queue_lengths import QueueLength
from twopool.router.registry import Worker, WorkerRegistry
from twopool.router.token_intake import TokenIntake
from twopool.router.waiting import Deadlines, WaitQueue
from twopool.router.worker_metrics import AttemptOutcome, DispatchFigures, export

logger = logging.getLogger(__name__)

_FAULTS_OF_REQUESTS = ("invalid_request", "context_length", "bad_logits")


@dataclass(frozen=True)
class DispatchTimings:
    """Periods in seconds. ``stall_s``: how long a connected worker may make no progress."""

    tick_s: float = 0.05
    stall_s: float = 60.0
    stall_check_s: float = 1.0


class RequestDispatcher:
    """The worker half of the router (``interface.Dispatcher``).

    Give its ``on_message`` and ``on_lost`` to the control socket, ``start`` it on the running loop and ``close`` it.
    Without ``start`` nothing times out by itself; tests may call ``tick``.
    """

    def __init__(
        self,
        config: RouterConfig,
        router_id: RouterId,
        control: ControlSocket,
        *,
        metrics: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
        timings: DispatchTimings | None = None,
        queue_length: QueueLength | None = None,
    ) -> None:
        """``queue_length``: of this process, where several make one router and ``max_queue`` is for all of them."""
        self.figures = DispatchFigures()
        self.workers = WorkerRegistry()
        self.control = ControlPlane(router_id, control, self.workers, self, clock=clock)
        self.on_message = self.control.on_message
        self.on_lost = self.control.on_lost
        self._config = config
        self._availability = Availability(self.workers, config, clock)
        self._clock = clock
        self._timings = timings or DispatchTimings()
        self._flights: dict[RequestId, Flight] = {}
        self._queue = WaitQueue(queue_length)
        self._deadlines = Deadlines()
        self._num_submitted = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._ticker: asyncio.Task[None] | None = None
        self._next_stall_check_s = 0.0
        histograms = export(
            metrics if metrics is not None else CollectorRegistry(),
            self.workers,
            self.figures,
            queue_length=lambda: len(self._queue),
            num_in_flight=lambda: len(self._flights) - len(self._queue),
            num_rejected_messages=lambda: self.control.num_rejected_messages,
            num_workers_lost=lambda: self.control.num_workers_lost,
        )
        self._granting = Granting(
            self,
            config,
            self.workers,
            self.control,
            self._availability,
            histograms,
            self._queue,
            clock,
        )
        self._intake = TokenIntake(self, self.control, self._flights, self.figures, histograms, clock)

    # --- the HTTP half calls ---

    def submit(self, request: RoutedRequest, sink: TokenSink) -> None:
        """See ``interface.Dispatcher``; also raises ``ContextLengthError`` for a prompt no worker can hold and
        ``DeadlineError`` for one that came too late.
        """
        if request.request_id in self._flights:
            raise ValueError(f"request {request.request_id} is already under way")
        if request.arrived_s + request.timeout_s <= self._clock():
            raise _deadline_passed(request)
        early = EarlySink()
        flight = Flight.of(request, early, self._num_submitted)
        self._availability.check(flight.need())
        if self._queue.num_everywhere >= self._config.max_queue:
            raise self._overloaded()
        self._num_submitted += 1
        self._flights[request.request_id] = flight
        self._empty.clear()
        self._deadlines.add(flight)
        self._granting.wait(flight)
        self._granting.pump()
        flight.sink = sink
        if early.error is not None:
            raise early.error
        for grant in early.grants:
            sink.on_granted(grant)

    def cancel(self, request_id: RequestId) -> None:
        flight = self._flights.get(request_id)
        if flight is not None:
            self._end(flight, "cancelled", stop_workers=True)
            self._granting.pump()

    def finish_choice(self, request_id: RequestId, choice: ChoiceIndex) -> None:
        flight = self._flights.get(request_id)
        if flight is None or not 0 <= choice < len(flight.choices) or flight.choices[choice].ended:
            return
        flight.choices[choice].ended = True
        flight.num_open -= 1
        if flight.num_open == 0:
            self._end(flight, "finished", stop_workers=True)
            self._granting.pump()
        elif flight.decode is not None and flight.attempt is not None:
            message = CancelChoice(request_id=request_id, attempt=flight.attempt, choice=choice)
            self.control.send(flight.decode, message)

    def is_ready(self) -> bool:
        return self._availability.readiness()[0]

    def ready_reason(self) -> str:
        return self._availability.readiness()[1]

    @property
    def max_model_len(self) -> int | None:
        return self._availability.max_model_len

    @property
    def vocab_size(self) -> int | None:
        return self.workers.vocab_size

    def stacks(self) -> dict[str, dict[str, Any]]:
        return self.workers.stacks()

    # --- life of the dispatcher ---

    def start(self) -> None:
        """Begin to tick, on the running event loop."""
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick_forever(), name="dispatcher-tick")

    def drain(self) -> None:
        """Take no new requests; those under way go on."""
        self._availability.draining = True

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; ``False`` when ``timeout_s`` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop ticking; whatever is still under way is cancelled on the workers and ends in an error. Idempotent."""
        self._availability.draining = True
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
        for flight in list(self._flights.values()):
            self.fail(flight, UnavailableError("the router is shutting down", retry_after_s=RETRY_AFTER_S))

    def tick(self) -> None:
        """Serve every timer that is due."""
        now = self._clock()
        for flight in self._deadlines.expired(now):
            self.fail(flight, _deadline_passed(flight.request), "deadline")
        self._granting.expire(now)
        self._intake.check_gaps()
        if now >= self._next_stall_check_s:
            self._next_stall_check_s = now + self._timings.stall_check_s
            self.control.lose_stalled(self._timings.stall_s)
        if len(self._queue) and self.workers.decodes:
            self._granting.pump()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._timings.tick_s)
            try:
                self.tick()
            except Exception:
                # Without the tick nothing would time out any more.
                logger.exception("tick failed")

    # --- what workers report (control.WorkerEvents) ---

    def on_tokens(self, worker: Worker, deltas: tuple[TokenDelta, ...]) -> None:
        if self._intake.on_tokens(worker, deltas) or len(self._queue):
            self._granting.pump()

    def on_busy(self, worker: Worker, message: Busy) -> None:
        flight = self._current(worker, message)
        if flight is None:
            return
        full = next((w for w in (flight.decode, flight.prefill) if w and w.worker_id == message.worker_id), None)
        self._end_attempt(flight)
        self.figures.attempts["busy"] += 1
        if full is not None:
            full.candidate.window.on_busy(full.candidate.load.attempts, self._clock())
        was_refused, flight.refused = flight.refused, True
        self._granting.wait(flight)
        if not was_refused and self._queue.num_everywhere > self._config.max_queue:
            # The place it had left was given away. Whoever came last has to go, and has lost the least.
            newest = self._queue.newest()
            if newest is not None:
                self.fail(newest, self._overloaded())
        self._granting.pump()

    def on_attempt_failed(self, worker: Worker, message: AttemptFailed) -> None:
        flight = self._current(worker, message)
        if flight is None:
            return
        error = message.error
        logger.warning(
            "attempt %d failed: %s: %s",
            message.attempt,
            error.kind,
            error.message,
            extra={"request_id": message.request_id, "worker_id": worker.worker_id},
        )
        blamed = self.workers.get(message.blame) if message.blame is not None else None
        if blamed is not None and error.kind not in _FAULTS_OF_REQUESTS:
            blamed.candidate.breaker.on_fault(message.request_id, self._clock())
        if not error.retryable:
            self.fail(flight, to_error(error))
        else:
            if blamed is not None:
                flight.avoid.add(blamed.worker_id)
                if error.kind == "peer_lost":
                    # The pair is unusable until the decode worker lists the source again.
                    worker.candidate.sources.discard(PeerRef(blamed.worker_id, blamed.epoch))
            self._attempt_over(flight, "failed", error.message)
        self._granting.pump()

    def on_worker_changed(self, worker: Worker) -> None:
        worker.candidate.window.on_room(worker.candidate.load.attempts)
        self._availability.workers_changed()
        self._granting.pump()

    def on_worker_lost(self, worker: Worker, reason: str) -> None:
        for request_id in list(worker.requests):
            flight = self._flights.get(request_id)
            if flight is None or worker not in (flight.decode, flight.prefill):
                continue
            if worker is flight.prefill and flight.taken_over:
                flight.prefill = None
            else:
                self._attempt_over(flight, "worker_lost", f"{worker.role} worker {worker.worker_id}: {reason}")
        self._availability.workers_changed()
        self._granting.pump()

    # --- how attempts and requests end (token_intake.IntakeOwner) ---

    def started(self, flight: Flight) -> None:
        self._queue.remove(flight)

    def complete(self, flight: Flight) -> None:
        """Every choice had its finish reason from a worker (prefill alone, perhaps; decode then ends by itself)."""
        self._end(flight, "finished", stop_workers=False)

    def fail(self, flight: Flight, error: TwopoolError, outcome: AttemptOutcome = "failed") -> None:
        if flight.phase is Phase.DONE:
            return
        self._end(flight, outcome, stop_workers=True)
        self.report(flight, error)

    def report(self, flight: Flight, error: TwopoolError) -> None:
        who = {"request_id": flight.request.request_id}
        logger.warning("failed: %s", error.message, extra=who)
        try:
            flight.sink.on_error(error)
        except Exception:
            # The request is over either way, and the others must not suffer from its consumer.
            logger.exception("the sink failed", extra=who)

    def retry(self, flight: Flight, worker: Worker, reason: str) -> None:
        worker.candidate.breaker.on_fault(flight.request.request_id, self._clock())
        flight.avoid.add(worker.worker_id)
        self._attempt_over(flight, "failed", reason)

    def _end_attempt(self, flight: Flight) -> list[Worker]:
        """The workers that may still hold something of it."""
        self._intake.close_lane(flight)
        return flight.end_attempt()

    def _end(self, flight: Flight, outcome: AttemptOutcome, *, stop_workers: bool) -> None:
        workers = self._end_attempt(flight)
        flight.phase = Phase.DONE
        del self._flights[flight.request.request_id]
        self._queue.remove(flight)
        self._deadlines.remove(flight)
        if not self._flights:
            self._empty.set()
        self._release(workers, outcome)
        if stop_workers:
            self._send_cancel(flight, workers)

    def _attempt_over(self, flight: Flight, outcome: AttemptOutcome, reason: str) -> None:
        """The present attempt failed: queue the next, unless there were too many."""
        workers = self._end_attempt(flight)
        self._release(workers, outcome)
        self._send_cancel(flight, workers)
        if flight.phase is Phase.DONE:
            return
        flight.failures += 1
        if flight.failures >= self._config.max_attempts:
            self.fail(flight, WorkerFailedError(f"gave up after {flight.failures} attempts; the last one: {reason}"))
            return
        logger.info("goes on with another attempt: %s", reason, extra={"request_id": flight.request.request_id})
        flight.wait_until_s = None
        self._granting.wait(flight)

    def _release(self, workers: list[Worker], outcome: AttemptOutcome) -> None:
        """Account for an attempt's end; ``workers`` is empty when there was none."""
        if workers:
            self.figures.attempts[outcome] += 1
        for worker in workers:
            worker.candidate.window.on_room(worker.candidate.load.attempts)

    def _send_cancel(self, flight: Flight, workers: list[Worker]) -> None:
        if flight.attempt is not None:
            message = Cancel(request_id=flight.request.request_id, attempt=flight.attempt)
            for worker in workers:
                self.control.send(worker, message)

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(
            f"{self._queue.num_everywhere} requests are waiting already; try again later",
            retry_after_s=self._granting.retry_after_s(),
        )

    def _current(self, worker: Worker, message: Busy | AttemptFailed) -> Flight | None:
        """The request whose present attempt ``worker`` speaks of."""
        flight = self._flights.get(message.request_id)
        if flight is None or flight.attempt != message.attempt or worker not in (flight.decode, flight.prefill):
            return None
        return flight


def _deadline_passed(request: RoutedRequest) -> DeadlineError:
    return DeadlineError(f"the request did not finish within {request.timeout_s:g} s")
