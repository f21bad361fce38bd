"""The request bodies of the two generation endpoints, decoded and type-checked by msgspec.

One rule for fields: ``null`` means absent; a field listed in ``_Unsupported`` is refused when it asks for something
this server would have to leave out silently; fields that are not listed here at all are ignored. ``_WithoutEffect`` has
those that clients send and that change no answer: only their types are checked.
"""

from typing import Any, Literal, TypeVar

import msgspec

from twopool.protocol.errors import InvalidRequestError
from twopool.router.http_errors import invalid_json_error

B = TypeVar("B", bound="GenerationBody")


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """``json_schema`` is checked in ``grammar``."""

    type: str
    json_schema: Any = None


class Prediction(msgspec.Struct, kw_only=True):
    """What the client expects the answer to be: it could only make it faster."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class _Unsupported(msgspec.Struct, kw_only=True):
    """Fields that would change the answer and are not supported; ``check_supported`` refuses them."""

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
    web_search_options: Any = None
    moderation: Any = None
    thinking_token_budget: int | None = None
    length_penalty: float | None = None
    spaces_between_special_tokens: bool | None = None
    guided_whitespace_pattern: str | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: Any = None
    return_prompt_text: bool | None = None
    return_token_offsets: bool | None = None


class _WithoutEffect(_Unsupported, kw_only=True):
    """Fields about the client, the account or the speed."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prediction: Prediction | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    request_id: str | None = None
    session_id: str | None = None
    priority: int | None = None
    guided_decoding_backend: str | None = None


class _OfConversations(_WithoutEffect, kw_only=True):
    """Fields of chat whose types completions check too."""

    max_completion_tokens: int | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool | None = None


class GenerationBody(_OfConversations, kw_only=True):
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
    logprobs: bool | None = None


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
        if value is None or _asks_nothing(name, value, body):
            continue
        raise InvalidRequestError(f"{name}: not supported by this server", param=name)
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise InvalidRequestError(f"{name}: not supported by this server", param=name)
    if body.echo and isinstance(body, ChatBody):
        raise InvalidRequestError("echo: only /v1/completions can echo its prompt", param="echo")
    if isinstance(body, CompletionBody):
        _check_completion(body)


def _check_completion(body: CompletionBody) -> None:
    """Fields of chat alone that would be missed."""
    if body.max_completion_tokens is not None:
        message = "max_completion_tokens: only for /v1/chat/completions; here it is max_tokens"
        raise InvalidRequestError(message, param="max_completion_tokens")
    if body.top_logprobs:
        message = "top_logprobs: only for /v1/chat/completions; here logprobs is a number"
        raise InvalidRequestError(message, param="top_logprobs")
    if body.tool_choice != "none":
        if body.tools:
            raise InvalidRequestError("tools: only /v1/chat/completions can call tools", param="tools")
        if body.tool_choice not in (None, "auto"):
            raise InvalidRequestError("tool_choice: only /v1/chat/completions can call tools", param="tool_choice")


def _asks_nothing(name: str, value: Any, body: GenerationBody) -> bool:
    """Whether a field's value is what the server does anyway."""
    if name == "spaces_between_special_tokens":
        return bool(value) or body.skip_special_tokens is not False
    return value is False or value == [] or value == "" or value in _DONE_ANYWAY.get(name, ())


_DONE_ANYWAY: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),  # of no functions
    "modalities": (["text"],),
    "length_penalty": (1.0,),
}


def refused_fields(kind: type[GenerationBody]) -> dict[str, list[Any]]:
    """The fields that ``kind`` has only to refuse them, each with the values that ask for nothing."""
    names = [*_Unsupported.__struct_fields__]
    names += ["echo"] if kind is ChatBody else ["max_completion_tokens", "top_logprobs"]
    candidates: tuple[Any, ...] = (None, False, True, 0, "", [])
    return {
        name: [value for value in (*candidates, *_DONE_ANYWAY.get(name, ())) if _is_taken(kind, name, value)]
        for name in names
    }


def _is_taken(kind: type[GenerationBody], name: str, value: Any) -> bool:
    required: dict[str, Any] = {"messages": []} if kind is ChatBody else {"prompt": ""}
    try:
        check_supported(msgspec.convert({**required, name: value}, kind))
    except (msgspec.ValidationError, InvalidRequestError):
        return False
    return True
