"""Known failures of other systems' KV transfer, on workers within this process whose tokens depend on every byte."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from twopool.engine.tickets import TicketWriter
from twopool.protocol.errors import DeadlineError
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


async def give_up_and_ask_anew(tmp_path: Path, num_rounds: int) -> None:
    async with pair(tmp_path) as cluster:
        decode = cluster.start_worker("decode-1", num_blocks=BLOCKS * 3 // 2 + 1, drain_timeout_s=1.0)
        await cluster.until_linked()
        cluster.use_only("prefill-0", "decode-1")
        decode.faults("read=late:0.05")
        rng = random.Random(num_rounds)
        was_quarantined = 0
        for number in range(num_rounds):
            given_up, wanted = (rng.choices(range(3, 200), k=LENGTH) for _ in range(2))
            asking = asyncio.create_task(cluster.ask(given_up, 8))
            await asyncio.sleep(rng.uniform(0, 0.12))
            asking.cancel()
            answer = asyncio.create_task(cluster.ask(wanted, 8, timeout_s=10.0))
            await asyncio.sleep(0.01)
            was_quarantined += decode.host.pool.counts().quarantined > 0
            assert await answer == expected(wanted, 8), f"round {number}"
            await asyncio.gather(asking, return_exceptions=True)
        assert was_quarantined, "some were given up in the middle of a READ"
        await cluster.until_balanced()


async def test_requests_given_up_in_a_transfer_and_others_in_their_place(tmp_path: Path) -> None:
    """PD-02: the decode pool is so small that who comes next gets the very blocks of who left."""
    await give_up_and_ask_anew(tmp_path, 15)


@pytest.mark.slow
async def test_two_hundred_requests_given_up_in_a_transfer(tmp_path: Path) -> None:
    """PD-02."""
    await give_up_and_ask_anew(tmp_path, 200)


async def test_thirty_clients_that_leave_during_a_slow_transfer(tmp_path: Path) -> None:
    """X-pd-cancel-during-transfer: a pool of 40 blocks; the next one is answered."""
    async with pair(tmp_path, num_blocks=41) as cluster:
        decode = cluster.workers["decode-0"]
        decode.faults("read=late:0.7")
        asked = [asyncio.create_task(cluster.ask(ids, 8, timeout_s=30.0)) for ids in prompts(31)]
        await cluster.until(lambda: decode.host.pool.counts().fetching >= 2 * BLOCKS - 2, "READs to be under way")
        for client in asked[:30]:
            client.cancel()
        decode.faults()
        ids = prompts(31)[30]
        assert await asyncio.wait_for(asked[30], 5) == expected(ids, 8)
        await cluster.until_balanced()


async def give_all_up(tmp_path: Path, *, num_clients: int, num_times: int, after_s: float) -> None:
    async with pair(tmp_path) as cluster:
        for time in range(num_times):
            rng = random.Random(time)
            many = [rng.choices(range(3, 200), k=500) for _ in range(num_clients)]
            asked = [asyncio.create_task(cluster.ask(ids, 100, timeout_s=60.0)) for ids in many]
            await asyncio.sleep(after_s)
            for client in asked:
                client.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        probe = prompts(3)[0]
        assert await cluster.ask(probe, 8, timeout_s=5.0) == expected(probe, 8)
        await cluster.until_balanced()


async def test_all_clients_leave_and_the_next_is_answered(tmp_path: Path) -> None:
    """PD-06."""
    await give_all_up(tmp_path, num_clients=60, num_times=2, after_s=0.5)


@pytest.mark.slow
async def test_three_hundred_clients_leave_again_and_again(tmp_path: Path) -> None:
    """PD-06."""
    await give_all_up(tmp_path, num_clients=300, num_times=5, after_s=1.0)


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


@pytest.mark.parametrize("way", ["handover", "prefix"])
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
async def test_a_read_that_comes_after_its_blocks_were_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, checked: bool
) -> None:
    """PD-04: it brings other requests' KV, and the source says so. Were it not asked, wrong tokens would come out."""
    if not checked:
        monkeypatch.setattr(TicketWriter, "still_hold", lambda writer, message: True)
    names = ("prefill-1", "decode-0", "decode-1")
    async with running(tmp_path, names, drain_timeout_s=1.0, pin_lease_s=0.2) as cluster:
        source = cluster.start_worker("prefill-0", num_blocks=2 * BLOCKS + 1, drain_timeout_s=1.0, pin_lease_s=0.2)
        await cluster.until_linked()
        ids, *others = prompts(5)
        asked = ids
        reader = cluster.workers["decode-0" if way == "handover" else "prefill-1"]
        if way == "prefix":
            cluster.use_only("prefill-0", "decode-0")
            await check_all(cluster, [ids])
            asked = ids + others[0][:20]
            cluster.hint_at("prefill-0", LENGTH)
        cluster.use_only(*(("prefill-0", "decode-0") if way == "handover" else ("prefill-1", "decode-1")))
        leases = source.host.transfer_stats.kv_reclaimed["lease"]
        source.faults("giving_up=drop*1")
        reader.faults("read=late:0.8")
        answer = asyncio.create_task(cluster.ask(asked, 8))
        await cluster.until(lambda: source.host.transfer_stats.kv_reclaimed["lease"] > leases, "the lease to end")
        reader.faults()
        cluster.hint = None
        cluster.use_only("prefill-0", "decode-1" if way == "handover" else "decode-0")
        for other in others:
            await cluster.ask(other, 8)
        cluster.use_only(*cluster.workers)
        right = await answer == expected(asked, 8)
        assert right == checked
        assert source.host.transfer_stats.stale_tickets == checked
        assert reader.host.transfer_stats.kv_failures["stale"] == checked
        await cluster.until_balanced()


