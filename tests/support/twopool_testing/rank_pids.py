"""The processes of a tensor-parallel worker, and the proof that nothing of them is left."""

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_MAPPED = re.compile(r" (\d+) +/memfd:twopool-(\w+)")


def rank_pids(leader_pid: int) -> list[int]:
    """The worker's other ranks, in the order they were started."""
    children = psutil.Process(leader_pid).children()
    ranks = [child for child in children if "twopool.engine.rank_process" in " ".join(child.cmdline())]
    return [child.pid for child in sorted(ranks, key=lambda child: (child.create_time(), child.pid))]


def shared_inodes(pids: Iterable[int]) -> set[str]:
    """The shared memory of these processes, by inode: their own KV pools, not those of peers, and where they meet."""
    found = set()
    for pid in pids:
        found |= {match[1] for match in _MAPPED.finditer(_maps(pid)) if match[2] == "ranks"}
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(fd).startswith("/memfd:twopool-kv-"):
                    found.add(str(fd.stat().st_ino))
    return found


def left_over(pids: Iterable[int], inodes: Iterable[str]) -> list[str]:
    """Which of the processes run, and which others still hold the memory; in words."""
    wanted = set(inodes)
    running = [f"process {pid}" for pid in pids if _is_running(pid)]
    holding = [
        f"memory of inode {inode} in process {path.name}"
        for path in Path("/proc").iterdir()
        if path.name.isdecimal()
        for inode in {match[1] for match in _MAPPED.finditer(_maps(int(path.name)))} & wanted
    ]
    named = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "twopool" in name]
    return running + holding + named


def assert_gone(pids: Iterable[int], inodes: Iterable[str], *, within_s: float) -> None:
    """Within ``within_s`` no process of these runs and nobody holds their memory."""
    pids, inodes = list(pids), list(inodes)
    deadline_s = time.monotonic() + within_s
    while left := left_over(pids, inodes):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"left after {within_s:g} s: {', '.join(left)}")
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except (OSError, ValueError):
        return ""
