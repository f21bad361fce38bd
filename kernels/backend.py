"""Which implementation serves a tensor: Triton on GPUs (CUDA and HIP alike), torch elsewhere.

With Triton's own switch TRITON_INTERPRET=1 the Triton kernels run interpreted on CPU tensors too: that is how their
arithmetic is tested on a machine without a GPU.
"""

import os

from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Read once: Triton itself looks at the variable when a kernel is defined."""


def uses_triton(tensor: Tensor) -> bool:
    """Whether ``kernels.gpu`` serves this tensor. Callers import it only then: Triton costs CPU workers nothing."""
    return tensor.is_cuda or INTERPRETED
