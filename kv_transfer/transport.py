"""The ``KvTransport`` of one rank: its peers, handshakes and fetches, over whatever ``ReadAgent`` it is given."""

import asyncio
import logging
from collections.abc import Callable

import torch

from twopool.kv_transfer.agent import ReadAgent
from twopool.kv_transfer.canary import canary_plan, canary_request, fill_canary, wrong_canary_ranks
from twopool.kv_transfer.checksums import ChecksumRequest, Checksums, unit_checksums
from twopool.kv_transfer.fetch import Fetch
from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS, FetchHandle, FetchRequest, PeerLink, closed_link_error
from twopool.kv_transfer.layout import LayoutPlan, Runs, plan_layout
from twopool.kv_transfer.memory import shared_pool
from twopool.kv_transfer.reading import ReadingThread
from twopool.kv_transfer.remote import RemoteKey
from twopool.protocol.errors import PairRefusedError, TransferError
from twopool.protocol.geometry import DTYPE_BYTES, KvGeometry
from twopool.protocol.ids import Epoch, WorkerId
from twopool.protocol.messages import PeerIdentity, RankPool

logger = logging.getLogger(__name__)


class Link:
    """A ``PeerLink`` with its plan and its unfinished fetches."""

    def __init__(self, peer: PeerIdentity, plan: LayoutPlan) -> None:
        self.peer = peer
        self.plan = plan
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fetches: set[Fetch] = set()

    @property
    def is_open(self) -> bool:
        return not self.closed.done()

    def fail_fetches(self, error: TransferError) -> None:
        for fetch in list(self.fetches):
            fetch.fail(error)


