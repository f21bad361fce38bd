"""From a request's JSON to sampling parameters, prompts and text options; every refusal names its field."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from twopool.protocol.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError, TwopoolError
from twopool.protocol.messages import SamplingParams
from twopool.router import sampling_defaults
from twopool.router.chat_template import ChatTemplate
from twopool.router.interface import RoutedRequest
from twopool.router.model_info import ModelInfo, SamplingDefaults
from twopool.router.prepared_request import PreparedRequest, RequestLimits, prepare_chat, prepare_completion
from twopool.router.schema import ChatBody, CompletionBody, StreamOptions, decode_chat, decode_completion

VOCAB = 330
LIMITS = RequestLimits(
    served_names=("tiny", "alias"), max_model_len=512, vocab_size=VOCAB, timeout_s=9.0, arrived_s=1.0, tenant=b""
)


def chat(model: ModelInfo, /, **fields: Any) -> PreparedRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return prepare_chat(decode_chat(json.dumps(body).encode()), model, LIMITS)


def complete(model: ModelInfo, /, prompt: Any = "hi", **fields: Any) -> PreparedRequest:
    return prepare_completion(decode_completion(json.dumps({"prompt": prompt, **fields}).encode()), model, LIMITS)


def routed(prepared: PreparedRequest, number: int = 0) -> RoutedRequest:
    request = prepared.prompts[number].request
    assert request is not None
    return request


def sampling(prepared: PreparedRequest) -> SamplingParams:
    return routed(prepared).sampling


def assert_refused(model: ModelInfo, fields: dict[str, Any], param: str) -> None:
    for prepare in (chat, complete):
        with pytest.raises(InvalidRequestError) as caught:
            prepare(model, **fields)
        assert caught.value.param is not None
        assert caught.value.param.startswith(param)
        assert param.split(".")[0] in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_p", 1.1),
        ("top_p", -1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("min_p", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("best_of", 0),
        ("best_of", 129),
        ("best_of", "2"),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", "7"),
        ("seed", 1.0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("min_tokens", -1),
        ("logit_bias", {"99999999": 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"abc": 5}),
        ("logit_bias", {"٣": 5}),
        ("logit_bias", {"05": 5}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {str(VOCAB): 1}),
        ("logit_bias", [5]),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", [str(i) for i in range(65)]),
        ("stop", "x" * 1025),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", list(range(257))),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("user", 5),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", "text"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("guided_json", "{"),
        ("guided_regex", "("),
        ("guided_choice", [""]),
        ("guided_grammar", "x"),
        ("structured_outputs", {"regex": 5}),
        ("structured_outputs", {"structural_tag": "x"}),
        ("use_beam_search", True),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("truncate_prompt_tokens", 5),
        ("chat_template", "{{ 1 }}"),
        ("modalities", ["text", "audio"]),
        ("suffix", "x"),
        ("web_search_options", {}),
        ("moderation", {"model": "m"}),
        ("thinking_token_budget", 0),
        ("length_penalty", 1.5),
        ("guided_whitespace_pattern", " "),
        ("logprob_token_ids", [1]),
        ("repetition_detection", {"max_pattern_size": 4}),
        ("return_prompt_text", True),
        ("return_token_offsets", True),
        ("metadata", ["a"]),
        ("metadata", {"a": 1}),
        ("store", "yes"),
        ("service_tier", 1),
        ("prediction", "text"),
        ("prediction", {"type": "content"}),
        ("prediction", {"type": "tokens", "content": ""}),
        ("prompt_cache_key", 5),
        ("prompt_cache_retention", 5),
        ("prompt_cache_options", "30m"),
        ("safety_identifier", 5),
        ("request_id", 5),
        ("session_id", 5),
        ("priority", "high"),
        ("guided_decoding_backend", 5),
        ("reasoning_effort", "extreme"),
        ("reasoning_effort", 2),
        ("verbosity", "chatty"),
        ("include_reasoning", "no"),
        ("top_logprobs", "5"),
        ("max_completion_tokens", 1.5),
        ("chat_template_kwargs", []),
        ("add_generation_prompt", 1),
        ("continue_final_message", "yes"),
    ],
)
def test_refused_values_name_their_field(tiny_model: ModelInfo, field: str, value: Any) -> None:
    """API-03, API-13, API-19, X-temp-tiny, X-seed-fixed-nondet, X-stop-token-ids-oov, API-25."""
    assert_refused(tiny_model, {field: value}, field)


def everything(prepared: PreparedRequest) -> Any:
    """All of a request except the ids and times that no two have in common."""
    head = msgspec.structs.replace(prepared.head, answer_id="", created=0)
    prompts = [
        (
            prompt.num_prompt_tokens,
            prompt.request and msgspec.structs.replace(prompt.request, request_id="", prompt_ids=None),
            prompt.request and prompt.request.prompt_ids.tolist(),
            [
                (choice._options, list(choice._ready), choice.prompt_ids, choice.prompt_top, choice.finish_reason)
                + (() if choice._message is None else (choice._message._reasoning, choice._message._named))
                for choice in prompt.choices
            ],
        )
        for prompt in prepared.prompts
    ]
    return head, prompts, msgspec.structs.replace(prepared, head=head, prompts=[])


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


OPTIONAL = sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__} - {"messages", "prompt"})


@pytest.mark.parametrize("field", OPTIONAL)
def test_null_is_the_same_as_absent(tiny_model: ModelInfo, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """X-max-tokens-null."""
    monkeypatch.setattr(sampling_defaults, "new_seed", lambda: 7)
    for prepare in (chat, complete):
        assert everything(prepare(tiny_model, **{field: None})) == everything(prepare(tiny_model))


def test_every_field_of_openai_s_client_is_known() -> None:
    """What it may send is either done, or refused, or known to have no effect."""
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats
    from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam

    assert set(chats.CompletionCreateParamsBase.__annotations__) <= set(ChatBody.__struct_fields__)
    assert set(completions.CompletionCreateParamsBase.__annotations__) <= set(CompletionBody.__struct_fields__)
    assert set(ChatCompletionStreamOptionsParam.__annotations__) <= set(StreamOptions.__struct_fields__)


@pytest.mark.parametrize(
    ("prepare", "fields", "param"),
    [
        (chat, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        (complete, {"spaces_between_special_tokens": False, "skip_special_tokens": False}, "spaces_between_special"),
        (complete, {"max_completion_tokens": 5}, "max_completion_tokens"),
        (complete, {"top_logprobs": 1}, "top_logprobs"),
        (complete, {"n": 3, "best_of": 2}, "best_of"),
        (complete, {"best_of": 2, "stream": True}, "best_of"),
        (complete, {"prompt": [[5]] * 2048, "best_of": 3}, "best_of"),
        (chat, {"reasoning_effort": "high"}, "reasoning_effort"),
        (chat, {"verbosity": "low"}, "verbosity"),
    ],
)
def test_what_would_be_left_out_silently_is_refused(
    tiny_model: ModelInfo, prepare: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        prepare(tiny_model, **fields)
    assert caught.value.param is not None and caught.value.param.startswith(param)


@pytest.mark.parametrize(
    ("template", "fields", "shown"),
    [
        ("{{ reasoning_effort }} {{ verbosity }}", {"reasoning_effort": "xhigh", "verbosity": "low"}, "xhigh low"),
        ("{{ reasoning_effort }}", {"reasoning_effort": "low", "verbosity": "medium"}, "low"),
        ("{{ enable_thinking }}", {"reasoning_effort": "none"}, "False"),
        ("{{ enable_thinking }}", {"reasoning_effort": "low"}, "True"),
        (
            "{{ enable_thinking }}",
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "False",
        ),
        ("{{ enable_thinking is defined }}{{ reasoning_effort is defined }}", {}, "FalseFalse"),
    ],
)
def test_the_template_says_how_much_to_think(
    tiny_model: ModelInfo, template: str, fields: dict[str, Any], shown: str
) -> None:
    model = replace(tiny_model, chat_template=ChatTemplate(template, {}))
    expected = tiny_model.tokenizer.encode(shown, add_special_tokens=False).tolist()
    assert routed(chat(model, **fields)).prompt_ids.tolist() == expected


def test_a_model_that_always_thinks_cannot_be_told_not_to(tiny_model: ModelInfo) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(replace(tiny_model, reasoning_format="deepseek_r1"), reasoning_effort="none")
    assert caught.value.param == "reasoning_effort"


VLLM_OPTIONS = {
    **dict.fromkeys(["json", "regex", "choice", "grammar", "json_object", "whitespace_pattern", "structural_tag"]),
    **dict.fromkeys(["disable_fallback", "disable_any_whitespace", "disable_additional_properties"], False),
}
"""As vLLM's own ``StructuredOutputsParams`` look when nothing is set."""

