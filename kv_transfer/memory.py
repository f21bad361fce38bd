"""Host memory for KV pools, laid out so that copying it is fast and a process of the same host may map it."""

import ctypes
import fcntl
import mmap
import os
import secrets
import select
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import torch

from twopool.protocol.messages import SharedPool

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
FILE_PREFIX: Final = "twopool-kv-"

_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_PROT_NONE = 0

_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
_SETTLING_NICENESS = 10
_SETTLING_SHARE = 0.2

_shared: Final[dict[int, SharedPool]] = {}
"""Every memory of this process that others may map, by address: it lives as long as the process."""


def allocate_host_pool(num_bytes: int, *, shared: bool = False, settled: bool = True) -> torch.Tensor:
    """``[num_bytes]`` uint8 zeros, page-aligned, in huge pages where the kernel grants them, every page touched.

    A READ on one host pins the source's pages one by one: with 4 KiB pages that takes as long as the copy itself.
    Pages that were never written cost the first READ that lands in them a fault each.

    ``shared`` memory can be mapped by processes of the same user on this host, which copies without any of that. The
    kernel gives such memory no huge pages by itself (``shmem_enabled`` is ``never`` as a rule), but when it is asked
    to put them together (Linux 6.1 or later). Where the system has no such memory it is private after all.

    All of that takes seconds a GiB where the system has to get the memory first: not ``settled``, the memory has no
    page at all until ``settle_pool`` or ``settle_pool_later``, or use, gives it some.
    """
    size = max(1, -(-num_bytes // HUGE_PAGE_BYTES)) * HUGE_PAGE_BYTES
    mapped = _map_shared(size) if shared else None
    if mapped is not None:
        address, description = mapped
        _shared[address] = description
        memory: mmap.mmap | ctypes.Array[ctypes.c_uint8] = _bytes_at(address, size)
    else:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
    pool = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)
    # Hardware pins a pool's pages when it is registered: they cannot be put together any more.
    if settled or _RDMA_DEVICES.is_dir():
        settle_pool(pool)
    return pool


def settle_pool(pool: torch.Tensor) -> None:
    """Give all of a pool of ``allocate_host_pool`` its pages, now; what is in it stays."""
    for _ in _settling(pool):
        pass


def settle_pool_later(pool: torch.Tensor) -> threading.Thread:
    """``settle_pool`` in a thread beside a worker that serves: a huge page at a time, a fifth of one CPU at most.

    The kernel lets nobody see a range while it is put together, and does not touch one whose pages a READ has pinned.
    """
    thread = threading.Thread(target=_settle_slowly, args=(pool,), name="kv-pool-pages", daemon=True)
    thread.start()
    return thread


def shared_pool(pool: torch.Tensor) -> SharedPool | None:
    """How others on this host may map ``pool``; ``None`` where they may not."""
    return _shared.get(pool.data_ptr())


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
            self.address, self._size = _map_for_reading(shared, num_bytes)
        except BaseException:
            os.close(self._process)
            raise
        self._ended = select.poll()
        self._ended.register(self._process, select.POLLIN)
        self.num_bytes = num_bytes

    @property
    def is_alive(self) -> bool:
        return not self._ended.poll(0)

    def close(self) -> None:
        """Unmap it; nobody may be reading."""
        _libc().munmap(self.address, self._size)
        os.close(self._process)


def _map_shared(size: int) -> tuple[int, SharedPool] | None:
    if not boot_id() or not hasattr(os, "memfd_create"):
        return None
    token = secrets.token_hex(16)
    try:
        # Not inherited by children: it stays open in this process, for others to open through /proc.
        fd = os.memfd_create(FILE_PREFIX + token, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        # A file that shrank would kill whoever reads its mapping.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        address = _map_aligned(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        return None
    return address, SharedPool(boot_id=boot_id(), pid=os.getpid(), fd=fd, token=token)


def _settle_slowly(pool: torch.Tensor) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _SETTLING_NICENESS)
    begin_s = time.monotonic()
    for _ in _settling(pool):
        time.sleep((time.monotonic() - begin_s) * (1 / _SETTLING_SHARE - 1))
        begin_s = time.monotonic()


def _settling(pool: torch.Tensor) -> Iterator[None]:
    """Yields after every huge page. Never writes: the pool may be in use."""
    start, end = pool.data_ptr(), pool.data_ptr() + pool.nbytes
    end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
    libc, collapses = _libc(), start in _shared
    busy: list[int] = []
    for address in range(start, end, HUGE_PAGE_BYTES):
        if not collapses:
            libc.madvise(address, min(HUGE_PAGE_BYTES, end - address), _MADV_POPULATE_WRITE)
        elif not _collapse(address):
            busy.append(address)
        yield
    for address in busy:  # pinned by a READ at that moment, as a rule; where the kernel cannot, they stay small ones
        if not _collapse(address):
            libc.madvise(address, min(HUGE_PAGE_BYTES, end - address), _MADV_POPULATE_WRITE)
        yield


def _collapse(address: int) -> bool:
    """Put a huge page under a range of shared memory; whether the kernel did."""
    libc = _libc()
    libc.madvise(address, mmap.PAGESIZE, _MADV_POPULATE_WRITE)  # only ranges with a page in use are put together
    return bool(libc.madvise(address, HUGE_PAGE_BYTES, _MADV_COLLAPSE) == 0)


def _map_for_reading(shared: SharedPool, num_bytes: int) -> tuple[int, int]:
    """Address and size of the mapping."""
    path = f"/proc/{shared.pid}/fd/{shared.fd}"
    # In another container these numbers mean something else.
    if os.readlink(path).split(" ")[0] != f"/memfd:{FILE_PREFIX}{shared.token}":
        raise OSError("another file has the pool's number")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or not 0 < num_bytes <= size:
            raise OSError("the pool's file is too short, or may become so")
        return _map_aligned(fd, size, mmap.PROT_READ), size
    finally:
        os.close(fd)


def _map_aligned(fd: int, size: int, protection: int) -> int:
    """Map all of ``fd`` where huge pages of the file can be huge pages of the mapping; the address."""
    libc = _libc()
    room = size + HUGE_PAGE_BYTES
    start = _checked(libc.mmap(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
    address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _checked(libc.mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0))
    except OSError:
        libc.munmap(start, room)
        raise
    if address > start:
        libc.munmap(start, address - start)
    end = -(-(address + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    if start + room > end:
        libc.munmap(end, start + room - end)
    return address


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"the pool cannot be mapped: {os.strerror(number)}")
    return address


def _bytes_at(address: int, size: int) -> "ctypes.Array[ctypes.c_uint8]":
    return (ctypes.c_uint8 * size).from_address(address)


@cache
def _libc() -> ctypes.CDLL:
    """The C library: Python's ``mmap`` cannot choose an address."""
    library = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes, library.mmap.restype = [pointer, size, number, number, number, ctypes.c_int64], pointer
    library.munmap.argtypes, library.munmap.restype = [pointer, size], number
    library.madvise.argtypes, library.madvise.restype = [pointer, size, number], number
    return library
