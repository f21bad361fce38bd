"""Between the QKV projection and attention: QK-norm, rotation, and the write into the KV pool."""

import torch
from torch import Tensor

from twopool.kernels.backend import uses_triton
from twopool.kernels.kv_cache import write_kv
from twopool.kernels.rms_norm import rms_norm
from twopool.kernels.rope import apply_rope


def rotate_and_cache(
    qkv: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    kv_pool: Tensor,
    layer: int,
    rows: Tensor,
    num_heads: int,
) -> Tensor:
    """Write one layer's keys and values into ``kv_pool``; return the rotated queries [T, num_heads, head_dim].

    qkv: [T, num_heads + 2 * num_kv_heads, head_dim] contiguous: queries, keys, values, of the pool's dtype.
    cos, signed_sin: [T, 1, head_dim], see ``apply_rope``.
    norms: the weights [head_dim] of the RMSNorm of queries and of keys, or None.
    rows: [T, 2, num_kv_heads] int64, see ``slot_rows``. No slot may appear twice, unless with equal keys and values.
    """
    if uses_triton(qkv):
        from twopool.kernels.gpu import qkv as gpu

        return gpu.rotate_and_cache(qkv, cos, signed_sin, norms, eps, kv_pool, layer, rows, num_heads)
    first_value = num_heads + kv_pool.shape[1]
    queries_keys, values = qkv[:, :first_value], qkv[:, first_value:]
    if norms is not None:
        queries = rms_norm(queries_keys[:, :num_heads], norms[0], eps)
        keys = rms_norm(queries_keys[:, num_heads:], norms[1], eps)
        queries_keys = torch.cat((queries, keys), dim=1)
    rotated = apply_rope(queries_keys, cos, signed_sin)
    write_kv(kv_pool, layer, rows, rotated[:, num_heads:], values)
    return rotated[:, :num_heads]
