"""Rotation angles: inverse frequencies and the cos/sin rows of a batch, equal to transformers'."""

import math

import torch
from torch import Tensor

from twopool.models.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32 on the host, radians a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    unscaled = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return unscaled / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, unscaled)
    if rope.kind == "yarn":
        return _yarn(rope, unscaled, head_dim)
    return unscaled


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by; 1 but for yarn, which sharpens attention as it stretches."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


class RotaryTable:
    """Computes the rows of a batch on demand: no table as long as the context has to be kept."""

    def __init__(self, rope: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device):
        self._inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self._factor = attention_factor(rope)
        self._dtype = dtype

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, signed sin: [T, 1, head_dim] each, of the model's dtype.

        The sine's first half is negated, so that a rotation is x * cos + swap_halves(x) * sin.
        The angles are float32 in every dtype: in bfloat16 positions beyond 256 would collide.
        """
        angles = positions.to(torch.float32)[:, None] * self._inv_freq  # [T, head_dim / 2]
        cos, sin = torch.cos(angles), torch.sin(angles)
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        cos = torch.cat((cos, cos), dim=-1).to(self._dtype)
        sin = torch.cat((-sin, sin), dim=-1).to(self._dtype)
        return cos[:, None], sin[:, None]


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    low, high = rope.low_freq_factor, rope.high_freq_factor
    scaled = torch.where(wavelength > original / low, inv_freq / rope.factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, smoothed, scaled)


def _yarn(rope: RopeConfig, inv_freq: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn often are kept, those that turn seldom slowed, with a ramp between."""
    low, high = (
        head_dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001  # transformers' way round the division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return inv_freq / rope.factor * (1 - keep) + inv_freq * keep


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
