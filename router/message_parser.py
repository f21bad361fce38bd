"""An assistant's text into reasoning, content and tool calls, the same way for streams and for whole answers."""

from dataclasses import dataclass
from typing import Any, Literal

from twopool.protocol.messages import FinishReason
from twopool.router.tool_formats import THINK_CLOSE, THINK_OPEN, ReasoningFormat, ToolFormat
from twopool.router.tool_parsers import CallLog, CallParser, MessageDelta, call_parser, partial_suffix
from twopool.router.tools import ToolUse

Reasoning = Literal["none", "perhaps", "inside"]
AnswerReason = FinishReason | Literal["tool_calls"]


def reasoning_at(prompt: str, reasoning: ReasoningFormat | None, *, continues: bool = False) -> Reasoning:
    """Where an answer to ``prompt`` begins: in the middle of reasoning, perhaps with some, or past it.

    A prompt that ends with ``<think>`` opens the reasoning, one that closes it at its end asks for none. Otherwise
    DeepSeek-R1 thinks without saying so, Qwen 3 where it writes ``<think>`` itself. A message that the answer
    ``continues`` is wherever its own marks leave it.
    """
    if reasoning is None:
        return "none"
    if continues:
        return "inside" if prompt.rfind(THINK_OPEN) > prompt.rfind(THINK_CLOSE) else "none"
    end = prompt.rstrip()
    if end.endswith(THINK_OPEN):
        return "inside"
    if end.endswith(THINK_CLOSE):
        return "none"
    return "inside" if reasoning == "deepseek_r1" else "perhaps"


@dataclass(frozen=True)
class MessageOptions:
    """How the messages of one request are read."""

    reasoning: Reasoning
    tool_format: ToolFormat
    tools: ToolUse | None
    shows_reasoning: bool = True

    @property
    def reads_nothing(self) -> bool:
        """Whether all text is content."""
        return self.reasoning == "none" and self.tools is None


class MessageParser:
    """Reads one choice's text. Newlines right after ``<think>`` and ``</think>`` belong to neither part."""

    def __init__(self, options: MessageOptions) -> None:
        self._reasoning: Reasoning = options.reasoning
        self._shows_reasoning = options.shows_reasoning
        self._buffer = ""
        self._at_start = options.reasoning == "inside"
        self._may_repeat_opening = options.reasoning == "inside"
        self._named = options.tools is not None and options.tools.mode == "named"
        self._calls: CallParser | None = None
        self._log: CallLog | None = None
        if options.tools is not None:
            names = frozenset(tool.name for tool in options.tools.tools)
            self._calls, self._log = call_parser(options.tool_format, names, many=options.tools.many)

    def push(self, text: str) -> MessageDelta:
        """What became certain with ``text``."""
        out = MessageDelta()
        if self._reasoning == "none" and not self._at_start:
            self._answer(text, out)
            return out
        self._buffer += text
        if self._reasoning == "perhaps":
            self._look_for_opening()
        if self._reasoning == "inside":
            self._reason(out)
        if self._reasoning == "none" and self._buffer:
            rest, self._buffer = self._without_newlines(self._buffer), ""
            self._answer(rest, out)
        return out

    def finish(self) -> MessageDelta:
        """What was held back until nothing could follow."""
        out = MessageDelta()
        rest, self._buffer = self._buffer, ""
        if self._reasoning == "inside":
            self._think(rest, out)
        elif rest:
            self._answer(rest, out)
        if self._calls is not None:
            self._calls.finish(out)
        return out

    def finish_reason(self, reason: FinishReason | None) -> AnswerReason | None:
        """``tool_calls`` where the model chose to call and every call is whole; a named tool ends with ``stop``."""
        if reason == "stop" and self._log is not None and not self._named and self._log.is_whole:
            return "tool_calls"
        return reason

    def _look_for_opening(self) -> None:
        text = self._buffer.lstrip()
        if text.startswith(THINK_OPEN):
            self._buffer = text[len(THINK_OPEN) :]
            self._reasoning = "inside"
            self._at_start = True
        elif not THINK_OPEN.startswith(text):
            self._reasoning = "none"

    def _reason(self, out: MessageDelta) -> None:
        if self._may_repeat_opening:
            text = self._buffer.lstrip()
            if THINK_OPEN.startswith(text) and text != THINK_OPEN:
                return
            self._may_repeat_opening = False
            if text.startswith(THINK_OPEN):
                self._buffer = text[len(THINK_OPEN) :]
        self._buffer = self._without_newlines(self._buffer)
        at = self._buffer.find(THINK_CLOSE)
        if at >= 0:
            self._think(self._buffer[:at], out)
            self._buffer = self._buffer[at + len(THINK_CLOSE) :]
            self._reasoning = "none"
            self._at_start = True
            return
        keep = len(self._buffer) - partial_suffix(self._buffer, THINK_CLOSE)
        self._think(self._buffer[:keep], out)
        self._buffer = self._buffer[keep:]

    def _think(self, text: str, out: MessageDelta) -> None:
        if self._shows_reasoning:
            out.reasoning += text

    def _without_newlines(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text

    def _answer(self, text: str, out: MessageDelta) -> None:
        if self._calls is not None:
            self._calls.push(text, out)
        else:
            out.content += text


def delta_json(delta: MessageDelta) -> dict[str, Any]:
    """The ``delta`` of a stream's event."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.calls:
        fields["tool_calls"] = [_call_json(call.index, call.call_id, call.name, call.arguments) for call in delta.calls]
    return fields


def message_json(deltas: list[MessageDelta]) -> dict[str, Any]:
    """The ``message`` that ``deltas`` add up to."""
    content = "".join([delta.content for delta in deltas])
    reasoning = "".join([delta.reasoning for delta in deltas])
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for delta in deltas for call in delta.calls):
        if call.call_id is not None:
            calls[call.index] = {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
        else:
            calls[call.index]["function"]["arguments"] += call.arguments
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message |= {"content": content or None, "tool_calls": list(calls.values())}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def _call_json(index: int, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    if call_id is None:
        return {"index": index, "function": {"arguments": arguments}}
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
