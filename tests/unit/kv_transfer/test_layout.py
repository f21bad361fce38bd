"""Layout plans against a plain copy: every byte of KV goes where its (block, head, layer, K/V, token) says."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from twopool.kv_transfer.interface import FetchRequest
from twopool.kv_transfer.layout import LayoutPlan, StridedList, plan_layout
from twopool.protocol.errors import PairRefusedError, TransferError
from twopool.protocol.geometry import KvGeometry

NUM_BLOCKS = 9
Words = npt.NDArray[np.uint32]


def geometry(**changes: object) -> KvGeometry:
    base = KvGeometry(
        num_blocks=NUM_BLOCKS,
        block_size=4,
        num_layers=3,
        num_kv_heads=4,
        num_kv_heads_local=4,
        head_dim=2,
        dtype="float32",
    )
    return replace(base, **changes)


def ranks_of(base: KvGeometry, tp_size: int) -> list[KvGeometry]:
    """The pools of all ranks of a worker: heads split as evenly as they go, or replicated when there are fewer."""
    ranks = []
    for rank in range(tp_size):
        if tp_size <= base.num_kv_heads:
            start = rank * base.num_kv_heads // tp_size
            end = (rank + 1) * base.num_kv_heads // tp_size
        else:
            start = rank * base.num_kv_heads // tp_size
            end = start + 1
        ranks.append(replace(base, kv_head_start=start, num_kv_heads_local=end - start, tp_rank=rank, tp_size=tp_size))
    return ranks


def words(pool: KvGeometry, seed: int) -> Words:
    """A pool full of distinct values, in its shape."""
    count = int(np.prod(pool.shape))
    return (np.arange(count, dtype=np.uint32) + np.uint32(seed << 20)).reshape(pool.shape)


def rows(memory: Words, runs: StridedList) -> npt.NDArray[np.uint8]:
    flat = memory.reshape(-1).view(np.uint8)
    assert runs.offset + (runs.count - 1) * runs.stride + runs.length <= flat.size
    return np.lib.stride_tricks.as_strided(flat[runs.offset :], (runs.count, runs.length), (runs.stride, 1))


def apply(plan: LayoutPlan, request: FetchRequest, remotes: list[Words], local: Words) -> None:
    """What a transport does with a plan."""
    for runs in plan.runs(request):
        assert runs.local_index.dtype == runs.remote_index.dtype == np.int32
        rows(local, runs.local)[runs.local_index] = rows(remotes[runs.rank], runs.remote)[runs.remote_index]


def plain_copy(
    plan: LayoutPlan, request: FetchRequest, remotes: list[Words], local: Words, small: int
) -> tuple[Words, set[int]]:
    """The pool that must result, copied token by token, and the remote ranks that hold each head."""
    result = local.copy()
    start = request.start_token // small * small
    end = -(-request.end_token // small) * small
    remote_size, local_size = plan.remotes[0].block_size, plan.local.block_size
    used: set[int] = set()
    for local_head in range(plan.local.num_kv_heads_local):
        head = plan.local.kv_head_start + local_head
        holders = [
            rank
            for rank, pool in enumerate(plan.remotes)
            if pool.kv_head_start <= head < pool.kv_head_start + pool.num_kv_heads_local
        ]
        source = next(run for run in plan.head_runs if run.local_head <= local_head < run.local_head + run.num_heads)
        assert source.rank in holders
        used.add(source.rank)
        remote_head = head - plan.remotes[source.rank].kv_head_start
        for token in range(start, end):
            remote_block = request.remote_block_ids[token // remote_size - request.start_token // remote_size]
            local_block = request.local_block_ids[token // local_size - request.start_token // local_size]
            for layer in range(request.layer_start, request.layer_end):
                result[local_block, local_head, layer, :, token % local_size] = remotes[source.rank][
                    remote_block, remote_head, layer, :, token % remote_size
                ]
    return result, used


@st.composite
def cases(draw: st.DrawFn) -> tuple[KvGeometry, list[KvGeometry], FetchRequest]:
    base = geometry(num_kv_heads=(heads := draw(st.sampled_from([1, 2, 3, 4, 6]))), num_kv_heads_local=heads)
    base = replace(base, num_layers=draw(st.integers(1, 3)), num_planes=draw(st.sampled_from([1, 2])))
    local_size, remote_size = draw(st.sampled_from([(4, 4), (4, 4), (2, 4), (4, 2), (2, 8), (8, 2), (1, 4)]))
    local = draw(st.sampled_from(ranks_of(replace(base, block_size=local_size), draw(st.integers(1, 8)))))
    remotes = ranks_of(replace(base, block_size=remote_size), draw(st.integers(1, 8)))
    most = min(local_size, remote_size) * (NUM_BLOCKS - 1)
    start = draw(st.integers(0, 2 * max(local_size, remote_size)))
    end = draw(st.integers(start + 1, start + most - max(local_size, remote_size) + 1))
    layer_start = draw(st.integers(0, base.num_layers - 1))

    def ids(block_size: int) -> npt.NDArray[np.int32]:
        count = -(-end // block_size) - start // block_size
        return np.array(draw(st.permutations(range(NUM_BLOCKS - 1)))[:count], dtype=np.int32)

    request = FetchRequest(
        remote_block_ids=ids(remote_size),
        local_block_ids=ids(local_size),
        start_token=start,
        end_token=end,
        layer_start=layer_start,
        layer_end=draw(st.integers(layer_start + 1, base.num_layers)),
    )
    return local, remotes, request


@settings(max_examples=300, deadline=None)
@given(cases())
def test_plan_equals_plain_copy(case: tuple[KvGeometry, list[KvGeometry], FetchRequest]) -> None:
    """PD-22: unequal TP with heads that do not divide, replicas, unequal block sizes, layer groups, part blocks, K and
    V or one latent for both.
    """
    local, remotes, request = case
    plan = plan_layout(local, remotes)
    plan.check(request)
    sources = [words(pool, seed=rank + 1) for rank, pool in enumerate(remotes)]
    target = words(local, seed=0)
    expected, used = plain_copy(plan, request, sources, target, min(local.block_size, remotes[0].block_size))
    apply(plan, request, sources, target)
    np.testing.assert_array_equal(target, expected)
    assert set(plan.ranks) == used
    num_bytes = sum(runs.num_bytes for runs in plan.runs(request))
    small = min(local.block_size, remotes[0].block_size)
    num_tokens = -(-request.end_token // small) * small - request.start_token // small * small
    layers = request.layer_end - request.layer_start
    assert num_bytes == num_tokens * layers * local.num_kv_heads_local * local.num_planes * local.head_dim * 4


def whole(num_blocks: int, remote_ids: list[int], local_ids: list[int], **changes: int) -> FetchRequest:
    fields = {"start_token": 0, "end_token": 4 * num_blocks, "layer_start": 0, "layer_end": 3} | changes
    return FetchRequest(
        remote_block_ids=np.array(remote_ids, dtype=np.int32),
        local_block_ids=np.array(local_ids, dtype=np.int32),
        **fields,
    )


def test_equal_geometry_is_one_run_per_block_and_neighbours_merge() -> None:
    plan = plan_layout(geometry(), [geometry()])
    (scattered,) = plan.runs(whole(3, [5, 3, 1], [0, 1, 2]))
    assert scattered.num_ranges == 3
    assert scattered.local.length == geometry().block_bytes
    (adjacent,) = plan.runs(whole(4, [2, 3, 4, 6], [0, 1, 2, 3]))
    assert adjacent.num_ranges == 2


def test_unequal_tp_is_one_run_per_block_and_rank() -> None:
    plan = plan_layout(geometry(), ranks_of(geometry(), 2))
    assert [runs.num_ranges for runs in plan.runs(whole(3, [1, 2, 3], [1, 2, 3]))] == [3, 3]


def test_a_latent_is_half_of_keys_and_values_and_every_rank_of_a_peer_has_it() -> None:
    """Multi-head latent attention: one head of one plane, whole on each rank; a reader takes it from one of them."""
    latent = geometry(num_kv_heads=1, num_kv_heads_local=1, num_planes=1, head_dim=6)
    assert latent.shape == (NUM_BLOCKS, 1, 3, 1, 4, 6) and latent.block_bytes == 3 * 4 * 6 * 4
    (read,) = plan_layout(latent, ranks_of(latent, 4)).runs(whole(2, [1, 5], [0, 3]))
    assert read.num_bytes == 2 * latent.block_bytes and read.num_ranges == 2
    large = replace(latent, block_size=8)
    (split,) = plan_layout(latent, [large]).runs(whole(2, [1], [0, 3]))
    assert split.local.length == 4 * 6 * 4 and split.num_ranges == 2 * 3  # a run a small block and layer


def test_replicas_are_read_evenly() -> None:
    """Eight ranks with one KV head read from four ranks that all hold it: two readers each."""
    base = geometry(num_kv_heads=1, num_kv_heads_local=1)
    remotes = ranks_of(base, 4)
    chosen = [plan_layout(local, remotes).ranks for local in ranks_of(base, 8)]
    assert sorted(chosen) == sorted([[rank] for rank in range(4)] * 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", 4),
        ("num_layers", 5),
        ("num_kv_heads", 6),
        ("num_planes", 1),
        ("dtype", "float16"),
        ("granule_order", "amx"),
    ],
)
def test_mismatch_names_both_values(field: str, value: object) -> None:
    remote = geometry(**{field: value})
    with pytest.raises(PairRefusedError) as refusal:
        plan_layout(geometry(), [remote])
    assert f"{field} {getattr(geometry(), field)} here, {value} there" in str(refusal.value)


def test_ordered_granules_need_whole_granules() -> None:
    local, remote = geometry(granule_order="amx", block_size=8), geometry(granule_order="amx", block_size=16)
    with pytest.raises(PairRefusedError, match="block_size 8 here, 16 there"):
        plan_layout(local, [remote])
    plan_layout(replace(local, block_size=32), [remote])


def test_missing_head_is_refused() -> None:
    with pytest.raises(PairRefusedError, match=r"KV head 2 is needed here, but the peer's ranks hold heads 0\.\.1"):
        plan_layout(geometry(), ranks_of(geometry(), 2)[:1])


def test_ranks_of_one_peer_must_agree_on_block_size() -> None:
    first, second = ranks_of(geometry(), 2)
    with pytest.raises(PairRefusedError, match="differ in block_size"):
        plan_layout(geometry(), [first, replace(second, block_size=8)])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (whole(2, [0, NUM_BLOCKS - 1], [0, 1]), "remote block ids"),
        (whole(2, [0, 1], [0, NUM_BLOCKS - 1]), "local block ids"),
        (whole(2, [0, -1], [0, 1]), "remote block ids"),
        (whole(2, [0], [0, 1]), "2 remote blocks of 4"),
        (whole(2, [0, 1], [0, 1], end_token=9), "3 remote blocks of 4"),
        (whole(1, [0], [0], start_token=4), "token range"),
        (whole(1, [0], [0], layer_end=4), "layers"),
        (whole(1, [0], [0], layer_start=3), "layers"),
    ],
)
def test_requests_that_do_not_fit_are_refused(request_: FetchRequest, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        plan_layout(geometry(), [geometry()]).check(request_)
