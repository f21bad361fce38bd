"""Copies of rows: embedding look-up, last rows, blocks of the KV pool."""

from torch import Tensor

from twopool.kernels.backend import uses_triton


def gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """source [m, ...] contiguous, index [n] int64 -> [n, ...], row i being ``source[index[i]]``."""
    if uses_triton(source):
        from twopool.kernels.gpu import rows as gpu

        return gpu.gather_rows(source, index)
    return source.index_select(0, index)


def scatter_rows(target: Tensor, index: Tensor, rows: Tensor) -> None:
    """``target[index[i]] = rows[i]``; target [m, ...] and rows [n, ...] contiguous, index [n] int64, none twice."""
    if uses_triton(target):
        from twopool.kernels.gpu import rows as gpu

        gpu.scatter_rows(target, index, rows)
    else:
        target.index_copy_(0, index, rows)
