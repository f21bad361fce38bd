"""From the structured-output fields of a request to the grammar its workers follow.

The text made here is llguidance's own notation; it is checked with the limits the workers apply, so that what is
admitted also compiles there. Checking takes up to a second for the largest grammars: call this off the event loop.
"""

import functools
import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec
from llguidance import LLMatcher, grammar_from

from twopool.protocol.errors import InvalidRequestError
from twopool.protocol.grammar import grammar_limits
from twopool.protocol.messages import MAX_GRAMMAR_CHARS
from twopool.router.schema import GenerationBody
from twopool.router.tool_formats import TokenId, ToolFormat, call_rules, free_rules, think_rules
from twopool.router.tools import ToolUse

MAX_CHOICES = 4096
MAX_COUNT = 1_000_000
"""Longest string, array or object a schema may demand: more fits no context."""

WHITESPACE = r"(\r?\n[ \t]{0,32}|[ \t]{1,4})"
"""All that may stand between two tokens of JSON: indented lines, and no endless run."""

_COUNTS = ("minLength", "minItems", "minProperties")

Grammar = dict[str, Any]
"""One entry of llguidance's list of grammars: ``json_schema`` or ``lark_grammar``."""


@dataclass(frozen=True)
class Surroundings:
    """What else an answer may hold: ``opened``, ``optional`` or no reasoning before it, and calls of tools."""

    reasoning: str
    tool_format: ToolFormat
    tools: ToolUse | None
    token_id: TokenId


def may_take_long(body: GenerationBody) -> bool:
    """Whether there may be a grammar to check."""
    # Written out: a generator costs ten times as much.
    return (
        body.response_format is not None
        or body.tools is not None
        or body.structured_outputs is not None
        or body.guided_json is not None
        or body.guided_regex is not None
        or body.guided_choice is not None
        or body.guided_grammar is not None
    )


def output_grammar(body: GenerationBody, around: Surroundings) -> str | None:
    """The grammar of one request's output, checked; ``None`` when anything goes.

    Raises ``InvalidRequestError`` naming the field.
    """
    wanted = _wanted(body)
    tools = around.tools
    if wanted is None and (tools is None or not (tools.forced or tools.strict)):
        return None
    if wanted is not None and tools is not None and tools.forced:
        raise InvalidRequestError(
            f"{wanted[0]}: cannot be combined with a tool_choice that forces a call", param=wanted[0]
        )
    parts: list[tuple[str, Grammar]] = []
    rules = ""
    ways = []
    if wanted is not None:
        parts.append((wanted[0], {**wanted[1], "name": "answer"}))
        ways.append("@answer")
    if tools is not None:
        rules = call_rules(around.tool_format, tools.tools, many=tools.many, token_id=around.token_id)
        is_free = wanted is None and not tools.forced
        if is_free:
            rules += free_rules(around.tool_format, around.token_id)
        ways.append("free" if is_free else "calls")
        for index, tool in enumerate(tools.tools):
            schema = tool.parameters if tool.strict or not is_free else {"type": "object"}
            arguments = _json_grammar(schema, tool.path, lenient=tool.strict is False)
            parts.append((tool.path, {**arguments, "name": f"arguments_{index}"}))
    grammars = [grammar for _, grammar in parts]
    if around.reasoning != "none" or ways != ["@answer"]:
        start = "start: output\n"
        if around.reasoning != "none":
            start = "start: think output\n" + think_rules(opened=around.reasoning == "inside", token_id=around.token_id)
        lark = f"{start}output: {' | '.join(ways)}\n{rules}"
        grammars.insert(0, {"name": "start", "lark_grammar": lark})
    text = _text(parts[0][0], grammars)  # bounds what is to be checked
    for path, grammar in parts:
        _check(path, [grammar])
    return text


def _wanted(body: GenerationBody) -> tuple[str, Grammar] | None:
    """The one field that shapes the output, and its grammar."""
    found: list[tuple[str, Grammar]] = []
    response_format = body.response_format
    if response_format is not None and response_format.type != "text":
        found.append(_response_format(response_format.type, response_format.json_schema))
    for path, kind, value in _guided(body):
        if value is not None:
            found.append((path, _GUIDED[kind](value, path)))
    if len(found) > 1:
        raise InvalidRequestError(f"{found[1][0]}: cannot be combined with {found[0][0]}", param=found[1][0])
    return found[0] if found else None


def _response_format(kind: str, schema: Any) -> tuple[str, Grammar]:
    if kind == "json_object":
        return "response_format", _json_grammar({"type": "object"}, "response_format")
    if kind != "json_schema":
        raise InvalidRequestError(
            f"response_format.type: {kind[:64]!r} is not one of text, json_object, json_schema",
            param="response_format.type",
        )
    path = "response_format.json_schema"
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{path}: expected an object", param=path)
    for name in ("name", "description"):
        if not isinstance(schema.get(name), str | None):
            raise InvalidRequestError(f"{path}.{name}: expected a string", param=f"{path}.{name}")
    strict = schema.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"{path}.strict: expected true or false", param=f"{path}.strict")
    path += ".schema"
    return path, _json_grammar(schema.get("schema"), path, lenient=strict is False)


