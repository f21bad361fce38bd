"""Structured output: what is refused and where the message points, and what the grammars made here accept."""

import json
import threading
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from twopool.protocol.errors import InvalidRequestError
from twopool.protocol.grammar import grammar_limits
from twopool.protocol.messages import MAX_GRAMMAR_CHARS
from twopool.router.grammar import Surroundings, output_grammar
from twopool.router.message_parser import MessageOptions, MessageParser, message_json
from twopool.router.model_info import ModelInfo
from twopool.router.prepared_request import PreparedRequest, RequestLimits, prepare_chat
from twopool.router.schema import ChatBody, ResponseFormat, decode_chat
from twopool.router.tool_formats import MARKERS, TOOL_FORMATS, ToolFormat
from twopool.router.tools import tool_use
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import running_server
from twopool_testing.tiny_tokenizers import byte_level_tokenizer

LIMITS = RequestLimits(
    served_names=("tiny",), max_model_len=512, vocab_size=330, timeout_s=9.0, arrived_s=1.0, tenant=b""
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PERSON}},
    {"type": "function", "function": {"name": "stop"}},
]


class Judge:
    """Whether whole texts are outputs of a grammar."""

    def __init__(self, model: ModelInfo) -> None:
        from tokenizers import Tokenizer

        path = str(model.folder / "tokenizer.json")
        self._tokenizer = Tokenizer.from_file(path)
        self._llguidance = LLTokenizer(self._tokenizer.to_str(), n_vocab=model.vocab_size)

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = LLMatcher(self._llguidance, grammar, log_level=0, limits=grammar_limits())
        assert not matcher.is_error(), matcher.get_error()
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def judge(tiny_model: ModelInfo) -> Judge:
    return Judge(tiny_model)


def chat(model: ModelInfo, **fields: Any) -> PreparedRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return prepare_chat(decode_chat(json.dumps(body).encode()), model, LIMITS)


def grammar_of(model: ModelInfo, **fields: Any) -> str:
    request = chat(model, **fields).prompts[0].request
    assert request is not None and request.sampling.grammar is not None
    return request.sampling.grammar


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


INVALID_SCHEMAS: list[Any] = [
    *("x", [], 5, None, True, {"type": 123}, {"type": "hiccup"}, {"$ref": "#/nope"}, {"pattern": "("}),
    *({"minLength": 10**9}, {"enum": []}, nested(200), {"type": "object", "properties": {"a": {"not": {}}}}),
    *({"$ref": "https://example.com/schema.json"}, {"type": "string", "pattern": "^a{5}$", "maxLength": 3}),
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}},
]


@pytest.mark.parametrize("schema", INVALID_SCHEMAS, ids=lambda schema: str(schema)[:40])
def test_invalid_schemas_are_refused_however_often(tiny_model: ModelInfo, schema: Any) -> None:
    """API-27."""
    for _ in range(20):
        for fields in ({"response_format": json_schema(schema)}, {"guided_json": schema}):
            if fields == {"guided_json": None}:
                continue
            with pytest.raises(InvalidRequestError) as caught:
                chat(tiny_model, **fields)
            assert caught.value.param in ("response_format.json_schema.schema", "guided_json")
            assert caught.value.message.startswith(f"{caught.value.param}: ")
            assert len(caught.value.message) < 1000
    assert chat(tiny_model, response_format=json_schema({"const": "42"}))


RECURSIVE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (PERSON, '{"name": "Ada \\"L\\"", "age": 36}', '{"name": "Ada"}'),
        (PERSON, '{\n  "name": "",\n  "age": -1\n}', '{"name":"","age":1,"x":2}'),
        (RECURSIVE, '{"next": {"next": null}}', '{"next": 1}'),
        ({"const": "42"}, '"42"', "42"),
        ({}, '[1, {"a": null}]', "[1"),
        ({"enum": ["👩‍👩‍👧 日本語 é"]}, '"👩‍👩‍👧 日本語 é"', '"x"'),
    ],
)
def test_schemas_accept_what_conforms(tiny_model: ModelInfo, judge: Judge, schema: Any, good: str, bad: str) -> None:
    for fields in ({"response_format": json_schema(schema, strict=True)}, {"structured_outputs": {"json": schema}}):
        grammar = grammar_of(tiny_model, **fields)
        assert judge.accepts(grammar, good)
        assert not judge.accepts(grammar, bad)


