import asyncio
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace

from twopool.kv_transfer import factory
from twopool.kv_transfer.factory import create_transport
from twopool.kv_transfer.interface import KvTransport
from twopool.kv_transfer.local import LocalFabric
from twopool.kv_transfer.memory import allocate_host_pool, shared_pool
from twopool.protocol.errors import ConfigError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Epoch
from twopool.protocol.messages import RankPool

GEOMETRY = KvGeometry(
    num_blocks=4, block_size=16, num_layers=2, num_kv_heads=1, num_kv_heads_local=1, head_dim=8, dtype="bfloat16"
)


def create(name: str = "local", **changes: Any) -> KvTransport:
    geometry = changes.get("geometry", GEOMETRY)
    settings: dict[str, Any] = {
        "pool": allocate_host_pool(GEOMETRY.pool_bytes),
        "geometry": geometry,
        "epoch": Epoch(1),
        "agent_name": "p",
        "fabric": LocalFabric(),
        "loop": asyncio.get_running_loop(),
    }
    return create_transport(name, **(settings | changes))


@pytest.mark.parametrize("name", ["local", "nixl"])
async def test_describes_the_pool(name: str) -> None:
    pool = torch.zeros(GEOMETRY.shape, dtype=torch.bfloat16)
    transport = create(name, pool=pool)
    (described,) = transport.describe()
    assert described.geometry == GEOMETRY
    assert described.base_address == pool.data_ptr()
    assert described.canary_block == 3
    assert pool[3].view(torch.int16).any()
    assert not pool[:3].view(torch.int16).any()
    await transport.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "pigeon"}, "pigeon"),
        ({"fabric": None}, "local"),
        ({"pool": torch.zeros(100, dtype=torch.uint8)}, "100 bytes"),
        ({"pool": torch.zeros(GEOMETRY.pool_bytes, 2, dtype=torch.uint8)[:, 0]}, "contiguous"),
        ({"geometry": replace(GEOMETRY, memory="device")}, "device memory"),
        ({"geometry": replace(GEOMETRY, num_blocks=1)}, "more than 1 block"),
        ({"name": "nixl", "backend": "NO_SUCH_PLUGIN"}, "NO_SUCH_PLUGIN"),
    ],
)
async def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(**changes)


class StubNixlAgent:
    """Registers what NIXL here could not: memory of a GPU."""

    def __init__(self, *, name: str, **_: Any) -> None:
        self.name = name
        self.metadata = b""
        self.peers: list[RankPool] = []

    def register(self, memory: torch.Tensor) -> None:
        pass

    def add_peer(self, pool: RankPool, epoch: Epoch) -> str:
        self.peers.append(pool)
        return "peer"


@pytest.mark.parametrize(("memory", "num_left_to_nixl"), [("host", 0), ("device", 1)])
async def test_only_host_memory_is_filled_from_mappings(
    memory: Literal["host", "device"], num_left_to_nixl: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU cannot copy into a GPU's memory: there NIXL reads even the pools that could be mapped."""
    agents = list[StubNixlAgent]()

    def make(**settings: Any) -> StubNixlAgent:
        agents.append(StubNixlAgent(**settings))
        return agents[-1]

    monkeypatch.setattr("twopool.kv_transfer.nixl.NixlAgent", make)
    source_pool = allocate_host_pool(GEOMETRY.pool_bytes, shared=True)
    shared = shared_pool(source_pool)
    assert shared is not None
    source = RankPool(geometry=GEOMETRY, base_address=0, canary_block=3, agent_metadata=b"", shared=shared)
    device = "cpu" if memory == "host" else "meta"
    pool = torch.zeros(GEOMETRY.pool_bytes, dtype=torch.uint8, device=device)
    with monkeypatch.context() as patched:
        patched.setattr(factory, "RankTransport", lambda *, agent, **_: agent)
        agent: Any = create("nixl", pool=pool, geometry=replace(GEOMETRY, memory=memory))
    agent.add_peer(source, Epoch(2))
    assert len(agents[0].peers) == num_left_to_nixl


async def test_ucx_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "all")  # restored afterwards
    with pytest.raises(ConfigError, match="UCX_TLS=no_such_transport"):
        create("nixl", ucx={"UCX_TLS": "no_such_transport"})


async def test_ucx_settings_that_ucx_does_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TCP_TX_SEGSIZE", "UCX_RNDV_THRESH"):
        monkeypatch.setenv(name, "64k")  # removed afterwards
    with pytest.raises(ConfigError, match=r"--ucx UCX_TCP_TX_SEGSIZE=64k: .* but UCX_TCP_TX_SEG_SIZE$"):
        create("nixl", ucx={"UCX_TCP_TX_SEGSIZE": "64k"})
    transport = create("nixl", ucx={"UCX_RNDV_THRESH": "64k"})
    await transport.close()


def test_host_pool_is_zeroed_and_aligned() -> None:
    pool = allocate_host_pool(5 * 1024 * 1024 + 3)
    assert pool.dtype == torch.uint8
    assert pool.shape == (5 * 1024 * 1024 + 3,)
    assert pool.data_ptr() % 4096 == 0
    assert not pool.any()
