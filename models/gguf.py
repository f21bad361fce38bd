"""Converting a GGUF file into a Hugging Face folder: config, tokenizer and bf16 safetensors.

Needs numpy, gguf and tokenizers; no torch and no transformers, so a router may do it too.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twopool.models.gguf_config import (
    ROPE_FREQS,
    TensorSpec,
    build_config,
    expected_tensors,
    generation_config,
)
from twopool.models.gguf_reader import GgufFile, PackedTensor, read_gguf
from twopool.models.gguf_tokenizer import build_tokenizer, tokenizer_config
from twopool.models.safetensors_writer import TensorHeader, write_bf16_safetensors
from twopool.protocol.errors import ModelError

# Called with (values converted so far, values in all), at least once a tensor.
OnProgress = Callable[[int, int], None]

_VALUES_PER_PIECE = 1 << 22  # 16 MiB of fp32: bounds memory, and is a smooth progress bar


def convert_gguf(path: Path, folder: Path, on_progress: OnProgress | None = None) -> None:
    """Write the model in ``path`` into the existing ``folder``.

    Raises ModelError in one sentence when the file is damaged, lacks a tensor, has one of a wrong shape or too many, or
    is of an architecture, tokenizer or quantisation that is not supported. ``folder`` is then left half-filled.
    """
    file = read_gguf(path)
    config = build_config(file)
    specs = expected_tensors(config)
    _check_tensors(file, specs)
    tokenizer = build_tokenizer(file.metadata)
    _check_token_ids(file, config["vocab_size"])
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(file.metadata))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = tokenizer_config(file.metadata, config["max_position_embeddings"])
    _write_json(folder / "tokenizer_config.json", settings)
    headers = [TensorHeader(spec.hf_name, spec.shape) for spec in specs.values()]
    pieces = _fp32_pieces(file, specs, on_progress)
    write_bf16_safetensors(folder / "model.safetensors", headers, pieces)


def _check_tensors(file: GgufFile, specs: Mapping[str, TensorSpec]) -> None:
    for name, spec in specs.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{file.name} lacks the tensor {name}.")
        if tensor.shape != spec.shape:
            raise ModelError(
                f"{file.name}: tensor {name} has shape {list(tensor.shape)}, "
                f"but its metadata calls for {list(spec.shape)}."
            )
    for name in file.tensors:
        if name not in specs and name != ROPE_FREQS:
            raise ModelError(f"{file.name} holds the tensor {name}, which a {file.architecture} model lacks.")


def _check_token_ids(file: GgufFile, vocab_size: int) -> None:
    num_tokens = len(file.metadata.texts("tokenizer.ggml.tokens"))
    if num_tokens > vocab_size:
        raise ModelError(f"{file.name} lists {num_tokens} tokens, but embeds only {vocab_size}.")


def _fp32_pieces(
    file: GgufFile, specs: Mapping[str, TensorSpec], on_progress: OnProgress | None
) -> Iterator[npt.NDArray[np.float32]]:
    total = sum(TensorHeader(spec.hf_name, spec.shape).num_values for spec in specs.values())
    done = 0
    for name, spec in specs.items():
        for piece in _tensor_pieces(file.tensors[name], spec):
            done += piece.size
            yield piece
            if on_progress is not None:
                on_progress(done, total)


def _tensor_pieces(tensor: PackedTensor, spec: TensorSpec) -> Iterator[npt.NDArray[np.float32]]:
    """The tensor's rows in Hugging Face order, a few at a time.

    Quantised blocks lie within a row, so the packed rows themselves are reordered, before they are unpacked.
    """
    num_rows = spec.shape[0]
    order = _row_order(num_rows, spec.permuted_heads)
    if len(spec.shape) == 1:
        yield tensor.dequantize(slice(None))[order]
        return
    step = max(1, _VALUES_PER_PIECE // spec.shape[1])
    for start in range(0, num_rows, step):
        yield tensor.dequantize(order[start : start + step])


def _row_order(num_rows: int, permuted_heads: int | None) -> npt.NDArray[np.intp]:
    """For each row of the Hugging Face tensor, the row of the GGUF tensor that holds it.

    GGUF interleaves the two halves of a head (0, d/2, 1, d/2 + 1, ...); Hugging Face keeps them apart.
    """
    order = np.arange(num_rows, dtype=np.intp)
    if permuted_heads is None:
        return order
    return order.reshape(permuted_heads, -1, 2).swapaxes(1, 2).reshape(-1)  # [heads, half, 2] -> [heads, 2, half]


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
