"""A batch whose parts disagree is refused where it is made."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from twopool.models.batch import ForwardBatch


def _batch() -> ForwardBatch:
    return ForwardBatch(
        token_ids=torch.tensor([1, 2, 3]),
        positions=torch.tensor([0, 1, 5]),
        slots=torch.tensor([16, 17, 37]),
        cu_seqlens=torch.tensor([0, 2, 3], dtype=torch.int32),
        context_lens=torch.tensor([2, 6], dtype=torch.int32),
        block_tables=torch.tensor([[1], [2]], dtype=torch.int32),
        logit_rows=torch.tensor([1, 2]),
        query_lens_host=np.array([2, 1], dtype=np.int32),
        context_lens_host=np.array([2, 6], dtype=np.int32),
    )


@pytest.mark.parametrize("name", ["token_ids", "positions", "slots", "cu_seqlens", "context_lens", "block_tables"])
def test_sizes_must_agree(name: str) -> None:
    batch = _batch()
    with pytest.raises(ValueError, match=name):
        replace(batch, **{name: getattr(batch, name)[:1]})


def test_lengths_must_make_sense() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        replace(_batch(), query_lens_host=np.array([3, 0], dtype=np.int32))
    with pytest.raises(ValueError, match="more rows than tokens"):
        replace(_batch(), context_lens_host=np.array([1, 6], dtype=np.int32))
    with pytest.raises(ValueError, match="context_lens_host"):
        replace(_batch(), context_lens_host=np.array([6], dtype=np.int32))
