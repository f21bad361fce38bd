"""Baselines copy the very ranges that READs move, on the host and as a GPU does."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from twopool.kv_transfer.interface import FetchRequest
from twopool.kv_transfer.layout import plan_layout
from twopool.protocol.errors import ConfigError
from twopool.protocol.geometry import KvGeometry
from twopool.scripts import bench_copies
from twopool.scripts.bench_copies import RunsCopy, make_block_copy, make_ranges_copy
from twopool.scripts.bench_link import pools_of
from twopool.scripts.bench_link_flags import memory_device
from twopool.scripts.bench_ranks import deal_heads

CPU = torch.device("cpu")
POOL = KvGeometry(
    num_blocks=5, block_size=16, num_layers=3, num_kv_heads=3, num_kv_heads_local=3, head_dim=4, dtype="bfloat16"
)
REQUEST = FetchRequest(
    remote_block_ids=np.array([2, 0], dtype=np.int32),
    local_block_ids=np.array([1, 3], dtype=np.int32),
    start_token=0,
    end_token=32,
    layer_start=1,
    layer_end=3,
)


class Pools:
    """Stands in for ``make_pool``: keeps what it made, random bytes in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[torch.Tensor] = []
        monkeypatch.setattr(bench_copies, "make_pool", self.make)

    def make(self, num_bytes: int, device: torch.device, *, shared: bool = False) -> torch.Tensor:
        rng = np.random.default_rng(len(self.made))
        self.made.append(torch.from_numpy(rng.integers(0, 256, num_bytes, dtype=np.uint8)))
        return self.made[-1]


@pytest.mark.parametrize("order", [None, [3, 0, 2, 1]])
def test_blocks_are_copied_in_the_order_asked_for(order: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    ids = None if order is None else np.array(order, dtype=np.int32)
    copy = make_block_copy(8, 4, CPU, ids)
    source, target = (pool.view(4, 8) for pool in pools.made)
    assert not torch.equal(target, source)
    copy()
    assert torch.equal(target, source if order is None else source[order])


@pytest.mark.parametrize(("num_readers", "num_sources"), [(1, 2), (2, 1), (4, 3)])
def test_ranges_of_unequal_degrees(num_readers: int, num_sources: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    readers, sources = deal_heads(POOL, num_readers), deal_heads(POOL, num_sources)
    copy = make_ranges_copy(readers, sources, [REQUEST], CPU, spread=0)
    filled, landed = pools.made[:num_sources], pools.made[num_sources:]
    assert len(landed) == num_readers
    before = [pool.clone() for pool in landed]
    copy()
    for reader, earlier, pool in zip(readers, before, landed, strict=True):
        expected = earlier.view(torch.int16).view(reader.shape)
        for head in range(reader.num_kv_heads_local):
            run = next(
                run
                for run in plan_layout(reader, sources).head_runs
                if run.local_head <= head < run.local_head + run.num_heads
            )
            blocks = filled[run.rank].view(torch.int16).view(sources[run.rank].shape)
            from_head = run.remote_head + head - run.local_head
            expected[[1, 3], head, 1:3] = blocks[[2, 0], from_head, 1:3]
        assert torch.equal(pool.view(torch.int16).view(reader.shape), expected)


def test_converted_ranges_are_copied_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    make_ranges_copy([POOL], [replace(POOL, dtype="float32")], [REQUEST], CPU, spread=0)()
    source, landed = pools.made
    blocks = source.view(torch.int32).view(POOL.shape)[[2, 0], :, 1:3]
    assert torch.equal(landed[: 4 * blocks.numel()].view(torch.int32), blocks.reshape(-1))


@pytest.mark.parametrize("remote_size", [16, 32])
def test_a_gpu_copies_the_same_runs(remote_size: int) -> None:
    (runs,) = plan_layout(POOL, [replace(POOL, block_size=remote_size)]).runs(
        replace_ids(REQUEST, [1] if remote_size == 32 else [2, 0])
    )
    source = torch.randint(0, 256, (5 * POOL.head_bytes * 3 * 2,), dtype=torch.uint8)
    targets = [torch.zeros(POOL.pool_bytes, dtype=torch.uint8) for _ in range(2)]
    RunsCopy.make(targets[0], source, runs)()
    RunsCopy.make(targets[1], source, runs, by_torch=True)()
    assert targets[0].any() and torch.equal(*targets)


def replace_ids(request: FetchRequest, remote_ids: list[int]) -> FetchRequest:
    return FetchRequest(
        remote_block_ids=np.array(remote_ids, dtype=np.int32),
        local_block_ids=request.local_block_ids,
        start_token=request.start_token,
        end_token=request.end_token,
        layer_start=request.layer_start,
        layer_end=request.layer_end,
    )


def test_pools_of_a_pair() -> None:
    (pool,) = pools_of("", "--local")
    assert (pool.num_blocks, pool.block_bytes) == (129, 368640)
    assert pools_of("tp_size=2,block_size=32", "--local") == deal_heads(replace(pool, block_size=32, num_blocks=65), 2)
    assert [rank.num_kv_heads_local for rank in pools_of("tp_size=2", "--local")] == [2, 1]
    assert [rank.kv_head_start for rank in pools_of("tp_size=4", "--local")] == [0, 0, 1, 2]
    (part,) = pools_of("tp_size=3,tp_rank=1,kv_head_start=1,num_kv_heads_local=1", "--local")
    assert (part.tp_size, part.tp_rank, part.kv_head_start) == (3, 1, 1)
    (latent,) = pools_of("num_kv_heads=1,num_planes=1,head_dim=576", "--remote")
    assert latent.layer_bytes == 16 * 576 * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block_size=17", "--remote block_size=17: .*power of two, got 17"),
        ("block_size=x", "--remote block_size=x: "),
        ("blocksize=16", "a geometry has no blocksize"),
        ("tp_size=100000", "tp_size must be at most"),
        ("num_blocks=1", "num_blocks must be above 1"),
    ],
)
def test_a_wrong_geometry_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pools_of(text, "--remote")


@pytest.mark.parametrize(
    ("name", "message"), [("gpu", "no such device"), ("meta", "cpu or cuda"), ("cuda:99", "torch sees [0-9]+ GPUs")]
)
def test_a_device_that_is_not_there_is_refused_in_words(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--device {name}: .*{message}"):
        memory_device(name, "--device")
