"""The reading thread's books on one rank of a peer: what waits to be read from it, what is being read."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from twopool.kv_transfer.agent import Post, PreparedList
from twopool.kv_transfer.fetch import Fetch
from twopool.kv_transfer.layout import Conversion, Index, Runs, StridedList
from twopool.kv_transfer.staging import STAGING_BYTES
from twopool.protocol.errors import TransferError
from twopool.protocol.ids import Epoch, WorkerId
from twopool.protocol.messages import RankPool

RemoteKey = tuple[WorkerId, Epoch, int]
LocalList = tuple[int, StridedList]
"""Runs over memory that begins at an address."""

MAX_POST_RUNS = 1024
MAX_POST_BYTES = 16 * 1024 * 1024
"""Limits of one post, a few milliseconds of copying: cancels and lost peers are seen between posts."""


@dataclass(eq=False)
class Piece:
    """A part of a fetch, small enough for one post. The index arrays are ``[n]`` int32."""

    fetch: Fetch
    local: LocalList
    remote: StridedList
    local_index: Index
    remote_index: Index
    conversion: Conversion | None = None

    @property
    def num_bytes(self) -> int:
        return self.remote.length * len(self.remote_index)


@dataclass(eq=False)
class Batch:
    """Pieces that go into one post: they share both lists."""

    pieces: list[Piece]

    @property
    def fetches(self) -> set[Fetch]:
        return {piece.fetch for piece in self.pieces}

    def indices(self) -> tuple[Index, Index]:
        if len(self.pieces) == 1:
            return self.pieces[0].local_index, self.pieces[0].remote_index
        return (
            np.concatenate([piece.local_index for piece in self.pieces]),
            np.concatenate([piece.remote_index for piece in self.pieces]),
        )


@dataclass(eq=False)
class OpenPost:
    post: Post
    fetches: set[Fetch]


@dataclass(eq=False)
class Remote:
    """One rank of a peer. ``num_links`` counts the links that use it; ``lost`` says why it can be read no more."""

    key: RemoteKey
    pool: RankPool
    agent_name: str
    num_links: int = 0
    lost: TransferError | None = None
    lists: dict[StridedList, PreparedList] = field(default_factory=dict)
    pending: deque[Piece] = field(default_factory=deque)
    open_posts: list[OpenPost] = field(default_factory=list)

    def next_batch(self) -> Batch | None:
        """Take the pieces at the head that fit into one post; pieces of abandoned fetches are dropped."""
        pieces: list[Piece] = []
        num_runs = num_bytes = 0
        while self.pending:
            piece = self.pending[0]
            if piece.fetch.progress.is_abandoned:
                self.pending.popleft()
                continue
            num_runs += len(piece.remote_index)
            num_bytes += piece.num_bytes
            most_bytes = MAX_POST_BYTES if piece.conversion is None else STAGING_BYTES
            if pieces and (
                (piece.local, piece.remote) != (pieces[0].local, pieces[0].remote)
                or num_runs > MAX_POST_RUNS
                or num_bytes > most_bytes
            ):
                break
            pieces.append(self.pending.popleft())
        return Batch(pieces) if pieces else None


def cut(fetch: Fetch, runs: Runs, local_address: int) -> Iterator[Piece]:
    """``runs`` of ``fetch`` in pieces of at most ``MAX_POST_RUNS`` runs and ``MAX_POST_BYTES`` bytes (or one run)."""
    most_bytes = MAX_POST_BYTES if runs.conversion is None else STAGING_BYTES
    step = max(1, min(MAX_POST_RUNS, most_bytes // runs.remote.length))
    for start in range(0, len(runs.local_index), step):
        yield Piece(
            fetch=fetch,
            local=(local_address, runs.local),
            remote=runs.remote,
            local_index=runs.local_index[start : start + step],
            remote_index=runs.remote_index[start : start + step],
            conversion=runs.conversion,
        )
