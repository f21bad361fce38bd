"""A decoder with random weights, for measurements and tests: no files are read."""

import math

import torch
from torch import Tensor

from twopool.models.config import DecoderConfig
from twopool.models.decoder import Decoder
from twopool.models.layers import expected_tensors, load_weights


class _RandomTensors:
    """Norms of ones, biases of zeros, matrices that keep the size of what passes through them."""

    def __init__(self, config: DecoderConfig, seed: int, device: torch.device) -> None:
        self._shapes = expected_tensors(config)
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._device = device

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith(".bias"):
            return torch.zeros(shape, device=self._device)
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        values = torch.randn(shape, generator=self._generator, device=self._device)
        return values.mul_(1 / math.sqrt(shape[1]))


def random_decoder(
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    deterministic_gemm: bool = False,
) -> Decoder:
    """A decoder of ``config``'s shape whose weights follow from ``seed`` (and the kind of device) alone."""
    tensors = _RandomTensors(config, seed, device)
    with torch.inference_mode():
        weights = load_weights(config, tensors, dtype=dtype, device=device, deterministic_gemm=deterministic_gemm)
    return Decoder(config, weights, weights_fingerprint=f"random-{seed}")
