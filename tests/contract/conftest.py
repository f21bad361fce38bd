"""Transports of every implementation, and sources in processes of their own, always closed or reaped."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from twopool.kv_transfer.agent import Post, PreparedList, ReadAgent
from twopool.kv_transfer.gathering import GatheringAgent
from twopool.kv_transfer.interface import FetchRequest
from twopool.kv_transfer.layout import Index, StridedList
from twopool.kv_transfer.local import LocalAgent, LocalFabric
from twopool.kv_transfer.mapped import MappingAgent
from twopool.kv_transfer.memory import allocate_host_pool
from twopool.kv_transfer.nixl import NixlAgent
from twopool.kv_transfer.transport import RankTransport
from twopool.protocol.errors import TransferError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Epoch, WorkerId, new_epoch
from twopool.protocol.messages import PeerIdentity, RankPool

PEER_PROGRAM = Path(__file__).parent / "transport_peer.py"


class GatedAgent:
    """A real agent whose posts stay under way while ``is_held`` and fail once ``failure`` is set."""

    def __init__(self, agent: ReadAgent) -> None:
        self.name = agent.name
        self.metadata = agent.metadata
        self.is_held = False
        self.failure: TransferError | None = None
        self.num_posts = 0
        self._agent = agent

    def register(self, memory: torch.Tensor) -> None:
        self._agent.register(memory)

    def add_peer(self, pool: RankPool, epoch: Epoch) -> str:
        return self._agent.add_peer(pool, epoch)

    def remove_peer(self, peer: str) -> None:
        self._agent.remove_peer(peer)

    def prepare_local(self, address: int, runs: StridedList) -> PreparedList:
        return self._agent.prepare_local(address, runs)

    def prepare_remote(self, peer: str, pool: RankPool, runs: StridedList) -> PreparedList:
        return self._agent.prepare_remote(peer, pool, runs)

    def post(self, *, local: PreparedList, local_index: Index, remote: PreparedList, remote_index: Index) -> Post:
        self.num_posts += 1
        inner = self._agent.post(local=local, local_index=local_index, remote=remote, remote_index=remote_index)
        return _GatedPost(self, inner)

    def pump(self) -> None:
        self._agent.pump()


class _GatedPost:
    def __init__(self, agent: GatedAgent, inner: Post) -> None:
        self._agent = agent
        self._inner = inner

    def poll(self) -> bool:
        if self._agent.failure is not None:
            raise self._agent.failure
        return not self._agent.is_held and self._inner.poll()

    def release(self) -> None:
        self._inner.release()


@dataclass
class Rank:
    """One rank's pool, agent and transport."""

    worker_id: WorkerId
    epoch: Epoch
    geometry: KvGeometry
    pool: torch.Tensor
    agent: GatedAgent
    transport: RankTransport

    @property
    def blocks(self) -> torch.Tensor:
        """The pool in its shape, two bytes an element."""
        return self.pool.view(torch.int16).view(self.geometry.shape)

    async def has_posted(self, count: int) -> None:
        """Wait until its agent has posted ``count`` READs in all."""
        async with asyncio.timeout(10):
            while self.agent.num_posts < count:  # noqa: ASYNC110 - the count moves on another thread
                await asyncio.sleep(0.001)

    def identity(self, *others: "Rank") -> PeerIdentity:
        return PeerIdentity(
            worker_id=self.worker_id,
            role="prefill",
            epoch=self.epoch,
            transport=self.transport.name,
            ranks=tuple(rank.transport.rank_pool for rank in (self, *others)),
        )


