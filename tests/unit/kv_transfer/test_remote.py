"""Cutting fetches into pieces, and pieces of many fetches into posts."""

import asyncio

import numpy as np

from twopool.kv_transfer.fetch import Fetch
from twopool.kv_transfer.layout import Runs, StridedList
from twopool.kv_transfer.remote import MAX_POST_BYTES, MAX_POST_RUNS, Remote, cut
from twopool.protocol.errors import TransferError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Epoch, WorkerId
from twopool.protocol.messages import RankPool

GEOMETRY = KvGeometry(
    num_blocks=9, block_size=16, num_layers=1, num_kv_heads=1, num_kv_heads_local=1, head_dim=8, dtype="bfloat16"
)
POOL = RankPool(geometry=GEOMETRY, base_address=4096, canary_block=8, agent_metadata=b"")


def a_fetch() -> Fetch:
    loop = asyncio.get_running_loop()
    return Fetch(loop=loop, timeout_s=60, on_abandon=lambda _: None, on_over=lambda _: None)


def some_runs(count: int, *, length: int = 512, offset: int = 0) -> Runs:
    listed = StridedList(offset, length, length, 1 << 20)
    index = np.arange(count, dtype=np.int32)
    return Runs(rank=0, local=listed, remote=listed, local_index=index, remote_index=index[::-1].copy())


def remote_with(*fetches: tuple[Fetch, Runs]) -> Remote:
    remote = Remote((WorkerId("p"), Epoch(1), 0), POOL, "p")
    for fetch, runs in fetches:
        remote.pending.extend(cut(fetch, runs, 4096))
    return remote


async def test_pieces_cover_the_runs_within_both_limits() -> None:
    for length in (512, MAX_POST_BYTES // 100, 2 * MAX_POST_BYTES):
        runs = some_runs(2500, length=length)
        pieces = list(cut(a_fetch(), runs, 4096))
        assert np.array_equal(np.concatenate([piece.local_index for piece in pieces]), runs.local_index)
        assert np.array_equal(np.concatenate([piece.remote_index for piece in pieces]), runs.remote_index)
        for piece in pieces:
            assert len(piece.local_index) <= MAX_POST_RUNS
            assert piece.num_bytes <= MAX_POST_BYTES or len(piece.local_index) == 1


async def test_small_fetches_share_a_post() -> None:
    fetches = [a_fetch() for _ in range(5)]
    remote = remote_with(*((fetch, some_runs(3)) for fetch in fetches))
    batch = remote.next_batch()
    assert batch is not None
    assert batch.fetches == set(fetches)
    local_index, remote_index = batch.indices()
    assert local_index.tolist() == [0, 1, 2] * 5
    assert remote_index.tolist() == [2, 1, 0] * 5
    assert remote.next_batch() is None


async def test_a_post_keeps_to_one_list_and_to_its_limit() -> None:
    first, second, third = a_fetch(), a_fetch(), a_fetch()
    remote = remote_with(
        (first, some_runs(3)), (second, some_runs(3, offset=512)), (third, some_runs(MAX_POST_RUNS, offset=512))
    )
    batches = [remote.next_batch() for _ in range(3)]
    assert [batch.fetches if batch else None for batch in batches] == [{first}, {second}, {third}]


async def test_pieces_of_abandoned_fetches_are_dropped() -> None:
    gone, stays = a_fetch(), a_fetch()
    remote = remote_with((gone, some_runs(3000)), (stays, some_runs(2)))
    gone.fail(TransferError("no more"))
    batch = remote.next_batch()
    assert batch is not None
    assert batch.fetches == {stays}
    assert remote.next_batch() is None
