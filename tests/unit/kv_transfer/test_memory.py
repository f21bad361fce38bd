"""Pools that other processes of this host may map."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from twopool.kv_transfer.memory import HUGE_PAGE_BYTES, MappedPool, allocate_host_pool, settle_pool_later, shared_pool
from twopool.protocol.messages import SharedPool

SIZE = 3 * 1024 * 1024 + 5


def test_private_memory_is_not_shared() -> None:
    assert shared_pool(allocate_host_pool(SIZE)) is None


def test_a_mapping_shows_what_is_written_later() -> None:
    pool = allocate_host_pool(SIZE, shared=True)
    shared = shared_pool(pool)
    assert shared is not None and shared.pid == os.getpid() and not pool.any()
    mapped = MappedPool(shared, SIZE)
    pool[-1] = 7
    assert mapped.address % HUGE_PAGE_BYTES == pool.data_ptr() % HUGE_PAGE_BYTES == 0, "else no huge page fits"
    assert ctypes.string_at(mapped.address, SIZE)[-1] == 7 and mapped.is_alive
    mapped.close()


@pytest.mark.parametrize("change", [{"boot_id": "other"}, {"token": "0" * 32}, {"fd": 0}, {"pid": 2**22}])
def test_what_is_not_the_pool_is_not_mapped(change: dict[str, object]) -> None:
    shared = shared_pool(allocate_host_pool(SIZE, shared=True))
    assert shared is not None
    with pytest.raises(OSError):
        MappedPool(replace(shared, **change), SIZE)


def test_a_pool_larger_than_its_file_is_not_mapped() -> None:
    shared = shared_pool(allocate_host_pool(SIZE, shared=True))
    assert shared is not None
    with pytest.raises(OSError, match="short"):
        MappedPool(shared, 5 * 1024 * 1024)


def test_the_end_of_the_owner_is_seen_and_its_memory_stays() -> None:
    program = (
        "import sys, msgspec\n"
        "from twopool.kv_transfer.memory import allocate_host_pool, shared_pool\n"
        f"pool = allocate_host_pool({SIZE}, shared=True).fill_(9)\n"
        "print(msgspec.json.encode(shared_pool(pool)).decode(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    mapped = MappedPool(msgspec.json.decode(owner.stdout.readline(), type=SharedPool), SIZE)
    assert mapped.is_alive
    owner.communicate(timeout=20)
    assert not mapped.is_alive
    assert ctypes.string_at(mapped.address, SIZE) == b"\t" * SIZE
    mapped.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_pool_gets_its_pages_while_it_is_in_use(shared: bool) -> None:
    pool = allocate_host_pool(SIZE, shared=shared, settled=False)
    assert _resident_bytes(pool) == 0
    pool[5], pool[-1] = 6, 7
    description = shared_pool(pool)
    mapped = None if description is None else MappedPool(description, SIZE)
    thread = settle_pool_later(pool)
    thread.join(timeout=30)
    assert not thread.is_alive() and _resident_bytes(pool) >= SIZE
    assert [*pool[[5, -1]].tolist(), int(pool.sum(dtype=torch.int64))] == [6, 7, 13]
    assert (mapped is not None) == shared
    if mapped is not None:
        pool[6] = 8
        assert ctypes.string_at(mapped.address, SIZE)[5:7] == b"\6\10", "the mapping shows the pages it has now"
        mapped.close()


def test_writers_lose_nothing_while_pages_are_put_together() -> None:
    pool = allocate_host_pool(8 * HUGE_PAGE_BYTES, shared=True, settled=False)
    thread = settle_pool_later(pool)
    rounds = 0
    while thread.is_alive() or rounds < 3:
        rounds += 1
        pool[::4096] = rounds % 250
        assert int(pool[::4096].min()) == int(pool[::4096].max()) == rounds % 250
    assert int(pool.count_nonzero()) in (0, pool.numel() // 4096)


def _resident_bytes(pool: torch.Tensor) -> int:
    """Of the mapping that a pool is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(word, 16) for word in line.split(" ", 1)[0].split("-"))
            inside = first <= pool.data_ptr() < last
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the pool is nowhere")
