"""The prefill role: accept prompts from decode workers, compute them in chunks, offer their KV, hand over first tokens.

Everything here runs on the event loop between steps. Who owns a prompt's blocks is said by the job's state
(``job.py``); a job leaves ``jobs`` exactly when nothing is held for it any more.
"""

import asyncio
import logging
import time

import numpy as np

from twopool.engine.jobs import JobTable
from twopool.engine.reports import error_info, with_reports
from twopool.engine.requests import AttemptKey, EngineRequest, PrefillProgress, PrefillResult, StepOutput
from twopool.engine.router_link import RequestMessage
from twopool.engine.source_links import SourceReply
from twopool.engine.source_server import Reader, SourceRequest
from twopool.engine.tickets import tickets_hold
from twopool.engine.worker import WorkerHost
from twopool.prefill.job import PrefillJob, PrefillState
from twopool.protocol.errors import InvalidRequestError, OverloadedError, TwopoolError
from twopool.protocol.ids import BlockId, RouterId
from twopool.protocol.messages import (
    AttemptFailed,
    ChoiceState,
    Confirm,
    Confirmed,
    ErrorInfo,
    FirstTokens,
    Generate,
    KvReady,
    PeerInfo,
    PeerRef,
    Prefill,
    PrefillAccepted,
    PrefillBusy,
    PrefillFailed,
    PrefillReport,
    ReleasePrefill,
    Tokens,
    pack_ids,
)

logger = logging.getLogger(__name__)


