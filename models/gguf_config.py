"""What a GGUF file's metadata means: the Hugging Face config, and which tensors the model must have.

Architectures: llama (Llama, SmolLM2, and Mistral when a sliding window is stated), qwen2, qwen3. Everything the config
cannot express is refused, never dropped: a silently ignored setting gives wrong answers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from twopool.models.gguf_reader import GgufFile, Metadata
from twopool.protocol.errors import ModelError

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FREQS = "rope_freqs.weight"

_CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True)
class TensorSpec:
    """Where a GGUF tensor goes: its Hugging Face name, its shape, and the number of heads whose rows are permuted.

    llama.cpp stores the q and k rows of ``llama`` files interleaved for its RoPE; ``permuted_heads`` is None elsewhere.
    """

    hf_name: str
    shape: tuple[int, ...]
    permuted_heads: int | None = None


def build_config(file: GgufFile) -> dict[str, Any]:
    """The ``config.json`` of ``file``. Raises ModelError for what twopool does not serve."""
    arch, metadata = file.architecture, file.metadata
    if arch not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"{file.name} has the GGUF architecture {arch!r}; supported are {supported}.")
    if metadata.integer(f"{arch}.expert_count", 0) > 0:
        raise ModelError(f"{file.name} is a mixture of experts, which is not supported.")
    model_type, window = _model_type(file)
    num_heads = metadata.size(f"{arch}.attention.head_count")
    hidden_size = metadata.size(f"{arch}.embedding_length")
    config: dict[str, Any] = {
        "architectures": [_CLASS_NAMES[model_type]],
        "model_type": model_type,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata.size(f"{arch}.feed_forward_length"),
        "num_hidden_layers": metadata.size(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.size(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": _head_dim(file, hidden_size, num_heads),
        "max_position_embeddings": metadata.size(f"{arch}.context_length"),
        "rms_norm_eps": metadata.real(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": _vocab_size(file),
        "use_cache": True,
        **_token_ids(metadata),
    }
    if model_type == "mistral":
        config["sliding_window"] = window
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = False
    if model_type == "qwen3":
        config["attention_bias"] = False
    return config


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """The ``generation_config.json``: greedy unless the request says otherwise, every end-of-turn id a stop."""
    ids = _token_ids(metadata)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.optional_integer(f"tokenizer.ggml.{key}") for key in keys]
    stops = list(dict.fromkeys(token_id for token_id in found if token_id is not None))
    if stops:
        ids["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    return ids


def expected_tensors(config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Every tensor a file with this config must hold, by its GGUF name."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    vocab_shape = (config["vocab_size"], hidden)
    specs = {
        "token_embd.weight": TensorSpec("model.embed_tokens.weight", vocab_shape),
        "output_norm.weight": TensorSpec("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        specs["output.weight"] = TensorSpec("lm_head.weight", vocab_shape)
    for layer in range(config["num_hidden_layers"]):
        source, target = f"blk.{layer}.", f"model.layers.{layer}."
        parts = {
            "attn_norm.weight": TensorSpec("input_layernorm.weight", (hidden,)),
            "ffn_norm.weight": TensorSpec("post_attention_layernorm.weight", (hidden,)),
            "ffn_gate.weight": TensorSpec("mlp.gate_proj.weight", (inter, hidden)),
            "ffn_up.weight": TensorSpec("mlp.up_proj.weight", (inter, hidden)),
            "ffn_down.weight": TensorSpec("mlp.down_proj.weight", (hidden, inter)),
            **_attention_tensors(config),
        }
        for name, spec in parts.items():
            hf_name = target + spec.hf_name
            specs[source + name] = TensorSpec(hf_name, spec.shape, spec.permuted_heads)
    return specs


def _attention_tensors(config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    hidden, head_dim, model_type = config["hidden_size"], config["head_dim"], config["model_type"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q_rows, kv_rows = num_heads * head_dim, num_kv_heads * head_dim
    permuted = model_type in ("llama", "mistral")
    q_heads, k_heads = (num_heads, num_kv_heads) if permuted else (None, None)
    parts = {
        "attn_q.weight": TensorSpec("self_attn.q_proj.weight", (q_rows, hidden), q_heads),
        "attn_k.weight": TensorSpec("self_attn.k_proj.weight", (kv_rows, hidden), k_heads),
        "attn_v.weight": TensorSpec("self_attn.v_proj.weight", (kv_rows, hidden)),
        "attn_output.weight": TensorSpec("self_attn.o_proj.weight", (hidden, q_rows)),
    }
    if model_type == "qwen2" or config.get("attention_bias"):
        parts["attn_q.bias"] = TensorSpec("self_attn.q_proj.bias", (q_rows,), q_heads)
        parts["attn_k.bias"] = TensorSpec("self_attn.k_proj.bias", (kv_rows,), k_heads)
        parts["attn_v.bias"] = TensorSpec("self_attn.v_proj.bias", (kv_rows,))
    if model_type == "llama" and config.get("attention_bias"):  # Llama's flag covers o_proj too
        parts["attn_output.bias"] = TensorSpec("self_attn.o_proj.bias", (hidden,))
    if model_type == "qwen3":
        parts["attn_q_norm.weight"] = TensorSpec("self_attn.q_norm.weight", (head_dim,))
        parts["attn_k_norm.weight"] = TensorSpec("self_attn.k_norm.weight", (head_dim,))
    return parts


def _model_type(file: GgufFile) -> tuple[str, int | None]:
    """The Hugging Face model type, and the sliding window where there is one."""
    arch = file.architecture
    window = file.metadata.optional_integer(f"{arch}.attention.sliding_window")
    if not window:
        return arch, None
    if arch != "llama":
        raise ModelError(f"{file.name} states a sliding window, which is not supported for {arch}.")
    return "mistral", window


def _head_dim(file: GgufFile, hidden_size: int, num_heads: int) -> int:
    arch, metadata = file.architecture, file.metadata
    key_length = metadata.optional_integer(f"{arch}.attention.key_length")
    if key_length is None and hidden_size % num_heads:
        raise ModelError(f"{file.name}: {num_heads} heads do not divide the hidden size {hidden_size}.")
    head_dim = key_length if key_length is not None else hidden_size // num_heads
    if head_dim <= 0 or head_dim % 2:
        raise ModelError(f"{file.name} has heads of {head_dim} values; RoPE needs an even number.")
    if metadata.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.name} has keys and values of different lengths, which is not supported.")
    if metadata.integer(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.name} rotates only part of each head, which is not supported.")
    return head_dim


def _vocab_size(file: GgufFile) -> int:
    """The embedding's rows: the model's vocabulary, which may be padded beyond the tokenizer's."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.name} lacks the tensor token_embd.weight.")
    return embedding.shape[0]


