"""Reading a model folder's safetensors files, single or sharded, and refusing what is not whole.

Everything is checked before anything is computed: each tensor the configuration calls for must be
there with its shape and a floating-point type we convert from. Tensors nobody asked for are refused
too, as they mean arithmetic this decoder does not do; only those known to carry nothing are ignored.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twopool.protocol.errors import ModelError

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_READABLE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_HARMLESS_SUFFIXES = (
    ".rotary_emb.inv_freq",  # recomputed from the configuration
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".masked_bias",
)
_SAMPLE_BYTES = 512
_NAMES_SHOWN = 5


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies and what its file's header says of it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class WeightFiles:
    """The tensors of a model folder, memory-mapped: nothing is read before `read`."""

    def __init__(self, folder: Path) -> None:
        """Open every file and read its header; ModelError names the file or tensor at fault."""
        self._folder = folder
        self._open_files: dict[Path, Any] = {}  # safetensors ships no type for an open file
        self._entries: dict[str, _Entry] = {}
        index = _read_index(folder)
        names = sorted(set(index.values())) if index is not None else [_single_file(folder)]
        for name in names:
            self._open(folder / name)
        for tensor, name in (index or {}).items():
            entry = self._entries.get(tensor)
            if entry is None or entry.path.name != name:
                raise ModelError(f"{folder / _INDEX} says that {tensor} is in {name}, but it is not there")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def check(self, expected: Mapping[str, tuple[int, ...]], unused: frozenset[str]) -> None:
        """Compare with the tensors the configuration calls for.

        unused: tensors a checkpoint may carry although the configuration has no use for them;
        each one found is logged.
        """
        missing = [name for name in expected if name not in self._entries]
        if missing:
            raise ModelError(f"{self._folder} lacks {_listed(missing, 'tensor')}")
        for name, shape in expected.items():
            entry = self._entries[name]
            if entry.shape != shape:
                raise ModelError(
                    f"{entry.path}: tensor {name} has the shape {list(entry.shape)}, "
                    f"config.json calls for {list(shape)}"
                )
            if entry.dtype not in _READABLE:
                raise ModelError(
                    f"{entry.path}: tensor {name} has the type {entry.dtype}, which is not "
                    f"supported (supported: {', '.join(_READABLE)})"
                )
        extra = [name for name in self._entries if name not in expected]
        for name in extra:
            if name in unused:
                logger.info("ignoring %s of %s: the configuration does not use it", name, self._folder)
        strange = [n for n in extra if n not in unused and not n.endswith(_HARMLESS_SUFFIXES)]
        if strange:
            raise ModelError(
                f"{self._folder} holds {_listed(strange, 'tensor')} for which config.json gives no "
                "use; the model would compute something else than it was trained for"
            )

    def read(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor on the host, of the file's dtype, backed by the mapped file: copy it.

        rows, columns: that part only; of the rest nothing is read.
        """
        entry = self._entries[name]
        try:
            file = self._open_files[entry.path]
            if rows is None and columns is None:
                tensor: Tensor = file.get_tensor(name)
            elif columns is None:
                tensor = file.get_slice(name)[rows]
            else:
                tensor = file.get_slice(name)[rows or slice(None), columns]
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{entry.path}: tensor {name} cannot be read: {error}") from error
        return tensor

    def fingerprint(self, names: list[str]) -> str:
        """sha256 over names, types, shapes and a sample of each tensor's bytes.

        Independent of how the tensors are spread over files. The sample (start, middle and end of
        each tensor) tells checkpoints apart, not a tensor with a few changed numbers in between.
        """
        digest = hashlib.sha256()
        for name in sorted(names):
            entry = self._entries[name]
            digest.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
            content = self.read(name).reshape(-1).view(torch.uint8)
            middle = content.numel() // 2
            for sample in (
                content[:_SAMPLE_BYTES],
                content[middle : middle + _SAMPLE_BYTES],
                content[-_SAMPLE_BYTES:],
            ):
                digest.update(sample.numpy().tobytes())
        return digest.hexdigest()

    def stamps(self) -> str:
        """Which files these are and when they were last changed: another string when one of them was written to."""
        stamps = []
        for path in self._open_files:
            status = path.stat()
            stamps.append((str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
        return repr(stamps)

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise ModelError(f"{path} is missing, although {_INDEX} names it")
        try:
            file: Any = safe_open(str(path), framework="pt", device="cpu")
            for name in file.keys():  # noqa: SIM118 (an open file is not a mapping)
                piece = file.get_slice(name)
                if name in self._entries:
                    raise ModelError(f"tensor {name} is in {self._entries[name].path} and in {path}")
                self._entries[name] = _Entry(path, piece.get_dtype(), tuple(piece.get_shape()))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} is damaged or not a safetensors file (truncated?): {error}") from error
        self._open_files[path] = file


def _single_file(folder: Path) -> str:
    if not (folder / _SINGLE).is_file():
        raise ModelError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
    return _SINGLE


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name, or None where the folder has no index."""
    path = folder / _INDEX
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{path}: {tensor} must name a file of the same folder, not {name!r}")
    return weight_map


def _listed(names: list[str], noun: str) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"the {noun}{'s' if len(names) > 1 else ''} {shown}{more}"
