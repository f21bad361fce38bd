"""The KV blocks of one worker: who holds them, what they hold, when their content was given up.

A block is in exactly one state::

               allocate                release (published)
      free ──────────────▶ active ─────────────────────────▶ cached
       ▲ ▲ ▲                ▲ │ ▲ │                             │
       │ │ └────────────────┼─┘ │ └──────▶ pinned ──────────────┤ unpin (published)
       │ │     release      │   │ release   │ │                 │
       │ │                  │   └───────────┘ │ unpin           │
       │ │                  │       share     ▼                 │
       │ └──────────────────┼──────────────(free)               │
       │                    └────────────────────────────────── ┘ match; evicted: straight to a new owner
       │   allocate_for_fetch          fetched
       ├──────────────────▶ fetching ──────────▶ active
       │    abandon_fetch      │ quarantine
       ├───────────────────────┤
       │    end_quarantine     ▼
       └────────────────── quarantined

A block's generation moves whenever its content is given up, and always before it gets a new owner, so whoever holds
(epoch, block, generation) can ask later whether the bytes are still those. No method awaits; all run on one thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from twopool.engine.prefix_cache import PrefixCache
from twopool.protocol.errors import OverloadedError
from twopool.protocol.ids import BlockId, Epoch, Generation
from twopool.protocol.messages import BlockCounts
from twopool.protocol.token_hash import HashChain, TokenIds


def _ignore() -> None:
    """Nobody waits for blocks."""


class Reservation:
    """A claim on ``remaining`` blocks that allocations draw on. ``release`` gives up the rest and is idempotent."""

    def __init__(self, pool: "BlockPool", count: int) -> None:
        self._pool = pool
        self._remaining = count

    @property
    def remaining(self) -> int:
        return self._remaining

    def release(self) -> None:
        self.shrink_to(0)

    def shrink_to(self, count: int) -> None:
        """Give up all but ``count`` blocks of what remains; never grows."""
        surplus = max(self._remaining - count, 0)
        if surplus:
            self._remaining -= surplus
            self._pool._unreserve(surplus)

    def _draw(self, count: int) -> None:
        """Use up to ``count`` blocks of the claim."""
        self.shrink_to(max(self._remaining - count, 0))


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens (a multiple of 16) in one life (``epoch``) of a worker.

    Wrong use (releasing what is not held, unknown blocks) raises ``ValueError`` and changes nothing.
    """

    def __init__(self, num_blocks: int, block_size: int, *, epoch: Epoch, prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        self.epoch: Final = epoch
        self.num_blocks: Final = num_blocks
        self.block_size: Final = block_size
        self.prefix_caching: Final = prefix_caching
        self._cache = PrefixCache(block_size)
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._generations = [0] * num_blocks
        # Freed last, used first: such a block is likely still in the CPU's caches.
        self._free = [BlockId(block) for block in range(num_blocks - 1, -1, -1)]
        self._lru: OrderedDict[BlockId, None] = OrderedDict()
        self._fetching: set[BlockId] = set()
        self._quarantined: set[BlockId] = set()
        self._num_active = 0
        self._num_pinned = 0
        self._reserved = 0
        self.on_obtainable: Callable[[], None] = _ignore
        """called whenever more blocks can be had than before"""

    # --- figures

    def counts(self) -> BlockCounts:
        """Blocks by state; they sum to ``num_blocks``. Takes constant time."""
        return BlockCounts(
            free=len(self._free),
            cached=len(self._lru),
            active=self._num_active,
            pinned=self._num_pinned,
            fetching=len(self._fetching),
            quarantined=len(self._quarantined),
        )

    @property
    def num_obtainable(self) -> int:
        """Blocks that can be had without a reservation: free and cached, less what is reserved."""
        return len(self._free) + len(self._lru) - self._reserved

    @property
    def num_reserved(self) -> int:
        return self._reserved

    def generation(self, block: BlockId) -> Generation:
        """How often the block's content was given up; raises ``ValueError`` for a block this pool does not have."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not in a pool of {self.num_blocks}")
        return Generation(self._generations[block])

    def generations(self, blocks: Sequence[BlockId]) -> npt.NDArray[np.int64]:
        """[n] int64, the generation of each of ``blocks``."""
        return np.array([self.generation(block) for block in blocks], dtype=np.int64)

    # --- obtaining blocks

    def reserve(self, count: int) -> Reservation:
        """A claim on ``count`` blocks; raises ``OverloadedError`` when fewer can be had."""
        if count < 0:
            raise ValueError(f"cannot reserve {count} blocks")
        self._require(count)
        self._reserved += count
        return Reservation(self, count)

    def allocate(self, count: int, reservation: Reservation | None = None) -> list[BlockId]:
        """``count`` blocks, active with one reference each, drawn on ``reservation`` first.

        Evicts least recently used cached blocks. Raises ``OverloadedError``, taking nothing, when there are too few.
        """
        blocks = self._obtain(count, reservation)
        for block in blocks:
            self._refs[block] = 1
        self._num_active += count
        return blocks

    def allocate_for_fetch(self, count: int, reservation: Reservation | None = None) -> list[BlockId]:
        """As ``allocate``, but in state fetching: something outside this process's control will write them."""
        blocks = self._obtain(count, reservation)
        self._fetching.update(blocks)
        return blocks

    def match(
        self, chain: HashChain, token_ids: TokenIds, max_tokens: int, reservation: Reservation | None = None
    ) -> list[BlockId]:
        """The longest run of published blocks that hold ``token_ids[:max_tokens]``, one reference taken on each.

        Tokens are compared, so a hash collision is a miss. Cached blocks count as obtained: they draw on
        ``reservation`` first, and the run ends where no more can be had.
        """
        if not self.prefix_caching:
            return []
        found = self._cache.find(chain, token_ids, max_tokens)
        available = self.num_obtainable + (reservation.remaining if reservation else 0)
        matched: list[BlockId] = []
        for block in found:
            if block in self._lru:
                if not available:
                    break
                available -= 1
                if reservation is not None:
                    reservation._draw(1)
            self._reference(block)
            matched.append(block)
        return matched

    def num_missing(self, chain: HashChain, token_ids: TokenIds, max_tokens: int, num_blocks: int) -> int:
        """How many of ``num_blocks`` blocks would have to be obtained after a ``match``, cached ones among them."""
        found = self._cache.find(chain, token_ids, max_tokens) if self.prefix_caching else []
        return num_blocks - sum(block not in self._lru for block in found)

    # --- references and pins

    def share(self, blocks: Sequence[BlockId]) -> None:
        """One more reference on each; they must be active or pinned."""
        self._require_held(blocks)
        for block in blocks:
            self._reference(block)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Give back one reference on each. ``blocks`` is in sequence order: later ones are evicted first."""
        self._require_counts(blocks, self._refs, "release")
        for block in reversed(blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._num_active -= 1
                if self._pins[block]:
                    self._num_pinned += 1
                else:
                    self._retire(block)

    def pin(self, blocks: Sequence[BlockId]) -> None:
        """Keep the content of each (active or pinned) for a remote reader, counted."""
        self._require_held(blocks)
        for block in blocks:
            self._pins[block] += 1

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        """Give back one pin on each, in sequence order."""
        self._require_counts(blocks, self._pins, "unpin")
        for block in reversed(blocks):
            self._pins[block] -= 1
            if not self._pins[block] and not self._refs[block]:
                self._num_pinned -= 1
                self._retire(block)

    def is_shared(self, block: BlockId) -> bool:
        """Whether more than one reference is held."""
        return self._refs[block] > 1

    # --- fetching

    def fetched(self, blocks: Sequence[BlockId]) -> None:
        """The read into each is over and proven: active with one reference."""
        self._take(blocks, self._fetching, "fetching")
        for block in blocks:
            self._refs[block] = 1
        self._num_active += len(blocks)

    def quarantine(self, blocks: Sequence[BlockId]) -> None:
        """The read into each is given up but may still write: out of use until ``end_quarantine``."""
        self._take(blocks, self._fetching, "fetching")
        self._quarantined.update(blocks)

    def abandon_fetch(self, blocks: Sequence[BlockId]) -> None:
        """No read into any of these is under way: free."""
        self._take(blocks, self._fetching, "fetching")
        for block in blocks:
            self._give_up(block)

    def end_quarantine(self, blocks: Sequence[BlockId]) -> None:
        """The reads into these are over or their endpoint is closed: free."""
        self._take(blocks, self._quarantined, "quarantined")
        for block in blocks:
            self._give_up(block)

    # --- prefix cache

    def publish(self, blocks: Sequence[BlockId], chain: HashChain, token_ids: TokenIds, num_tokens: int) -> None:
        """Make the full blocks of ``token_ids[:num_tokens]``, which the caller holds, findable. First publisher wins.

        Only for KV that is complete and proven.
        """
        if not self.prefix_caching or num_tokens < self.block_size:
            return
        self._require_held(blocks[: num_tokens // self.block_size])
        self._forget_idle(self._cache.publish(blocks, chain, token_ids, num_tokens))

    def retract(self, blocks: Iterable[BlockId]) -> None:
        """Make none of these findable any more: their content turned out to be bad."""
        for block in blocks:
            self._cache.remove(block)
            self._forget_idle([block])

    def clear_cache(self) -> None:
        """Forget all published blocks; those nobody holds become free."""
        for block in range(self.num_blocks):
            self.retract([BlockId(block)])

    # --- checking

    def check(self) -> None:
        """Recount everything; raises ``RuntimeError`` naming what does not balance."""
        self._cache.check()
        active = [BlockId(block) for block, refs in enumerate(self._refs) if refs]
        pinned = [BlockId(block) for block, pins in enumerate(self._pins) if pins and not self._refs[block]]
        states: dict[str, Iterable[BlockId]] = {
            "free": self._free,
            "cached": self._lru,
            "active": active,
            "pinned": pinned,
            "fetching": self._fetching,
            "quarantined": self._quarantined,
        }
        seen: dict[BlockId, str] = {}
        for name, blocks in states.items():
            for block in blocks:
                if block in seen:
                    raise RuntimeError(f"block {block} is both {seen[block]} and {name}")
                seen[block] = name
        counts = self.counts()
        if len(seen) != self.num_blocks or counts.total != self.num_blocks:
            raise RuntimeError(f"{len(seen)} of {self.num_blocks} blocks are accounted for; counters say {counts}")
        if (counts.active, counts.pinned) != (len(active), len(pinned)):
            raise RuntimeError(f"counters are off: {counts}, {len(active)} active, {len(pinned)} pinned")
        for block, state in seen.items():
            may_be_published = {"cached": {True}, "active": {True, False}, "pinned": {True, False}}
            if (block in self._cache) not in may_be_published.get(state, {False}):
                raise RuntimeError(f"block {block} is {state}, but published: {block in self._cache}")
        if self._reserved < 0 or self.num_obtainable < 0:
            raise RuntimeError(f"{self._reserved} blocks are reserved, {counts.free + counts.cached} can be had")

    # --- private

    def _obtain(self, count: int, reservation: Reservation | None) -> list[BlockId]:
        drawn = min(count, reservation.remaining) if reservation else 0
        self._require(count - drawn)
        if reservation is not None:
            reservation._draw(drawn)
        blocks: list[BlockId] = []
        for _ in range(count):
            if not self._free:
                evicted, _ = self._lru.popitem(last=False)
                self._cache.remove(evicted)
                self._give_up(evicted)
            blocks.append(self._free.pop())
        return blocks

    def _require(self, count: int) -> None:
        if count > self.num_obtainable:
            raise OverloadedError(f"{count} KV blocks wanted, {max(self.num_obtainable, 0)} can be had")

    def _reference(self, block: BlockId) -> None:
        """One more reference on a block that is active, pinned or cached."""
        if not self._refs[block]:
            self._num_active += 1
            if self._pins[block]:
                self._num_pinned -= 1
            else:
                del self._lru[block]
        self._refs[block] += 1

    def _unreserve(self, count: int) -> None:
        self._reserved -= count
        self.on_obtainable()

    def _retire(self, block: BlockId) -> None:
        """Nobody holds the block any more."""
        if block in self._cache:
            self._lru[block] = None
            self.on_obtainable()
        else:
            self._give_up(block)

    def _give_up(self, block: BlockId) -> None:
        self._generations[block] += 1
        self._free.append(block)
        self.on_obtainable()

    def _forget_idle(self, blocks: Iterable[BlockId]) -> None:
        """Free those of ``blocks``, no longer published, that only the cache kept."""
        for block in blocks:
            if block in self._lru:
                del self._lru[block]
                self._give_up(block)

    def _take(self, blocks: Sequence[BlockId], state: set[BlockId], name: str) -> None:
        if len(set(blocks)) != len(blocks) or not state.issuperset(blocks):
            raise ValueError(f"blocks {list(blocks)} are not all {name}, once each")
        state.difference_update(blocks)

    def _require_held(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            if not (self._refs[block] or self._pins[block]):
                raise ValueError(f"block {block} is neither active nor pinned")

    def _require_counts(self, blocks: Sequence[BlockId], counts: list[int], verb: str) -> None:
        if all(counts[block] for block in blocks) and len(set(blocks)) == len(blocks):
            return
        for block in set(blocks):
            if blocks.count(block) > counts[block]:
                raise ValueError(f"cannot {verb} block {block} {blocks.count(block)} times: {counts[block]} held")
