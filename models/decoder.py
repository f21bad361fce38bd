"""The one decoder: every supported family is a configuration of it."""

from pathlib import Path

import torch
from torch import Tensor

from twopool.models.batch import ForwardBatch
from twopool.models.config import DecoderConfig


class Decoder:
    """Weights of a decoder-only transformer and its forward pass over a paged KV pool.

    The KV pool is one contiguous tensor
    [num_blocks, num_kv_heads, num_layers, 2 (K, V), block_size, head_dim] of the decoder's dtype.
    """

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype, device: torch.device) -> "Decoder":
        """Read config.json and the safetensors files of `folder`; ModelError says what is wrong."""
        raise NotImplementedError

    def forward(self, batch: ForwardBatch, kv_pool: Tensor) -> Tensor:
        """Write the rows' K and V into `kv_pool`; return [R, vocab_size] float32 logits."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Hash of what the numbers mean: equal files give equal values on every machine."""
        raise NotImplementedError
