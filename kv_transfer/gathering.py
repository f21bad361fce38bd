"""READs of runs that lie side by side at the peer but not here: read as one into staging memory, spread from there.

Unequal block sizes cut KV into runs of a layer's K or V of one small block, thousands a prompt. Each costs a system
call on one host and a message over a network, unless it is adjacent to the last one on both sides; a copy of two KiB
from memory that is in the cache costs a tenth of that.
"""

from dataclasses import dataclass

import numpy as np
import torch

from twopool.kernels.copy_runs import RunArray, copy_runs
from twopool.kv_transfer.agent import Post, PreparedList, ReadAgent
from twopool.kv_transfer.layout import Index, StridedList
from twopool.kv_transfer.staging import Staging, StagingPool
from twopool.protocol.ids import Epoch
from twopool.protocol.messages import RankPool

MIN_RUNS_A_RANGE = 4
"""Runs that one range at the peer has to hold on average: below, the copy costs what it saves."""


class GatheringAgent:
    """A ``ReadAgent`` for host memory that lets ``agent`` read fewer, longer ranges where that pays."""

    def __init__(self, agent: ReadAgent) -> None:
        self.name = agent.name
        self.metadata = agent.metadata
        self._agent = agent
        self._staging = StagingPool(agent, torch.device("cpu"))

    def register(self, memory: torch.Tensor) -> None:
        self._agent.register(memory)

    def add_peer(self, pool: RankPool, epoch: Epoch) -> str:
        return self._agent.add_peer(pool, epoch)

    def remove_peer(self, peer: str) -> None:
        self._agent.remove_peer(peer)

    def prepare_local(self, address: int, runs: StridedList) -> PreparedList:
        return _List(self._agent.prepare_local(address, runs), runs, address)

    def prepare_remote(self, peer: str, pool: RankPool, runs: StridedList) -> PreparedList:
        return _List(self._agent.prepare_remote(peer, pool, runs), runs)

    def post(self, *, local: PreparedList, local_index: Index, remote: PreparedList, remote_index: Index) -> Post:
        if not isinstance(local, _List) or not isinstance(remote, _List):
            raise TypeError("these lists were prepared by another kind of agent")
        if not remote.runs.is_dense or not _pays(local_index, remote_index, local.runs.is_dense):
            return self._agent.post(
                local=local.inner, local_index=local_index, remote=remote.inner, remote_index=remote_index
            )
        staging = self._staging.take(remote.runs.length * len(remote_index))
        try:
            post = self._agent.post(
                local=staging.prepared(self._agent, remote.runs.length),
                local_index=np.arange(len(remote_index), dtype=np.int32),
                remote=remote.inner,
                remote_index=remote_index,
            )
        except BaseException:
            self._staging.give_back(staging)
            raise
        return _GatheredPost(post, self._staging, staging, local, local_index)

    def pump(self) -> None:
        self._agent.pump()


@dataclass(frozen=True)
class _List:
    """``address``: of memory here."""

    inner: PreparedList
    runs: StridedList
    address: int = 0

    def release(self) -> None:
        self.inner.release()


class _GatheredPost:
    def __init__(self, post: Post, pool: StagingPool, staging: Staging, local: _List, local_index: Index) -> None:
        self._post = post
        self._pool = pool
        self._staging = staging
        self._local = local
        self._local_index = local_index

    def poll(self) -> bool:
        if not self._post.poll():
            return False
        runs, count = self._local.runs, len(self._local_index)
        copy_runs(
            target=RunArray(self._local.address + runs.offset, runs.length, runs.stride, runs.count),
            target_index=self._local_index,
            source=RunArray(self._staging.memory.data_ptr(), runs.length, runs.length, count),
            source_index=np.arange(count, dtype=np.int32),
        )
        return True

    def release(self) -> None:
        try:
            self._post.release()
        finally:
            self._pool.give_back(self._staging)


def _pays(local_index: Index, remote_index: Index, local_is_dense: bool) -> bool:
    """Whether the ranges at the peer are much fewer than those that are ranges on both sides."""
    side_by_side = np.diff(remote_index) == 1
    num_ranges = len(remote_index) - int(side_by_side.sum())
    num_direct = len(remote_index)
    if local_is_dense:
        num_direct -= int((side_by_side & (np.diff(local_index) == 1)).sum())
    return num_direct >= MIN_RUNS_A_RANGE * num_ranges
