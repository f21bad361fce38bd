"""A rank that dies, or its leader, at any moment: the worker goes as a whole, within 2 s, and leaves nothing behind.

One case of these is in every run: ``test_tensor_parallel.py``.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from twopool.engine.rank_life import SILENCE_S
from twopool_testing.cluster import Cluster, Process, running_cluster, wait_for
from twopool_testing.rank_pids import assert_gone, rank_pids, shared_inodes
from twopool_testing.tiny_model import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORKER_FLAGS = (
    *("--max-num-batched-tokens", "32", "--block-size", "16", "--kv-cache-memory", str(16 * 1024 * 1024)),
    *("--tensor-parallel-size", "2"),
)
ROUTER_FLAGS = ("--resume-timeout-s", "5")
GONE_WITHIN_S = 2.0
NUM_TOKENS = 24
FALLBACK = ("--tensor-parallel-size", "1")


def prompt(seed: int, length: int = 100) -> list[int]:
    return random.Random(seed).choices(range(3, 360), k=length)


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A prefill and a decode worker of two ranks each, and a decode worker of one to fall back to."""
    with running_cluster(
        tiny_model,
        tmp_path_factory.mktemp("ranks"),
        decode=2,
        worker_flags=WORKER_FLAGS,
        router_flags=ROUTER_FLAGS,
        flags={"decode-1": FALLBACK},
    ) as three:
        yield three


class Victim:
    """A worker and one of its processes, about to be killed."""

    def __init__(self, worker: Process, rank: int) -> None:
        self._worker = worker
        self._pids = [worker.pid, *rank_pids(worker.pid)]
        assert len(self._pids) == 2
        self._inodes = shared_inodes(self._pids)
        self._rank = rank

    def kill(self) -> None:
        """SIGKILL, and see the whole worker gone in time, with a status that says so."""
        os.kill(self._pids[self._rank], signal.SIGKILL)
        status = self._worker.wait(GONE_WITHIN_S)
        assert status == (1 if self._rank else -signal.SIGKILL), status
        assert_gone(self._pids, self._inodes, within_s=GONE_WITHIN_S)
        if self._rank:
            assert "rank 1 of 2 ended with signal SIGKILL" in self._worker.log_text()


def ask_all(
    cluster: Cluster, pool: ThreadPoolExecutor, seed: int, count: int = 6
) -> list[tuple[list[int], Future[list[int]]]]:
    prompts = [prompt(seed + i, 40 + 60 * (i % 3)) for i in range(count)]
    return [(ids, pool.submit(cluster.token_ids, ids, max_tokens=NUM_TOKENS)) for ids in prompts]


def kill_while(cluster: Cluster, reference: Reference, name: str, rank: int, after_s: float, seed: int) -> None:
    """Kill with requests under way: each is answered right, by whoever is left, and no block stays held."""
    victim = Victim(cluster.workers[name], rank)
    with ThreadPoolExecutor(6) as pool:
        asked = ask_all(cluster, pool, seed)
        time.sleep(after_s)
        cluster.workers.pop(name)
        victim.kill()
        for ids, answer in asked:
            assert answer.result(timeout=30) == reference.greedy(ids, NUM_TOKENS)
    cluster.assert_balanced()


def restart(cluster: Cluster, reference: Reference, name: str) -> None:
    cluster.start_worker(name)
    cluster.wait_metric("twopool_workers_ready", 3)
    ids = prompt(99)
    assert cluster.token_ids(ids, max_tokens=NUM_TOKENS) == reference.greedy(ids, NUM_TOKENS)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
@pytest.mark.parametrize(
    ("held", "after_s"),
    [("", 0.0), ("", 0.02), ("", 0.05), ("", 0.1), ("running", 0.3), ("fetching", 0.3), ("confirming", 0.3)],
)
def test_kill_each_process_at_each_moment(
    cluster: Cluster, reference: Reference, held: str, after_s: float, name: str, rank: int
) -> None:
    if held:
        cluster.hold("decode-0", **{held: 0.02 if held == "running" else 1.0})
    kill_while(cluster, reference, name, rank, after_s, seed=100 * rank + int(1000 * after_s) + len(held))
    cluster.hold("decode-0")
    restart(cluster, reference, name)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_kill_each_process_while_idle(cluster: Cluster, reference: Reference, name: str, rank: int) -> None:
    victim = Victim(cluster.workers.pop(name), rank)
    victim.kill()
    cluster.assert_balanced()
    restart(cluster, reference, name)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_kill_each_process_during_a_transfer(cluster: Cluster, reference: Reference, name: str, rank: int) -> None:
    """READs of every process of the reader are under way; the source's pins come back, the reader's request goes on."""
    cluster.faults("decode-0", "read=late:0.7")
    kill_while(cluster, reference, name, rank, after_s=0.4, seed=500 + rank)
    cluster.faults("decode-0")
    restart(cluster, reference, name)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.8, 1.5, 2.5])
