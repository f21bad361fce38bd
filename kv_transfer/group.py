"""The ``KvTransport`` of a worker with several ranks: every call goes to all of them and is over when all are.

The leader's own rank has its ``RankTransport`` in this process, each other rank one in its own, behind a ``RankPort``;
``RankServer`` is the other end. Each rank plans for itself which of a peer's ranks it reads which heads from.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from twopool.kv_transfer.checksums import ChecksumRequest, Checksums
from twopool.kv_transfer.interface import (
    FetchHandle,
    FetchReport,
    FetchRequest,
    KvTransport,
    PeerLink,
    closed_link_error,
)
from twopool.kv_transfer.rank_messages import (
    CancelFetch,
    CloseLink,
    ExpectReaders,
    FetchOver,
    FetchSettled,
    KvAnswer,
    LinkLost,
    LinkOpened,
    OpenLink,
    StartFetch,
    SumUnits,
    UnitSums,
)
from twopool.protocol.errors import PeerLostError, TransferError
from twopool.protocol.ids import WorkerId
from twopool.protocol.messages import PeerIdentity, RankPool, pack_ids

T = TypeVar("T")

ANSWER_GRACE_S = 2.0
"""A rank keeps to the deadlines it is given; that its answer is later than this means that it gives none."""


class RankPort(Protocol):
    """The way to one of the other ranks."""

    @property
    def pool(self) -> RankPool: ...

    def send(self, message: msgspec.Struct) -> None:
        """Never blocks. What is sent to a rank that is gone is dropped: ``GroupTransport.fail`` tells."""
        ...


class GroupLink:
    """A ``PeerLink`` of every rank. ``number`` is its name on the other ranks."""

    def __init__(self, peer: PeerIdentity, local: PeerLink, number: int) -> None:
        self.peer = peer
        self.local = local
        self.number = number
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        local.closed.add_done_callback(lambda _: self.close())

    @property
    def is_open(self) -> bool:
        return not self.closed.done() and self.local.is_open

    def close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class GroupTransport:
    """See ``KvTransport``. ``ports`` lead to ranks 1, 2, ... in order."""

    def __init__(self, local: KvTransport, ports: Sequence[RankPort]) -> None:
        self.name = local.name
        self.spread = local.spread
        self._local = local
        self._ports = tuple(ports)
        self._numbers = itertools.count()
        self._links: dict[WorkerId, GroupLink] = {}
        self._by_number: dict[int, GroupLink] = {}
        self._connecting: dict[WorkerId, asyncio.Lock] = {}
        self._opening: dict[tuple[int, int], asyncio.Future[TransferError | None]] = {}
        self._fetches: dict[int, _GroupFetch] = {}
        self._sums: dict[tuple[int, int], asyncio.Future[bytes]] = {}
        self._expects_readers = False
        self._failure: TransferError | None = None

    def describe(self) -> tuple[RankPool, ...]:
        return (*self._local.describe(), *(port.pool for port in self._ports))

    async def connect(self, peer: PeerIdentity, *, timeout_s: float) -> PeerLink:
        try:
            async with (
                asyncio.timeout(timeout_s + ANSWER_GRACE_S),
                self._connecting.setdefault(peer.worker_id, asyncio.Lock()),
            ):
                return await self._connect(peer, timeout_s)
        except TimeoutError:
            raise TransferError(f"{peer.worker_id} did not answer the KV handshake within {timeout_s:g} s") from None

    def disconnect(self, link: PeerLink) -> None:
        link = _own(link)
        link.close()
        if self._links.get(link.peer.worker_id) is link:
            del self._links[link.peer.worker_id]
        self._local.disconnect(link.local)
        if self._by_number.pop(link.number, None) is not None:
            self._tell(CloseLink(link=link.number))

    def fetch(self, link: PeerLink, request: FetchRequest, *, timeout_s: float) -> FetchHandle:
        link = _own(link)
        if self._failure is not None:
            raise self._failure
        if not link.is_open:
            raise closed_link_error(link.peer)
        local = self._local.fetch(link.local, request, timeout_s=timeout_s)
        number = next(self._numbers)
        fetch = _GroupFetch(local, len(self._ports) + 1, lambda: self._tell(CancelFetch(fetch=number)))
        self._fetches[number] = fetch
        fetch.settled.add_done_callback(lambda _: self._fetches.pop(number))
        self._tell(
            StartFetch(
                fetch=number,
                link=link.number,
                remote_block_ids=pack_ids(request.remote_block_ids),
                local_block_ids=pack_ids(request.local_block_ids),
                start_token=request.start_token,
                end_token=request.end_token,
                layer_start=request.layer_start,
                layer_end=request.layer_end,
                timeout_s=timeout_s,
            )
        )
        return fetch

    def expect_readers(self, expected: bool) -> None:
        self._local.expect_readers(expected)
        if expected or expected != self._expects_readers:
            self._tell(ExpectReaders(expected=expected))
        self._expects_readers = expected

    async def checksums(self, request: ChecksumRequest) -> Checksums:
        if self._failure is not None:
            raise self._failure
        call = next(self._numbers)
        answers = [self._expect(self._sums, rank, call) for rank in self._other_ranks]
        self._tell(
            SumUnits(
                call=call,
                block_ids=pack_ids(request.block_ids),
                start_token=request.start_token,
                unit_tokens=request.unit_tokens,
                layer_start=request.layers[0],
                layer_end=request.layers[1],
                units=pack_ids(request.units),
                dtype=request.dtype,
            )
        )
        parts = [await self._local.checksums(request)]
        for port, data in zip(self._ports, await asyncio.gather(*answers), strict=True):
            heads = port.pool.geometry.num_kv_heads_local
            parts.append(np.frombuffer(data, dtype="<u8").astype(np.uint64).reshape(len(request.units), heads))
        return np.concatenate(parts, axis=1)

    async def close(self) -> None:
        for link in list(self._links.values()):
            self.disconnect(link)
        await self._local.close()

    # --- from the other ranks

    def on_answer(self, rank: int, answer: KvAnswer) -> None:
        """What rank ``rank`` (1, 2, ...) says."""
        match answer:
            case LinkOpened():
                opening = self._opening.pop((rank, answer.link), None)
                if opening is not None and not opening.done():
                    opening.set_result(answer.failure.error(rank) if answer.failure is not None else None)
            case LinkLost():
                link = self._by_number.get(answer.link)
                if link is not None:
                    self.disconnect(link)
            case FetchOver():
                fetch = self._fetches.get(answer.fetch)
                if fetch is not None and answer.report is not None:
                    fetch.part_done(answer.report)
                elif fetch is not None and answer.failure is not None:
                    fetch.part_failed(answer.failure.error(rank))
            case FetchSettled():
                fetch = self._fetches.get(answer.fetch)
                if fetch is not None:
                    fetch.part_settled()
            case UnitSums():
                sums = self._sums.pop((rank, answer.call), None)
                if sums is not None and not sums.done():
                    sums.set_result(answer.sums)

    def fail(self, reason: str) -> None:
        """A rank is gone, and with it the worker: whatever waits ends, nothing new begins, nothing ever settles."""
        self._failure = PeerLostError(reason)
        for opening in self._opening.values():
            if not opening.done():
                opening.set_result(self._failure)
        for sums in self._sums.values():
            if not sums.done():
                sums.set_exception(self._failure)
        for fetch in list(self._fetches.values()):
            fetch.part_failed(self._failure)

    # --- private

    @property
    def _other_ranks(self) -> range:
        return range(1, len(self._ports) + 1)

    async def _connect(self, peer: PeerIdentity, timeout_s: float) -> GroupLink:
        if self._failure is not None:
            raise self._failure
        number = next(self._numbers)
        answers = [self._expect(self._opening, rank, number) for rank in self._other_ranks]
        self._tell(OpenLink(link=number, peer=peer, timeout_s=timeout_s))
        local: PeerLink | None = None
        is_open = False
        try:
            local = await self._local.connect(peer, timeout_s=timeout_s)
            for failure in await asyncio.gather(*answers):
                if failure is not None:
                    raise failure
            is_open = True
        finally:
            if not is_open:
                for rank in self._other_ranks:
                    self._opening.pop((rank, number), None)
                self._tell(CloseLink(link=number))
                if local is not None:
                    self._local.disconnect(local)
        link = self._links.get(peer.worker_id)
        if link is not None and link.local is local and link.is_open:  # connected already, and looked at once more
            self._by_number.pop(link.number)
            self._tell(CloseLink(link=link.number))
            link.number = number
        else:
            if link is not None:
                link.close()
                self._by_number.pop(link.number, None)
                self._tell(CloseLink(link=link.number))
            link = self._links[peer.worker_id] = GroupLink(peer, local, number)
        self._by_number[number] = link
        return link

    def _expect(self, table: dict[tuple[int, int], asyncio.Future[T]], rank: int, number: int) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        table[rank, number] = answer
        return answer

    def _tell(self, message: msgspec.Struct) -> None:
        for port in self._ports:
            port.send(message)


class _GroupFetch:
    """A ``FetchHandle`` of ``num_parts`` ranks, of which ``local`` is the one in this process."""

    def __init__(self, local: FetchHandle, num_parts: int, cancel_others: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.settled: asyncio.Future[None] = loop.create_future()
        self._local = local
        self._cancel_others = cancel_others
        self._num_unsettled = num_parts
        self._num_parts = num_parts
        self._reports: list[FetchReport] = []
        self._result: asyncio.Future[FetchReport | TransferError] = loop.create_future()
        self._following = asyncio.ensure_future(self._follow())

    def poll(self) -> bool:
        return self._result.done()

    async def wait(self) -> FetchReport:
        result = await asyncio.shield(self._result)
        if isinstance(result, TransferError):
            raise result
        return result

    def cancel(self) -> None:
        self.part_failed(TransferError("the fetch was cancelled"))

    def release(self) -> None:
        self.cancel()

    def part_done(self, report: FetchReport) -> None:
        self._reports.append(report)
        if len(self._reports) == self._num_parts and not self._result.done():
            self._result.set_result(_sum(self._reports))

    def part_failed(self, error: TransferError) -> None:
        """The first one counts; the others need not go on."""
        if self._result.done():
            return
        self._result.set_result(error)
        self._local.cancel()
        self._cancel_others()

    def part_settled(self) -> None:
        self._num_unsettled -= 1
        if not self._num_unsettled:
            self.settled.set_result(None)

    async def _follow(self) -> None:
        try:
            self.part_done(await self._local.wait())
        except TransferError as error:
            self.part_failed(error)
        await asyncio.shield(self._local.settled)
        self._local.release()
        self.part_settled()


def _sum(reports: Sequence[FetchReport]) -> FetchReport:
    return FetchReport(
        num_bytes=sum(report.num_bytes for report in reports),
        num_ranges=sum(report.num_ranges for report in reports),
        num_posts=sum(report.num_posts for report in reports),
        num_converted_bytes=sum(report.num_converted_bytes for report in reports),
        transfer_s=max(report.transfer_s for report in reports),
    )


def _own(link: PeerLink) -> GroupLink:
    if not isinstance(link, GroupLink):
        raise TypeError("the link is not one of this transport's")
    return link
