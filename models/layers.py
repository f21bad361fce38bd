"""The weights of a decoder as the forward pass wants them: fused, converted, laid out for the device."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from twopool.kernels.linear import LinearWeight, pack_linear
from twopool.models.config import DecoderConfig

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"


class TensorSource(Protocol):
    """Where tensors come from, by the names checkpoints give them."""

    def read(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor ``name``, or some of its rows and columns, of any floating-point dtype, on any device."""
        ...


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor
    """[hidden_size]"""
    qkv: LinearWeight
    """hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values; of the rank's heads"""
    q_norm: Tensor | None
    """[head_dim]"""
    k_norm: Tensor | None
    """[head_dim]"""
    output: LinearWeight
    post_attention_norm: Tensor
    """[hidden_size]"""
    gate_up: LinearWeight
    """hidden_size -> 2 * intermediate_size"""
    down: LinearWeight


@dataclass(frozen=True)
class DecoderWeights:
    """A whole decoder or one rank's part of it, on one device in one dtype."""

    embedding: Tensor
    """[vocab_size, hidden_size], of the rank's tokens"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[hidden_size]"""
    head: LinearWeight
    """hidden_size -> vocab_size"""


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of `config` must hold."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (config.vocab_size, hidden),
        _FINAL_NORM: (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    projections = {
        "self_attn.q_proj": (query_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query_size, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        for name, (out_features, in_features, has_bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (out_features, in_features)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (out_features,)
    return shapes


def unused_tensors(config: DecoderConfig) -> frozenset[str]:
    """Tensors that checkpoints of `config` carry now and then although nothing reads them."""
    return frozenset((_HEAD,)) if config.tie_word_embeddings else frozenset()


def load_weights(
    config: DecoderConfig,
    files: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    deterministic_gemm: bool = False,
) -> DecoderWeights:
    """Read, fuse, convert and pack; `files` must have been checked against `config`."""
    reader = _Reader(files, dtype, device, deterministic_gemm)
    embedding = reader.tensor(_EMBEDDING)
    head = embedding if config.tie_word_embeddings else reader.tensor(_HEAD)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_layer(config, reader, layer) for layer in range(config.num_layers)),
        final_norm=reader.tensor(_FINAL_NORM),
        head=pack_linear(head, deterministic=deterministic_gemm),
    )


class _Reader:
    def __init__(self, files: TensorSource, dtype: torch.dtype, device: torch.device, deterministic_gemm: bool) -> None:
        self._files = files
        self._dtype = dtype
        self._device = device
        self._deterministic_gemm = deterministic_gemm

    def tensor(self, *names: str) -> Tensor:
        """The named tensors one below the other, in memory of our own: a mapped file that shrinks
        while it is in use would kill the process."""
        parts = [self._files.read(name) for name in names]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        fused = torch.empty(shape, dtype=self._dtype, device=self._device)
        row = 0
        for part in parts:
            fused[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]
        return fused

    def linear(self, *names: str, bias: bool) -> LinearWeight:
        """The named projections, which share their input, as one."""
        weight = self.tensor(*(f"{name}.weight" for name in names))
        biases = self.tensor(*(f"{name}.bias" for name in names)) if bias else None
        return pack_linear(weight, biases, deterministic=self._deterministic_gemm)


def _layer(config: DecoderConfig, reader: _Reader, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    attention = prefix + "self_attn."
    mlp = prefix + "mlp."
    return LayerWeights(
        input_norm=reader.tensor(prefix + "input_layernorm.weight"),
        qkv=reader.linear(*(f"{attention}{name}_proj" for name in "qkv"), bias=config.qkv_bias),
        q_norm=reader.tensor(attention + "q_norm.weight") if config.qk_norm else None,
        k_norm=reader.tensor(attention + "k_norm.weight") if config.qk_norm else None,
        output=reader.linear(attention + "o_proj", bias=config.output_bias),
        post_attention_norm=reader.tensor(prefix + "post_attention_layernorm.weight"),
        gate_up=reader.linear(mlp + "gate_proj", mlp + "up_proj", bias=config.mlp_bias),
        down=reader.linear(mlp + "down_proj", bias=config.mlp_bias),
    )
