"""Making a transport by name."""

import asyncio
import zlib
from collections.abc import Mapping

import torch

from twopool.kv_transfer.agent import ReadAgent
from twopool.kv_transfer.fault_points import FaultPoints
from twopool.kv_transfer.faulty_agent import FaultyAgent
from twopool.kv_transfer.gathering import GatheringAgent
from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS
from twopool.kv_transfer.local import LocalAgent, LocalFabric
from twopool.kv_transfer.mapped import MappingAgent
from twopool.kv_transfer.transport import RankTransport
from twopool.protocol.errors import ConfigError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Epoch


def create_transport(
    name: str,
    *,
    pool: torch.Tensor,
    geometry: KvGeometry,
    epoch: Epoch,
    agent_name: str,
    backend: str = "UCX",
    ucx: Mapping[str, str] | None = None,
    map_same_host: bool = True,
    convert_dtype: bool = False,
    fabric: LocalFabric | None = None,
    faults: FaultPoints | None = None,
    loop: asyncio.AbstractEventLoop,
) -> RankTransport:
    """The transport ``name`` ("nixl" or "local") for one rank's pool. Blocks for seconds: call it before serving.

    ``pool`` is the whole pool, contiguous, ``geometry.pool_bytes`` long, any dtype and shape, on the device
    ``geometry`` names; its last ``NUM_RESERVED_BLOCKS`` blocks become the transport's. On the host make it with
    ``memory.allocate_host_pool``: huge pages, all touched, are read up to twice as fast, shared ones can be mapped.
    It stays registered and alive as long as the process.

    ``agent_name`` is the worker's name; rank and epoch are added, because NIXL wants a name for each life. ``backend``
    and ``ucx``, settings by name, are for "nixl", which copies by itself, from one pool in host memory to another that
    it can map, if ``map_same_host``; KV of another dtype is converted if ``convert_dtype``, else refused; ``fabric``
    holds the pools that "local" transports of this process read from; ``faults`` are for tests.
    Raises ``ConfigError`` where these do not fit together or the backend does not start.
    """
    memory = _flat(pool, geometry)
    unique_name = f"{agent_name}.{geometry.tp_rank}.{epoch:x}"
    if name == "nixl":
        from twopool.kv_transfer.nixl import NixlAgent  # loads NIXL and UCX, which "local" does without

        agent: ReadAgent = NixlAgent(name=unique_name, pool=memory, geometry=geometry, backend=backend, ucx=ucx or {})
        if geometry.memory == "host":
            agent = GatheringAgent(agent)
            if map_same_host:  # it copies with the CPU, into memory that the CPU can write
                agent = MappingAgent(agent)
    elif name == "local" and fabric is not None:
        agent = LocalAgent(name=unique_name, pool=memory, fabric=fabric)
    else:
        raise ConfigError(f"no KV transport {name!r} here", param="kv_transport")
    if faults is not None and faults.is_active:
        agent = FaultyAgent(agent, faults, memory)
    return RankTransport(
        name=name,
        agent=agent,
        pool=memory,
        geometry=geometry,
        epoch=epoch,
        convert_dtype=convert_dtype,
        spread=zlib.crc32(agent_name.encode()),
        loop=loop,
    )


def _flat(pool: torch.Tensor, geometry: KvGeometry) -> torch.Tensor:
    """``pool`` as ``[pool_bytes]`` uint8, same memory."""
    if geometry.num_blocks <= NUM_RESERVED_BLOCKS:
        raise ConfigError(f"a KV pool needs more than {NUM_RESERVED_BLOCKS} block, got {geometry.num_blocks}")
    if not pool.is_contiguous() or pool.nbytes != geometry.pool_bytes:
        raise ConfigError(f"the KV pool is {pool.nbytes} bytes, its geometry says {geometry.pool_bytes}, contiguous")
    if (pool.device.type == "cpu") != (geometry.memory == "host"):
        raise ConfigError(f"the KV pool is on {pool.device}, its geometry says {geometry.memory} memory")
    return pool.view(-1).view(torch.uint8)
