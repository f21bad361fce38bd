"""The decode role: take requests from routers, get their KV (from a prefill worker or by computing it), run them.

::

    QUEUED ─► PREFILLING ─► FETCHING ─► CONFIRMING ─► RUNNING ─► DONE
      └──────────── local prefill ──────────────────────┘

The three middle states are ``Handover``'s; RUNNING, a local prefill and preemption are the engine's. A task serves a
request until it runs; from then on steps drive it. A job leaves ``jobs`` when the router has been told its end.
"""

import asyncio
import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from twopool.decode.handover import Handover, SourceBusyError, SourceFailedError
from twopool.engine.fault_gate import FaultGate
from twopool.engine.jobs import JobTable
from twopool.engine.prefix_fetch import PrefixFetch, plan_prefix_fetch
from twopool.engine.reports import error_info, with_reports
from twopool.engine.requests import AttemptKey, EngineRequest, LayerProgress, LocalPrefill, StepOutput
from twopool.engine.router_link import RequestMessage
from twopool.engine.source_links import SourceLink, SourceReply
from twopool.engine.source_server import Reader, SourceRequest
from twopool.engine.worker import WorkerHost
from twopool.protocol.errors import ContextLengthError, OverloadedError, PeerLostError, TransferError, TwopoolError
from twopool.protocol.ids import BlockId, ChoiceIndex, RouterId, WorkerId
from twopool.protocol.messages import (
    AttemptFailed,
    Busy,
    Cancel,
    CancelChoice,
    Confirm,
    ErrorInfo,
    FetchPrefix,
    Generate,
    KvReady,
    PeerInfo,
    PeerRef,
    Prefill,
    PrefillFailed,
    PrefillReport,
    PrefixHint,
    ReleasePrefill,
    ResendFrom,
    TokenDelta,
    Tokens,
    unpack_ids,
)
from twopool.protocol.token_hash import HashChain, TokenIds

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DecodeJob:
    """One attempt this worker was granted. ``dialog``, if KV comes from a peer, and ``task`` exist until it runs.

    ``cancelled_choices`` the router gave up before the engine had them. ``peer_tokens`` of its prompt were read from a
    peer before it was prefilled here.
    """

    router_id: RouterId
    key: AttemptKey
    request: EngineRequest
    deadline_s: float
    dialog: Handover | PrefixFetch | None = None
    task: "asyncio.Task[None] | None" = None
    cancelled_choices: set[ChoiceIndex] = field(default_factory=set)
    peer_tokens: int = 0


