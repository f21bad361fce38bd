"""Workers whose ranks are on two nodes: the same tokens, and a node that goes takes its worker along within 2 s.

Both nodes are on this host. What needs two network stacks is in ``test_node_networks.py``.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from twopool_testing.cluster import Cluster, Process, free_port, running_cluster, wait_for
from twopool_testing.rank_pids import assert_gone, rank_pids, shared_inodes
from twopool_testing.tiny_model import Reference, build_tiny_llama

pytestmark = pytest.mark.e2e

CHUNK = 64
WORKER_FLAGS = ("--max-num-batched-tokens", str(CHUNK), "--kv-cache-memory", str(16 * 1024 * 1024))
ROUTER_FLAGS = ("--resume-timeout-s", "5")
GONE_WITHIN_S = 2.0
NUM_TOKENS = 16


def ranks(count: int) -> tuple[str, str]:
    return ("--tensor-parallel-size", str(count))


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(3, 360), k=length)


def check(cluster: Cluster, reference: Reference, lengths: list[int]) -> None:
    """One at a time, then several at once, and nothing stays held."""
    for length in lengths:
        assert cluster.token_ids(prompt(length), max_tokens=NUM_TOKENS) == reference.greedy(prompt(length), NUM_TOKENS)
    prompts = [prompt(length, seed) for seed, length in enumerate([1, 40, 90, 33])]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: cluster.token_ids(ids, max_tokens=NUM_TOKENS), prompts))
    assert answers == [reference.greedy(ids, NUM_TOKENS) for ids in prompts]
    cluster.assert_balanced()


class Worker:
    """A worker on two nodes and all of its processes."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.leader = cluster.workers.pop(name)
        (self.node,) = cluster.nodes.pop(name)
        self.here, self.there = rank_pids(self.leader.pid), rank_pids(self.node.pid)
        self.pids = [self.leader.pid, *self.here, self.node.pid, *self.there]
        self.inodes = shared_inodes(self.pids)

    def victim(self, which: str) -> int:
        """``leader``, its ``rank``, the other ``node``, or that one's ``remote`` rank."""
        return {
            "leader": self.leader.pid,
            "rank": next(iter(self.here), self.leader.pid),
            "node": self.node.pid,
            "remote": self.there[0],
        }[which]

    def kill(self, which: str) -> None:
        """SIGKILL, and see all of it gone in time, with statuses that say so."""
        pid = self.victim(which)
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        statuses = []
        for process in (self.leader, self.node):
            statuses.append(process.wait(GONE_WITHIN_S - (time.monotonic() - killed_s)))
            assert statuses[-1] == (-signal.SIGKILL if process.pid == pid else 1)
        assert_gone(self.pids, self.inodes, within_s=GONE_WITHIN_S - (time.monotonic() - killed_s))

    def stop(self, process: Process) -> None:
        """SIGTERM to one of the nodes: all of it drains and leaves nothing."""
        process.signal(signal.SIGTERM)
        assert self.leader.wait(10) == 0
        assert self.node.wait(GONE_WITHIN_S) == 0
        assert_gone(self.pids, self.inodes, within_s=GONE_WITHIN_S)


