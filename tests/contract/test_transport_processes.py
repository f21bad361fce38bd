"""NIXL's transport against sources in processes of their own: killed, stopped, restarted under the same name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch
from msgspec.structs import replace

from twopool.kv_transfer.interface import FetchHandle
from twopool.protocol.errors import TransferError
from twopool.protocol.geometry import KvGeometry

if TYPE_CHECKING:
    from tests.contract.conftest import MakeRequest, StartPeer, World

GEOMETRY = KvGeometry(
    num_blocks=33, block_size=16, num_layers=4, num_kv_heads=4, num_kv_heads_local=4, head_dim=8, dtype="bfloat16"
)
LARGE = replace(GEOMETRY, num_blocks=257, head_dim=256)
"""32 MiB: more than the sockets between two processes hold."""

TIMEOUT_S = 10.0


async def settled_within(handle: FetchHandle, seconds: float) -> bool:
    done, _ = await asyncio.wait([handle.settled], timeout=seconds)
    return bool(done)


@pytest.mark.parametrize("world", ["nixl", "nixl-map", "nixl-tcp"], indirect=True)
async def test_other_process(world: World, start_peer: StartPeer, make_request: MakeRequest) -> None:
    peer = start_peer(GEOMETRY, worker_id="p", epoch=11, ucx_tls=world.ucx_tls, maps=world.maps)
    reader = world.rank("d", GEOMETRY)
    link = await reader.transport.connect(await peer.identity(), timeout_s=TIMEOUT_S)
    order = list(range(31, -1, -1))
    await reader.transport.fetch(link, make_request(GEOMETRY, order, list(range(32))), timeout_s=TIMEOUT_S).wait()
    assert torch.equal(reader.blocks[:32], peer.blocks[order])
    assert peer.finish() == 0


@pytest.mark.parametrize("world", ["nixl", "nixl-map", "nixl-tcp"], indirect=True)
async def test_successor_of_a_killed_peer_takes_over(
    world: World, start_peer: StartPeer, make_request: MakeRequest
) -> None:
    """X-pd-prefill-death-recover: SIGKILL, then a new life under the same name."""
    peer = start_peer(GEOMETRY, worker_id="p", epoch=11, ucx_tls=world.ucx_tls, maps=world.maps)
    successor = start_peer(GEOMETRY, worker_id="p", epoch=12, ucx_tls=world.ucx_tls, maps=world.maps)
    reader = world.rank("d", GEOMETRY)
    link = await reader.transport.connect(await peer.identity(), timeout_s=TIMEOUT_S)
    peer.kill()
    handle = reader.transport.fetch(link, make_request(GEOMETRY, [1, 2], [1, 2]), timeout_s=TIMEOUT_S)
    with pytest.raises(TransferError):
        await handle.wait()
    assert await settled_within(handle, 2)
    assert not link.is_open
    link = await reader.transport.connect(await successor.identity(), timeout_s=TIMEOUT_S)
    await reader.transport.fetch(link, make_request(GEOMETRY, [1, 2], [3, 4]), timeout_s=TIMEOUT_S).wait()
    assert torch.equal(reader.blocks[3:5], successor.blocks[1:3])


@pytest.mark.parametrize("world", ["nixl-tcp"], indirect=True)
async def test_peer_killed_during_a_read(world: World, start_peer: StartPeer, make_request: MakeRequest) -> None:
    peer = start_peer(LARGE, worker_id="p", epoch=11, ucx_tls=world.ucx_tls, maps=world.maps)
    reader = world.rank("d", LARGE)
    link = await reader.transport.connect(await peer.identity(), timeout_s=TIMEOUT_S)
    peer.stop()
    ids = list(range(256))
    handle = reader.transport.fetch(link, make_request(LARGE, ids, ids), timeout_s=TIMEOUT_S)
    assert not await settled_within(handle, 0.2)
    peer.kill()
    with pytest.raises(TransferError, match=r"p was lost|NIXL"):
        await asyncio.wait_for(handle.wait(), 2)
    assert await settled_within(handle, 2)
    assert not link.is_open


@pytest.mark.parametrize("world", ["nixl-tcp"], indirect=True)
async def test_late_bytes_land_only_in_unsettled_blocks(
    world: World, start_peer: StartPeer, make_request: MakeRequest
) -> None:
    """PD-02: SIGSTOP, deadline, disconnect, SIGCONT. The link's end does not stop the READ, so it must not settle."""
    peer = start_peer(LARGE, worker_id="p", epoch=11, ucx_tls=world.ucx_tls, maps=world.maps)
    other = start_peer(LARGE, worker_id="q", epoch=12, ucx_tls=world.ucx_tls, maps=world.maps)
    reader = world.rank("d", LARGE)
    identity = await peer.identity()
    link = await reader.transport.connect(identity, timeout_s=TIMEOUT_S)
    reader.pool.zero_()
    peer.stop()
    ids = list(range(128))
    handle = reader.transport.fetch(link, make_request(LARGE, ids, ids), timeout_s=0.2)
    with pytest.raises(TransferError, match=r"within 0\.2 s"):
        await handle.wait()
    reader.transport.disconnect(link)
    other_link = await reader.transport.connect(await other.identity(), timeout_s=TIMEOUT_S)
    request = make_request(LARGE, ids, list(range(128, 256)))
    await reader.transport.fetch(other_link, request, timeout_s=TIMEOUT_S).wait()
    assert not handle.settled.done()
    peer.resume()
    assert await settled_within(handle, TIMEOUT_S)
    landed = reader.pool.clone()
    assert landed[: LARGE.block_bytes].any(), "the READ was expected to land late"
    await asyncio.sleep(0.2)
    assert torch.equal(reader.pool, landed)
    assert torch.equal(reader.blocks[128:256], other.blocks[:128])
    link = await reader.transport.connect(identity, timeout_s=TIMEOUT_S)
    await reader.transport.fetch(link, make_request(LARGE, ids, ids), timeout_s=TIMEOUT_S).wait()
    assert torch.equal(reader.blocks[:128], peer.blocks[:128])


@pytest.mark.parametrize("world", ["nixl", "nixl-tcp"], indirect=True)
async def test_handshake_with_a_stopped_peer_ends_at_its_deadline(world: World, start_peer: StartPeer) -> None:
    peer = start_peer(GEOMETRY, worker_id="p", epoch=11, ucx_tls=world.ucx_tls, maps=world.maps)
    identity = await peer.identity()
    reader = world.rank("d", GEOMETRY)
    peer.stop()
    with pytest.raises(TransferError, match=r"within 0\.3 s"):
        await reader.transport.connect(identity, timeout_s=0.3)
    peer.resume()
    assert (await reader.transport.connect(identity, timeout_s=TIMEOUT_S)).is_open


@pytest.mark.parametrize("world", ["nixl", "nixl-map"], indirect=True)
async def test_stopped_peer_on_one_host_can_be_read(
    world: World, start_peer: StartPeer, make_request: MakeRequest
) -> None:
    """Cross memory attach needs nothing of the peer, once connected, and neither does a mapping."""
    peer = start_peer(GEOMETRY, worker_id="p", epoch=11, ucx_tls=None, maps=world.maps)
    reader = world.rank("d", GEOMETRY)
    link = await reader.transport.connect(await peer.identity(), timeout_s=TIMEOUT_S)
    peer.stop()
    await reader.transport.fetch(link, make_request(GEOMETRY, [4], [5]), timeout_s=TIMEOUT_S).wait()
    assert torch.equal(reader.blocks[5], peer.blocks[4])
