"""Tickets on the source's side: writing them, and answering after the read whether they still hold."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np

from twopool.engine.block_pool import BlockPool
from twopool.engine.requests import AttemptKey
from twopool.kv_transfer.checksums import ChecksumRequest, units_to_check
from twopool.kv_transfer.interface import KvTransport
from twopool.protocol.codec import encode
from twopool.protocol.ids import BlockId
from twopool.protocol.messages import Confirm, KvReady, KvVerify, PeerIdentity, Ticket, pack_ids, unpack_ids
from twopool.protocol.token_hash import HashChain, TokenIds

MAX_REMEMBERED_ATTEMPTS = 8192
"""Far more than are open at a time. A reader whose tickets were forgotten is told that they do not hold."""


class TicketWriter:
    """Writes tickets for the blocks of one worker, whose KV ``transport`` offers, and remembers which it wrote."""

    def __init__(self, pool: BlockPool, transport: KvTransport, *, num_layers: int) -> None:
        self.pool = pool
        self.num_layers = num_layers
        self._transport = transport
        self._digests: OrderedDict[AttemptKey, set[bytes]] = OrderedDict()
        """of the tickets written for each attempt, the latest attempts last"""

    def edge(self, reader: PeerIdentity) -> int:
        """Tokens between the points at which a block of either side ends: tickets end there, but for the last."""
        return max(self.pool.block_size, reader.ranks[0].geometry.block_size)

    def write(
        self,
        key: AttemptKey,
        *,
        block_table: Sequence[BlockId],
        token_ids: TokenIds,
        chain: HashChain,
        tokens: tuple[int, int],
        layers: tuple[int, int],
    ) -> Ticket:
        """The ticket for tokens [start, end) and layers [start, end); ``block_table`` holds the ids from 0 on."""
        blocks = block_table[tokens[0] // self.pool.block_size : -(-tokens[1] // self.pool.block_size)]
        ticket = Ticket(
            request_id=key.request_id,
            attempt=key.attempt,
            source_epoch=self.pool.epoch,
            start_token=tokens[0],
            end_token=tokens[1],
            layer_start=layers[0],
            layer_end=layers[1],
            block_ids=pack_ids(list(blocks)),
            generations=self.pool.generations(blocks).astype("<i8", copy=False).tobytes(),
            token_hash=chain.at(tokens[1], token_ids),
        )
        self._remember(key, ticket)
        return ticket

    def still_hold(self, message: Confirm) -> bool:
        """Whether a reader that read by these tickets read what was meant for it.

        They have to be tickets written for this attempt, unchanged (its request, tokens and blocks), and every block
        they name must still have the content it had then. Asking again gives the same answer until a block is given up.
        None at all is right for an attempt that was offered nothing, its reader having everything already.
        """
        written = self._digests.get(AttemptKey(message.request_id, message.attempt), set())
        if not message.tickets:
            return not written
        return all(_digest(ticket) in written and _holds(ticket, self.pool) for ticket in message.tickets)

    async def ready(self, ticket: Ticket, mode: KvVerify, reader: PeerIdentity) -> KvReady:
        """The message that offers ``ticket``, with the checksums ``mode`` asks for. Raises ``TransferError``."""
        unit_tokens = min(self.pool.block_size, reader.ranks[0].geometry.block_size)
        units = units_to_check(mode, num_units(ticket, unit_tokens))
        sums = await self._transport.checksums(
            ChecksumRequest(
                block_ids=unpack_ids(ticket.block_ids),
                start_token=ticket.start_token,
                unit_tokens=unit_tokens,
                layers=(ticket.layer_start, ticket.layer_end),
                units=units,
                dtype=reader.ranks[0].geometry.dtype,
            )
        )
        checksums = sums.astype("<u8", copy=False).tobytes()
        return KvReady(msgspec.structs.replace(ticket, checked=pack_ids(units), checksums=checksums))

    def _remember(self, key: AttemptKey, ticket: Ticket) -> None:
        self._digests.setdefault(key, set()).add(_digest(ticket))
        self._digests.move_to_end(key)
        if len(self._digests) > MAX_REMEMBERED_ATTEMPTS:
            self._digests.popitem(last=False)


def num_units(ticket: Ticket, unit_tokens: int) -> int:
    """Checksum units that overlap a ticket's tokens."""
    return -(-ticket.end_token // unit_tokens) - ticket.start_token // unit_tokens


def ticket_generations(ticket: Ticket) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """``[blocks]`` int64; raises ``ValueError`` when the bytes are no whole number of them."""
    return np.frombuffer(ticket.generations, dtype="<i8")


def _digest(ticket: Ticket) -> bytes:
    """Of all that a ticket says but its checksums, which are added to some later."""
    bare = msgspec.structs.replace(ticket, checked=b"", checksums=b"")
    return hashlib.blake2b(encode(bare), digest_size=16).digest()


def _holds(ticket: Ticket, pool: BlockPool) -> bool:
    if ticket.source_epoch != pool.epoch:
        return False
    try:
        blocks, generations = unpack_ids(ticket.block_ids), ticket_generations(ticket)
    except ValueError:
        return False
    if len(blocks) != len(generations):
        return False
    return all(
        0 <= block < pool.num_blocks and pool.generation(BlockId(int(block))) == generation
        for block, generation in zip(blocks, generations, strict=True)
    )
