"""Reading a GGUF file: its metadata as typed look-ups, its tensors as memory-mapped packed rows.

The only module that touches the ``gguf`` package's reader. Every malformed file ends in one ModelError sentence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twopool.protocol.errors import ModelError

GGUF_MAGIC = b"GGUF"


class Metadata:
    """A GGUF file's key-value section. Look-ups raise ModelError where a key is absent or of another type."""

    def __init__(self, file_name: str, values: Mapping[str, Any]) -> None:
        self.file_name = file_name
        self._values = dict(values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "one integer")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.integer(key, default)
        if value <= 0:
            raise self._wrong(key, "a positive integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self else None

    def real(self, key: str, default: float | None = None) -> float:
        """The shortest decimal that names the same fp32 number: 1e-05, not 9.999999747378752e-06."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return float(str(np.float32(value)))

    def boolean(self, key: str, default: bool) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "a boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._required(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings")
        return value

    def numbers(self, key: str) -> list[float]:
        value = self._required(key, None)
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self._wrong(key, "a list of numbers")
        return value

    def _required(self, key: str, default: Any) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise ModelError(f"{self.file_name} lacks the GGUF metadata key {key}.")
        return value

    def _wrong(self, key: str, kind: str) -> ModelError:
        return ModelError(f"{self.file_name}: the GGUF metadata key {key} is not {kind}.")


@dataclass(frozen=True)
class PackedTensor:
    """One tensor as stored. ``shape`` is in torch order; ``rows`` is indexed by ``shape[0]``, packed within a row."""

    name: str
    shape: tuple[int, ...]
    quantization: Any  # gguf.GGMLQuantizationType
    rows: npt.NDArray[Any]

    def dequantize(self, index: npt.NDArray[np.intp] | slice) -> npt.NDArray[np.float32]:
        """The rows ``index`` in fp32: [num_rows, ...]. Raises ModelError for a format gguf cannot unpack."""
        from gguf.quants import dequantize

        try:
            values = dequantize(self.rows[index], self.quantization)
        except NotImplementedError:
            kind = getattr(self.quantization, "name", str(self.quantization))
            raise ModelError(f"Tensor {self.name} is stored as {kind}, which cannot be dequantised.") from None
        return np.asarray(values, dtype=np.float32)


@dataclass(frozen=True)
class GgufFile:
    """A parsed file. Tensors are views of a memory map that lives as long as they do."""

    name: str
    metadata: Metadata
    tensors: Mapping[str, PackedTensor]

    @property
    def architecture(self) -> str:
        return self.metadata.text("general.architecture")


def is_gguf(path: Path) -> bool:
    """Whether ``path`` starts with the GGUF magic. Raises OSError when it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Parse ``path``. Raises ModelError when it is no GGUF file, truncated, split, or of the other byte order."""
    from gguf import GGUFEndian, GGUFReader

    if not is_gguf(path):
        raise ModelError(f"{path} is not a GGUF file: it does not start with the bytes 'GGUF'.")
    try:
        reader = GGUFReader(path)
        values = {key: field.contents() for key, field in reader.fields.items()}
    # GGUFReader checks no bounds; a cut or garbled file surfaces as whichever of these comes first.
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        raise ModelError(f"{path} is a truncated or damaged GGUF file ({error}).") from error
    metadata = Metadata(path.name, values)
    if reader.endianess != GGUFEndian.LITTLE:
        raise ModelError(f"{path} is a big-endian GGUF file; convert it to little-endian first.")
    if metadata.integer("split.count", 1) > 1:
        raise ModelError(f"{path} is one part of a split GGUF; merge the parts into one file first.")
    tensors = {
        tensor.name: PackedTensor(
            name=tensor.name,
            shape=tuple(int(size) for size in reversed(tensor.shape)),
            quantization=tensor.tensor_type,
            rows=tensor.data,
        )
        for tensor in reader.tensors
    }
    return GgufFile(name=path.name, metadata=metadata, tensors=tensors)
