"""A ``ReadAgent`` whose READs fail on purpose, for tests: points ``read`` and ``canary`` of ``fault_points``."""

import time
from dataclasses import dataclass

import torch

from twopool.kv_transfer.agent import Post, PreparedList, ReadAgent
from twopool.kv_transfer.fault_points import Fault, FaultPoints, end_process
from twopool.kv_transfer.layout import Index, StridedList
from twopool.protocol.errors import TransferError
from twopool.protocol.ids import Epoch
from twopool.protocol.messages import RankPool


class FaultyAgent:
    """Stands before ``agent``. READs into ``pool`` are point ``read``, all others (handshakes, KV to
    convert) point ``canary``."""

    def __init__(self, agent: ReadAgent, faults: FaultPoints, pool: torch.Tensor) -> None:
        self.name = agent.name
        self.metadata = agent.metadata
        self._agent = agent
        self._faults = faults
        self._pool_address = pool.data_ptr()
        self._memory = {self._pool_address: pool}

    def register(self, memory: torch.Tensor) -> None:
        self._agent.register(memory)
        self._memory[memory.data_ptr()] = memory

    def add_peer(self, pool: RankPool, epoch: Epoch) -> str:
        return self._agent.add_peer(pool, epoch)

    def remove_peer(self, peer: str) -> None:
        self._agent.remove_peer(peer)

    def prepare_local(self, address: int, runs: StridedList) -> PreparedList:
        return _LocalList(self._agent.prepare_local(address, runs), address, runs)

    def prepare_remote(self, peer: str, pool: RankPool, runs: StridedList) -> PreparedList:
        return self._agent.prepare_remote(peer, pool, runs)

    def post(self, *, local: PreparedList, local_index: Index, remote: PreparedList, remote_index: Index) -> Post:
        if not isinstance(local, _LocalList):
            raise TypeError("this list was prepared by another kind of agent")
        fault = self._faults.take("read" if local.address == self._pool_address else "canary")
        read = _Read(self._agent, local, local_index, remote, remote_index)
        if fault is None:
            return read.start(len(local_index))
        end_process(fault)
        if fault.action == "refuse":
            raise TransferError("the READ is refused on purpose")
        return _FaultyPost(read, fault, self._memory[local.address])

    def pump(self) -> None:
        self._agent.pump()


@dataclass(frozen=True)
class _LocalList:
    inner: PreparedList
    address: int
    runs: StridedList

    def release(self) -> None:
        self.inner.release()


@dataclass(frozen=True)
class _Read:
    """A READ that can be posted, whole or in part. The index arrays are ``[n]`` int32."""

    agent: ReadAgent
    local: _LocalList
    local_index: Index
    remote: PreparedList
    remote_index: Index

    def start(self, num_runs: int) -> Post:
        return self.agent.post(
            local=self.local.inner,
            local_index=self.local_index[:num_runs],
            remote=self.remote,
            remote_index=self.remote_index[:num_runs],
        )

    def damage(self, memory: torch.Tensor) -> None:
        """Change one byte in the middle of every run."""
        runs = self.local.runs
        for index in self.local_index.tolist():
            memory[runs.offset + index * runs.stride + runs.length // 2] ^= 0x5A


class _FaultyPost:
    def __init__(self, read: _Read, fault: Fault, memory: torch.Tensor) -> None:
        self._read = read
        self._fault = fault
        self._memory = memory
        self._due = time.monotonic() + fault.seconds
        self._inner: Post | None = None
        if fault.action in ("delay", "corrupt"):
            self._inner = read.start(len(read.local_index))
        elif fault.action == "partial":
            self._inner = read.start(len(read.local_index) // 2) if len(read.local_index) > 1 else None

    def poll(self) -> bool:
        if time.monotonic() < self._due:
            return False
        action = self._fault.action
        if action == "drop":
            raise TransferError("the READ is lost on purpose")
        if action == "late" and self._inner is None:
            self._inner = self._read.start(len(self._read.local_index))
        if self._inner is not None and not self._inner.poll():
            return False
        if action == "partial":
            raise TransferError("the READ breaks off on purpose")
        if action == "corrupt":
            self._read.damage(self._memory)
        return True

    def release(self) -> None:
        if self._inner is not None:
            self._inner.release()
