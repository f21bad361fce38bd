"""Tool calls out of a model's text, as it grows: what is certain is told at once.

One class for each way families write them (``tool_formats``). Whatever turns out not to be a call stays content.
"""

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from twopool.router.json_calls import CallReader
from twopool.router.tool_formats import (
    HERMES_CLOSE,
    HERMES_OPEN,
    LLAMA_TAG,
    MISTRAL_OPEN,
    ToolFormat,
)

_SPACE = " \t\r\n"


@dataclass
class ToolCallDelta:
    """News of call ``index``: ``call_id`` and ``name`` come once, with the first one."""

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


@dataclass
class MessageDelta:
    """New parts of an assistant message."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


@dataclass
class _Call:
    arguments: list[str] = field(default_factory=list)
    is_complete: bool = False


class CallLog:
    """The calls of one message."""

    def __init__(self, new_id: Callable[[], str], *, many: bool) -> None:
        self._new_id = new_id
        self._many = many
        self._calls: list[_Call] = []
        self._is_muted = False

    @property
    def is_whole(self) -> bool:
        """Whether there are calls and each one's arguments are whole, valid JSON."""
        return bool(self._calls) and all(call.is_complete and _is_json("".join(call.arguments)) for call in self._calls)

    def begin(self, name: str, out: MessageDelta) -> None:
        self._is_muted = bool(self._calls) and not self._many
        if not self._is_muted:
            out.calls.append(ToolCallDelta(len(self._calls), "", self._new_id(), name))
            self._calls.append(_Call())

    def add(self, arguments: str, out: MessageDelta) -> None:
        if not arguments or self._is_muted:
            return
        self._calls[-1].arguments.append(arguments)
        index = len(self._calls) - 1
        if out.calls and out.calls[-1].index == index:
            out.calls[-1].arguments += arguments
        else:
            out.calls.append(ToolCallDelta(index, arguments))

    def end(self) -> None:
        if not self._is_muted:
            self._calls[-1].is_complete = True


class CallParser(Protocol):
    """Takes a message's text after its reasoning."""

    def push(self, text: str, out: MessageDelta) -> None: ...

    def finish(self, out: MessageDelta) -> None:
        """Nothing follows: what is held back is content."""


def call_parser(tool_format: ToolFormat, names: frozenset[str], *, many: bool) -> tuple[CallParser, CallLog]:
    """A parser of one message and the log it writes to."""
    log = CallLog(_short_id if tool_format == "mistral" else _long_id, many=many)
    match tool_format:
        case "hermes":
            return HermesParser(log), log
        case "llama3_json":
            return LlamaParser(log, names), log
        case "mistral":
            return MistralParser(log), log


class _Parser(ABC):
    """Content, then calls; subclasses say where a call begins and what may stand between calls.

    ``_text`` (looking for ``opening``) ⇄ ``_before`` (expecting a call) → ``_call`` → ``_after``. Each consumes some of
    the buffer and returns whether to go on; what is left waits for more text.
    """

    opening = ""

    def __init__(self, log: CallLog) -> None:
        self._log = log
        self._buffer = ""
        self._space = ""
        self._opened = ""
        self._reader = CallReader()
        self._announced = False
        self._state: Callable[[MessageDelta], bool] = self._text

    def push(self, text: str, out: MessageDelta) -> None:
        self._buffer += text
        while self._buffer and self._state(out):
            pass

    def finish(self, out: MessageDelta) -> None:
        rest, self._buffer = self._buffer, ""
        if self._state == self._call:
            if not self._announced:
                self._content(self._opened + "".join(self._reader.raw), out)
        elif self._state == self._before:
            self._content(self._opened + rest, out)
        elif self._state == self._text:
            self._content(rest, out)
            if self._space:
                out.content += self._space

    # --- states

    def _text(self, out: MessageDelta) -> bool:
        at = self._buffer.find(self.opening) if self.opening else -1
        if at >= 0:
            self._content(self._buffer[:at], out)
            self._buffer = self._buffer[at + len(self.opening) :]
            self._open(self.opening)
            return True
        held = partial_suffix(self._buffer, self.opening)
        keep = len(self._buffer) - held
        self._content(self._buffer[:keep], out)
        self._buffer = self._buffer[keep:]
        return False

    def _before(self, out: MessageDelta) -> bool:
        char = self._buffer[0]
        if char in _SPACE:
            self._consume()
        elif char == "{":
            self._begin(CallReader())
        else:
            self._give_up(out)
        return True

    def _call(self, out: MessageDelta) -> bool:
        reader = self._reader
        used = 0
        for char in self._buffer:
            reader.push(char)
            used += 1
            if reader.is_done or reader.is_failed:
                break
        self._buffer = self._buffer[used:]
        if reader.name is not None and not self._announced and self._is_tool(reader.name) and not reader.is_failed:
            self._announced = True
            self._space = ""
            self._log.begin(reader.name, out)
        if self._announced:
            self._log.add(reader.take_arguments(), out)
        if reader.is_failed or (reader.is_done and not self._announced):
            self._opened += "".join(reader.raw)
            self._give_up(out)
        elif reader.is_done:
            self._log.end()
            self._opened = ""
            self._state = self._after
        return True

    @abstractmethod
    def _after(self, out: MessageDelta) -> bool:
        """What may follow a call that is complete."""

    # --- steps

    def _is_tool(self, name: str) -> bool:
        return True

    def _open(self, opening: str) -> None:
        self._opened = opening
        self._state = self._before

    def _begin(self, reader: CallReader) -> None:
        self._reader = reader
        self._announced = False
        self._state = self._call

    def _consume(self) -> None:
        self._opened += self._buffer[0]
        self._buffer = self._buffer[1:]

    def _give_up(self, out: MessageDelta) -> None:
        """What was opened is no call. If part of it was told already, the rest is dropped."""
        if not self._announced:
            self._content(self._opened, out)
        self._opened = ""
        self._announced = False
        self._state = self._text

    def _content(self, text: str, out: MessageDelta) -> None:
        """White space waits: before a call it is no content."""
        text = self._space + text
        kept = text.rstrip(_SPACE)
        out.content += kept
        self._space = text[len(kept) :]


