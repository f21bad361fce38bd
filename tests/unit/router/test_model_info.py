"""A model folder as the router reads it: tokenizer, special tokens, defaults, template."""

import json
from pathlib import Path
from typing import Any

import pytest

from twopool.protocol.errors import ModelError
from twopool.router.model_info import SamplingDefaults, load_model_info
from twopool_testing.tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, write_model_folder

LLAMA_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_defaults_and_several_eos_ids(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [0, 7]}
    info = load_model_info(write_model_folder(tmp_path, byte_level_tokenizer(), generation_config=generation))
    assert info.defaults == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1)
    assert info.eos_token_ids == (0, 2, 7)  # those of generation_config and the tokenizer's own
    assert info.max_model_len == 512


def test_without_generation_config(tmp_path: Path) -> None:
    info = load_model_info(write_model_folder(tmp_path, byte_level_tokenizer(), config={"eos_token_id": [2, 5]}))
    assert info.defaults == SamplingDefaults()
    assert info.eos_token_ids == (2, 5)


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("text", ["hello a", "", "<s>hello", "a\nb"])
def test_encoding_equals_transformers(tmp_path: Path, adds_bos: bool, flag: bool | None, text: str) -> None:
    """TOK-01: a BOS is added when the tokenizer's post-processor says so, and never a second one."""
    from transformers import AutoTokenizer

    source = byte_fallback_tokenizer()
    if not adds_bos:
        source.post_processor = None
    flags = {} if flag is None else {"add_bos_token": flag}
    folder = write_model_folder(tmp_path, source, tokenizer_config={**LLAMA_CONFIG, **flags})
    tokenizer = load_model_info(folder).tokenizer
    reference = AutoTokenizer.from_pretrained(folder)
    for special in (True, False):
        mine = tokenizer.encode(text, add_special_tokens=special).tolist()
        expected = reference.encode(text, add_special_tokens=special)
        if expected[:2] == [1, 1]:
            expected = expected[1:]  # transformers doubles the BOS of a text that begins with one
        assert mine == expected
    assert tokenizer.encode("hello", add_special_tokens=True).tolist().count(1) == int(adds_bos)


def test_chat_prompt_equals_transformers(tmp_path: Path) -> None:
    """TOK-01: the template's BOS is the only one."""
    from transformers import AutoTokenizer

    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    config = {**LLAMA_CONFIG, "add_bos_token": True, "chat_template": template}
    folder = write_model_folder(tmp_path, byte_fallback_tokenizer(), tokenizer_config=config)
    info = load_model_info(folder)
    messages = [{"role": "user", "content": "hello a"}]
    assert info.chat_template is not None
    ids = info.tokenizer.encode(info.chat_template.render(messages), add_special_tokens=False).tolist()
    reference = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, return_dict=False)
    assert ids == reference
    assert ids.count(1) == 1


def test_special_tokens_as_objects_and_tokens_missing_from_the_tokenizer(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<new>", "lstrip": False}, "chat_template": "{{ bos_token }}x"}
    info = load_model_info(write_model_folder(tmp_path, byte_level_tokenizer(), tokenizer_config=config))
    ids = info.tokenizer.encode("<new>", add_special_tokens=False).tolist()
    assert ids == [info.tokenizer.token_id("<new>")]
    assert info.tokenizer.table.is_special(ids[0])
    assert info.chat_template is not None
    assert info.chat_template.render([]) == "<new>x"


def test_template_sources_in_order(tmp_path: Path) -> None:
    """Requests with tools take ``tool_use`` where there is one; both are what transformers takes."""
    from transformers import AutoTokenizer

    named = [{"name": "tool_use", "template": "T{{ tools[0].type }}"}, {"name": "default", "template": "D"}]
    folder = write_model_folder(tmp_path, byte_level_tokenizer(), tokenizer_config={"chat_template": named})
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "x"}]

    def rendered() -> tuple[str, str]:
        template = load_model_info(folder).chat_template
        assert template is not None
        texts = (template.render(messages), template.render(messages, tools=tools))
        reference = AutoTokenizer.from_pretrained(folder)
        assert texts[0] == reference.apply_chat_template(messages, tokenize=False)
        assert texts[1] == reference.apply_chat_template(messages, tools=tools, tokenize=False)
        return texts

    assert rendered() == ("D", "Tfunction")
    (folder / "chat_template.jinja").write_text("F")
    assert rendered() == ("F", "F")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("A")
    assert rendered() == ("F", "A")


def test_a_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, byte_level_tokenizer(), tokenizer_config={"chat_template": "C"})
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    template = load_model_info(folder).chat_template
    assert template is not None and template.render([]) == "J"


def test_the_format_of_calls_is_that_of_the_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "[TOOL_CALLS]"}, {"name": "default", "template": "D"}]
    folder = write_model_folder(tmp_path, byte_level_tokenizer(), tokenizer_config={"chat_template": named})
    assert load_model_info(folder).tool_format == "mistral"


def test_no_template(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, byte_level_tokenizer(), tokenizer_config={"chat_template": None})
    assert load_model_info(folder).chat_template is None


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "config.json does not exist"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", '{"vocab_size": 0, "max_position_embeddings": 1}', "vocab_size is 0"),
        ("config.json", '{"vocab_size": 9}', "max_position_embeddings is None"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("generation_config.json", '{"temperature": "hot"}', "temperature is 'hot'"),
        ("generation_config.json", '{"top_p": 1.5}', "top_p is 1.5"),
        ("generation_config.json", '{"eos_token_id": ["x"]}', "eos_token_id"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, file: str, content: str | None, words: str) -> None:
    folder = write_model_folder(tmp_path, byte_level_tokenizer())
    path = folder / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ModelError, match=words):
        load_model_info(folder)


@pytest.mark.real_model
def test_the_real_model_equals_transformers() -> None:
    from transformers import AutoTokenizer

    folder = Path.home() / ".cache/twopool/models/smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        pytest.skip("SmolLM2-135M-Instruct is not in the model cache")
    info, reference = load_model_info(folder), AutoTokenizer.from_pretrained(folder)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi 🙂\n<|im_start|>"}]
    assert info.chat_template is not None
    text = info.chat_template.render(messages)
    assert info.tokenizer.encode(text, add_special_tokens=False).tolist() == reference.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    for prompt in ("Hello world", "", " 日本語 12345"):
        assert info.tokenizer.encode(prompt, add_special_tokens=True).tolist() == reference.encode(prompt)
