"""Norm, activation, row copies and the fused rotation against float64 formulas, over any shape."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from twopool.kernels import backend
from twopool.kernels.activation import gated_activation
from twopool.kernels.kv_cache import copy_blocks, gather_blocks, scatter_blocks, slot_rows
from twopool.kernels.qkv import rotate_and_cache
from twopool.kernels.rms_norm import add_rms_norm_, rms_norm
from twopool.kernels.rows import gather_rows, scatter_rows

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
dtypes = st.sampled_from(list(TOLERANCE))
few = settings(max_examples=25, deadline=None)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@few
@given(num_rows=st.integers(0, 5), width=st.integers(1, 300), dtype=dtypes)
def test_rms_norm(num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, 3, width, dtype=dtype) * 30, random(width, dtype=dtype, seed=1)
    tolerance = TOLERANCE[dtype]
    # Heads are given as views: queries are a part of the fused projection's rows.
    torch.testing.assert_close(
        rms_norm(x[:, :2], weight, 1e-5).double(), normed(x[:, :2], weight, 1e-5), rtol=tolerance, atol=tolerance
    )
    x, residual = random(num_rows, width, dtype=dtype), random(num_rows, width, dtype=dtype, seed=2)
    total = (x.float() + residual.float()).to(dtype)
    got = add_rms_norm_(x, residual, weight, 1e-6)
    # The interpreter cuts bfloat16 off where GPUs round to nearest.
    torch.testing.assert_close(residual, total, rtol=0 if dtype != torch.bfloat16 else 1e-2, atol=0)
    torch.testing.assert_close(got.double(), normed(residual, weight, 1e-6), rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # 1 / (1 + inf) is the 0 it should be
@few
@given(
    num_rows=st.integers(0, 4),
    width=st.sampled_from([1, 2, 33, 1024, 1100]),
    dtype=dtypes,
    activation=st.sampled_from(["silu", "gelu", "gelu_tanh"]),
)
def test_gated_activation(
    num_rows: int, width: int, dtype: torch.dtype, activation: Literal["silu", "gelu", "gelu_tanh"]
) -> None:
    gate_up = random(num_rows, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    wanted = {
        "silu": F.silu(gate),
        "gelu": F.gelu(gate),
        "gelu_tanh": F.gelu(gate, approximate="tanh"),
    }[activation] * up
    got = gated_activation(gate_up, activation)
    torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@few
@given(
    num_rows=st.integers(1, 9),
    width=st.sampled_from([2, 6, 64, 2050]),
    index=st.lists(st.integers(0, 8), max_size=12),
    dtype=dtypes,
)
def test_rows_are_moved_bit_by_bit(num_rows: int, width: int, index: list[int], dtype: torch.dtype) -> None:
    source = random(num_rows, width, dtype=dtype)
    source[0, 0] = torch.nan
    places = torch.tensor([place % num_rows for place in index], dtype=torch.int64)
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    got = gather_rows(source, places)
    assert torch.equal(got.view(integers), source[places].view(integers))
    unique = torch.tensor(sorted(set(places.tolist())), dtype=torch.int64)
    target, rows = random(num_rows, width, dtype=dtype, seed=3), random(len(unique), width, dtype=dtype, seed=4)
    wanted = target.clone()
    wanted[unique] = rows
    scatter_rows(target, unique, rows)
    assert torch.equal(target, wanted)


def test_rows_of_odd_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        gather_rows(torch.zeros(3, 5, dtype=torch.bfloat16), torch.tensor([1]))


def test_blocks() -> None:
    pool = random(6, 2, 3, 2, 4, 6, dtype=torch.bfloat16)
    before = pool.clone()
    # Block 2 is source and destination at once.
    copy_blocks(pool, torch.tensor([1, 2, 1]), torch.tensor([2, 3, 5]))
    wanted = before.clone()
    wanted[2], wanted[3], wanted[5] = before[1], before[2], before[1]
    assert torch.equal(pool, wanted)
    staged = gather_blocks(pool, torch.tensor([4, 0]))
    assert torch.equal(staged, wanted[[4, 0]])
    scatter_blocks(pool, torch.tensor([1, 3]), staged)
    assert torch.equal(pool[[1, 3]], staged)


@few
@given(
    num_rows=st.integers(0, 5),
    heads=st.sampled_from([(9, 3), (7, 1), (1, 1), (32, 8)]),
    head_dim=st.sampled_from([2, 10, 32, 40, 64]),
    has_norms=st.booleans(),
    dtype=dtypes,
)
def test_rotation_and_cache_write(
    num_rows: int, heads: tuple[int, int], head_dim: int, has_norms: bool, dtype: torch.dtype
) -> None:
    """Against the same function in torch, over a pool whose other bytes must stay as they are."""
    num_heads, num_kv_heads = heads
    qkv = random(num_rows, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    angles = random(num_rows, 1, head_dim // 2, dtype=torch.float32, seed=1)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    norms = (random(head_dim, dtype=dtype, seed=2), random(head_dim, dtype=dtype, seed=3)) if has_norms else None
    pool = random(4, num_kv_heads, 3, 2, 8, head_dim, dtype=dtype, seed=4)
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(5))[:num_rows]
    results = []
    for interpreted in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "INTERPRETED", interpreted)
            written = pool.clone()
            queries = rotate_and_cache(
                qkv,
                cos,
                sin,
                norms=norms,
                eps=1e-6,
                kv_pool=written,
                layer=1,
                rows=slot_rows(slots, written),
                num_heads=num_heads,
            )
        results.append((queries, written))
    (queries, written), (wanted_queries, wanted_pool) = results
    # By address: a value that rounds to what stood there before is written all the same.
    untouched = torch.ones_like(pool, dtype=torch.bool)
    untouched[slots // 8, :, 1, :, slots % 8] = False
    assert torch.equal(written[untouched], pool[untouched])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(queries, wanted_queries, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(written, wanted_pool, rtol=tolerance, atol=tolerance)
    assert torch.equal(written[:, :, :, 1], wanted_pool[:, :, :, 1])  # values are copied
