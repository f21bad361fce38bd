"""The request bodies of the two generation endpoints, decoded and type-checked by msgspec.

One rule for fields: ``null`` means absent; a field listed in ``_Unsupported`` is refused when it asks for something
this server would have to leave out silently; fields that are not listed here at all are ignored.
"""

from typing import Any, TypeVar

import msgspec

from twopool.protocol.errors import InvalidRequestError
from twopool.router.http_errors import invalid_json_error

B = TypeVar("B", bound="GenerationBody")


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """``json_schema`` is checked in ``grammar``."""

    type: str
    json_schema: Any = None


class _Unsupported(msgspec.Struct, kw_only=True):
    """Fields that would change the answer and are not supported yet; ``check_supported`` refuses them."""

    functions: Any = None
    function_call: Any = None
    structural_tag: Any = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: Any = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_embeds: Any = None
    return_tokens_as_token_ids: bool | None = None
    audio: Any = None
    modalities: list[str] | None = None
    chat_template: str | None = None
    documents: Any = None
    suffix: str | None = None


class GenerationBody(_Unsupported, kw_only=True):
    """What both endpoints share: OpenAI's fields and the extensions vLLM made common."""

    model: str | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    user: str | None = None
    cache_salt: str | None = None
    timings: bool | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


class ChatBody(GenerationBody, kw_only=True):
    """``POST /v1/chat/completions``. ``messages`` are checked in ``chat_messages``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """``POST /v1/completions``. ``prompt`` is a text, ids, or a list of texts or of id lists."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


def decode_chat(data: bytes) -> ChatBody:
    """Raises ``InvalidRequestError`` naming the field."""
    return _decode(_chat_decoder, data)


def decode_completion(data: bytes) -> CompletionBody:
    """Raises ``InvalidRequestError`` naming the field."""
    return _decode(_completion_decoder, data)


def _decode(decoder: msgspec.json.Decoder[B], data: bytes) -> B:
    try:
        body = decoder.decode(data)
    # DecodeError covers wrong types; deep nesting raises RecursionError, bad UTF-8 UnicodeDecodeError (a ValueError).
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise invalid_json_error(error) from error
    check_supported(body)
    return body


def check_supported(body: GenerationBody) -> None:
    """Refuse in words what would otherwise be left out of the answer silently."""
    for name in _Unsupported.__struct_fields__:
        value = getattr(body, name)
        if value is None or _asks_nothing(name, value):
            continue
        raise InvalidRequestError(f"{name}: not supported by this server yet", param=name)
    if body.echo and isinstance(body, ChatBody):
        raise InvalidRequestError("echo: only /v1/completions can echo its prompt", param="echo")
    if isinstance(body, CompletionBody) and body.tool_choice != "none":
        if body.tools:
            raise InvalidRequestError("tools: only /v1/chat/completions can call tools", param="tools")
        if body.tool_choice not in (None, "auto"):
            raise InvalidRequestError("tool_choice: only /v1/chat/completions can call tools", param="tool_choice")


def _asks_nothing(name: str, value: Any) -> bool:
    """Whether a field's value is what the server does anyway."""
    if name == "function_call":
        return bool(value == "none")
    if name == "modalities":
        return bool(value == ["text"])
    return value is False or value == [] or value == ""
