"""A model folder as a GGUF file in bf16, for the peers of the benchmark that read nothing else."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twopool.models.config import DecoderConfig
from twopool.models.weights import WeightFiles
from twopool.protocol.errors import ModelError

_TYPES = {torch.bfloat16: gguf.GGMLQuantizationType.BF16, torch.float16: gguf.GGMLQuantizationType.F16}
_FILE_TYPES = {torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16, torch.float16: gguf.LlamaFileType.MOSTLY_F16}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write_gguf(folder: Path, target: Path, dtype: torch.dtype) -> None:
    """Write the Llama model of ``folder`` to ``target``, whole or not at all. Raises ModelError for other models."""
    config = DecoderConfig.from_folder(folder)
    files = WeightFiles(folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if settings.get("model_type") != "llama" or config.qkv_bias or config.mlp_bias or config.output_bias:
        raise ModelError(f"{folder} is no Llama model without biases: it cannot be written as GGUF here.")
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(temporary, "llama")
    try:
        _write_settings(writer, config, settings)
        writer.add_file_type(_FILE_TYPES[dtype])
        _write_vocabulary(writer, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), settings)
        _write_weights(writer, config, files, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _write_settings(writer: Any, config: DecoderConfig, settings: dict[str, Any]) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(settings["rope_parameters"]["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_vocabulary(writer: Any, tokenizer: dict[str, Any], settings: dict[str, Any]) -> None:
    """The prompts are ids: this only has to be a vocabulary of the right size."""
    model = tokenizer["model"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(settings["bos_token_id"])
    writer.add_eos_token_id(settings["eos_token_id"])


def _write_weights(writer: Any, config: DecoderConfig, files: WeightFiles, dtype: torch.dtype) -> None:
    _add(writer, "token_embd", files.read("model.embed_tokens.weight"), dtype)
    _add(writer, "output_norm", files.read("model.norm.weight"), torch.float32)
    if not config.tie_word_embeddings:
        _add(writer, "output", files.read("lm_head.weight"), dtype)
    for layer in range(config.num_layers):
        for source, name in _NORMS.items():
            _add(writer, f"blk.{layer}.{name}", files.read(f"model.layers.{layer}.{source}.weight"), torch.float32)
        for source, name in _LAYER_NAMES.items():
            weight = files.read(f"model.layers.{layer}.{source}.weight")
            if name in ("attn_q", "attn_k"):
                weight = _interleaved(weight, config.head_dim)
            _add(writer, f"blk.{layer}.{name}", weight, dtype)


def _interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Rows [heads, 2, half] as [heads, half, 2]: the order llama.cpp's rotation takes them in."""
    rows = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return rows.transpose(1, 2).reshape(weight.shape)


def _add(writer: Any, name: str, weight: Tensor, dtype: torch.dtype) -> None:
    converted = weight.to(dtype).contiguous()
    if dtype is torch.float32:
        writer.add_tensor(f"{name}.weight", converted.numpy())
        return
    data: npt.NDArray[np.uint8] = converted.view(torch.uint8).numpy()  # [rows, bytes of a row]
    writer.add_tensor(f"{name}.weight", data, raw_dtype=_TYPES[dtype])
