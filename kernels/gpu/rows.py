"""Copies of rows and of KV blocks: embedding, last rows, staging and copy-on-write.

Bytes are moved as 32-bit words whatever they mean; a row has to be a multiple of 4 bytes long.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from twopool.kernels.gpu.compilation import EXACT, Specialisation

_BLOCK = 1024  # words
_NUM_WARPS = 4


@triton.jit
def _move_rows_kernel(
    source_ptr,  # [n or more, row_words] int32
    target_ptr,
    index_ptr,  # [n] int64
    row_words,
    SCATTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    place = tl.load(index_ptr + number)
    source_row = number if SCATTER else place
    target_row = place if SCATTER else number
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = words < row_words
    moved = tl.load(source_ptr + source_row * row_words + words, mask=inside)
    tl.store(target_ptr + target_row * row_words + words, moved, mask=inside)


def gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """source [m, ...] contiguous, index [n] int64 -> [n, ...], row i being ``source[index[i]]``."""
    output = source.new_empty(index.shape[0], *source.shape[1:])
    _move(source, output, index, scatter=False)
    return output


def scatter_rows(target: Tensor, index: Tensor, rows: Tensor) -> None:
    """``target[index[i]] = rows[i]``; target [m, ...] and rows [n, ...] contiguous, no index twice."""
    _move(rows, target, index, scatter=True)


def _move(source: Tensor, target: Tensor, index: Tensor, *, scatter: bool) -> None:
    num_rows = index.shape[0]
    if num_rows == 0 or target.numel() == 0:
        return
    source_words, target_words = _words(source), _words(target)
    row_words = source_words.shape[1]
    grid = (num_rows, triton.cdiv(row_words, _BLOCK))
    _move_rows_kernel[grid](
        source_words,
        target_words,
        index.contiguous(),
        row_words,
        SCATTER=scatter,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        **EXACT,
    )


def _words(rows: Tensor) -> Tensor:
    """[m, ...] contiguous -> [m, row_words] int32, the same memory."""
    flat = rows.view(rows.shape[0], -1)
    if flat.shape[1] * flat.element_size() % 4:
        raise ValueError(f"rows of {flat.shape[1] * flat.element_size()} bytes: expected a multiple of 4")
    return flat.view(torch.int32)


def specialisations() -> Iterator[Specialisation]:
    """Every compilation any model may ask for."""
    signature = {"source_ptr": "*i32", "target_ptr": "*i32", "index_ptr": "*i64", "row_words": "i32"}
    for scatter in (False, True):
        constants = {"SCATTER": scatter, "BLOCK": _BLOCK}
        yield Specialisation(_move_rows_kernel, signature, constants, _NUM_WARPS, num_stages=1)
