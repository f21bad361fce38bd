"""One prefill's life on the prefill worker.

::

    FETCHING ──► QUEUED ──first step──► RUNNING ──first tokens sampled──► PINNED ──confirm──► RELEASED
       │           │                       │                                │
       └───────────┴───────────────────────┴── release, reader or router lost, deadline, lease ──► RELEASED

Most jobs start QUEUED: FETCHING is for those whose prefix another worker has. While QUEUED and RUNNING the engine owns
the blocks; while PINNED they are kept for the reader alone.
"""

import asyncio
import enum
import time
from dataclasses import dataclass

from twopool.engine.outbox import Outbox
from twopool.engine.prefix_fetch import PrefixFetch
from twopool.engine.requests import AttemptKey, PrefillResult
from twopool.engine.source_server import Reader
from twopool.protocol.ids import RouterId
from twopool.protocol.messages import KvVerify, Prefill, unpack_ids
from twopool.protocol.token_hash import HashChain, TokenIds


class PrefillState(enum.Enum):
    FETCHING = "fetching"
    QUEUED = "queued"
    RUNNING = "running"
    PINNED = "pinned"
    RELEASED = "released"


@dataclass(eq=False)
class PrefillJob:
    """A prefill accepted for ``reader``. It was offered ``num_offered`` tokens, and of the tokens up to the end the
    layers below ``layers_offered``. ``fetch`` and ``task`` exist while FETCHING, which reads ``peer_tokens`` from a
    peer; ``result`` while PINNED.
    """

    reader: Reader
    router_id: RouterId
    key: AttemptKey
    token_ids: TokenIds
    chain: HashChain
    verify: KvVerify
    num_offered: int
    deadline_s: float
    outbox: Outbox
    layers_offered: int = 0
    state: PrefillState = PrefillState.QUEUED
    fetch: PrefixFetch | None = None
    task: "asyncio.Task[None] | None" = None
    peer_tokens: int = 0
    result: PrefillResult | None = None
    pinned_until_s: float = 0.0
    repeat_at_s: float = 0.0

    @classmethod
    def of(cls, message: Prefill, reader: Reader) -> "PrefillJob":
        return cls(
            reader=reader,
            router_id=message.router_id,
            key=AttemptKey(message.request_id, message.attempt),
            token_ids=unpack_ids(message.token_ids),
            chain=HashChain(message.salt),
            verify=message.verify,
            num_offered=message.skip_tokens,
            deadline_s=time.monotonic() + message.timeout_s,
            outbox=Outbox(reader.send),
        )