def _token_ids(metadata: Metadata) -> dict[str, Any]:
    keys = {
        "bos_token_id": "bos_token_id",
        "eos_token_id": "eos_token_id",
        "pad_token_id": "padding_token_id",
    }
    found = {name: metadata.optional_integer(f"tokenizer.ggml.{key}") for name, key in keys.items()}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _rope_parameters(file: GgufFile) -> dict[str, Any]:
    arch, metadata = file.architecture, file.metadata
    theta = metadata.real(f"{arch}.rope.freq_base", 10000.0)
    prefix = f"{arch}.rope.scaling"
    kind = metadata.text(f"{prefix}.type", "none")
    if ROPE_FREQS in file.tensors:
        return _llama3_rope(file, theta)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.name} has the rope scaling {kind!r}; supported are linear, yarn and llama3.")
    scaled = {"rope_type": kind, "rope_theta": theta, "factor": metadata.real(f"{prefix}.factor")}
    if kind == "yarn":
        original = metadata.size(f"{prefix}.original_context_length")
        scaled["original_max_position_embeddings"] = original
    return scaled


def _llama3_rope(file: GgufFile, theta: float) -> dict[str, Any]:
    """Llama 3.1's scaling: GGUF keeps only its result, one divisor a frequency, so the parameters are recovered.

    The largest divisor is ``factor``; the others are the constants every published checkpoint uses. They are accepted
    only if they give the file's divisors back.
    """
    stored = file.tensors[ROPE_FREQS].dequantize(slice(None)).astype(np.float64)
    factor = float(stored.max())
    low, high, original = 1.0, 4.0, 8192
    half = stored.size
    wavelengths = 2 * math.pi * theta ** (np.arange(half, dtype=np.float64) / half)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(stored, expected, rtol=1e-3):
        raise ModelError(f"{file.name} has rope frequencies that are not Llama 3's, which is not supported.")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
