"""KV on its way from a source: tickets become READs, READs become proven blocks.

``SourceDialog`` is what every talk with a source has in common: it can fail at any time, and it ends with a
confirmation. ``IncomingKv`` is the blocks. Blocks under a READ belong to nobody until it is over: when a transfer ends
early they go back to the pool at once if no READ is under way, and are quarantined until it is.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from twopool.engine.block_pool import BlockPool, Reservation
from twopool.engine.requests import AttemptKey
from twopool.engine.source_links import SourceLink
from twopool.engine.tickets import num_units
from twopool.kv_transfer.checksums import ChecksumRequest, units_to_check
from twopool.kv_transfer.fault_points import FaultPoints
from twopool.kv_transfer.interface import FetchHandle, FetchReport, FetchRequest, KvTransport, PeerLink
from twopool.kv_transfer.layout import source_columns
from twopool.protocol.errors import (
    CorruptKvError,
    PeerLostError,
    StaleKvError,
    TicketError,
    TransferError,
    TransferTimeoutError,
    TwopoolError,
)
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import BlockId
from twopool.protocol.messages import Confirm, HandoverReport, KvVerify, PeerRef, ReleasePrefill, Ticket, unpack_ids
from twopool.protocol.token_hash import HashChain, TokenIds

T = TypeVar("T")

CONFIRM_TIMEOUT_S = 1.9
"""Longer than ``sockets.HEARTBEATS`` take to notice a lost source, and less than the 2 s in which memory comes back."""
CONFIRM_REPEAT_S = 0.5
FETCH_TIMEOUT_S = 2.0
SLOWEST_LINK_BYTES_PER_S = 25e6
"""A READ may take ``FETCH_TIMEOUT_S`` and as long as such a link needs for it."""


@dataclass(frozen=True, kw_only=True)
class KvMemory:
    """What incoming KV needs of a worker. ``ranks`` are the shapes of its KV pools, of each rank."""

    pool: BlockPool
    ranks: tuple[KvGeometry, ...]
    transport: KvTransport
    faults: FaultPoints
    verify: KvVerify
    on_fetched: Callable[[FetchReport], None]
    on_verified: Callable[[int], None]
    on_failed: Callable[[PeerRef, TransferError], None]

    @property
    def num_layers(self) -> int:
        return self.ranks[0].num_layers


class SourceDialog:
    """One attempt's talk with one source."""

    def __init__(self, key: AttemptKey, link: SourceLink, faults: FaultPoints) -> None:
        self.key = key
        self.link = link
        self._faults = faults
        loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[Exception] = loop.create_future()
        self._confirmed: asyncio.Future[bool] = loop.create_future()

    def fail(self, error: Exception) -> None:
        """End the dialog: whatever it waits for raises ``error``. The first one counts."""
        settle(self._failure, error)

    async def unless_failed(self, future: "asyncio.Future[T]") -> T:
        """The result of ``future``; raises what ``fail`` was given when that comes first."""
        either: list[asyncio.Future[Any]] = [self._failure, future]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            raise self._failure.result()
        return future.result()

    async def confirm(self, tickets: tuple[Ticket, ...]) -> None:
        """Ask the source, after the reads, whether what was read was right when it was read.

        Asking again is harmless: pins end with the first answer, and blocks reused since give a refusal.
        """
        message = Confirm(request_id=self.key.request_id, attempt=self.key.attempt, tickets=tickets)
        deadline_s = time.monotonic() + CONFIRM_TIMEOUT_S
        while not self._confirmed.done():
            if time.monotonic() >= deadline_s:
                raise TransferTimeoutError(f"{self.link.worker_id} did not confirm within {CONFIRM_TIMEOUT_S:g} s")
            if await self._faults.reached("confirming"):
                self.link.send(message)
            try:
                async with asyncio.timeout(CONFIRM_REPEAT_S):
                    await self.unless_failed(self._confirmed)
            except TimeoutError:
                continue
        if not self._confirmed.result():
            raise StaleKvError(f"{self.link.worker_id} reused the KV before it was read")

    def on_confirmed(self, valid: bool) -> None:
        settle(self._confirmed, valid)

    def release(self) -> None:
        """Tell the source that nothing more is wanted."""
        self.link.send(ReleasePrefill(request_id=self.key.request_id, attempt=self.key.attempt))


@dataclass(eq=False)
class _Span:
    """Tokens that come over together in ``blocks``; layers below ``layer_end`` were offered."""

    start_token: int
    end_token: int
    blocks: list[BlockId]
    layer_end: int = 0


