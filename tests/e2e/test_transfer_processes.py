"""Workers that stop or die at the points of a transfer, as real processes, over one host's path and over TCP."""

import itertools
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from twopool_testing.cluster import Cluster, running_cluster, wait_for
from twopool_testing.tiny_model import Reference

pytestmark = pytest.mark.e2e

WORKER_FLAGS = (
    *("--max-num-batched-tokens", "32", "--block-size", "16", "--kv-cache-memory", str(32 * 1024 * 1024)),
    *("--kv-verify", "all", "--kv-quarantine-s", "1", "--drain-timeout-s", "5"),
)
END_WITHIN_S = 5.0
POINTS = (
    "decode-0 queued",
    "decode-0 asking",
    "prefill-0 accepting",
    "decode-0 prefilling",
    "prefill-0 running",
    "prefill-0 pinned",
    "decode-0 fetching",
    "decode-0 read",
    "decode-0 confirming",
    "prefill-0 confirmed",
    "decode-0 running",
)
HANDSHAKE_POINTS = {"decode-0 hello": "prefill-0", "prefill-0 welcome": "decode-0", "decode-0 canary": "prefill-0"}
"""And whose start makes the handshake happen."""
QUICK = ("decode-0 read", "prefill-0 pinned")
PATHS = {"mapped": (), "same-host": ("--kv-same-host", "nixl"), "tcp": ("--ucx-tls", "tcp")}


def prompt(seed: int, length: int = 100) -> list[int]:
    return random.Random(seed).choices(range(3, 360), k=length)


def has_happened(pid: int) -> bool:
    """Whether the worker, a child of this process not yet reaped, was stopped or killed."""
    return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)


