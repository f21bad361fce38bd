"""Reading a prefix that another worker holds already, before the rest is computed here.

A fetch never fails a request: whatever it does not bring is computed.
"""

import asyncio
import logging

import numpy as np

from twopool.engine.block_pool import Reservation
from twopool.engine.incoming import IncomingKv, KvMemory, SourceDialog, settle
from twopool.engine.requests import AttemptKey
from twopool.engine.source_links import SourceLink, SourceReply
from twopool.protocol.errors import OverloadedError, PeerLostError, TransferError, TransferTimeoutError
from twopool.protocol.ids import BlockId
from twopool.protocol.messages import Confirmed, FetchPrefix, KvReady, PrefixMissing, pack_ids
from twopool.protocol.token_hash import HashChain, TokenIds

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 1.0


class PrefixFetch(SourceDialog):
    """One prefix from one source::

    ASKED ──KvReady──► READING ──all landed──► CONFIRMING ──valid──► (blocks published)
      └──missing, lost, deadline, cancelled──► (nothing)
    """

    def __init__(
        self,
        *,
        key: AttemptKey,
        token_ids: TokenIds,
        chain: HashChain,
        held: list[BlockId],
        reservation: Reservation,
        salt: bytes,
        link: SourceLink,
        worker: KvMemory,
    ) -> None:
        """``held`` are the blocks of ``token_ids`` this worker has, one reference each, which ``run`` hands on."""
        super().__init__(key, link, worker.faults)
        self._worker = worker
        self._token_ids = token_ids
        self._chain = chain
        self._held = held
        self._salt = salt
        self._kv = IncomingKv(
            self, worker, token_ids=token_ids, chain=chain, num_held=len(held), reservation=reservation
        )
        self._reservation = reservation
        self.num_read_tokens = 0
        self._answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def on_reply(self, message: SourceReply) -> None:
        match message:
            case KvReady():
                self._kv.offer(message.ticket)
                settle(self._answered, True)
            case PrefixMissing():
                settle(self._answered, False)
            case Confirmed():
                self.on_confirmed(message.valid)
            case _:
                logger.warning("unexpected %s", type(message).__name__, extra={"worker_id": self.link.worker_id})

    async def run(self) -> list[BlockId]:
        """All blocks of the prefix this worker has now, published; one reference each, the caller's.

        A transfer that fails brings nothing, and ``on_failed`` is told; only cancelling raises.
        """
        try:
            return self._held + await self._fetch()
        except TransferError as error:
            self._worker.on_failed(self.link.ref, error)
            return self._held
        except BaseException:
            self._worker.pool.release(self._held)
            raise

    async def _fetch(self) -> list[BlockId]:
        done = False
        try:
            found = await self._ask()
            await self._faults.reached("prefix_fetching")
            for read in list(self._kv.reads):
                await self.unless_failed(read)
            if found:
                await self.confirm(self._kv.tickets)
            blocks = self._kv.take()
            self._reservation.release()
            done = True
        finally:
            if not done:
                self.release()
                self._kv.give_back()
        self.num_read_tokens = len(blocks) * self._worker.pool.block_size
        self._worker.pool.publish([*self._held, *blocks], self._chain, self._token_ids, self._kv.num_covered)
        return blocks

    async def _ask(self) -> bool:
        """Whether the source has it. Raises ``PeerLostError``, ``TransferTimeoutError``."""
        if await self._faults.reached("prefix_asking"):
            self._send_question()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self.unless_failed(self._answered)
        except TimeoutError:
            raise TransferTimeoutError(f"{self.link.worker_id} did not answer within {ANSWER_TIMEOUT_S:g} s") from None

    def _send_question(self) -> None:
        start_token = len(self._held) * self._worker.pool.block_size
        sent = self.link.send(
            FetchPrefix(
                request_id=self.key.request_id,
                attempt=self.key.attempt,
                source_epoch=self.link.ref.epoch,
                token_ids=pack_ids(self._token_ids),
                salt=self._salt,
                start_token=start_token,
                verify=self._worker.verify,
            )
        )
        if not sent:
            raise PeerLostError(f"{self.link.worker_id} does not take messages")


def plan_prefix_fetch(
    *, key: AttemptKey, token_ids: TokenIds, salt: bytes, num_tokens: int, link: SourceLink, worker: KvMemory
) -> PrefixFetch | None:
    """The fetch of what of ``token_ids[:num_tokens]`` is not here; ``None`` where that is no block or has no room."""
    pool = worker.pool
    edge = max(pool.block_size, link.block_size)
    wanted = min(num_tokens, len(token_ids) - 1) // edge * edge
    prefix = np.ascontiguousarray(token_ids[:wanted])
    chain = HashChain(salt)
    chain.extend(prefix)
    held = pool.match(chain, prefix, wanted)
    # A READ starts on an edge of both sides' blocks.
    surplus = len(held) % (edge // pool.block_size)
    if surplus:
        pool.release(held[-surplus:])
        held = held[:-surplus]
    missing = wanted // pool.block_size - len(held)
    if missing <= 0:
        pool.release(held)
        return None
    try:
        reservation = pool.reserve(missing)
    except OverloadedError:
        pool.release(held)
        return None
    return PrefixFetch(
        key=key,
        token_ids=prefix,
        chain=chain,
        held=held,
        reservation=reservation,
        salt=salt,
        link=link,
        worker=worker,
    )
