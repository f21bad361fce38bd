"""From a request body to the token ids of its prompts, and how many tokens may follow."""

from typing import Any

import msgspec
import numpy as np

from twopool.protocol.errors import ContextLengthError, InvalidRequestError
from twopool.protocol.token_hash import TokenIds
from twopool.router.chat_messages import template_messages
from twopool.router.chat_template import ChatTemplate
from twopool.router.model_info import ModelInfo
from twopool.router.schema import ChatBody, CompletionBody
from twopool.router.tools import ToolUse

MAX_PROMPTS = 2048
MAX_CHOICES_IN_ALL = 4096
DEFAULT_COMPLETION_TOKENS = 16


class Prompt(msgspec.Struct, frozen=True):
    """``ids``: ``[n]`` int32, n ≥ 1. ``text`` is the client's own, where it sent text, or the rendered conversation.
    ``offsets`` say where in it each token begins, where that is asked for.
    """

    ids: TokenIds
    text: str | None = None
    offsets: list[int] | None = None


def chat_prompt(body: ChatBody, model: ModelInfo, tools: ToolUse | None = None) -> Prompt:
    """The rendered conversation. The template writes the special tokens, so the tokenizer adds none (by default)."""
    if model.chat_template is None:
        raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
    continues = bool(body.continue_final_message)
    add_generation_prompt = body.add_generation_prompt
    if continues and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message: cannot be combined with add_generation_prompt", param="continue_final_message"
        )
    text = model.chat_template.render(
        template_messages(body.messages),
        add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=_template_kwargs(body, model, model.chat_template),
        tools=None if tools is None else tools.shown,
    )
    ids = model.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    if not len(ids):
        raise InvalidRequestError("messages: they render to an empty prompt", param="messages")
    return Prompt(ids, text)


def _template_kwargs(body: ChatBody, model: ModelInfo, template: ChatTemplate) -> dict[str, Any]:
    """The client's own, and what OpenAI's fields mean to this template, which refuses what it cannot express.

    ``medium`` is what OpenAI does without the field. As in vLLM, any effort but ``none`` turns thinking on where that
    is all a template knows.
    """
    given = dict(body.chat_template_kwargs or {})
    effort, verbosity = body.reasoning_effort, body.verbosity
    if effort is not None:
        if template.reads("enable_thinking"):
            given.setdefault("enable_thinking", effort != "none")
        is_unheard = not template.reads("reasoning_effort") and not template.reads("enable_thinking")
        if is_unheard and effort != "medium" and not (effort == "none" and model.reasoning_format is None):
            raise _unheard("reasoning_effort", effort)
        given.setdefault("reasoning_effort", effort)
    if verbosity is not None:
        if verbosity != "medium" and not template.reads("verbosity"):
            raise _unheard("verbosity", verbosity)
        given.setdefault("verbosity", verbosity)
    return given


def _unheard(name: str, value: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: this model's chat template has no way to ask for {value!r}", param=name)


def completion_prompts(body: CompletionBody, model: ModelInfo, vocab_size: int) -> list[Prompt]:
    """One text, one list of ids, or a list of either (not mixed); choices number prompt by prompt."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [_text_prompt(prompt, body, model, "prompt")]
    if not prompt:
        raise InvalidRequestError("prompt: an empty list", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequestError("prompt: texts, ids and lists of ids cannot be mixed", param="prompt")
    if kinds == {int}:
        return [_id_prompt([item for item in prompt if isinstance(item, int)], vocab_size, "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt: at most {MAX_PROMPTS} prompts in one request", param="prompt")
    return [
        _text_prompt(item, body, model, f"prompt[{index}]")
        if isinstance(item, str)
        else _id_prompt(item if isinstance(item, list) else [item], vocab_size, f"prompt[{index}]")
        for index, item in enumerate(prompt)
    ]


def max_chat_tokens(body: ChatBody, num_prompt_tokens: int, max_model_len: int) -> int:
    """``max_completion_tokens`` wins over ``max_tokens``; without either, all that fits."""
    name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if asked is not None and asked < 1:
        raise InvalidRequestError(f"{name}: {asked} is less than 1", param=name)
    room = _room(num_prompt_tokens, max_model_len, "messages")
    return room if asked is None else _fitting(asked, num_prompt_tokens, max_model_len, name)


def max_completion_tokens(body: CompletionBody, num_prompt_tokens: int, max_model_len: int) -> int:
    """0 generates nothing (with ``echo``: the prompt alone); absent means 16, or fewer where the context ends."""
    asked = body.max_tokens
    if asked is not None and asked < 0:
        raise InvalidRequestError(f"max_tokens: {asked} is negative", param="max_tokens")
    if asked == 0 and num_prompt_tokens <= max_model_len:
        return 0
    room = _room(num_prompt_tokens, max_model_len, "prompt")
    if asked is None:
        return min(DEFAULT_COMPLETION_TOKENS, room)
    return _fitting(asked, num_prompt_tokens, max_model_len, "max_tokens")


def _text_prompt(text: str, body: CompletionBody, model: ModelInfo, path: str) -> Prompt:
    add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
    ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not len(ids):
        raise InvalidRequestError(f"{path}: an empty prompt", param=path)
    if not body.echo or body.logprobs is None:
        return Prompt(ids, text)
    return Prompt(ids, text, model.tokenizer.offsets(text, add_special_tokens=add_special_tokens))


def _id_prompt(ids: list[int], vocab_size: int, path: str) -> Prompt:
    if not ids:
        raise InvalidRequestError(f"{path}: an empty prompt", param=path)
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequestError(f"{path}: {wrong} is no token id below {vocab_size}", param=path)
    return Prompt(np.array(ids, dtype=np.int32))


def _room(num_prompt_tokens: int, max_model_len: int, param: str) -> int:
    """Tokens the context has left; at least one must fit."""
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthError(
            f"{param}: {num_prompt_tokens} prompt tokens leave no room to generate in the context of "
            f"{max_model_len} tokens",
            param=param,
        )
    return max_model_len - num_prompt_tokens


def _fitting(asked: int, num_prompt_tokens: int, max_model_len: int, param: str) -> int:
    if num_prompt_tokens + asked > max_model_len:
        raise ContextLengthError(
            f"{param}: {num_prompt_tokens} prompt tokens and {asked} to generate exceed the context of "
            f"{max_model_len} tokens",
            param=param,
        )
    return asked
