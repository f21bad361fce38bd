"""Names of things, as types: a local block id never passes for a remote one.

A token's address is (``RequestId``, ``Attempt``, ``ChoiceIndex``, output index).
"""

import os
import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""Made by the router, unique in the cluster; never what a client sent."""

WorkerId = NewType("WorkerId", str)
"""A worker's name; the same across restarts when the user sets one."""

RouterId = NewType("RouterId", str)

Epoch = NewType("Epoch", int)
"""One life of a worker's KV pool: drawn at each start, so a restarted worker is never taken for its predecessor."""

Attempt = NewType("Attempt", int)
"""The router's count of pairings for one request, from 0; only the current one's tokens are accepted."""

ChoiceIndex = NewType("ChoiceIndex", int)

BlockId = NewType("BlockId", int)
"""Index of a KV block in this worker's own pool."""

RemoteBlockId = NewType("RemoteBlockId", int)
"""Index of a KV block in a peer's pool."""

Generation = NewType("Generation", int)
"""Counts how often a block's content was given up; moves before the block is reused."""


def new_epoch() -> Epoch:
    """A random 63-bit epoch."""
    return Epoch(secrets.randbits(63))


def new_request_id() -> RequestId:
    """A random 96-bit request id."""
    return RequestId("req-" + _random_hex())


def new_seed() -> int:
    """A random 63-bit seed, for a request that brought none."""
    return int(_random_hex()[:16], 16) >> 1


def new_worker_id(role: str) -> WorkerId:
    """A random name for a worker that was given none."""
    return WorkerId(f"{role}-{secrets.token_hex(3)}")


def new_router_id() -> RouterId:
    return RouterId(f"router-{secrets.token_hex(3)}")


_RANDOM_BYTES = 12
_RANDOM_BATCH = 256
_drawn: list[str] = []
# A forked process must not go on with its parent's.
os.register_at_fork(after_in_child=_drawn.clear)


def _random_hex() -> str:
    """``_RANDOM_BYTES`` of the system's random bytes, in hexadecimal. Many are drawn at once: a call costs more than
    all else that an id needs. Safe in threads: ``pop`` and ``extend`` of a list are atomic.
    """
    while True:
        try:
            return _drawn.pop()
        except IndexError:
            size = 2 * _RANDOM_BYTES
            drawn = os.urandom(_RANDOM_BYTES * _RANDOM_BATCH).hex()
            _drawn.extend([drawn[at : at + size] for at in range(0, len(drawn), size)])
