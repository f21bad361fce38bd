"""config.json: what is understood, what is derived, and the sentence for what is not."""

from pathlib import Path
from typing import Any

import pytest

from twopool.models.config import DecoderConfig
from twopool.models.rope_config import RopeConfig
from twopool.protocol.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def _parse(**changes: Any) -> DecoderConfig:
    return DecoderConfig.from_dict({k: v for k, v in (LLAMA | changes).items() if v != "absent"})


def test_llama_defaults() -> None:
    config = _parse()
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 2, 16)
    assert config.max_model_len == 64
    assert config.sliding_window == (None,) * 4
    assert config.rope == RopeConfig(theta=10000.0)
    assert not (config.tie_word_embeddings or config.qkv_bias or config.output_bias or config.mlp_bias)
    assert _parse(num_key_value_heads="absent").num_kv_heads == 6
    assert _parse(num_key_value_heads=None).num_kv_heads == 6


def test_explicit_head_dim_need_not_divide_the_hidden_size() -> None:
    """NUM-03."""
    config = _parse(num_attention_heads=5, num_key_value_heads=1, head_dim=32)
    assert (config.num_heads, config.head_dim) == (5, 32)


def test_biases_by_family() -> None:
    llama = _parse(attention_bias=True, mlp_bias=True)
    assert llama.qkv_bias and llama.output_bias and llama.mlp_bias
    qwen2 = _parse(architectures=["Qwen2ForCausalLM"])
    assert qwen2.qkv_bias and not qwen2.output_bias
    qwen3 = _parse(architectures=["Qwen3ForCausalLM"])
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 128
    assert not _parse(architectures=["MistralForCausalLM"], attention_bias=True).qkv_bias


def test_architecture_from_model_type_alone() -> None:
    assert _parse(architectures="absent", model_type="qwen2").architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None,) * 4),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
        ({"sliding_window": 8}, (None,) * 4),
    ],
)
def test_sliding_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert _parse(**changes).sliding_window == windows


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}},
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0},
        },
    ],
)
@pytest.mark.parametrize("written_length", [64, 256])
def test_yarn_in_every_spelling(spelling: dict[str, Any], written_length: int) -> None:
    """X-rope-yarn-keys: the same meaning and a context of factor x original, however it is written."""
    config = _parse(max_position_embeddings=written_length, **spelling)
    assert config.rope == RopeConfig(kind="yarn", theta=5e5, factor=4.0, original_max_position_embeddings=64)
    assert config.max_model_len == 256


def test_yarn_takes_what_is_missing_from_max_position_embeddings() -> None:
    stretched = _parse(rope_scaling={"type": "yarn", "factor": 4.0}, max_position_embeddings=64)
    assert (stretched.rope.original_max_position_embeddings, stretched.max_model_len) == (64, 256)
    written = {"type": "yarn", "original_max_position_embeddings": 64}
    factored = _parse(rope_scaling=written, max_position_embeddings=320)
    assert (factored.rope.factor, factored.max_model_len) == (5.0, 320)


def test_context_of_the_other_scalings() -> None:
    linear = _parse(rope_scaling={"type": "linear", "factor": 2.0})
    assert (linear.rope.kind, linear.max_model_len) == ("linear", 128)
    llama3 = _parse(rope_scaling={"rope_type": "llama3", **LLAMA3})
    assert (llama3.rope.kind, llama3.max_model_len) == ("llama3", 64)
    assert _parse(rope_scaling=None, rope_theta=1e6).rope.theta == 1e6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architecture GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"architectures": "absent", "model_type": "mamba"}, ["model_type mamba"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "'dynamic'", "yarn"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "'longrope'"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["factor", "'2'"]),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 1}}, ["truncate"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters", "layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"hidden_act": "relu"}, ["hidden_act", "'relu'"]),
        ({"vocab_size": "absent"}, ["vocab_size"]),
        ({"hidden_size": -3}, ["hidden_size", "-3"]),
        ({"num_hidden_layers": 2.5}, ["num_hidden_layers", "2.5"]),
        ({"num_key_value_heads": 4}, ["num_attention_heads (6)", "num_key_value_heads (4)"]),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, ["hidden_size (96)", "head_dim"]),
        ({"head_dim": 7}, ["head_dim (7)"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"rms_norm_eps": 2}, ["rms_norm_eps"]),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            ["layer_types", "4 layers"],
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
            ["layer_types", "sliding_window"],
        ),
    ],
)
def test_one_sentence_for_what_is_not_understood(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        _parse(**changes)
    assert "\n" not in caught.value.message
    for word in words:
        assert word in caught.value.message


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        DecoderConfig.from_folder(tmp_path)
    for content, words in (("{", "JSON"), ("[1]", "JSON object"), ("\xff", "JSON")):
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(ModelError, match=words):
            DecoderConfig.from_folder(tmp_path)


def test_fingerprint_covers_the_numbers_only() -> None:
    base = _parse().fingerprint()
    assert _parse(max_position_embeddings=32).fingerprint() == base
    assert _parse(rope_theta=20000.0).fingerprint() != base
    assert _parse(rms_norm_eps=1e-6).fingerprint() != base
