"""The bodies of answers as types, for the OpenAPI document. Answers are written in ``responses`` and ``app``.

A field that is ``UNSET`` here is left out where nobody asked for it.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from twopool.router.message_parser import AnswerReason

PromptLogprob = dict[str, Any]
"""One candidate for a token of the prompt: ``logprob``, ``rank``, ``decoded_token``."""


class CachedTokens(msgspec.Struct, kw_only=True):
    cached_tokens: int


class UsageCounts(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(msgspec.Struct, kw_only=True):
    """``arguments`` is JSON, in a stream a part of it."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """In a stream, ``id`` and ``type`` come once a call, ``index`` always."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class Message(msgspec.Struct, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    """What is new of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: AnswerReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: AnswerReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """In a stream, what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: AnswerReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType | None = UNSET


class _Head(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str | None
    timings: dict[str, Any] | list[dict[str, Any]] | UnsetType = UNSET


class ChatAnswer(_Head, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageCounts
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType | None = UNSET


class ChatChunk(_Head, kw_only=True):
    """One event of a chat stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageCounts | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionAnswer(_Head, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageCounts


class CompletionChunk(_Head, kw_only=True):
    """One event of a completion's stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageCounts | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[ModelCard]


class Health(msgspec.Struct, kw_only=True):
    status: Literal["ok"]


class Readiness(msgspec.Struct, kw_only=True):
    status: Literal["ready"]
    reason: str


class Version(msgspec.Struct, kw_only=True):
    """And what the workers are made of."""

    version: str


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, kw_only=True):
    error: ErrorDetail
