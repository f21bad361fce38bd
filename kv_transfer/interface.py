"""Moving KV blocks between workers: the one interface every transport fulfils.

All movement is a one-sided READ into the reader's own pool. A transport is one worker's: of one rank that owns one pool
of ``geometry.num_blocks`` blocks, or of a group of ranks that own such a pool each, in which a block id means the same
tokens. The last block, ``RankPool.canary_block``, holds known bytes that peers read in the
handshake; a worker's block pool manages blocks ``[0, num_blocks - NUM_RESERVED_BLOCKS)`` and leaves that one alone.

Every method is called on the event loop given at creation and returns at once or is awaited; the work happens on a
thread of the transport. Each awaited call on a peer has a deadline.

A fetch's life::

    fetch() ── OPEN ──► DONE       wait() returns the report, `settled` is done
                │
                ├─────► FAILED     wait() raises TransferError: peer lost, deadline passed, link closed
                └─────► CANCELLED  wait() raises TransferError
                           │
                           └─ failed or cancelled, READs may still write the destination until `settled` is done

A READ that was posted cannot be taken back, not even by closing its endpoint: over TCP, UCX delivers what a stopped
peer sends once it runs again, after the handle was released and the peer removed (measured with NIXL 1.5.1). So
whoever owns the destination blocks keeps them out of use (*quarantined*) until ``settled``: every READ of the fetch
has completed or failed. A peer that dies fails them within milliseconds; one that is stopped may keep them for as
long as it is.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twopool.kv_transfer.checksums import ChecksumRequest, Checksums
from twopool.protocol.errors import TransferError
from twopool.protocol.messages import PeerIdentity, RankPool

NUM_RESERVED_BLOCKS = 1
"""Blocks at a pool's end that belong to the transport: the canary."""

BlockIds = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class FetchRequest:
    """What to read: the KV of tokens ``[start_token, end_token)``, layers ``[layer_start, layer_end)``.

    ``remote_block_ids`` (``[r]`` int32, ``RemoteBlockId``) and ``local_block_ids`` (``[l]`` int32, ``BlockId``) name
    every block of either side that overlaps the range, in order: block *i* of a side covers tokens from
    ``(start_token // block_size + i) * block_size`` with that side's own block size, as in ``Ticket``. Heads follow
    from the two geometries.

    The range is widened to whole blocks of the smaller block size on both ends, and those tokens are moved too: where
    blocks are equal, whole blocks move. Local blocks must be owned by nobody else while the fetch is unsettled.
    """

    remote_block_ids: BlockIds
    local_block_ids: BlockIds
    start_token: int
    end_token: int
    layer_start: int
    layer_end: int


@dataclass(frozen=True, kw_only=True)
class FetchReport:
    """What a finished fetch took.

    Of the ``num_bytes`` that were read ``num_converted_bytes`` were of another dtype and converted. ``num_ranges``
    counts contiguous runs after merging, ``num_posts`` the READ operations posted that carried any of them, both over
    all ranks; ``transfer_s`` is from the first post to the last completion on the slowest rank.
    """

    num_bytes: int
    num_ranges: int
    num_posts: int
    transfer_s: float
    num_converted_bytes: int = 0


class FetchHandle(Protocol):
    """One fetch under way or over."""

    settled: asyncio.Future[None]
    """Done (never with an exception) when the destination can no longer be written."""

    def poll(self) -> bool:
        """Whether the fetch is over, whatever became of it: ``wait`` would not wait. Never waits itself."""
        ...

    async def wait(self) -> FetchReport:
        """The report once all bytes have landed.

        Raises ``TransferError`` when the peer is lost, the deadline passes, the link or the transport is closed, or
        the fetch is cancelled. Another source, or prefilling again, may succeed. Cancelling the awaiting task does
        not cancel the fetch; any number of tasks may wait, in any state.
        """
        ...

    def cancel(self) -> None:
        """Stop what was not posted yet; ``wait`` raises from now on. Idempotent, no effect once the fetch is over.

        The destination may still be written until ``settled``.
        """
        ...

    def release(self) -> None:
        """Give the handle up: cancels the fetch unless it is over. Idempotent."""
        ...


class PeerLink(Protocol):
    """A peer that was connected to: loaded, planned, its canary read and found right."""

    @property
    def peer(self) -> PeerIdentity: ...

    closed: asyncio.Future[None]
    """Done (never with an exception) once the link was disconnected or its peer was found lost: connect anew."""

    @property
    def is_open(self) -> bool:
        """Whether ``closed`` is not done."""
        ...


class KvTransport(Protocol):
    """A worker's end of KV movement, both as reader (``connect``, ``fetch``) and as source (``describe``)."""

    name: str
    spread: int
    """of all ranks' ``plan_layout``"""

    def describe(self) -> tuple[RankPool, ...]:
        """The pool of each rank for ``PeerIdentity.ranks``; the same at every call."""
        ...

    async def connect(self, peer: PeerIdentity, *, timeout_s: float) -> PeerLink:
        """Get ready to read from ``peer``: load its agents, plan the layout, prepare lists, read and check its canary.

        An open link to the same ``worker_id`` of an older epoch is disconnected first; connecting again to the epoch
        that is connected already gives the same link after its canary was read again. Raises
        ``PairRefusedError`` in words where the two can never exchange KV (which values of both sides' geometries
        cannot be mapped), ``TransferError`` where it may go well next time: which rank's canary was wrong, or that
        ``timeout_s`` passed.
        """
        ...

    def disconnect(self, link: PeerLink) -> None:
        """Close the link: its open fetches fail now and settle when their READs are over. Idempotent, never waits."""
        ...

    def fetch(self, link: PeerLink, request: FetchRequest, *, timeout_s: float) -> FetchHandle:
        """Start reading. Raises ``TransferError`` at once where the request does not fit the pools or the link is
        closed; everything later is told by the handle.
        """
        ...

    def expect_readers(self, expected: bool) -> None:
        """Whether peers may be reading from or connecting to this pool now (pinned blocks, open handshakes).

        While true the transport answers peers at once while they keep it busy, then more and more rarely, down to every
        4 ms; otherwise every 100 ms, which delays a peer's handshake and, where reading needs the source, its READs.
        """
        ...

    async def checksums(self, request: ChecksumRequest) -> Checksums:
        """``[len(units), heads]`` uint64, the heads of all ranks side by side, rank by rank (replicas too).

        Raises ``TransferError`` when a rank cannot tell.
        """
        ...

    async def close(self) -> None:
        """Disconnect every link and end the thread. Idempotent.

        The pool stays registered as long as the process lives: peers may still read it. What is unsettled now never
        settles.
        """
        ...


def closed_link_error(peer: PeerIdentity) -> TransferError:
    """What ``fetch`` raises on a link that is not open any more."""
    return TransferError(f"the link to {peer.worker_id} (epoch {peer.epoch}) is closed")