class PrefillRole:
    """Serves ``Prefill``, ``Confirm`` and ``ReleasePrefill`` of any number of readers."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self.jobs: JobTable[PrefillJob] = JobTable()
        self._draining = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def expects_readers(self) -> bool:
        return len(self.jobs) > 0

    def start_draining(self) -> None:
        self._draining = True

    # --- from readers ---

    def on_source_request(self, reader: Reader, message: SourceRequest) -> None:
        match message:
            case Prefill():
                self._on_prefill(reader, message)
            case Confirm():
                self._on_confirm(reader, message)
            case ReleasePrefill():
                self._release(AttemptKey(message.request_id, message.attempt), "released by its reader")

    def on_reader_lost(self, reader: Reader) -> None:
        for job in [job for job in self.jobs.all() if job.reader is reader]:
            self._release(job.key, "reader lost")

    def _on_prefill(self, reader: Reader, message: Prefill) -> None:
        key = AttemptKey(message.request_id, message.attempt)
        try:
            if message.source_epoch != self._host.pool.epoch:
                raise InvalidRequestError("the prefill was meant for an earlier life of this worker")
            if key in self.jobs:
                raise InvalidRequestError("this attempt is being prefilled already")
            if self._draining:
                raise OverloadedError("this worker is draining")
            job = PrefillJob.of(message, reader)
            self._host.engine.submit(_engine_request(message, job))
        except OverloadedError:
            reader.send(PrefillBusy(request_id=key.request_id, attempt=key.attempt))
        except (TwopoolError, ValueError) as error:
            logger.warning("refused a prefill: %s", error, extra=_fields(key))
            reader.send(PrefillFailed(request_id=key.request_id, attempt=key.attempt, error=error_info(error)))
        else:
            self.jobs.add(key, job)
            reader.send(PrefillAccepted(request_id=key.request_id, attempt=key.attempt))
            self._host.update_expected_readers()

    def _on_confirm(self, reader: Reader, message: Confirm) -> None:
        valid = tickets_hold(message.tickets, self._host.pool)
        if not valid:
            self._host.transfer_stats.stale_tickets += 1
            logger.error("stale tickets", extra=_fields(AttemptKey(message.request_id, message.attempt)))
        reader.send(Confirmed(request_id=message.request_id, attempt=message.attempt, valid=valid))
        self._release(AttemptKey(message.request_id, message.attempt), "confirmed")

    # --- from the engine ---

    def on_step(self, output: StepOutput) -> None:
        for progress in output.progress:
            self._on_progress(progress)
        for result in output.prefilled:
            self._on_prefilled(result)
        for key, error in output.failed:
            job = self.jobs.pop(key)
            if job is not None:
                job.state = PrefillState.RELEASED
                job.reader.send(PrefillFailed(request_id=key.request_id, attempt=key.attempt, error=error))

    def _on_progress(self, progress: PrefillProgress) -> None:
        job = self.jobs.get(progress.key)
        if job is None:
            return
        job.state = PrefillState.RUNNING
        self._offer(job, progress.block_table, progress.num_computed, final=False)

    def _on_prefilled(self, result: PrefillResult) -> None:
        job = self.jobs.get(result.key)
        if job is None:  # released while its last step ran: the pins are nobody's
            self._host.pool.unpin(result.block_table)
            return
        job.state = PrefillState.PINNED
        job.pinned = result.block_table
        job.pinned_until_s = time.monotonic() + self._host.config.pin_lease_s
        fault = self._host.faults.take("pinned")
        hold_s = fault.seconds if fault else 0.0
        if hold_s:
            self._later(hold_s, job, result)
        else:
            self._hand_over(job, result)

    def _hand_over(self, job: PrefillJob, result: PrefillResult) -> None:
        """Offer what is left and send the first tokens: to the router for TTFT, to decode for the rest."""
        self._offer(job, result.block_table, result.num_tokens, final=True)
        report = PrefillReport(
            worker_id=self._host.worker_id,
            cached_tokens=result.cached_tokens,
            queue_s=result.queue_s,
            compute_s=result.compute_s,
        )
        deltas = (with_reports(result.deltas[0], prefill=report), *result.deltas[1:])
        self._host.routers.send(job.router_id, Tokens(deltas))
        job.reader.send(FirstTokens(request_id=job.key.request_id, attempt=job.key.attempt, deltas=deltas))
        logger.debug("prefilled", extra=_fields(job.key) | {"num_tokens": result.num_tokens})

    def _offer(self, job: PrefillJob, block_table: tuple[BlockId, ...], num_computed: int, *, final: bool) -> None:
        """Tell the reader of complete KV it has not heard of; up to a block edge of both sides until the end."""
        edge = max(self._host.config.block_size, job.reader.identity.ranks[0].geometry.block_size)
        end_token = num_computed if final else num_computed // edge * edge
        if end_token <= job.num_offered:
            return
        pool = self._host.pool
        first, last = job.num_offered // pool.block_size, -(-end_token // pool.block_size)
        ticket = job.ticket(
            block_table=block_table,
            end_token=end_token,
            block_size=pool.block_size,
            num_layers=self._host.geometry.num_layers,
            epoch=pool.epoch,
            generations=[pool.generation(block) for block in block_table[first:last]],
        )
        job.num_offered = end_token
        job.reader.send(KvReady(ticket))

    def _later(self, delay_s: float, job: PrefillJob, result: PrefillResult) -> None:
        async def hand_over_later() -> None:
            await asyncio.sleep(delay_s)
            if self.jobs.get(job.key) is job:
                self._hand_over(job, result)

        task = asyncio.create_task(hand_over_later())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- from routers: a prefill worker takes its work from decode workers alone ---

    def on_request_message(self, router_id: RouterId, message: RequestMessage) -> None:
        if isinstance(message, Generate):
            error = ErrorInfo(kind="internal", message="a prefill worker does not generate", retryable=True)
            self._host.routers.send(
                router_id,
                AttemptFailed(
                    request_id=message.request_id,
                    attempt=message.attempt,
                    error=error,
                    blame=self._host.worker_id,
                ),
            )

    def on_peers(self, router_id: RouterId, peers: tuple[PeerInfo, ...]) -> None:
        """A prefill worker reads from nobody yet."""

    def on_router_lost(self, router_id: RouterId) -> None:
        for job in [job for job in self.jobs.all() if job.router_id == router_id]:
            self._release(job.key, "router lost")

    # --- from sources: none ---

    def on_source_reply(self, source: PeerRef, message: SourceReply) -> None:
        logger.warning("unexpected %s", type(message).__name__, extra={"worker_id": source.worker_id})

    def on_source_lost(self, source: PeerRef) -> None:
        """Nothing of this role depends on a source."""

    # --- lifetimes ---

    def on_tick(self, now_s: float) -> None:
        """Deadlines and leases, a few times a second."""
        for job in self.jobs.all():
            if job.state is PrefillState.PINNED and now_s > job.pinned_until_s:
                self._host.transfer_stats.pins_expired += 1
                self._release(job.key, "lease expired")
            elif now_s > job.deadline_s:
                job.reader.send(
                    PrefillFailed(
                        request_id=job.key.request_id,
                        attempt=job.key.attempt,
                        error=ErrorInfo(kind="timeout", message="prefill did not finish in time"),
                    )
                )
                self._release(job.key, "deadline passed")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for job in self.jobs.all():
            self._release(job.key, "worker closes")

    def _release(self, key: AttemptKey, reason: str) -> None:
        """Give back all that is held for a job, whatever its state. Idempotent."""
        job = self.jobs.pop(key)
        if job is None:
            return
        if job.state is PrefillState.PINNED:
            self._host.pool.unpin(job.pinned)
        else:
            self._host.engine.cancel(key)
        job.state = PrefillState.RELEASED
        logger.debug("released: %s", reason, extra=_fields(key))
        self._host.update_expected_readers()


def _engine_request(message: Prefill, job: PrefillJob) -> EngineRequest:
    if not 1 <= message.num_prompt_tokens <= len(job.token_ids):
        raise InvalidRequestError("num_prompt_tokens does not fit the ids")
    output_ids = job.token_ids[message.num_prompt_tokens :]
    if len(output_ids) and len(message.choices) != 1:
        raise InvalidRequestError("several choices cannot share output")
    return EngineRequest(
        key=job.key,
        prompt_ids=np.ascontiguousarray(job.token_ids[: message.num_prompt_tokens]),
        choices=tuple(ChoiceState(choice, pack_ids(output_ids)) for choice in message.choices),
        sampling=message.sampling,
        salt=message.salt,
        prefill_only=True,
    )


def _fields(key: AttemptKey) -> dict[str, object]:
    return {"request_id": key.request_id, "attempt": key.attempt}
