"""Faults at every point of a transfer: answers stay right, nothing hangs, every block comes back.

Workers and router share this process, on a model whose tokens depend on every byte of KV (``in_process.py``).
"""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from twopool.protocol.messages import PeerRef
from twopool_testing.in_process import InProcessCluster, expected, running

NAMES = ("prefill-0", "decode-0", "decode-1")
HANG_S = 5.0
TRANSPORTS = ("local", "mapped", "same-host", "tcp")
"""Within this process; mapped pools of one host; what NIXL takes on one host; TCP."""

# Where a fault may happen, on which worker, and which faults make sense there.
MESSAGE_FAULTS = ("delay:0.2", "drop", "refuse")
READ_FAULTS = ("delay:0.2", "drop:0.3", "corrupt", "late:0.2", "partial", "refuse")
POINTS = {
    "decode-0 queued": ("delay:0.2", "refuse"),
    "decode-0 asking": MESSAGE_FAULTS,
    "decode-0 prefilling": ("delay:0.2", "refuse"),
    "decode-0 fetching": ("delay:0.2", "refuse"),
    "decode-0 confirming": MESSAGE_FAULTS,
    "decode-0 running": ("delay:0.2", "refuse"),
    "decode-0 read": READ_FAULTS,
    "prefill-0 accepting": MESSAGE_FAULTS,
    "prefill-0 running": ("delay:0.2", "refuse"),
    "prefill-0 pinned": MESSAGE_FAULTS,
    "prefill-0 confirmed": MESSAGE_FAULTS,
}
HANDSHAKE_POINTS = {
    "decode-0 hello": MESSAGE_FAULTS,
    "prefill-0 welcome": MESSAGE_FAULTS,
    "decode-0 canary": READ_FAULTS,
}
HANDSHAKE_CASES = [(place, fault) for place, faults in HANDSHAKE_POINTS.items() for fault in faults]
CASES = [(place, fault) for place, faults in POINTS.items() for fault in faults]
# In rounds anybody may read a prefix from anybody.
ANYWHERE = {
    "prefix_asking": MESSAGE_FAULTS,
    "prefix_fetching": ("delay:0.2", "refuse"),
    "prefix_offering": MESSAGE_FAULTS,
    "read": READ_FAULTS,
    "confirming": MESSAGE_FAULTS,
    "confirmed": MESSAGE_FAULTS,
}
HANDSHAKE = {"hello": MESSAGE_FAULTS, "welcome": MESSAGE_FAULTS, "canary": READ_FAULTS}


def prompt(seed: int, length: int = 150) -> list[int]:
    return random.Random(seed).choices(range(3, 200), k=length)


@pytest.fixture(params=TRANSPORTS)
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[InProcessCluster]:
    """One prefill and two decode workers that compare checksums of everything they read."""
    monkeypatch.setenv("UCX_TLS", "all")  # restored afterwards, whatever an agent sets
    transport = "local" if request.param == "local" else "nixl"
    ucx_tls = "tcp" if request.param == "tcp" else None
    fields = {"kv_transport": transport, "ucx_tls": ucx_tls, "kv_verify": "all", "kv_quarantine_s": 0.2}
    fields["kv_same_host"] = "map" if request.param == "mapped" else "nixl"
    async with running(tmp_path, NAMES, **fields, drain_timeout_s=1.0) as cluster:
        yield cluster


async def check(cluster: InProcessCluster, place: str, fault: str, seed: int) -> None:
    """Two requests, one for each decode worker, meet the fault; both and the next one are answered right, and blocks
    balance.
    """
    worker, point = place.split()
    await cluster.until_linked()
    cluster.forgive()
    cluster.workers[worker].faults(f"{point}={fault}*1")
    prompts = [prompt(seed), prompt(seed + 1, 40)]
    answers = await asyncio.gather(*(cluster.ask(ids, 6, timeout_s=HANG_S) for ids in prompts))
    assert answers == [expected(ids, 6) for ids in prompts], f"{place}={fault}"
    assert cluster.workers[worker].host.faults.num_happened, f"{place}={fault} did not happen"
    await cluster.until_balanced()
    cluster.workers[worker].faults()
    cluster.forgive()
    ids = prompt(seed + 2)
    assert await cluster.ask(ids, 4, timeout_s=HANG_S) == expected(ids, 4), f"after {place}={fault}"
    await cluster.until_balanced()


async def check_handshake(cluster: InProcessCluster, place: str, fault: str, seed: int) -> None:
    """A link is made anew and meets the fault: requests are answered meanwhile, and the link stands in the end."""
    worker, point = place.split()
    await cluster.until_linked()
    cluster.workers[worker].faults(f"{point}={fault}*1")
    break_link(cluster, "decode-0", "prefill-0")
    prompts = [prompt(seed), prompt(seed + 1, 40)]
    answers = await asyncio.gather(*(cluster.ask(ids, 6, timeout_s=HANG_S) for ids in prompts))
    assert answers == [expected(ids, 6) for ids in prompts], f"{place}={fault}"
    happened = cluster.workers[worker].host.faults
    await cluster.until(lambda: happened.num_happened, f"{place}={fault} to happen")
    await cluster.until_linked()
    await cluster.until_balanced()
    cluster.workers[worker].faults()
    cluster.forgive()
    cluster.use_only("decode-0", "prefill-0")
    assert await cluster.ask(prompts[0][1:], 4, timeout_s=HANG_S) == expected(prompts[0][1:], 4), f"{place}={fault}"
    cluster.use_only(*NAMES)
    await cluster.until_balanced()


