"""Who is served next, and by whom: requests wait for room here and are granted to workers, oldest first."""

from collections.abc import Callable
from typing import Protocol

from twopool.protocol.config import RouterConfig
from twopool.protocol.errors import (
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    TwopoolError,
    UnavailableError,
)
from twopool.router.attempts import Flight, Phase
from twopool.router.availability import Availability
from twopool.router.control import ControlPlane
from twopool.router.pairing import Pairing, can_serve, choose
from twopool.router.registry import WorkerRegistry
from twopool.router.timings import Grant
from twopool.router.waiting import WaitQueue, retry_after_s
from twopool.router.worker_metrics import DispatchHistograms


class GrantingOwner(Protocol):
    """Who ends requests."""

    def fail(self, flight: Flight, error: TwopoolError) -> None:
        """End a request that is not over in an error."""


class Granting:
    """The queue, and the grants out of it. Nothing here happens by itself: ``pump`` when room or requests may have
    come, ``expire`` now and then.
    """

    def __init__(
        self,
        owner: GrantingOwner,
        config: RouterConfig,
        workers: WorkerRegistry,
        control: ControlPlane,
        availability: Availability,
        histograms: DispatchHistograms,
        queue: WaitQueue,
        clock: Callable[[], float],
    ) -> None:
        self._owner = owner
        self._config = config
        self._workers = workers
        self._control = control
        self._availability = availability
        self._histograms = histograms
        self._queue = queue
        self._clock = clock
        self._is_pumping = False

    def wait(self, flight: Flight) -> None:
        """Queue a request; a wait that has begun keeps its end."""
        now_s = self._clock()
        if flight.wait_until_s is None:
            longest = self._config.resume_timeout_s if flight.started else self._config.max_queue_wait_s
            flight.wait_until_s = now_s + longest
        if flight.attempt is None:
            flight.submitted_s = now_s
        flight.queued_s = now_s
        self._queue.add(flight)

    def retry_after_s(self) -> int:
        """When a request that finds no room now should be tried again."""
        oldest = self._queue.first()
        return retry_after_s(0.0 if oldest is None else self._clock() - oldest.submitted_s)

    def expire(self, now_s: float) -> None:
        """End the waits that have been too long."""
        for flight in self._queue:
            if flight in self._queue and flight.wait_until_s is not None and now_s >= flight.wait_until_s:
                self._waited_in_vain(flight)

    def pump(self) -> None:
        """Grant attempts, oldest request first, as long as workers have room. Re-entrant calls are no-ops."""
        if self._is_pumping:
            return
        self._is_pumping, parked = True, list[Flight]()
        try:
            while (flight := self._queue.first()) is not None:
                now_s = self._clock()
                need = flight.need()
                decodes, prefills = self._workers.decodes, self._workers.prefills
                pairing = choose(decodes, prefills, need, now_s)
                if pairing is not None:
                    self._grant(flight, pairing, now_s)
                elif can_serve(decodes, prefills, need, now_s):
                    break
                elif flight.started:
                    # An open stream waits for workers to come back; it does not hold up what others can do.
                    self._queue.remove(flight)
                    parked.append(flight)
                else:
                    self._owner.fail(flight, self._availability.unavailable())
        finally:
            for flight in parked:
                if flight.phase is Phase.QUEUED:
                    self._queue.add(flight)
            self._is_pumping = False

    def _waited_in_vain(self, flight: Flight) -> None:
        if flight.started:
            limit_s = self._config.resume_timeout_s
            self._owner.fail(flight, UnavailableError(f"no worker could go on with the request within {limit_s:g} s"))
        else:
            limit_s = self._config.max_queue_wait_s
            message = f"no worker had room for the request within {limit_s:g} s"
            self._owner.fail(flight, OverloadedError(message, retry_after_s=self.retry_after_s()))

    def _grant(self, flight: Flight, pairing: Pairing, now_s: float) -> None:
        decode = self._workers.worker_of(pairing.decode)
        prefill = self._workers.worker_of(pairing.prefill) if pairing.prefill is not None else None
        self._queue.grant(flight)
        if flight.attempt is None:
            self._histograms.granted(max(now_s - flight.request.arrived_s, 0.0))
        flight.waited_s += max(now_s - flight.queued_s, 0.0)
        flight.begin_attempt(pairing, decode, prefill, self._workers.fingerprint(prefill, decode))
        for candidate in (pairing.decode, pairing.prefill):
            if candidate is not None:
                candidate.breaker.on_grant(now_s)
        try:
            self._control.send(decode, flight.generate(now_s))
        except ProtocolError as error:
            self._owner.fail(flight, InvalidRequestError(f"the request is too large: {error.message}"))
            return
        if flight.phase is not Phase.GRANTED or flight.attempt is None:
            return  # the worker did not take it
        flight.sink.on_granted(
            Grant(
                attempt=flight.attempt,
                decode=decode.worker_id,
                prefill=prefill.worker_id if prefill is not None else None,
                queued_s=flight.waited_s,
                retried_s=max(now_s - flight.submitted_s - flight.waited_s, 0.0),
                at_s=self._clock(),
                fingerprints=flight.fingerprints | {flight.fingerprint},
            )
        )
