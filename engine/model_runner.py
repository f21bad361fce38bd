"""Runs a step's plan on the model."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twopool.engine.step import StepPlan, StepResult
from twopool.kernels.backend import upload
from twopool.kernels.kv_cache import copy_blocks
from twopool.kernels.sampling import ROW_DTYPE, SamplingBatch, sample
from twopool.kernels.token_scores import score_tokens
from twopool.models.batch import DecodeInputs, ForwardBatch, HostBatch

WARM_UP_ROWS = (1, 128)
"""Rows of the prefills tried before the first request."""


class Model(Protocol):
    """What the runner needs of ``models.decoder.Decoder``."""

    device: torch.device

    def forward(self, batch: ForwardBatch, kv_pool: Tensor) -> Tensor:
        """Write the rows' K and V into ``kv_pool``; return [R, vocab_size] float32 logits."""
        ...


class LayeredModel(Protocol):
    """A model that can say, while it computes, which layers' KV is complete."""

    @property
    def reports_layers(self) -> bool: ...

    def forward(self, batch: ForwardBatch, kv_pool: Tensor, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Calls ``on_layer(n)`` once K and V of the first ``n`` layers are in the pool's memory, up to all layers."""
        ...


class HostModel(Protocol):
    """A model that takes a step's numbers as they are: ``models.native_decoder.NativeDecoder``."""

    def forward_host(
        self, batch: HostBatch, kv_pool: Tensor, *, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """As ``LayeredModel.forward``."""
        ...


class CapturedDecode(Protocol):
    """Decode steps captured ahead of their use: ``models.decode_graphs.DecodeGraphs``."""

    def capture(self) -> None:
        """Called once, while no block of the pool is in use."""
        ...

    def accepts(self, inputs: DecodeInputs) -> bool:
        """Whether ``run`` can take this batch, none before ``capture``; the model computes the others."""
        ...

    def run(self, inputs: DecodeInputs) -> Tensor:
        """As ``Model.forward``, a row and its logits for each sequence; the next call overwrites them."""
        ...


class ModelRunner:
    """One rank's model and KV pool. ``run`` is called from one thread at a time.

    ``captured`` computes the steps that only decode, where it accepts them; ``warm_up`` captures it.
    ``on_layers`` hears, on the thread that runs, of the layers a plan marks, where the model reports them.
    ``num_valid_tokens``: tokens from there on are never drawn (the tokenizer knows fewer than the model has rows for).
    """

    def __init__(
        self,
        model: Model,
        kv_pool: Tensor,
        *,
        num_valid_tokens: int | None = None,
        captured: CapturedDecode | None = None,
        on_layers: Callable[[int], None] | None = None,
    ) -> None:
        self._model = model
        self._captured = captured
        self._kv_pool = kv_pool
        self._block_size = kv_pool.shape[-2]
        self._num_valid_tokens = num_valid_tokens
        self._on_layers = on_layers
        self._layered = cast(LayeredModel, model) if getattr(model, "reports_layers", False) else None
        self._host_model = cast(HostModel, model) if hasattr(model, "forward_host") else None

    def run(self, plan: StepPlan) -> StepResult:
        """Copy blocks, compute the rows, draw the tokens. A GPU has all of it queued before the ids are waited for.

        The rows' KV is in memory then, where peers may read it.
        """
        with self._computing():
            result = self._draw(plan, self._compute(plan))
        return self._written(plan, result)

    def compute(self, plan: StepPlan) -> Tensor:
        """Copy blocks, compute the rows -> their logits, [L + N, vocab_size]; other ranks than the first have none."""
        with self._computing():
            return self._compute(plan)

    def draw(self, plan: StepPlan, logits: Tensor) -> StepResult:
        """The tokens, from what ``compute`` gave; the KV of its rows is in memory then, as after ``wait_written``."""
        with self._computing():
            result = self._draw(plan, logits)
        return self._written(plan, result)

    def wait_written(self) -> None:
        """Until the KV of all that was computed is in memory, where peers may read it."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def _written(self, plan: StepPlan, result: StepResult) -> StepResult:
        if not len(plan.draw_logits):  # nothing was drawn, so nothing was waited for
            self.wait_written()
        return result

    def _compute(self, plan: StepPlan) -> Tensor:
        if len(plan.copies):
            copies = self._to_device(plan.copies.astype(np.int64))
            copy_blocks(self._kv_pool, copies[:, 0], copies[:, 1])
        return self._logits(plan)

    def _draw(self, plan: StepPlan, logits: Tensor) -> StepResult:
        scores = None
        if len(plan.scored_rows):
            num_drawn = len(plan.logit_sequences)
            logits, scored = logits[:num_drawn], logits[num_drawn:]
            scores = score_tokens(
                scored,
                self._to_device(plan.scored_ids.astype(np.int64)),
                with_top=plan.scores_with_top,
                num_valid_tokens=self._num_valid_tokens,
            )
        if len(plan.draw_logits) != len(logits):  # several choices draw from the same logits
            logits = logits.index_select(0, self._to_device(plan.draw_logits))
        sampling = plan.sampling
        if plan.masks is not None:
            sampling = replace(sampling, allowed_rows=plan.masks.rows, allowed_bits=plan.masks.bits.result())
        return StepResult(sample(logits, sampling, num_valid_tokens=self._num_valid_tokens), scores)

    def warm_up(self, run: Callable[[StepPlan], StepResult] | None = None) -> None:
        """Run a decode and a prefill, and capture: the first request is to be as fast as the hundredth.

        Writes the pool's first blocks: call it before any of them is in use. Runs on a thread of its own: the native
        step pins whoever calls it, and what the caller starts later would inherit that. ``run`` runs a plan where this
        is one rank of several.
        """
        run = run or self.run
        room = (self._kv_pool.shape[0] - 1) * self._block_size
        with ThreadPoolExecutor(max_workers=1) as thread:
            for num_rows in WARM_UP_ROWS:
                thread.submit(run, _warm_up_plan(min(num_rows, max(room, 1)), self._block_size)).result()
            if self._captured is not None:
                thread.submit(self._capture, self._captured).result()
                thread.submit(run, _warm_up_plan(1, self._block_size)).result()

    def _capture(self, captured: CapturedDecode) -> None:
        with self._computing():
            captured.capture()

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """No gradients, and this thread's current GPU is the model's: it is the first one until it says otherwise."""
        device = self._model.device
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with torch.inference_mode(), on_device:
            yield

    def _logits(self, plan: StepPlan) -> Tensor:
        """[L + N, vocab_size] float32, of the last rows wanted and of the scored ones."""
        if self._captured is not None and len(plan.logit_sequences) == len(plan.token_ids):  # a row, a draw a sequence
            inputs = DecodeInputs(plan.token_ids, plan.context_lens, plan.block_tables)
            if not plan.layer_marks and not len(plan.scored_rows) and self._captured.accepts(inputs):
                return self._captured.run(inputs)
        ends = np.cumsum(plan.query_lens, dtype=np.int32)
        batch = HostBatch(
            token_ids=plan.token_ids,
            query_lens=plan.query_lens,
            context_lens=plan.context_lens,
            block_tables=plan.block_tables,
            logit_rows=np.concatenate((ends[plan.logit_sequences] - 1, plan.scored_rows), dtype=np.int32),
        )
        on_layer = self._marked(plan.layer_marks) if plan.layer_marks else None
        if self._host_model is not None:
            return self._host_model.forward_host(batch, self._kv_pool, on_layer=on_layer)
        on_device = batch.on_device(self._model.device, self._block_size)
        if self._layered is not None and on_layer is not None:
            return self._layered.forward(on_device, self._kv_pool, on_layer=on_layer)
        return self._model.forward(on_device, self._kv_pool)

    def _marked(self, marks: tuple[int, ...]) -> Callable[[int], None]:
        """What the model calls after each layer's KV is written: passes the marked ones on."""
        on_layers = self._on_layers

        def on_layer(num_layers: int) -> None:
            if on_layers is not None and num_layers in marks:
                on_layers(num_layers)

        return on_layer

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return upload(array, self._model.device)


def _warm_up_plan(num_rows: int, block_size: int) -> StepPlan:
    rows = np.zeros(1, dtype=ROW_DTYPE)
    for name in ("temperature", "top_p", "repetition_penalty"):
        rows[name] = 1.0
    num_blocks = -(-num_rows // block_size)
    return StepPlan(
        token_ids=np.zeros(num_rows, dtype=np.int32),
        query_lens=np.array([num_rows], dtype=np.int32),
        context_lens=np.array([num_rows], dtype=np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None, :],
        copies=np.empty((0, 2), dtype=np.int32),
        logit_sequences=np.zeros(1, dtype=np.int32),
        draw_logits=np.zeros(1, dtype=np.int32),
        sampling=SamplingBatch(rows=rows),
    )
