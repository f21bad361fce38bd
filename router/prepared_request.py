"""From a request's body to everything the answer needs: checked, tokenised, complete.

Pure functions of the body, the model and two limits; they run in a thread when the body is large.
"""

import hashlib
import time

import msgspec

from twopool.protocol.errors import InvalidRequestError
from twopool.protocol.ids import RequestId, new_request_id
from twopool.protocol.messages import MAX_PROMPT_LOGPROBS_BYTES, SamplingParams, prompt_logprobs_bytes
from twopool.router.choice_stream import ChoiceStream, TextOptions
from twopool.router.generation import PlannedPrompt
from twopool.router.grammar import Surroundings, output_grammar
from twopool.router.interface import RoutedRequest
from twopool.router.message_parser import MessageOptions, reasoning_at
from twopool.router.model_info import ModelInfo
from twopool.router.prompts import (
    MAX_CHOICES_IN_ALL,
    Prompt,
    chat_prompt,
    completion_prompts,
    max_chat_tokens,
    max_completion_tokens,
)
from twopool.router.responses import AnswerHead
from twopool.router.sampling_defaults import (
    is_ranked,
    num_choices,
    num_drawn,
    num_logprobs,
    sampling_params,
    stop_strings,
)
from twopool.router.schema import ChatBody, CompletionBody, GenerationBody
from twopool.router.served_names import served_name
from twopool.router.tool_formats import MARKERS, REASONING_FORMATS, THINK_CLOSE, THINK_OPEN, TOOL_FORMATS
from twopool.router.tools import ToolUse, tool_use


class RequestLimits(msgspec.Struct, frozen=True):
    """What holds for one request at the moment it comes. ``arrived_s`` is a ``time.monotonic()`` stamp."""

    served_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    timeout_s: float
    arrived_s: float
    tenant: bytes
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    wants_timings: bool = False


class _Output(msgspec.Struct, frozen=True):
    """What the output must be, and how a chat message is read from it."""

    grammar: str | None
    message: MessageOptions | None
    markers: dict[int, str]


class PreparedRequest(msgspec.Struct, frozen=True):
    """A request ready to be submitted."""

    head: AnswerHead
    prompts: list[PlannedPrompt]
    num_shown: int
    """choices of each prompt in the answer"""
    is_stream: bool
    include_usage: bool
    continuous_usage: bool
    include_timings: bool = False

    def shown_choices(self) -> list[ChoiceStream]:
        """The answer's choices, once all are finished: of each prompt the likeliest first, where more were drawn."""
        shown: list[ChoiceStream] = []
        for prompt in self.prompts:
            choices = prompt.choices
            if len(choices) > self.num_shown:
                choices = sorted(choices, key=lambda choice: choice.mean_logprob, reverse=True)
            shown += choices[: self.num_shown]
        return shown


def prepare_chat(body: ChatBody, model: ModelInfo, limits: RequestLimits) -> PreparedRequest:
    """``/v1/chat/completions``; raises the error the client gets."""
    name = served_name(body.model, limits.served_names)
    _check_stream(body)
    num_drawn(body)
    tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    prompt = chat_prompt(body, model, tools)
    max_tokens = max_chat_tokens(body, len(prompt.ids), limits.max_model_len)
    output = _chat_output(body, prompt, tools, model, limits)
    return _prepared(body, name, [prompt], [max_tokens], output, model, limits)


def prepare_completion(body: CompletionBody, model: ModelInfo, limits: RequestLimits) -> PreparedRequest:
    """``/v1/completions``; raises the error the client gets."""
    name = served_name(body.model, limits.served_names)
    _check_stream(body)
    prompts = completion_prompts(body, model, limits.vocab_size)
    if len(prompts) * num_drawn(body) > MAX_CHOICES_IN_ALL:
        name = "n" if body.best_of is None else "best_of"
        raise InvalidRequestError(f"{name}: at most {MAX_CHOICES_IN_ALL} choices over all prompts", param=name)
    max_tokens = [max_completion_tokens(body, len(prompt.ids), limits.max_model_len) for prompt in prompts]
    around = Surroundings("none", model.tool_format, None, model.tokenizer.token_id)
    output = _Output(output_grammar(body, around), None, {})
    return _prepared(body, name, prompts, max_tokens, output, model, limits)