def test_kill_each_process_while_it_loads(cluster: Cluster, after_s: float, rank: int) -> None:
    worker = cluster.start_worker("decode-9", wait=False)
    del cluster.workers["decode-9"]
    started_s = time.monotonic()
    wait_for(lambda: bool(rank_pids(worker.pid)), 30, "the rank to be started")
    time.sleep(max(0.0, after_s - (time.monotonic() - started_s)))
    pids = [worker.pid, *rank_pids(worker.pid)]
    inodes = shared_inodes(pids)
    os.kill(pids[rank], signal.SIGKILL)
    assert worker.wait(GONE_WITHIN_S) in (1, -signal.SIGKILL)
    assert_gone(pids, inodes, within_s=GONE_WITHIN_S)
    cluster.wait_metric("twopool_workers_ready", 3)


def test_a_rank_that_stands_still(cluster: Cluster, reference: Reference) -> None:
    """Stopped in the middle of a step, which waits for it: it lives and says nothing, and is missed in time."""
    cluster.hold("decode-0", running=0.1)
    worker = cluster.workers["decode-0"]
    (rank,) = rank_pids(worker.pid)
    pids, inodes = [worker.pid, rank], shared_inodes([worker.pid, rank])
    with ThreadPoolExecutor(6) as pool:
        asked = ask_all(cluster, pool, seed=700)
        wait_for(lambda: cluster.blocks("decode-0")["active"] > 0, 5, "a request to be decoded")
        os.kill(rank, signal.SIGSTOP)
        assert not all(answer.done() for _, answer in asked)  # the other decode worker has some
        assert cluster.workers.pop("decode-0").wait(SILENCE_S + GONE_WITHIN_S) == 1
        assert "rank 1 of 2 has not been heard of for too long" in worker.log_text()
        assert_gone(pids, inodes, within_s=GONE_WITHIN_S)
        for ids, answer in asked:
            assert answer.result(timeout=30) == reference.greedy(ids, NUM_TOKENS)
    cluster.assert_balanced()
    cluster.hold("decode-0")
    restart(cluster, reference, "decode-0")


def test_a_leader_that_stands_still_comes_back_with_its_ranks(cluster: Cluster, reference: Reference) -> None:
    """Longer than a silent rank may be: a stopped leader hears nobody, and blames nobody."""
    worker = cluster.workers["decode-0"]
    worker.signal(signal.SIGSTOP)
    try:
        time.sleep(12)
        ids = prompt(800)
        assert cluster.token_ids(ids, max_tokens=NUM_TOKENS) == reference.greedy(ids, NUM_TOKENS)
    finally:
        worker.signal(signal.SIGCONT)
    cluster.wait_metric("twopool_workers_ready", 3)
    assert worker.is_running()
    with ThreadPoolExecutor(6) as pool:
        for ids, answer in ask_all(cluster, pool, seed=810):
            assert answer.result(timeout=30) == reference.greedy(ids, NUM_TOKENS)
    cluster.assert_balanced()


def test_a_terminal_signals_every_process(tiny_model: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches the ranks too: they stay until their leader has drained."""
    with running_cluster(tiny_model, tmp_path, worker_flags=WORKER_FLAGS) as pair:
        worker = pair.workers.pop("decode-0")
        pids = [worker.pid, *rank_pids(worker.pid)]
        inodes = shared_inodes(pids)
        pair.hold("decode-0", running=0.05)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(pair.token_ids, prompt(1), max_tokens=NUM_TOKENS)
            time.sleep(0.4)
            for pid in reversed(pids):
                os.kill(pid, signal.SIGINT)
            time.sleep(0.2)
            assert all(psutil.pid_exists(pid) for pid in pids)
            assert len(answer.result(timeout=30)) == NUM_TOKENS
        assert worker.wait(10) == 0
        assert_gone(pids, inodes, within_s=GONE_WITHIN_S)
