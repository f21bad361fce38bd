"""Forward passes over sequences given as token ids, without an engine."""

import numpy as np
import numpy.typing as npt
import torch

from twopool.models.batch import ForwardBatch
from twopool.models.decoder import Decoder

BLOCK_SIZE = 16

Ints = npt.NDArray[np.int32]


def empty_pool(decoder: Decoder, num_blocks: int) -> torch.Tensor:
    """A pool full of NaN."""
    config = decoder.config
    shape = (num_blocks, config.num_kv_heads, config.num_layers, 2, BLOCK_SIZE, config.head_dim)
    return torch.full(shape, torch.nan, dtype=decoder.dtype, device=decoder.device)


def block_tables(lengths: list[int]) -> Ints:
    """Blocks 0, 1, 2 ... for sequences of these lengths, one after the other; padded with 0."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    tables = np.zeros((len(lengths), max(counts)), dtype=np.int32)
    first = 0
    for row, count in zip(tables, counts, strict=True):
        row[:count] = np.arange(first, first + count)
        first += count
    return tables


def forward(
    decoder: Decoder, pool: torch.Tensor, sequences: list[tuple[list[int], int]], *, tables: Ints | None = None
) -> torch.Tensor:
    """[S, vocab_size]: the logits of each sequence's last token. A sequence: its ids, and how many are cached."""
    lengths = [len(ids) for ids, _ in sequences]
    tables = block_tables(lengths) if tables is None else tables
    positions = np.concatenate([np.arange(cached, len(ids)) for ids, cached in sequences])
    query_lens = np.array([len(ids) - cached for ids, cached in sequences], dtype=np.int32)
    owners = np.repeat(np.arange(len(sequences)), query_lens)
    slots = tables[owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    ends = np.cumsum(query_lens)
    token_ids = np.concatenate([ids[cached:] for ids, cached in sequences])
    context_lens = np.array(lengths, dtype=np.int32)

    def to_device(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(decoder.device)

    batch = ForwardBatch(
        token_ids=to_device(token_ids.astype(np.int64)),
        positions=to_device(positions.astype(np.int64)),
        slots=to_device(slots),
        cu_seqlens=to_device(np.concatenate(([0], ends)).astype(np.int32)),
        context_lens=to_device(context_lens),
        block_tables=to_device(tables),
        logit_rows=to_device(ends.astype(np.int64) - 1),
        query_lens_host=query_lens,
        context_lens_host=context_lens,
    )
    return decoder.forward(batch, pool)