class DecodeRole:
    """Serves ``Generate``, ``Cancel``, ``CancelChoice`` and ``ResendFrom`` of any number of routers."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self.jobs: JobTable[DecodeJob] = JobTable()
        self._draining = False
        self._gate = FaultGate(host.faults)

    @property
    def expects_readers(self) -> bool:
        return len(self._host.prefixes) > 0

    def start_draining(self) -> None:
        self._draining = True

    # --- from routers ---

    def on_request_message(self, router_id: RouterId, message: RequestMessage) -> None:
        match message:
            case Generate():
                self._on_generate(router_id, message)
            case Cancel():
                self._cancel_up_to(message)
            case CancelChoice():
                self._on_cancel_choice(message)
            case ResendFrom():
                self._on_resend(router_id, message)

    def on_peers(self, router_id: RouterId, peers: tuple[PeerInfo, ...]) -> None:
        self._host.sources.listed(router_id, peers)

    def on_router_lost(self, router_id: RouterId) -> None:
        for job in [job for job in self.jobs.all() if job.router_id == router_id]:
            self._drop(job)
        self._host.sources.listed(router_id, ())

    def _on_generate(self, router_id: RouterId, message: Generate) -> None:
        self._cancel_up_to(message)
        key = AttemptKey(message.request_id, message.attempt)
        job = DecodeJob(
            router_id=router_id,
            key=key,
            request=EngineRequest(
                key=key,
                prompt_ids=unpack_ids(message.prompt_ids),
                choices=message.choices,
                sampling=message.sampling,
                salt=message.salt,
            ),
            deadline_s=time.monotonic() + message.timeout_s,
        )
        self._host.engine.expect(job.request)
        self.jobs.add(key, job)
        job.task = asyncio.create_task(self._serve(job, message.prefill, message.prefix))

    async def _serve(self, job: DecodeJob, prefill: PeerRef | None, prefix: PrefixHint | None) -> None:
        """Bring a job to RUNNING, or tell the router why not."""
        blame = prefill.worker_id if prefill else self._host.worker_id
        try:
            if self._draining:
                raise OverloadedError("this worker is draining")
            await self._host.faults.reached("queued")
            if prefill is None:
                await self._prefill_here(job, prefix)
            else:
                async with asyncio.timeout(job.deadline_s - time.monotonic()):
                    await self._hand_over(job, prefill, prefix)
        except SourceBusyError:
            self._end_busy(job, blame)
        except OverloadedError:
            self._end_busy(job, self._host.worker_id)
        except SourceFailedError as error:
            self._host.count_failure("source")
            self._end_failed(job, error.info, blame)
        except PeerLostError as error:
            self._host.on_transfer_failed(prefill, error)
            self._end_failed(job, ErrorInfo(kind="peer_lost", message=error.message, retryable=True), blame)
        except TimeoutError:
            self._host.count_failure("timeout")
            error_text = "handover did not finish in time"
            self._end_failed(job, ErrorInfo(kind="timeout", message=error_text, retryable=True), blame)
        except TransferError as error:
            self._host.on_transfer_failed(prefill, error)
            self._end_failed(job, error_info(error), blame)
        except (TwopoolError, ValueError) as error:
            self._end_failed(job, error_info(error), None)
        finally:
            job.dialog = None

    async def _prefill_here(self, job: DecodeJob, prefix: PrefixHint | None) -> None:
        """Submit to the engine, with the KV a peer is thought to have read first."""
        request = job.request
        self._host.engine.check(request)
        held: list[BlockId] = []
        link = self._host.sources.get(prefix.source) if prefix else None
        if prefix is not None and link is not None:
            fetch = job.dialog = plan_prefix_fetch(
                key=job.key,
                token_ids=self._token_ids(request),
                salt=request.salt,
                num_tokens=prefix.num_tokens,
                link=link,
                worker=self._host.kv_memory,
            )
            if fetch is not None:
                held = await fetch.run()
                job.peer_tokens = fetch.num_read_tokens
                self._host.transfer_stats.kv_prefix_tokens += job.peer_tokens
        try:
            self._host.engine.submit(request)
        finally:
            self._host.pool.release(held)
        self._host.transfer_stats.local_prefills += 1

    async def _hand_over(self, job: DecodeJob, prefill: PeerRef, prefix: PrefixHint | None) -> None:
        link = self._host.sources.get(prefill)
        if link is None:
            raise PeerLostError(f"no link to {prefill.worker_id}")
        handover = job.dialog = self._start_handover(job, link, prefix)
        done = await handover.run()
        job.dialog = None
        self._host.on_handed_over(done.report)
        deltas = (with_reports(done.deltas[0], handover=done.report), *done.deltas[1:])
        self._send_tokens(job.router_id, deltas)
        self._host.engine.adopt(job.request, block_table=done.block_table, first=deltas, reservation=done.reservation)
        for choice in job.cancelled_choices:
            self._host.engine.cancel_choice(job.key, choice)

    @staticmethod
    def _token_ids(request: EngineRequest) -> TokenIds:
        """Prompt and, of a request that goes on, the output of its first choice."""
        outputs = unpack_ids(request.choices[0].output_ids)
        return np.concatenate([request.prompt_ids, outputs]) if len(outputs) else request.prompt_ids

    def _start_handover(self, job: DecodeJob, link: SourceLink, prefix: PrefixHint | None) -> Handover:
        """Reserve the whole request's blocks; the prefix cache's count among them. Raises ``OverloadedError``."""
        request, pool = job.request, self._host.pool
        token_ids = self._token_ids(request)
        if len(token_ids) >= self._host.engine.max_model_len:
            raise ContextLengthError(f"{len(token_ids)} tokens leave no room in {self._host.engine.max_model_len}")
        reservation = self._host.engine.reserve(len(token_ids), len(request.choices))
        chain = HashChain(request.salt)
        chain.extend(token_ids)
        held = pool.match(chain, token_ids, len(token_ids), reservation)
        return Handover(
            request=request,
            router_id=job.router_id,
            token_ids=token_ids,
            chain=chain,
            held=held,
            reservation=reservation,
            prefix=prefix,
            deadline_s=job.deadline_s,
            link=link,
            worker=self._host.kv_memory,
        )

    def _on_cancel_choice(self, message: CancelChoice) -> None:
        key = AttemptKey(message.request_id, message.attempt)
        job = self.jobs.get(key)
        if job is not None and job.dialog is not None:
            job.cancelled_choices.add(message.choice)
        self._host.engine.cancel_choice(key, message.choice)

    def _on_resend(self, router_id: RouterId, message: ResendFrom) -> None:
        key = AttemptKey(message.request_id, message.attempt)
        delta = self._host.engine.outputs(key, message.choice, message.index)
        if delta is not None:
            self._send_tokens(router_id, (delta,))
        elif key not in self.jobs:
            error = ErrorInfo(kind="internal", message="the attempt is not here any more", retryable=True)
            self._send_failed(router_id, key, error, None)

    def _cancel_up_to(self, message: Cancel | Generate) -> None:
        """Drop this request's attempts that ``message`` ends or replaces."""
        limit = message.attempt + 1 if isinstance(message, Cancel) else message.attempt
        for job in self.jobs.all():
            if job.key.request_id == message.request_id and job.key.attempt < limit:
                self._drop(job)

    # --- from sources ---

    def on_source_reply(self, source: PeerRef, message: SourceReply) -> None:
        subject = message.ticket if isinstance(message, KvReady) else message
        job = self.jobs.get(AttemptKey(subject.request_id, subject.attempt))
        if job is not None and job.dialog is not None and job.dialog.link.ref == source:
            job.dialog.on_reply(message)

    def on_source_lost(self, source: PeerRef) -> None:
        for job in self.jobs.all():
            if job.dialog is not None and job.dialog.link.ref == source:
                job.dialog.fail(PeerLostError(f"{source.worker_id} is gone"))

    # --- from readers: a decode worker offers the prefixes it has, but it prefills for nobody ---

    def on_source_request(self, reader: Reader, message: SourceRequest) -> None:
        match message:
            case Prefill():
                error = ErrorInfo(kind="internal", message="a decode worker prefills for nobody", retryable=True)
                reader.send(PrefillFailed(request_id=message.request_id, attempt=message.attempt, error=error))
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
                key = AttemptKey(message.request_id, message.attempt)
                self._gate.do(lambda: self._host.prefixes.on_release(reader, key), line=reader)

    def _on_confirm(self, reader: Reader, message: Confirm, *, refused: bool = False) -> None:
        if not self._host.prefixes.on_confirm(reader, message, refused=refused):
            self._host.confirm(reader, message, refused)

    def on_reader_lost(self, reader: Reader) -> None:
        self._host.prefixes.on_reader_lost(reader)

    # --- from the engine ---

    def on_step(self, output: StepOutput) -> None:
        prefills = {local.key: self._prefill_report(local) for local in output.local_prefills}
        by_router: defaultdict[RouterId, list[TokenDelta]] = defaultdict(list)
        for delta in output.deltas:
            key = AttemptKey(delta.request_id, delta.attempt)
            job = self.jobs.get(key)
            if job is not None:
                report = prefills.pop(key, None)
                by_router[job.router_id].append(with_reports(delta, prefill=report) if report else delta)
        for router_id, deltas in by_router.items():
            self._send_tokens(router_id, tuple(deltas))
        for key in output.finished:
            self.jobs.pop(key)
        for key, error in output.failed:
            job = self.jobs.get(key)
            if job is not None:
                self._end_failed(job, error, None)

    def on_layers(self, progress: LayerProgress) -> None:
        """Nobody waits for the layers of a local prefill."""

    def _prefill_report(self, local: LocalPrefill) -> PrefillReport:
        job = self.jobs.get(local.key)
        return PrefillReport(
            worker_id=self._host.worker_id,
            cached_tokens=local.cached_tokens,
            queue_s=local.queue_s,
            compute_s=local.compute_s,
            peer_tokens=0 if job is None else min(job.peer_tokens, local.cached_tokens),
        )

    # --- lifetimes ---

    def on_tick(self, now_s: float) -> None:
        for job in self.jobs.all():
            if now_s > job.deadline_s:
                self._drop(job)
                error = ErrorInfo(kind="timeout", message="the request did not finish in time")
                self._send_failed(job.router_id, job.key, error, None)

    async def close(self) -> None:
        self._gate.close()
        tasks = [job.task for job in self.jobs.all() if job.task]
        for job in self.jobs.all():
            self._drop(job)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _drop(self, job: DecodeJob) -> None:
        """Stop a job in whatever state it is and give back what it holds; the router is told nothing."""
        self.jobs.pop(job.key)
        if job.task is not None:
            job.task.cancel()
        self._host.engine.cancel(job.key)
        logger.debug("dropped", extra={"request_id": job.key.request_id, "attempt": job.key.attempt})

    def _end_busy(self, job: DecodeJob, worker_id: WorkerId) -> None:
        if self.jobs.pop(job.key) is not None:
            busy = Busy(request_id=job.key.request_id, attempt=job.key.attempt, worker_id=worker_id)
            self._host.routers.send(job.router_id, busy)

    def _end_failed(self, job: DecodeJob, error: ErrorInfo, blame: WorkerId | None) -> None:
        if self.jobs.pop(job.key) is not None:
            logger.warning("attempt failed: %s", error.message, extra={"request_id": job.key.request_id})
            self._send_failed(job.router_id, job.key, error, blame)

    def _send_failed(self, router_id: RouterId, key: AttemptKey, error: ErrorInfo, blame: WorkerId | None) -> None:
        self._host.routers.send(
            router_id, AttemptFailed(request_id=key.request_id, attempt=key.attempt, error=error, blame=blame)
        )

    def _send_tokens(self, router_id: RouterId, deltas: tuple[TokenDelta, ...]) -> None:
        self._host.routers.send(router_id, Tokens(deltas))
