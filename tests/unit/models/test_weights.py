"""Loading: single and sharded files, ties, and one sentence for each way a checkpoint can be broken."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from twopool.models.decoder import Decoder
from twopool.models.rope import attention_factor, inverse_frequencies
from twopool.models.rope_config import RopeConfig, parse_rope
from twopool.protocol.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def _load(folder: Path) -> Decoder:
    return Decoder.load(folder, dtype=torch.float32, device=torch.device("cpu"))


def _refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        _load(folder)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.fixture
def copy_of(tiny_model: Callable[[str], Any], tmp_path: Path) -> Callable[..., Path]:
    """A private copy of a tiny model, its tensors changed."""

    def copy(name: str, change: Callable[[Tensors], None] = lambda tensors: None) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_model(name).folder, folder)
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return folder

    return copy


@pytest.fixture
def sharded(tiny_model: Callable[[str], Any], tmp_path: Path) -> Path:
    """The tiny Llama in several shards, as transformers writes them."""
    folder = tmp_path / "sharded"
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama").folder, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def _same_logits(folder: Path, model: Any, make_driver: Callable[..., Any]) -> None:
    got = make_driver(_load(folder)).step([(0, model.prompt, 0)])
    assert (got - model.logits).abs().max().item() < 1e-4


def test_shards(sharded: Path, tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    _same_logits(sharded, model, make_driver)
    assert _load(sharded).fingerprint() == _load(model.folder).fingerprint()


def test_a_missing_shard(sharded: Path) -> None:
    """NUM-07."""
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert str(shard) in _refused(sharded)


def test_an_index_that_names_a_missing_tensor(sharded: Path) -> None:
    """NUM-07."""
    index = json.loads((sharded / INDEX).read_text())
    file = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.ghost.weight"] = file
    (sharded / INDEX).write_text(json.dumps(index))
    message = _refused(sharded)
    assert "model.ghost.weight" in message
    assert file in message


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "JSON"), ("{}", "weight_map"), ('{"weight_map": {"a": "../other.safetensors"}}', "same folder")],
)
def test_a_broken_index(sharded: Path, content: str, words: str) -> None:
    (sharded / INDEX).write_text(content)
    assert words in _refused(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    tensors = load_file(second) | {"model.embed_tokens.weight": load_file(first)["model.embed_tokens.weight"]}
    save_file(tensors, second)
    message = _refused(sharded)
    assert "model.embed_tokens.weight" in message
    assert first.name in message
    assert second.name in message


@pytest.mark.parametrize("kept", [0, 4, 100, -1000, -1])
def test_a_truncated_file(copy_of: Callable[..., Path], kept: int) -> None:
    """NUM-07."""
    folder = copy_of("llama")
    file = folder / SINGLE
    content = file.read_bytes()
    file.write_bytes(content[:kept])
    assert str(file) in _refused(folder)


def test_no_weights_at_all(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("llama")
    (folder / SINGLE).unlink()
    assert SINGLE in _refused(folder)


def test_untied_without_a_head(copy_of: Callable[..., Path]) -> None:
    """NUM-02, M-untied-no-head."""
    folder = copy_of("llama", lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in _refused(folder)


def test_missing_layer_tensors_are_named(copy_of: Callable[..., Path]) -> None:
    """M-untied-no-head."""
    gone = ["model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.k_proj.weight"]

    def drop(tensors: Tensors) -> None:
        for name in gone:
            del tensors[name]

    message = _refused(copy_of("llama", drop))
    assert all(name in message for name in gone)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_tied_with_an_extra_head(
    scale: float,
    copy_of: Callable[..., Path],
    tiny_model: Callable[[str], Any],
    make_driver: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """NUM-02: equal to the embedding or not, the head of a tied model is not read, and the log says so."""

    def add_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * scale

    folder = copy_of("llama_tied", add_head)
    with caplog.at_level(logging.INFO):
        _same_logits(folder, tiny_model("llama_tied"), make_driver)
    assert "lm_head.weight" in caplog.text


def test_harmless_extras(
    copy_of: Callable[..., Path], tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]
) -> None:
    """NUM-07."""

    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    _same_logits(copy_of("llama", add), tiny_model("llama"), make_driver)


def test_a_tensor_the_decoder_would_not_use(copy_of: Callable[..., Path]) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"

    def add(tensors: Tensors) -> None:
        tensors[name] = torch.ones(64)

    assert name in _refused(copy_of("llama", add))


def test_a_wrong_shape(copy_of: Callable[..., Path]) -> None:
    """NUM-07."""
    name = "model.layers.1.mlp.down_proj.weight"

    def transpose(tensors: Tensors) -> None:
        tensors[name] = tensors[name].T.contiguous()

    message = _refused(copy_of("llama", transpose))
    assert name in message
    assert "[96, 64]" in message
    assert "[64, 96]" in message


@pytest.mark.parametrize(("dtype", "shown"), [(torch.float64, "F64"), (torch.int8, "I8")])
def test_a_wrong_type(copy_of: Callable[..., Path], dtype: torch.dtype, shown: str) -> None:
    """NUM-07."""
    name = "model.layers.0.self_attn.v_proj.weight"

    def convert(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(dtype)

    message = _refused(copy_of("llama", convert))
    assert name in message
    assert shown in message


def test_a_changed_number_changes_the_fingerprint(
    copy_of: Callable[..., Path], tiny_model: Callable[[str], Any]
) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.norm.weight"][0] += 1

    assert _load(copy_of("llama", change)).fingerprint() != _load(tiny_model("llama").folder).fingerprint()


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_yarn_as_older_files_spell_it(
    key: str, copy_of: Callable[..., Path], tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]
) -> None:
    """X-rope-yarn-keys: the logits up to position 209 equal those of the newer spelling."""
    folder = copy_of("llama_rope_yarn")
    config = json.loads((folder / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    del parameters["rope_type"]
    config["rope_scaling"] = {key: "yarn", **parameters}
    (folder / "config.json").write_text(json.dumps(config))
    _same_logits(folder, tiny_model("llama_rope_yarn"), make_driver)
    assert _load(folder).config.max_model_len == 256


@pytest.mark.parametrize(
    ("rope", "factor"),
    [
        (RopeConfig(), 1.0),
        (RopeConfig(kind="linear", factor=4.0), 1.0),
        (RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64), 1.1386294),
        (RopeConfig(kind="yarn", factor=1.0, original_max_position_embeddings=64), 1.0),
        (RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=0.5), 0.5),
    ],
)
def test_attention_factor(rope: RopeConfig, factor: float) -> None:
    assert attention_factor(rope) == pytest.approx(factor)


def test_linear_scaling_slows_every_frequency() -> None:
    plain = parse_rope({})
    slowed = parse_rope({"rope_scaling": {"type": "linear", "factor": 4}})
    torch.testing.assert_close(inverse_frequencies(slowed, 16) * 4, inverse_frequencies(plain, 16))
