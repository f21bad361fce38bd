"""A reader of several ranks in the process of a benchmark: what a worker has in a process for each rank."""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from msgspec.structs import replace

from twopool.kv_transfer.group import GroupTransport
from twopool.kv_transfer.interface import KvTransport
from twopool.kv_transfer.rank_messages import KvAnswer, KvCommand
from twopool.kv_transfer.rank_server import RankServer
from twopool.models.sharding import kv_head_ranges
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import new_epoch
from twopool.protocol.messages import PeerIdentity
from twopool.scripts.bench_pools import make_transport


def deal_heads(pool: KvGeometry, num_ranks: int) -> list[KvGeometry]:
    """The pools of ``num_ranks`` ranks that share the heads of ``pool`` as a worker's do."""
    return [
        replace(pool, kv_head_start=heads.start, num_kv_heads_local=len(heads), tp_rank=rank, tp_size=num_ranks)
        for rank, heads in enumerate(kv_head_ranges(pool.num_kv_heads, num_ranks))
    ]


def as_one_worker(ranks: Sequence[PeerIdentity], name: str) -> PeerIdentity:
    """One worker of ranks that were offered one by one, with one epoch."""
    pools = tuple(pool for rank in ranks for pool in rank.ranks)
    return replace(ranks[0], worker_id=name, ranks=pools)


@dataclass(frozen=True)
class Reader:
    """``transport`` is that of all ``ranks``."""

    transport: KvTransport
    ranks: tuple[KvTransport, ...]

    @classmethod
    def make(cls, args: argparse.Namespace, geometries: Sequence[KvGeometry], name: str) -> "Reader":
        epoch = new_epoch()
        ranks = tuple(make_transport(args, geometry, name, epoch)[0] for geometry in geometries)
        if len(ranks) == 1:
            return cls(ranks[0], ranks)
        ports = [_Port(rank, number) for number, rank in enumerate(ranks[1:], 1)]
        group = GroupTransport(ranks[0], ports)
        for port in ports:
            port.group = group
        return cls(group, ranks)

    async def close(self) -> None:
        for rank in self.ranks:
            await rank.close()


class _Port:
    """A ``RankPort`` to a rank of this process: messages come later and in order, as from another one."""

    def __init__(self, rank: KvTransport, number: int) -> None:
        (self.pool,) = rank.describe()
        self.group: GroupTransport
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._server = RankServer(rank, self._answer, on_fault=lambda error: self.group.fail(f"rank {number}: {error}"))

    def send(self, message: msgspec.Struct) -> None:
        self._loop.call_soon(self._server.on_command, cast(KvCommand, message))

    def _answer(self, message: msgspec.Struct) -> None:
        self._loop.call_soon(self.group.on_answer, self._number, cast(KvAnswer, message))