@dataclass
class World:
    """Makes ranks of one implementation within this process."""

    name: str
    ucx_tls: str | None
    maps: bool = False
    fabric: LocalFabric = field(default_factory=LocalFabric)
    ranks: list[Rank] = field(default_factory=list)

    def rank(
        self, worker_id: str, geometry: KvGeometry, *, epoch: Epoch | None = None, convert_dtype: bool = False
    ) -> Rank:
        """A rank whose pool holds random bytes; it answers readers."""
        epoch = new_epoch() if epoch is None else epoch
        rng = np.random.default_rng([epoch, geometry.tp_rank])
        pool = allocate_host_pool(geometry.pool_bytes, shared=self.maps)
        pool.copy_(torch.from_numpy(rng.integers(0, 256, geometry.pool_bytes, dtype=np.uint8)))
        unique_name = f"{worker_id}.{geometry.tp_rank}.{epoch:x}"
        inner: ReadAgent
        if self.name == "local":
            inner = LocalAgent(name=unique_name, pool=pool, fabric=self.fabric)
        else:
            ucx = {} if self.ucx_tls is None else {"UCX_TLS": self.ucx_tls}
            inner = NixlAgent(name=unique_name, pool=pool, geometry=geometry, backend="UCX", ucx=ucx)
            inner = GatheringAgent(inner)
            inner = MappingAgent(inner) if self.maps else inner
        agent = GatedAgent(inner)
        transport = RankTransport(
            name=self.name,
            agent=agent,
            pool=pool,
            geometry=geometry,
            epoch=epoch,
            convert_dtype=convert_dtype,
            loop=asyncio.get_running_loop(),
        )
        transport.expect_readers(True)
        self.ranks.append(Rank(WorkerId(worker_id), epoch, geometry, pool, agent, transport))
        return self.ranks[-1]


@pytest.fixture(params=["local", "nixl", "nixl-map", "nixl-tcp"])
async def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setenv("UCX_TLS", "all")  # restored afterwards, whatever an agent sets
    name, _, path = request.param.partition("-")
    world = World(name=name, ucx_tls=path if path == "tcp" else None, maps=path == "map")
    yield world
    for rank in world.ranks:
        rank.agent.is_held = False
        await rank.transport.close()


class PeerProcess:
    """A source in a process of its own."""

    def __init__(
        self, geometry: KvGeometry, *, worker_id: str, epoch: int, ucx_tls: str | None, maps: bool = False
    ) -> None:
        config = {
            "geometry": msgspec.to_builtins(geometry),
            "epoch": epoch,
            "worker_id": worker_id,
            "ucx_tls": ucx_tls,
            "maps": maps,
            "expect_readers": True,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(PEER_PROGRAM), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        rng = np.random.default_rng(epoch)
        self.pool = torch.from_numpy(rng.integers(0, 256, geometry.pool_bytes, dtype=np.uint8))
        self.geometry = geometry

    async def identity(self) -> PeerIdentity:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), 60)
        return msgspec.msgpack.decode(bytes.fromhex(line.decode()), type=PeerIdentity)

    @property
    def blocks(self) -> torch.Tensor:
        return self.pool.view(torch.int16).view(self.geometry.shape)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def finish(self) -> int:
        """Let it end by itself; its exit status."""
        self.process.communicate(timeout=20)
        return self.process.returncode


StartPeer = Callable[..., PeerProcess]


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    peers: list[PeerProcess] = []

    def start(geometry: KvGeometry, **settings: Any) -> PeerProcess:
        peers.append(PeerProcess(geometry, **settings))
        return peers[-1]

    yield start
    for peer in peers:
        peer.process.kill()
        peer.process.communicate(timeout=10)


MakeRequest = Callable[..., FetchRequest]


@pytest.fixture
def make_request() -> MakeRequest:
    """A request for whole blocks of equal size, all layers unless told otherwise."""

    def make(
        geometry: KvGeometry, remote_ids: list[int], local_ids: list[int], *, layers: tuple[int, int] | None = None
    ) -> FetchRequest:
        layer_start, layer_end = layers or (0, geometry.num_layers)
        return FetchRequest(
            remote_block_ids=np.array(remote_ids, dtype=np.int32),
            local_block_ids=np.array(local_ids, dtype=np.int32),
            start_token=0,
            end_token=len(remote_ids) * geometry.block_size,
            layer_start=layer_start,
            layer_end=layer_end,
        )

    return make