def test_whitespace_is_bounded(tiny_model: ModelInfo, judge: Judge) -> None:
    """X-schema-whitespace-loop."""
    grammar = grammar_of(tiny_model, response_format={"type": "json_object"})
    for space in ("", " ", "\n  ", "\r\n\t", "\n" + " " * 32):
        assert judge.accepts(grammar, f'{{{space}"a":{space}1{space}}}')
    for space in (" " * 5, "\n\n", "\n" + " " * 33):
        assert not judge.accepts(grammar, f'{{{space}"a":1}}')
    assert not judge.accepts(grammar, '{"a":1} ')
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": ".*"}}
    assert not judge.accepts(grammar_of(tiny_model, guided_json=schema), '{     "a":1}')


def test_loose_schemas_follow_what_they_can(tiny_model: ModelInfo, judge: Judge) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    with pytest.raises(InvalidRequestError):
        chat(tiny_model, response_format=json_schema(schema))
    grammar = grammar_of(tiny_model, response_format=json_schema(schema, strict=False))
    assert judge.accepts(grammar, "[1, 2]")
    assert not judge.accepts(grammar, '["a"]')


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"guided_regex": '[a-c]{2}/"[0-9]+'}, 'ab/"07', "abc"),
        ({"guided_choice": ["yes", 'n"o\n', "🙂"]}, 'n"o\n', "maybe"),
        ({"guided_choice": ["yes", "yes please"]}, "yes please", "yes pl"),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")+'}, "abcb", "a"),
        ({"guided_grammar": 'start: "a" WORD\nWORD: /[x-z]+/'}, "axyz", "ax1"),
        ({"structured_outputs": {"choice": ["a"]}}, "a", "b"),
        ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
        ({"guided_json": json.dumps(PERSON)}, '{"name":"a","age":1}', "{}"),
    ],
)
def test_guided_fields(tiny_model: ModelInfo, judge: Judge, fields: dict[str, Any], good: str, bad: str) -> None:
    grammar = grammar_of(tiny_model, **fields)
    assert judge.accepts(grammar, good)
    assert not judge.accepts(grammar, bad)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"] * 5000}, "guided_choice"),
        ({"guided_grammar": "root ::= ((("}, "guided_grammar"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_grammar": "x" * (MAX_GRAMMAR_CHARS + 1)}, "guided_grammar"),
        ({"guided_json": {"enum": ["x" * MAX_GRAMMAR_CHARS]}}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format.json_schema"),
        ({"response_format": json_schema({}, strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": json_schema({}, description=5)}, "response_format.json_schema.description"),
        ({"structured_outputs": {"regex": False}}, "structured_outputs.regex"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS, "tool_choice": "required"}, "response_format"),
    ],
)
def test_refusals_name_the_field(tiny_model: ModelInfo, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(tiny_model, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools[0].function.strict"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": 5}}}],
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_invalid_tools(tiny_model: ModelInfo, fields: dict[str, Any], param: str) -> None:
    """X-tools-invalid."""
    with pytest.raises(InvalidRequestError) as caught:
        chat(tiny_model, **fields)
    assert caught.value.param == param
    assert chat(tiny_model, tools=TOOLS).prompts[0].request is not None


def test_parameters_are_an_object_unless_they_say_otherwise(tiny_model: ModelInfo) -> None:
    for properties in ({}, {"a": {"const": None}}):
        kinds: tuple[dict[str, Any], ...] = ({}, {"type": None}, {"type": "object"})
        tools = [
            [{"type": "function", "function": {"name": "f", "parameters": {**kind, "properties": properties}}}]
            for kind in kinds
        ]
        grammars = [json.loads(grammar_of(tiny_model, tools=one, tool_choice="required")) for one in tools]
        assert grammars[0] == grammars[1] == grammars[2]
        assert grammars[0]["grammars"][1]["json_schema"]["type"] == "object"


CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"name": "a", "age": 1}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"name": "a", "age": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"name": "a", "age": 1}}]',
}


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
@pytest.mark.parametrize("reasoning", ["none", "inside", "perhaps"])
def test_forced_calls_are_what_the_parser_reads(
    tiny_model: ModelInfo, judge: Judge, tool_format: ToolFormat, reasoning: Any
) -> None:
    for choice, parallel in (("required", None), ({"type": "function", "function": {"name": "add"}}, None)):
        tools = tool_use(TOOLS, choice, parallel)
        around = Surroundings(reasoning, tool_format, tools, tiny_model.tokenizer.token_id)
        grammar = output_grammar(ChatBody(messages=[]), around)
        assert grammar is not None
        thought = "thinking {</think>\n\n" if reasoning == "inside" else ""
        text = thought + CALLS[tool_format]
        assert judge.accepts(grammar, text)
        assert not judge.accepts(grammar, text.replace('"age": 1', '"age": "x"'))
        assert not judge.accepts(grammar, "no call")
        parser = MessageParser(MessageOptions(reasoning, tool_format, tools))
        message = message_json([parser.push(text), parser.finish()])
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "add", "arguments": '{"name": "a", "age": 1}'}
        ]
        stop = text.replace('{"name": "a", "age": 1}', "{}").replace('"add"', '"stop"')
        assert judge.accepts(grammar, stop) == (choice == "required")


