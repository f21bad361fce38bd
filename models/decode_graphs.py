"""Decode steps as CUDA graphs: one captured forward pass for each bucket of batch sizes.

A decode step of a small model launches hundreds of kernels that each take microseconds; replaying a graph launches
them all at once. A graph replays on the addresses it was captured on, so each bucket has *static inputs*: one int32
buffer on the device that a step's numbers are copied into, from pinned memory, in one copy.

A batch smaller than its bucket is filled up with repetitions of its first sequence: they write the same keys and values
to the same slot a second time and compute the same row, which nobody reads.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twopool.kernels.attention import AttentionPlan
from twopool.kernels.gpu.attention import SPLIT, TritonAttentionPlan, work_lists
from twopool.models.batch import DecodeInputs, ForwardBatch
from twopool.models.decoder import Decoder

Ints = npt.NDArray[np.int32]
Buffer = TypeVar("Buffer", Ints, Tensor)

_WARM_UP_PASSES = 2  # the first compiles the kernels, the second shows that nothing is left to do


def batch_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes worth a graph of their own: 1, 2, 4, then multiples of 8 to 64, of 16 to 256, of 64 beyond."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_num_seqs + 64, 64)}
    return (*sorted(size for size in sizes if size < max_num_seqs), max_num_seqs)


@dataclass(frozen=True)
class Layout:
    """Where a bucket's numbers lie in its int32 buffer; the splits, of which a step may need few, last."""

    bucket: int
    max_blocks: int
    num_windows: int
    max_items: int

    @property
    def tables_start(self) -> int:
        return 2 * self.bucket  # token ids, context lengths

    @property
    def windows_start(self) -> int:
        return self.tables_start + self.bucket * self.max_blocks

    @property
    def window_size(self) -> int:
        """First slots, rows, number of splits."""
        return self.bucket + 3 * self.bucket + 1

    @property
    def items_start(self) -> int:
        return self.windows_start + self.num_windows * self.window_size

    @property
    def size(self) -> int:
        return self.items_start + self.num_windows * 2 * self.max_items

    def tables(self, buffer: Buffer) -> Buffer:
        """[bucket, max_blocks]"""
        return buffer[self.tables_start : self.windows_start].reshape(self.bucket, self.max_blocks)

    def first_slots(self, buffer: Buffer, window: int) -> Buffer:
        """[bucket]"""
        start = self.windows_start + window * self.window_size
        return buffer[start : start + self.bucket]

    def rows(self, buffer: Buffer, window: int) -> Buffer:
        """[bucket, 3]"""
        start = self.windows_start + window * self.window_size + self.bucket
        return buffer[start : start + 3 * self.bucket].reshape(self.bucket, 3)

    def num_items(self, buffer: Buffer, window: int) -> Buffer:
        """[1]"""
        end = self.windows_start + (window + 1) * self.window_size
        return buffer[end - 1 : end]

    def items(self, buffer: Buffer, window: int) -> Buffer:
        """[max_items, 2]"""
        start = self.items_start + window * 2 * self.max_items
        return buffer[start : start + 2 * self.max_items].reshape(self.max_items, 2)