def _guided(body: GenerationBody) -> list[tuple[str, str, Any]]:
    """(field, kind, value) of vLLM's fields, old and new."""
    fields = [(field, kind, getattr(body, field)) for field, kind in _OLD_FIELDS]
    if body.structured_outputs is None:
        return fields
    # vLLM's own object, dumped, has every option: those that are off change nothing.
    options = {name: value for name, value in body.structured_outputs.items() if not _is_off(name, value)}
    unknown = sorted(set(options) - set(_GUIDED))
    if unknown:
        path = f"structured_outputs.{unknown[0][:64]}"
        raise InvalidRequestError(f"{path}: not supported by this server", param=path)
    return fields + [(f"structured_outputs.{kind}", kind, options.get(kind)) for kind in _GUIDED]


def _is_off(name: str, value: Any) -> bool:
    return value is None or (value is False and name not in _NEVER_FALSE)


def _json_grammar(schema: Any, path: str, *, lenient: bool = False) -> Grammar:
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{path}: expected a JSON schema as an object", param=path)
    _check_counts(schema, path)
    overrides = {
        "whitespace_flexible": True,
        "whitespace_pattern": WHITESPACE,
        "item_separator": ",",
        "key_separator": ":",
        "lenient": lenient,
    }
    return {"json_schema": {**schema, "x-guidance": overrides}}


def _guided_json(value: Any, path: str) -> Grammar:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(f"{path}: not JSON: {error}", param=path) from error
    return _json_grammar(value, path)


def _json_object(value: Any, path: str) -> Grammar:
    if value is not True:
        raise InvalidRequestError(f"{path}: expected true", param=path)
    return _json_grammar({"type": "object"}, path)


def _regex(value: Any, path: str) -> Grammar:
    return _only(LLMatcher.grammar_from_regex(_string(value, path)))


def _choice(value: Any, path: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise InvalidRequestError(f"{path}: expected a list of non-empty strings", param=path)
    if len(value) > MAX_CHOICES:
        raise InvalidRequestError(f"{path}: at most {MAX_CHOICES} choices", param=path)
    return {"lark_grammar": "start: " + " | ".join(json.dumps(one) for one in dict.fromkeys(value))}


def _grammar(value: Any, path: str) -> Grammar:
    """Lark in llguidance's dialect, or GBNF/EBNF with ``root ::=``."""
    text = _string(value, path)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"{path}: at most {MAX_GRAMMAR_CHARS} characters", param=path)
    try:
        return _only(grammar_from("grammar", text))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path}: {error}"[:1000], param=path) from error


_GUIDED = {
    "json": _guided_json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_NEVER_FALSE = frozenset(_GUIDED) - {"json_object"}
_OLD_FIELDS = [(f"guided_{kind}", kind) for kind in _GUIDED if kind != "json_object"]


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{path}: expected a non-empty string", param=path)
    return value


def _only(text: str) -> Grammar:
    """llguidance writes one grammar as plain Lark or as a list of one."""
    if not text.lstrip().startswith("{"):
        return {"lark_grammar": text}
    grammar: Grammar = json.loads(text)["grammars"][0]
    return {key: value for key, value in grammar.items() if value is not None and key != "name"}


def _check_counts(schema: Any, path: str) -> None:
    """No part of ``schema`` demands more than any context holds."""
    open_parts = [schema]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, list):
            open_parts += part
        elif isinstance(part, dict):
            open_parts += part.values()
            for name in _COUNTS:
                count = part.get(name)
                if isinstance(count, int | float) and count > MAX_COUNT:
                    raise InvalidRequestError(f"{path}: {name} {count} is more than {MAX_COUNT}", param=path)


def _text(path: str, grammars: list[Grammar]) -> str:
    """The grammar's text, the first of ``grammars`` being where it starts."""
    try:
        text = json.dumps({"grammars": grammars}, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequestError(f"{path}: nested too deeply", param=path) from error
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{path}: {len(text)} characters of grammar, at most {MAX_GRAMMAR_CHARS} are taken", param=path
        )
    return text


def _check(path: str, grammars: list[Grammar]) -> None:
    if (error := _fault(_text(path, grammars))) is not None:
        raise InvalidRequestError(f"{path}: {error}", param=path)


@functools.lru_cache(maxsize=128)
def _fault(text: str) -> str | None:
    """What is wrong with a grammar, in one line."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=grammar_limits())
    if not failed:
        return None
    return re.sub(r"\s+", " ", messages[0]).strip()[:500]
