"""The shape of a KV pool, as peers tell it to each other.

One rank's pool is one allocation shaped
``[num_blocks, num_kv_heads_local, num_layers, num_planes, block_size, head_dim]`` in C order: heads outside layers,
so that a whole block is one run for equal TP, and any head range, and any group of layers of one head, is one run too.
A head has two planes, K and V, or a single one: then K and V are made of the same numbers (multi-head latent attention
keeps one such latent for all query heads: ``num_kv_heads`` 1, ``num_planes`` 1, ``head_dim`` its width).
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

KvDtype = Literal["float32", "bfloat16", "float16"]
MemoryKind = Literal["host", "device"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

GRANULE_TOKENS = 16
"""Prefix hashes chain over granules of this many tokens, whatever the block size."""

_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class KvGeometry(Struct, frozen=True, kw_only=True):
    """One rank's pool.

    ``granule_order`` names the order of elements inside 16 tokens of one head's K or V; only equal names move
    without conversion. ``kv_head_start`` is the first global KV head this rank holds. ``num_planes``: 2 for K and V,
    1 for a latent that both are made of.
    """

    num_blocks: _Count
    block_size: Annotated[int, Meta(ge=1, le=4096)]
    num_layers: Annotated[int, Meta(ge=1, le=4096)]
    num_kv_heads: Annotated[int, Meta(ge=1, le=65536)]
    kv_head_start: _Index = 0
    num_kv_heads_local: Annotated[int, Meta(ge=1, le=65536)]
    head_dim: Annotated[int, Meta(ge=1, le=65536)]
    dtype: KvDtype
    num_planes: Annotated[int, Meta(ge=1, le=2)] = 2
    granule_order: str = "plain"
    memory: MemoryKind = "host"
    device_index: _Index = 0
    tp_rank: _Index = 0
    tp_size: _Count = 1

    def __post_init__(self) -> None:
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if self.kv_head_start + self.num_kv_heads_local > self.num_kv_heads:
            raise ValueError(
                f"heads {self.kv_head_start}+{self.num_kv_heads_local} exceed num_kv_heads={self.num_kv_heads}"
            )
        if self.tp_rank >= self.tp_size:
            raise ValueError(f"tp_rank {self.tp_rank} is not below tp_size {self.tp_size}")

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """``[num_blocks, num_kv_heads_local, num_layers, num_planes, block_size, head_dim]``."""
        return (
            self.num_blocks,
            self.num_kv_heads_local,
            self.num_layers,
            self.num_planes,
            self.block_size,
            self.head_dim,
        )

    @property
    def layer_bytes(self) -> int:
        """Bytes of one head of one layer of a block, all planes."""
        return self.num_planes * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of a block, all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_kv_heads_local * self.head_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes
