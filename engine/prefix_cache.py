"""Finds KV blocks by the tokens they hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twopool.protocol.geometry import GRANULE_TOKENS
from twopool.protocol.ids import BlockId
from twopool.protocol.token_hash import HashChain, TokenIds


@dataclass(frozen=True, eq=False)
class _Entry:
    """One published block. ``parent`` is the entry of the block before it, itself verified, so that equal tokens here
    and equal parents mean equal tokens all the way down, whatever the hashes do."""

    block: BlockId
    block_hash: bytes
    token_ids: bytes
    parent: "_Entry | None"


class PrefixCache:
    """Published blocks by the chained hash at their end. Knows nothing of references: the pool evicts."""

    def __init__(self, block_size: int) -> None:
        if block_size % GRANULE_TOKENS:
            raise ValueError(f"block_size {block_size} is not a multiple of {GRANULE_TOKENS}")
        self._block_size = block_size
        self._granules = block_size // GRANULE_TOKENS
        self._by_hash: dict[bytes, _Entry] = {}
        self._by_block: dict[BlockId, _Entry] = {}

    def __contains__(self, block: BlockId) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

    def find(self, chain: HashChain, token_ids: TokenIds, max_tokens: int) -> list[BlockId]:
        """The longest run of published blocks that hold ``token_ids[:max_tokens]``, full blocks only."""
        num_blocks = min(max_tokens, len(token_ids)) // self._block_size
        chain.extend(token_ids[: num_blocks * self._block_size])
        found: list[BlockId] = []
        parent: _Entry | None = None
        for index in range(num_blocks):
            parent = self._verified(index, chain, token_ids, parent)
            if parent is None:
                break
            found.append(parent.block)
        return found

    def publish(
        self, blocks: Sequence[BlockId], chain: HashChain, token_ids: TokenIds, num_tokens: int
    ) -> list[BlockId]:
        """Make the full blocks of ``token_ids[:num_tokens]`` findable.

        The first publisher of a prefix wins: where it is known under another block, that block stays. Returns blocks
        that lost their entry: a known hash whose parents are gone cannot be found any more and gives way.
        """
        num_blocks = num_tokens // self._block_size
        chain.extend(token_ids[: num_blocks * self._block_size])
        first, parent = self._resume(blocks, num_blocks)
        displaced: list[BlockId] = []
        for index in range(first, num_blocks):
            entry = self._verified(index, chain, token_ids, parent)
            if entry is None:
                block_hash = self._hash(chain, index)
                rival = self._by_hash.get(block_hash)
                if rival is not None:
                    if self._reachable(rival):
                        break  # the hashes collide: this sequence cannot be published from here on
                    displaced.append(rival.block)
                    self.remove(rival.block)
                if blocks[index] in self._by_block:
                    raise ValueError(f"block {blocks[index]} is already published as something else")
                entry = _Entry(blocks[index], block_hash, self._tokens(token_ids, index), parent)
                self._by_hash[block_hash] = entry
                self._by_block[entry.block] = entry
            parent = entry
        return displaced

    def remove(self, block: BlockId) -> None:
        """Forget a block; a no-op for one that is not published."""
        entry = self._by_block.pop(block, None)
        if entry is not None:
            del self._by_hash[entry.block_hash]

    def check(self) -> None:
        """Raises ``RuntimeError`` unless the two indexes mirror each other."""
        if len(self._by_hash) != len(self._by_block):
            raise RuntimeError(f"prefix cache: {len(self._by_hash)} hashes for {len(self._by_block)} blocks")
        for block, entry in self._by_block.items():
            if entry.block != block or self._by_hash.get(entry.block_hash) is not entry:
                raise RuntimeError(f"prefix cache: block {block} is not found under its hash")

    def _resume(self, blocks: Sequence[BlockId], num_blocks: int) -> tuple[int, _Entry | None]:
        """The first index to publish and its parent: skips blocks that are published themselves, newest first."""
        for index in range(min(num_blocks, len(blocks)) - 1, -1, -1):
            entry = self._by_block.get(blocks[index])
            if entry is not None:
                return index + 1, entry
        return 0, None

    def _verified(self, index: int, chain: HashChain, token_ids: TokenIds, parent: _Entry | None) -> _Entry | None:
        """The entry of block ``index`` of ``token_ids`` that follows ``parent``, its tokens compared."""
        entry = self._by_hash.get(self._hash(chain, index))
        if entry is None or entry.parent is not parent or entry.token_ids != self._tokens(token_ids, index):
            return None
        return entry

    def _reachable(self, entry: _Entry) -> bool:
        ancestor: _Entry | None = entry
        while ancestor is not None:
            if self._by_block.get(ancestor.block) is not ancestor:
                return False
            ancestor = ancestor.parent
        return True

    def _hash(self, chain: HashChain, index: int) -> bytes:
        return chain.after_granules((index + 1) * self._granules)

    def _tokens(self, token_ids: TokenIds, index: int) -> bytes:
        start = index * self._block_size
        return np.asarray(token_ids[start : start + self._block_size], dtype=np.int32).tobytes()
