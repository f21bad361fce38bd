"""Checking tickets: the source's side of "nothing leaves before it is proven"."""

from collections.abc import Iterable

import numpy as np

from twopool.engine.block_pool import BlockPool
from twopool.protocol.ids import BlockId
from twopool.protocol.messages import Ticket, unpack_ids


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
