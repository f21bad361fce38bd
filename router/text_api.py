"""``/tokenize`` and ``/detokenize``: what the router would send to a worker, and what it would make of ids."""

import asyncio
from functools import partial
from typing import Any

import msgspec

from twopool.protocol.errors import InvalidRequestError
from twopool.router.http_errors import invalid_json_error
from twopool.router.model_info import ModelInfo
from twopool.router.prompts import chat_prompt
from twopool.router.schema import ChatBody
from twopool.router.served_names import served_name
from twopool.router.tools import tool_use

_INLINE_BODY_BYTES = 16 * 1024
"""Larger bodies are handled in a thread: milliseconds that streams would wait for."""


class TokenizeBody(msgspec.Struct, kw_only=True):
    """``prompt`` is text as for completions, ``messages`` a conversation as for chat; exactly one of them.

    ``add_special_tokens`` is true by default for a prompt and false for messages, whose template writes them.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """``token_strs`` are the tokenizer's own names of the tokens, where asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(data: bytes, model: ModelInfo, max_model_len: int, served_names: tuple[str, ...]) -> TokenizeAnswer:
    """Raises ``InvalidRequestError`` naming the field, or ``ModelNotFoundError``."""
    body = _decode(_tokenize_decoder, data)
    served_name(body.model, served_names)
    if len(data) <= _INLINE_BODY_BYTES:
        return _tokenized(body, model, max_model_len)
    return await asyncio.get_running_loop().run_in_executor(None, _tokenized, body, model, max_model_len)


async def detokenize(data: bytes, model: ModelInfo, served_names: tuple[str, ...]) -> DetokenizeAnswer:
    """Raises ``InvalidRequestError`` naming the field, or ``ModelNotFoundError``."""
    body = _decode(_detokenize_decoder, data)
    served_name(body.model, served_names)
    table = model.tokenizer.table
    for token_id in body.tokens:
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequestError(f"tokens: {token_id} is no token id below {model.vocab_size}", param="tokens")
    skip = bool(body.skip_special_tokens)
    if len(data) <= _INLINE_BODY_BYTES:
        return DetokenizeAnswer(prompt=table.decode(body.tokens, skip_special_tokens=skip))
    decode = partial(table.decode, body.tokens, skip_special_tokens=skip)
    return DetokenizeAnswer(prompt=await asyncio.get_running_loop().run_in_executor(None, decode))


def _tokenized(body: TokenizeBody, model: ModelInfo, max_model_len: int) -> TokenizeAnswer:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt: give either prompt or messages", param="prompt")
    if body.chat_template:
        raise InvalidRequestError("chat_template: not supported by this server", param="chat_template")
    if body.messages is None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        ids = model.tokenizer.encode(body.prompt or "", add_special_tokens=special).tolist()
    else:
        chat = ChatBody(
            messages=body.messages,
            add_special_tokens=body.add_special_tokens,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        ids = chat_prompt(chat, model, tool_use(body.tools, None, None)).ids.tolist()
    names = [model.tokenizer.table.token_name(i) for i in ids] if body.return_token_strs else None
    return TokenizeAnswer(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=names)


def _decode(decoder: "msgspec.json.Decoder[Any]", data: bytes) -> Any:
    try:
        return decoder.decode(data)
    # See schema.decode_chat: what undecodable bytes may raise.
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise invalid_json_error(error) from error
