"""What the kernels need to know of the device they are compiled for, and every specialisation they may ask for."""

from dataclasses import dataclass
from typing import Any

import torch

TRITON_TYPES: dict[torch.dtype, str] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

IS_AMD = torch.version.hip is not None

EXACT = {"enable_fp_fusion": False}
"""Options of every launch: whether a multiply and an add are rounded once or twice is written in the kernel (`tl.fma`),
not left to the optimiser, so that two kernels with the same formula give the same bits."""


@dataclass(frozen=True)
class Specialisation:
    """One compilation of one kernel, as a launch on a device would ask for it."""

    kernel: Any
    """the ``triton.jit`` function"""
    signature: dict[str, str]
    """run-time parameter -> Triton type; pointers are taken to be 16-byte aligned, as torch's are, but for those the
    kernel is not specialised on"""
    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        constants = ",".join(f"{key}={value}" for key, value in self.constants.items())
        types = ",".join(sorted({kind for kind in self.signature.values() if kind.startswith("*")}))
        return f"{self.kernel.__name__}[{types};{constants}]"


def next_power_of_two(value: int) -> int:
    """The smallest power of two not below ``value`` (at least 1)."""
    return 1 << max(0, value - 1).bit_length()
