"""READs through NIXL: the only module that imports it.

The agent has no progress thread (NIXL's spins on a core for ever and halves the speed of READs): whoever owns the
agent calls ``pump`` every millisecond or so while peers may connect or read.
"""

import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from twopool.kv_transfer.agent import Post, PreparedList
from twopool.kv_transfer.layout import Index, StridedList
from twopool.kv_transfer.ucx import apply_settings, check_names, in_words
from twopool.protocol.errors import ConfigError, TransferError
from twopool.protocol.geometry import KvGeometry, MemoryKind
from twopool.protocol.ids import Epoch
from twopool.protocol.messages import RankPool

_SEGMENT: dict[MemoryKind, str] = {"host": "DRAM", "device": "VRAM"}
_LOCAL_SIDE = "NIXL_INIT_AGENT"

_ALIVE: "list[NixlAgent]" = []
"""Every agent and its memory, kept as long as the process: unmapping a pool that a peer is reading over TCP kills the
owner with SIGSEGV, and no owner can know that nobody is."""


class NixlAgent:
    """A ``ReadAgent`` on one NIXL agent with one backend. ``name`` must be unique among all peers and lives."""

    def __init__(
        self,
        *,
        name: str,
        pool: torch.Tensor,
        geometry: KvGeometry,
        backend: str,
        ucx: Mapping[str, str],
    ) -> None:
        """``pool`` (flat uint8) is what peers may read; ``ucx`` are settings of UCX by name, ``UCX_TLS`` and others.

        Raises ``ConfigError`` when the backend is missing, cannot start with these settings or has none of that name.
        """
        apply_settings(ucx, os.environ)
        self._api = _import_api()
        self._errors = _error_types(self._api)
        self.name = name
        self._memory: list[torch.Tensor] = []
        self._segment = _SEGMENT[geometry.memory]
        self._device = geometry.device_index if geometry.memory == "device" else 0
        failures: tuple[type[Exception], ...] = (*self._errors, TransferError, RuntimeError, KeyError)
        try:
            config = self._api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = self._api.nixl_agent(name, config)
            self._agent.create_backend(backend)
            self.register(pool)
            # Taken now: peers need not know of memory registered later, which is no pool.
            self.metadata: bytes = self._agent.get_agent_metadata()
        except failures as error:
            raise ConfigError(
                f"NIXL backend {backend} does not start with {in_words(ucx, os.environ)}: {error!r}",
                param="nixl_backend",
            ) from error
        if backend == "UCX":
            check_names(ucx)
        _ALIVE.append(self)

    def register(self, memory: torch.Tensor) -> None:
        with self._translated("register memory"):
            self._agent.register_memory([(memory.data_ptr(), memory.nbytes, self._device, "")], self._segment)
        self._memory.append(memory)

    def add_peer(self, pool: RankPool, epoch: Epoch) -> str:
        with self._translated("load the peer's metadata"):
            name = self._agent.add_remote_agent(pool.agent_metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, peer: str) -> None:
        with self._translated("forget the peer"):
            self._agent.remove_remote_agent(peer)

    def prepare_local(self, address: int, runs: StridedList) -> PreparedList:
        with self._translated("prepare the local list"):
            handle = self._agent.prep_xfer_dlist(_LOCAL_SIDE, _rows(address, runs, self._device), self._segment)
            return _NixlList(handle)

    def prepare_remote(self, peer: str, pool: RankPool, runs: StridedList) -> PreparedList:
        geometry = pool.geometry
        device = geometry.device_index if geometry.memory == "device" else 0
        with self._translated("prepare the peer's list"):
            rows = _rows(pool.base_address, runs, device)
            return _NixlList(self._agent.prep_xfer_dlist(peer, rows, _SEGMENT[geometry.memory]))

    def post(self, *, local: PreparedList, local_index: Index, remote: PreparedList, remote_index: Index) -> Post:
        if not isinstance(local, _NixlList) or not isinstance(remote, _NixlList):
            raise TypeError("these lists were prepared by another kind of agent")
        with self._translated("post a READ"):
            handle = self._agent.make_prepped_xfer("READ", local.handle, local_index, remote.handle, remote_index)
            # On one host this copies (cross memory attach) before it returns, without the GIL.
            return _NixlPost(self, handle, self._agent.transfer(handle))

    def state(self, handle: Any) -> str:
        """ "DONE" or "PROC"; raises ``TransferError`` on everything else."""
        with self._translated("read"):
            return str(self._agent.check_xfer_state(handle))

    def pump(self) -> None:
        with self._translated("progress"):
            self._agent.get_new_notifs()

    def _translated(self, action: str) -> "_Translated":
        return _Translated(action, self._errors)


class _NixlList:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def release(self) -> None:
        self.handle.release()


class _NixlPost:
    def __init__(self, agent: NixlAgent, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def poll(self) -> bool:
        if self._state == "PROC":
            self._state = self._agent.state(self._handle)
        if self._state not in ("DONE", "PROC"):
            raise TransferError(f"NIXL could not read: {self._state}")
        return self._state == "DONE"

    def release(self) -> None:
        self._handle.release()


class _Translated:
    """Turns the binding's exceptions, which have no base of their own, into ``TransferError``."""

    def __init__(self, action: str, errors: tuple[type[Exception], ...]) -> None:
        self._action = action
        self._errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, self._errors):
            raise TransferError(f"NIXL could not {self._action}: {error}") from error


def _rows(address: int, runs: StridedList, device: int) -> Any:
    """NIXL's strided list: ``[1, 5]`` uint64 (address, length, device, stride, count)."""
    return np.array([[address + runs.offset, runs.length, device, runs.stride, runs.count]], dtype=np.uint64)


def _import_api() -> ModuleType:
    """Imported late: NIXL's logger and UCX read the environment while they load."""
    import nixl._api as api

    module: ModuleType = api
    return module


def _error_types(api: ModuleType) -> tuple[type[Exception], ...]:
    bindings = vars(api)["nixlBind"]
    return tuple(
        value
        for name, value in vars(bindings).items()
        if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
    )
