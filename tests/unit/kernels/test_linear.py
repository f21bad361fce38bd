"""Packed projections agree with F.linear, and a row's bits do not depend on the rows beside it."""

import pytest
import torch
import torch.nn.functional as F

from twopool.kernels.linear import linear, pack_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 33])
def test_agrees_with_torch(dtype: torch.dtype, has_bias: bool, num_rows: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 64, dtype=dtype)
    bias = torch.randn(96, dtype=dtype) if has_bias else None
    x = torch.randn(num_rows, 64, dtype=dtype)
    with torch.inference_mode():
        got = linear(x, pack_linear(weight, bias))
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == dtype
    assert got.shape == (num_rows, 96)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (64, 96)])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or torch.cpu._is_amx_tile_supported():
        pytest.skip("oneDNN is known to behave so with AVX-512 without AMX only")
    torch.manual_seed(1)
    projection = pack_linear(torch.randn(shape, dtype=dtype))
    if not projection.packed:
        pytest.skip("this processor has no packed GEMM for the dtype")
    x = torch.randn(64, shape[1], dtype=dtype)
    whole = linear(x, projection)
    for num_rows in (1, 2, 3, 7, 16, 33):
        for first in (0, 5, 30):
            rows = slice(first, first + num_rows)
            assert torch.equal(linear(x[rows].clone(), projection), whole[rows]), (num_rows, first)
