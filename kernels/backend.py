"""Which implementation serves a tensor: Triton on GPUs (CUDA and HIP alike), torch elsewhere.

With Triton's own switch TRITON_INTERPRET=1 the Triton kernels run interpreted on CPU tensors too: that is how their
arithmetic is tested on a machine without a GPU.
"""

import os

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Read once: Triton itself looks at the variable when a kernel is defined."""


def uses_triton(tensor: Tensor) -> bool:
    """Whether ``kernels.gpu`` serves this tensor. Callers import it only then: Triton costs CPU workers nothing."""
    return tensor.is_cuda or INTERPRETED


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on ``device``; on a GPU by a queued copy from pinned memory, on a CPU the same memory where it can be.

    The caller changes the array no more.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        # A copy from pageable memory would wait for the device. torch keeps the pinned buffer until the copy is over.
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
