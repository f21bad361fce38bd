"""Norm, rotation and gated activation against their formulas in float64."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from twopool.kernels.activation import gated_activation
from twopool.kernels.rms_norm import add_rms_norm_, rms_norm
from twopool.kernels.rope import apply_rope


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 96).to(dtype) * 30, torch.randn(96).to(dtype)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), _norm(x, weight, 1e-5), rtol=tolerance, atol=tolerance)


def test_add_rms_norm_updates_the_residual() -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    total = x + residual
    got = add_rms_norm_(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    torch.testing.assert_close(got.double(), _norm(total, weight, 1e-6), rtol=1e-5, atol=1e-5)


def test_rope_turns_each_pair_by_its_angle() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, 10)[:, 1:3]  # a view, as the fused projection gives
    angles = torch.rand(6, 1, 5) * 6
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    pairs = torch.complex(x[..., :5].double(), x[..., 5:].double())
    turned = pairs * torch.polar(torch.ones(()).double(), angles.double())
    wanted = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(apply_rope(x, cos, sin).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_activation(activation: Literal["silu", "gelu", "gelu_tanh"]) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(7, 64)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, dim=-1)
    wanted = {
        "silu": gate * torch.sigmoid(gate),
        "gelu": gate * 0.5 * (1 + torch.erf(gate / 2**0.5)),
        "gelu_tanh": F.gelu(gate, approximate="tanh"),
    }[activation] * up
    got = gated_activation(gate_up, activation)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(gate_up, before)