class StaticStep:
    """The static inputs of one bucket and the forward pass over them."""

    def __init__(
        self, decoder: Decoder, kv_pool: Tensor, *, bucket: int, max_blocks: int, max_items: int, num_slots: int
    ) -> None:
        """max_items: splits of all sequences together; num_slots: the same, as partial results to make room for."""
        self._decoder = decoder
        self._kv_pool = kv_pool
        self._windows = sorted(decoder.windows, key=lambda window: window or 0)
        self._layout = Layout(bucket, max_blocks, len(self._windows), max_items)
        self._num_slots = num_slots
        self._group = decoder.num_heads_local // decoder.num_kv_heads_local
        device = kv_pool.device
        self._host = torch.zeros(self._layout.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(self._layout.size, dtype=torch.int32, device=device)
        self._row_starts = torch.arange(bucket + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(bucket, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def accepts(self, inputs: DecodeInputs) -> bool:
        """Whether the static buffers are large enough."""
        contexts = inputs.context_lens.astype(np.int64)
        return (
            len(contexts) <= self._layout.bucket
            and inputs.block_tables.shape[1] <= self._layout.max_blocks
            and int((-(-contexts // SPLIT)).sum()) <= self._layout.max_items
        )

    def fill(self, inputs: DecodeInputs) -> None:
        """Queue the copy of a step's numbers to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # the previous step's copy has left the pinned buffer: long ago, as a rule
        used = fill_buffer(self._host.numpy(), self._layout, inputs, self._windows, self._group)
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def compute(self) -> Tensor:
        """[bucket, vocab_size] float32 logits of what the static inputs hold. Reads nothing from the host."""
        layout, device = self._layout, self._device
        bucket = layout.bucket
        context_lens = device[bucket : 2 * bucket]
        tables = layout.tables(device)
        positions = context_lens.long() - 1
        block_size = self._kv_pool.shape[-2]
        blocks = tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
        batch = ForwardBatch(
            token_ids=device[:bucket].long(),
            positions=positions,
            slots=blocks * block_size + positions % block_size,
            cu_seqlens=self._row_starts,
            context_lens=context_lens,
            block_tables=tables,
            logit_rows=self._rows,
            query_lens_host=np.ones(bucket, dtype=np.int32),
            context_lens_host=np.ones(bucket, dtype=np.int32),  # plans are made already: nobody asks the host
        )
        return self._decoder.forward_planned(batch, self._kv_pool, self._plans(tables, context_lens))

    def _plans(self, tables: Tensor, context_lens: Tensor) -> Mapping[int | None, AttentionPlan]:
        layout = self._layout
        plans = {}
        for number, window in enumerate(self._windows):
            plans[window] = TritonAttentionPlan(
                block_tables=tables,
                row_starts=self._row_starts,
                context_lens=context_lens,
                first_slots=layout.first_slots(self._device, number),
                tiles=tables.new_empty((0, 2)),
                split_items=layout.items(self._device, number),
                num_split_items=layout.num_items(self._device, number),
                split_rows=layout.rows(self._device, number),
                num_slots=self._num_slots,
                num_rows=layout.bucket,
                group=self._group,
                sliding_window=window,
            )
        return plans


def fill_buffer(buffer: Ints, layout: Layout, inputs: DecodeInputs, windows: list[int | None], group: int) -> int:
    """Lay a step's numbers out for the device, filling the bucket up with the first sequence. Returns how far."""
    num_seqs, bucket = len(inputs.token_ids), layout.bucket
    sources = np.concatenate((np.arange(num_seqs), np.zeros(bucket - num_seqs, dtype=np.int64)))
    buffer[:bucket] = inputs.token_ids[sources]
    buffer[bucket : 2 * bucket] = inputs.context_lens[sources]
    layout.tables(buffer)[:, : inputs.block_tables.shape[1]] = inputs.block_tables[sources]
    used = layout.items_start
    for number, window in enumerate(windows):
        lists = work_lists(np.ones(num_seqs, dtype=np.int32), inputs.context_lens, group=group, sliding_window=window)
        layout.first_slots(buffer, number)[:] = lists.first_slots[sources]
        rows = layout.rows(buffer, number)
        rows[:] = lists.split_rows[sources]
        rows[:, 2] = np.arange(bucket)  # repetitions of the first sequence write rows of their own
        num_items = len(lists.split_items)
        layout.num_items(buffer, number)[:] = num_items
        layout.items(buffer, number)[:num_items] = lists.split_items
        used = layout.items_start + 2 * (number * layout.max_items + num_items)
    return used


class DecodeGraphs:
    """Captured decode steps of one decoder over one KV pool. Needs a GPU.

    Steps must be run from one thread and on one stream. Work that a graph cannot take (prefills, contexts beyond what
    was planned for) goes through ``Decoder.forward``; both give the same bits with ``deterministic_gemm``.
    """

    def __init__(self, decoder: Decoder, kv_pool: Tensor, *, max_num_seqs: int, max_model_len: int) -> None:
        num_blocks, block_size = kv_pool.shape[0], kv_pool.shape[-2]
        max_blocks = -(-max_model_len // block_size)
        self._buckets = batch_buckets(max_num_seqs)
        self._steps: list[StaticStep] = []
        self._graphs: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []
        for bucket in self._buckets:
            # Sequences may share blocks, but a batch whose contexts sum up to more than the pool is rare enough.
            longest = min(bucket * max_model_len, num_blocks * block_size)
            max_items = -(-longest // SPLIT) + bucket
            self._steps.append(
                StaticStep(
                    decoder,
                    kv_pool,
                    bucket=bucket,
                    max_blocks=max_blocks,
                    max_items=max_items,
                    num_slots=max_items,
                )
            )

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every bucket, the largest first so that the others reuse its memory.

        Writes the first token slot of the pool's first block: call it before any block is in use.
        """
        pool = None
        graphs = []
        for bucket, step in zip(reversed(self._buckets), reversed(self._steps), strict=True):
            ones = np.ones(bucket, dtype=np.int32)
            step.fill(DecodeInputs(token_ids=0 * ones, context_lens=ones, block_tables=0 * ones[:, None]))
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_PASSES):
                    step.compute()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = step.compute()
            pool = graph.pool()
            graphs.append((graph, logits))
        self._graphs = graphs[::-1]

    def accepts(self, inputs: DecodeInputs) -> bool:
        """Whether ``run`` can take this batch; none before ``capture``."""
        num_seqs = len(inputs.token_ids)
        return (
            bool(self._graphs)
            and 0 < num_seqs <= self._buckets[-1]
            and self._steps[self._place(num_seqs)].accepts(inputs)
        )

    @torch.inference_mode()
    def run(self, inputs: DecodeInputs) -> Tensor:
        """[S, vocab_size] float32 logits; overwritten by the next step. Does not wait for the device."""
        num_seqs = len(inputs.token_ids)
        place = self._place(num_seqs)
        graph, logits = self._graphs[place]
        self._steps[place].fill(inputs)
        graph.replay()
        return logits[:num_seqs]

    def _place(self, num_seqs: int) -> int:
        return bisect_left(self._buckets, num_seqs)
