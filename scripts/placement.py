"""Which CPUs each worker of one machine computes on. Pure functions of what the machine has."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


@dataclass(frozen=True, kw_only=True)
class CpuShare:
    """One worker's part of the machine: ``cpus`` to be pinned to (None: any) and each rank's compute threads."""

    cpus: tuple[int, ...] | None
    num_threads: int


def share_cpus(cpus: Sequence[int], ranks: Sequence[int], *, pin: bool) -> tuple[CpuShare, ...]:
    """Disjoint shares of ``cpus`` for workers of so many ``ranks``, equal for each rank.

    No pinning where there are fewer CPUs than ranks. Workers never share a core by choice: a compute step ends in
    barriers whose threads spin, and two workers that spin on the same core slow each other by one to two orders of
    magnitude. The router is not pinned: it takes what is idle.
    """
    each = len(cpus) // sum(ranks)
    if each == 0:
        return (CpuShare(cpus=None, num_threads=1),) * len(ranks)
    ordered = sorted(cpus)
    ends = [each * sum(ranks[: index + 1]) for index in range(len(ranks))]
    return tuple(
        CpuShare(cpus=tuple(ordered[end - each * count : end]) if pin else None, num_threads=each)
        for end, count in zip(ends, ranks, strict=True)
    )


def computes_on_cpu(device: str, gpu_devices: Sequence[Path] = _GPU_DEVICES) -> bool:
    """Whether a worker with ``--device device`` will compute on the CPU, told without importing torch."""
    return device == "cpu" or (device == "auto" and not any(path.exists() for path in gpu_devices))
