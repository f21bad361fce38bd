"""Tickets on the source's side: writing them, and answering after the read whether they still hold."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from twopool.engine.block_pool import BlockPool
from twopool.engine.requests import AttemptKey
from twopool.kv_transfer.checksums import ChecksumRequest, units_to_check
from twopool.kv_transfer.interface import KvTransport
from twopool.protocol.ids import BlockId
from twopool.protocol.messages import KvReady, KvVerify, PeerIdentity, Ticket, pack_ids, unpack_ids
from twopool.protocol.token_hash import HashChain, TokenIds


class TicketWriter:
    """Writes tickets for the blocks of one worker, whose KV ``transport`` offers."""

    def __init__(self, pool: BlockPool, transport: KvTransport, *, num_layers: int) -> None:
        self.pool = pool
        self.num_layers = num_layers
        self._transport = transport

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
        return Ticket(
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


def num_units(ticket: Ticket, unit_tokens: int) -> int:
    """Checksum units that overlap a ticket's tokens."""
    return -(-ticket.end_token // unit_tokens) - ticket.start_token // unit_tokens


def ticket_generations(ticket: Ticket) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """``[blocks]`` int64; raises ``ValueError`` when the bytes are no whole number of them."""
    return np.frombuffer(ticket.generations, dtype="<i8")


def tickets_hold(tickets: Iterable[Ticket], pool: BlockPool) -> bool:
    """Whether every block the tickets name still has the content it had when they were written.

    A ticket of another epoch, with ids outside the pool or of unequal lengths does not hold.
    """
    return all(_holds(ticket, pool) for ticket in tickets)


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
