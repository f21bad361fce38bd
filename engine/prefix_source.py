"""Offering published prefixes to other workers: what any worker does as a source, whatever its role.

::

    FetchPrefix ──found──► PINNED ──confirm──► (over)
         │                   └── release, reader lost, lease ──► (over)
         └──nothing published──► PrefixMissing

The blocks stay published and pinned; a lease ends the pins of readers that forgot.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from twopool.engine.outbox import Outbox
from twopool.engine.requests import AttemptKey
from twopool.engine.source_server import Reader
from twopool.engine.tickets import TicketWriter
from twopool.protocol.ids import BlockId
from twopool.protocol.messages import Confirm, FetchPrefix, KvReady, PrefixMissing, unpack_ids
from twopool.protocol.token_hash import HashChain

logger = logging.getLogger(__name__)

_Id = tuple[bytes, AttemptKey]


@dataclass(eq=False)
class _Offer:
    reader: Reader
    blocks: list[BlockId]
    outbox: Outbox
    pinned_until_s: float


class PrefixSource:
    """The prefixes pinned for readers. ``confirm`` (see ``WorkerHost``) answers a reader and says whether its tickets
    held; ``on_reclaimed`` is told why each pin ended.
    """

    def __init__(
        self,
        writer: TicketWriter,
        *,
        lease_s: float,
        confirm: Callable[[Reader, Confirm, bool], bool],
        on_reclaimed: Callable[[str], None],
    ) -> None:
        self._writer = writer
        self._confirm = confirm
        self._lease_s = lease_s
        self._on_reclaimed = on_reclaimed
        self._offers: dict[_Id, _Offer] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def on_fetch(self, reader: Reader, message: FetchPrefix) -> None:
        if reader.is_lost:
            return
        key = AttemptKey(message.request_id, message.attempt)
        self._end((reader.connection, key), "superseded")
        blocks = self._match(reader, message)
        if not blocks:
            self.refuse(reader, message)
            return
        pool = self._writer.pool
        pool.pin(blocks)
        pool.release(blocks)
        offer = _Offer(reader, blocks, Outbox(reader.send), time.monotonic() + self._lease_s)
        self._offers[(reader.connection, key)] = offer
        chain = HashChain(message.salt)
        ticket = self._writer.write(
            key,
            block_table=blocks,
            token_ids=unpack_ids(message.token_ids),
            chain=chain,
            tokens=(message.start_token, len(blocks) * pool.block_size),
            layers=(0, self._writer.num_layers),
        )
        if message.verify == "off":
            offer.outbox.put(KvReady(ticket))
        else:
            offer.outbox.put_made(lambda: self._writer.ready(ticket, message.verify, reader.identity))

    def refuse(self, reader: Reader, message: FetchPrefix) -> None:
        """There is nothing to be had."""
        reader.send(PrefixMissing(request_id=message.request_id, attempt=message.attempt))

    def on_confirm(self, reader: Reader, message: Confirm, *, refused: bool = False) -> bool:
        """Answer a reader's confirmation if it is for one of these prefixes; whether it is."""
        key = AttemptKey(message.request_id, message.attempt)
        if (reader.connection, key) not in self._offers:
            return False
        held = self._confirm(reader, message, refused)
        self._end((reader.connection, key), "confirmed" if held else "stale")
        return True

    def on_release(self, reader: Reader, key: AttemptKey) -> None:
        self._end((reader.connection, key), "released")

    def on_reader_lost(self, reader: Reader) -> None:
        for offer_id in [one for one, offer in self._offers.items() if offer.reader is reader]:
            self._end(offer_id, "reader_lost")

    def on_tick(self, now_s: float) -> None:
        for offer_id in [one for one, offer in self._offers.items() if now_s > offer.pinned_until_s]:
            self._end(offer_id, "lease")

    def close(self) -> None:
        for offer_id in list(self._offers):
            self._end(offer_id, "closed")

    def _match(self, reader: Reader, message: FetchPrefix) -> list[BlockId]:
        """Published blocks from the first token on, one reference each, if any lie beyond ``start_token``."""
        pool = self._writer.pool
        if message.source_epoch != pool.epoch:
            return []
        try:
            token_ids = unpack_ids(message.token_ids)
        except ValueError:
            return []
        chain = HashChain(message.salt)
        chain.extend(token_ids)
        blocks = pool.match(chain, token_ids, len(token_ids))
        edge = self._writer.edge(reader.identity)
        usable = len(blocks) * pool.block_size // edge * edge // pool.block_size
        pool.release(blocks[usable:])
        blocks = blocks[:usable]
        if len(blocks) * pool.block_size <= message.start_token:
            pool.release(blocks)
            return []
        return blocks

    def _end(self, offer_id: _Id, reason: str) -> None:
        offer = self._offers.pop(offer_id, None)
        if offer is not None:
            offer.outbox.close()
            self._writer.pool.unpin(offer.blocks)
            self._on_reclaimed(reason)