def strict_tools(*strict: bool | None) -> list[dict[str, Any]]:
    """``TOOLS`` with their ``strict``."""
    return [
        {"type": "function", "function": {**tool["function"], "strict": value}}  # type: ignore[dict-item]
        for tool, value in zip(TOOLS, strict, strict=True)
    ]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_strict_tools_bind_a_model_that_may_call(tiny_model: ModelInfo, judge: Judge, tool_format: ToolFormat) -> None:
    """Any text, but what begins as a call is one, with arguments of the schema."""
    tools = tool_use(strict_tools(True, None), "auto", None)
    around = Surroundings("none", tool_format, tools, tiny_model.tokenizer.token_id)
    grammar = output_grammar(ChatBody(messages=[]), around)
    assert grammar is not None
    call = CALLS[tool_format]
    before = "" if tool_format == "llama3_json" else 'Let me <see> [it] {"a": "<tool_cal'
    for text in ("", "no call", "a {\n[TOOL", 'so: {"name": "add"}', call, before + call):
        assert judge.accepts(grammar, text), text
    for wrong in (call.replace('"age": 1', '"age": "x"'), call.replace('"add"', '"nope"'), call[:-1], call[:20]):
        assert not judge.accepts(grammar, wrong), wrong
        assert not judge.accepts(grammar, before + wrong), wrong
    parser = MessageParser(MessageOptions("none", tool_format, tools))
    message = message_json([parser.push(before + call), parser.finish()])
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"name": "a", "age": 1}'}
    loose = call.replace('{"name": "a", "age": 1}', '{"any": [1]}').replace('"add"', '"stop"')
    assert judge.accepts(grammar, loose)  # not a strict one


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("tool_format", ["hermes", "mistral"])
@pytest.mark.parametrize("strict", [True, None])
def test_marks_that_are_tokens(special: bool, tool_format: ToolFormat, strict: bool | None) -> None:
    """Qwen's are text in one token, Mistral's are special ones; followed by masks, as workers do."""
    tokenizer = byte_level_tokenizer()
    marks = [AddedToken(text, special=special, normalized=False) for text in MARKERS[tool_format][:2]]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(marks[: 2 if tool_format == "hermes" else 1])
    llguidance = LLTokenizer(tokenizer.to_str())
    tools = tool_use(strict_tools(strict, strict), "auto" if strict else "required", None)
    grammar = output_grammar(ChatBody(messages=[]), Surroundings("none", tool_format, tools, tokenizer.token_to_id))
    assert grammar is not None

    def accepts(text: str) -> bool:
        matcher = LLMatcher(llguidance, grammar, log_level=0, limits=grammar_limits())
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            if not matcher.compute_bitmask()[token // 8] >> token % 8 & 1:
                return False
            assert matcher.consume_token(token)
        return matcher.is_accepting()

    call = CALLS[tool_format]
    assert accepts(call)
    assert accepts("well " + call) == accepts("well") == bool(strict)
    assert not accepts(call.replace('"age": 1', '"age": "x"'))
    assert not accepts("well" + call[:13])


def test_strict_decides_how_closely_schemas_are_followed(tiny_model: ModelInfo, judge: Judge) -> None:
    unusual = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}

    def fields(strict: Any, choice: str) -> dict[str, Any]:
        function = {"name": "f", "parameters": unusual, "strict": strict}
        return {"tools": [{"type": "function", "function": function}], "tool_choice": choice}

    for strict, choice in ((None, "required"), (True, "required"), (True, "auto")):
        with pytest.raises(InvalidRequestError) as caught:
            chat(tiny_model, **fields(strict, choice))
        assert caught.value.param == "tools[0].function.parameters"
    grammar = grammar_of(tiny_model, **fields(False, "required"))
    assert judge.accepts(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": [1, 1]}}\n</tool_call>')
    assert not judge.accepts(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    for strict in (False, None):
        request = chat(tiny_model, **fields(strict, "auto")).prompts[0].request
        assert request is not None and request.sampling.grammar is None


def test_several_calls_only_where_wanted(tiny_model: ModelInfo, judge: Judge) -> None:
    one = CALLS["hermes"]
    assert judge.accepts(grammar_of(tiny_model, tools=TOOLS, tool_choice="required"), f"{one}\n{one}")
    single = grammar_of(tiny_model, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert judge.accepts(single, one)
    assert not judge.accepts(single, f"{one}\n{one}")


def test_an_answer_or_a_call(tiny_model: ModelInfo, judge: Judge) -> None:
    grammar = grammar_of(tiny_model, tools=TOOLS, response_format=json_schema(PERSON))
    assert judge.accepts(grammar, '{"name": "a", "age": 1}')
    assert judge.accepts(grammar, CALLS["hermes"])
    assert not judge.accepts(grammar, "text")
    assert chat(tiny_model, tools=TOOLS).prompts[0].request.sampling.grammar is None  # type: ignore[union-attr]


def test_reasoning_comes_before_the_answer(tiny_model: ModelInfo, judge: Judge) -> None:
    """``<think>`` is one token of this vocabulary, ``</think>`` is not."""
    body = ChatBody(messages=[], response_format=ResponseFormat(type="json_object"))
    perhaps = output_grammar(body, Surroundings("perhaps", "hermes", None, tiny_model.tokenizer.token_id))
    assert perhaps is not None
    assert judge.accepts(perhaps, "<think>\nhm {[</think>\n\n{}")
    assert judge.accepts(perhaps, "{}")
    assert not judge.accepts(perhaps, "hm</think>{}")


@pytest.mark.parametrize(
    "field",
    [
        '"response_format": {"type": "json_object"}',
        '"tools": []',
        '"structured_outputs": {"regex": "a"}',
        '"guided_json": {}',
        '"guided_regex": "a"',
        '"guided_choice": ["a"]',
        '"guided_grammar": "start: /a/"',
        r'"guided\u005fregex": "a"',
        r'"r\u0065sponse_format": {"type": "json_object"}',
    ],
)
async def test_grammars_are_checked_off_the_event_loop(
    tiny_model: ModelInfo, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """However the field is written."""
    threads = []

    def noted(*args: Any) -> str | None:
        threads.append(threading.get_ident())
        return output_grammar(*args)

    monkeypatch.setattr("twopool.router.prepared_request.output_grammar", noted)
    async with running_server(tiny_model, FakeDispatcher(lambda request, choice: [60])) as server:
        for body in (f'{{"messages": [{{"role": "user", "content": "hi"}}], "max_tokens": 1, {field}}}', PLAIN):
            response = await server.client.post("/v1/chat/completions", content=body)
            assert response.status_code == 200, response.text
    assert len(threads) == 2
    assert threads[0] != threading.get_ident() == threads[1]


PLAIN = '{"messages": [{"role": "user", "content": "a \\"guided_regex\\" and \\"tools\\""}], "max_tokens": 1}'