@pytest.mark.parametrize("cluster", ["mapped"], indirect=True)
async def test_a_wrong_canary_and_a_refusal_are_counted(cluster: InProcessCluster) -> None:
    refused = cluster.workers["decode-0"].host.sources
    for number, (place, fault) in enumerate([("decode-0 canary", "corrupt"), ("decode-0 hello", "refuse")]):
        await check_handshake(cluster, place, fault, 1000 + 10 * number)
        assert refused.num_refused == number + 1


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_each_fault_in_the_handshake(cluster: InProcessCluster) -> None:
    for seed, (place, fault) in enumerate(HANDSHAKE_CASES):
        await check_handshake(cluster, place, fault, 10 * seed)


@pytest.mark.parametrize("cluster", ["local"], indirect=True)
async def test_each_fault_in_each_state(cluster: InProcessCluster) -> None:
    """PD-01, PD-11: the same cluster takes every fault, one after the other."""
    for seed, (place, fault) in enumerate(CASES):
        await check(cluster, place, fault, 10 * seed)
    stats = cluster.workers["decode-0"].host.transfer_stats
    assert stats.kv_failures["corrupt"] >= 1 and stats.kv_failures["read"] >= 2
    assert cluster.workers["decode-0"].host.sources.num_quarantined >= 1


@pytest.mark.parametrize("cluster", ["mapped", "tcp"], indirect=True)
@pytest.mark.parametrize("place", ["decode-0 read", "decode-0 confirming", "prefill-0 pinned"])
async def test_faults_over_nixl(cluster: InProcessCluster, place: str) -> None:
    for seed, fault in enumerate(POINTS[place]):
        await check(cluster, place, fault, 10 * seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cluster", ["mapped", "same-host", "tcp"], indirect=True)
async def test_each_fault_in_each_state_over_nixl(cluster: InProcessCluster) -> None:
    for seed, (place, fault) in enumerate(CASES):
        await check(cluster, place, fault, 10 * seed)


def places_of(name: str) -> dict[str, tuple[str, ...]]:
    """The points of a worker and what may happen there."""
    role = name.split("-", maxsplit=1)[0]
    return ANYWHERE | {place.split()[1]: faults for place, faults in POINTS.items() if place.startswith(role)}


def break_link(cluster: InProcessCluster, reader: str, source: str) -> None:
    """Have ``reader`` make its link to ``source`` anew."""
    host = cluster.workers[source].host
    cluster.workers[reader].host.sources.quarantine(PeerRef(host.worker_id, host.pool.epoch), 0.01)


async def rounds(cluster: InProcessCluster, number: int, seed: int) -> None:
    """Random faults on random workers, under requests that share prefixes, some of which are given up; some are told
    of a worker that may have their prefix, some links are made anew. One worker has other blocks than the rest.
    """
    cluster.start_worker("prefill-1", block_size=32, num_blocks=33, **cluster.fields)
    await cluster.until_linked()
    rng = random.Random(seed)
    names = list(cluster.workers)
    for index in range(number):
        chosen = [(name, *rng.choice([*places_of(name).items()])) for name in rng.sample(names, rng.randint(1, 2))]
        pair = rng.sample(names, 2)
        if rng.random() < 0.1:
            point = rng.choice([*HANDSHAKE])
            chosen.append((pair[point == "welcome"], point, HANDSHAKE[point]))
        for name, worker in cluster.workers.items():
            happen = {point: rng.choice(faults) for at, point, faults in chosen if at == name}
            worker.faults(*(f"{point}={fault.replace('0.2', '0.05')}*1" for point, fault in happen.items()))
        if chosen[-1][1] in HANDSHAKE:
            break_link(cluster, *pair)
        cluster.hint = None
        if rng.random() < 0.5:
            cluster.hint_at(rng.choice(names), rng.choice([48, 96, 200]))
        shared = prompt(rng.randrange(8), 96)
        lengths = [rng.choice([5, 16, 31, 64, 97, 200]) for _ in range(rng.randint(1, 3))]
        prompts = [
            shared[: rng.choice([0, 48, 96])] + prompt(seed + 31 * index + at, n) for at, n in enumerate(lengths)
        ]
        leavers = [asyncio.create_task(cluster.ask(prompt(rng.randrange(1000)), 20)) for _ in range(rng.randint(0, 1))]
        asked = [asyncio.create_task(cluster.ask(ids, 5, timeout_s=HANG_S)) for ids in prompts]
        await asyncio.sleep(rng.uniform(0, 0.05))
        for leaver in leavers:
            leaver.cancel()
        answers = await asyncio.gather(*asked)
        assert answers == [expected(ids, 5) for ids in prompts], f"round {index} of seed {seed}: {chosen}"
        await asyncio.gather(*leavers, return_exceptions=True)
        await cluster.until_balanced()
        cluster.forgive()
    if number >= 30:  # of fewer requests none may follow another with its prefix and the right hint
        assert sum(worker.host.transfer_stats.kv_prefix_tokens for worker in cluster.workers.values())


@pytest.mark.parametrize(("cluster", "number"), [("local", 30), ("mapped", 12), ("tcp", 8)], indirect=["cluster"])
async def test_rounds_of_random_faults(cluster: InProcessCluster, number: int) -> None:
    """PD-02, PD-07: 0 wrong tokens, 0 hangs over 5 s, every block back in 2 s."""
    await rounds(cluster, number, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("cluster", "number"),
    [("local", 500), ("mapped", 300), ("same-host", 100), ("tcp", 100)],
    indirect=["cluster"],
)
async def test_a_thousand_rounds_of_random_faults(cluster: InProcessCluster, number: int) -> None:
    await rounds(cluster, number, seed=2)
