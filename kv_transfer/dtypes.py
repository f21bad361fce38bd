"""The numbers KV is kept in, and how one kind becomes another."""

from typing import Final

import torch

from twopool.protocol.errors import KvConversionError
from twopool.protocol.geometry import KvDtype

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_SERIAL_ELEMENTS = 32 * 1024
"""Torch takes threads of its own for more than that, which on a CPU get in the way of those that compute."""


def most_at_once(numbers: torch.Tensor) -> int:
    """Numbers to convert in one operation."""
    return _SERIAL_ELEMENTS if numbers.device.type == "cpu" else max(numbers.numel(), 1)


def convert_some(numbers: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """Raises ``KvConversionError`` where a number is too large for ``target``."""
    converted = numbers.to(target)
    if target == torch.float16 and bool((converted.isinf() & numbers.isfinite()).any()):
        raise KvConversionError("KV read from a peer has numbers too large for float16")
    return converted


def convert(numbers: torch.Tensor, dtype: KvDtype) -> torch.Tensor:
    """``numbers`` in ``dtype``, same shape, contiguous, rounded as a reader of that dtype rounds them."""
    flat = numbers.contiguous().view(-1)
    parts = torch.split(flat, most_at_once(flat))
    return torch.cat([part.to(TORCH_DTYPES[dtype]) for part in parts]).view(numbers.shape)
