"""The one decoder: every supported family is a configuration of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from twopool.kernels.activation import gated_activation
from twopool.kernels.attention import AttentionPlan, paged_attention, plan_attention
from twopool.kernels.collectives import Collective
from twopool.kernels.kv_cache import slot_rows
from twopool.kernels.linear import linear
from twopool.kernels.qkv import rotate_and_cache
from twopool.kernels.rms_norm import add_rms_norm_, rms_norm
from twopool.kernels.rows import gather_rows
from twopool.models.batch import ForwardBatch
from twopool.models.config import DecoderConfig
from twopool.models.fingerprint import combined_fingerprint
from twopool.models.layers import (
    DecoderWeights,
    LayerWeights,
    TensorSource,
    expected_tensors,
    load_weights,
    unused_tensors,
)
from twopool.models.rope import RotaryTable
from twopool.models.sharding import Shard
from twopool.models.tensor_parallel import PartSource, TensorParallel, whole
from twopool.models.weights import WeightFiles

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Step:
    """What every layer of one forward pass shares."""

    kv_pool: Tensor
    kv_rows: Tensor
    """[T, 2, num_kv_heads] int64, see `slot_rows`"""
    cos: Tensor
    signed_sin: Tensor
    plans: Mapping[int | None, AttentionPlan]
    """one for each distinct sliding window"""
    on_layer: Callable[[int], None] | None


class Decoder:
    """Weights of a decoder-only transformer and its forward pass over a paged KV pool.

    The KV pool is one contiguous tensor
    [num_blocks, num_kv_heads_local, num_layers, 2 (K, V), block_size, head_dim] of the decoder's dtype, on
    its device. A decoder has no state of its own: it may serve several pools.

    With `parallel` it is one rank of a group: it holds the KV heads from ``kv_head_start`` on, and every rank has to
    be given the same batches in the same order.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        weights_fingerprint: str,
        parallel: TensorParallel | None = None,
    ) -> None:
        self.config = config
        part = whole(config) if parallel is None else parallel.part
        self.num_heads_local = part.num_heads_local
        self.num_kv_heads_local = part.num_kv_heads_local
        self.kv_head_start = part.kv_head_start
        self._parallel = parallel
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._weights = weights
        self._weights_fingerprint = weights_fingerprint
        self._rotary = RotaryTable(config.rope, config.head_dim, dtype=self.dtype, device=self.device)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        deterministic_gemm: bool = False,
        shard: Shard | None = None,
        collective: Collective | None = None,
    ) -> "Decoder":
        """Read config.json and the safetensors files of `folder`, converting to `dtype`.

        deterministic_gemm: on a GPU, make a token's bits independent of its batch in the projections too.
        shard, collective: hold and read this rank's part only, and compute with the others.

        Raises ModelError: what is missing, damaged or not supported, and in which file; ConfigError for a degree that
        the model cannot be cut for.
        """
        if dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"dtype must be one of {SUPPORTED_DTYPES}, not {dtype}")
        config = DecoderConfig.from_folder(folder)
        parallel = TensorParallel.of(config, shard, collective)
        files = WeightFiles(folder)
        expected = expected_tensors(config)
        files.check(expected, unused_tensors(config))
        tensors: TensorSource = files if parallel is None else PartSource(files, config, parallel)
        with torch.inference_mode():
            weights = load_weights(config, tensors, dtype=dtype, device=device, deterministic_gemm=deterministic_gemm)
        return cls(config, weights, weights_fingerprint=files.fingerprint(list(expected)), parallel=parallel)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_pool: Tensor, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Write the rows' K and V into `kv_pool`; return [R, vocab_size] float32 logits.

        Ranks above 0 of a group return [0, vocab_size].
        on_layer: called with n once the K and V of the first n layers are written on every rank; see `reports_layers`.

        Raises CollectiveError when the other ranks are gone, late or at another step.
        """
        self._check_pool(kv_pool)
        return self.forward_planned(batch, kv_pool, self.plan(batch, kv_pool), on_layer=on_layer)

    @property
    def reports_layers(self) -> bool:
        """Whether `on_layer` tells when a layer is done: on a GPU it could tell only when its kernels were launched."""
        return self.device.type == "cpu"

    def plan(self, batch: ForwardBatch, kv_pool: Tensor) -> dict[int | None, AttentionPlan]:
        """The attention plans of a batch, one for each distinct sliding window."""
        return {window: self._plan(batch, kv_pool, window) for window in self.windows}

    @torch.inference_mode()
    def forward_planned(
        self,
        batch: ForwardBatch,
        kv_pool: Tensor,
        plans: Mapping[int | None, AttentionPlan],
        *,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """`forward` with plans made before; on a GPU it touches no host data, so it can be captured as a graph."""
        cos, signed_sin = self._rotary.rows(batch.positions)
        step = _Step(
            kv_pool=kv_pool,
            kv_rows=slot_rows(batch.slots, kv_pool),
            cos=cos,
            signed_sin=signed_sin,
            plans=plans,
            on_layer=on_layer,
        )
        hidden = self._hidden(batch, step)
        logits = linear(hidden, self._weights.head).float()
        if self._parallel is None:
            return logits
        gathered = self._parallel.collective.gather_columns(logits, self._parallel.vocab_widths)
        return logits.new_empty((0, self.config.vocab_size)) if gathered is None else gathered

    def fingerprint(self) -> str:
        """sha256 of what the numbers mean: equal files give equal values on every machine.

        The dtype computed in is not part of it, which the KV geometry names, nor is the number of ranks.
        """
        return combined_fingerprint(self.config, self._weights_fingerprint)

    def _hidden(self, batch: ForwardBatch, step: _Step) -> Tensor:
        """-> [R, hidden_size], the normalised last hidden state of the wanted rows."""
        weights, eps = self._weights, self.config.rms_norm_eps
        residual = self._embedded(batch.token_ids)
        normed = rms_norm(residual, weights.layers[0].input_norm, eps)
        for number, layer in enumerate(weights.layers):
            attended = self._attention(normed, number, layer, step)
            if step.on_layer is not None and self._parallel is None:
                step.on_layer(number + 1)
            last = number + 1 == len(weights.layers)
            if last:  # the rest of the last layer matters only where logits are wanted
                attended = gather_rows(attended, batch.logit_rows)
                residual = gather_rows(residual, batch.logit_rows)
            attended = self._summed(linear(attended, layer.output))
            if step.on_layer is not None and self._parallel is not None:  # now the other ranks have written theirs
                step.on_layer(number + 1)
            normed = add_rms_norm_(attended, residual, layer.post_attention_norm, eps)
            inner = gated_activation(linear(normed, layer.gate_up), self.config.activation)
            following = weights.final_norm if last else weights.layers[number + 1].input_norm
            normed = add_rms_norm_(self._summed(linear(inner, layer.down)), residual, following, eps)
        return normed

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, hidden_size]; a rank has rows for its own tokens only."""
        embedding = self._weights.embedding
        if self._parallel is None:
            return gather_rows(embedding, token_ids)
        places = token_ids - self._parallel.part.vocab_rows.start
        last = embedding.shape[0] - 1
        rows = gather_rows(embedding, places.clamp(0, last))
        return self._summed(rows.masked_fill_(((places < 0) | (places > last))[:, None], 0))

    def _summed(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self._parallel is not None:
            self._parallel.collective.all_reduce_(partial)
        return partial

    def _attention(self, normed: Tensor, number: int, layer: LayerWeights, step: _Step) -> Tensor:
        """normed [T, hidden_size] -> [T, num_heads * head_dim], before the output projection."""
        config = self.config
        queries = rotate_and_cache(
            linear(normed, layer.qkv).view(normed.shape[0], -1, config.head_dim),
            step.cos,
            step.signed_sin,
            norms=(layer.q_norm, layer.k_norm) if layer.q_norm is not None and layer.k_norm is not None else None,
            eps=config.rms_norm_eps,
            kv_pool=step.kv_pool,
            layer=number,
            rows=step.kv_rows,
            num_heads=self.num_heads_local,
        )
        attended = paged_attention(
            queries,
            step.kv_pool,
            number,
            step.plans[config.sliding_window[number]],
            scale=config.head_dim**-0.5,
        )
        return attended.view(normed.shape[0], -1)

    @property
    def windows(self) -> frozenset[int | None]:
        """The sliding windows of the layers; None: a layer that sees everything."""
        return frozenset(self.config.sliding_window)

    def _plan(self, batch: ForwardBatch, kv_pool: Tensor, window: int | None) -> AttentionPlan:
        return plan_attention(
            query_lens=batch.query_lens_host,
            context_lens=batch.context_lens_host,
            block_tables=batch.block_tables,
            kv_pool=kv_pool,
            num_heads=self.num_heads_local,
            sliding_window=window,
            dtype=self.dtype,
        )

    def _check_pool(self, kv_pool: Tensor) -> None:
        config = self.config
        wanted = (self.num_kv_heads_local, config.num_layers, 2, config.head_dim)
        shape = kv_pool.shape
        if len(shape) != 6 or (*shape[1:4], shape[5]) != wanted or not kv_pool.is_contiguous():
            raise ValueError(
                f"the KV pool is {list(shape)}, expected a contiguous [num_blocks, "
                f"{wanted[0]}, {wanted[1]}, 2, block_size, {wanted[3]}]"
            )
        if kv_pool.dtype != self.dtype:
            raise ValueError(f"the KV pool is {kv_pool.dtype}, the decoder {self.dtype}")
