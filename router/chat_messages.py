"""Chat messages as clients write them, checked and brought into the form chat templates expect."""

from typing import Any

import msgspec

from twopool.protocol.errors import InvalidRequestError
from twopool.router.chat_template import ChatMessage

_ROLES_WITHOUT_CONTENT = frozenset({"assistant"})
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def template_messages(messages: list[dict[str, Any]]) -> list[ChatMessage]:
    """Contents become plain strings (parts are joined), tool-call arguments become objects.

    Raises ``InvalidRequestError`` naming the message. Keys not known here are passed on: templates may read them.
    """
    if not messages:
        raise InvalidRequestError("messages: at least one message is needed", param="messages")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: dict[str, Any], path: str) -> ChatMessage:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{path}.role: expected a non-empty string", param=f"{path}.role")
    result = _given(message)
    content = _text(message.get("content"), f"{path}.content")
    tool_calls = message.get("tool_calls")
    if tool_calls is not None:
        result["tool_calls"] = _tool_calls(tool_calls, f"{path}.tool_calls")
    if content is None:
        refusal = message.get("refusal")
        if role not in _ROLES_WITHOUT_CONTENT:
            raise InvalidRequestError(f"{path}.content: required for role {role!r}", param=f"{path}.content")
        content = refusal if isinstance(refusal, str) else ""
    result["content"] = content
    return result


def _text(content: Any, path: str) -> str | None:
    """The text of a content: a string, or the concatenation of its text parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{path}: expected a string or a list of content parts", param=path)
    return "".join([_part_text(part, f"{path}[{index}]") for index, part in enumerate(content)])


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        shown = kind if isinstance(kind, str) else type(part).__name__
        raise InvalidRequestError(
            f"{path}.type: content part {shown!r} is not supported, only text", param=f"{path}.type"
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{path}.{key}: expected a string", param=f"{path}.{key}")
    return text


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{path}: expected a list", param=path)
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{path}.function.name: expected a string", param=f"{path}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json_object(arguments)
    return {**_given(call), "function": {**_given(function), "arguments": arguments}}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Null means absent."""
    return {key: value for key, value in fields.items() if value is not None}


def _json_object(text: str) -> Any:
    """Templates expect an object, the API carries its JSON text; what does not parse stays text."""
    try:
        value = msgspec.json.decode(text) if text else {}
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
