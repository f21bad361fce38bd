"""The decoder on the native CPU step: `models.decoder.Decoder`'s interface, another implementation."""

import ctypes
import hashlib
import logging
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twopool.kernels.collectives import SharedMemoryCollective
from twopool.kernels.native_library import native_code_sha256
from twopool.kernels.native_step import (
    MatrixKind,
    NativeStep,
    StepShape,
    VectorKind,
    native_available,
    unsupported_reason,
)
from twopool.models.batch import ForwardBatch, HostBatch
from twopool.models.config import DecoderConfig
from twopool.models.fingerprint import combined_fingerprint
from twopool.models.layer_watch import LayerWatch
from twopool.models.layers import TensorSource, expected_tensors, unused_tensors
from twopool.models.packed_weights import PackedStore
from twopool.models.rope import RotaryTable
from twopool.models.sharding import Shard
from twopool.models.tensor_parallel import PartSource, TensorParallel, whole
from twopool.models.weights import WeightFiles

logger = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_ROPE_CHUNK = 1024
_GATES_IN_TURN = 16


class NativeDecoder:
    """A decoder whose forward pass is one native call. Several pools may be served; one thread at a time may call it.

    For one ``isa`` the logits of a position have the same bits whatever the batch, the chunks, the cache hits and the
    number of threads. Another instruction set, another number of ranks, or the torch decoder, rounds otherwise.

    As one rank of a group it holds the KV heads from ``kv_head_start`` on, and every rank has to be given the same
    batches in the same order.
    """

    def __init__(
        self,
        config: DecoderConfig,
        step: NativeStep,
        *,
        weights_fingerprint: str,
        parallel: TensorParallel | None = None,
        writing: threading.Thread | None = None,
    ) -> None:
        """writing: reads the step's weights until it ends."""
        self.config = config
        part = whole(config) if parallel is None else parallel.part
        self.num_heads_local = part.num_heads_local
        self.num_kv_heads_local = part.num_kv_heads_local
        self.kv_head_start = part.kv_head_start
        self.dtype = step.shape.dtype
        self.device = torch.device("cpu")
        self._step = step
        self._writing = writing
        self._weights_fingerprint = weights_fingerprint
        self._rope = _RopeRows(config)

    @staticmethod
    def unavailable_reason(config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when `load` can serve this, else one line that says why the torch decoder must."""
        if device.type != "cpu":
            return f"the native step computes on the CPU, not on {device}"
        return native_available() or unsupported_reason(_shape(config, dtype, None))

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_threads: int | None = None,
        cpus: Sequence[int] | None = None,
        isa: str | None = None,
        shard: Shard | None = None,
        collective: SharedMemoryCollective | None = None,
        packed_store: PackedStore | None = None,
    ) -> "NativeDecoder":
        """Read config.json and the safetensors files of `folder`, convert to `dtype` and pack.

        num_threads: default torch's; cpus: pins thread i to cpus[i]; isa: default the fastest this CPU has.
        shard, collective: hold and read this rank's part only, and compute with the others, whose isa must be the same.
        packed_store: where what was packed before is found, else kept for the next time.
        Raises ModelError and ConfigError as `Decoder.load` does, ValueError with `unavailable_reason` where that is not
        None.
        """
        config = DecoderConfig.from_folder(folder)
        reason = cls.unavailable_reason(config, dtype=dtype, device=device)
        if reason is not None:
            raise ValueError(f"the native step cannot serve {folder}: {reason}")
        parallel = TensorParallel.of(config, shard, collective)
        files = WeightFiles(folder)
        expected = expected_tensors(config)
        files.check(expected, unused_tensors(config))
        threads = torch.get_num_threads() if num_threads is None else num_threads
        ranks = None if parallel is None else collective
        step = NativeStep(_shape(config, dtype, parallel), num_threads=threads, cpus=cpus, isa=isa, ranks=ranks)
        tensors: TensorSource = files if parallel is None else PartSource(files, config, parallel)
        fingerprint = files.fingerprint(list(expected))
        writing: threading.Thread | None = None
        with torch.inference_mode():
            loader = _Loader(config, tensors, step)
            if packed_store is None:
                loader.load()
            else:
                # The fingerprint samples the weights; the stamps tell files that were changed elsewhere.
                key = _packed_key(config, step, f"{fingerprint} {files.stamps()}", shard)
                writing = loader.load_packed(packed_store, key)
        return cls(config, step, weights_fingerprint=fingerprint, parallel=parallel, writing=writing)

    @property
    def isa(self) -> str:
        """The instruction set computed with, which names the rounding."""
        return self._step.isa

    def forward(self, batch: ForwardBatch, kv_pool: Tensor, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """`forward_host` of the same batch; where the rows' K and V go follows from the block tables."""
        return self.forward_host(
            HostBatch(
                token_ids=batch.token_ids.numpy().astype(np.int32),
                query_lens=batch.query_lens_host,
                context_lens=batch.context_lens_host,
                block_tables=batch.block_tables.numpy(),
                logit_rows=batch.logit_rows.numpy().astype(np.int32),
            ),
            kv_pool,
            on_layer=on_layer,
        )

    def forward_host(
        self, batch: HostBatch, kv_pool: Tensor, *, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Write the rows' K and V into `kv_pool`; return [R, vocab_size] float32 logits.

        Ranks above 0 of a group return [0, vocab_size].

        on_layer: called, on another thread, with n once the K and V of the first n layers are written, on rank 0 those
        that are on every rank.

        Raises CollectiveError when the other ranks are gone, late or at another step.
        """
        if on_layer is None:
            return self._run(batch, kv_pool, None)
        with LayerWatch(self.config.num_layers, on_layer) as watch:
            return self._run(batch, kv_pool, watch.layers_done)

    @property
    def reports_layers(self) -> bool:
        """Whether `forward` takes `on_layer`."""
        return True

    def _run(self, batch: HostBatch, kv_pool: Tensor, layers_done: ctypes.c_int32 | None) -> Tensor:
        longest = int(batch.context_lens.max()) if len(batch.context_lens) else 0
        cos, sin = self._rope.up_to(longest)
        return self._step.run(
            token_ids=batch.token_ids,
            query_lens=batch.query_lens,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            logit_rows=batch.logit_rows,
            cos=cos,
            sin=sin,
            kv_pool=kv_pool,
            layers_done=layers_done,
        )

    def fingerprint(self) -> str:
        """sha256 of what the numbers mean: that of `Decoder` for the same files."""
        return combined_fingerprint(self.config, self._weights_fingerprint)

    def close(self) -> None:
        """Stop the threads and free the weights."""
        if self._writing is not None:
            self._writing.join()
        self._step.close()


class _RopeRows:
    """cos and sin of every position so far, in float32, made longer by whole chunks.

    A chunk is always computed as a whole, so that a position's angles do not depend on when they were first needed.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self._half = config.head_dim // 2
        self._table = RotaryTable(config.rope, config.head_dim, dtype=torch.float32, device=torch.device("cpu"))
        self._cos = torch.empty((0, self._half))
        self._sin = torch.empty((0, self._half))

    def up_to(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """cos, sin: [at least num_positions, head_dim / 2]."""
        have = self._cos.shape[0]
        if num_positions > have:
            wanted = max(num_positions, 2 * have)
            chunks = [self._chunk(first) for first in range(have, wanted, _ROPE_CHUNK)]
            self._cos = torch.cat([self._cos, *(cos for cos, _ in chunks)])
            self._sin = torch.cat([self._sin, *(sin for _, sin in chunks)])
        return self._cos, self._sin

    def _chunk(self, first: int) -> tuple[Tensor, Tensor]:
        cos, signed_sin = self._table.rows(torch.arange(first, first + _ROPE_CHUNK))
        return cos[:, 0, : self._half], signed_sin[:, 0, self._half :]


class _Loader:
    """Reads a checked folder's tensors one by one and hands them to the step."""

    def __init__(self, config: DecoderConfig, files: TensorSource, step: NativeStep) -> None:
        self._config = config
        self._files = files
        self._step = step
        self._is_packed = False
        self._embedding = torch.empty(0)

    def load(self) -> None:
        self._load(self._files.read(_EMBEDDING))

    def load_packed(self, store: PackedStore, key: str) -> threading.Thread | None:
        """Take matrices and embedding from the store, or pack them and give them to it.

        Returns the thread that writes them, which reads the step's memory until it ends.
        """
        shape = self._step.shape
        rows = (shape.vocab_rows(self._step.rank), shape.hidden_size)
        num_packed, num_embedding = self._step.num_packed_bytes, math.prod(rows) * shape.dtype.itemsize
        found = store.open(key, num_packed + num_embedding)
        if found is None:
            self.load()
            return store.keep_later(key, [self._step.packed, self._embedding.reshape(-1).view(torch.uint8)])
        image, embedding = found.image[:num_packed], found.image[num_packed:].view(shape.dtype).view(rows)
        if found.in_huge_pages:
            self._step.use_packed(image)
        else:
            self._step.packed.copy_(image)
            self._step.use_packed()
        self._is_packed = True
        self._load(embedding if found.in_huge_pages else embedding.clone())
        logger.info("the weights were packed before: %s", "mapped" if found.in_huge_pages else "copied")
        return None

    def _load(self, embedding: Tensor) -> None:
        config, step = self._config, self._step
        if not self._is_packed:
            # A copy: a mapped file that shrinks while it is in use would kill the process.
            embedding = embedding.to(step.shape.dtype, copy=True).contiguous()
            step.set_matrix("head", embedding if config.tie_word_embeddings else self._files.read("lm_head.weight"))
        self._embedding = embedding
        step.set_embedding(embedding)
        step.set_vector("final_norm", self._files.read("model.norm.weight"))
        for layer in range(config.num_layers):
            self._layer(layer)
        step.finish()

    def _layer(self, layer: int) -> None:
        config, prefix = self._config, f"model.layers.{layer}."
        shape = self._step.shape
        query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self._vector("input_norm", layer, prefix + "input_layernorm")
        self._vector("post_attention_norm", layer, prefix + "post_attention_layernorm")
        if config.qk_norm:
            self._vector("query_norm", layer, prefix + "self_attn.q_norm")
            self._vector("key_norm", layer, prefix + "self_attn.k_norm")
        attention = prefix + "self_attn."
        for name, first in (("q_proj", 0), ("k_proj", query_size), ("v_proj", query_size + kv_size)):
            self._matrix("qkv", layer, attention + name, config.qkv_bias, first=first)
        self._matrix("output", layer, attention + "o_proj", config.output_bias)
        self._matrix("gate_up", layer, prefix + "mlp.gate_proj", config.mlp_bias, interleaved=True)
        self._matrix("gate_up", layer, prefix + "mlp.up_proj", config.mlp_bias, first=_GATES_IN_TURN, interleaved=True)
        self._matrix("down", layer, prefix + "mlp.down_proj", config.mlp_bias)

    def _vector(self, kind: VectorKind, layer: int, name: str) -> None:
        self._step.set_vector(kind, self._files.read(f"{name}.weight"), layer=layer)

    def _matrix(
        self, kind: MatrixKind, layer: int, name: str, bias: bool, *, first: int = 0, interleaved: bool = False
    ) -> None:
        bias_values = self._files.read(f"{name}.bias") if bias else None
        if not self._is_packed:
            rows = self._files.read(f"{name}.weight")
            self._step.set_matrix(kind, rows, layer=layer, first=first, interleaved=interleaved, bias=bias_values)
        elif bias_values is not None:
            self._step.set_bias(kind, bias_values, layer=layer, first=first, interleaved=interleaved)


def _packed_key(config: DecoderConfig, step: NativeStep, weights: str, shard: Shard | None) -> str:
    """All that the bytes of packed weights depend on."""
    place = shard or Shard(0, 1)
    parts = (config.fingerprint(), weights, native_code_sha256(), step.isa, step.shape.dtype, place)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _shape(config: DecoderConfig, dtype: torch.dtype, parallel: TensorParallel | None) -> StepShape:
    part = whole(config) if parallel is None else parallel.part
    return StepShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=len(part.mlp_rows),
        num_layers=config.num_layers,
        num_heads=part.num_heads_local,
        num_kv_heads=part.num_kv_heads_local,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        activation=config.activation,
        windows=config.sliding_window,
        dtype=dtype,
        vocab_bounds=None if parallel is None else parallel.plan.vocab_bounds,
    )