FUNCTION = {"name": "f", "description": None, "parameters": None, "strict": None}


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": dict.fromkeys(StreamOptions.__struct_fields__)},
        {"response_format": {"type": "text", "json_schema": None}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": None, "description": None, "strict": None, "schema": {"const": 1}},
            }
        },
        {"structured_outputs": dict.fromkeys(VLLM_OPTIONS)},
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": None},
    ],
)
def test_null_is_the_same_as_absent_inside_of_fields(
    tiny_model: ModelInfo, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(sampling_defaults, "new_seed", lambda: 7)
    for prepare in (chat,) if "tools" in fields else (chat, complete):
        assert everything(prepare(tiny_model, **fields)) == everything(prepare(tiny_model, **without_nulls(fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": None, "function": {"name": "f", "strict": None}}},
        {
            "messages": [
                {"role": "user", "content": "hi", "name": None, "tool_calls": None, "refusal": None},
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "audio": None,
                    "tool_calls": [
                        {"id": "1", "type": None, "function": {"name": "f", "arguments": "{}", "description": None}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "name": None, "content": [{"type": "text", "text": "x"}]},
            ]
        },
    ],
)
def test_null_is_the_same_as_absent_where_there_are_tools(
    tiny_model: ModelInfo, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """The template here shows all it is given."""
    monkeypatch.setattr(sampling_defaults, "new_seed", lambda: 7)
    model = replace(tiny_model, chat_template=ChatTemplate("{{ messages | tojson }}{{ tools | tojson }}", {}))
    fields = {"tools": [{"type": "function", "function": FUNCTION, "id": None}], **fields}
    assert everything(chat(model, **fields)) == everything(chat(model, **without_nulls(fields)))


@pytest.mark.parametrize("fields", [{}, {"regex": "a+"}, {"json_object": True}])
def test_vllm_s_own_object_is_taken(
    tiny_model: ModelInfo, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(sampling_defaults, "new_seed", lambda: 7)
    dumped = chat(tiny_model, structured_outputs={**VLLM_OPTIONS, **fields})
    assert everything(dumped) == everything(chat(tiny_model, structured_outputs=fields))


@pytest.mark.parametrize(
    ("option", "value"), [("disable_any_whitespace", True), ("whitespace_pattern", " "), ("structural_tag", "{}")]
)
def test_options_that_would_change_the_output_are_refused(tiny_model: ModelInfo, option: str, value: Any) -> None:
    assert_refused(tiny_model, {"structured_outputs": {"regex": "a", option: value}}, f"structured_outputs.{option}")


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "1"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True},
        {"prediction": {"type": "content", "content": "hi"}, "prompt_cache_key": "k", "safety_identifier": "s"},
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "hi"}]}, "priority": -1},
        {"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}, "guided_decoding_backend": "auto"},
        {"kv_transfer_params": {"x": 1}, "request_id": "mine", "session_id": "s", "nonsense": [1]},
        {"length_penalty": 1, "spaces_between_special_tokens": True, "guided_whitespace_pattern": ""},
        {"spaces_between_special_tokens": False, "include_reasoning": False, "top_logprobs": 0},
        {"reasoning_effort": "medium", "verbosity": "medium", "function_call": "auto"},
        {"reasoning_effort": "none", "stream": True, "stream_options": {"include_obfuscation": False}},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "modalities": ["text"]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tool_choice": "auto", "use_beam_search": False, "return_token_ids": False, "bad_words": [], "suffix": ""},
        {"stop": None},
        {"stop": []},
        {"best_of": 1},
    ],
)
def test_harmless_fields_change_nothing(tiny_model: ModelInfo, fields: dict[str, Any]) -> None:
    for prepare in (chat, complete):
        assert sampling(prepare(tiny_model, seed=1, **fields)) == sampling(prepare(tiny_model, seed=1))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 1e-45}, {"temperature": 1e-45}),
        ({"temperature": 2, "top_p": 0}, {"temperature": 2.0, "top_p": 0.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 10**12}, {"top_k": 2**31 - 1}),
        ({"min_p": 1}, {"min_p": 1.0}),
        ({"seed": 0}, {"seed": 0}),
        ({"seed": -1}, {"seed": -1}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
        ({"n": 3, "best_of": 3}, {"n": 3, "logprobs": None}),
        ({"n": 2, "best_of": 5}, {"n": 5, "logprobs": 0}),
        ({"best_of": 128}, {"n": 128, "logprobs": 0}),
        ({"logit_bias": {"5": 100, "0": -1.5}}, {"logit_bias": ((0, -1.5), (5, 100.0))}),
        ({"logit_bias": {str(VOCAB - 1): 1}}, {"logit_bias": ((VOCAB - 1, 1.0),)}),
        ({"stop_token_ids": [7, 5, 7]}, {"stop_token_ids": (7, 5)}),
        ({"ignore_eos": True}, {"eos_token_ids": ()}),
        ({"min_tokens": 4, "max_tokens": 4}, {"min_tokens": 4, "max_tokens": 4}),
        ({"repetition_penalty": 1.3, "presence_penalty": -2}, {"repetition_penalty": 1.3, "presence_penalty": -2.0}),
    ],
)
def test_values_reach_the_sampler(tiny_model: ModelInfo, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """X-topk0-disable, API-19, API-23."""
    for prepare in (chat, complete):
        params = sampling(prepare(tiny_model, **fields))
        assert {name: getattr(params, name) for name in expected} == expected


def test_the_model_s_defaults_hold_where_a_field_is_absent(tiny_model: ModelInfo) -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1)
    model = replace(tiny_model, defaults=defaults, eos_token_ids=(0, 2))
    params = sampling(chat(model))
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.9)
    assert (params.min_p, params.repetition_penalty, params.eos_token_ids) == (0.05, 1.1, (0, 2))
    params = sampling(chat(model, temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1))
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 0, 1.0)
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)