@pytest.mark.parametrize(
    ("faults", "kind", "ended", "stale"),
    [
        ({"prefill-0": "pinned=refuse*1"}, "source", "refused", 0),
        ({"prefill-0": "confirmed=refuse*1"}, "stale", "stale", 1),
        ({"decode-0": "fetching=refuse*1"}, "read", "released", 0),
        ({"decode-0": "fetching=delay:0.8*1"}, "timeout", "released", 0),
    ],
    ids=["source gives up", "stale", "read fails", "deadline"],
)
async def test_failures_and_ends_of_pins_are_counted_by_kind(
    tmp_path: Path, faults: dict[str, str], kind: str, ended: str, stale: int
) -> None:
    async with pair(tmp_path) as cluster:
        ids = prompts(1)[0]
        for name, line in faults.items():
            cluster.workers[name].faults(line)
        with contextlib.suppress(DeadlineError):
            timeout_s = 0.4 if kind == "timeout" else 60.0
            assert await cluster.ask(ids, 8, request_timeout_s=timeout_s) == expected(ids, 8)
        source, reader = (cluster.workers[name].host.transfer_stats for name in NAMES)
        assert reader.kv_failures == {kind: 1}
        await cluster.until(lambda: source.kv_reclaimed[ended], "the pins to end")
        assert set(source.kv_reclaimed) <= {ended, "confirmed"} and source.kv_reclaimed[ended] == 1
        assert source.stale_tickets == stale
        await cluster.until_balanced()


async def test_layouts_that_differ_are_mapped_or_refused(tmp_path: Path) -> None:
    """X-pd-wrong-layout-silent: other block sizes give the same tokens; what cannot be mapped is no pair."""
    async with pair(tmp_path) as cluster:
        cluster.start_worker("prefill-1", block_size=64, num_blocks=33, drain_timeout_s=1.0)
        await cluster.until_linked()
        cluster.use_only("prefill-1", "decode-0")
        await check_all(cluster, prompts(3))
        assert cluster.workers["decode-0"].host.transfer_stats.kv_transfers