@pytest.fixture(scope="module")
def both(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three ranks prefill, two on node 0 and one on node 1; two decode, one on either."""
    folder = tmp_path_factory.mktemp("nodes")
    flags = {"prefill-0": ranks(3), "decode-0": (*ranks(2), "--block-size", "32", "--kv-verify", "all")}
    nnodes = {"prefill-0": 2, "decode-0": 2}
    with running_cluster(tiny_model, folder, worker_flags=WORKER_FLAGS, flags=flags, nnodes=nnodes) as cluster:
        yield cluster


def test_two_nodes_on_either_side(both: Cluster, reference: Reference) -> None:
    check(both, reference, [1, 17, 3 * CHUNK + 7])
    assert both.metric_sum("twopool_kv_verified_bytes_total") > 0
    assert both.metric_sum("twopool_nixl_num_failed_transfers_total") == 0
    for name in ("prefill-0", "decode-0"):
        ready = both.nodes[name][0].wait_announced()
        assert (ready["event"], ready["worker_id"], ready["node_rank"]) == ("ready", name, 1)


def test_a_killed_node_takes_its_worker_along(both: Cluster, reference: Reference) -> None:
    """After the test above, in one cluster; the decode worker prefills for itself from now on."""
    worker = Worker(both, "prefill-0")
    assert (len(worker.here), len(worker.there)) == (1, 1)
    prompts = [prompt(3 * CHUNK, seed) for seed in range(50, 53)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(both.token_ids, ids, max_tokens=NUM_TOKENS) for ids in prompts]
        time.sleep(0.05)
        worker.kill("node")
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer.result(timeout=30) == reference.greedy(ids, NUM_TOKENS)
    assert "node 1 of 2" in worker.leader.log_text() and "is lost" in worker.leader.log_text()
    both.assert_balanced()


def test_sigterm_at_the_other_node_drains_the_worker(both: Cluster) -> None:
    """After the tests above, in one cluster."""
    worker = Worker(both, "decode-0")
    worker.stop(worker.node)


def test_nodes_that_cannot_meet_say_why(both: Cluster, tiny_model: Path, reference: Reference) -> None:
    """After the tests above, beside the router: a node nobody waits for, one nobody comes to, and one that differs."""

    def start(name: str, number: int, port: int, *flags: str) -> Process:
        common = (*ranks(2), "--nnodes", "2", "--master-port", str(port), "--node-timeout-s")
        return both.start_node(name, number, *common, *(flags or ("1",)))

    alone, lonely, shared = free_port(), free_port(), free_port()
    processes = {
        "joins": start("decode-1", 1, alone),
        "waits": start("decode-2", 0, lonely),
        "leads": start("decode-3", 0, shared, "6"),
        "differs": start("decode-3", 1, shared, "6", "--max-num-seqs", "7"),
    }
    statuses = {name: process.wait(30) for name, process in processes.items()}
    said = {name: process.log_text() for name, process in processes.items()}
    assert statuses == {"joins": 1, "waits": 1, "leads": 1, "differs": 2}, said
    assert f"--node-rank 1: there was no node 0 at 127.0.0.1:{alone} within --node-timeout-s 1" in said["joins"]
    for name, port, limit in (("waits", lonely, 1), ("leads", shared, 6)):
        words = f"--nnodes 2: node 1 did not come to 127.0.0.1:{port} within --node-timeout-s {limit}"
        assert words in said[name], said[name]
    for name in ("leads", "differs"):
        assert "--max-num-seqs is 7 on node 1, 64 on node 0" in said[name]


# --- the whole, by scripts/test --all


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode", "nnodes"),
    [
        (4, 1, {"prefill-0": 2}),
        (1, 4, {"decode-0": 3}),
        (2, 3, {"prefill-0": 2, "decode-0": 3}),
        (2, 2, {"decode-0": 2}),
    ],
)
def test_pairs_of_degrees_over_nodes(
    tiny_model: Path, reference: Reference, tmp_path: Path, prefill: int, decode: int, nnodes: dict[str, int]
) -> None:
    """Pairs of a worker on several nodes with one on a single host, which computes in another way."""
    flags = {"prefill-0": ranks(prefill), "decode-0": (*ranks(decode), "--block-size", "32")}
    with running_cluster(tiny_model, tmp_path, worker_flags=WORKER_FLAGS, flags=flags, nnodes=nnodes) as cluster:
        check(cluster, reference, [1, 15, 16, 17, CHUNK, 100, 3 * CHUNK + 7])


@pytest.mark.slow
def test_heads_of_smollm2_over_nodes(tmp_path: Path) -> None:
    shape = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    model = build_tiny_llama(
        tmp_path / "model", **shape, intermediate_size=1536, num_hidden_layers=2, initializer_range=0.05
    )
    flags = {"prefill-0": ranks(2), "decode-0": ranks(4)}
    nnodes = {"prefill-0": 2, "decode-0": 2}
    with running_cluster(model, tmp_path, worker_flags=WORKER_FLAGS, flags=flags, nnodes=nnodes) as cluster:
        check(cluster, Reference(model), [1, 33, 3 * CHUNK + 7])


@pytest.fixture(scope="module")
def three(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A prefill and a decode worker on two nodes each, and a decode worker of one rank to fall back to."""
    flags = {"prefill-0": ranks(3), "decode-0": ranks(3)}
    with running_cluster(
        tiny_model,
        tmp_path_factory.mktemp("three"),
        decode=2,
        worker_flags=WORKER_FLAGS,
        router_flags=ROUTER_FLAGS,
        flags=flags,
        nnodes={"prefill-0": 2, "decode-0": 2},
    ) as cluster:
        yield cluster


def restart(cluster: Cluster, reference: Reference, name: str) -> None:
    cluster.start_worker(name, *ranks(3), nnodes=2)
    cluster.wait_metric("twopool_workers_ready", 3)
    assert cluster.token_ids(prompt(99), max_tokens=NUM_TOKENS) == reference.greedy(prompt(99), NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["leader", "node", "remote"])
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
@pytest.mark.parametrize(("held", "after_s"), [("", 0.05), ("running", 0.3), ("fetching", 0.3)])
def test_kill_each_process_at_each_moment(
    three: Cluster, reference: Reference, held: str, after_s: float, name: str, which: str
) -> None:
    if held:
        three.hold("decode-0", **{held: 0.02 if held == "running" else 1.0})
    worker = Worker(three, name)
    prompts = [prompt(40 + 60 * (seed % 3), seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(three.token_ids, ids, max_tokens=NUM_TOKENS) for ids in prompts]
        time.sleep(after_s)
        worker.kill(which)
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer.result(timeout=30) == reference.greedy(ids, NUM_TOKENS)
    three.assert_balanced()
    three.hold("decode-0")
    restart(three, reference, name)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["leader", "rank", "node", "remote"])
@pytest.mark.parametrize("after_s", [0.05, 1.0, 3.0])
def test_kill_each_process_while_it_loads(three: Cluster, after_s: float, which: str) -> None:
    three.start_worker("decode-9", *ranks(3), nnodes=2, wait=False)
    node = three.nodes["decode-9"][0]
    wait_for(lambda: bool(rank_pids(node.pid)), 30, "the rank on node 1")
    time.sleep(after_s)
    Worker(three, "decode-9").kill(which)
    three.wait_metric("twopool_workers_ready", 3)


@pytest.mark.slow
def test_a_node_that_stands_still_is_lost(three: Cluster, reference: Reference) -> None:
    """libzmq answers for it no more: its worker ends within 2 s, and what is left of the node does when it wakes up."""
    worker = Worker(three, "decode-0")
    os.kill(worker.node.pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        assert worker.leader.wait(GONE_WITHIN_S + 1) == 1
        assert time.monotonic() - stopped_s < GONE_WITHIN_S + 0.5
    finally:
        os.kill(worker.node.pid, signal.SIGCONT)
    assert worker.node.wait(GONE_WITHIN_S) == 1
    assert_gone(worker.pids, worker.inodes, within_s=GONE_WITHIN_S)
    restart(three, reference, "decode-0")


@pytest.mark.slow
def test_sigterm_at_each_node_drains(three: Cluster, reference: Reference) -> None:
    """Requests under way are finished, whichever node is told."""
    for which in ("leader", "node"):
        three.hold("decode-0", running=0.02)
        worker = Worker(three, "decode-0")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(three.token_ids, prompt(50), max_tokens=NUM_TOKENS)
            time.sleep(0.3)
            worker.stop(worker.leader if which == "leader" else worker.node)
            assert answer.result(timeout=30) == reference.greedy(prompt(50), NUM_TOKENS)
        three.hold("decode-0")
        restart(three, reference, "decode-0")
