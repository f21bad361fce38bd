"""Assistant messages out of text: every way to cut the text into pieces gives the same message."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twopool.protocol.messages import FinishReason
from twopool.router.message_parser import MessageOptions, MessageParser, Reasoning, message_json, reasoning_at
from twopool.router.tool_formats import ToolFormat, reasoning_format_of, tool_format_of
from twopool.router.tool_parsers import MessageDelta
from twopool.router.tools import tool_use

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "f.g-2")]
ARGUMENTS = '{"city": "S\\u00e3o \\"Paulo\\" {[", "days": [1, {"n": null}], "nested": {"é": "}"}}'


def read(
    pieces: list[str],
    tool_format: ToolFormat = "hermes",
    *,
    choice: Any = "auto",
    reasoning: Reasoning = "none",
    many: bool | None = None,
    reason: FinishReason = "stop",
    tools: bool = True,
    shows_reasoning: bool = True,
) -> tuple[dict[str, Any], str | None, list[MessageDelta]]:
    use = tool_use(TOOLS if tools else None, choice, many)
    options = MessageOptions(reasoning, tool_format, use, shows_reasoning=shows_reasoning)
    parser = MessageParser(options)
    deltas = [delta for delta in [*map(parser.push, pieces), parser.finish()] if delta]
    message = message_json(deltas)
    for call in message.get("tool_calls", ()):
        assert call.pop("id")
        assert call.pop("type") == "function"
    return message, parser.finish_reason(reason), deltas


def calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())
    ]


HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEXTS: list[tuple[ToolFormat, str, str | None, int]] = [
    ("hermes", HERMES, None, 1),
    ("hermes", f"Let me see.\n\n{HERMES}\n{HERMES}", "Let me see.", 2),
    ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "f.g-2"}}</tool_call> done', " done", 1),
    ("hermes", '<tool_call>{"name": "get_weather"}</tool_call>', None, 1),
    ("hermes", "a <tool_ca and <b>", "a <tool_ca and <b>", 0),
    ("hermes", '<tool_call>not json</tool_call> and {"x": 1}\n', '<tool_call>not json</tool_call> and {"x": 1}\n', 0),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}', None, 1),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "f.g-2", "parameters": {ARGUMENTS}}}; {{"name": "f.g-2", "parameters": {{}}}}',
        None,
        2,
    ),
    ("llama3_json", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', 0),
    ("llama3_json", '{"x": [1, 2]} and more', '{"x": [1, 2]} and more', 0),
    ("llama3_json", "plain {text}", "plain {text}", 0),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]', None, 1),
    (
        "mistral",
        f'Hm. [TOOL_CALLS][{{"name": "f.g-2", "arguments": {ARGUMENTS}}}, {{"name": "f.g-2", "arguments": {{}}}}]',
        "Hm.",
        2,
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]f.g-2[ARGS]{{}}", None, 2),
    ("mistral", "[TOOL_CALLS] what?", "[TOOL_CALLS] what?", 0),
    ("mistral", "[TOOL", "[TOOL", 0),
]


@pytest.mark.parametrize(("tool_format", "text", "content", "num_calls"), TEXTS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_cutting_gives_the_same_message(
    tool_format: ToolFormat, text: str, content: str | None, num_calls: int, data: st.DataObject
) -> None:
    bounds = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=8))})
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    message, reason, _ = read(pieces, tool_format)
    assert message["content"] == content
    assert len(calls(message)) == num_calls
    assert reason == ("tool_calls" if num_calls else "stop")
    letters, letters_reason, deltas = read(list(text), tool_format)
    assert (letters, letters_reason) == (message, reason)
    for index in range(num_calls):
        news = [call for delta in deltas for call in delta.calls if call.index == index]
        assert [call.name is not None for call in news] == [True] + [False] * (len(news) - 1)
        assert all((call.call_id is None) == (call.name is None) for call in news)


def test_arguments_are_the_models_own_text() -> None:
    message, _, deltas = read(list(HERMES))
    assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert len([call for delta in deltas for call in delta.calls]) > len(ARGUMENTS) // 2


@pytest.mark.parametrize("end", range(len(HERMES)))
def test_cut_off_calls_are_no_tool_calls(end: int) -> None:
    """API-28: while arguments are incomplete the answer ends with what the engine said."""
    message, reason, _ = read([HERMES[:end]], reason="length")
    assert reason == "length"
    message, reason, _ = read([HERMES[:end]], reason="stop")
    if reason == "tool_calls":
        assert calls(message) == [("get_weather", json.loads(ARGUMENTS))]


def test_choices_that_end_otherwise() -> None:
    """X-tool-finish-reason: as OpenAI does it, a named function ends with ``stop``."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert read([HERMES], choice=named)[1] == "stop"
    assert read([HERMES], choice="required")[1] == "tool_calls"
    message, reason, _ = read([HERMES], choice="none")
    assert (message["content"], reason) == (HERMES, "stop")
    assert "tool_calls" not in message
    assert len(calls(read([HERMES * 3], many=False)[0])) == 1
    broken = HERMES.replace("null", "nil")
    assert read([broken])[1] == "stop"


