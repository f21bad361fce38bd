"""The ``tools`` and ``tool_choice`` of a chat request, checked."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from twopool.protocol.errors import InvalidRequestError

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """One function; ``parameters`` is the JSON schema of its arguments, always of an object."""

    name: str
    parameters: dict[str, Any]
    path: str
    """where the schema stands in the request, for messages"""
    strict: bool | None = None
    """whether arguments must conform to the schema: true even where the model need not call; false lets go of what
    cannot be enforced in a schema"""


@dataclass(frozen=True)
class ToolUse:
    """What a request lets the model call.

    ``mode``: ``auto`` (it may), ``required`` (it must), ``named`` (it must call the only one in ``tools``).
    ``shown`` is the request's own list, for the chat template.
    """

    mode: Literal["auto", "required", "named"]
    tools: tuple[Tool, ...]
    shown: list[dict[str, Any]]
    many: bool

    @property
    def forced(self) -> bool:
        return self.mode != "auto"

    @property
    def strict(self) -> bool:
        """Whether the calls of one of the tools must conform, if the model chooses to call."""
        return any(tool.strict is True for tool in self.tools)


def tool_use(tools: Any, choice: Any, parallel: bool | None) -> ToolUse | None:
    """``None`` when nothing may be called. Raises ``InvalidRequestError`` naming the field."""
    given = _tools(tools)
    shown = [_without_nulls(tool) for tool in tools or ()]
    mode, name = _choice(choice)
    if mode in ("required", "named") and not given:
        raise InvalidRequestError("tool_choice: needs tools to choose from", param="tool_choice")
    if mode == "none" or not given:
        return None
    if mode == "named":
        chosen = tuple(tool for tool in given if tool.name == name)
        if not chosen:
            raise InvalidRequestError(f"tool_choice: there is no tool named {name!r}", param="tool_choice")
        return ToolUse("named", chosen, shown, many=False)
    return ToolUse("auto" if mode == "auto" else "required", given, shown, many=parallel is not False)


def _without_nulls(tool: dict[str, Any]) -> dict[str, Any]:
    """Null means absent, for the chat template too. In the schema of the parameters it is a value like any other."""
    function = {key: value for key, value in tool["function"].items() if value is not None}
    return {**{key: value for key, value in tool.items() if value is not None}, "function": function}


def _tools(tools: Any) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise InvalidRequestError("tools: expected a list", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools: at most {MAX_TOOLS}, got {len(tools)}", param="tools")
    parsed = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for index, tool in enumerate(parsed):
        if tool.name in seen:
            path = f"tools[{index}].function.name"
            raise InvalidRequestError(f"{path}: {tool.name!r} is defined twice", param=path)
        seen.add(tool.name)
    return parsed


def _tool(tool: Any, path: str) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise InvalidRequestError(f'{path}: expected {{"type": "function", "function": {{...}}}}', param=path)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{path}.function.name: expected 1 to 64 letters, digits, '_', '-' or '.'"
        raise InvalidRequestError(message, param=f"{path}.function.name")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(
            f"{path}.function.description: expected a string", param=f"{path}.function.description"
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        message = f"{path}.function.strict: expected true or false"
        raise InvalidRequestError(message, param=f"{path}.function.strict")
    parameters = function.get("parameters")
    path += ".function.parameters"
    if parameters is None:
        return Tool(name, _NO_PARAMETERS, path, strict)
    if not isinstance(parameters, dict):
        raise InvalidRequestError(f"{path}: expected a JSON schema", param=path)
    if parameters.get("type") not in (None, "object"):
        raise InvalidRequestError(f"{path}.type: arguments are an object", param=f"{path}.type")
    return Tool(name, {**parameters, "type": "object"}, path, strict)


def _choice(choice: Any) -> tuple[str, str | None]:
    """(none, auto, required or named; the name)"""
    if choice is None:
        return "auto", None
    if choice in ("none", "auto", "required"):
        return str(choice), None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") not in (None, "function"):
        raise InvalidRequestError(
            'tool_choice: expected "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    return "named", name
