"""Any worker may be a source: a prefix that one holds is read by whoever prefills next, and never trusted unproven."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from twopool.protocol.ids import Epoch
from twopool.protocol.messages import PeerRef, PrefixHint
from twopool_testing.in_process import InProcessCluster, expected, running

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PREFIX = 160


def prompt(seed: int, length: int = PREFIX) -> list[int]:
    return random.Random(seed).choices(range(3, 200), k=length)


MESSAGE_FAULTS = ("delay:0.2", "drop", "refuse")
READ_FAULTS = ("delay:0.2", "drop:0.3", "corrupt", "late:0.2", "partial", "refuse")
# Where a fault may happen on the way of a prefix, at its reader or its source, and which make sense there.
POINTS = {
    "reader prefix_asking": MESSAGE_FAULTS,
    "reader prefix_fetching": ("delay:0.2", "refuse"),
    "reader read": READ_FAULTS,
    "reader confirming": MESSAGE_FAULTS,
    "source prefix_offering": MESSAGE_FAULTS,
    "source confirmed": MESSAGE_FAULTS,
}


@pytest.fixture(params=["local", "same-host"])
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[InProcessCluster]:
    monkeypatch.setenv("UCX_TLS", "all")  # restored afterwards, whatever an agent sets
    fields = {
        "kv_transport": "local" if request.param == "local" else "nixl",
        "kv_same_host": "map" if request.param == "mapped" else "nixl",
        "ucx_tls": "tcp" if request.param == "tcp" else None,
        "kv_verify": "all",
        "kv_quarantine_s": 0.2,
    }
    async with running(tmp_path, NAMES, **fields, drain_timeout_s=1.0) as cluster:
        yield cluster


# Who serves the first request, who the second, and which of the first the second's prefill reads from.
ROUTES = {
    "prefill from prefill": (("prefill-0", "decode-0"), ("prefill-1", "decode-1"), "prefill-0", "prefill-1"),
    "decode from decode": (("decode-0",), ("decode-1",), "decode-0", "decode-1"),
    "prefill from the last turn's decode": (
        ("prefill-0", "decode-0"),
        ("prefill-1", "decode-1"),
        "decode-0",
        "prefill-1",
    ),
}


@pytest.mark.parametrize("route", ROUTES)
async def test_a_prefix_comes_from_whoever_has_it(cluster: InProcessCluster, route: str) -> None:
    first, second, source, reader = ROUTES[route]
    ids = prompt(1)
    cluster.use_only(*first)
    answer = await cluster.ask(ids, 40)
    assert answer == expected(ids, 40)
    next_turn = ids + answer + prompt(2, 20)
    cluster.use_only(*second)
    # The decode worker has the KV of its answer but for the last token, the prefill worker that of the prompt.
    known = len(ids) + len(answer) - 1 if source.startswith("decode") else len(ids)
    cluster.hint_at(source, known)
    assert await cluster.ask(next_turn, 10) == expected(next_turn, 10)
    host = cluster.workers[reader].host
    assert host.transfer_stats.kv_prefix_tokens == known // 16 * 16
    assert host.engine.stats.prefill_tokens == len(next_turn) - known // 16 * 16
    assert host.transfer_stats.kv_verified_bytes > 0
    assert cluster.workers[source].host.transfer_stats.kv_reclaimed["confirmed"] >= 1
    await cluster.until_balanced()


async def check_faults(cluster: InProcessCluster, route: str, seed: int) -> None:
    """Each fault in turn: the answer is right though the prefix may not come, blocks balance, the next one comes."""
    first, second, source, reader = ROUTES[route]
    for number, (place, fault) in enumerate((place, fault) for place, faults in POINTS.items() for fault in faults):
        side, point = place.split()
        victim = cluster.workers[reader if side == "reader" else source]
        stats = cluster.workers[reader].host.transfer_stats
        for faults in ((f"{point}={fault}*1",), ()):
            await cluster.until_linked()
            cluster.forgive()
            ids = prompt(1000 * seed + 2 * number + len(faults))
            cluster.use_only(*first)
            cluster.hint = None
            assert await cluster.ask(ids, 4) == expected(ids, 4)
            cluster.use_only(*second)
            cluster.hint_at(source, PREFIX)
            before = stats.kv_prefix_tokens
            victim.faults(*faults)
            longer = [*ids, *prompt(number, 30)]
            assert await cluster.ask(longer, 4) == expected(longer, 4), f"{route}: {place}={fault}"
            if faults:
                assert victim.host.faults.num_happened, f"{place}={fault} did not happen"
            else:
                assert stats.kv_prefix_tokens == before + PREFIX, f"after {place}={fault}"
            await cluster.until_balanced()


@pytest.mark.parametrize("cluster", ["local"], indirect=True)
@pytest.mark.parametrize("route", ["prefill from prefill", "decode from decode"])
async def test_each_fault_of_a_prefix_fetch(cluster: InProcessCluster, route: str) -> None:
    """PD-02, PD-03, PD-11."""
    await check_faults(cluster, route, seed=1)
    reader = cluster.workers[ROUTES[route][3]].host.transfer_stats
    assert reader.kv_failures.keys() >= {"timeout", "read", "corrupt", "stale"}
    assert cluster.workers[ROUTES[route][2]].host.transfer_stats.stale_tickets == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cluster", ["mapped", "same-host", "tcp"], indirect=True)
@pytest.mark.parametrize("route", ROUTES)
async def test_each_fault_of_a_prefix_fetch_over_nixl(cluster: InProcessCluster, route: str) -> None:
    await check_faults(cluster, route, seed=2)


@pytest.mark.parametrize("cluster", ["local"], indirect=True)
@pytest.mark.parametrize(
    "trouble", ["holds nothing", "another life", "evicted", "corrupt", "refused", "lost", "longer than the prompt"]
)
async def test_a_prefix_that_does_not_come_is_computed(cluster: InProcessCluster, trouble: str) -> None:
    ids = prompt(3)
    cluster.use_only("prefill-0", "decode-0")
    if trouble != "holds nothing":
        assert await cluster.ask(ids, 5) == expected(ids, 5)
    cluster.use_only("prefill-1", "decode-1")
    cluster.hint_at("prefill-0", PREFIX if trouble != "longer than the prompt" else 100_000)
    assert cluster.hint is not None
    reader = cluster.workers["prefill-1"]
    if trouble == "another life":
        cluster.hint = PrefixHint(PeerRef(cluster.hint.source.worker_id, Epoch(5)), PREFIX)
    elif trouble == "evicted":
        cluster.workers["prefill-0"].host.pool.clear_cache()
    elif trouble == "corrupt":
        reader.faults("read=corrupt*1")
    elif trouble == "refused":
        reader.faults("read=refuse*1")
    elif trouble == "lost":
        reader.faults("read=delay:2*1")
        fetching = cluster.until(lambda: reader.host.pool.counts().fetching, "the fetch to start")
        losing = asyncio.create_task(fetching)
        losing.add_done_callback(lambda _: cluster.workers["prefill-0"].host.stop())
    longer = [*ids, *prompt(4, 30)]
    assert await cluster.ask(longer, 8) == expected(longer, 8)
    stats = reader.host.transfer_stats
    if trouble in ("corrupt", "refused"):
        assert stats.kv_failures == {"corrupt": 1} if trouble == "corrupt" else {"read": 1}
        assert reader.host.sources.num_quarantined == (trouble == "corrupt")
    if trouble != "longer than the prompt":
        assert stats.kv_prefix_tokens == 0
    cluster.workers.pop("prefill-0") if trouble == "lost" else None
    await cluster.until_balanced()


@pytest.mark.parametrize("cluster", ["local"], indirect=True)
async def test_a_cancelled_fetch_gives_everything_back(cluster: InProcessCluster) -> None:
    ids = prompt(5)
    cluster.use_only("prefill-0", "decode-0")
    await cluster.ask(ids, 5)
    cluster.use_only("prefill-1", "decode-1")
    cluster.hint_at("prefill-0", PREFIX)
    reader = cluster.workers["prefill-1"]
    reader.faults("read=delay:0.5*1")
    asking = asyncio.create_task(cluster.ask([*ids, *prompt(6, 30)], 8))
    await cluster.until(lambda: reader.host.pool.counts().fetching, "the fetch to start")
    assert cluster.workers["prefill-0"].host.pool.counts().pinned == PREFIX // 16
    asking.cancel()
    await cluster.until(lambda: reader.host.pool.counts().quarantined, "what may still be written to be quarantined")
    await cluster.until_balanced()


async def test_a_reader_that_forgets_loses_its_pins_to_the_lease(tmp_path: Path) -> None:
    """PD-03: within the lease, here made short."""
    ids = prompt(7)
    async with running(tmp_path, NAMES, kv_transport="local", pin_lease_s=0.2, drain_timeout_s=1.0) as cluster:
        cluster.use_only("prefill-0", "decode-0")
        await cluster.ask(ids, 5)
        cluster.use_only("prefill-1", "decode-1")
        cluster.hint_at("prefill-0", PREFIX)
        cluster.workers["prefill-1"].faults("read=delay:0.8*1")
        longer = [*ids, *prompt(8, 30)]
        reclaimed = cluster.workers["prefill-0"].host.transfer_stats.kv_reclaimed
        before = reclaimed["lease"]  # of the first request, where the machine is slow
        assert await cluster.ask(longer, 8) == expected(longer, 8)
        assert reclaimed["lease"] == before + 1
        await cluster.until_balanced()


@pytest.mark.parametrize(("source_size", "reader_size"), [(16, 32), (32, 16)])
async def test_unequal_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source_size: int, reader_size: int
) -> None:
    """PD-22: handover and prefix fetch between workers whose blocks differ, layer groups and checksums included."""
    monkeypatch.setenv("UCX_TLS", "all")
    cluster = InProcessCluster(tmp_path)
    try:
        for name, size in (("prefill-0", source_size), ("prefill-1", reader_size), ("decode-0", reader_size)):
            cluster.start_worker(name, block_size=size, kv_transport="local", kv_verify="sample", drain_timeout_s=1.0)
        await cluster.until_linked()
        for length in (150, 16, 33, 64):
            ids = prompt(length, length)
            cluster.use_only("prefill-0", "decode-0")
            assert await cluster.ask(ids, 5) == expected(ids, 5)
            cluster.use_only("prefill-1", "decode-0")
            cluster.hint_at("prefill-0", length)
            longer = [*ids, *prompt(9, 40)]
            assert await cluster.ask(longer, 5) == expected(longer, 5)
        assert cluster.workers["prefill-1"].host.transfer_stats.kv_prefix_tokens >= 128 + 64
        await cluster.until_balanced()
    finally:
        await cluster.close()
