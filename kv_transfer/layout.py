"""Which bytes of a peer's pools become which bytes of ours: pure functions from geometries to index arrays.

A pool is ``[num_blocks, num_kv_heads_local, num_layers, num_planes, block_size, head_dim]`` in C order. A fetch reads
one of three kinds of equal runs, the longest that fits:

- blocks of equal size, all layers: any range of heads of a block is one run (all heads: blocks next to one another
  on both sides merge);
- blocks of equal size, some layers: one run a block and head;
- unequal block sizes: one run a plane (K, V, or one latent for both), layer, head and block of the smaller size.

Each kind is a ``StridedList`` over the pool, prepared once by the transport, and a fetch is two int32 index arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS, FetchRequest
from twopool.protocol.errors import PairRefusedError, TransferError
from twopool.protocol.geometry import DTYPE_BYTES, GRANULE_TOKENS, KvDtype, KvGeometry

Index = npt.NDArray[np.int32]

_MUST_AGREE = ("num_layers", "num_kv_heads", "num_planes", "head_dim", "granule_order")
_MAX_INDEX = 2**31 - 1


@dataclass(frozen=True)
class StridedList:
    """``count`` runs of ``length`` bytes, ``stride`` bytes apart, the first ``offset`` bytes into a pool."""

    offset: int
    length: int
    stride: int
    count: int

    @property
    def is_dense(self) -> bool:
        return self.stride == self.length


@dataclass(frozen=True)
class Conversion:
    """Runs of ``source`` numbers become runs of as many ``target`` numbers."""

    source: KvDtype
    target: KvDtype


@dataclass(frozen=True)
class Runs:
    """Run ``local_index[i]`` of ``local`` is read from run ``remote_index[i]`` of ``remote``, a list of peer ``rank``.

    Both index arrays are ``[n]`` int32; both lists have one length unless they are converted.
    """

    rank: int
    local: StridedList
    remote: StridedList
    local_index: Index
    remote_index: Index
    conversion: Conversion | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are read."""
        return self.remote.length * len(self.remote_index)

    @property
    def num_ranges(self) -> int:
        """Contiguous ranges after merging neighbours, which takes both lists to be dense."""
        if not (self.local.is_dense and self.remote.is_dense):
            return len(self.local_index)
        follows = (np.diff(self.local_index) == 1) & (np.diff(self.remote_index) == 1)
        return len(self.local_index) - int(follows.sum())


@dataclass(frozen=True)
class HeadRun:
    """``num_heads`` heads, from ``local_head`` of our pool on, come from ``remote_head`` of peer ``rank`` on."""

    rank: int
    local_head: int
    remote_head: int
    num_heads: int


