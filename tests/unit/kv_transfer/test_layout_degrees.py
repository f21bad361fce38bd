"""Every pair of degrees up to four, every way heads divide or do not, every pair of block sizes: all, not samples."""

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS, FetchRequest
from twopool.kv_transfer.layout import LayoutPlan, StridedList, plan_layout, source_columns
from twopool.protocol.geometry import KvGeometry

DEGREES = (1, 2, 3, 4)
BLOCK_SIZES = (16, 32, 64)
NUM_TOKENS = 100
START, END = 20, 100
Pool = npt.NDArray[np.float32]


def geometry(num_kv_heads: int, block_size: int, num_planes: int = 2) -> KvGeometry:
    return KvGeometry(
        num_blocks=-(-NUM_TOKENS // block_size) + 3 + NUM_RESERVED_BLOCKS,
        block_size=block_size,
        num_layers=2,
        num_kv_heads=num_kv_heads,
        num_kv_heads_local=num_kv_heads,
        head_dim=1,
        dtype="float32",
        num_planes=num_planes,
    )


def ranks_of(base: KvGeometry, degree: int) -> list[KvGeometry]:
    """As ``models.sharding`` deals heads out: ranges, the first ranks one more; replicated beyond one head a rank."""
    heads = base.num_kv_heads

    def shares(total: int, count: int) -> list[int]:
        return [total // count + (index < total % count) for index in range(count)]

    if degree <= heads:
        sizes = shares(heads, degree)
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
    else:
        starts = [head for head, replicas in enumerate(shares(degree, heads)) for _ in range(replicas)]
        sizes = [1] * degree
    return [
        replace(base, kv_head_start=start, num_kv_heads_local=size, tp_rank=rank, tp_size=degree)
        for rank, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def block_table(pool: KvGeometry, seed: int) -> npt.NDArray[np.int32]:
    """Where the tokens' blocks lie: anywhere, the reserved block excepted."""
    order = np.random.default_rng(seed).permutation(pool.num_blocks - NUM_RESERVED_BLOCKS)
    return order[: -(-NUM_TOKENS // pool.block_size)].astype(np.int32)


def value(head: int, layer: int, which: int, token: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What the cell of a head, layer, K or V and token holds, different for each."""
    return 1 + ((token * 16 + head) * 4 + layer) * 2 + which


def filled(pool: KvGeometry, table: npt.NDArray[np.int32]) -> Pool:
    """A rank's pool that holds all tokens, written cell by cell."""
    memory = np.zeros(pool.shape, dtype=np.float32)
    token = np.arange(NUM_TOKENS)
    for head, layer, which in product(range(pool.num_kv_heads_local), range(pool.num_layers), range(pool.num_planes)):
        memory[table[token // pool.block_size], head, layer, which, token % pool.block_size, 0] = value(
            pool.kv_head_start + head, layer, which, token
        )
    return memory


def rows(memory: Pool, runs: StridedList) -> npt.NDArray[np.uint8]:
    flat = memory.reshape(-1).view(np.uint8)
    assert runs.offset + (runs.count - 1) * runs.stride + runs.length <= flat.size
    return np.lib.stride_tricks.as_strided(flat[runs.offset :], (runs.count, runs.length), (runs.stride, 1))


def request(local: KvGeometry, remote: KvGeometry, layers: tuple[int, int]) -> FetchRequest:
    def ids(pool: KvGeometry, seed: int) -> npt.NDArray[np.int32]:
        return block_table(pool, seed)[START // pool.block_size : -(-END // pool.block_size)]

    return FetchRequest(
        remote_block_ids=ids(remote, 1),
        local_block_ids=ids(local, 2),
        start_token=START,
        end_token=END,
        layer_start=layers[0],
        layer_end=layers[1],
    )


def check(plan: LayoutPlan, sources: list[Pool], layers: tuple[int, int]) -> None:
    """Read into zeros, then compare every cell of the pool with what must be there and nothing else."""
    local, small = plan.local, min(plan.local.block_size, plan.remotes[0].block_size)
    landed = np.zeros(local.shape, dtype=np.float32)
    for runs in plan.runs(request(local, plan.remotes[0], layers)):
        rows(landed, runs.local)[runs.local_index] = rows(sources[runs.rank], runs.remote)[runs.remote_index]
    whole = filled(local, block_table(local, 2))
    token = np.arange(START // small * small, min(-(-END // small) * small, NUM_TOKENS))
    expected = np.zeros(local.shape, dtype=np.float32)
    place: tuple[Any, ...] = (block_table(local, 2)[token // local.block_size], slice(None), slice(*layers))
    offsets = token % local.block_size
    expected[(*place, slice(None), offsets)] = whole[(*place, slice(None), offsets)]
    np.testing.assert_array_equal(landed, expected)


@pytest.mark.parametrize(("num_kv_heads", "num_planes"), [(1, 1), (1, 2), (2, 2), (3, 2), (5, 2), (8, 2)])
@pytest.mark.parametrize("reader", DEGREES)
@pytest.mark.parametrize("source", DEGREES)
def test_every_geometry(source: int, reader: int, num_kv_heads: int, num_planes: int) -> None:
    """PD-22: against a reference that writes cell by cell; a range read from one rank is one run of heads."""
    for source_size, reader_size in product(BLOCK_SIZES, BLOCK_SIZES):
        remotes = ranks_of(geometry(num_kv_heads, source_size, num_planes), source)
        pools = [filled(remote, block_table(remote, 1)) for remote in remotes]
        for local in ranks_of(geometry(num_kv_heads, reader_size, num_planes), reader):
            plan = plan_layout(local, remotes)
            assert len(plan.head_runs) == len(plan.ranks)
            for layers in ((0, 2), (1, 2)):
                plan.check(request(local, remotes[0], layers))
                check(plan, pools, layers)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
@pytest.mark.parametrize("reader", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("source", [2, 3, 4, 6, 8])
def test_replicas_share_the_load(source: int, reader: int, num_kv_heads: int) -> None:
    """The readers of one head differ by one at most between its replicas."""
    remotes = ranks_of(geometry(num_kv_heads, 16), source)
    readers = ranks_of(geometry(num_kv_heads, 16), reader)
    plans = [plan_layout(local, remotes) for local in readers]
    for head in range(num_kv_heads):
        holders = [r.tp_rank for r in remotes if r.kv_head_start <= head < r.kv_head_start + r.num_kv_heads_local]
        chosen = Counter(
            run.rank
            for plan in plans
            for run in plan.head_runs
            if run.local_head <= head - plan.local.kv_head_start < run.local_head + run.num_heads
        )
        loads = [chosen[holder] for holder in holders]
        assert sum(loads) == sum(chosen.values()) and max(loads) - min(loads) <= 1


def test_readers_of_one_rank_read_from_different_replicas() -> None:
    """Many small decode workers beside a wide prefill worker: their names decide."""
    remotes = ranks_of(geometry(1, 16), 4)
    chosen = [plan_layout(geometry(1, 16), remotes, spread=spread).ranks for spread in range(8)]
    assert sorted(chosen) == sorted([[rank] for rank in range(4)] * 2)
    assert plan_layout(geometry(1, 16), remotes, spread=2**32 - 1).ranks == [3]


@pytest.mark.parametrize("spread", [0, 5])
@pytest.mark.parametrize(("source", "reader"), [(1, 2), (2, 1), (2, 3), (4, 2), (3, 4), (6, 1)])
def test_columns_say_which_replica_was_read(source: int, reader: int, spread: int) -> None:
    """Checksums of all ranks of a source side by side: each of ours is compared with the one of its own bytes."""
    remotes, readers = ranks_of(geometry(3, 16), source), ranks_of(geometry(3, 16), reader)
    labels = [(rank.tp_rank, head) for rank in remotes for head in range(rank.num_kv_heads_local)]
    columns = source_columns(readers, remotes, spread=spread)
    wanted = [
        (run.rank, run.remote_head + index)
        for local in readers
        for run in plan_layout(local, remotes, spread=spread).head_runs
        for index in range(run.num_heads)
    ]
    assert [labels[column] for column in columns.tolist()] == wanted
    ours = [(local.kv_head_start + head) for local in readers for head in range(local.num_kv_heads_local)]
    assert [remotes[rank].kv_head_start + head for rank, head in wanted] == ours
