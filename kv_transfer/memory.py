"""Host memory for KV pools, laid out so that copying it is fast and a process of the same host may map it."""

import fcntl
import mmap
import os
import secrets
import select
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch

from twopool.protocol.messages import SharedPool

_HUGE_PAGE = 2 * 1024 * 1024
FILE_PREFIX: Final = "twopool-kv-"

_shared: Final[dict[int, tuple[mmap.mmap, SharedPool]]] = {}
"""Every memory of this process that others may map, by address: it lives as long as the process."""


def allocate_host_pool(num_bytes: int, *, shared: bool = False) -> torch.Tensor:
    """``[num_bytes]`` uint8 zeros, page-aligned, in huge pages where the kernel grants them, every page touched.

    A READ on one host pins the source's pages one by one: with 4 KiB pages that takes as long as the copy itself.
    Pages that were never written cost the first READ that lands in them a fault each.

    ``shared`` memory can be mapped by processes of the same user on this host, which copies without any of that; the
    kernel grants it huge pages by a setting of its own, which is often off. Where the system has no such memory it is
    private after all.
    """
    size = max(1, -(-num_bytes // _HUGE_PAGE)) * _HUGE_PAGE
    mapped = _map_shared(size) if shared else None
    memory = mapped[0] if mapped else mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    pool = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).zero_()
    if mapped:
        _shared[pool.data_ptr()] = mapped
    return pool


def shared_pool(pool: torch.Tensor) -> SharedPool | None:
    """How others on this host may map ``pool``; ``None`` where they may not."""
    mapped = _shared.get(pool.data_ptr())
    return mapped[1] if mapped else None


@cache
def boot_id() -> str:
    """The same for all processes on one running kernel, another on every other; empty where it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class MappedPool:
    """A peer's pool of ``num_bytes``, mapped for reading at ``address``.

    A mapping outlives the process it came from: ``is_alive`` says whether that still runs.
    """

    def __init__(self, shared: SharedPool, num_bytes: int) -> None:
        """Raises ``OSError`` where this host, or this user, cannot see the pool."""
        if not shared.boot_id or shared.boot_id != boot_id():
            raise OSError("the pool is on another host")
        self._process = os.pidfd_open(shared.pid)
        try:
            self._memory = _map_for_reading(shared, num_bytes)
        except BaseException:
            os.close(self._process)
            raise
        self._ended = select.poll()
        self._ended.register(self._process, select.POLLIN)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self.num_bytes = num_bytes

    @property
    def is_alive(self) -> bool:
        return not self._ended.poll(0)

    def close(self) -> None:
        """Unmap it; nobody may be reading."""
        del self._bytes
        self._memory.close()
        os.close(self._process)


def _map_shared(size: int) -> tuple[mmap.mmap, SharedPool] | None:
    if not boot_id() or not hasattr(os, "memfd_create"):
        return None
    token = secrets.token_hex(16)
    try:
        # Not inherited by children: it stays open in this process, for others to open through /proc.
        fd = os.memfd_create(FILE_PREFIX + token, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        # A file that shrank would kill whoever reads its mapping.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    except OSError:
        return None
    return memory, SharedPool(boot_id=boot_id(), pid=os.getpid(), fd=fd, token=token)


def _map_for_reading(shared: SharedPool, num_bytes: int) -> mmap.mmap:
    path = f"/proc/{shared.pid}/fd/{shared.fd}"
    # In another container these numbers mean something else.
    if os.readlink(path).split(" ")[0] != f"/memfd:{FILE_PREFIX}{shared.token}":
        raise OSError("another file has the pool's number")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < num_bytes:
            raise OSError("the pool's file is too short, or may become so")
        return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