@pytest.fixture(scope="module")
def three(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    flags = (*WORKER_FLAGS, *PATHS[request.param])
    with running_cluster(tiny_model, tmp_path_factory.mktemp(request.param), decode=2, worker_flags=flags) as cluster:
        yield cluster


@pytest.mark.parametrize("three", ["mapped", "tcp"], indirect=True)
@pytest.mark.parametrize("place", QUICK)
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_worker_stops_or_dies(three: Cluster, reference: Reference, place: str, fault: str) -> None:
    """PD-03, PD-25, X-pd-prefill-death-recover: quarantined reads from a stopped peer excepted, all comes back."""
    check(three, reference, place, fault, seed_of(place, fault))


@pytest.mark.slow
@pytest.mark.parametrize("three", PATHS, indirect=True)
@pytest.mark.parametrize("place", POINTS)
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_worker_stops_or_dies_in_each_state(three: Cluster, reference: Reference, place: str, fault: str) -> None:
    check(three, reference, place, fault, 7 * seed_of(place, fault))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("three", PATHS, indirect=True)
def test_rounds_of_workers_that_stop_or_die(three: Cluster, reference: Reference) -> None:
    """Any worker, anywhere, again and again: the same router and the survivors stay right."""
    rng = random.Random(3)
    for number in range(15):
        place = rng.choice(POINTS).replace("decode-0", rng.choice(["decode-0", "decode-1"]))
        check(three, reference, place, rng.choice(["stop", "kill"]), 10**6 + 100 * number, rng.randint(1, 6))


@pytest.mark.slow
def test_fifty_requests_come_while_the_only_decode_worker_is_stopped(
    tiny_model: Path, reference: Reference, tmp_path: Path
) -> None:
    """PD-25: what was accepted is answered right, the rest is told to come again, and prefill keeps nothing for it."""
    with running_cluster(tiny_model, tmp_path, worker_flags=WORKER_FLAGS) as pair, ThreadPoolExecutor(50) as pool:

        def ask(seed: int) -> bool:
            body = {"model": "m", "prompt": prompt(seed), "temperature": 0, "ignore_eos": True, "max_tokens": 8}
            response = pair.client.post("/v1/completions", json=body | {"return_token_ids": True})
            if response.status_code != 200:
                assert response.status_code in (429, 503) and response.headers["retry-after"], response.text
                return False
            assert response.json()["choices"][0]["token_ids"] == reference.greedy(prompt(seed), 8)
            return True

        early = [pool.submit(ask, seed) for seed in range(25)]
        time.sleep(0.1)
        victim = pair.workers["decode-0"]
        victim.signal(signal.SIGSTOP)
        try:
            late = [pool.submit(ask, seed) for seed in range(25, 50)]
            time.sleep(3)
            pair.assert_balanced(stopped="decode-0")
        finally:
            victim.signal(signal.SIGCONT)
        pair.wait_ready(timeout_s=10)
        answered = [one.result(timeout=10) for one in (*early, *late)]
        assert len(answered) == 50
        assert ask(50)
        pair.assert_balanced()


def check(three: Cluster, reference: Reference, place: str, fault: str, seed: int, num_requests: int = 2) -> None:
    name, point = place.split()
    three.faults(name, f"{point}={fault}*1")
    victim = three.workers[name]
    prompts = [prompt(seed + at) for at in range(num_requests)]
    with ThreadPoolExecutor(num_requests) as pool:
        started = time.monotonic()
        answers = list(pool.map(lambda ids: three.token_ids(ids, max_tokens=8), prompts))
        assert answers == [reference.greedy(ids, 8) for ids in prompts]
        assert time.monotonic() - started < END_WITHIN_S
    # The router may have given both to the other decode worker, as it must while this one's handshakes are not done.
    more = itertools.count(seed + 10)
    give_up_s = time.monotonic() + 15
    while not has_happened(victim.pid) and time.monotonic() < give_up_s:
        three.token_ids(prompt(next(more)), max_tokens=4)
    bring_back(three, name, fault)
    ids = prompt(seed + 9)
    assert three.token_ids(ids, max_tokens=8) == reference.greedy(ids, 8)
    three.assert_balanced()


@pytest.mark.slow
@pytest.mark.parametrize("three", PATHS, indirect=True)
@pytest.mark.parametrize("place", HANDSHAKE_POINTS)
@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_a_worker_stops_or_dies_in_a_handshake(three: Cluster, reference: Reference, place: str, fault: str) -> None:
    """Requests are answered meanwhile, and in the end the pair transfers again."""
    name, point = place.split()
    seed = seed_of(place, fault)
    three.kill_worker(HANDSHAKE_POINTS[place])
    three.faults(name, f"{point}={fault}*1")
    victim = three.workers[name]
    three.start_worker(HANDSHAKE_POINTS[place])
    wait_for(lambda: has_happened(victim.pid), 10, f"{place}={fault}")
    for at in range(3):
        ids = prompt(seed + at)
        started = time.monotonic()
        assert three.token_ids(ids, max_tokens=8) == reference.greedy(ids, 8)
        assert time.monotonic() - started < END_WITHIN_S
    bring_back(three, name, fault)
    moved = three.metric_sum("twopool_kv_transfer_bytes_total")
    for at in range(4):
        ids = prompt(seed + 4 + at)
        assert three.token_ids(ids, max_tokens=8) == reference.greedy(ids, 8)
    three.wait_metric_above("twopool_kv_transfer_bytes_total", moved)
    three.assert_balanced()


def bring_back(three: Cluster, name: str, fault: str) -> None:
    """Let the stopped worker go on, or start the killed one anew; what the others held for it is back before."""
    victim = three.workers[name]
    if fault == "stop":
        assert psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED
        three.assert_balanced(stopped=name)
        victim.signal(signal.SIGCONT)
    else:
        assert victim.wait(5) == -signal.SIGKILL
        three.kill_worker(name)
        three.assert_balanced()
        three.start_worker(name)
    three.faults(name)
    three.wait_metric("twopool_workers_ready", 3)
    three.assert_balanced()


def seed_of(place: str, fault: str) -> int:
    """One that differs by test and not by run."""
    return sum(ord(letter) * (at + 1) for at, letter in enumerate(place + fault)) * 10
