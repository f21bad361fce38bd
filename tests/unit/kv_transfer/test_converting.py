"""KV of another dtype, read through the real plan: what lands is each number rounded, where the plain plan puts it."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from twopool.kv_transfer.checksums import ChecksumRequest, unit_checksums
from twopool.kv_transfer.converting import Converter
from twopool.kv_transfer.dtypes import TORCH_DTYPES, convert
from twopool.kv_transfer.interface import FetchRequest
from twopool.kv_transfer.layout import plan_layout
from twopool.kv_transfer.local import LocalAgent, LocalFabric
from twopool.protocol.errors import TransferError
from twopool.protocol.geometry import KvDtype, KvGeometry
from twopool.protocol.ids import Epoch
from twopool.protocol.messages import RankPool

DTYPES: tuple[KvDtype, ...] = ("float32", "bfloat16", "float16")
BASE = KvGeometry(
    num_blocks=5, block_size=4, num_layers=3, num_kv_heads=2, num_kv_heads_local=2, head_dim=2, dtype="float32"
)


def filled(pool: KvGeometry, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(pool.shape, generator=generator) * 50).to(TORCH_DTYPES[pool.dtype])


@settings(max_examples=150, deadline=None)
@given(
    dtypes=st.sampled_from(list(itertools.permutations(DTYPES, 2))),
    sizes=st.sampled_from([(4, 4), (2, 4), (4, 2), (8, 2)]),
    layers=st.sampled_from([(0, 3), (0, 1), (1, 3)]),
    head=st.sampled_from([None, 0, 1]),
    tokens=st.sampled_from([(0, 8), (0, 5), (4, 8)]),
    long_runs=st.booleans(),
)
def test_what_lands_is_rounded(
    dtypes: tuple[KvDtype, KvDtype],
    sizes: tuple[int, int],
    layers: tuple[int, int],
    head: int | None,
    tokens: tuple[int, int],
    long_runs: bool,
) -> None:
    head_dim = 2048 if long_runs else 2  # a block of all layers then has more numbers than are converted at once
    remote = replace(BASE, dtype=dtypes[0], block_size=sizes[0], head_dim=head_dim)
    local = replace(BASE, dtype=dtypes[1], block_size=sizes[1], head_dim=head_dim)
    if head is not None:
        local = replace(local, num_kv_heads_local=1, kv_head_start=head, tp_rank=head, tp_size=2)
    source, target = filled(remote, 1), filled(local, 2)
    start, end = tokens
    remote_ids, local_ids = (
        np.array([3, 1, 0, 2][: -(-end // size) - start // size], dtype=np.int32) for size in sizes
    )
    expected = target.clone()
    small = min(sizes)
    heads = slice(local.kv_head_start, local.kv_head_start + local.num_kv_heads_local)
    for token in range(start // small * small, -(-end // small) * small):
        kept = source[remote_ids[token // sizes[0] - start // sizes[0]], heads, slice(*layers), :, token % sizes[0]]
        block = local_ids[token // sizes[1] - start // sizes[1]]
        expected[block, :, slice(*layers), :, token % sizes[1]] = kept.to(target.dtype)

    fabric = LocalFabric()
    LocalAgent(name="p", pool=source.view(-1).view(torch.uint8), fabric=fabric)
    agent = LocalAgent(name="d", pool=target.view(-1).view(torch.uint8), fabric=fabric)
    converter = Converter(agent, target.view(-1).view(torch.uint8))
    pool = RankPool(geometry=remote, base_address=0, canary_block=4, agent_metadata=b"p")
    peer = agent.add_peer(pool, Epoch(1))
    request = FetchRequest(
        remote_block_ids=remote_ids,
        local_block_ids=local_ids,
        start_token=start,
        end_token=end,
        layer_start=layers[0],
        layer_end=layers[1],
    )
    for runs in plan_layout(local, [remote], convert_dtype=True).runs(request):
        assert runs.conversion is not None
        post = converter.post(
            local=runs.local,
            local_index=runs.local_index,
            remote=agent.prepare_remote(peer, pool, runs.remote),
            remote_length=runs.remote.length,
            remote_index=runs.remote_index,
            conversion=runs.conversion,
        )
        assert post.poll()
        post.release()
    assert torch.equal(target, expected)


def test_it_has_to_be_asked_for() -> None:
    remote = replace(BASE, dtype="float16")
    with pytest.raises(TransferError, match="dtype float32 here, float16 there"):
        plan_layout(BASE, [remote])
    with pytest.raises(TransferError, match="ranks differ in dtype: float16 on rank 0, float32 on rank 1"):
        plan_layout(BASE, [remote, BASE], convert_dtype=True)


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(DTYPES, 2)))
def test_both_sides_sum_the_same_numbers(source: KvDtype, target: KvDtype) -> None:
    pool = replace(BASE, dtype=source)
    theirs = filled(pool, 3)
    ours = convert(theirs, target)
    assert torch.equal(ours, theirs.to(TORCH_DTYPES[target]))
    request = ChecksumRequest(
        block_ids=np.array([2, 0], dtype=np.int32),
        start_token=0,
        unit_tokens=4,
        layers=(1, 3),
        units=np.array([0, 1], dtype=np.int32),
        dtype=target,
    )
    sums = unit_checksums(theirs, pool, request)
    assert np.array_equal(sums, unit_checksums(ours, replace(pool, dtype=target), request))
    assert not np.array_equal(sums, unit_checksums(theirs, pool, replace_dtype(request)))


def replace_dtype(request: ChecksumRequest) -> ChecksumRequest:
    """``request`` of a reader that does not convert."""
    return ChecksumRequest(
        block_ids=request.block_ids,
        start_token=request.start_token,
        unit_tokens=request.unit_tokens,
        layers=request.layers,
        units=request.units,
    )
