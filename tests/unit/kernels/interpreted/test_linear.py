"""The batch-invariant product: right, and a row's bits are the same in any batch, by slices or by tiles."""

import pytest
import torch

from twopool.kernels.gpu import linear as gpu
from twopool.kernels.linear import linear, pack_linear

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.float32, True), (torch.float16, True), (torch.bfloat16, False)])
@pytest.mark.parametrize(("num_columns", "depth", "num_slices"), [(96, 64, 1), (130, 1100, 2), (5, 1537, 3)])
def test_product(dtype: torch.dtype, has_bias: bool, num_columns: int, depth: int, num_slices: int) -> None:
    assert gpu.num_slices(num_columns, depth) == num_slices
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(num_columns, depth, generator=generator) / depth**0.5).to(dtype)
    bias = torch.randn(num_columns, generator=generator).to(dtype) if has_bias else None
    projection = pack_linear(weight, bias, deterministic=True)
    assert projection.batch_invariant
    x = torch.randn(70, depth, generator=generator).to(dtype)
    whole = linear(x, projection)
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for num_rows in (0, 1, 65):
        assert torch.equal(linear(x[5 : 5 + num_rows].clone(), projection), whole[5 : 5 + num_rows]), num_rows


def test_few_rows_and_many_rows_share_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are summed by one program a slice, many by one a tile; here one batch goes both ways."""
    weight = torch.randn(130, 1100, generator=torch.Generator().manual_seed(1))
    projection = pack_linear(weight, deterministic=True)
    x = torch.randn(3, 1100, generator=torch.Generator().manual_seed(2))
    by_slices = linear(x, projection)
    slices = gpu.num_slices(130, 1100)
    monkeypatch.setattr(gpu, "num_slices", lambda *_: slices)
    monkeypatch.setattr(gpu, "_WANTED_PROGRAMS", 0)
    assert torch.equal(linear(x, projection), by_slices)
