"""Getting a prompt's KV and first tokens from a prefill worker: the states before RUNNING.

::

    PREFILLING ──first KvReady──► FETCHING ──all read, first tokens here──► CONFIRMING ──valid──► (RUNNING)
        │                            │                                          │
        └────────────────────────────┴── busy, failed, source lost, deadline, cancelled ──► (over)

Blocks under a READ belong to nobody until it is over: when a handover ends early they go back to the pool at once if
no READ is under way, and are quarantined until it is.
"""

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from twopool.engine.block_pool import BlockPool, Reservation
from twopool.engine.requests import EngineRequest
from twopool.engine.source_links import SourceLink, SourceReply
from twopool.kv_transfer.fault_points import FaultPoints
from twopool.kv_transfer.interface import FetchHandle, FetchReport, FetchRequest, KvTransport
from twopool.protocol.errors import OverloadedError, TransferError, TwopoolError
from twopool.protocol.ids import BlockId, RouterId
from twopool.protocol.messages import (
    Confirm,
    Confirmed,
    ErrorInfo,
    FirstTokens,
    HandoverReport,
    KvReady,
    Prefill,
    PrefillAccepted,
    PrefillBusy,
    PrefillFailed,
    ReleasePrefill,
    Ticket,
    TokenDelta,
    pack_ids,
    unpack_ids,
)
from twopool.protocol.token_hash import HashChain, TokenIds

logger = logging.getLogger(__name__)

T = TypeVar("T")

ACCEPT_TIMEOUT_S = 10.0
FETCH_TIMEOUT_S = 20.0
CONFIRM_TIMEOUT_S = 5.0


class HandoverState(enum.Enum):
    PREFILLING = "prefilling"
    FETCHING = "fetching"
    CONFIRMING = "confirming"


class SourceBusyError(OverloadedError):
    """The prefill worker has no room now."""


class SourceLostError(TransferError):
    """The prefill worker is gone, or its copy of the KV is."""


