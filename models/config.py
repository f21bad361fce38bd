"""A decoder's architecture, parsed from a Hugging Face config.json and validated once.

Every error is a ModelError of one sentence that names the field. Fields transformers gives a default
for may be missing; the defaults are those of the family's transformers configuration class.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from twopool.models.rope_config import RopeConfig, parse_rope, scaled_context
from twopool.protocol.errors import ModelError

Activation = Literal["silu", "gelu", "gelu_tanh"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class _Family:
    """What differs between the supported architectures beyond the fields of config.json."""

    default_kv_heads: int | None  # None: as many as query heads
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    reads_attention_bias: bool = False
    always_qkv_bias: bool = False
    output_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    window: Literal["none", "all_layers", "upper_layers"] = "none"
    default_window: int | None = None


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(
        default_kv_heads=None, reads_attention_bias=True, output_bias=True, reads_mlp_bias=True
    ),
    "MistralForCausalLM": _Family(default_kv_heads=8, window="all_layers", default_window=4096),
    "Qwen2ForCausalLM": _Family(default_kv_heads=32, always_qkv_bias=True, window="upper_layers", default_window=4096),
    "Qwen3ForCausalLM": _Family(
        default_kv_heads=32,
        default_head_dim=128,
        reads_attention_bias=True,
        output_bias=True,
        qk_norm=True,
        window="upper_layers",
        default_window=4096,
    ),
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides what a decoder computes, but its weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    """tokens, see `twopool.models.rope_config.scaled_context`"""
    rms_norm_eps: float
    activation: Activation
    rope: RopeConfig
    sliding_window: tuple[int | None, ...]
    """one entry a layer: a position sees itself and the sliding_window - 1 before it; None: all"""
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def from_folder(cls, folder: Path) -> "DecoderConfig":
        """Parse `folder`/config.json."""
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise ModelError(f"{folder} has no config.json") from error
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ModelError(f"{path} does not hold a JSON object")
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> "DecoderConfig":
        """Parse the contents of a config.json."""
        architecture = _architecture(raw)
        family = _FAMILIES[architecture]
        if raw.get("quantization_config"):
            raise ModelError("config.json: quantization_config: quantised weights are not supported")
        fields = _Fields(raw)
        num_layers = fields.size("num_hidden_layers")
        num_heads = fields.size("num_attention_heads")
        rope = parse_rope(raw)
        attention_bias = family.reads_attention_bias and fields.flag("attention_bias")
        return cls(
            architecture=architecture,
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, family, num_heads),
            head_dim=_head_dim(fields, family, num_heads),
            max_model_len=scaled_context(rope, fields.size("max_position_embeddings")),
            rms_norm_eps=fields.epsilon("rms_norm_eps"),
            activation=_activation(raw),
            rope=rope,
            sliding_window=_windows(raw, fields, family, num_layers),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=family.always_qkv_bias or attention_bias,
            output_bias=family.output_bias and attention_bias,
            mlp_bias=family.reads_mlp_bias and fields.flag("mlp_bias"),
            qk_norm=family.qk_norm,
        )

    def fingerprint(self) -> str:
        """sha256 over what decides the numbers; the same on every machine.

        max_model_len is left out: two workers may serve different lengths of the same model.
        """
        fields = asdict(self)
        del fields["max_model_len"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class _Fields:
    """Typed access to the top level of config.json."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self._raw = raw

    def optional_size(self, name: str) -> int | None:
        value = self._raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {name} must be a positive integer, not {value!r}")
        return value

    def size(self, name: str) -> int:
        value = self.optional_size(name)
        if value is None:
            raise ModelError(f"config.json lacks {name}")
        return value

    def flag(self, name: str) -> bool:
        value = self._raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be true or false, not {value!r}")
        return bool(value)

    def epsilon(self, name: str) -> float:
        value = self._raw.get(name, 1e-6)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ModelError(f"config.json: {name} must lie in [0, 1), not {value!r}")
        return float(value)


def _architecture(raw: Mapping[str, object]) -> str:
    names = raw.get("architectures")
    model_type = raw.get("model_type")
    if isinstance(names, list) and names:
        name = names[0]
    else:
        name = _MODEL_TYPES.get(str(model_type), f"of model_type {model_type}")
    if name not in _FAMILIES:
        raise ModelError(f"config.json: architecture {name} is not supported (supported: {', '.join(_FAMILIES)})")
    return str(name)


def _num_kv_heads(fields: _Fields, family: _Family, num_heads: int) -> int:
    count = fields.optional_size("num_key_value_heads") or family.default_kv_heads or num_heads
    if num_heads % count:
        raise ModelError(
            f"config.json: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({count})"
        )
    return count


def _head_dim(fields: _Fields, family: _Family, num_heads: int) -> int:
    head_dim = fields.optional_size("head_dim") or family.default_head_dim
    if head_dim is None:
        hidden_size = fields.size("hidden_size")
        if hidden_size % num_heads:
            raise ModelError(
                f"config.json: hidden_size ({hidden_size}) is not a multiple of "
                f"num_attention_heads ({num_heads}) and head_dim is not given"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim ({head_dim}) must be even to be rotated")
    return head_dim


def _activation(raw: Mapping[str, object]) -> Activation:
    name = raw.get("hidden_act", "silu")
    activation = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if activation is None:
        supported = ", ".join(_ACTIVATIONS)
        raise ModelError(f"config.json: hidden_act {name!r} is not supported (supported: {supported})")
    return activation


def _windows(raw: Mapping[str, object], fields: _Fields, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer.

    Mistral windows every layer. Qwen windows the layers from max_window_layers on, and only where
    use_sliding_window is true; layer_types, where given, says it layer by layer instead. An explicit
    `"sliding_window": null` means none, a missing one the family's default.
    """
    if family.window == "none":
        return (None,) * num_layers
    window = fields.optional_size("sliding_window")
    if "sliding_window" not in raw:
        window = family.default_window
    if family.window == "all_layers":
        return (window,) * num_layers
    if not fields.flag("use_sliding_window"):
        window = None
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ModelError(f"config.json: max_window_layers must be an integer, not {first!r}")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ModelError(f"config.json: layer_types must list {' or '.join(known)} for each of the {num_layers} layers")
    if window is None and "sliding_attention" in kinds:
        raise ModelError("config.json: layer_types has sliding_attention without a sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
