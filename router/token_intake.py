"""Accepts tokens: only of the current attempt, only the next index of each choice; asks again for what is missing.

This is the router's hot path: a few dictionary look-ups and comparisons for each delta, then the sink.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from twopool.protocol.errors import TwopoolError, WorkerFailedError
from twopool.protocol.ids import RequestId
from twopool.protocol.messages import ResendFrom, TokenDelta
from twopool.router.attempts import ChoiceProgress, Flight, Gap, Phase, unrepeated
from twopool.router.control import ControlPlane
from twopool.router.interface import TokenLane
from twopool.router.registry import Worker
from twopool.router.worker_metrics import DispatchFigures, DispatchHistograms, DropReason

logger = logging.getLogger(__name__)

RESEND_INTERVAL_S = 0.2
GAP_TIMEOUT_S = 5.0


class IntakeOwner(Protocol):
    """Who decides what becomes of a request."""

    def started(self, flight: Flight) -> None:
        """An attempt's first delta came: its workers have taken it."""

    def complete(self, flight: Flight) -> None:
        """Every choice has ended."""

    def fail(self, flight: Flight, error: TwopoolError) -> None:
        """End a request that is not over in an error."""

    def report(self, flight: Flight, error: TwopoolError) -> None:
        """Tell the sink of a request that is over of an error."""

    def retry(self, flight: Flight, worker: Worker, reason: str) -> None:
        """The attempt is no good, and ``worker`` is to blame."""


