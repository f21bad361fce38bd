"""One prefill's life on the prefill worker.

::

    QUEUED ──first step──► RUNNING ──first tokens sampled──► PINNED ──confirm──► RELEASED
      │                       │                                │
      └───────────────────────┴── release, reader or router lost, deadline, lease ──► RELEASED

While QUEUED and RUNNING the engine owns the blocks; while PINNED they are kept for the reader alone.
"""

import enum
import time
from dataclasses import dataclass, field

import numpy as np

from twopool.engine.requests import AttemptKey
from twopool.engine.source_server import Reader
from twopool.protocol.ids import BlockId, Epoch, RouterId
from twopool.protocol.messages import Prefill, Ticket, pack_ids, unpack_ids
from twopool.protocol.token_hash import HashChain, TokenIds


class PrefillState(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    PINNED = "pinned"
    RELEASED = "released"


@dataclass(eq=False)
class PrefillJob:
    """A prefill accepted for ``reader``. ``num_offered`` tokens were offered to it so far."""

    reader: Reader
    router_id: RouterId
    key: AttemptKey
    token_ids: TokenIds
    chain: HashChain
    num_offered: int
    deadline_s: float
    state: PrefillState = PrefillState.QUEUED
    pinned: tuple[BlockId, ...] = ()
    pinned_until_s: float = field(default=0.0)

    @classmethod
    def of(cls, message: Prefill, reader: Reader) -> "PrefillJob":
        token_ids = unpack_ids(message.token_ids)
        return cls(
            reader=reader,
            router_id=message.router_id,
            key=AttemptKey(message.request_id, message.attempt),
            token_ids=token_ids,
            chain=HashChain(message.salt),
            num_offered=message.skip_tokens,
            deadline_s=time.monotonic() + message.timeout_s,
        )

    def ticket(
        self,
        *,
        block_table: tuple[BlockId, ...],
        end_token: int,
        block_size: int,
        num_layers: int,
        epoch: Epoch,
        generations: list[int],
    ) -> Ticket:
        """The ticket for ``[num_offered, end_token)``; ``generations`` are those of the blocks that overlap it."""
        first = self.num_offered // block_size
        last = -(-end_token // block_size)
        return Ticket(
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            source_epoch=epoch,
            start_token=self.num_offered,
            end_token=end_token,
            layer_start=0,
            layer_end=num_layers,
            block_ids=pack_ids(list(block_table[first:last])),
            generations=np.asarray(generations, dtype="<i8").tobytes(),
            token_hash=self.chain.at(end_token, self.token_ids),
        )
