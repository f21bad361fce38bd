"""The prefill role: accept prompts from decode workers, compute them in chunks, offer their KV, hand over first tokens.

Everything here runs on the event loop between steps. Who owns a prompt's blocks is said by the job's state
(``job.py``); a job leaves ``jobs`` exactly when nothing is held for it any more.
"""

import asyncio
import logging
import time

import numpy as np

from twopool.engine.fault_gate import FaultGate
from twopool.engine.jobs import JobTable
from twopool.engine.prefix_fetch import PrefixFetch, plan_prefix_fetch
from twopool.engine.reports import error_info, with_reports
from twopool.engine.requests import (
    AttemptKey,
    EngineRequest,
    LayerProgress,
    PrefillProgress,
    PrefillResult,
    StepOutput,
)
from twopool.engine.router_link import RequestMessage
from twopool.engine.source_links import SourceReply
from twopool.engine.source_server import Reader, SourceRequest
from twopool.engine.worker import WorkerHost
from twopool.prefill.job import PrefillJob, PrefillState
from twopool.protocol.errors import InvalidRequestError, OverloadedError, PeerLostError, TwopoolError
from twopool.protocol.ids import BlockId, RouterId
from twopool.protocol.messages import (
    AttemptFailed,
    ChoiceState,
    Confirm,
    ErrorInfo,
    FetchPrefix,
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

REPEAT_S = 1.0
"""How often the first tokens are sent again while their reader has not confirmed: a message may be lost."""


class PrefillRole:
    """Serves ``Prefill``, ``FetchPrefix``, ``Confirm`` and ``ReleasePrefill`` of any number of readers."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self.jobs: JobTable[PrefillJob] = JobTable()
        self._draining = False
        self._gate = FaultGate(host.faults)

    @property
    def expects_readers(self) -> bool:
        return len(self.jobs) > 0 or len(self._host.prefixes) > 0

    def start_draining(self) -> None:
        self._draining = True

    # --- from readers ---

    def on_source_request(self, reader: Reader, message: SourceRequest) -> None:
        key = AttemptKey(message.request_id, message.attempt)
        match message:
            case Prefill():
                self._gate.do(
                    lambda: self._on_prefill(reader, message),
                    line=reader,
                    point="accepting",
                    refuse=lambda: self._refuse(reader, key, OverloadedError("refused on purpose")),
                )
            case FetchPrefix():
                self._gate.do(
                    lambda: self._host.prefixes.on_fetch(reader, message),
                    line=reader,
                    point="prefix_offering",
                    refuse=lambda: self._host.prefixes.refuse(reader, message),
                )
            case Confirm():
                self._gate.do(
                    lambda: self._on_confirm(reader, message),
                    line=reader,
                    point="confirmed",
                    refuse=lambda: self._on_confirm(reader, message, refused=True),
                )
            case ReleasePrefill():
                self._gate.do(lambda: self._on_release(reader, key), line=reader)

    def _on_release(self, reader: Reader, key: AttemptKey) -> None:
        self._host.prefixes.on_release(reader, key)
        self._release_of(reader, key)

    def on_reader_lost(self, reader: Reader) -> None:
        self._host.prefixes.on_reader_lost(reader)
        for job in [job for job in self.jobs.all() if job.reader is reader]:
            self._release(job.key, "reader_lost")

    def _on_prefill(self, reader: Reader, message: Prefill) -> None:
        key = AttemptKey(message.request_id, message.attempt)
        if reader.is_lost:
            return
        try:
            if message.source_epoch != self._host.pool.epoch:
                raise InvalidRequestError("the prefill was meant for an earlier life of this worker")
            if key in self.jobs:
                raise InvalidRequestError("this attempt is being prefilled already")
            if self._draining:
                raise OverloadedError("this worker is draining")
            job = PrefillJob.of(message, reader)
            request = _engine_request(message, job)
            self._host.engine.check(request)
            job.fetch = self._plan_fetch(job, message)
            if job.fetch is None:
                self._host.engine.submit(request)
        except (TwopoolError, ValueError) as error:
            self._refuse(reader, key, error)
            return
        self.jobs.add(key, job)
        reader.send(PrefillAccepted(request_id=key.request_id, attempt=key.attempt))
        self._host.update_expected_readers()
        if job.fetch is not None:
            job.state = PrefillState.FETCHING
            job.task = asyncio.create_task(self._fetch_and_submit(job, job.fetch, request))

    def _plan_fetch(self, job: PrefillJob, message: Prefill) -> PrefixFetch | None:
        """The fetch of the prefix that the message's hint names, where that helps."""
        hint = message.prefix
        link = self._host.sources.get(hint.source) if hint is not None else None
        if hint is None or link is None:
            return None
        return plan_prefix_fetch(
            key=job.key,
            token_ids=job.token_ids,
            salt=message.salt,
            num_tokens=hint.num_tokens,
            link=link,
            worker=self._host.kv_memory,
        )

    async def _fetch_and_submit(self, job: PrefillJob, fetch: PrefixFetch, request: EngineRequest) -> None:
        held = await fetch.run()
        job.peer_tokens = fetch.num_read_tokens
        self._host.transfer_stats.kv_prefix_tokens += job.peer_tokens
        job.fetch = None
        job.state = PrefillState.QUEUED
        try:
            self._host.engine.submit(request)
        except TwopoolError as error:
            if self.jobs.pop(job.key) is not None:
                job.state = PrefillState.RELEASED
                self._refuse(job.reader, job.key, error)
        finally:
            self._host.pool.release(held)

    def _refuse(self, reader: Reader, key: AttemptKey, error: Exception) -> None:
        if isinstance(error, OverloadedError):
            reader.send(PrefillBusy(request_id=key.request_id, attempt=key.attempt))
            return
        logger.warning("refused a prefill: %s", error, extra=_fields(key))
        reader.send(PrefillFailed(request_id=key.request_id, attempt=key.attempt, error=error_info(error)))

    def _on_confirm(self, reader: Reader, message: Confirm, *, refused: bool = False) -> None:
        if self._host.prefixes.on_confirm(reader, message, refused=refused):
            return
        held = self._host.confirm(reader, message, refused)
        self._release_of(reader, AttemptKey(message.request_id, message.attempt), "confirmed" if held else "stale")

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
        edge = self._host.tickets.edge(job.reader.identity)
        self._offer(job, progress.block_table, progress.num_computed // edge * edge)

    def on_layers(self, progress: LayerProgress) -> None:
        """Some layers of a prompt's last chunk are complete while the others are being computed."""
        job = self.jobs.get(progress.key)
        if job is not None:
            job.state = PrefillState.RUNNING
            self._offer(job, progress.block_table, progress.num_tokens, layer_end=progress.layer_end)

    def _on_prefilled(self, result: PrefillResult) -> None:
        job = self.jobs.get(result.key)
        if job is None:  # released while its last step ran: the pins are nobody's
            self._host.pool.unpin(result.block_table)
            return
        job.state = PrefillState.PINNED
        job.result = result
        job.pinned_until_s = time.monotonic() + self._host.config.pin_lease_s
        job.repeat_at_s = time.monotonic() + REPEAT_S
        self._gate.do(
            lambda: self._hand_over(job, result),
            line=job,
            point="pinned",
            refuse=lambda: self._give_up(job, "refused", "prefill is refused on purpose"),
        )

    def _hand_over(self, job: PrefillJob, result: PrefillResult) -> None:
        """Offer what is left and send the first tokens: to the router for TTFT, to decode for the rest.

        Harmless when done again, which is how a lost message is made good.
        """
        if self.jobs.get(job.key) is not job:
            return
        self._offer(job, result.block_table, result.num_tokens)
        report = PrefillReport(
            worker_id=self._host.worker_id,
            cached_tokens=result.cached_tokens,
            queue_s=result.queue_s,
            compute_s=result.compute_s,
            peer_tokens=min(job.peer_tokens, result.cached_tokens),
        )
        deltas = (with_reports(result.deltas[0], prefill=report), *result.deltas[1:])
        self._host.routers.send(job.router_id, Tokens(deltas))
        job.outbox.put(FirstTokens(request_id=job.key.request_id, attempt=job.key.attempt, deltas=deltas))
        logger.debug("prefilled", extra=_fields(job.key) | {"num_tokens": result.num_tokens})

    def _offer(
        self, job: PrefillJob, block_table: tuple[BlockId, ...], end_token: int, *, layer_end: int | None = None
    ) -> None:
        """Tell the reader of complete KV it has not heard of: tokens to ``end_token``, layers to ``layer_end``."""
        writer = self._host.tickets
        layer_end = writer.num_layers if layer_end is None else layer_end
        if end_token <= job.num_offered or layer_end <= job.layers_offered:
            return
        ticket = writer.write(
            job.key,
            block_table=block_table,
            token_ids=job.token_ids,
            chain=job.chain,
            tokens=(job.num_offered, end_token),
            layers=(job.layers_offered, layer_end),
        )
        job.layers_offered = layer_end
        if layer_end == writer.num_layers:
            job.num_offered, job.layers_offered = end_token, 0
        if job.verify == "off":
            job.outbox.put(KvReady(ticket))
        else:
            job.outbox.put_made(lambda: writer.ready(ticket, job.verify, job.reader.identity))

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
        self._host.sources.listed(router_id, peers)

    def on_router_lost(self, router_id: RouterId) -> None:
        for job in [job for job in self.jobs.all() if job.router_id == router_id]:
            self._release(job.key, "router_lost")
        self._host.sources.listed(router_id, ())

    # --- from sources: prefixes ---

    def on_source_reply(self, source: PeerRef, message: SourceReply) -> None:
        subject = message.ticket if isinstance(message, KvReady) else message
        job = self.jobs.get(AttemptKey(subject.request_id, subject.attempt))
        if job is not None and job.fetch is not None and job.fetch.link.ref == source:
            job.fetch.on_reply(message)

    def on_source_lost(self, source: PeerRef) -> None:
        for job in self.jobs.all():
            if job.fetch is not None and job.fetch.link.ref == source:
                job.fetch.fail(PeerLostError(f"{source.worker_id} is gone"))

    # --- lifetimes ---

    def on_tick(self, now_s: float) -> None:
        """Deadlines, leases and repeated last words, a few times a second."""
        for job in self.jobs.all():
            if job.state is PrefillState.PINNED and now_s > job.pinned_until_s:
                self._give_up(job, "lease", "nobody confirmed the KV before its lease ended")
            elif now_s > job.deadline_s:
                self._give_up(job, "deadline", "prefill did not finish in time")
            elif job.result is not None and now_s > job.repeat_at_s:
                job.repeat_at_s = now_s + REPEAT_S
                self._hand_over(job, job.result)

    async def close(self) -> None:
        self._gate.close()
        for job in self.jobs.all():
            self._release(job.key, "closed")

    def _give_up(self, job: PrefillJob, reason: str, message: str) -> None:
        error = ErrorInfo(kind="timeout", message=message, retryable=reason != "deadline")
        failed = PrefillFailed(request_id=job.key.request_id, attempt=job.key.attempt, error=error)
        self._gate.do(lambda: job.reader.send(failed), line=job, point="giving_up")
        self._release(job.key, reason)

    def _release_of(self, reader: Reader, key: AttemptKey, reason: str = "released") -> None:
        """``_release``, asked for by a reader: of its own jobs only."""
        job = self.jobs.get(key)
        if job is not None and job.reader is reader:
            self._release(key, reason)

    def _release(self, key: AttemptKey, reason: str) -> None:
        """Give back all that is held for a job, whatever its state. Idempotent."""
        job = self.jobs.pop(key)
        if job is None:
            return
        job.outbox.close()
        if job.result is not None:
            self._host.pool.unpin(job.result.block_table)
            self._host.on_reclaimed(reason)
        elif job.state is PrefillState.FETCHING and job.task is not None:
            job.task.cancel()
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
