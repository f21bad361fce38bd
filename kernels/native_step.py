"""The native CPU step: a decoder's whole forward pass as one call into C++ (the sources are in ``native/``).

The library is built by ``setup.py`` where there is a compiler; ``unavailable_reason`` says in one line why it cannot
serve here. It holds the packed weights; the KV pool, the embedding and the rotation table stay torch's.
"""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twopool.kernels.collectives import SharedMemoryCollective
from twopool.kernels.native_library import GROUP_LOST, native_library
from twopool.protocol.errors import CollectiveError

Ints = npt.NDArray[np.int32]
MatrixKind = Literal["qkv", "output", "gate_up", "down", "head"]
VectorKind = Literal["input_norm", "post_attention_norm", "query_norm", "key_norm", "final_norm"]

_MAX_HEAD_DIM = 256
_MIN_BLOCK_SIZE = 16
# In the order of the enums of native/ops.h and native/model.h.
_DTYPES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_MATRICES: tuple[MatrixKind, ...] = ("qkv", "output", "gate_up", "down", "head")
_VECTORS: tuple[VectorKind, ...] = ("input_norm", "post_attention_norm", "query_norm", "key_norm", "final_norm")


class _ModelArgs(ctypes.Structure):
    _fields_ = (
        ("vocab_size", ctypes.c_int64),
        ("hidden_size", ctypes.c_int64),
        ("intermediate_size", ctypes.c_int64),
        ("vocab_rows", ctypes.c_int64),
        ("num_layers", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("activation", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("isa", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("windows", ctypes.c_void_p),
        ("cpus", ctypes.c_void_p),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_sequences", ctypes.c_int64),
        ("num_logit_rows", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("query_lens", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("max_blocks", ctypes.c_int64),
        ("logit_rows", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("rope_rows", ctypes.c_int64),
        ("kv_pool", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("layers_done", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class StepShape:
    """The architecture, as far as the step needs to know it.

    Of one rank's part, where several hold a model together: then the heads and intermediate_size are its own.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh"]
    windows: tuple[int | None, ...]
    """one a layer: a position sees itself and the window - 1 before it; None: all"""
    dtype: torch.dtype
    vocab_bounds: tuple[int, ...] | None = None
    """[ranks + 1]: rank r has the embedding and the head of the tokens from [r] up to [r + 1]"""

    def vocab_rows(self, rank: int) -> int:
        """Rows of the embedding and the head that a rank has."""
        bounds = self.vocab_bounds
        return self.vocab_size if bounds is None else bounds[rank + 1] - bounds[rank]


def native_available() -> str | None:
    """None when the native step can run in this process, else one line that says why not."""
    try:
        if not supported_isas():
            return "this CPU has no AVX2"
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def unsupported_reason(shape: StepShape) -> str | None:
    """None when the native step can compute this architecture, else one line that says why not."""
    if shape.dtype not in _DTYPES:
        return f"{shape.dtype} is not one of the native step's types (float32, bfloat16)"
    if shape.head_dim > _MAX_HEAD_DIM or shape.head_dim % 2:
        return f"head_dim {shape.head_dim} is odd or above {_MAX_HEAD_DIM}"
    if shape.num_heads % shape.num_kv_heads:
        return f"{shape.num_heads} query heads are no multiple of {shape.num_kv_heads} KV heads"
    return None


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """Instruction sets of this CPU that the library has code for, the fastest first.

    Raises OSError or RuntimeError when the library is missing or of another version.
    """
    library = native_library()
    names = []
    number = 0
    while (supported := library.twopool_isa_supported(number)) >= 0:
        if supported:
            names.append(library.twopool_isa_name(number).decode())
        number += 1
    return tuple(reversed(names))


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages under a CPU tensor that was allocated but not yet written, such as a KV pool.

    Attention reads the pool in runs of a granule (2 KiB for 16 tokens of a head): with small pages each costs a miss of
    the TLB too. Does nothing where the native library is missing.
    """
    if native_available() is None and tensor.device.type == "cpu":
        native_library().twopool_advise_huge_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())


class NativeStep:
    """Packed weights and the threads that use them. One thread at a time may call it.

    num_threads counts the calling thread; cpus pins thread i to cpus[i], the calling thread at its first call included.
    isa is one of ``supported_isas()``, by default the first. ranks: those that hold the other parts of the model; every
    one of them has to be given the same steps in the same order. Raises ValueError for what cannot be served.
    """

    def __init__(
        self,
        shape: StepShape,
        *,
        num_threads: int,
        cpus: Sequence[int] | None = None,
        isa: str | None = None,
        ranks: SharedMemoryCollective | None = None,
    ) -> None:
        self._handle: ctypes.c_void_p | None = None
        reason = native_available() or unsupported_reason(shape)
        if reason is not None:
            raise ValueError(f"the native step cannot serve: {reason}")
        if isa is None:
            isa = supported_isas()[0]
        elif isa not in supported_isas():
            raise ValueError(f"instruction set {isa!r} is not one of {', '.join(supported_isas())}")
        if num_threads < 1 or (cpus is not None and len(cpus) != num_threads):
            raise ValueError(f"{num_threads} threads need as many CPUs to be pinned to, not {cpus}")
        if (shape.vocab_bounds is None) != (ranks is None) or (
            ranks and len(shape.vocab_bounds or ()) != ranks.size + 1
        ):
            raise ValueError("vocab_bounds are those of the ranks")
        self.shape = shape
        self.rank = 0 if ranks is None else ranks.rank
        self.isa = isa
        self.num_threads = num_threads
        self._library = native_library()
        self._embedding: Tensor | None = None
        self._image: Tensor | None = None
        self._whole = False
        self._handle = self._create(cpus)
        if ranks is not None and shape.vocab_bounds is not None:
            bounds = (ctypes.c_int64 * (ranks.size + 1))(*shape.vocab_bounds)
            self._check(self._library.twopool_model_join(self._handle, ranks.handle, bounds))

    def set_matrix(
        self,
        kind: MatrixKind,
        rows: Tensor,
        *,
        layer: int = 0,
        first: int = 0,
        interleaved: bool = False,
        bias: Tensor | None = None,
    ) -> None:
        """Pack rows [num_outputs, num_inputs] as outputs first, first + 1, ... of a projection.

        interleaved: output r goes to column first + r // 16 * 32 + r % 16 (gates from 0, ups from 16).
        """
        rows = rows.to(self.shape.dtype).contiguous()
        place = (layer, _MATRICES.index(kind), first, int(interleaved))
        self._check(self._library.twopool_set_matrix(self._handle, *place, rows.data_ptr(), *rows.shape))
        if bias is not None:
            self.set_bias(kind, bias, layer=layer, first=first, interleaved=interleaved)

    def set_bias(
        self, kind: MatrixKind, bias: Tensor, *, layer: int = 0, first: int = 0, interleaved: bool = False
    ) -> None:
        """The bias of the rows that ``set_matrix`` takes at the same place."""
        bias = bias.to(self.shape.dtype).float().contiguous()
        place = (layer, _MATRICES.index(kind), first, int(interleaved))
        self._check(self._library.twopool_set_bias(self._handle, *place, bias.data_ptr(), bias.numel()))

    @property
    def packed(self) -> Tensor:
        """All matrices as they are packed, uint8, as long as this is not closed.

        Their layout depends on the shape, the instruction set and the library. Before ``set_matrix`` they may be
        copied in.
        """
        address, num_bytes = self._library.twopool_packed_data(self._handle), self.num_packed_bytes
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        memory.owner = self  # type: ignore[attr-defined]  # not freed while a tensor of it lives
        return torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def num_packed_bytes(self) -> int:
        return int(self._library.twopool_packed_bytes(self._handle))

    def use_packed(self, image: Tensor | None = None) -> None:
        """Take all matrices as they were packed before: from ``image``, in place, or from what ``packed`` was given."""
        if image is not None and (image.numel() != self.num_packed_bytes or image.dtype != torch.uint8):
            raise ValueError(f"the packed matrices are {self.num_packed_bytes} bytes")
        self._image = image
        self._check(self._library.twopool_use_packed(self._handle, None if image is None else image.data_ptr()))

    def set_vector(self, kind: VectorKind, values: Tensor, *, layer: int = 0) -> None:
        """A norm's weight: [hidden_size], or [head_dim] for queries and keys."""
        values = values.to(self.shape.dtype).float().contiguous()
        self._check(
            self._library.twopool_set_vector(
                self._handle, layer, _VECTORS.index(kind), values.data_ptr(), values.numel()
            )
        )

    def set_embedding(self, embedding: Tensor) -> None:
        """[vocab_size or the rank's rows of it, hidden_size] of the step's dtype, contiguous; used in place."""
        wanted = (self.shape.vocab_rows(self.rank), self.shape.hidden_size)
        if tuple(embedding.shape) != wanted or embedding.dtype != self.shape.dtype or not embedding.is_contiguous():
            raise ValueError(f"the embedding must be a contiguous {list(wanted)} of {self.shape.dtype}")
        self._embedding = embedding
        self._library.twopool_set_embedding(self._handle, embedding.data_ptr())

    def finish(self) -> None:
        """Check that every weight was set; raises ValueError naming one that was not."""
        self._check(self._library.twopool_check_complete(self._handle))
        self._whole = True

    def run(
        self,
        *,
        token_ids: Ints,
        query_lens: Ints,
        context_lens: Ints,
        block_tables: Ints,
        logit_rows: Ints,
        cos: Tensor,
        sin: Tensor,
        kv_pool: Tensor,
        layers_done: ctypes.c_int32 | None = None,
    ) -> Tensor:
        """Write the rows' K and V into kv_pool; return [R, vocab_size] float32 logits, on ranks above 0 none.

        While it runs, layers_done holds the number of layers whose K and V are complete, for another thread to look at;
        on rank 0 those that are complete on every rank.

        token_ids [T], query_lens, context_lens [S], block_tables [S, max_blocks], logit_rows [R]: int32, as
        `models.batch.HostBatch` explains them; cos, sin [positions, head_dim / 2]: float32; kv_pool as in
        kernels/kv_cache.py, of the step's dtype. Raises ValueError for anything out of range, before the pool is
        touched, and CollectiveError when the ranks can no longer compute together.
        """
        if not self._whole:
            raise ValueError("finish() comes before run()")
        num_rows, num_sequences = token_ids.shape[0], query_lens.shape[0]
        if block_tables.ndim != 2:
            raise ValueError("block_tables must be [num_sequences, max_blocks]")
        max_blocks = block_tables.shape[1]
        half = self.shape.head_dim // 2
        arrays = {
            "token_ids": _checked(token_ids, (num_rows,), "token_ids"),
            "query_lens": _checked(query_lens, (num_sequences,), "query_lens"),
            "context_lens": _checked(context_lens, (num_sequences,), "context_lens"),
            "block_tables": _checked(block_tables, (num_sequences, max_blocks), "block_tables"),
            "logit_rows": _checked(logit_rows, (logit_rows.shape[0],), "logit_rows"),
        }
        rotations = (cos.shape[0], half)
        tables = {"cos": _checked_table(cos, rotations, "cos"), "sin": _checked_table(sin, rotations, "sin")}
        self._check_pool(kv_pool)
        num_logits = 0 if self.rank else logit_rows.shape[0]
        logits = torch.empty((num_logits, self.shape.vocab_size), dtype=torch.float32)
        batch = _Batch(
            num_rows=num_rows,
            num_sequences=num_sequences,
            num_logit_rows=logit_rows.shape[0],
            max_blocks=max_blocks,
            rope_rows=cos.shape[0],
            kv_pool=kv_pool.data_ptr(),
            num_blocks=kv_pool.shape[0],
            block_size=kv_pool.shape[4],
            logits=logits.data_ptr(),
            layers_done=ctypes.addressof(layers_done) if layers_done is not None else None,
            **{name: array.ctypes.data for name, array in arrays.items()},
            **{name: table.data_ptr() for name, table in tables.items()},
        )
        self._check(self._library.twopool_step(self._handle, ctypes.byref(batch)))
        return logits

    def close(self) -> None:
        """Stop the threads and free the weights; harmless when done twice."""
        self._whole = False
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.twopool_model_destroy(handle)

    def __del__(self) -> None:
        self.close()

    def _create(self, cpus: Sequence[int] | None) -> ctypes.c_void_p:
        shape = self.shape
        windows = (ctypes.c_int64 * shape.num_layers)(*(window or 0 for window in shape.windows))
        pinned = None if cpus is None else (ctypes.c_int32 * len(cpus))(*cpus)
        isa = 0
        while self._library.twopool_isa_name(isa).decode() != self.isa:
            isa += 1
        args = _ModelArgs(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            vocab_rows=shape.vocab_rows(self.rank),
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            eps=shape.rms_norm_eps,
            attention_scale=shape.head_dim**-0.5,
            activation=_ACTIVATIONS.index(shape.activation),
            dtype=_DTYPES[shape.dtype],
            isa=isa,
            num_threads=self.num_threads,
            windows=ctypes.cast(windows, ctypes.c_void_p),
            cpus=None if pinned is None else ctypes.cast(pinned, ctypes.c_void_p),
        )
        handle = ctypes.c_void_p()
        self._check(self._library.twopool_model_create(ctypes.byref(args), ctypes.byref(handle)))
        return handle

    def _check_pool(self, kv_pool: Tensor) -> None:
        shape = self.shape
        wanted = (shape.num_kv_heads, shape.num_layers, 2, shape.head_dim)
        sizes = kv_pool.shape
        if len(sizes) != 6 or (*sizes[1:4], sizes[5]) != wanted or not kv_pool.is_contiguous():
            raise ValueError(
                f"the KV pool is {list(sizes)}, expected a contiguous [num_blocks, {wanted[0]}, {wanted[1]}, 2, "
                f"block_size, {wanted[3]}]"
            )
        if kv_pool.dtype != shape.dtype or kv_pool.device.type != "cpu":
            raise ValueError(f"the KV pool is {kv_pool.dtype} on {kv_pool.device}, the step {shape.dtype} on the CPU")
        if sizes[4] < _MIN_BLOCK_SIZE:
            raise ValueError(f"the KV pool's blocks hold {sizes[4]} tokens, the native step needs {_MIN_BLOCK_SIZE}")

    def _check(self, status: int) -> None:
        if status == GROUP_LOST:
            raise CollectiveError(f"rank {self.rank}: {self._library.twopool_last_error().decode()}")
        if status:
            raise ValueError(f"the native step: {self._library.twopool_last_error().decode()}")


def _checked(array: Ints, shape: tuple[int, ...], name: str) -> Ints:
    """The array in memory the native code can walk; copied where it is not contiguous."""
    if array.dtype != np.int32 or array.shape != shape:
        raise ValueError(f"{name} must be {list(shape)} of int32, not {list(array.shape)} of {array.dtype}")
    return np.ascontiguousarray(array)


def _checked_table(table: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    if table.dtype != torch.float32 or table.shape != shape or table.device.type != "cpu":
        raise ValueError(f"{name} must be {list(shape)} of float32, not {list(table.shape)} of {table.dtype}")
    return table.contiguous()
