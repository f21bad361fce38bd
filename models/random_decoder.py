"""A decoder with random weights, for measurements and tests: no files are read."""

import math

import torch
from torch import Tensor

from twopool.kernels.collectives import Collective
from twopool.models.config import DecoderConfig
from twopool.models.decoder import Decoder
from twopool.models.layers import TensorSource, expected_tensors, load_weights
from twopool.models.sharding import Shard
from twopool.models.tensor_parallel import PartSource, TensorParallel


class _RandomTensors:
    """Norms of ones, biases of zeros, matrices that keep the size of what passes through them."""

    def __init__(self, config: DecoderConfig, seed: int, device: torch.device) -> None:
        self._shapes = expected_tensors(config)
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._device = device

    def read(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        whole = self._whole(name)  # of the whole tensor, so that the ranks of a group have parts of the same
        if columns is not None:
            whole = whole[:, columns]
        return whole[rows or slice(None)]

    def _whole(self, name: str) -> Tensor:
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
    shard: Shard | None = None,
    collective: Collective | None = None,
) -> Decoder:
    """A decoder of ``config``'s shape whose weights follow from ``seed`` (and the kind of device) alone."""
    parallel = TensorParallel.of(config, shard, collective)
    tensors: TensorSource = _RandomTensors(config, seed, device)
    if parallel is not None:
        tensors = PartSource(tensors, config, parallel)
    with torch.inference_mode():
        weights = load_weights(config, tensors, dtype=dtype, device=device, deterministic_gemm=deterministic_gemm)
    return Decoder(config, weights, weights_fingerprint=f"random-{seed}", parallel=parallel)