def test_a_seed_is_drawn_for_each_request(tiny_model: ModelInfo) -> None:
    seeds = {sampling(chat(tiny_model)).seed for _ in range(20)}
    assert len(seeds) == 20


def test_parameters_are_legal_messages(tiny_model: ModelInfo) -> None:
    params = sampling(chat(tiny_model, n=4, logprobs=True, top_logprobs=20, logit_bias={"1": 1}, stop_token_ids=[3]))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_chat_logprobs(tiny_model: ModelInfo, fields: dict[str, Any], expected: int | None) -> None:
    """API-12, X-logprobs-chat-shape."""
    assert sampling(chat(tiny_model, **fields)).logprobs == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"echo": True}, "echo"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name"),
    ],
)
def test_chat_refusals(tiny_model: ModelInfo, fields: dict[str, Any], param: str) -> None:
    """API-12, API-26, X-empty-prompt."""
    with pytest.raises(InvalidRequestError) as caught:
        chat(tiny_model, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("logprobs", [0, 1, 5, 20])
def test_completion_logprobs(tiny_model: ModelInfo, logprobs: int) -> None:
    """API-11."""
    assert sampling(complete(tiny_model, logprobs=logprobs)).logprobs == logprobs


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([-1], {}, "prompt"),
        ([[-1]], {}, "prompt[0]"),
        ([VOCAB], {}, "prompt"),
        ([2**31], {}, "prompt"),
        ([2**63], {}, "prompt"),
        ([True], {}, "prompt[0]"),
        ([1.5], {}, "prompt[0]"),
        ([1.0], {}, "prompt[0]"),
        ([], {}, "prompt"),
        ([[]], {}, "prompt[0]"),
        (["a", [1]], {}, "prompt"),
        ([1, "a"], {}, "prompt"),
        ("", {}, "prompt"),
        ([""], {}, "prompt[0]"),
        (["a", ""], {}, "prompt[1]"),
        (None, {}, "prompt"),
        (5, {}, "prompt"),
        ([[5]] * 2049, {}, "prompt"),
        ([[5]] * 2048, {"n": 3}, "n"),
        ("a", {"logprobs": 21}, "logprobs"),
        ("a", {"logprobs": -1}, "logprobs"),
        ("a", {"logprobs": True}, "logprobs"),
        ("a", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("a", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("a", {"min_tokens": 17}, "min_tokens"),
    ],
)
def test_completion_refusals(tiny_model: ModelInfo, prompt: Any, fields: dict[str, Any], param: str) -> None:
    """API-14, API-11, X-empty-prompt."""
    with pytest.raises(InvalidRequestError) as caught:
        complete(tiny_model, prompt, **fields)
    assert caught.value.param == param


def test_prompt_forms_agree(tiny_model: ModelInfo) -> None:
    """X-prompt-forms: texts and ids, alone and in lists."""
    hi, yo = (tiny_model.tokenizer.encode(text, add_special_tokens=True).tolist() for text in ("hi", "yo"))
    for prompt in ("hi", hi, ["hi"], [hi]):
        assert [request.num_prompt_tokens for request in complete(tiny_model, prompt).prompts] == [len(hi)]
        assert routed(complete(tiny_model, prompt)).prompt_ids.tolist() == hi
    for pair in (["hi", "yo"], [hi, yo]):
        prepared = complete(tiny_model, pair, n=2)
        assert [routed(prepared, i).prompt_ids.tolist() for i in (0, 1)] == [hi, yo]
        assert [len(prompt.choices) for prompt in prepared.prompts] == [2, 2]
        assert routed(prepared, 0).request_id != routed(prepared, 1).request_id


def test_how_many_tokens(tiny_model: ModelInfo) -> None:
    """API-25."""
    prompt_len = len(routed(chat(tiny_model)).prompt_ids)
    assert sampling(chat(tiny_model)).max_tokens == 512 - prompt_len
    assert sampling(chat(tiny_model, max_tokens=5)).max_tokens == 5
    assert sampling(chat(tiny_model, max_tokens=5, max_completion_tokens=7)).max_tokens == 7
    assert sampling(complete(tiny_model)).max_tokens == 16
    assert sampling(complete(tiny_model, [5] * 510)).max_tokens == 2
    prepared = complete(tiny_model, max_tokens=0, echo=True)
    assert prepared.prompts[0].request is None
    assert prepared.prompts[0].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prepare", "fields", "param"),
    [
        (chat, {"max_tokens": 10**9}, "max_tokens"),
        (chat, {"max_completion_tokens": 512}, "max_completion_tokens"),
        (chat, {"messages": [{"role": "user", "content": "x" * 512}]}, "messages"),
        (complete, {"max_tokens": 512}, "max_tokens"),
        (complete, {"prompt": [5] * 512}, "prompt"),
        (complete, {"prompt": [5] * 513, "max_tokens": 0}, "prompt"),
    ],
)
def test_the_context_is_a_limit(tiny_model: ModelInfo, prepare: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ContextLengthError) as caught:
        prepare(tiny_model, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "content", ["same text", [{"type": "text", "text": "same "}, {"type": "text", "text": "text"}], ["same text"]]
)
def test_content_parts_are_their_concatenation(tiny_model: ModelInfo, content: Any) -> None:
    """API-26."""
    expected = routed(chat(tiny_model, messages=[{"role": "user", "content": "same text"}])).prompt_ids.tolist()
    mine = routed(chat(tiny_model, messages=[{"role": "user", "content": content}])).prompt_ids.tolist()
    assert mine == expected


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": []},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
    ],
)
def test_assistant_messages_without_content(tiny_model: ModelInfo, message: dict[str, Any]) -> None:
    """API-26: the specification's own shape, followed by a tool message with parts."""
    tool = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}]}
    assert tiny_model.chat_template is not None
    messages = [{"role": "user", "content": "hi"}, message, tool]
    text = tiny_model.chat_template.render(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}, {"role": "tool", "content": "42"}]
    )
    assert (
        routed(chat(tiny_model, messages=messages)).prompt_ids.tolist()
        == tiny_model.tokenizer.encode(text, add_special_tokens=False).tolist()
    )


