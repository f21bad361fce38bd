"""Checksums of KV content that do not depend on how a pool lays it out, so that both sides of a transfer agree.

One checksum covers a *unit* of one KV head: as many tokens as the smaller block of both sides has, some layers,
all planes, in the order [layer, plane, token, dim]. A whole block with all of its layers is one run of the pool.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from twopool.kv_transfer.dtypes import TORCH_DTYPES, convert
from twopool.protocol.geometry import DTYPE_BYTES, KvDtype, KvGeometry
from twopool.protocol.messages import KvVerify

Checksums = npt.NDArray[np.uint64]
Units = npt.NDArray[np.int32]

SAMPLE_EVERY = 16
"""``sample`` checks one unit in this many, the first and the last among them."""


@dataclass(frozen=True, kw_only=True)
class ChecksumRequest:
    """Units of the KV in ``block_ids`` (``[b]`` int32), which cover tokens from ``start_token`` on.

    The first block covers tokens from ``start_token // block_size * block_size``; unit 0 is the one that
    ``start_token`` is in, and ``units`` (``[n]`` int32, ascending) lists the ones wanted, of layers [start, end).
    """

    block_ids: npt.NDArray[np.int32]
    start_token: int
    unit_tokens: int
    layers: tuple[int, int]
    units: Units
    dtype: KvDtype | None = None
    """Of the reader, who converts to it; ``None``: the pool's own."""


def units_to_check(mode: KvVerify, num_units: int) -> Units:
    """``[n]`` int32, ascending: which of a ticket's units get checksums."""
    if mode == "off":
        return np.empty(0, dtype=np.int32)
    if mode == "all":
        return np.arange(num_units, dtype=np.int32)
    return np.unique(np.append(np.arange(0, num_units, SAMPLE_EVERY), num_units - 1)).astype(np.int32)


def unit_checksums(pool: torch.Tensor, geometry: KvGeometry, request: ChecksumRequest) -> Checksums:
    """``[len(units), num_kv_heads_local]`` uint64 of units of ``pool``, which has ``geometry.shape``, on any device."""
    units, unit_tokens, layers = request.units, request.unit_tokens, request.layers
    blocks = pool.view(-1).view(torch.uint8).view(*geometry.shape[:5], geometry.head_dim * DTYPE_BYTES[geometry.dtype])
    first_block = request.start_token // geometry.block_size
    sums = np.empty((len(units), geometry.num_kv_heads_local), dtype=np.uint64)
    for row, unit in enumerate((units + request.start_token // unit_tokens).tolist()):
        token = unit * unit_tokens
        block = blocks[int(request.block_ids[token // geometry.block_size - first_block])]
        offset = token % geometry.block_size
        content = block[:, layers[0] : layers[1], :, offset : offset + unit_tokens].contiguous().cpu()
        if request.dtype is not None and request.dtype != geometry.dtype:
            content = convert(content.view(TORCH_DTYPES[geometry.dtype]), request.dtype).view(torch.uint8)
        sums[row] = [xxhash.xxh3_64_intdigest(head.data) for head in content.numpy()]
    return sums
