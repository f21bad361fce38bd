"""What the router must know of a model, read from its folder: sizes, defaults, tokenizer, chat template."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twopool.protocol.errors import ModelError
from twopool.router.chat_template import ChatTemplate
from twopool.router.tokenizer import TextTokenizer, load_tokenizer, special_tokens
from twopool.router.tool_formats import ReasoningFormat, ToolFormat, reasoning_format_of, tool_format_of


@dataclass(frozen=True)
class SamplingDefaults:
    """What holds where a client leaves a field out.

    Values come from ``generation_config.json``; what that leaves out is 1.0 for the temperature and "off" for the
    rest. ``do_sample`` is not read: an API client that wants greedy decoding says ``temperature: 0``.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ModelInfo:
    """One served model. ``vocab_size`` is the width of its logits, which may exceed the tokenizer's vocabulary.

    ``tool_format`` and ``reasoning_format`` are what its chat template looks like.
    """

    folder: Path
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TextTokenizer
    chat_template: ChatTemplate | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    tool_format: ToolFormat = "hermes"
    reasoning_format: ReasoningFormat | None = None


def load_model_info(folder: Path) -> ModelInfo:
    """Read a local model folder; raises ``ModelError`` naming the file and what is wrong with it."""
    config = _read_json(folder / "config.json", required=True)
    config = config.get("text_config") or config
    generation = _read_json(folder / "generation_config.json")
    tokenizer_config = {
        **_read_json(folder / "special_tokens_map.json"),
        **_read_json(folder / "tokenizer_config.json"),
    }
    tokenizer = load_tokenizer(folder, tokenizer_config)
    named = special_tokens(tokenizer_config)
    vocab_size = _positive_int(config, "vocab_size", folder)
    eos_source = generation if generation.get("eos_token_id") is not None else config
    eos_ids = _id_list(eos_source.get("eos_token_id"), folder)
    if "eos_token" in named and (eos_id := tokenizer.token_id(named["eos_token"])) is not None:
        eos_ids.append(eos_id)
    templates = _template_sources(folder, tokenizer_config)
    source, tool_source = templates.get("default"), templates.get("tool_use")
    return ModelInfo(
        folder=folder,
        vocab_size=vocab_size,
        max_model_len=_positive_int(config, "max_position_embeddings", folder),
        eos_token_ids=tuple(sorted({i for i in eos_ids if i < vocab_size})),
        tokenizer=tokenizer,
        chat_template=None if source is None else ChatTemplate(source, named, tool_source=tool_source),
        defaults=_defaults(generation, folder),
        tool_format=tool_format_of(tool_source or source or ""),
        reasoning_format=reasoning_format_of(source or ""),
    )


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if required:
            raise ModelError(f"{path} does not exist") from error
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _positive_int(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if type(value) is not int or value <= 0:
        raise ModelError(f"{folder / 'config.json'}: {key} is {value!r}, not a positive integer")
    return value


def _id_list(value: Any, folder: Path) -> list[int]:
    """``None``, one id or a list of ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise ModelError(f"{folder}: eos_token_id is {value!r}, not a token id or a list of them")
    return list(ids)


def _template_sources(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name, looked for where transformers does: ``default``, and ``tool_use`` where there is one.

    ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja`` come before ``chat_template.json``, and that
    before ``tokenizer_config.json``.
    """
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    template = _read_json(folder / "chat_template.json").get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    else:
        named = {"default": template}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _defaults(generation: dict[str, Any], folder: Path) -> SamplingDefaults:
    ranges: dict[str, Callable[[float], bool]] = {
        "temperature": lambda value: 0 <= value <= 2,
        "top_k": lambda value: value >= 0,
        "top_p": lambda value: 0 <= value <= 1,
        "min_p": lambda value: 0 <= value <= 1,
        "repetition_penalty": lambda value: 0 < value <= 100,
    }
    given: dict[str, Any] = {}
    for name, in_range in ranges.items():
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not in_range(value):
            raise ModelError(f"{folder / 'generation_config.json'}: {name} is {value!r}, out of range")
        given[name] = int(value) if name == "top_k" else float(value)
    return SamplingDefaults(**given)