class RankTransport:
    """See ``KvTransport``."""

    def __init__(
        self,
        *,
        name: str,
        agent: ReadAgent,
        pool: torch.Tensor,
        geometry: KvGeometry,
        epoch: Epoch,
        convert_dtype: bool = False,
        spread: int = 0,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """``pool`` is the flat uint8 view, registered with ``agent``; writes the canary of ``epoch`` into its last
        block. KV of another dtype is converted if ``convert_dtype``, else refused. ``spread``: see
        ``plan_layout``.
        """
        self.name = name
        self.spread = spread
        canary_block = geometry.num_blocks - NUM_RESERVED_BLOCKS
        fill_canary(pool, geometry, canary_block, epoch)
        self._pool = pool
        self._description = RankPool(
            geometry=geometry,
            base_address=pool.data_ptr(),
            canary_block=canary_block,
            agent_metadata=agent.metadata,
            shared=shared_pool(pool),
        )
        self._loop = loop
        self._free_scratch: list[torch.Tensor] = []
        self._links: dict[WorkerId, Link] = {}
        self._connecting: dict[WorkerId, asyncio.Lock] = {}
        self._is_closed = False
        self._convert_dtype = convert_dtype
        self._thread = ReadingThread(agent, pool=pool, loop=loop, on_lost=self._on_lost)

    @property
    def rank_pool(self) -> RankPool:
        """The one of ``describe``."""
        return self._description

    def describe(self) -> tuple[RankPool, ...]:
        return (self._description,)

    async def connect(self, peer: PeerIdentity, *, timeout_s: float) -> PeerLink:
        plan = self._plan(peer)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._connecting.setdefault(peer.worker_id, asyncio.Lock()),
            ):
                link = await self._open(peer, plan)
                try:
                    await self._check_canaries(link, timeout_s)
                except BaseException:
                    self.disconnect(link)
                    raise
                return link
        except TimeoutError:
            raise TransferError(f"{peer.worker_id} did not answer the KV handshake within {timeout_s:g} s") from None

    def disconnect(self, link: PeerLink) -> None:
        if not isinstance(link, Link):
            raise TypeError("the link is not one of this transport's")
        self._close_link(link, TransferError(f"the link to {link.peer.worker_id} was closed"))

    def fetch(self, link: PeerLink, request: FetchRequest, *, timeout_s: float) -> FetchHandle:
        if not isinstance(link, Link):
            raise TypeError("the link is not one of this transport's")
        if not link.is_open or self._is_closed:
            raise closed_link_error(link.peer)
        link.plan.check(request)
        return self._start(link, self._description.base_address, lambda: link.plan.runs(request), timeout_s)

    def expect_readers(self, expected: bool) -> None:
        self._thread.expect_readers(expected)

    async def checksums(self, request: ChecksumRequest) -> Checksums:
        return await asyncio.to_thread(unit_checksums, self._pool, self._description.geometry, request)

    async def close(self) -> None:
        self._is_closed = True
        for link in list(self._links.values()):
            self.disconnect(link)
        await self._thread.stop()

    def _plan(self, peer: PeerIdentity) -> LayoutPlan:
        if self._is_closed:
            raise TransferError("the KV transport is closed")
        if peer.transport != self.name:
            raise PairRefusedError(f"{peer.worker_id} moves KV over {peer.transport}, this worker over {self.name}")
        for rank, pool in enumerate(peer.ranks):
            if pool.canary_block >= pool.geometry.num_blocks:
                raise PairRefusedError(
                    f"{peer.worker_id} rank {rank}: canary block {pool.canary_block} of {pool.geometry.num_blocks}"
                )
        geometries = [pool.geometry for pool in peer.ranks]
        return plan_layout(
            self._description.geometry, geometries, convert_dtype=self._convert_dtype, spread=self.spread
        )

    async def _open(self, peer: PeerIdentity, plan: LayoutPlan) -> Link:
        """The open link to this life of the peer, loading its ranks if there is none."""
        link = self._links.get(peer.worker_id)
        if link is not None and link.is_open and link.peer == peer:
            return link
        if link is not None:
            self.disconnect(link)
        link = Link(peer, plan)
        loading = self._thread.open(peer, plan.ranks)
        try:
            await asyncio.shield(loading)
        except asyncio.CancelledError:
            # The thread will still load the ranks, or has: give them back when it says so.
            loading.add_done_callback(lambda done: self._give_back(done, link))
            raise
        self._links[peer.worker_id] = link
        for conversion in plan.conversions:
            logger.warning("KV of %s is converted from %s to %s", peer.worker_id, conversion.source, conversion.target)
        return link

    def _give_back(self, loading: asyncio.Future[None], link: Link) -> None:
        if not loading.cancelled() and loading.exception() is None:
            self._thread.close(link.peer, link.plan.ranks)

    async def _check_canaries(self, link: Link, timeout_s: float) -> None:
        """Read each needed rank's canary block as its KV would be read, and compare."""
        scratch = await self._take_scratch()
        plan = canary_plan(link.plan)

        def make_runs() -> list[Runs]:
            return [
                runs
                for rank in plan.ranks
                for runs in plan.runs(canary_request(plan, link.peer.ranks[rank].canary_block))
                if runs.rank == rank
            ]

        fetch = self._start(link, scratch.data_ptr(), make_runs, timeout_s)
        try:
            await fetch.wait()
            landed = scratch.cpu().numpy()
            wrong = await asyncio.to_thread(wrong_canary_ranks, link.plan, link.peer.epoch, landed)
        finally:
            fetch.release()
            fetch.settled.add_done_callback(lambda _: self._free_scratch.append(scratch))
        if wrong:
            raise TransferError(
                f"the canary of {link.peer.worker_id} (epoch {link.peer.epoch}) is wrong on rank "
                f"{', '.join(map(str, wrong))}: its memory is not what its handshake says"
            )

    async def _take_scratch(self) -> torch.Tensor:
        """``[block_bytes]`` uint8 zeros, registered, for a canary read to land in; none waits for another's."""
        if self._free_scratch:
            return self._free_scratch.pop().zero_()
        geometry = self._description.geometry
        # Canaries are no numbers: they are compared in the peer's dtype, which may be wider.
        num_bytes = geometry.block_bytes // DTYPE_BYTES[geometry.dtype] * max(DTYPE_BYTES.values())
        scratch = torch.zeros(num_bytes, dtype=torch.uint8, device=self._pool.device)
        await self._thread.register(scratch)
        return scratch

    def _start(self, link: Link, address: int, make_runs: Callable[[], list[Runs]], timeout_s: float) -> Fetch:
        fetch = Fetch(
            loop=self._loop,
            timeout_s=timeout_s,
            on_abandon=self._thread.abandon,
            on_over=link.fetches.discard,
        )
        link.fetches.add(fetch)
        self._thread.start(fetch, link.peer, address, make_runs)
        return fetch

    def _close_link(self, link: Link, error: TransferError) -> None:
        if not link.is_open:
            return
        link.closed.set_result(None)
        if self._links.get(link.peer.worker_id) is link:
            del self._links[link.peer.worker_id]
        link.fail_fetches(error)
        self._thread.close(link.peer, link.plan.ranks)

    def _on_lost(self, key: RemoteKey, error: TransferError) -> None:
        worker_id, epoch, _rank = key
        link = self._links.get(worker_id)
        if link is not None and link.peer.epoch == epoch:
            self._close_link(link, TransferError(f"{worker_id} was lost: {error.message}"))
