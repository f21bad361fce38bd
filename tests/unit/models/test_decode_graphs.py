"""What of the decode graphs needs no GPU: buckets and the layout of a step's numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes for Linux only")

from twopool.kernels.gpu.attention import SPLIT
from twopool.models.batch import DecodeInputs
from twopool.models.decode_graphs import Layout, batch_buckets, fill_buffer


@given(st.integers(1, 2000))
def test_buckets_end_with_the_largest_batch_and_waste_little(max_num_seqs: int) -> None:
    buckets = batch_buckets(max_num_seqs)
    assert buckets[-1] == max_num_seqs
    assert list(buckets) == sorted(set(buckets))
    for size in range(1, max_num_seqs + 1):
        bucket = next(bucket for bucket in buckets if bucket >= size)
        assert bucket - size <= max(7, size // 3)


@given(
    contexts=st.lists(st.integers(1, 5 * SPLIT), min_size=1, max_size=6),
    spare=st.integers(0, 3),
    windows=st.sampled_from([[None], [None, 300], [1]]),
)
def test_layout(contexts: list[int], spare: int, windows: list[int | None]) -> None:
    """Every number is read back from where it was put; rows beyond the batch repeat the first sequence."""
    num_seqs, bucket = len(contexts), len(contexts) + spare
    layout = Layout(bucket, max_blocks=90, num_windows=len(windows), max_items=40)
    buffer = np.full(layout.size, -7, dtype=np.int32)
    inputs = DecodeInputs(
        token_ids=np.arange(100, 100 + num_seqs, dtype=np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        block_tables=np.arange(num_seqs * 85, dtype=np.int32).reshape(num_seqs, 85),
    )
    used = fill_buffer(buffer, layout, inputs, windows, group=3)
    sources = [*range(num_seqs), *[0] * spare]
    assert buffer[:bucket].tolist() == inputs.token_ids[sources].tolist()
    assert buffer[bucket : 2 * bucket].tolist() == [contexts[source] for source in sources]
    assert (layout.tables(buffer)[:, :85] == inputs.block_tables[sources]).all()
    for number, window in enumerate(windows):
        first_splits = [0 if window is None else max(0, context - window) // SPLIT for context in contexts]
        items = [
            [sequence, split]
            for sequence, context in enumerate(contexts)
            for split in range(first_splits[sequence], -(-context // SPLIT))
        ]
        assert layout.num_items(buffer, number).tolist() == [len(items)]
        assert layout.items(buffer, number)[: len(items)].tolist() == items
        starts = [next(place for place, item in enumerate(items) if item[0] == source) for source in sources]
        assert layout.first_slots(buffer, number).tolist() == starts
        assert layout.rows(buffer, number).tolist() == [[source, 0, row] for row, source in enumerate(sources)]
        last = len(items)
    assert used == layout.items_start + 2 * (layout.max_items * (len(windows) - 1) + last)
    assert (buffer[used:] == -7).all()
