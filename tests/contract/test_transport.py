"""What every KV transport promises, each implementation within one process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from twopool.kv_transfer.interface import FetchHandle, FetchRequest
from twopool.kv_transfer.reading import MAX_OPEN_POSTS
from twopool.kv_transfer.remote import MAX_POST_RUNS
from twopool.protocol.errors import KvConversionError, PairRefusedError, TransferError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Epoch
from twopool_testing.waiting import until

if TYPE_CHECKING:
    from tests.contract.conftest import MakeRequest, World

GEOMETRY = KvGeometry(
    num_blocks=33, block_size=16, num_layers=4, num_kv_heads=4, num_kv_heads_local=4, head_dim=8, dtype="bfloat16"
)
TIMEOUT_S = 10.0


async def settled_within(handle: FetchHandle, seconds: float) -> bool:
    done, _ = await asyncio.wait([handle.settled], timeout=seconds)
    return bool(done)


async def test_reads_exactly_what_was_asked(world: World, make_request: MakeRequest) -> None:
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    before = reader.blocks.clone()
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    assert link.is_open
    assert link.peer == source.identity()
    handle = reader.transport.fetch(link, make_request(GEOMETRY, [7, 3, 4, 20], [0, 9, 10, 2]), timeout_s=TIMEOUT_S)
    report = await handle.wait()
    before[[0, 9, 10, 2]] = source.blocks[[7, 3, 4, 20]]
    assert torch.equal(reader.blocks, before)
    assert report.num_bytes == 4 * GEOMETRY.block_bytes
    assert report.num_ranges == 3
    assert report.num_posts == 1
    assert report.transfer_s > 0
    assert await settled_within(handle, 1)
    handle.cancel()
    handle.release()
    assert await handle.wait() == report


async def test_layer_groups_read_their_layers_only(world: World, make_request: MakeRequest) -> None:
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    expected = reader.blocks.clone()
    for layers in ((1, 3), (3, 4)):
        request = make_request(GEOMETRY, [5, 6], [1, 2], layers=layers)
        await reader.transport.fetch(link, request, timeout_s=TIMEOUT_S).wait()
        expected[1:3, :, slice(*layers)] = source.blocks[5:7, :, slice(*layers)]
        assert torch.equal(reader.blocks, expected)


@pytest.mark.parametrize("remote_size", [16, 32])
async def test_unequal_tp_and_block_size(world: World, remote_size: int) -> None:
    """PD-22: a TP1 reader with blocks of 16 from a TP2 source, heads of the source's ranks overlapping."""
    geometry = replace(GEOMETRY, num_kv_heads=3, num_kv_heads_local=3)
    reader = world.rank("d", geometry)
    epoch = Epoch(77)
    sources = [
        world.rank(
            "p",
            replace(
                geometry,
                block_size=remote_size,
                kv_head_start=rank,
                num_kv_heads_local=2,
                tp_rank=rank,
                tp_size=2,
            ),
            epoch=epoch,
        )
        for rank in range(2)
    ]
    link = await reader.transport.connect(sources[0].identity(sources[1]), timeout_s=TIMEOUT_S)
    num_tokens = 40
    remote_ids = np.array([9, 4, 7][: -(-num_tokens // remote_size)], dtype=np.int32)
    local_ids = np.array([3, 8, 1], dtype=np.int32)
    request = FetchRequest(
        remote_block_ids=remote_ids,
        local_block_ids=local_ids,
        start_token=0,
        end_token=num_tokens,
        layer_start=0,
        layer_end=4,
    )
    await reader.transport.fetch(link, request, timeout_s=TIMEOUT_S).wait()
    for token in range(num_tokens):
        landed = reader.blocks[local_ids[token // 16], :, :, :, token % 16]
        for head in range(3):
            rank = 0 if head < 2 else 1
            kept = sources[rank].blocks[remote_ids[token // remote_size], head - rank, :, :, token % remote_size]
            assert torch.equal(landed[head], kept)


@pytest.mark.parametrize("remote_size", [16, 32])
async def test_one_latent_head(world: World, remote_size: int) -> None:
    """A pool as multi-head latent attention has it, from a rank of a peer whose ranks all hold the latent."""
    latent = replace(GEOMETRY, num_kv_heads=1, num_kv_heads_local=1, num_planes=1)
    reader = world.rank("d", latent)
    remote = replace(latent, block_size=remote_size, tp_size=2)
    sources = [world.rank("p", replace(remote, tp_rank=rank), epoch=Epoch(78)) for rank in range(2)]
    link = await reader.transport.connect(sources[0].identity(sources[1]), timeout_s=TIMEOUT_S)
    remote_ids, local_ids = np.array([9, 4][: 32 // remote_size], dtype=np.int32), np.array([3, 8], dtype=np.int32)
    request = FetchRequest(
        remote_block_ids=remote_ids,
        local_block_ids=local_ids,
        start_token=0,
        end_token=32,
        layer_start=1,
        layer_end=4,
    )
    report = await reader.transport.fetch(link, request, timeout_s=TIMEOUT_S).wait()
    assert report.num_bytes == 32 * 3 * latent.head_dim * 2
    for token in range(32):
        landed = reader.blocks[local_ids[token // 16], 0, 1:4, 0, token % 16]
        kept = sources[0].blocks[remote_ids[token // remote_size], 0, 1:4, 0, token % remote_size]
        assert torch.equal(landed, kept)


async def test_two_workers_read_each_other_at_once(world: World, make_request: MakeRequest) -> None:
    first, second = world.rank("a", GEOMETRY), world.rank("b", GEOMETRY)
    links = await asyncio.gather(
        first.transport.connect(second.identity(), timeout_s=TIMEOUT_S),
        second.transport.connect(first.identity(), timeout_s=TIMEOUT_S),
    )
    request = make_request(GEOMETRY, list(range(16, 32)), list(range(16)))
    kept = [second.blocks[16:32].clone(), first.blocks[16:32].clone()]
    handles = [
        rank.transport.fetch(link, request, timeout_s=TIMEOUT_S)
        for rank, link in zip((first, second), links, strict=True)
    ]
    await asyncio.gather(*(handle.wait() for handle in handles))
    assert torch.equal(first.blocks[:16], kept[0])
    assert torch.equal(second.blocks[:16], kept[1])


async def test_many_fetches_at_once_share_posts(world: World, make_request: MakeRequest) -> None:
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    order = np.random.default_rng(1).permutation(32).tolist()
    reader.agent.is_held = True
    posts_before = reader.agent.num_posts
    handles = [
        reader.transport.fetch(link, make_request(GEOMETRY, [order[i]], [i]), timeout_s=TIMEOUT_S) for i in range(32)
    ]
    await reader.has_posted(posts_before + 1)
    reader.agent.is_held = False
    await asyncio.gather(*(handle.wait() for handle in handles))
    assert torch.equal(reader.blocks[:32], source.blocks[order])
    assert reader.agent.num_posts - posts_before < 32


async def test_long_fetch_takes_several_posts(world: World) -> None:
    """Parts of blocks are short runs, and a post holds a bounded number of them."""
    local = replace(GEOMETRY, num_layers=8)
    source, reader = world.rank("p", replace(local, block_size=8)), world.rank("d", local)
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    request = FetchRequest(
        remote_block_ids=np.arange(32, dtype=np.int32),
        local_block_ids=np.arange(16, dtype=np.int32),
        start_token=0,
        end_token=32 * 8,
        layer_start=0,
        layer_end=8,
    )
    report = await reader.transport.fetch(link, request, timeout_s=TIMEOUT_S).wait()
    assert report.num_bytes == 16 * local.block_bytes
    num_runs = 32 * 4 * 8 * 2
    assert report.num_posts == -(-num_runs // MAX_POST_RUNS) == 2
    blocks, heads, layers, two, _, head_dim = local.shape
    halves = reader.blocks.view(blocks, heads, layers, two, 2, 8, head_dim)[:16]
    assert torch.equal(halves.movedim(4, 1).flatten(0, 1), source.blocks[:32])


async def test_wrong_canary_is_refused(world: World) -> None:
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    canary = source.blocks[GEOMETRY.num_blocks - 1]
    canary[2, 1, 0, 3, 4] += 1
    with pytest.raises(TransferError, match=r"canary of p .* is wrong on rank 0"):
        await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    canary[2, 1, 0, 3, 4] -= 1
    assert (await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)).is_open


async def test_stale_identity_is_refused(world: World) -> None:
    """Metadata and address of one life under the epoch of another."""
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    with pytest.raises(TransferError, match="canary"):
        await reader.transport.connect(replace(source.identity(), epoch=Epoch(3)), timeout_s=TIMEOUT_S)


async def test_pools_that_do_not_map_are_refused_with_both_values(world: World) -> None:
    source, reader = world.rank("p", replace(GEOMETRY, num_planes=1, head_dim=16)), world.rank("d", GEOMETRY)
    with pytest.raises(PairRefusedError, match="num_planes 2 here, 1 there; head_dim 8 here, 16 there"):
        await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    other = replace(source.identity(), transport="pigeon")
    with pytest.raises(PairRefusedError, match=f"moves KV over pigeon, this worker over {world.name}"):
        await reader.transport.connect(other, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage"])
async def test_damaged_metadata_is_refused(world: World, damage: str) -> None:
    """X-nixl-metadata-race: the next handshake, with whole metadata, works."""
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    identity = source.identity()
    whole = identity.ranks[0].agent_metadata
    metadata = {"empty": b"", "truncated": whole[: len(whole) // 2], "garbage": b"\xff" * len(whole)}[damage]
    # A pool that can be mapped is read without metadata: this one turns out to be another file.
    shared = identity.ranks[0].shared
    shared = None if shared is None else replace(shared, token=shared.token[::-1])
    damaged = replace(identity, ranks=(replace(identity.ranks[0], agent_metadata=metadata, shared=shared),))
    with pytest.raises(TransferError):
        await reader.transport.connect(damaged, timeout_s=TIMEOUT_S)
    assert (await reader.transport.connect(identity, timeout_s=TIMEOUT_S)).is_open


async def test_address_outside_the_peers_pool_is_refused(world: World) -> None:
    if world.name == "local" or world.maps:
        pytest.skip("these find pools by name, not by address")
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    identity = source.identity()
    moved = replace(identity.ranks[0], base_address=identity.ranks[0].base_address + 4096)
    with pytest.raises(TransferError):
        await reader.transport.connect(replace(identity, ranks=(moved,)), timeout_s=TIMEOUT_S)


async def test_request_beyond_the_pools_raises_at_once(world: World, make_request: MakeRequest) -> None:
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    with pytest.raises(TransferError, match="remote block ids"):
        reader.transport.fetch(link, make_request(GEOMETRY, [32], [0]), timeout_s=TIMEOUT_S)


async def test_connecting_again_keeps_the_link_and_reads_the_canary(world: World) -> None:
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    posts = reader.agent.num_posts
    assert await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S) is link
    assert reader.agent.num_posts == posts + 1


async def test_new_epoch_replaces_the_old_link(world: World, make_request: MakeRequest) -> None:
    old, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    old_link = await reader.transport.connect(old.identity(), timeout_s=TIMEOUT_S)
    new = world.rank("p", GEOMETRY)
    link = await reader.transport.connect(new.identity(), timeout_s=TIMEOUT_S)
    assert link.is_open and not old_link.is_open
    await reader.transport.fetch(link, make_request(GEOMETRY, [1], [2]), timeout_s=TIMEOUT_S).wait()
    assert torch.equal(reader.blocks[2], new.blocks[1])
    with pytest.raises(TransferError, match="closed"):
        reader.transport.fetch(old_link, make_request(GEOMETRY, [1], [2]), timeout_s=TIMEOUT_S)


async def test_cancel_before_the_post_leaves_the_destination_alone(world: World, make_request: MakeRequest) -> None:
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    before = reader.blocks[20].clone()
    reader.agent.is_held = True
    posts = reader.agent.num_posts
    held = []
    for i in range(MAX_OPEN_POSTS):  # fill the window
        held.append(reader.transport.fetch(link, make_request(GEOMETRY, [i], [i]), timeout_s=TIMEOUT_S))
        await reader.has_posted(posts + len(held))
    waiting = reader.transport.fetch(link, make_request(GEOMETRY, [20], [20]), timeout_s=TIMEOUT_S)
    waiting.cancel()
    with pytest.raises(TransferError, match="cancelled"):
        await waiting.wait()
    assert await settled_within(waiting, 2)
    reader.agent.is_held = False
    await asyncio.gather(*(handle.wait() for handle in held))
    assert torch.equal(reader.blocks[20], before)


@pytest.mark.parametrize("end", ["cancel", "release", "deadline", "disconnect"])
async def test_fetch_ended_early_settles_when_its_read_is_over(
    world: World, make_request: MakeRequest, end: str
) -> None:
    """PD-02: whoever ends a fetch early learns from ``settled`` when its destination may be used again."""
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    reader.agent.is_held = True
    posts = reader.agent.num_posts
    timeout_s = 0.1 if end == "deadline" else TIMEOUT_S
    handle = reader.transport.fetch(link, make_request(GEOMETRY, [1], [2]), timeout_s=timeout_s)
    await reader.has_posted(posts + 1)
    if end == "cancel":
        handle.cancel()
    elif end == "release":
        handle.release()
    elif end == "disconnect":
        reader.transport.disconnect(link)
    message = {"deadline": "within 0.1 s", "disconnect": "closed"}.get(end, "cancelled")
    with pytest.raises(TransferError, match=message):
        await handle.wait()
    assert link.is_open is (end != "disconnect")
    assert not await settled_within(handle, 0.1)
    reader.agent.is_held = False
    assert await settled_within(handle, 2)
    handle.cancel()
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    await reader.transport.fetch(link, make_request(GEOMETRY, [5], [2]), timeout_s=TIMEOUT_S).wait()
    assert torch.equal(reader.blocks[2], source.blocks[5])


async def test_peer_that_comes_back_while_its_old_reads_are_open(world: World, make_request: MakeRequest) -> None:
    """The link is closed with a READ under way and made again: the same agent serves both."""
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    reader.agent.is_held = True
    posts = reader.agent.num_posts
    handle = reader.transport.fetch(link, make_request(GEOMETRY, [1], [2]), timeout_s=TIMEOUT_S)
    await reader.has_posted(posts + 1)
    reader.transport.disconnect(link)
    connecting = asyncio.create_task(reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S))
    await asyncio.sleep(0.05)
    assert not handle.settled.done()
    reader.agent.is_held = False
    link = await connecting
    await reader.transport.fetch(link, make_request(GEOMETRY, [5], [3]), timeout_s=TIMEOUT_S).wait()
    assert await settled_within(handle, 2)
    assert torch.equal(reader.blocks[3], source.blocks[5])


async def test_failed_read_fails_every_fetch_of_the_link(world: World, make_request: MakeRequest) -> None:
    source, other, reader = world.rank("p", GEOMETRY), world.rank("q", GEOMETRY), world.rank("d", GEOMETRY)
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    reader.agent.is_held = True
    handles = [reader.transport.fetch(link, make_request(GEOMETRY, [i], [i]), timeout_s=TIMEOUT_S) for i in range(8)]
    await asyncio.sleep(0.05)
    reader.agent.failure = TransferError("cable cut")
    for handle in handles:
        with pytest.raises(TransferError, match="cable cut"):
            await handle.wait()
        assert await settled_within(handle, 2)
    assert not link.is_open
    await asyncio.wait_for(link.closed, TIMEOUT_S)
    reader.agent.failure = None
    reader.agent.is_held = False
    for peer in (other, source):
        link = await reader.transport.connect(peer.identity(), timeout_s=TIMEOUT_S)
        await reader.transport.fetch(link, make_request(GEOMETRY, [5], [3]), timeout_s=TIMEOUT_S).wait()
        assert torch.equal(reader.blocks[3], peer.blocks[5])


async def test_cancelled_waiter_cancels_no_fetch(world: World, make_request: MakeRequest) -> None:
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    reader.agent.is_held = True
    handle = reader.transport.fetch(link, make_request(GEOMETRY, [1], [2]), timeout_s=TIMEOUT_S)
    assert not handle.poll()
    gone, stays = asyncio.create_task(handle.wait()), asyncio.create_task(handle.wait())
    await asyncio.sleep(0.01)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    reader.agent.is_held = False
    assert (await stays).num_bytes == GEOMETRY.block_bytes
    assert handle.poll()


async def test_poll_says_whether_a_fetch_is_over(world: World, make_request: MakeRequest) -> None:
    """Done, cancelled or failed, and never anything else first."""
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    done = reader.transport.fetch(link, make_request(GEOMETRY, [1], [2]), timeout_s=TIMEOUT_S)
    assert not done.poll()
    await until(done.poll)
    assert (await asyncio.wait_for(done.wait(), 0.1)).num_posts == 1
    reader.agent.is_held = True
    cancelled, late = (
        reader.transport.fetch(link, make_request(GEOMETRY, [3], [4 + at]), timeout_s=TIMEOUT_S if at else 0.1)
        for at in (1, 0)
    )
    cancelled.cancel()
    assert cancelled.poll() and not late.poll()
    await until(late.poll)
    with pytest.raises(TransferError, match="did not finish"):
        await late.wait()
    reader.agent.is_held = False
    assert cancelled.poll() and late.poll()


async def test_handshake_that_is_not_answered_ends_at_its_deadline(world: World, make_request: MakeRequest) -> None:
    source, other, reader = world.rank("p", GEOMETRY), world.rank("q", GEOMETRY), world.rank("d", GEOMETRY)
    link = await reader.transport.connect(other.identity(), timeout_s=TIMEOUT_S)
    reader.agent.is_held = True
    with pytest.raises(TransferError, match=r"within 0\.1 s"):
        await reader.transport.connect(source.identity(), timeout_s=0.1)
    assert link.is_open
    reader.agent.is_held = False
    assert (await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)).is_open


async def test_close_fails_what_is_open(world: World, make_request: MakeRequest) -> None:
    source, reader = world.rank("p", GEOMETRY), world.rank("d", GEOMETRY)
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    reader.agent.is_held = True
    handle = reader.transport.fetch(link, make_request(GEOMETRY, [1], [2]), timeout_s=TIMEOUT_S)
    await reader.transport.close()
    await reader.transport.close()
    with pytest.raises(TransferError, match="closed"):
        await handle.wait()
    assert not link.is_open
    with pytest.raises(TransferError, match="closed"):
        await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)


async def test_another_dtype_is_refused_unless_asked_for(world: World) -> None:
    source, reader = world.rank("p", replace(GEOMETRY, dtype="float32")), world.rank("d", GEOMETRY)
    with pytest.raises(TransferError, match="dtype bfloat16 here, float32 there"):
        await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("block_size", [16, 32])
async def test_another_dtype_is_converted(world: World, block_size: int) -> None:
    source = world.rank("p", replace(GEOMETRY, dtype="float32", block_size=block_size))
    reader = world.rank("d", GEOMETRY, convert_dtype=True)
    numbers = source.pool.view(torch.float32).view(source.geometry.shape)
    numbers[:-1] = torch.randn(numbers[:-1].shape) * 100
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    expected = reader.pool.view(torch.bfloat16).view(GEOMETRY.shape).clone()
    blocks = 64 // block_size
    request = FetchRequest(
        remote_block_ids=np.arange(5, 5 + blocks, dtype=np.int32),
        local_block_ids=np.array([9, 2, 3, 11], dtype=np.int32),
        start_token=0,
        end_token=64,
        layer_start=1,
        layer_end=4,
    )
    report = await reader.transport.fetch(link, request, timeout_s=TIMEOUT_S).wait()
    tokens = numbers[5 : 5 + blocks].transpose(3, 4)[:, :, 1:4]  # [blocks, heads, layers, block_size, 2, dim]
    for token in range(64):
        part = tokens[token // block_size, :, :, token % block_size].to(torch.bfloat16)
        expected[request.local_block_ids[token // 16], :, 1:4, :, token % 16] = part
    landed = reader.pool.view(torch.bfloat16).view(GEOMETRY.shape)
    assert torch.equal(landed.view(torch.int16), expected.view(torch.int16))
    assert report.num_converted_bytes == report.num_bytes == 64 * 3 * 4 * 2 * 8 * 4


async def test_a_number_without_a_place_fails_its_fetch_alone(world: World, make_request: MakeRequest) -> None:
    source = world.rank("p", GEOMETRY)
    reader = world.rank("d", replace(GEOMETRY, dtype="float16"), convert_dtype=True)
    numbers = source.pool.view(torch.bfloat16).view(GEOMETRY.shape)
    numbers[:-1] = 3.0
    numbers[4, 1, 2, 0, 5, 1] = 1e6
    link = await reader.transport.connect(source.identity(), timeout_s=TIMEOUT_S)
    handle = reader.transport.fetch(link, make_request(GEOMETRY, [4], [4]), timeout_s=TIMEOUT_S)
    with pytest.raises(KvConversionError, match="too large for float16"):
        await handle.wait()
    assert await settled_within(handle, 1)
    assert link.is_open
    await reader.transport.fetch(link, make_request(GEOMETRY, [3], [3]), timeout_s=TIMEOUT_S).wait()
    assert reader.pool.view(torch.float16).view(GEOMETRY.shape)[3].eq(3).all()
