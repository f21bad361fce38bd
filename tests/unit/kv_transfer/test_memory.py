"""Pools that other processes of this host may map."""

import ctypes
import os
import subprocess
import sys

import msgspec
import pytest
from msgspec.structs import replace

from twopool.kv_transfer.memory import HUGE_PAGE_BYTES, MappedPool, allocate_host_pool, shared_pool
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
