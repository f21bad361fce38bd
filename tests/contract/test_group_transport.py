"""A worker of several ranks moves KV like a worker of one: same interface, whatever the degrees of both sides."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from twopool.kv_transfer.checksums import ChecksumRequest
from twopool.kv_transfer.group import GroupTransport
from twopool.kv_transfer.interface import FetchRequest
from twopool.kv_transfer.layout import source_columns
from twopool.kv_transfer.rank_messages import KvAnswer, KvCommand
from twopool.kv_transfer.rank_server import RankServer
from twopool.protocol.errors import PairRefusedError, PeerLostError, TransferError, TransferTimeoutError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import WorkerId, new_epoch
from twopool.protocol.messages import PeerIdentity, RankPool

if TYPE_CHECKING:
    from tests.contract.conftest import Rank, World

GEOMETRY = KvGeometry(
    num_blocks=17, block_size=16, num_layers=3, num_kv_heads=3, num_kv_heads_local=3, head_dim=4, dtype="bfloat16"
)
TIMEOUT_S = 10.0
TOKENS = np.arange(150)


class Wire:
    """A ``RankPort`` to a ``RankServer`` in this process: messages cross as bytes, later, in order."""

    def __init__(self, rank: Rank, number: int) -> None:
        self.pool: RankPool = rank.transport.rank_pool
        self.group: GroupTransport
        self.is_cut = False
        self.faults: list[BaseException] = []
        self._number = number
        self._server = RankServer(rank.transport, self._answer, self.faults.append)
        self._loop = asyncio.get_running_loop()

    def send(self, message: msgspec.Struct) -> None:
        self._carry(message, KvCommand, self._server.on_command)

    def _answer(self, message: msgspec.Struct) -> None:
        self._carry(message, KvAnswer, lambda answer: self.group.on_answer(self._number, answer))

    def _carry(self, message: msgspec.Struct, union: Any, to: Any) -> None:
        if not self.is_cut:
            decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union)
            self._loop.call_soon(to, decoded)


@dataclass
class Worker:
    """``ranks`` of one worker behind a ``GroupTransport``."""

    ranks: list[Rank]
    wires: list[Wire]
    transport: GroupTransport

    @classmethod
    def make(cls, world: World, name: str, degree: int, base: KvGeometry = GEOMETRY) -> Worker:
        epoch = new_epoch()
        ranks = [world.rank(name, geometry, epoch=epoch) for geometry in rank_geometries(base, degree)]
        wires = [Wire(rank, number) for number, rank in enumerate(ranks[1:], 1)]
        transport = GroupTransport(ranks[0].transport, wires)
        for wire in wires:
            wire.group = transport
        return cls(ranks, wires, transport)

    @property
    def identity(self) -> PeerIdentity:
        return PeerIdentity(
            worker_id=WorkerId(self.ranks[0].worker_id),
            role="prefill",
            epoch=self.ranks[0].epoch,
            transport=self.transport.name,
            ranks=self.transport.describe(),
        )

    def fill(self) -> None:
        """Every cell says which token, head and layer it is of, as if block b held tokens from b * block_size on."""
        for rank in self.ranks:
            shape = rank.geometry.shape
            block, head, layer, which, offset, dim = np.ogrid[tuple(slice(n) for n in shape)]
            token = block * shape[4] + offset
            head = head + rank.geometry.kv_head_start
            cells = ((token * 31 + head) * 17 + layer) * 2 + which + dim * 1000
            rank.blocks[:-1] = torch.from_numpy((cells % 32000).astype(np.int16))[:-1]

    def cells(self, token: int) -> list[torch.Tensor]:
        """``[heads of the rank, layers, 2, head_dim]`` of each rank, from block ``token // block_size``."""
        size = self.ranks[0].geometry.block_size
        return [rank.blocks[token // size, :, :, :, token % size] for rank in self.ranks]


def rank_geometries(base: KvGeometry, degree: int) -> list[KvGeometry]:
    """KV heads dealt out as ranges, the first ranks one more; replicated where there are more ranks than heads."""
    heads = base.num_kv_heads
    if degree <= heads:
        sizes = [heads // degree + (rank < heads % degree) for rank in range(degree)]
        starts = [sum(sizes[:rank]) for rank in range(degree)]
    else:
        replicas = [degree // heads + (head < degree % heads) for head in range(heads)]
        starts = [head for head in range(heads) for _ in range(replicas[head])]
        sizes = [1] * degree
    return [
        replace(base, kv_head_start=start, num_kv_heads_local=size, tp_rank=rank, tp_size=degree)
        for rank, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def request(reader: Worker, source: Worker, start: int, end: int, layers: tuple[int, int] = (0, 3)) -> FetchRequest:
    """Tokens [start, end) from where ``fill`` put them into the same places."""

    def ids(worker: Worker) -> np.ndarray[Any, np.dtype[np.int32]]:
        size = worker.ranks[0].geometry.block_size
        return np.arange(start // size, -(-end // size), dtype=np.int32)

    return FetchRequest(
        remote_block_ids=ids(source),
        local_block_ids=ids(reader),
        start_token=start,
        end_token=end,
        layer_start=layers[0],
        layer_end=layers[1],
    )


def sums(worker: Worker, start: int, end: int, unit_tokens: int) -> ChecksumRequest:
    size = worker.ranks[0].geometry.block_size
    return ChecksumRequest(
        block_ids=np.arange(start // size, -(-end // size), dtype=np.int32),
        start_token=start,
        unit_tokens=unit_tokens,
        layers=(0, 3),
        units=np.arange(-(-end // unit_tokens) - start // unit_tokens, dtype=np.int32),
    )


@pytest.mark.parametrize("reader_degree", [1, 2, 3, 4])
@pytest.mark.parametrize("source_degree", [1, 2, 3, 4])
async def test_every_pair_of_degrees(world: World, source_degree: int, reader_degree: int) -> None:
    """PD-22. Uneven (2 of 3 heads + 1) and replicated heads, unequal blocks; checksums of both sides agree."""
    if world.name != "local" and (source_degree, reader_degree) not in ((2, 3), (4, 2)):
        pytest.skip("every pair in process, two of them over NIXL")
    sizes = (16, 32) if (source_degree + reader_degree) % 2 else (16, 16)
    source = Worker.make(world, "p", source_degree, replace(GEOMETRY, block_size=sizes[0]))
    reader = Worker.make(world, "d", reader_degree, replace(GEOMETRY, block_size=sizes[1]))
    source.fill()
    link = await reader.transport.connect(source.identity, timeout_s=TIMEOUT_S)
    assert link.is_open and link.peer == source.identity
    whole = reader.transport.fetch(link, request(reader, source, 0, 96), timeout_s=TIMEOUT_S)
    parts = [
        reader.transport.fetch(link, request(reader, source, 96, 150, layers), timeout_s=TIMEOUT_S)
        for layers in ((0, 1), (1, 3))
    ]
    reports = [await handle.wait() for handle in (whole, *parts)]
    await asyncio.gather(*(handle.settled for handle in (whole, *parts)))
    expected = Worker.make(world, "x", reader_degree, replace(GEOMETRY, block_size=sizes[1]))
    expected.fill()
    for token in TOKENS.tolist():
        for landed, wanted in zip(reader.cells(token), expected.cells(token), strict=True):
            assert torch.equal(landed, wanted), token
    heads = sum(rank.geometry.num_kv_heads_local for rank in reader.ranks)
    assert sum(report.num_bytes for report in reports) == 160 * heads * 3 * 2 * 4 * 2
    assert reports[0].transfer_s > 0
    theirs = await source.transport.checksums(sums(source, 0, 150, 16))
    ours = await reader.transport.checksums(sums(reader, 0, 150, 16))
    columns = source_columns([r.geometry for r in reader.ranks], [r.geometry for r in source.ranks])
    assert np.array_equal(ours, theirs[:, columns])
    assert not any(wire.faults for wire in (*source.wires, *reader.wires))


async def test_replicas_share_the_load(world: World) -> None:
    """Four ranks with one replicated head are read by four others: each from another one."""
    one_head = replace(GEOMETRY, num_kv_heads=1, num_kv_heads_local=1)
    source, reader = Worker.make(world, "p", 4, one_head), Worker.make(world, "d", 4, one_head)
    for number, rank in enumerate(source.ranks):
        rank.blocks[:-1] = number
    link = await reader.transport.connect(source.identity, timeout_s=TIMEOUT_S)
    await reader.transport.fetch(link, request(reader, source, 0, 64), timeout_s=TIMEOUT_S).wait()
    assert sorted(int(cells.flatten()[0]) for cells in reader.cells(0)) == [0, 1, 2, 3]


@pytest.mark.parametrize("slow_rank", [0, 1])
async def test_a_fetch_is_over_when_all_ranks_are(world: World, slow_rank: int) -> None:
    source, reader = Worker.make(world, "p", 1), Worker.make(world, "d", 2)
    link = await reader.transport.connect(source.identity, timeout_s=TIMEOUT_S)
    slow = reader.ranks[slow_rank].agent
    slow.is_held = True
    handle = reader.transport.fetch(link, request(reader, source, 0, 64), timeout_s=TIMEOUT_S)
    waiting = asyncio.ensure_future(handle.wait())
    await asyncio.sleep(0.1)
    assert not waiting.done() and not handle.settled.done() and not handle.poll()
    slow.is_held = False
    assert (await waiting).num_bytes == 4 * GEOMETRY.block_bytes
    assert handle.poll()
    await handle.settled


@pytest.mark.parametrize("slow_rank", [0, 1])
async def test_a_cancelled_fetch_settles_with_its_last_rank(world: World, slow_rank: int) -> None:
    """What one rank may still write stays quarantined on all: a block is the same block on each."""
    source, reader = Worker.make(world, "p", 1), Worker.make(world, "d", 2)
    link = await reader.transport.connect(source.identity, timeout_s=TIMEOUT_S)
    slow = reader.ranks[slow_rank]
    slow.agent.is_held = True
    before = slow.agent.num_posts
    handle = reader.transport.fetch(link, request(reader, source, 0, 64), timeout_s=TIMEOUT_S)
    await slow.has_posted(before + 1)
    handle.cancel()
    with pytest.raises(TransferError, match="cancelled"):
        await handle.wait()
    await asyncio.sleep(0.1)
    assert not handle.settled.done()
    slow.agent.is_held = False
    async with asyncio.timeout(TIMEOUT_S):
        await handle.settled
    handle.release()


async def test_one_rank_that_fails_fails_the_fetch_and_the_link(world: World) -> None:
    source, reader = Worker.make(world, "p", 2), Worker.make(world, "d", 2)
    link = await reader.transport.connect(source.identity, timeout_s=TIMEOUT_S)
    reader.ranks[1].agent.failure = TransferError("broken on purpose")
    handle = reader.transport.fetch(link, request(reader, source, 0, 64), timeout_s=TIMEOUT_S)
    with pytest.raises(TransferError, match="rank 1: "):
        await handle.wait()
    async with asyncio.timeout(TIMEOUT_S):
        await handle.settled
        await link.closed
    assert not link.is_open
    with pytest.raises(TransferError, match="closed"):
        reader.transport.fetch(link, request(reader, source, 0, 64), timeout_s=TIMEOUT_S)
    reader.ranks[1].agent.failure = None
    again = await reader.transport.connect(source.identity, timeout_s=TIMEOUT_S)
    await reader.transport.fetch(again, request(reader, source, 0, 64), timeout_s=TIMEOUT_S).wait()


async def test_a_deadline_keeps_its_type(world: World) -> None:
    source, reader = Worker.make(world, "p", 1), Worker.make(world, "d", 2)
    link = await reader.transport.connect(source.identity, timeout_s=TIMEOUT_S)
    reader.ranks[1].agent.is_held = True
    handle = reader.transport.fetch(link, request(reader, source, 0, 64), timeout_s=0.1)
    with pytest.raises(TransferTimeoutError, match="rank 1: "):
        await handle.wait()


async def test_a_wrong_canary_on_one_rank_refuses_the_peer(world: World) -> None:
    """The reader's rank 1 finds it; rank 0, which reads other heads, does not."""
    source, reader = Worker.make(world, "p", 3), Worker.make(world, "d", 2)
    source.ranks[2].blocks[-1] ^= 1  # head 2, which the reader's rank 1 reads
    with pytest.raises(TransferError, match=r"rank 1: the canary of p .* is wrong on rank 2"):
        await reader.transport.connect(source.identity, timeout_s=TIMEOUT_S)
    source.ranks[2].blocks[-1] ^= 1
    link = await reader.transport.connect(source.identity, timeout_s=TIMEOUT_S)
    await reader.transport.fetch(link, request(reader, source, 0, 64), timeout_s=TIMEOUT_S).wait()


async def test_a_peer_that_lacks_a_rank_of_ours_a_head_is_refused_as_a_pair(world: World) -> None:
    """The reader's rank 1 says so; rank 0 has all it needs."""
    source, reader = Worker.make(world, "p", 3), Worker.make(world, "d", 2)
    peer = replace(source.identity, ranks=source.identity.ranks[:2])
    with pytest.raises(PairRefusedError, match="rank 1: KV head 2 is needed here"):
        await reader.transport.connect(peer, timeout_s=TIMEOUT_S)


async def test_connecting_again_gives_the_same_link(world: World) -> None:
    source, reader = Worker.make(world, "p", 2), Worker.make(world, "d", 2)
    link = await reader.transport.connect(source.identity, timeout_s=TIMEOUT_S)
    assert await reader.transport.connect(source.identity, timeout_s=TIMEOUT_S) is link
    await reader.transport.fetch(link, request(reader, source, 0, 64), timeout_s=TIMEOUT_S).wait()
    reader.transport.disconnect(link)
    reader.transport.disconnect(link)
    assert not link.is_open
    await asyncio.sleep(0.05)
    assert not any(wire.faults for wire in reader.wires)


async def test_a_restarted_peer_replaces_its_predecessor(world: World) -> None:
    reader = Worker.make(world, "d", 2)
    first = Worker.make(world, "p", 2)
    old = await reader.transport.connect(first.identity, timeout_s=TIMEOUT_S)
    second = Worker.make(world, "p", 3)
    new = await reader.transport.connect(second.identity, timeout_s=TIMEOUT_S)
    assert new.is_open and not old.is_open
    second.fill()
    await reader.transport.fetch(new, request(reader, second, 0, 64), timeout_s=TIMEOUT_S).wait()
    reader.transport.disconnect(old)
    await reader.transport.fetch(new, request(reader, second, 64, 128), timeout_s=TIMEOUT_S).wait()


async def test_a_lost_rank_ends_everything_that_waits(world: World) -> None:
    source, reader = Worker.make(world, "p", 1), Worker.make(world, "d", 2)
    link = await reader.transport.connect(source.identity, timeout_s=TIMEOUT_S)
    reader.wires[0].is_cut = True
    waiting = [
        asyncio.ensure_future(work)
        for work in (
            reader.transport.fetch(link, request(reader, source, 0, 64), timeout_s=TIMEOUT_S).wait(),
            reader.transport.checksums(sums(reader, 0, 64, 16)),
            reader.transport.connect(source.identity, timeout_s=TIMEOUT_S),
        )
    ]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in waiting)
    reader.transport.fail("rank 1 ended with signal SIGKILL")
    for task in waiting:
        with pytest.raises(PeerLostError, match="SIGKILL"):
            await asyncio.wait_for(task, 1)
    with pytest.raises(PeerLostError):
        reader.transport.fetch(link, request(reader, source, 0, 64), timeout_s=TIMEOUT_S)
