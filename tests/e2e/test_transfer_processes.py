"""Workers that stop or die at the points of a transfer, as real processes, over one host's path and over TCP."""

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from twopool_testing.cluster import Cluster, running_cluster
from twopool_testing.tiny_model import Reference

pytestmark = pytest.mark.e2e

WORKER_FLAGS = (
    *("--max-num-batched-tokens", "32", "--block-size", "16", "--kv-cache-memory", str(32 * 1024 * 1024)),
    *("--kv-verify", "all", "--kv-quarantine-s", "1", "--drain-timeout-s", "5"),
)
END_WITHIN_S = 5.0
POINTS = ("decode-0 read", "prefill-0 pinned", "decode-0 confirming", "decode-0 fetching", "prefill-0 accepting")
QUICK = ("decode-0 read", "prefill-0 pinned")
PATHS = {"mapped": (), "same-host": ("--kv-same-host", "nixl"), "tcp": ("--ucx-tls", "tcp")}
CASES = [
    pytest.param(path, point, fault, marks=() if point in QUICK and path != "same-host" else pytest.mark.slow)
    for path in PATHS
    for point in POINTS
    for fault in ("stop", "kill")
]


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


@pytest.mark.parametrize(("three", "place", "fault"), CASES, indirect=["three"])
def test_a_worker_stops_or_dies(three: Cluster, reference: Reference, place: str, fault: str) -> None:
    """PD-03, PD-25, X-pd-prefill-death-recover: quarantined reads from a stopped peer excepted, all comes back."""
    name, point = place.split()
    seed = sum(ord(letter) * (at + 1) for at, letter in enumerate(place + fault)) * 10
    three.faults(name, f"{point}={fault}*1")
    victim = three.workers[name]
    prompts = [prompt(seed + at) for at in range(2)]
    with ThreadPoolExecutor(2) as pool:
        started = time.monotonic()
        answers = list(pool.map(lambda ids: three.token_ids(ids, max_tokens=8), prompts))
        assert answers == [reference.greedy(ids, 8) for ids in prompts]
        assert time.monotonic() - started < END_WITHIN_S
    for at in range(10):  # the router may have given both to the other decode worker
        if has_happened(victim.pid):
            break
        three.token_ids(prompt(seed + 10 + at), max_tokens=4)
    if fault == "stop":
        assert psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED
        victim.signal(signal.SIGCONT)
    else:
        assert victim.wait(5) == -signal.SIGKILL
        three.kill_worker(name)
        three.assert_balanced()
        three.start_worker(name)
    three.faults(name)
    three.wait_metric("twopool_workers_ready", 3)
    three.assert_balanced()
    ids = prompt(seed + 2)
    assert three.token_ids(ids, max_tokens=8) == reference.greedy(ids, 8)
    three.assert_balanced()
