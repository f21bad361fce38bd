"""Getting a prompt's KV and first tokens from a prefill worker: the states before RUNNING.

::

    PREFILLING ──first KvReady──► FETCHING ──all read, first tokens here──► CONFIRMING ──valid──► (RUNNING)
        │                            │                                          │
        └────────────────────────────┴── busy, failed, source lost, deadline, cancelled ──► (over)

The blocks are ``IncomingKv``'s until they are proven.
"""

import asyncio
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass

from twopool.engine.block_pool import Reservation
from twopool.engine.incoming import IncomingKv, KvMemory, SourceDialog, handover_report, settle
from twopool.engine.requests import EngineRequest
from twopool.engine.source_links import SourceLink, SourceReply
from twopool.protocol.errors import OverloadedError, PeerLostError, TicketError, TransferTimeoutError, TwopoolError
from twopool.protocol.ids import BlockId, RouterId
from twopool.protocol.messages import (
    Confirmed,
    ErrorInfo,
    FirstTokens,
    HandoverReport,
    KvReady,
    Prefill,
    PrefillAccepted,
    PrefillBusy,
    PrefillFailed,
    PrefixHint,
    PrefixMissing,
    TokenDelta,
    pack_ids,
)
from twopool.protocol.token_hash import HashChain, TokenIds

ACCEPT_TIMEOUT_S = 1.9
"""Like ``CONFIRM_TIMEOUT_S``: longer than a lost source takes to be noticed, so that the loss is what is reported."""


class HandoverState(enum.Enum):
    PREFILLING = "prefilling"
    FETCHING = "fetching"
    CONFIRMING = "confirming"


class SourceBusyError(OverloadedError):
    """The prefill worker has no room now."""


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


class Handover(SourceDialog):
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
        prefix: PrefixHint | None,
        deadline_s: float,
        link: SourceLink,
        worker: KvMemory,
    ) -> None:
        super().__init__(request.key, link, worker.faults)
        self.state = HandoverState.PREFILLING
        self._request = request
        self._router_id = router_id
        self._token_ids = token_ids
        self._held = list(held)
        self._reservation = reservation
        self._prefix = prefix
        self._deadline_s = deadline_s
        self._worker = worker
        self._kv = IncomingKv(
            self, worker, token_ids=token_ids, chain=chain, num_held=len(self._held), reservation=reservation
        )
        loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] = loop.create_future()
        self._first_tokens: asyncio.Future[tuple[TokenDelta, ...]] = loop.create_future()

    def on_reply(self, message: SourceReply) -> None:
        match message:
            case PrefillAccepted():
                settle(self._accepted, None)
            case PrefillBusy():
                self.fail(SourceBusyError("the prefill worker has no room"))
            case PrefillFailed():
                self.fail(SourceFailedError(message.error))
            case KvReady():
                self.state = HandoverState.FETCHING
                self._kv.offer(message.ticket)
            case FirstTokens():
                settle(self._first_tokens, message.deltas)
            case Confirmed():
                self.on_confirmed(message.valid)
            case PrefixMissing():
                self.fail(TicketError("the prefill worker answers what it was not asked"))

    async def run(self) -> HandedOver:
        """Raises ``SourceBusyError``, ``SourceFailedError``, ``TransferError``, ``TimeoutError``.

        However it ends, by cancellation too, everything this handover held is given back or quarantined, and the
        prefill worker is told.
        """
        handed_over = False
        try:
            if await self._faults.reached("asking"):
                self._ask()
            try:
                async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                    await self.unless_failed(self._accepted)
            except TimeoutError:
                raise TransferTimeoutError(f"{self.link.worker_id} did not answer in {ACCEPT_TIMEOUT_S:g} s") from None
            await self._faults.reached("prefilling")
            deltas = await self.unless_failed(self._first_tokens)
            known_s = time.monotonic()
            await self._faults.reached("fetching")
            reports = [await self.unless_failed(read) for read in self._kv.reads]
            read_s = time.monotonic()
            if self._kv.num_covered != len(self._token_ids):
                raise TicketError("the prefill worker did not offer the whole prompt")
            self.state = HandoverState.CONFIRMING
            await self.confirm(self._kv.tickets)
            block_table = self._held + self._kv.take()
            handed_over = True
            report = handover_report(
                reports,
                time.monotonic() - known_s,
                read_s - known_s,
                held_tokens=len(self._held) * self._worker.pool.block_size,
            )
            return HandedOver(block_table, self._reservation, deltas, report)
        finally:
            if not handed_over:
                self._give_back()

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
                skip_tokens=self._kv.num_covered,
                prefix=self._prefix,
                verify=self._worker.verify,
                timeout_s=max(self._deadline_s - time.monotonic(), 0.001),
            )
        )
        if not sent:
            raise PeerLostError(f"{self.link.worker_id} does not take messages")

    def _give_back(self) -> None:
        self.release()
        self._kv.give_back()
        if self._held:
            self._worker.pool.release(self._held)