@dataclass(eq=False)
class _Part:
    """One ticket and the READ for it."""

    ticket: Ticket
    span: _Span
    handle: FetchHandle | None = None


class IncomingKv:
    """The KV of ``token_ids`` from ``num_held`` blocks on, as a source offers it ticket by ticket."""

    def __init__(
        self,
        dialog: SourceDialog,
        worker: KvMemory,
        *,
        token_ids: TokenIds,
        chain: HashChain,
        num_held: int,
        reservation: Reservation,
    ) -> None:
        self.reads: list[asyncio.Task[FetchReport]] = []
        self._dialog = dialog
        self._worker = worker
        self._token_ids = token_ids
        self._chain = chain
        self._reservation = reservation
        self._num_held = num_held
        self._spans: list[_Span] = []
        self._parts: list[_Part] = []

    @property
    def num_covered(self) -> int:
        """Tokens that are here or on their way with all of their layers."""
        if self._spans and self._spans[-1].layer_end < self._worker.num_layers:
            return self._spans[-1].start_token
        return self._num_offered

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        return tuple(part.ticket for part in self._parts)

    def offer(self, ticket: Ticket) -> None:
        """Check a ticket and start its READ; whatever is wrong with either ends the dialog."""
        if any(part.ticket == ticket for part in self._parts):
            return  # a source repeats what it has no answer to
        try:
            span = self._span(ticket)
        except TwopoolError as error:
            self._dialog.fail(error)
            return
        part = _Part(ticket, span)
        self._parts.append(part)
        read = asyncio.create_task(self._read(part))
        read.add_done_callback(self._on_read_over)
        self.reads.append(read)

    def take(self) -> list[BlockId]:
        """The blocks, once every READ is over and confirmed: active, one reference each, the caller's."""
        blocks = [block for span in self._spans for block in span.blocks]
        self._worker.pool.fetched(blocks)
        for part in self._parts:
            if part.handle is not None:
                part.handle.release()
        return blocks

    def give_back(self) -> None:
        """End early. What a READ may still write is quarantined until it is over; the reservation is released."""
        for read in self.reads:
            read.cancel()
        for span in self._spans:
            handles = [part.handle for part in self._parts if part.span is span and part.handle is not None]
            _give_back(span.blocks, handles, self._worker.pool)
        self._reservation.release()

    @property
    def _num_offered(self) -> int:
        return self._spans[-1].end_token if self._spans else self._num_held * self._worker.pool.block_size

    def _span(self, ticket: Ticket) -> _Span:
        """Where the ticket's KV goes, if it continues what came before and stands for exactly these tokens."""
        span = self._spans[-1] if self._spans else None
        wanted = (self._num_offered, 0)
        if span is not None and span.layer_end < self._worker.num_layers:
            wanted = (span.start_token, span.layer_end)
        given = (ticket.start_token, ticket.layer_start)
        if given != wanted or (wanted[1] and span is not None and ticket.end_token != span.end_token):
            raise TicketError(f"a ticket for (token, layer) {given} does not continue at {wanted}")
        if not ticket.layer_start < ticket.layer_end <= self._worker.num_layers:
            raise TicketError(f"there are no layers {ticket.layer_start} to {ticket.layer_end}")
        if not ticket.start_token < ticket.end_token <= len(self._token_ids):
            raise TicketError(
                f"a ticket up to token {ticket.end_token} does not continue {len(self._token_ids)} tokens"
            )
        if ticket.source_epoch != self._dialog.link.ref.epoch:
            raise TicketError("a ticket of another life of the source")
        if ticket.token_hash != self._chain.at(ticket.end_token, self._token_ids):
            raise TicketError("the ticket stands for other tokens")
        if span is None or not wanted[1]:
            span = _Span(ticket.start_token, ticket.end_token, self._new_blocks(ticket.end_token))
            self._spans.append(span)
        span.layer_end = ticket.layer_end
        return span

    def _new_blocks(self, end_token: int) -> list[BlockId]:
        """Blocks for the tokens up to ``end_token`` that no block covers yet."""
        have = self._num_held + sum(len(span.blocks) for span in self._spans)
        need = -(-end_token // self._worker.pool.block_size)
        return self._worker.pool.allocate_for_fetch(need - have, self._reservation)

    async def _read(self, part: _Part) -> FetchReport:
        kv_link = self._dialog.link.kv_link
        if kv_link is None:
            raise PeerLostError(f"{self._dialog.link.worker_id} is gone")
        ticket, blocks = part.ticket, np.asarray(part.span.blocks, dtype=np.int32)
        part.handle = self._worker.transport.fetch(
            kv_link,
            FetchRequest(
                remote_block_ids=unpack_ids(ticket.block_ids),
                local_block_ids=blocks,
                start_token=ticket.start_token,
                end_token=ticket.end_token,
                layer_start=ticket.layer_start,
                layer_end=ticket.layer_end,
            ),
            timeout_s=FETCH_TIMEOUT_S + len(blocks) * self._block_bytes / SLOWEST_LINK_BYTES_PER_S,
        )
        report = await part.handle.wait()
        self._worker.on_fetched(report)
        if self._worker.verify != "off":
            await self._verify(part, kv_link)
        return report

    @property
    def _block_bytes(self) -> int:
        return sum(rank.block_bytes for rank in self._worker.ranks)

    async def _verify(self, part: _Part, kv_link: PeerLink) -> None:
        """Compare the checksums the source sent with those of what landed."""
        ticket, ranks = part.ticket, self._worker.ranks
        sources = [rank.geometry for rank in kv_link.peer.ranks]
        unit_tokens = min(ranks[0].block_size, sources[0].block_size)
        units = units_to_check(self._worker.verify, num_units(ticket, unit_tokens))
        if not np.array_equal(units, unpack_ids(ticket.checked)):
            raise TicketError("the checksums asked for did not come with the ticket")
        theirs = np.frombuffer(ticket.checksums, dtype="<u8")
        num_heads = sum(source.num_kv_heads_local for source in sources)
        if len(theirs) != len(units) * num_heads:
            raise TicketError(f"{len(theirs)} checksums for {len(units)} units of {num_heads} heads")
        ours = await self._worker.transport.checksums(
            ChecksumRequest(
                block_ids=np.asarray(part.span.blocks, dtype=np.int32),
                start_token=ticket.start_token,
                unit_tokens=unit_tokens,
                layers=(ticket.layer_start, ticket.layer_end),
                units=units,
            )
        )
        columns = source_columns(ranks, sources, spread=self._worker.transport.spread)
        wrong = (ours != theirs.reshape(len(units), num_heads)[:, columns]).any(axis=1)
        if wrong.any():
            raise CorruptKvError(f"{int(wrong.sum())} of {len(units)} checked units arrived changed")
        token_bytes = self._block_bytes // (ranks[0].block_size * self._worker.num_layers)
        self._worker.on_verified(len(units) * unit_tokens * token_bytes * (ticket.layer_end - ticket.layer_start))

    def _on_read_over(self, read: "asyncio.Task[FetchReport]") -> None:
        """A READ that failed ends the dialog at once, whatever else it waits for."""
        error = None if read.cancelled() else read.exception()
        if isinstance(error, Exception):
            self._dialog.fail(error)


def _give_back(blocks: list[BlockId], handles: list[FetchHandle], pool: BlockPool) -> None:
    """Free ``blocks``, or quarantine them until the last READ that may still write them is over."""
    open_handles = [handle for handle in handles if not handle.settled.done()]
    for handle in handles:
        handle.release()
    if not open_handles:
        pool.abandon_fetch(blocks)
        return
    pool.quarantine(blocks)
    left = len(open_handles)

    def one_settled(_: "asyncio.Future[None]") -> None:
        nonlocal left
        left -= 1
        if not left:
            pool.end_quarantine(blocks)

    for handle in open_handles:
        handle.settled.add_done_callback(one_settled)


def handover_report(
    reports: "list[FetchReport]", exposed_s: float, exposed_read_s: float, *, held_tokens: int
) -> HandoverReport:
    """What the READs took; ``exposed_s`` of it, in all, and ``exposed_read_s``, for READs, nothing hid."""
    transfer_s = sum(report.transfer_s for report in reports)
    return HandoverReport(
        num_bytes=sum(report.num_bytes for report in reports),
        num_converted_bytes=sum(report.num_converted_bytes for report in reports),
        num_ranges=sum(report.num_ranges for report in reports),
        num_posts=sum(report.num_posts for report in reports),
        transfer_s=transfer_s,
        exposed_s=exposed_s,
        hidden_s=max(transfer_s - exposed_read_s, 0.0),
        held_tokens=held_tokens,
    )


def settle(future: "asyncio.Future[T]", value: T) -> None:
    """Give ``future`` its result unless it has one."""
    if not future.done():
        future.set_result(value)
