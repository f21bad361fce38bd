"""Ranks add and gather what they should, in the order of the ranks, and never wait for one that is gone."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from twopool.kernels.collectives import SharedMemoryCollective, create_segment
from twopool.kernels.native_step import native_available
from twopool.protocol.errors import CollectiveError
from twopool_testing.rank_process import MAX_BYTES, check
from twopool_testing.ranks import on_every_rank, shared_collectives

UNAVAILABLE = native_available()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"no native library: {UNAVAILABLE}")

PEER = Path(__file__).parents[2] / "support" / "twopool_testing" / "rank_process.py"


@pytest.mark.parametrize("spin_us", [0, 200])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_in_the_order_of_the_ranks(size: int, dtype: torch.dtype, spin_us: int) -> None:
    """Of fewer and more numbers than the segment holds, many times in a row."""
    ranks = shared_collectives(size, MAX_BYTES, spin_us=spin_us)
    shapes = [(1, 1), (3, 100), (8, 576), (0, 7), (40, 65)]
    random = torch.Generator().manual_seed(size)
    inputs = [[torch.randn(shape, generator=random).to(dtype) for _ in range(size)] for shape in shapes]

    def reduce(rank: int) -> list[torch.Tensor]:
        results = [parts[rank].clone() for parts in inputs]
        for result in results:
            ranks[rank].all_reduce_(result)
        return results

    wanted = []
    for parts in inputs:
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        wanted.append(total.to(dtype))
    for results in on_every_rank(size, reduce):
        assert all(torch.equal(result, want) for result, want in zip(results, wanted, strict=True))


@pytest.mark.parametrize("num_rows", [0, 1, 7, 50])
def test_columns_are_gathered_on_rank_0(num_rows: int) -> None:
    widths = (64, 33, 1)
    ranks = shared_collectives(3, MAX_BYTES)
    whole = torch.randn((num_rows, sum(widths)))
    parts = [part.contiguous() for part in torch.split(whole, list(widths), dim=1)]
    first, *others = on_every_rank(3, lambda rank: ranks[rank].gather_columns(parts[rank], widths))
    assert others == [None, None]
    assert first is not None and torch.equal(first, whole)


def test_wrong_shapes_and_segments_are_refused() -> None:
    (alone,) = shared_collectives(1, MAX_BYTES)
    with pytest.raises(ValueError, match="widths"):
        alone.gather_columns(torch.zeros((1, 3)), (4,))
    with pytest.raises(ValueError, match="contiguous"):
        alone.all_reduce_(torch.zeros((4, 4)).t()[:, 1:])
    with pytest.raises(ValueError, match="out of range"):
        create_segment(2, 0)
    with pytest.raises(ValueError, match="1 to 64"):
        create_segment(65, MAX_BYTES)
    fd = create_segment(2, MAX_BYTES)
    try:
        for rank, size, max_bytes, problem in ((2, 2, MAX_BYTES, "out of range"), (0, 3, MAX_BYTES, "size")):
            with pytest.raises(ValueError, match=problem):
                SharedMemoryCollective(fd, rank, size, max_bytes)
        with pytest.raises(ValueError, match="size"):
            SharedMemoryCollective(fd, 0, 2, 10 * MAX_BYTES)
    finally:
        os.close(fd)


def test_ranks_that_disagree_on_the_shape_are_stopped() -> None:
    ranks = shared_collectives(2, MAX_BYTES)

    def reduce(rank: int) -> str:
        with pytest.raises(CollectiveError) as stopped:
            ranks[rank].all_reduce_(torch.zeros((1 + rank, 8)))
        return stopped.value.message

    assert all("another step" in message for message in on_every_rank(2, reduce))


@pytest.mark.parametrize("spin_us", [0, 100_000])
def test_abort_ends_every_wait_at_once_and_for_good(spin_us: int) -> None:
    ranks = shared_collectives(3, MAX_BYTES, spin_us=spin_us)
    waiting = threading.Barrier(3)

    def wait(rank: int) -> float:
        waiting.wait()
        if rank == 2:
            time.sleep(0.2)  # the others are asleep by now
            ranks[rank].abort()
        with pytest.raises(CollectiveError, match="ended"):
            ranks[rank].barrier()
        return time.monotonic()

    ends = on_every_rank(3, wait)
    assert max(ends) - min(ends) < 1
    for rank in ranks:
        with pytest.raises(CollectiveError):
            rank.all_reduce_(torch.zeros((1, 1)))


def test_a_rank_that_never_comes_is_waited_for_until_the_timeout() -> None:
    ranks = shared_collectives(2, MAX_BYTES, timeout_s=0.3)
    start = time.monotonic()
    with pytest.raises(CollectiveError, match="rank 0 waited 300 ms"):
        ranks[0].barrier()
    assert 0.3 <= time.monotonic() - start < 3
    with pytest.raises(CollectiveError, match="rank 0 waited 300 ms"):
        ranks[1].barrier()


CPUS = sorted(os.sched_getaffinity(0))
"""Of the process: a native step pins the thread that calls it, and tests before may have done so on this one."""


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("own_cpus", [True, False])
def test_ranks_spin_only_where_each_may_have_a_cpu(own_cpus: bool) -> None:
    fd = create_segment(2, MAX_BYTES)

    def meet(rank: int) -> tuple[int, int]:
        os.sched_setaffinity(0, {CPUS[rank if own_cpus else 0]})  # of this thread
        collective = SharedMemoryCollective(fd, rank, 2, MAX_BYTES)
        before = collective.spin_us
        for _ in range(2):
            collective.barrier()
        return before, collective.spin_us

    try:
        assert on_every_rank(2, meet) == [(0, 200 if own_cpus else 0)] * 2
    finally:
        os.close(fd)


def test_closed_collectives_say_so() -> None:
    first, second = shared_collectives(2, MAX_BYTES)
    first.close()
    first.close()
    first.abort()
    with pytest.raises(CollectiveError, match="closed"):
        first.barrier()
    second.abort()


def _start(kind: str, rank: int, size: int, place: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", str(PEER), kind, str(rank), str(size), str(place)],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[] if kind == "gloo" else [place],
    )


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_three_processes_one_of_which_is_killed() -> None:
    """All get the same bits; the survivors stop as soon as somebody says so, as a worker's watch does."""
    fd = create_segment(3, MAX_BYTES)
    leader = SharedMemoryCollective(fd, 0, 3, MAX_BYTES, timeout_s=60)
    peers = [_start("shared", rank, 3, fd) for rank in (1, 2)]
    os.close(fd)
    try:
        digest = check(leader)
        assert [_line(peer) for peer in peers] == [digest, digest]
        peers[0].send_signal(signal.SIGKILL)
        peers[0].wait(10)
        watch = threading.Timer(0.2, leader.abort)
        watch.start()
        with pytest.raises(CollectiveError):
            for _ in range(2):  # the dead one may have come to one meeting
                leader.barrier()
        assert peers[1].wait(10) == 3, "it ended by the error, not by its time-out"
        watch.join()
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()


def test_two_processes_over_gloo(unused_tcp_port: int) -> None:
    processes = [_start("gloo", rank, 2, unused_tcp_port) for rank in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] != ""