class SourceFailedError(TwopoolError):
    """The prefill worker gave the attempt up; ``info`` says why."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message, param=info.param)
        self.info = info


@dataclass(frozen=True)
class HandedOver:
    """A prompt whose KV is here and proven: ``block_table`` (active, one reference, the receiver's) holds all of it."""

    block_table: list[BlockId]
    reservation: Reservation
    deltas: tuple[TokenDelta, ...]
    report: HandoverReport


@dataclass(eq=False)
class _Part:
    """One ticket's share: the destination blocks that are new with it, and the READ into them."""

    ticket: Ticket
    blocks: list[BlockId]
    handle: FetchHandle | None = None


class Handover:
    """One request's handover. ``held`` are the prefix blocks this worker has already (one reference each)."""

    def __init__(
        self,
        *,
        request: EngineRequest,
        router_id: RouterId,
        token_ids: TokenIds,
        chain: HashChain,
        held: Sequence[BlockId],
        reservation: Reservation,
        deadline_s: float,
        link: SourceLink,
        pool: BlockPool,
        transport: KvTransport,
        faults: FaultPoints,
        on_fetched: Callable[[FetchReport], None],
    ) -> None:
        self.state = HandoverState.PREFILLING
        self.key = request.key
        self._request = request
        self._router_id = router_id
        self._token_ids = token_ids
        self._chain = chain
        self._held = list(held)
        self._reservation = reservation
        self._deadline_s = deadline_s
        self.link = link
        self._pool = pool
        self._transport = transport
        self._faults = faults
        self._on_fetched = on_fetched
        loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] = loop.create_future()
        self._first_tokens: asyncio.Future[tuple[TokenDelta, ...]] = loop.create_future()
        self._confirmed: asyncio.Future[bool] = loop.create_future()
        self._failure: asyncio.Future[Exception] = loop.create_future()
        self._parts: list[_Part] = []
        self._reads: list[asyncio.Task[FetchReport]] = []
        self._num_covered = len(self._held) * pool.block_size

    # --- what the prefill worker says ---

    def on_reply(self, message: SourceReply) -> None:
        match message:
            case PrefillAccepted():
                _settle(self._accepted, None)
            case PrefillBusy():
                self.fail(SourceBusyError("the prefill worker has no room"))
            case PrefillFailed():
                self.fail(SourceFailedError(message.error))
            case KvReady():
                self._on_kv_ready(message.ticket)
            case FirstTokens():
                _settle(self._first_tokens, message.deltas)
            case Confirmed():
                _settle(self._confirmed, message.valid)

    def fail(self, error: Exception) -> None:
        """End the handover: whatever it waits for, ``run`` raises ``error``. The first one counts."""
        _settle(self._failure, error)

    def _on_kv_ready(self, ticket: Ticket) -> None:
        try:
            self._check(ticket)
            part = _Part(ticket, self._destination(ticket))
        except TwopoolError as error:
            self.fail(error)
            return
        self._parts.append(part)
        self.state = HandoverState.FETCHING
        read = asyncio.create_task(self._read(part))
        read.add_done_callback(self._on_read_over)
        self._reads.append(read)

    def _check(self, ticket: Ticket) -> None:
        """The ticket continues what came before and stands for exactly this request's tokens."""
        if ticket.start_token != self._num_covered or not ticket.start_token < ticket.end_token <= len(self._token_ids):
            raise TransferError(
                f"ticket for tokens {ticket.start_token} to {ticket.end_token} does not continue at {self._num_covered}"
            )
        if ticket.source_epoch != self.link.ref.epoch:
            raise SourceLostError("ticket of another life of the prefill worker")
        if ticket.token_hash != self._chain.at(ticket.end_token, self._token_ids):
            raise TransferError("ticket stands for other tokens")

    def _destination(self, ticket: Ticket) -> list[BlockId]:
        """New blocks for the part of the ticket that no block covers yet."""
        have = len(self._held) + sum(len(part.blocks) for part in self._parts)
        need = -(-ticket.end_token // self._pool.block_size)
        blocks = self._pool.allocate_for_fetch(need - have, self._reservation)
        self._num_covered = ticket.end_token
        return blocks

    async def _read(self, part: _Part) -> FetchReport:
        kv_link = self.link.kv_link
        if kv_link is None:
            raise SourceLostError(f"{self.link.worker_id} is gone")
        ticket = part.ticket
        part.handle = self._transport.fetch(
            kv_link,
            FetchRequest(
                remote_block_ids=unpack_ids(ticket.block_ids),
                local_block_ids=np.asarray(part.blocks, dtype=np.int32),
                start_token=ticket.start_token,
                end_token=ticket.end_token,
                layer_start=ticket.layer_start,
                layer_end=ticket.layer_end,
            ),
            timeout_s=FETCH_TIMEOUT_S,
        )
        report = await part.handle.wait()
        self._on_fetched(report)
        return report

    def _on_read_over(self, read: "asyncio.Task[FetchReport]") -> None:
        """A READ that failed ends the handover at once, whatever else it waits for."""
        error = None if read.cancelled() else read.exception()
        if isinstance(error, Exception):
            self.fail(error)

    # --- the course of it ---

    async def run(self) -> HandedOver:
        """Raises ``SourceBusyError``, ``SourceFailedError``, ``SourceLostError``, ``TransferError``, ``TimeoutError``.

        However it ends, by cancellation too, everything this handover held is given back or quarantined, and the
        prefill worker is told.
        """
        handed_over = False
        try:
            self._ask()
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                await self._unless_failed(self._accepted)
            await self._faults.reached("prefilling")
            deltas = await self._unless_failed(self._first_tokens)
            known_s = time.monotonic()
            await self._faults.reached("fetching")
            reports = [await self._unless_failed(read) for read in self._reads]
            if self._num_covered != len(self._token_ids):
                raise TransferError("the prefill worker did not offer the whole prompt")
            await self._confirm()
            block_table = self._take_blocks()
            handed_over = True
            report = _report(reports, time.monotonic() - known_s)
            return HandedOver(block_table, self._reservation, deltas, report)
        finally:
            if not handed_over:
                self._give_back()

    async def _unless_failed(self, future: "asyncio.Future[T]") -> T:
        """The result of ``future``; raises what ``fail`` was given when that comes first."""
        either: list[asyncio.Future[Any]] = [self._failure, future]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            raise self._failure.result()
        return future.result()

    def _ask(self) -> None:
        request = self._request
        sent = self.link.send(
            Prefill(
                request_id=self.key.request_id,
                attempt=self.key.attempt,
                source_epoch=self.link.ref.epoch,
                router_id=self._router_id,
                token_ids=pack_ids(self._token_ids),
                num_prompt_tokens=len(request.prompt_ids),
                choices=tuple(choice.choice for choice in request.choices),
                sampling=request.sampling,
                salt=request.salt,
                skip_tokens=self._num_covered,
                timeout_s=max(self._deadline_s - time.monotonic(), 0.001),
            )
        )
        if not sent:
            raise SourceLostError(f"{self.link.worker_id} does not take messages")

    async def _confirm(self) -> None:
        """Ask the source, after the reads, whether what was read was right when it was read."""
        self.state = HandoverState.CONFIRMING
        await self._faults.reached("confirming")
        self.link.send(
            Confirm(
                request_id=self.key.request_id,
                attempt=self.key.attempt,
                tickets=tuple(part.ticket for part in self._parts),
            )
        )
        async with asyncio.timeout(CONFIRM_TIMEOUT_S):
            valid = await self._unless_failed(self._confirmed)
        if not valid:
            raise SourceLostError("the prefill worker reused the KV before it was read")

    def _take_blocks(self) -> list[BlockId]:
        fetched = [block for part in self._parts for block in part.blocks]
        self._pool.fetched(fetched)
        for part in self._parts:
            if part.handle is not None:
                part.handle.release()
        return self._held + fetched

    def _give_back(self) -> None:
        self.link.send(ReleasePrefill(request_id=self.key.request_id, attempt=self.key.attempt))
        for read in self._reads:
            read.cancel()
        for part in self._parts:
            _give_back(part, self._pool)
        if self._held:
            self._pool.release(self._held)
        self._reservation.release()
        self.link.reset_if_closed()


def _give_back(part: _Part, pool: BlockPool) -> None:
    """Free a part's blocks, or quarantine them until the READ that may still write them is over."""
    if part.handle is None or part.handle.settled.done():
        pool.abandon_fetch(part.blocks)
        return
    part.handle.cancel()
    pool.quarantine(part.blocks)
    part.handle.settled.add_done_callback(lambda _: pool.end_quarantine(part.blocks))
    part.handle.release()


def _report(reports: Sequence[FetchReport], exposed_s: float) -> HandoverReport:
    return HandoverReport(
        num_bytes=sum(report.num_bytes for report in reports),
        num_ranges=sum(report.num_ranges for report in reports),
        num_posts=sum(report.num_posts for report in reports),
        transfer_s=sum(report.transfer_s for report in reports),
        exposed_s=exposed_s,
    )


def _settle(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)
