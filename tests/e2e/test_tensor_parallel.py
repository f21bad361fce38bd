"""Pools of different sizes: whatever the degrees of both sides, the tokens are transformers', in fp32."""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from twopool_testing.cluster import Cluster, running_cluster
from twopool_testing.rank_pids import assert_gone, rank_pids, shared_inodes
from twopool_testing.tiny_model import Reference, build_tiny_llama

pytestmark = pytest.mark.e2e

CHUNK = 64
PAIRS = [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (4, 2), (2, 4), (3, 2), (3, 4), (4, 4)]
WORKER_FLAGS = ("--max-num-batched-tokens", str(CHUNK), "--kv-cache-memory", str(16 * 1024 * 1024))


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(3, 360), k=length)


def degrees(prefill: int, decode: int, block_sizes: tuple[int, int] = (16, 16)) -> dict[str, tuple[str, ...]]:
    return {
        name: ("--tensor-parallel-size", str(degree), "--block-size", str(size))
        for name, degree, size in zip(("prefill-0", "decode-0"), (prefill, decode), block_sizes, strict=True)
    }


def check(cluster: Cluster, reference: Reference, lengths: list[int], num_tokens: int = 16) -> None:
    """Cold, cached, several at once; then what moved, and that nothing stays held."""
    moved = cluster.metric_sum("twopool_nixl_bytes_transferred_sum")
    for length in lengths:
        ids = prompt(length)
        expected = reference.greedy(ids, num_tokens)
        assert cluster.token_ids(ids, max_tokens=num_tokens) == expected
        assert cluster.token_ids(ids, max_tokens=num_tokens) == expected
    prompts = [prompt(length, seed) for seed, length in enumerate([1, 17, 40, 90, 150, 33])]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: cluster.token_ids(ids, max_tokens=num_tokens), prompts))
    assert answers == [reference.greedy(ids, num_tokens) for ids in prompts]
    both = cluster.complete(prompts[3], n=2, max_tokens=num_tokens, return_token_ids=True)["choices"]
    assert [choice["token_ids"] for choice in both] == [answers[3]] * 2
    longest = lengths[-1]
    usage = cluster.complete(prompt(longest), max_tokens=1)["usage"]
    # Whole blocks of both sides.
    whole = {(longest - 1) // size * size for size in (16, 32, 64)}
    assert usage["prompt_tokens_details"]["cached_tokens"] in whole - {0}
    assert cluster.wait_metric_above("twopool_nixl_bytes_transferred_sum", moved) > moved
    cluster.assert_balanced()


@pytest.fixture(scope="module")
def uneven(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks prefill, three decode: six query heads and two KV heads, one of them on two ranks."""
    folder = tmp_path_factory.mktemp("uneven")
    flags = degrees(2, 3, (16, 32))
    with running_cluster(tiny_model, folder, worker_flags=(*WORKER_FLAGS, "--kv-verify", "all"), flags=flags) as pair:
        yield pair


def test_two_ranks_prefill_and_three_decode(uneven: Cluster, reference: Reference) -> None:
    """The slice of the matrix below that every run takes: uneven, replicated, unequal blocks, checksums compared."""
    check(uneven, reference, [1, 16, 100, 3 * CHUNK + 7])
    assert uneven.metric_sum("twopool_kv_verified_bytes_total") > 0
    assert uneven.metric_sum("twopool_nixl_num_failed_transfers_total") == 0
    stacks = uneven.client.get("/version").json()["system_fingerprints"].values()
    degrees_of_pairs = {
        tuple(stack[role]["tensor_parallel_size"] for role in ("prefill", "decode")) for stack in stacks
    }
    assert (2, 3) in degrees_of_pairs


def test_a_killed_rank_takes_its_worker_along(uneven: Cluster, reference: Reference) -> None:
    """Within 2 s nothing of it is left, and requests under way are answered right; ``test_rank_failures.py`` has more.

    After the test above, in one cluster: the decode worker prefills for itself from now on.
    """
    worker = uneven.workers["prefill-0"]
    pids = [worker.pid, *rank_pids(worker.pid)]
    inodes = shared_inodes(pids)
    prompts = [prompt(3 * CHUNK, seed) for seed in range(50, 54)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(uneven.token_ids, ids, max_tokens=16) for ids in prompts]
        time.sleep(0.03)
        os.kill(pids[1], signal.SIGKILL)
        assert uneven.workers.pop("prefill-0").wait(2) == 1
        assert_gone(pids, inodes, within_s=2)
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer.result(timeout=30) == reference.greedy(ids, 16)
    assert "rank 1 of 2 ended with signal SIGKILL" in worker.log_text()
    uneven.assert_balanced()


def test_sigterm_leaves_nothing(uneven: Cluster) -> None:
    """After the tests above, in one cluster: a worker that drains takes its ranks along, and all of their memory."""
    worker = uneven.workers.pop("decode-0")
    pids = [worker.pid, *rank_pids(worker.pid)]
    assert len(pids) == 3
    inodes = shared_inodes(pids)
    assert len(inodes) >= 4  # three pools and the place where the ranks meet
    worker.signal(signal.SIGTERM)
    assert worker.wait(10) == 0
    assert_gone(pids, inodes, within_s=2)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_every_pair_of_degrees(
    tiny_model: Path, reference: Reference, tmp_path: Path, prefill: int, decode: int
) -> None:
    sizes = ((16, 16), (16, 32), (32, 16), (64, 16))[(prefill + decode) % 4]
    flags = degrees(prefill, decode, sizes)
    with running_cluster(tiny_model, tmp_path, worker_flags=WORKER_FLAGS, flags=flags) as cluster:
        check(cluster, reference, [1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 100, 3 * CHUNK + 7])


@pytest.fixture(scope="module")
def smollm_shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M's heads (nine query, three KV, 64 wide) in two layers with random weights."""
    shape = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    return build_tiny_llama(
        tmp_path_factory.mktemp("smollm") / "model",
        **shape,
        intermediate_size=1536,
        num_hidden_layers=2,
        initializer_range=0.05,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (2, 3), (4, 2), (9, 1)])
def test_heads_of_smollm2(smollm_shaped: Path, tmp_path: Path, prefill: int, decode: int) -> None:
    flags = degrees(prefill, decode)
    with running_cluster(smollm_shaped, tmp_path, worker_flags=WORKER_FLAGS, flags=flags) as cluster:
        check(cluster, Reference(smollm_shaped), [1, 33, 3 * CHUNK + 7])


@pytest.mark.slow
def test_torch_computes_too(tiny_model: Path, reference: Reference, tmp_path: Path) -> None:
    """The decoder without the native step, over the same meeting place."""
    flags = {name: (*words, "--kernel-backend", "torch") for name, words in degrees(2, 2).items()}
    with running_cluster(tiny_model, tmp_path, worker_flags=WORKER_FLAGS, flags=flags) as cluster:
        check(cluster, reference, [1, 100])


@pytest.mark.slow
def test_preemption(tiny_model: Path, reference: Reference, tmp_path: Path) -> None:
    """Long answers that do not fit together: choices lose their blocks on every rank and are computed again."""
    flags = degrees(2, 2)
    flags["decode-0"] += ("--kv-cache-memory", str(40 * 16 * 3 * 2 * 16 * 4))  # 40 blocks of one head a rank
    with running_cluster(tiny_model, tmp_path, worker_flags=WORKER_FLAGS, flags=flags) as cluster:
        prompts = [prompt(60, seed) for seed in range(4)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda ids: cluster.token_ids(ids, max_tokens=160), prompts))
        assert answers == [reference.greedy(ids, 160) for ids in prompts]
        assert cluster.wait_metric_above("twopool_worker_preemptions_total", 0) > 0
        cluster.assert_balanced()