class HermesParser(_Parser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them (Hermes, Qwen)."""

    opening = HERMES_OPEN

    def _after(self, out: MessageDelta) -> bool:
        text = self._buffer = self._buffer.lstrip(_SPACE)
        if text.startswith("{"):
            self._begin(CallReader())
            return True
        if text.startswith(HERMES_CLOSE):
            self._buffer = text[len(HERMES_CLOSE) :]
        elif HERMES_CLOSE.startswith(text):
            return False
        self._state = self._text
        return bool(self._buffer)


class MistralParser(_Parser):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`` or ``[TOOL_CALLS]name[ARGS]{...}``."""

    opening = MISTRAL_OPEN

    def _before(self, out: MessageDelta) -> bool:
        char = self._buffer[0]
        if char == "[" and not self._buffer.startswith(MISTRAL_OPEN[: len(self._buffer)]):
            self._consume()
            return True
        if char in _SPACE or char == "{":
            return super()._before(out)
        at = self._buffer.find("{")
        if at < 0:
            return False
        name = self._buffer[:at].partition("[")[0].strip()
        if not name or not all(one.isalnum() or one in "_-." for one in name):
            self._give_up(out)
            return True
        self._opened += self._buffer[:at]
        self._buffer = self._buffer[at:]
        self._begin(CallReader.of(name))
        return True

    def _after(self, out: MessageDelta) -> bool:
        self._buffer = self._buffer.lstrip(_SPACE)
        if not self._buffer:
            return False
        if self._buffer[0] == ",":
            self._buffer = self._buffer[1:]
            self._open("")
            return True
        if self._buffer[0] == "]":
            self._buffer = self._buffer[1:]
        self._state = self._text
        return bool(self._buffer)


class LlamaParser(_Parser):
    """``{"name": ..., "parameters": {...}}`` as the whole message, several separated by ``;`` (Llama 3).

    Nothing marks such a call (``<|python_tag|>`` may, and need not), so only the names of known tools make one.
    """

    def __init__(self, log: CallLog, names: frozenset[str]) -> None:
        super().__init__(log)
        self._names = names
        self._state = self._start

    def finish(self, out: MessageDelta) -> None:
        if self._state == self._start:
            self._state = self._text
        super().finish(out)

    def _start(self, out: MessageDelta) -> bool:
        text = self._buffer.lstrip(_SPACE)
        if not text or (LLAMA_TAG.startswith(text) and text != LLAMA_TAG):
            return False
        if text.startswith(LLAMA_TAG):
            self._open(self._buffer[: len(self._buffer) - len(text)] + LLAMA_TAG)
            self._buffer = text[len(LLAMA_TAG) :]
        elif text.startswith("{"):
            self._open("")
        else:
            self._state = self._text
        return True

    def _is_tool(self, name: str) -> bool:
        return name in self._names

    def _after(self, out: MessageDelta) -> bool:
        self._buffer = self._buffer.lstrip(_SPACE)
        if not self._buffer:
            return False
        if self._buffer[0] in ";,":
            self._buffer = self._buffer[1:]
        if self._buffer and self._buffer.lstrip(_SPACE)[:1] not in ("{", ""):
            self._state = self._text
        else:
            self._open("")
        return bool(self._buffer)


def partial_suffix(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def _is_json(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates take nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
