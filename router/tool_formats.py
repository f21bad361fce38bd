"""How model families write tool calls: the grammar that forces them. The other direction is ``tool_parsers``."""

import json
import re
from collections.abc import Callable
from typing import Literal

from twopool.router.tools import Tool

ToolFormat = Literal["hermes", "llama3_json", "mistral"]
ReasoningFormat = Literal["deepseek_r1", "qwen3"]

TOOL_FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3_json", "mistral")
REASONING_FORMATS: tuple[ReasoningFormat, ...] = ("deepseek_r1", "qwen3")

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_OPEN, MISTRAL_ARGS = "[TOOL_CALLS]", "[ARGS]"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": (HERMES_OPEN, HERMES_CLOSE),
    "llama3_json": (LLAMA_TAG,),
    "mistral": (MISTRAL_OPEN, MISTRAL_ARGS),
}
"""Texts that may be tokens of their own, hidden from ordinary output."""

TokenId = Callable[[str], int | None]


def tool_format_of(template: str) -> ToolFormat:
    """What a chat template teaches its model; Hermes where it says nothing."""
    if MISTRAL_OPEN in template:
        return "mistral"
    if HERMES_OPEN not in template and (LLAMA_TAG in template or "<|eot_id|>" in template):
        return "llama3_json"
    return "hermes"


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """Whether a chat template is of a model that thinks aloud."""
    if THINK_OPEN not in template and THINK_CLOSE not in template:
        return None
    return "deepseek_r1" if "Assistant\uff5c>" in template else "qwen3"


def marker(text: str, token_id: TokenId) -> str:
    """``text`` in a Lark grammar: as its own token where there is one, or letter by letter."""
    number = token_id(text)
    return literal(text) if number is None else f"<[{number}]>"


def literal(text: str) -> str:
    """``text`` as a Lark string."""
    return json.dumps(text)


def call_rules(tool_format: ToolFormat, tools: tuple[Tool, ...], *, many: bool, token_id: TokenId) -> str:
    """Lark rules: ``calls`` is one call of one of ``tools``, or several; ``first`` is that without its opening mark.

    Refers to ``@arguments_i`` for tool *i*.
    """
    match tool_format:
        case "hermes":
            opening, closing = marker(HERMES_OPEN, token_id), marker(HERMES_CLOSE, token_id)
            heads = [f'{{"name": {json.dumps(tool.name)}, "arguments": ' for tool in tools]
            rules = _one_of(heads, "}")
            rules += f"rest: {literal(chr(10))} function {literal(chr(10))} {closing}\n"
            rules += f'first: rest ("\\n" {opening} rest)*\n' if many else "first: rest\n"
            return rules + f"calls: {opening} first\n"
        case "llama3_json":
            heads = [f'{{"name": {json.dumps(tool.name)}, "parameters": ' for tool in tools]
            rules = 'first: function ("; " function)*\n' if many else "first: function\n"
            return _one_of(heads, "}") + rules + "calls: first\n"
        case "mistral":
            opening = marker(MISTRAL_OPEN, token_id)
            if token_id(MISTRAL_ARGS) is not None:  # newer vocabularies: [TOOL_CALLS]name[ARGS]{...}
                arguments = marker(MISTRAL_ARGS, token_id)
                bodies = [f"{literal(tool.name)} {arguments} @arguments_{i}" for i, tool in enumerate(tools)]
                rules = "function: " + " | ".join(bodies) + "\n"
                rules += f"first: function ({opening} function)*\n" if many else "first: function\n"
            else:
                heads = [f'{{"name": {json.dumps(tool.name)}, "arguments": ' for tool in tools]
                rest = ' (", " function)*' if many else ""
                rules = _one_of(heads, "}") + f'first: "[" function{rest} "]"\n'
            return rules + f"calls: {opening} first\n"


def free_rules(tool_format: ToolFormat, token_id: TokenId) -> str:
    """Lark rule ``free``: any text, which turns into the calls of ``call_rules`` where it begins to call."""
    if tool_format == "llama3_json":  # only a whole message is a call
        start = rf"/[ \t\r\n]*([^{{ \t\r\n](.|\n)*)?/ & ~/[ \t\r\n]*{re.escape(LLAMA_TAG)}(.|\n)*/"
        return f"free: TEXT? | first\nTEXT: {start}\n"
    opening = HERMES_OPEN if tool_format == "hermes" else MISTRAL_OPEN
    number = token_id(opening)
    # Such a token may be special, and then it is no text, or be text that is one token.
    begun = "until" if number is None else f"until | TEXT? <[{number}]>"
    rules = f"free: TEXT? | begun first\nbegun: {begun}\nuntil[suffix={literal(opening)}]: /(.|\\n)*/\n"
    return rules + rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{re.escape(opening)}(.|\n)*/" + "\n"


def think_rules(*, opened: bool, token_id: TokenId) -> str:
    """Lark rule ``think``: what a model that thinks writes before its answer; ``opened`` by its prompt or by itself."""
    closing = marker(THINK_CLOSE, token_id)
    space = "SPACE: /[ \\n]{1,4}/\n"
    if token_id(THINK_CLOSE) is None:
        rules = f"thoughts[suffix={literal(THINK_CLOSE)}]: /(.|\\n)*/\n"
    else:
        rules = f"thoughts: THOUGHTS {closing}\nTHOUGHTS: /(.|\\n)*/\n"
    if opened:
        return space + rules + "think: thoughts SPACE?\n"
    return space + rules + f"think: ({marker(THINK_OPEN, token_id)} thoughts SPACE?)?\n"


def _one_of(heads: list[str], tail: str) -> str:
    bodies = [f"{literal(head)} @arguments_{i} {literal(tail)}" for i, head in enumerate(heads)]
    return "function: " + " | ".join(bodies) + "\n"
