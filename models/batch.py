"""One forward pass over a ragged batch: which rows, where their K and V go, whose logits are wanted.

``HostBatch`` is what a step's plan knows; ``ForwardBatch`` is all of it that kernels on a device want to be told.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twopool.kernels.backend import upload

HostInts = npt.NDArray[np.int32]


@dataclass(frozen=True)
class HostBatch:
    """S sequences contribute T rows in all, one sequence's rows after another's; they are its last ones."""

    token_ids: HostInts
    """[T] int32"""
    query_lens: HostInts
    """[S] int32, the rows of each sequence, at least 1"""
    context_lens: HostInts
    """[S] int32, tokens of each sequence in the cache after this step, this step's rows included"""
    block_tables: HostInts
    """[S, max_blocks] int32, each sequence's blocks in order, padded with 0"""
    logit_rows: HostInts
    """[R] int32, rows whose logits are wanted, in the order wanted"""

    def on_device(self, device: torch.device, block_size: int) -> "ForwardBatch":
        """With positions and slots worked out; on a GPU the copies are queued."""
        query_lens, context_lens = self.query_lens, self.context_lens
        ends = np.cumsum(query_lens, dtype=np.int32)
        cu_seqlens = np.concatenate((np.zeros(1, dtype=np.int32), ends))
        # Row r of sequence s stands at r - ends[s] + context_lens[s].
        positions = np.arange(len(self.token_ids)) + np.repeat(context_lens - ends, query_lens)
        blocks = self.block_tables[np.repeat(np.arange(len(query_lens)), query_lens), positions // block_size]
        slots = blocks.astype(np.int64) * block_size + positions % block_size
        return ForwardBatch(
            token_ids=upload(self.token_ids.astype(np.int64), device),
            positions=upload(positions.astype(np.int64), device),
            slots=upload(slots, device),
            cu_seqlens=upload(cu_seqlens, device),
            context_lens=upload(context_lens, device),
            block_tables=upload(self.block_tables, device),
            logit_rows=upload(self.logit_rows.astype(np.int64), device),
            query_lens_host=query_lens,
            context_lens_host=context_lens,
        )


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