@pytest.mark.parametrize(
    ("reasoning", "text", "thought", "content"),
    [
        ("perhaps", "<think>\nA<b\n</think>\n\nHello", "A<b\n", "Hello"),
        ("perhaps", "\n<think>A</think>B</think>", "A", "B</think>"),
        ("perhaps", "\nHello <think>x</think>", "", "\nHello <think>x</think>"),
        ("perhaps", "<thin", "", "<thin"),
        ("inside", "A\n</think>\nHello", "A\n", "Hello"),
        ("inside", "\n<think>\nA</think>B", "A", "B"),
        ("inside", "no end </thin", "no end </thin", ""),
        ("none", "<think>A</think>", "", "<think>A</think>"),
    ],
)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_reasoning(reasoning: Reasoning, text: str, thought: str, content: str, data: st.DataObject) -> None:
    bounds = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=8))})
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    message, _, _ = read(pieces, reasoning=reasoning, tools=False)
    assert (message.get("reasoning_content", ""), message["content"]) == (thought, content)
    hidden, _, deltas = read(pieces, reasoning=reasoning, tools=False, shows_reasoning=False)
    assert (hidden.get("reasoning_content"), hidden["content"]) == (None, content)
    assert all(delta.content for delta in deltas)


def test_reasoning_before_calls() -> None:
    message, reason, _ = read(list(f"<think>\nhm <tool_call>\n</think>\n\n{HERMES}"), reasoning="perhaps")
    assert message["reasoning_content"] == "hm <tool_call>\n"
    assert message["content"] is None
    assert calls(message)[0][0] == "get_weather"
    assert reason == "tool_calls"


def test_where_an_answer_begins() -> None:
    assert reasoning_at("...assistant\n<think>\n", "qwen3") == "inside"
    assert reasoning_at("...assistant\n<think>\n\n</think>\n\n", "qwen3") == "none"
    assert reasoning_at("...assistant\n", "qwen3") == "perhaps"
    assert reasoning_at("...", "deepseek_r1") == "inside"
    assert reasoning_at("<think>", None) == "none"
    assert reasoning_at("<think>a", "qwen3", continues=True) == "inside"
    assert reasoning_at("<think>a</think>b", "deepseek_r1", continues=True) == "none"


def test_formats_by_template() -> None:
    assert tool_format_of("{% if tools %}<tool_call>{% endif %}<|eot_id|>") == "hermes"
    assert tool_format_of("<|start_header_id|>x<|eot_id|>") == "llama3_json"
    assert tool_format_of("[AVAILABLE_TOOLS] [TOOL_CALLS]") == "mistral"
    assert tool_format_of("<|im_start|>") == "hermes"
    assert reasoning_format_of("<\uff5cAssistant\uff5c>x</think>") == "deepseek_r1"
    assert reasoning_format_of("'<think>' <|im_start|>") == "qwen3"
    assert reasoning_format_of("<|im_start|>") is None
