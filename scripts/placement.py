"""Which CPUs each worker of one machine computes on. Pure functions of what the machine has."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


@dataclass(frozen=True, kw_only=True)
class CpuShare:
    """One worker's part of the machine: ``cpus`` to be pinned to (None: any) and how many compute threads to run."""

    cpus: tuple[int, ...] | None
    num_threads: int


def share_cpus(cpus: Sequence[int], num_workers: int, *, pin: bool) -> tuple[CpuShare, ...]:
    """Equal, disjoint shares of ``cpus``, one a worker; no pinning where there are fewer CPUs than workers.

    Workers never share a core by choice: a compute step ends in barriers whose threads spin, and two workers that spin
    on the same core slow each other by one to two orders of magnitude. The router is not pinned: it takes what is idle.
    """
    each = len(cpus) // num_workers
    if each == 0:
        return (CpuShare(cpus=None, num_threads=1),) * num_workers
    ordered = sorted(cpus)
    return tuple(
        CpuShare(cpus=tuple(ordered[index * each : (index + 1) * each]) if pin else None, num_threads=each)
        for index in range(num_workers)
    )


def computes_on_cpu(device: str, gpu_devices: Sequence[Path] = _GPU_DEVICES) -> bool:
    """Whether a worker with ``--device device`` will compute on the CPU, told without importing torch."""
    return device == "cpu" or (device == "auto" and not any(path.exists() for path in gpu_devices))