@pytest.mark.slow
def test_workers_come_and_go(tiny_model: Path, reference: Reference, tmp_path: Path) -> None:
    """New workers of other degrees take traffic, old ones leave, and running requests do not notice."""
    names = ["prefill-1", "decode-1", "prefill-2", "decode-2"]
    new = dict(zip(names, (2, 3, 1, 2), strict=True))
    with (
        running_cluster(tiny_model, tmp_path, worker_flags=WORKER_FLAGS, flags=degrees(1, 1)) as cluster,
        ThreadPoolExecutor(3) as pool,
    ):
        stop = False

        def ask(seed: int) -> int:
            count = 0
            while not stop:
                ids = prompt(30 + 17 * seed, seed=1000 * seed + count)
                assert cluster.token_ids(ids, max_tokens=30) == reference.greedy(ids, 30)
                count += 1
            return count

        asking = [pool.submit(ask, seed) for seed in range(3)]
        try:
            for number, (name, degree) in enumerate(new.items()):
                cluster.start_worker(name, "--tensor-parallel-size", str(degree), "--block-size", "32")
                cluster.wait_metric("twopool_workers_ready", 3)
                leaving = ["prefill-0", "decode-0", "prefill-1", "decode-1"][number]
                worker = cluster.workers.pop(leaving)
                worker.signal(signal.SIGTERM)
                assert worker.wait(30) == 0
        finally:
            stop = True
        assert all(answered.result(30) > 3 for answered in asking)
        ids = prompt(77, seed=5)
        assert cluster.token_ids(ids, max_tokens=30) == reference.greedy(ids, 30)
        cluster.assert_balanced()