def _chat_output(
    body: ChatBody, prompt: Prompt, tools: ToolUse | None, model: ModelInfo, limits: RequestLimits
) -> _Output:
    tool_format = next((name for name in TOOL_FORMATS if name == limits.tool_call_parser), model.tool_format)
    reasoning_format = next((name for name in REASONING_FORMATS if name == limits.reasoning_parser), None)
    if limits.reasoning_parser == "auto":
        reasoning_format = model.reasoning_format
    reasoning = reasoning_at(prompt.text or "", reasoning_format, continues=bool(body.continue_final_message))
    options = MessageOptions(reasoning, tool_format, tools, shows_reasoning=body.include_reasoning is not False)
    tokenizer = model.tokenizer
    grammar = output_grammar(body, Surroundings(reasoning, tool_format, tools, tokenizer.token_id))
    if options.reads_nothing:
        return _Output(grammar, None, {})
    texts = (*(MARKERS[tool_format] if tools is not None else ()), THINK_OPEN, THINK_CLOSE)
    ids = {text: tokenizer.token_id(text) for text in texts}
    markers = {number: text for text, number in ids.items() if number is not None}
    return _Output(grammar, options, {i: text for i, text in markers.items() if tokenizer.table.is_special(i)})


def _check_stream(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options: only with stream set to true", param="stream_options")


def _prepared(
    body: GenerationBody,
    name: str,
    prompts: list[Prompt],
    max_tokens: list[int],
    output: _Output,
    model: ModelInfo,
    limits: RequestLimits,
) -> PreparedRequest:
    request_id = new_request_id()
    is_chat = isinstance(body, ChatBody)
    kind = "chatcmpl-" if is_chat else "cmpl-"
    head = AnswerHead(
        answer_id=kind + request_id.removeprefix("req-"),
        created=int(time.time()),
        model=name,
        is_chat=is_chat,
        num_top_logprobs=num_logprobs(body),
    )
    ids = [request_id] + [new_request_id() for _ in prompts[1:]]
    planned = [
        _planned(body, prompt, limit, output, model, limits, request_id)
        for prompt, limit, request_id in zip(prompts, max_tokens, ids, strict=True)
    ]
    options = body.stream_options
    return PreparedRequest(
        head=head,
        prompts=planned,
        num_shown=num_choices(body),
        is_stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        include_timings=bool(body.timings) or limits.wants_timings,
        continuous_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
    )


def _planned(
    body: GenerationBody,
    prompt: Prompt,
    max_tokens: int,
    output: _Output,
    model: ModelInfo,
    limits: RequestLimits,
    request_id: RequestId,
) -> PlannedPrompt:
    sampling = sampling_params(
        body,
        defaults=model.defaults,
        eos_token_ids=model.eos_token_ids,
        vocab_size=limits.vocab_size,
        max_tokens=max_tokens,
        grammar=output.grammar,
    )
    options = _text_options(body, sampling, output.markers)
    table = model.tokenizer.table
    prefix = ""
    if isinstance(body, CompletionBody) and body.echo:
        prefix = (
            prompt.text
            if prompt.text is not None
            else table.decode(prompt.ids.tolist(), skip_special_tokens=options.skip_special_tokens)
        )
    scored = sampling.prompt_logprobs
    if scored is not None and prompt_logprobs_bytes(len(prompt.ids), scored) > MAX_PROMPT_LOGPROBS_BYTES:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequestError(
            f"{name}: {scored} for each of {len(prompt.ids)} prompt tokens is too much", param=name
        )
    shown_ids = prompt.ids.tolist() if body.return_token_ids else None
    choices = [
        ChoiceStream(
            table,
            options,
            prefix=prefix,
            prefix_offsets=prompt.offsets,
            prompt_ids=shown_ids,
            message=output.message,
            prompt_top=body.prompt_logprobs,
            is_empty=max_tokens == 0,
        )
        for _ in range(sampling.n)
    ]
    if max_tokens == 0 and scored is not None:  # a prefill draws a token whether it is wanted or not
        sampling = msgspec.structs.replace(sampling, max_tokens=1)
    elif max_tokens == 0:
        for choice in choices:
            choice.finish_empty()
        return PlannedPrompt(None, len(prompt.ids), choices)
    request = RoutedRequest(
        request_id=request_id,
        prompt_ids=prompt.ids,
        sampling=sampling,
        salt=_salt(limits.tenant, body.cache_salt),
        timeout_s=limits.timeout_s,
        arrived_s=limits.arrived_s,
    )
    return PlannedPrompt(request, len(prompt.ids), choices)


def _text_options(body: GenerationBody, sampling: SamplingParams, markers: dict[int, str]) -> TextOptions:
    return TextOptions(
        stops=stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
        stop_token_ids=sampling.stop_token_ids,
        skip_special_tokens=True if body.skip_special_tokens is None else body.skip_special_tokens,
        min_tokens=sampling.min_tokens,
        logprobs=num_logprobs(body) is not None,
        ranked=is_ranked(body),
        markers=markers,
    )


def _salt(tenant: bytes, cache_salt: str | None) -> bytes:
    """Tenants (API keys) never share prefix cache; within one, ``cache_salt`` separates further."""
    if cache_salt is None:
        return tenant
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, key=tenant).digest()
