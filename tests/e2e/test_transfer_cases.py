"""Known failures of other systems' KV transfer, on workers within this process whose tokens depend on every byte."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from twopool_testing.in_process import BLOCK_SIZE, InProcessCluster, expected, running

NAMES = ("prefill-0", "decode-0")
LENGTH = 150
BLOCKS = -(-(LENGTH + 8) // BLOCK_SIZE)


@pytest.fixture(autouse=True)
async def environment(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setenv("UCX_TLS", "all")  # restored afterwards, whatever an agent sets
    yield


def prompts(count: int, *, shared: int = 0) -> list[list[int]]:
    rng = random.Random(count)
    head = rng.choices(range(3, 200), k=shared)
    return [head + rng.choices(range(3, 200), k=LENGTH - shared) for _ in range(count)]


def pair(tmp_path: Path, **fields: object) -> AbstractAsyncContextManager[InProcessCluster]:
    return running(tmp_path, NAMES, drain_timeout_s=1.0, **fields)


async def check_all(cluster: InProcessCluster, asked: list[list[int]], timeout_s: float = 30.0) -> None:
    answers = await asyncio.gather(*(cluster.ask(ids, 8, timeout_s=timeout_s) for ids in asked))
    assert answers == [expected(ids, 8) for ids in asked]
    await cluster.until_balanced()


async def test_what_moved_is_counted(tmp_path: Path) -> None:
    """PD-18: that decode computed the prompts itself would show."""
    async with pair(tmp_path) as cluster:
        for ids in prompts(10):
            await check_all(cluster, [ids])
        decode = cluster.workers["decode-0"].host
        blocks = -(-LENGTH // BLOCK_SIZE)
        assert decode.transfer_stats.kv_transfer_bytes == 10 * blocks * decode.geometry.block_bytes
        assert decode.transfer_stats.kv_transfers >= 10
        assert decode.transfer_stats.local_prefills == 0
        assert decode.engine.stats.prefill_tokens == 0


async def test_a_decode_pool_of_one_and_a_half_prompts(tmp_path: Path) -> None:
    """PD-20: the whole prompt has its blocks before the first chunk is sent, so nobody waits for each other."""
    async with pair(tmp_path) as cluster:
        cluster.start_worker("decode-1", num_blocks=BLOCKS * 3 // 2 + 1, drain_timeout_s=1.0)
        await cluster.until_linked()
        cluster.use_only("prefill-0", "decode-1")
        await check_all(cluster, prompts(8))


async def test_a_prefill_pool_of_three_prompts(tmp_path: Path) -> None:
    """PD-07: pressure takes no block that is still to be read, shared prefixes or not."""
    async with pair(tmp_path) as cluster:
        cluster.start_worker("prefill-1", num_blocks=3 * BLOCKS + 1, drain_timeout_s=1.0)
        await cluster.until_linked()
        cluster.use_only("prefill-1", "decode-0")
        cluster.workers["decode-0"].faults("read=delay:0.03")
        await check_all(cluster, prompts(15, shared=64))


async def test_a_lease_that_ends_before_decode_comes(tmp_path: Path) -> None:
    """PD-04: nothing that was reused is ever taken for the prompt's KV."""
    async with pair(tmp_path, pin_lease_s=0.3) as cluster:
        cluster.workers["decode-0"].faults("confirming=delay:0.8*6")
        await check_all(cluster, prompts(8))
        assert cluster.workers["prefill-0"].host.transfer_stats.kv_reclaimed["lease"] > 0


async def test_layouts_that_differ_are_mapped_or_refused(tmp_path: Path) -> None:
    """X-pd-wrong-layout-silent: other block sizes give the same tokens; what cannot be mapped is no pair."""
    async with pair(tmp_path) as cluster:
        cluster.start_worker("prefill-1", block_size=64, num_blocks=33, drain_timeout_s=1.0)
        await cluster.until_linked()
        cluster.use_only("prefill-1", "decode-0")
        await check_all(cluster, prompts(3))
        assert cluster.workers["decode-0"].host.transfer_stats.kv_transfers
