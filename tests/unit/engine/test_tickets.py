"""What a source answers a reader that confirms: yes to its own tickets, unchanged, while every block is what it was."""

from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from twopool.engine import tickets
from twopool.engine.block_pool import BlockPool
from twopool.engine.requests import AttemptKey
from twopool.engine.tickets import TicketWriter
from twopool.protocol.ids import Attempt, BlockId, Epoch, RequestId
from twopool.protocol.messages import Confirm, Ticket, pack_ids
from twopool.protocol.token_hash import HashChain

BLOCK = 16
IDS = np.arange(40, dtype=np.int32)


def key(number: int = 0, attempt: int = 0) -> AttemptKey:
    return AttemptKey(RequestId(f"r{number}"), Attempt(attempt))


class Source:
    def __init__(self) -> None:
        self.pool = BlockPool(6, BLOCK, epoch=Epoch(3), prefix_caching=False)
        self.writer = TicketWriter(self.pool, cast(Any, None), num_layers=2)
        self.blocks = self.pool.allocate(3)
        self.chain = HashChain(b"")
        self.chain.extend(IDS)

    def write(self, of: AttemptKey, start: int = 0, end: int = 40) -> Ticket:
        return self.writer.write(
            of, block_table=self.blocks, token_ids=IDS, chain=self.chain, tokens=(start, end), layers=(0, 2)
        )

    def holds(self, of: AttemptKey, *written: Ticket) -> bool:
        return self.writer.still_hold(Confirm(request_id=of.request_id, attempt=of.attempt, tickets=written))


def test_tickets_hold_until_a_block_is_given_up() -> None:
    """PD-04."""
    source = Source()
    first, second = source.write(key(), 0, 32), source.write(key(), 32, 40)
    for given in ((first, second), (second, first), (first,), (first, second)):
        assert source.holds(key(), *given)
    source.pool.release(source.blocks[2:])
    assert not source.holds(key(), first, second)
    assert source.holds(key(), first)
    assert source.pool.allocate(1) == source.blocks[2:]
    assert not source.holds(key(), first, second)


CHANGES: dict[str, dict[str, object]] = {
    "request": {"request_id": RequestId("r9")},
    "attempt": {"attempt": Attempt(9)},
    "epoch": {"source_epoch": Epoch(4)},
    "tokens": {"end_token": 39},
    "layers": {"layer_end": 1},
    "hash": {"token_hash": b"x" * 16},
    "other blocks": {"block_ids": pack_ids([BlockId(0), BlockId(1), BlockId(5)])},
    "fewer blocks": {"block_ids": pack_ids([BlockId(0)]), "generations": bytes(8)},
    "blocks of another pool": {"block_ids": pack_ids([BlockId(0), BlockId(1), BlockId(60)])},
    "torn ids": {"block_ids": b"abc"},
    "generations": {"generations": np.array([0, 0, 1], dtype="<i8").tobytes()},
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_ticket_does_not_hold(what: str) -> None:
    source = Source()
    ticket = source.write(key())
    changed = replace(ticket, **cast(Any, CHANGES[what]))
    assert changed != ticket
    assert not source.holds(key(), changed)
    assert not source.holds(key(), ticket, changed)
    assert source.holds(key(), ticket)


def test_checksums_that_were_added_change_nothing() -> None:
    source = Source()
    assert source.holds(key(), replace(source.write(key()), checked=pack_ids([BlockId(0)]), checksums=bytes(8)))


def test_a_ticket_is_one_attempts() -> None:
    source = Source()
    ticket = source.write(key(1))
    for other in (key(2), key(1, attempt=1)):
        assert not source.holds(other, ticket)
        source.write(other)
        assert not source.holds(other, ticket)
        assert not source.holds(other, replace(ticket, request_id=other.request_id, attempt=Attempt(7)))


def test_no_tickets_are_right_only_where_none_were_written() -> None:
    """A reader that has the whole prompt is offered nothing."""
    source = Source()
    assert source.holds(key())
    source.write(key())
    assert not source.holds(key())


def test_old_attempts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "MAX_REMEMBERED_ATTEMPTS", 2)
    source = Source()
    written = [source.write(key(number)) for number in (0, 1, 0, 2)]
    assert not source.holds(key(1), written[1])
    assert source.holds(key(0), written[0], written[2]) and source.holds(key(2), written[3])
