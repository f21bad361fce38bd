"""READs within one process: plain copies between the pools that share a ``LocalFabric``."""

import threading

import torch

from twopool.kv_transfer.agent import Post, PreparedList
from twopool.kv_transfer.layout import Index, StridedList
from twopool.protocol.errors import TransferError
from twopool.protocol.ids import Epoch
from twopool.protocol.messages import RankPool


class LocalFabric:
    """The pools of one process that may read from one another, by name. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, torch.Tensor] = {}

    def attach(self, name: str, pool: torch.Tensor) -> None:
        """``pool`` is flat uint8, on any device."""
        with self._lock:
            self._pools[name] = pool

    def detach(self, name: str) -> None:
        """From now on READs of this pool fail, as those from a killed process do."""
        with self._lock:
            self._pools.pop(name, None)

    def pool(self, name: str) -> torch.Tensor:
        with self._lock:
            pool = self._pools.get(name)
        if pool is None:
            raise TransferError(f"no pool {name} in this process")
        return pool


class LocalAgent:
    """A ``ReadAgent`` that copies inside ``post``. ``metadata`` is the name of its pool on the fabric."""

    def __init__(self, *, name: str, pool: torch.Tensor, fabric: LocalFabric) -> None:
        self.name = name
        self.metadata = name.encode()
        self._fabric = fabric
        self._memory: dict[int, torch.Tensor] = {}
        self.register(pool)
        fabric.attach(name, pool)

    def register(self, memory: torch.Tensor) -> None:
        self._memory[memory.data_ptr()] = memory

    def add_peer(self, pool: RankPool, epoch: Epoch) -> str:
        try:
            name = pool.agent_metadata.decode()
        except UnicodeDecodeError as error:
            raise TransferError(f"the peer's metadata is no pool's name: {error}") from error
        self._fabric.pool(name)
        return name

    def remove_peer(self, peer: str) -> None:
        pass

    def prepare_local(self, address: int, runs: StridedList) -> PreparedList:
        return _LocalList(self._memory[address], runs)

    def prepare_remote(self, peer: str, pool: RankPool, runs: StridedList) -> PreparedList:
        return _RemoteList(self._fabric, peer, runs)

    def post(self, *, local: PreparedList, local_index: Index, remote: PreparedList, remote_index: Index) -> Post:
        if not isinstance(local, _LocalList) or not isinstance(remote, _RemoteList):
            raise TypeError("these lists were prepared by another kind of agent")
        source = remote.rows()
        taken = source.index_select(0, _tensor(remote_index).to(source.device))
        target = local.rows
        target.index_copy_(0, _tensor(local_index).to(target.device, torch.int64), taken.to(target.device))
        return _LocalPost()

    def pump(self) -> None:
        pass


class _LocalList:
    def __init__(self, memory: torch.Tensor, runs: StridedList) -> None:
        self.rows = _rows(memory, runs)

    def release(self) -> None:
        pass


class _RemoteList:
    """Looks its pool up at every READ, so that one that left is missed."""

    def __init__(self, fabric: LocalFabric, name: str, runs: StridedList) -> None:
        self._fabric = fabric
        self._name = name
        self._runs = runs

    def rows(self) -> torch.Tensor:
        return _rows(self._fabric.pool(self._name), self._runs)

    def release(self) -> None:
        pass


class _LocalPost:
    def poll(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _tensor(index: Index) -> torch.Tensor:
    """A copy: ids that came in a message are read-only, which tensors cannot be."""
    return torch.from_numpy(index.copy())


def _rows(memory: torch.Tensor, runs: StridedList) -> torch.Tensor:
    """``[runs.count, runs.length]`` uint8 view of ``memory``."""
    end = runs.offset + (runs.count - 1) * runs.stride + runs.length
    if end > memory.numel():
        raise TransferError(f"runs up to byte {end} do not fit a pool of {memory.numel()} bytes")
    return memory.as_strided((runs.count, runs.length), (runs.stride, 1), runs.offset)
