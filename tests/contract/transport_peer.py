"""A source in a process of its own: `python transport_peer.py CONFIG`, driven through its stdin and stdout.

CONFIG is JSON: geometry, epoch, worker_id, ucx_tls, maps, expect_readers. Prints its `PeerIdentity` as one line of hex
MessagePack once its pool holds `pattern(epoch, ...)`, and lives until stdin is closed.
"""

import asyncio
import json
import sys

import msgspec
import numpy as np
import torch

from twopool.kv_transfer.factory import create_transport
from twopool.kv_transfer.memory import allocate_host_pool
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Epoch, WorkerId
from twopool.protocol.messages import PeerIdentity


def pattern(epoch: int, num_bytes: int) -> torch.Tensor:
    """`[num_bytes]` uint8 that follow from the epoch."""
    rng = np.random.default_rng(epoch)
    return torch.from_numpy(rng.integers(0, 256, size=num_bytes, dtype=np.uint8))


async def serve(config: dict[str, object]) -> None:
    geometry = msgspec.convert(config["geometry"], KvGeometry)
    epoch = Epoch(msgspec.convert(config["epoch"], int))
    worker_id = WorkerId(str(config["worker_id"]))
    maps = msgspec.convert(config["maps"], bool)
    loop = asyncio.get_running_loop()
    transport = create_transport(
        "nixl",
        pool=allocate_host_pool(geometry.pool_bytes, shared=maps).copy_(pattern(epoch, geometry.pool_bytes)),
        geometry=geometry,
        epoch=epoch,
        agent_name=worker_id,
        map_same_host=maps,
        ucx={} if config["ucx_tls"] is None else {"UCX_TLS": str(config["ucx_tls"])},
        loop=loop,
    )
    transport.expect_readers(bool(config["expect_readers"]))
    identity = PeerIdentity(
        worker_id=worker_id, role="prefill", epoch=epoch, transport="nixl", ranks=transport.describe()
    )
    print(msgspec.msgpack.encode(identity).hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
