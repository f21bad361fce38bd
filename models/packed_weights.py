"""Packed weights on disk: written once, mapped at the next start, which then packs nothing.

A file holds the bytes a native step computes with and, behind them, a seal over what they are and a sample of them. It
is written beside its place and renamed, so a reader sees all of it or none. Its name is a hash of all that the bytes
depend on: the weights, the library that packed them, the instruction set, the rank. Only files that nobody but this
user may write are mapped: they are computed with as they are.

Where the file system keeps files in huge pages (ext4 since Linux 6.16, XFS, and tmpfs if told to) the workers of a host
share one copy in memory; elsewhere each copies the file into huge pages of its own.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MIN_BYTES: Final = 32 * 1024**2
"""Less is packed as fast as it is mapped."""

_SUFFIX = ".packed"
_VERSION = b"twopool packed weights 1"
_SEAL_BYTES = hashlib.sha256().digest_size
_SAMPLE_BYTES = 4096
_SAMPLE_EVERY_BYTES = 2 * 1024**2
_WRITE_BYTES = 8 * 1024**2
_SPARE_BYTES = 1024**3
_NICENESS = 10
_MADV_POPULATE_READ = 22


@dataclass(frozen=True)
class PackedFile:
    """A sealed file, mapped: ``image`` is what was written, uint8. It stays mapped as long as a tensor of it lives."""

    image: Tensor
    in_huge_pages: bool


class PackedStore:
    """The packed weights of ``folder``, of which at most ``limit_bytes`` are kept: the least recently used go first."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    def open(self, key: str, num_bytes: int) -> PackedFile | None:
        """The image of ``key``; None, in words in the log, where there is none that can be trusted."""
        path = self._path(key)
        try:
            _check_ownership(os.stat(self._folder), self._folder)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except (OSError, _UntrustedError) as error:
            logger.warning("packing the weights: packed ones cannot be used (%s)", error)
            return None
        try:
            status = os.fstat(descriptor)
            _check_ownership(status, path)
            if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes + _SEAL_BYTES:
                raise _UntrustedError(f"{path} is not a file of {num_bytes + _SEAL_BYTES} bytes")
            memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            image = torch.frombuffer(memory, dtype=torch.uint8)
            in_huge_pages = _bring_in(memory, image)
            if os.pread(descriptor, _SEAL_BYTES, num_bytes) != _seal(key, [image]):
                raise _UntrustedError(f"the seal of {path} does not fit what is in it")
            os.utime(path)  # used now
        except (OSError, ValueError, _UntrustedError) as error:
            logger.warning("packing the weights: packed ones cannot be used (%s)", error)
            return None
        finally:
            os.close(descriptor)
        return PackedFile(image, in_huge_pages)

    def keep_later(self, key: str, parts: Sequence[Tensor]) -> threading.Thread | None:
        """Write an image (its parts, uint8, one after the other) from a thread; nobody may change them until it ends.

        None where it would not be kept.
        """
        num_bytes = sum(part.numel() for part in parts)
        if not MIN_BYTES <= num_bytes <= self._limit_bytes:
            return None
        thread = threading.Thread(target=self._keep, args=(key, parts), name="packed-weights", daemon=True)
        thread.start()
        return thread

    def _keep(self, key: str, parts: Sequence[Tensor]) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_ownership(os.stat(self._folder), self._folder)
            with (self._folder / f"{key}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._write(key, parts)
        except BlockingIOError:
            logger.debug("another process writes the same packed weights")
        except (OSError, _UntrustedError) as error:
            logger.warning("the packed weights are not kept for the next start (%s)", error)

    def _write(self, key: str, parts: Sequence[Tensor]) -> None:
        """The lock is held: a temporary file of this key is one whose writer died."""
        num_bytes = sum(part.numel() for part in parts)
        for stale in self._folder.glob(f"{key}.tmp-*"):
            stale.unlink(missing_ok=True)
        self._make_room(num_bytes, besides=self._path(key))
        if shutil.disk_usage(self._folder).free < num_bytes + _SPARE_BYTES:
            raise OSError(f"{self._folder} has too little room for {num_bytes} bytes")
        descriptor, name = tempfile.mkstemp(prefix=f"{key}.tmp-", dir=self._folder)
        try:
            for part in parts:
                _write_all(descriptor, part.numpy().data)
            _write_all(descriptor, memoryview(_seal(key, parts)))
            os.fsync(descriptor)
            # The pages this was written from are small ones: whoever maps the file reads it into huge ones.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            Path(name).rename(self._path(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        logger.info("kept %d MiB of packed weights for the next start", num_bytes >> 20)

    def _make_room(self, num_bytes: int, *, besides: Path) -> None:
        """Remove what was used longest ago, until ``num_bytes`` more are within the limit."""
        kept: list[tuple[float, int, Path]] = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                kept.append((status.st_mtime, status.st_size, path))
        room = self._limit_bytes - sum(size for _, size, path in kept if path != besides)
        for _, size, path in sorted(kept):
            if room >= num_bytes:
                return
            if path != besides:
                path.unlink(missing_ok=True)  # whoever has it mapped keeps it
                path.with_suffix(".lock").unlink(missing_ok=True)
                room += size

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"


class _UntrustedError(Exception):
    """What is there may not be computed with."""


def _check_ownership(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _UntrustedError(f"others than this user may write {path}")


def _seal(key: str, parts: Sequence[Tensor]) -> bytes:
    """Over the key, the size and a sample of the image, which may lie in several parts."""
    digest = hashlib.sha256(_VERSION + key.encode())
    place = 0
    for part in parts:
        for start in range(-place % _SAMPLE_EVERY_BYTES, part.numel(), _SAMPLE_EVERY_BYTES):
            digest.update(part[start : start + _SAMPLE_BYTES].numpy().data)
        place += part.numel()
    digest.update(str(place).encode())
    return digest.digest()


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content[:_WRITE_BYTES]) :]


def _bring_in(memory: mmap.mmap, image: Tensor) -> bool:
    """Read a mapped file, in huge pages where that goes; whether nearly all of it is in huge pages now."""
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
        # Through ctypes, which releases the GIL meanwhile. Linux before 5.14 has no such advice: use reads it then.
        _libc().madvise(image.data_ptr(), image.numel(), _MADV_POPULATE_READ)
    return _huge_bytes(image.data_ptr()) >= image.numel() * 9 // 10


def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _huge_bytes(address: int) -> int:
    """How much of the mapping at ``address`` is mapped in huge pages of its file."""
    inside = False
    try:
        with Path("/proc/self/smaps").open(encoding="ascii") as lines:
            for line in lines:
                first, _, rest = line.partition("-")
                if rest and ":" not in first:
                    inside = int(first, 16) == address
                elif inside and line.startswith("FilePmdMapped:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):  # not Linux
        pass
    return 0
