"""A worker killed in each state of a request: every request ends well, and no block stays held."""

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from twopool_testing.cluster import Cluster, running_cluster, wait_for
from twopool_testing.tiny_model import Reference

pytestmark = pytest.mark.e2e

WORKER_FLAGS = (
    *("--max-num-batched-tokens", "32", "--block-size", "16", "--kv-cache-memory", str(32 * 1024 * 1024)),
    *("--drain-timeout-s", "5"),
)
ROUTER_FLAGS = ("--resume-timeout-s", "2")
HOLD_S = 1.5
END_WITHIN_S = 5.0
NUM_TOKENS = 12

# Which worker holds requests, and in which state.
STATES = [
    ("decode-0", "queued"),
    ("decode-0", "prefilling"),
    ("decode-0", "fetching"),
    ("decode-0", "confirming"),
    ("decode-0", "running"),
    ("prefill-0", "running"),
    ("prefill-0", "pinned"),
]


def prompt(seed: int, length: int = 100) -> list[int]:
    return random.Random(seed).choices(range(3, 360), k=length)


@pytest.fixture(scope="module")
def three(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and two decode workers."""
    folder = tmp_path_factory.mktemp("three")
    with running_cluster(tiny_model, folder, decode=2, worker_flags=WORKER_FLAGS, router_flags=ROUTER_FLAGS) as cluster:
        yield cluster


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
@pytest.mark.parametrize(("holder", "state"), STATES, ids=[f"{holder}-{state}" for holder, state in STATES])
def test_kill_either_worker_in_each_state(
    three: Cluster, reference: Reference, holder: str, state: str, victim: str
) -> None:
    """PD-03, X-pd-prefill-death-recover, X-pd-decode-dispatch-fails, X-pd-prefill-fail-silent-hang."""
    # In RUNNING each step is held, so that a request of twelve tokens spans the kill.
    three.hold(holder, **{state: 0.1 if state == "running" else HOLD_S})
    survivors = {name: process.pid for name, process in three.workers.items() if name != victim}
    prompts = [prompt(seed_of(holder, state, victim) + i) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        started = time.monotonic()
        answers = [pool.submit(three.token_ids, ids, max_tokens=NUM_TOKENS) for ids in prompts]
        time.sleep(0.4)
        three.kill_worker(victim)
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer.result(timeout=30) == reference.greedy(ids, NUM_TOKENS)
        assert time.monotonic() - started < END_WITHIN_S
    three.hold(holder)
    three.assert_balanced()
    assert {name: process.pid for name, process in three.workers.items()} == survivors
    assert all(process.is_running() for process in three.workers.values())
    three.start_worker(victim)
    three.wait_metric("twopool_workers_ready", 3)
    ids = prompt(99)
    assert three.token_ids(ids, max_tokens=NUM_TOKENS) == reference.greedy(ids, NUM_TOKENS)
    three.assert_balanced()


def seed_of(*parts: str) -> int:
    """A seed that differs by test and not by run."""
    return sum(ord(letter) * (i + 1) for i, letter in enumerate(" ".join(parts))) * 10


@pytest.fixture(scope="module")
def slow(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One pair whose decode steps take 50 ms, so that there is a middle of a stream."""
    folder = tmp_path_factory.mktemp("slow")
    with running_cluster(tiny_model, folder, worker_flags=WORKER_FLAGS, router_flags=ROUTER_FLAGS) as cluster:
        cluster.hold("decode-0", running=0.05)
        yield cluster


def test_losing_the_only_decode_worker_mid_stream_is_told(slow: Cluster) -> None:
    """RT-08: after the first byte a failure is an error event, never a finish reason."""
    body = {"model": "m", "prompt": prompt(1), "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    events = []
    started = time.monotonic()
    for event in slow.stream("/v1/completions", body):
        events.append(event)
        if len(events) == 5:
            started = time.monotonic()
            slow.kill_worker("decode-0")
    assert time.monotonic() - started < END_WITHIN_S
    assert "error" in events[-1]
    assert not any(event["choices"][0]["finish_reason"] for event in events[:-1])
    response = slow.client.post("/v1/completions", json=body)
    assert response.status_code == 503 and response.headers["retry-after"]
    assert response.json()["error"]["message"]
    slow.assert_balanced()
    slow.start_worker("decode-0")
    slow.wait_ready()


@pytest.mark.parametrize("when", ["before the first token", "mid-stream"])
def test_a_client_that_leaves_frees_everything(slow: Cluster, when: str) -> None:
    """X-pd-staged-kv-disconnect, PD-06."""
    steps = slow.metric_sum("twopool_worker_generated_tokens_total")
    body = {"model": "m", "prompt": prompt(2, 300), "temperature": 0, "max_tokens": 400, "stream": True}
    with slow.client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
        lines = response.iter_lines()
        if when == "mid-stream":
            for _ in range(6):
                next(lines)
    slow.assert_balanced(within_s=3)
    assert slow.metric_sum("twopool_worker_generated_tokens_total") - steps < 60


def test_many_clients_that_leave_during_the_transfer(tiny_model: Path, reference: Reference, tmp_path: Path) -> None:
    """PD-02, X-pd-cancel-during-transfer: freed blocks are never written by a late READ, and nothing leaks."""
    with running_cluster(tiny_model, tmp_path, worker_flags=WORKER_FLAGS) as cluster:
        cluster.hold("decode-0", fetching=0.3, confirming=0.1)

        def leave(seed: int) -> None:
            body = {"model": "m", "prompt": prompt(seed, 200), "max_tokens": 5, "stream": True}
            with cluster.client.stream("POST", "/v1/completions", json=body):
                time.sleep(random.Random(seed).uniform(0.05, 0.4))

        def stay(seed: int) -> None:
            ids = prompt(1000 + seed, 200)
            assert cluster.token_ids(ids, max_tokens=5) == reference.greedy(ids, 5)

        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(stay if i % 4 == 3 else leave, i) for i in range(32)]
            for job in jobs:
                job.result(timeout=60)
        cluster.assert_balanced()


def test_a_worker_restarted_at_the_same_address(tiny_model: Path, reference: Reference, tmp_path: Path) -> None:
    """A new life has a new epoch: old agents, tickets and connections are not taken for the new ones."""
    with running_cluster(tiny_model, tmp_path, worker_flags=WORKER_FLAGS) as cluster:
        port = cluster.workers["prefill-0"].announced["peer_address"].rsplit(":", 1)[1]
        for seed in range(2):
            ids = prompt(seed)
            assert cluster.token_ids(ids, max_tokens=5) == reference.greedy(ids, 5)
            cluster.kill_worker("prefill-0")
            cluster.start_worker("prefill-0", "--port", port)
            cluster.wait_ready()
            again = partial(_moves_kv, cluster, reference, prompt(seed + 50))
            wait_for(again, 10, "KV to move from the restarted worker")
        cluster.assert_balanced()


def _moves_kv(cluster: Cluster, reference: Reference, ids: list[int]) -> bool:
    """Whether answering ``ids`` right moved KV."""
    moved = cluster.metric_sum("twopool_nixl_bytes_transferred_sum")
    assert cluster.token_ids(ids, max_tokens=5) == reference.greedy(ids, 5)
    time.sleep(0.6)  # a heartbeat
    return cluster.metric_sum("twopool_nixl_bytes_transferred_sum") > moved


def test_a_stopped_decode_worker_catches_up_or_is_replaced(
    tiny_model: Path, reference: Reference, tmp_path: Path
) -> None:
    """PD-25: SIGSTOP is seen as a loss within 2 s; the worker registers anew when it runs again."""
    with running_cluster(
        tiny_model, tmp_path, decode=2, worker_flags=WORKER_FLAGS, router_flags=ROUTER_FLAGS
    ) as cluster:
        cluster.workers["decode-0"].signal(signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(6) as pool:
                prompts = [prompt(i) for i in range(6)]
                answers = list(pool.map(lambda ids: cluster.token_ids(ids, max_tokens=5), prompts))
            assert answers == [reference.greedy(ids, 5) for ids in prompts]
        finally:
            cluster.workers["decode-0"].signal(signal.SIGCONT)
        wait_for(lambda: cluster.blocks("decode-0") != {}, 10, "decode-0 to register anew")
        cluster.assert_balanced()


def test_sigterm_drains(tiny_model: Path, reference: Reference, tmp_path: Path) -> None:
    """Running requests finish, the process ends with status 0."""
    with running_cluster(tiny_model, tmp_path, decode=2, worker_flags=WORKER_FLAGS) as cluster:
        cluster.hold("decode-0", running=0.05)
        prompts = [prompt(i) for i in range(4)]
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(cluster.token_ids, ids, max_tokens=20) for ids in prompts]
            time.sleep(0.4)
            cluster.workers["decode-0"].signal(signal.SIGTERM)
            for ids, answer in zip(prompts, answers, strict=True):
                assert answer.result(timeout=30) == reference.greedy(ids, 20)
        assert cluster.workers.pop("decode-0").wait(10) == 0
        cluster.workers["prefill-0"].signal(signal.SIGTERM)
        assert cluster.workers.pop("prefill-0").wait(10) == 0
        ids = prompt(50)
        assert cluster.token_ids(ids, max_tokens=5) == reference.greedy(ids, 5)
        cluster.router.signal(signal.SIGTERM)
        assert cluster.router.wait(10) == 0


def test_readiness_follows_the_pools(tiny_model: Path, tmp_path: Path) -> None:
    """RT-10, RT-12, X-router-ready-no-workers: ready means a usable pair, or decode alone where no prefill exists."""
    cluster = Cluster(tiny_model, tmp_path, WORKER_FLAGS, ROUTER_FLAGS)
    try:
        cluster.start_router()
        body = {"model": "m", "prompt": [5, 6], "max_tokens": 1}
        for start in (None, "prefill-0"):
            if start:
                cluster.start_worker(start)
            assert cluster.client.get("/ready").status_code == 503
            assert cluster.client.get("/health").status_code == 200
            assert cluster.client.post("/v1/completions", json=body).status_code == 503
        cluster.start_worker("decode-0")
        cluster.wait_ready()
        for _ in range(20):
            assert cluster.client.post("/v1/completions", json=body).status_code == 200
        assert cluster.client.post("/v1/completions", json=body | {"model": "x"}).status_code == 404
    finally:
        cluster.close()
