"""READs between processes of one host as plain copies from the peer's pool, mapped into this process.

Between workers of one host NIXL's way is UCX's cross-memory attach: a system call for each run that is not adjacent to
the last, in which the kernel looks the peer up and pins its pages. A mapping costs nothing a run. What it does not
change: a READ can be torn or late like any other, and only the confirmation proves it.
"""

import logging
from dataclasses import dataclass

import torch

from twopool.kernels.copy_runs import RunArray, copy_runs
from twopool.kv_transfer.agent import Post, PreparedList, ReadAgent
from twopool.kv_transfer.layout import Index, StridedList
from twopool.kv_transfer.memory import MappedPool
from twopool.protocol.errors import TransferError
from twopool.protocol.ids import Epoch
from twopool.protocol.messages import RankPool

logger = logging.getLogger(__name__)


class MappingAgent:
    """A ``ReadAgent`` that reads the pools it can map by itself and leaves all others to ``agent``."""

    def __init__(self, agent: ReadAgent) -> None:
        self.name = agent.name
        self.metadata = agent.metadata
        self._agent = agent
        self._mapped: dict[str, MappedPool] = {}
        self._num_mapped = 0

    def register(self, memory: torch.Tensor) -> None:
        self._agent.register(memory)

    def add_peer(self, pool: RankPool, epoch: Epoch) -> str:
        if pool.shared is None or pool.geometry.memory != "host":
            return self._agent.add_peer(pool, epoch)
        try:
            mapped = MappedPool(pool.shared, pool.geometry.pool_bytes)
        except OSError as error:
            logger.info("reading through NIXL: the peer's pool cannot be mapped (%s)", error)
            return self._agent.add_peer(pool, epoch)
        self._num_mapped += 1
        name = f"mapped/{self._num_mapped}"
        self._mapped[name] = mapped
        return name

    def remove_peer(self, peer: str) -> None:
        mapped = self._mapped.pop(peer, None)
        if mapped is None:
            self._agent.remove_peer(peer)
        else:
            mapped.close()

    def prepare_local(self, address: int, runs: StridedList) -> PreparedList:
        return _LocalList(self._agent, address, runs)

    def prepare_remote(self, peer: str, pool: RankPool, runs: StridedList) -> PreparedList:
        mapped = self._mapped.get(peer)
        if mapped is None:
            return self._agent.prepare_remote(peer, pool, runs)
        if runs.offset + (runs.count - 1) * runs.stride + runs.length > mapped.num_bytes:
            raise TransferError(f"runs up to {runs} do not fit a pool of {mapped.num_bytes} bytes")
        return _MappedList(mapped, _run_array(mapped.address, runs))

    def post(self, *, local: PreparedList, local_index: Index, remote: PreparedList, remote_index: Index) -> Post:
        if not isinstance(local, _LocalList):
            raise TypeError("this list was prepared by another kind of agent")
        if not isinstance(remote, _MappedList):
            inner = local.inner()
            return self._agent.post(local=inner, local_index=local_index, remote=remote, remote_index=remote_index)
        if not remote.pool.is_alive:
            raise TransferError("the process of the mapped pool has ended")
        copy_runs(
            target=_run_array(local.address, local.runs),
            target_index=local_index,
            source=remote.runs,
            source_index=remote_index,
        )
        return _Copied()

    def pump(self) -> None:
        self._agent.pump()


class _LocalList:
    """Prepared for ``agent`` when a READ of its own first needs it."""

    def __init__(self, agent: ReadAgent, address: int, runs: StridedList) -> None:
        self.address = address
        self.runs = runs
        self._agent = agent
        self._inner: PreparedList | None = None

    def inner(self) -> PreparedList:
        if self._inner is None:
            self._inner = self._agent.prepare_local(self.address, self.runs)
        return self._inner

    def release(self) -> None:
        if self._inner is not None:
            self._inner.release()
            self._inner = None


@dataclass(frozen=True)
class _MappedList:
    pool: MappedPool
    runs: RunArray

    def release(self) -> None:
        pass


class _Copied:
    def poll(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _run_array(address: int, runs: StridedList) -> RunArray:
    return RunArray(address + runs.offset, runs.length, runs.stride, runs.count)
