"""What the leader of a tensor-parallel worker and its other ranks say to each other.

Two connections a rank. *Control*: loading, in the order of the messages below, then ``kv_transfer.rank_messages``.
*Steps*: ``StepCommand`` and ``StepDone`` in turn; a rank gets of a step what its computation needs and no more.
"""

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from twopool.engine.step import Ints, StepPlan
from twopool.kernels.sampling import ROW_DTYPE, SamplingBatch
from twopool.kv_transfer.rank_messages import KvAnswer, KvCommand
from twopool.protocol.ids import Epoch
from twopool.protocol.messages import MAX_RANKS, RankPool, pack_ids, unpack_ids

_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Text = Annotated[str, Meta(max_length=8192)]
_IdBytes = Annotated[bytes, Meta(max_length=32 * 1024 * 1024)]

_NO_DRAWS = SamplingBatch(rows=np.empty(0, dtype=ROW_DTYPE))
_NO_IDS = np.empty(0, dtype=np.int32)


class SharedSegment(Struct, frozen=True, kw_only=True, tag="segment"):
    """The ranks meet in shared memory: file descriptor ``fd``, which the rank inherits, of ``max_bytes`` a rank."""

    fd: _Index
    max_bytes: _Count


class Rendezvous(Struct, frozen=True, kw_only=True, tag="rendezvous"):
    """The ranks meet through torch.distributed; rank 0 opens the place."""

    backend: Literal["gloo", "nccl"]
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]


MeetingPlace = SharedSegment | Rendezvous


# --- leader → rank, control


class RankSetup(Struct, frozen=True, kw_only=True, tag="setup"):
    """The first message: load this shard. ``flags`` are the worker's own, as on its command line.

    ``cpus``: what to keep to; None: whatever the process that started it keeps to. ``local_rank``: the rank's number
    among those of its node, which take one GPU each.
    """

    rank: _Index
    local_rank: _Index
    size: Annotated[int, Meta(ge=2, le=MAX_RANKS)]
    flags: tuple[_Text, ...]
    folder: _Text
    meeting: MeetingPlace
    cpus: tuple[_Index, ...] | None = None


class AllocatePool(Struct, frozen=True, kw_only=True, tag="allocate_pool"):
    """Allocate as many blocks as every rank can, and offer them to peers as this epoch's."""

    num_blocks: _Count
    epoch: Epoch


ControlCommand = RankSetup | AllocatePool | KvCommand


# --- rank → leader, control


class ShardLoaded(Struct, frozen=True, kw_only=True, tag="shard_loaded"):
    """``num_blocks``: what the rank's memory allows; the rest has to be the same on all ranks."""

    num_blocks: _Count
    fingerprint: str
    kernel_backend: str


class LoadFailed(Struct, frozen=True, kw_only=True, tag="load_failed"):
    """The rank cannot serve, in words. ``is_config``: a flag is at fault."""

    message: _Text
    is_config: bool


class PoolReady(Struct, frozen=True, kw_only=True, tag="pool_ready"):
    """The rank's transport is up: steps and KV commands may come."""

    pool: RankPool


ControlAnswer = ShardLoaded | LoadFailed | PoolReady | KvAnswer


# --- steps


class StepCommand(Struct, frozen=True, array_like=True, tag="step"):
    """A ``StepPlan`` without what draws tokens; arrays as little-endian int32 bytes.

    ``block_tables`` has a row for each of ``query_lens``, ``copies`` two entries a copy.
    """

    number: int
    token_ids: _IdBytes
    query_lens: _IdBytes
    context_lens: _IdBytes
    block_tables: _IdBytes
    copies: _IdBytes
    logit_sequences: _IdBytes
    scored_rows: _IdBytes

    @classmethod
    def of(cls, number: int, plan: StepPlan) -> "StepCommand":
        return cls(
            number,
            pack_ids(plan.token_ids),
            pack_ids(plan.query_lens),
            pack_ids(plan.context_lens),
            pack_ids(plan.block_tables),
            pack_ids(plan.copies),
            pack_ids(plan.logit_sequences),
            pack_ids(plan.scored_rows),
        )

    def plan(self) -> StepPlan:
        """Raises ``ValueError`` where the arrays do not fit together."""
        query_lens = _ints(self.query_lens)
        return StepPlan(
            token_ids=_ints(self.token_ids),
            query_lens=query_lens,
            context_lens=_ints(self.context_lens),
            block_tables=_ints(self.block_tables).reshape(len(query_lens), -1),
            copies=_ints(self.copies).reshape(-1, 2),
            logit_sequences=_ints(self.logit_sequences),
            sampling=_NO_DRAWS,
            draw_logits=_NO_IDS,
            scored_rows=_ints(self.scored_rows),
        )


class StepDone(Struct, frozen=True, array_like=True, tag="done"):
    """The rank's part of step ``number`` is computed and its KV in memory; ``error`` where it is not, in words."""

    number: int
    error: _Text | None = None


def _ints(data: bytes) -> Ints:
    """A copy: what came in a message is read-only, which tensors cannot be."""
    return unpack_ids(data).copy()
