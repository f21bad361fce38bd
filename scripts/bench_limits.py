"""What this machine can do at most: arithmetic from registers, reading and copying memory; a benchmark's yardstick.

The loops are in bench_limits.cpp, compiled for this CPU when they are asked for.
"""

import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_name("bench_limits.cpp")
_STEPS: Final = 20_000_000
_TILE_STEPS: Final = 2_000_000
_BYTES_A_THREAD: Final = 256 * 1024**2
_REPEATS: Final = 5


@dataclass(frozen=True)
class Limits:
    """Medians over repetitions, of ``num_threads`` threads together."""

    num_threads: int
    kind: str
    """the instructions of ``vector_flops``"""
    vector_flops: float
    tile_flops: float
    """by AMX in bf16; 0 where there is none"""
    read_bytes_per_s: float
    copy_bytes_per_s: float
    """read plus written"""


def measure_limits(num_threads: int) -> Limits | None:
    """This machine's limits; None without a C++ compiler. Takes some seconds."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="twopool-limits-") as folder:
        library = Path(folder) / "limits.so"
        command = [compiler, "-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread", str(_SOURCE)]
        if subprocess.run([*command, "-o", str(library)], check=False).returncode != 0:
            return None
        return _measure(ctypes.CDLL(str(library)), num_threads)


def _measure(library: ctypes.CDLL, num_threads: int) -> Limits:
    library.limits_kind.restype = ctypes.c_char_p
    kind: bytes = library.limits_kind()

    def median(name: str, amount: int) -> float:
        function: Callable[[int, ctypes.c_int64], float] = getattr(library, name)
        function.restype = ctypes.c_double  # type: ignore[attr-defined]
        return statistics.median(function(num_threads, ctypes.c_int64(amount)) for _ in range(_REPEATS))

    return Limits(
        num_threads=num_threads,
        kind=kind.decode(),
        vector_flops=median("limits_flops", _STEPS),
        tile_flops=median("limits_tile_flops", _TILE_STEPS) if _may_use_tiles() else 0.0,
        read_bytes_per_s=median("limits_read", _BYTES_A_THREAD),
        copy_bytes_per_s=median("limits_copy", _BYTES_A_THREAD),
    )


def _may_use_tiles() -> bool:
    """Linux asks a process to request AMX's registers before it touches them."""
    arch_prctl, req_xcomp_perm, tile_data = 158, 0x1023, 18
    return int(ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, req_xcomp_perm, tile_data)) == 0
