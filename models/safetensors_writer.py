"""Writing bf16 safetensors without torch, one piece of a tensor at a time.

``safetensors.serialize_file`` wants every tensor in memory at once; a 7B model would need 14 GB for it. The format is
a little-endian u64 header length, a JSON header and the raw bytes, so a stream is easily written.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

BF16_BYTES = 2


@dataclass(frozen=True)
class TensorHeader:
    """Name and shape of one bf16 tensor, in the order it will be written."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_values * BF16_BYTES


def to_bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bf16 bit patterns of fp32 ``values`` (same shape), rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Adding 0x7fff plus the lowest kept bit carries into the upper half exactly when rounding up is right.
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    # The carry would turn a NaN with a full mantissa into infinity or zero: keep its sign, set the quiet bit.
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x0040, rounded).astype("<u2")


def write_bf16_safetensors(
    path: Path, headers: Sequence[TensorHeader], pieces: Iterable[npt.NDArray[np.float32]]
) -> None:
    """Write ``path`` and flush it to disk.

    ``pieces`` are fp32 arrays which, laid end to end, are the tensors of ``headers`` in that order. Raises ValueError
    when they add up to another size than the headers say, OSError when the disk is full.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for header in headers:
        start, end = end, end + header.num_bytes
        table[header.name] = {
            "dtype": "BF16",
            "shape": list(header.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(table, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # readers map the data, so it starts aligned
    written = 0
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for piece in pieces:
            written += file.write(to_bf16_bits(piece).tobytes())
        file.flush()
        os.fsync(file.fileno())
    if written != end:
        raise ValueError(f"{path.name}: {written} bytes of tensor data where {end} were announced")
