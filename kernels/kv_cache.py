"""Writing the paged KV pool.

The pool is one contiguous tensor [num_blocks, num_kv_heads, num_layers, 2 (K, V), block_size,
head_dim]. Seen as rows of head_dim elements, the row of (block, head, layer, K or V, offset) is
    (((block * num_kv_heads + head) * num_layers + layer) * 2 + which) * block_size + offset,
so one index tensor a step serves every layer: a layer only adds a constant.
"""

import torch
from torch import Tensor

from twopool.kernels.rows import gather_rows, scatter_rows


def slot_rows(slots: Tensor, kv_pool: Tensor) -> Tensor:
    """slots [T] int64 (block * block_size + offset) -> rows of layer 0: [T, 2, num_kv_heads] int64."""
    _, num_kv_heads, num_layers, _, block_size, _ = kv_pool.shape
    blocks, offsets = slots // block_size, slots % block_size
    heads = torch.arange(num_kv_heads, device=slots.device)
    which = torch.arange(2, device=slots.device)
    head_rows = (blocks[:, None] * num_kv_heads + heads) * num_layers  # [T, heads]
    rows = (head_rows[:, None, :] * 2 + which[:, None]) * block_size  # [T, 2, heads]
    return rows + offsets[:, None, None]


def write_kv(kv_pool: Tensor, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write one layer's keys and values, [T, num_kv_heads, head_dim] each, of the pool's dtype.

    rows: what `slot_rows` gave for their slots. No slot may appear twice.
    """
    block_size, head_dim = kv_pool.shape[-2:]
    layer_rows = rows + layer * 2 * block_size
    source = torch.stack((keys, values), dim=1)  # [T, 2, heads, head_dim]
    kv_pool.view(-1, head_dim).index_copy_(0, layer_rows.reshape(-1), source.view(-1, head_dim))


def copy_blocks(kv_pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy whole blocks, all heads and layers: destinations[i] becomes a copy of sources[i].

    sources, destinations: [n] int64. All sources are read before any destination is written, so a
    block may be source and destination at once; no destination may appear twice.
    """
    scatter_blocks(kv_pool, destinations, gather_blocks(kv_pool, sources))


def gather_blocks(kv_pool: Tensor, blocks: Tensor) -> Tensor:
    """blocks [n] int64 -> [n, ...], copies of whole blocks one after the other."""
    return gather_rows(kv_pool, blocks)


def scatter_blocks(kv_pool: Tensor, blocks: Tensor, contents: Tensor) -> None:
    """Overwrite block ``blocks[i]`` with ``contents[i]``; blocks [n] int64, none twice; contents contiguous."""
    scatter_rows(kv_pool, blocks, contents)