class TokenIntake:
    """``flights`` is the owner's table of live requests."""

    def __init__(
        self,
        owner: IntakeOwner,
        control: ControlPlane,
        flights: dict[RequestId, Flight],
        figures: DispatchFigures,
        histograms: DispatchHistograms,
        clock: Callable[[], float],
    ) -> None:
        self._owner = owner
        self._control = control
        self._flights = flights
        self._figures = figures
        self._histograms = histograms
        self._clock = clock
        self._gapped: dict[RequestId, Flight] = {}
        self._lanes: dict[RequestId, TokenLane] = {}

    def on_tokens(self, worker: Worker, deltas: tuple[TokenDelta, ...]) -> bool:
        """Deliver what is new of ``deltas``, sent by ``worker``; whether a request ended."""
        flights, lanes = self._flights, self._lanes
        vocab_size = worker.info.vocab_size
        ended = False
        for delta in deltas:
            lane = lanes.get(delta.request_id)
            if (
                lane is not None
                and worker is lane.worker
                and delta.attempt == lane.attempt
                and delta.finish_reason is None
                and delta.handover is None
                and delta.choice == 0
            ):
                # The way of nearly every token.
                token_ids, output_ids = delta.token_ids, lane.output_ids
                if (
                    len(token_ids) == 1
                    and delta.index == len(output_ids)
                    and 0 <= token_ids[0] < vocab_size
                    and delta.prefill is None
                ):
                    output_ids.append(token_ids[0])
                    if not lane.is_marked:
                        lane.is_marked = True
                        lane.mark(lane)
                    continue
            flight = flights.get(delta.request_id)
            if (
                flight is None
                or delta.attempt != flight.attempt
                or (worker is not flight.decode and worker is not flight.prefill)
            ):
                self._drop("stale")
                continue
            token_ids = delta.token_ids
            is_single = len(token_ids) == 1
            is_valid = 0 <= token_ids[0] < vocab_size if is_single else _are_valid(token_ids, vocab_size)
            if delta.choice >= len(flight.choices) or not is_valid:
                self._drop("invalid")
                self._owner.retry(flight, worker, f"{worker.worker_id} sent tokens that cannot be")
                continue
            if lane is not None:
                self.close_lane(flight)
            if worker is not flight.source:
                self._first_delta(flight, worker)
            choice = flight.choices[delta.choice]
            output_ids = choice.output_ids
            if choice.ended or delta.index != len(output_ids):
                new = self._out_of_order(flight, choice, delta, worker)
                if new is None:
                    continue
                delta, token_ids = new, new.token_ids
                is_single = len(token_ids) == 1
            has_reports = delta.prefill is not None or delta.handover is not None
            if is_single:
                output_ids.append(token_ids[0])
            else:
                output_ids.extend(token_ids)
            if has_reports:
                delta = self._take_reports(flight, delta)
            is_last = delta.finish_reason is not None and self._end_choice(flight, choice)
            ended |= is_last
            try:
                flight.sink.on_tokens(delta)
                if flight.taken_over and not choice.ended:
                    self._open_lane(flight, worker)
            except Exception:
                # One request's consumer must not keep the others in this message from their tokens.
                logger.exception("the sink failed", extra={"request_id": delta.request_id})
                self._sink_failed(flight, is_last)
        return ended

    def close_lane(self, flight: Flight) -> None:
        """Every further token of this attempt goes the long way, until a lane is opened again. Idempotent."""
        if flight.lane is not None:
            flight.lane = None
            del self._lanes[flight.request.request_id]
            flight.sink.close_lane()

    def _open_lane(self, flight: Flight, worker: Worker) -> None:
        lane = flight.sink.lane()
        # The sink may have ended the attempt from within.
        if lane is not None and flight.attempt is not None and worker is flight.decode:
            lane.open(worker, flight.attempt, flight.choices[0].output_ids)
            flight.lane = self._lanes[flight.request.request_id] = lane

    def check_gaps(self) -> None:
        """Ask again for tokens still missing; give up on attempts that do not deliver them."""
        now = self._clock()
        for request_id, flight in list(self._gapped.items()):
            decode = flight.decode
            gaps = [c for c in flight.choices if c.gap is not None and c.gap.index == len(c.output_ids) and not c.ended]
            if flight.phase is not Phase.STREAMING or decode is None or not gaps:
                del self._gapped[request_id]
                continue
            for choice in gaps:
                assert choice.gap is not None
                if now - choice.gap.since_s > GAP_TIMEOUT_S:
                    self._owner.retry(flight, decode, f"{decode.worker_id} did not resend missing tokens")
                    break
                if now - choice.gap.asked_s >= RESEND_INTERVAL_S:
                    choice.gap.asked_s = now
                    self._ask_again(flight, choice, decode)

    def _drop(self, reason: DropReason) -> None:
        self._figures.dropped_deltas[reason] += 1

    def _first_delta(self, flight: Flight, worker: Worker) -> None:
        """``worker`` sends its first delta of this attempt."""
        if worker is flight.decode:
            flight.taken_over = True
        elif flight.taken_over:
            return
        flight.source = worker
        if flight.phase is Phase.GRANTED:
            flight.phase = Phase.STREAMING
            flight.started = True
            flight.wait_until_s = None
            self._owner.started(flight)
            if flight.reservation is not None:
                flight.reservation.prefill_done()
        worker.candidate.breaker.on_success()
        if flight.prefill is not None and flight.prefill.alive:
            prefill = flight.prefill.candidate
            prefill.window.on_room(prefill.load.attempts)
            prefill.breaker.on_success()

    def _out_of_order(
        self, flight: Flight, choice: ChoiceProgress, delta: TokenDelta, worker: Worker
    ) -> TokenDelta | None:
        """The new part of a delta that is not simply the next one, if it has any."""
        next_index = len(choice.output_ids)
        if choice.ended or delta.index < next_index:
            if delta.handover is not None and flight.handover_reported:
                self._histograms.handed_over(delta.handover)
            new = None if choice.ended else unrepeated(flight, delta, next_index)
            if new is None or new.token_ids != delta.token_ids:
                self._drop("repeat")
            return new
        self._drop("gap")
        # Before the decode worker streams there is nobody to ask; its first message starts where the attempt starts.
        if worker is flight.decode and (choice.gap is None or choice.gap.index != next_index):
            now = self._clock()
            choice.gap = Gap(next_index, since_s=now, asked_s=now)
            self._gapped[delta.request_id] = flight
            self._ask_again(flight, choice, worker)
        return None

    def _ask_again(self, flight: Flight, choice: ChoiceProgress, worker: Worker) -> None:
        assert flight.attempt is not None
        self._figures.resends += 1
        message = ResendFrom(
            request_id=flight.request.request_id,
            attempt=flight.attempt,
            choice=choice.index,
            index=len(choice.output_ids),
        )
        self._control.send(worker, message)

    def _take_reports(self, flight: Flight, delta: TokenDelta) -> TokenDelta:
        """Count the reports; each kind reaches the sink once a request."""
        prefill, handover = delta.prefill, delta.handover
        if handover is not None:
            self._histograms.handed_over(handover)
        if (prefill is not None and flight.prefill_reported) or (handover is not None and flight.handover_reported):
            delta = msgspec.structs.replace(
                delta,
                prefill=None if flight.prefill_reported else prefill,
                handover=None if flight.handover_reported else handover,
            )
        flight.prefill_reported |= prefill is not None
        flight.handover_reported |= handover is not None
        return delta

    def _sink_failed(self, flight: Flight, is_last: bool) -> None:
        error = WorkerFailedError("the router failed to process the output")
        if is_last:
            self._owner.report(flight, error)
        else:
            self._owner.fail(flight, error)

    def _end_choice(self, flight: Flight, choice: ChoiceProgress) -> bool:
        """Whether it was the last one."""
        choice.ended = True
        flight.num_open -= 1
        if flight.num_open:
            return False
        # Over before the sink hears of it: whatever it calls from there finds nothing left to stop.
        self._owner.complete(flight)
        return True


def _are_valid(token_ids: tuple[int, ...], vocab_size: int) -> bool:
    return all(0 <= token_id < vocab_size for token_id in token_ids)