def test_a_chat_without_a_template_is_refused(tiny_model: ModelInfo) -> None:
    """TOK-04."""
    with pytest.raises(InvalidRequestError, match="no chat template"):
        chat(replace(tiny_model, chat_template=None))


@pytest.mark.parametrize("name", ["nope", "", "TINY", "x" * 10_000])
def test_unknown_models(tiny_model: ModelInfo, name: str) -> None:
    """RT-12, MET-04."""
    for prepare in (chat, complete):
        with pytest.raises(ModelNotFoundError) as caught:
            prepare(tiny_model, model=name)
        assert len(caught.value.message) < 200
    assert chat(tiny_model, model="alias").head.model == "alias"
    assert chat(tiny_model).head.model == "tiny"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"nonsense",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b"[" * 100_000,
        b'{"logit_bias":' * 5000,
        b'{"tools":' + b"[" * 50_000,
    ],
)
def test_bodies_that_are_no_json_object(data: bytes) -> None:
    for decode in (decode_chat, decode_completion):
        with pytest.raises(InvalidRequestError):
            decode(data)


@pytest.mark.parametrize(
    ("decode", "fields", "param"),
    [
        (decode_chat, {}, "messages"),
        (decode_completion, {}, "prompt"),
        (decode_chat, {"messages": [], "response_format": {}}, "response_format.type"),
        (decode_completion, {"prompt": "a", "response_format": {"json_schema": {}}}, "response_format.type"),
    ],
)
def test_what_is_missing_is_named(decode: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(json.dumps(fields).encode())
    assert (caught.value.param, caught.value.message) == (param, f"{param}: a required field is missing")


def test_salts_separate_tenants_and_cache_salts(tiny_model: ModelInfo) -> None:
    data = json.dumps({"prompt": "a"}).encode()
    salted = json.dumps({"prompt": "a", "cache_salt": "s"}).encode()
    salts = [
        routed(prepare_completion(body, tiny_model, msgspec.structs.replace(LIMITS, tenant=tenant))).salt
        for body in map(decode_completion, (data, salted))
        for tenant in (b"", b"tenant-1", b"tenant-2")
    ]
    assert salts[0] == b""
    assert len(set(salts)) == len(salts)
    assert all(len(salt) <= 64 for salt in salts)


def test_errors_have_openai_s_shape(tiny_model: ModelInfo) -> None:
    with pytest.raises(TwopoolError) as caught:
        chat(tiny_model, max_tokens="5")
    assert caught.value.http_status == 400
    assert caught.value.message == "max_tokens: expected `int | null`, got `str`"
