"""Chained hashes of token ids: the name of a prefix.

The hash after granule *i* is ``blake2b(hash after granule i-1 || ids of granule i)`` with 16 bytes of output, so it
stands for every token before it. It starts from the tenant's salt, so tenants never share KV cache. The hash is the
same in every process (Python's own ``hash`` is not).
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twopool.protocol.geometry import GRANULE_TOKENS

HASH_BYTES = 16
TokenIds = npt.NDArray[np.int32]


def root_hash(salt: bytes) -> bytes:
    """The hash of the empty prefix for a tenant's ``salt`` (at most 64 bytes)."""
    return hashlib.blake2b(b"twopool-prefix-v1", digest_size=HASH_BYTES, key=salt).digest()


def extend_hash(parent: bytes, token_ids: TokenIds) -> bytes:
    """The hash of ``parent``'s tokens followed by ``token_ids`` ([n] int32, n ≤ one granule)."""
    return hashlib.blake2b(parent + token_ids.tobytes(), digest_size=HASH_BYTES).digest()


class HashChain:
    """The granule hashes of one growing sequence, each computed once."""

    def __init__(self, salt: bytes = b"") -> None:
        self._hashes: list[bytes] = [root_hash(salt)]

    def extend(self, token_ids: TokenIds | Sequence[int]) -> None:
        """Hash the granules of ``token_ids`` (the whole sequence so far) that became full."""
        ids = np.asarray(token_ids, dtype=np.int32)
        for granule in range(len(self._hashes) - 1, len(ids) // GRANULE_TOKENS):
            start = granule * GRANULE_TOKENS
            self._hashes.append(extend_hash(self._hashes[-1], ids[start : start + GRANULE_TOKENS]))

    @property
    def num_granules(self) -> int:
        return len(self._hashes) - 1

    def after_granules(self, count: int) -> bytes:
        """The hash of the first ``count`` granules."""
        return self._hashes[count]

    def at(self, num_tokens: int, token_ids: TokenIds | Sequence[int]) -> bytes:
        """The hash of the first ``num_tokens`` of ``token_ids``, a partial last granule included."""
        self.extend(token_ids[:num_tokens])
        full, rest = divmod(num_tokens, GRANULE_TOKENS)
        if not rest:
            return self._hashes[full]
        tail = np.asarray(token_ids[num_tokens - rest : num_tokens], dtype=np.int32)
        return extend_hash(self._hashes[full], tail)
