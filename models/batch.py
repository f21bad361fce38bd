"""One forward pass over a ragged batch: which rows, where their K and V go, whose logits are wanted."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

HostInts = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ForwardBatch:
    """S sequences contribute T rows in all; sequence s owns rows cu_seqlens[s]:cu_seqlens[s+1].

    Every row attends to the positions of its own sequence up to and including its own. A sequence's
    rows are its last ones: their positions are context_len - query_len ... context_len - 1.
    The tensors live on the model's device, the arrays on the host, so that planning needs no sync.
    """

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, position of each row in its sequence"""
    slots: Tensor
    """[T] int64, block * block_size + offset where this row's K and V go; no slot twice"""
    cu_seqlens: Tensor
    """[S + 1] int32, query row boundaries, from 0 to T"""
    context_lens: Tensor
    """[S] int32, tokens of each sequence in the cache after this step, this step's rows included"""
    block_tables: Tensor
    """[S, max_blocks] int32, each sequence's blocks in order, padded with 0"""
    logit_rows: Tensor
    """[R] int64, rows of the flat batch whose logits are wanted, in the order wanted"""
    query_lens_host: HostInts
    """[S] int32, the rows of each sequence, at least 1"""
    context_lens_host: HostInts
    """[S] int32, the same as context_lens"""

    def __post_init__(self) -> None:
        num_sequences = len(self.query_lens_host)
        num_rows = int(self.query_lens_host.sum())
        sizes = {
            "token_ids": (self.token_ids.shape[0], num_rows),
            "positions": (self.positions.shape[0], num_rows),
            "slots": (self.slots.shape[0], num_rows),
            "cu_seqlens": (self.cu_seqlens.shape[0], num_sequences + 1),
            "context_lens": (self.context_lens.shape[0], num_sequences),
            "context_lens_host": (len(self.context_lens_host), num_sequences),
            "block_tables": (self.block_tables.shape[0], num_sequences),
        }
        for name, (got, wanted) in sizes.items():
            if got != wanted:
                raise ValueError(f"ForwardBatch.{name} has {got} entries, expected {wanted}")
        if num_sequences and int(self.query_lens_host.min()) < 1:
            raise ValueError("ForwardBatch.query_lens_host: every sequence needs at least one row")
        if (self.query_lens_host > self.context_lens_host).any():
            raise ValueError("ForwardBatch: a sequence has more rows than tokens of context")


@dataclass(frozen=True)
class DecodeInputs:
    """One row for each of S sequences, on the host."""

    token_ids: HostInts
    """[S] int32"""
    context_lens: HostInts
    """[S] int32, tokens in the cache after this step; the row's position is one less"""
    block_tables: HostInts
    """[S, max_blocks] int32, padded with 0; wide enough for each context"""