@dataclass(frozen=True)
class LayoutPlan:
    """How one rank reads from all ranks of one peer. Built by ``plan_layout``."""

    local: KvGeometry
    remotes: tuple[KvGeometry, ...]
    head_runs: tuple[HeadRun, ...]
    spread: int

    @property
    def ranks(self) -> list[int]:
        """The peer's ranks that are read from, ascending."""
        return sorted({run.rank for run in self.head_runs})

    @cached_property
    def num_remote_blocks(self) -> int:
        """Blocks every rank of the peer has: a block id means the same block on each."""
        return min(remote.num_blocks for remote in self.remotes)

    def check(self, request: FetchRequest) -> None:
        """Raise ``TransferError`` unless ``request`` fits both sides' pools, their canary blocks excluded."""
        if not 0 <= request.start_token < request.end_token:
            raise TransferError(f"no such token range: [{request.start_token}, {request.end_token})")
        if not 0 <= request.layer_start < request.layer_end <= self.local.num_layers:
            raise TransferError(
                f"layers [{request.layer_start}, {request.layer_end}) are not within {self.local.num_layers}"
            )
        for side, block_ids, block_size, num_blocks in (
            ("remote", request.remote_block_ids, self.remotes[0].block_size, self.num_remote_blocks),
            ("local", request.local_block_ids, self.local.block_size, self.local.num_blocks),
        ):
            expected = -(-request.end_token // block_size) - request.start_token // block_size
            if block_ids.shape != (expected,):
                raise TransferError(
                    f"tokens [{request.start_token}, {request.end_token}) are {expected} {side} blocks of "
                    f"{block_size}, got {list(block_ids.shape)} ids"
                )
            if int(block_ids.min()) < 0 or int(block_ids.max()) >= num_blocks - NUM_RESERVED_BLOCKS:
                raise TransferError(f"{side} block ids must be within [0, {num_blocks - NUM_RESERVED_BLOCKS})")

    def runs(self, request: FetchRequest) -> list[Runs]:
        """What to read for ``request``, which fits the pools; one entry for each ``head_runs`` entry."""
        if self.local.block_size != self.remotes[0].block_size:
            make = self._split_block_runs
        elif request.layer_end - request.layer_start == self.local.num_layers:
            make = self._whole_layer_runs
        else:
            make = self._layer_group_runs
        return [replace(make(heads, request), conversion=self.conversion(heads.rank)) for heads in self.head_runs]

    def conversion(self, rank: int) -> Conversion | None:
        """What becomes of the numbers of peer ``rank``; ``None``: nothing."""
        source, target = self.remotes[rank].dtype, self.local.dtype
        return Conversion(source, target) if source != target else None

    @property
    def conversions(self) -> set[Conversion]:
        return {conversion for rank in self.ranks if (conversion := self.conversion(rank)) is not None}

    def _whole_layer_runs(self, heads: HeadRun, request: FetchRequest) -> Runs:
        """One run a block: a range of its heads with all layers."""

        def run_list(pool: KvGeometry, head: int) -> StridedList:
            return StridedList(
                head * pool.head_bytes, heads.num_heads * pool.head_bytes, pool.block_bytes, pool.num_blocks
            )

        return Runs(
            rank=heads.rank,
            local=run_list(self.local, heads.local_head),
            remote=run_list(self.remotes[heads.rank], heads.remote_head),
            local_index=np.ascontiguousarray(request.local_block_ids, dtype=np.int32),
            remote_index=np.ascontiguousarray(request.remote_block_ids, dtype=np.int32),
        )

    def _layer_group_runs(self, heads: HeadRun, request: FetchRequest) -> Runs:
        """One run a block and head: a range of its layers."""
        first, num_layers = request.layer_start, request.layer_end - request.layer_start

        def run_list(pool: KvGeometry) -> StridedList:
            return StridedList(
                first * pool.layer_bytes,
                num_layers * pool.layer_bytes,
                pool.head_bytes,
                pool.num_blocks * pool.num_kv_heads_local,
            )

        def index(pool: KvGeometry, block_ids: Index, head: int) -> Index:
            rows = block_ids.astype(np.int64)[:, None] * pool.num_kv_heads_local  # [blocks, 1]
            return (rows + np.arange(head, head + heads.num_heads)).astype(np.int32).ravel()

        remote = self.remotes[heads.rank]
        return Runs(
            rank=heads.rank,
            local=run_list(self.local),
            remote=run_list(remote),
            local_index=index(self.local, request.local_block_ids, heads.local_head),
            remote_index=index(remote, request.remote_block_ids, heads.remote_head),
        )

    def _split_block_runs(self, heads: HeadRun, request: FetchRequest) -> Runs:
        """One run a plane, layer, head and small block; a large block holds several parts of each plane."""
        remote = self.remotes[heads.rank]
        small = min(self.local.block_size, remote.block_size)
        parts = np.arange(request.start_token // small, -(-request.end_token // small), dtype=np.int64)

        def index(pool: KvGeometry, block_ids: Index, head: int) -> Index:
            per_block = pool.block_size // small
            position = parts // per_block - request.start_token // pool.block_size
            block = block_ids.astype(np.int64)[position][:, None, None, None]  # [parts, 1, 1, 1]
            head_index = np.arange(head, head + heads.num_heads)[:, None, None]
            layer = np.arange(request.layer_start, request.layer_end)[:, None]
            row = (block * pool.num_kv_heads_local + head_index) * pool.num_layers + layer
            row = row * pool.num_planes + np.arange(pool.num_planes)  # [parts, heads, layers, planes]
            return (row * per_block + (parts % per_block)[:, None, None, None]).astype(np.int32).ravel()

        def run_list(pool: KvGeometry) -> StridedList:
            length = small * pool.head_dim * DTYPE_BYTES[pool.dtype]
            return StridedList(0, length, length, pool.pool_bytes // length)

        local_index = index(self.local, request.local_block_ids, heads.local_head)
        remote_index = index(remote, request.remote_block_ids, heads.remote_head)
        if remote.block_size > small:  # what lies side by side over there comes next to one another
            order = np.argsort(remote_index)
            local_index, remote_index = local_index[order], remote_index[order]
        return Runs(
            rank=heads.rank,
            local=run_list(self.local),
            remote=run_list(remote),
            local_index=local_index,
            remote_index=remote_index,
        )


def plan_layout(
    local: KvGeometry, remotes: Sequence[KvGeometry], *, convert_dtype: bool = False, spread: int = 0
) -> LayoutPlan:
    """The plan by which the rank with pool ``local`` reads from a peer whose ranks have ``remotes``.

    Pools of unequal dtypes are mapped only with ``convert_dtype``. A head that several remote ranks hold is read
    from one of them: our ranks take them in turn, from one on that ``spread`` says, which workers differ in.
    Raises ``PairRefusedError``, naming both sides' values, where the pools cannot be mapped.
    """
    for rank, remote in enumerate(remotes):
        _check_pair(local, remote, rank, convert_dtype)
        for name in ("block_size", "dtype"):
            first, here = getattr(remotes[0], name), getattr(remote, name)
            if here != first:
                raise PairRefusedError(f"the peer's ranks differ in {name}: {first} on rank 0, {here} on rank {rank}")
    return LayoutPlan(local, tuple(remotes), tuple(_head_runs(local, remotes, spread)), spread)


def source_columns(
    readers: Sequence[KvGeometry], sources: Sequence[KvGeometry], *, spread: int = 0
) -> npt.NDArray[np.int32]:
    """``[heads of all readers]`` int32: where among all heads of the source's ranks each of ours is read from.

    Replicas of a head may differ in the last bit, so it matters which one a rank reads.
    """
    first_columns = np.cumsum([0, *(source.num_kv_heads_local for source in sources)])
    columns = [
        first_columns[run.rank] + run.remote_head + np.arange(run.num_heads)
        for reader in readers
        for run in _head_runs(reader, sources, spread)
    ]
    return np.concatenate(columns).astype(np.int32)


def _check_pair(local: KvGeometry, remote: KvGeometry, rank: int, convert_dtype: bool) -> None:
    differing = [
        f"{name} {getattr(local, name)} here, {getattr(remote, name)} there"
        for name in _MUST_AGREE
        if getattr(local, name) != getattr(remote, name)
    ]
    if local.dtype != remote.dtype and not convert_dtype:
        differing.append(f"dtype {local.dtype} here, {remote.dtype} there (--kv-convert-dtype converts)")
    small = min(local.block_size, remote.block_size)
    if local.block_size != remote.block_size and small < GRANULE_TOKENS and local.granule_order != "plain":
        differing.append(
            f"block_size {local.block_size} here, {remote.block_size} there, "
            f"and {local.granule_order} order needs {GRANULE_TOKENS} tokens in one block"
        )
    if differing:
        raise PairRefusedError(f"cannot read KV from the peer's rank {rank}: " + "; ".join(differing))
    for pool in (local, remote):
        finest = small * pool.head_dim * DTYPE_BYTES[pool.dtype]
        if pool.pool_bytes // finest > _MAX_INDEX:
            raise PairRefusedError(f"a pool of {pool.num_blocks} blocks has more runs than an int32 can count")


def _head_runs(local: KvGeometry, remotes: Sequence[KvGeometry], spread: int) -> list[HeadRun]:
    runs: list[HeadRun] = []
    for local_head in range(local.num_kv_heads_local):
        head = local.kv_head_start + local_head
        holders = [
            rank
            for rank, remote in enumerate(remotes)
            if remote.kv_head_start <= head < remote.kv_head_start + remote.num_kv_heads_local
        ]
        if not holders:
            held = ", ".join(f"{r.kv_head_start}..{r.kv_head_start + r.num_kv_heads_local - 1}" for r in remotes)
            raise PairRefusedError(f"KV head {head} is needed here, but the peer's ranks hold heads {held}")
        rank = holders[(local.tp_rank + spread) % len(holders)]
        remote_head = head - remotes[rank].kv_head_start
        if runs and runs[-1].rank == rank and runs[-1].remote_head + runs[-1].num_heads == remote_head:
            last = runs.pop()
            runs.append(HeadRun(rank, last.local_head, last.remote_head, last.num_heads + 1))
        else:
            runs.append(HeadRun(rank, local_head, remote_head, 1))
    return runs
