"""The JSON of answers: whole bodies, and stream events as preformatted bytes around escaped text."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from twopool.router.choice_stream import ChoiceStream, TokenEntry
from twopool.router.detokenizer import TokenTable
from twopool.router.message_parser import delta_json, message_json
from twopool.router.prompt_scores import prompt_logprobs_json
from twopool.router.tool_parsers import MessageDelta

_encode = msgspec.json.encode
DONE_EVENT = b"data: [DONE]\n\n"


class AnswerHead(msgspec.Struct, frozen=True):
    """What every object of one answer carries. ``created`` is in seconds since the epoch."""

    answer_id: str
    created: int
    model: str
    is_chat: bool
    num_top_logprobs: int | None = None


@dataclass
class Usage:
    """Token counts of one HTTP request; ``prompt_tokens`` counts every prompt once, whatever ``n``."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class WholeChoice:
    """One finished choice of an answer that is not streamed. ``parts`` stand for ``text`` where it has some."""

    index: int
    text: str
    stream: ChoiceStream
    parts: list[MessageDelta] | None = None
    entries: list[TokenEntry] = field(default_factory=list)


def whole_answer(
    head: AnswerHead,
    choices: list[WholeChoice],
    usage: Usage,
    table: TokenTable,
    *,
    fingerprint: str | None,
    timings: Any = None,
) -> bytes:
    """The body of an answer that is not streamed."""
    body: dict[str, Any] = {
        "id": head.answer_id,
        "object": "chat.completion" if head.is_chat else "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [_whole_choice(head, choice, table) for choice in choices],
        "usage": usage.to_json(),
        "system_fingerprint": fingerprint,
    }
    if head.is_chat and choices[0].stream.prompt_top is not None:
        body["prompt_logprobs"] = _prompt_logprobs(choices[0], table)
    if head.is_chat and choices[0].stream.prompt_ids is not None:
        body["prompt_token_ids"] = choices[0].stream.prompt_ids
    if timings is not None:
        body["timings"] = timings
    return _encode(body)


def _prompt_logprobs(choice: WholeChoice, table: TokenTable) -> list[dict[str, Any] | None] | None:
    scores, num_top = choice.stream.prompt_scores, choice.stream.prompt_top
    return None if scores is None or num_top is None else prompt_logprobs_json(scores, num_top, table)


def _whole_choice(head: AnswerHead, choice: WholeChoice, table: TokenTable) -> dict[str, Any]:
    logprobs = logprobs_json(head, choice.entries, table)
    ending: dict[str, Any] = {
        "finish_reason": choice.stream.answer_reason,
        "stop_reason": choice.stream.stop_reason,
    }
    if choice.stream.prompt_ids is not None:
        if not head.is_chat:  # of a chat the answer itself carries them: it has one prompt
            ending["prompt_token_ids"] = choice.stream.prompt_ids
        ending["token_ids"] = choice.stream.take_ids()
    if not head.is_chat and choice.stream.prompt_scores is not None and choice.stream.prompt_top is not None:
        ending["prompt_logprobs"] = _prompt_logprobs(choice, table)
    if head.is_chat:
        message = message_json([MessageDelta(content=choice.text)] if choice.parts is None else choice.parts)
        return {"index": choice.index, "message": message, "logprobs": logprobs, **ending}
    return {"index": choice.index, "text": choice.text, "logprobs": logprobs, **ending}


def logprobs_json(head: AnswerHead, entries: list[TokenEntry], table: TokenTable) -> dict[str, Any] | None:
    """Chat's or completions' shape; ``None`` when none were asked for."""
    if head.num_top_logprobs is None:
        return None
    if head.is_chat:
        return {"content": [_chat_entry(entry, head.num_top_logprobs, table) for entry in entries], "refusal": None}
    return {
        "tokens": [table.token_text(entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprobs and _finite(entry.logprobs.logprob) for entry in entries],
        "top_logprobs": [entry.logprobs and _completion_tops(entry, head.num_top_logprobs, table) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _chat_entry(entry: TokenEntry, num_top: int, table: TokenTable) -> dict[str, Any]:
    assert entry.logprobs is not None  # only completions echo their prompts
    return {
        "token": table.token_text(entry.token_id),
        "logprob": _finite(entry.logprobs.logprob),
        "bytes": list(entry.piece),
        "top_logprobs": [
            {
                "token": table.token_text(token_id),
                "logprob": _finite(logprob),
                "bytes": list(table.token_bytes(token_id)),
            }
            for token_id, logprob in _tops(entry, num_top, table)
        ],
    }


def _completion_tops(entry: TokenEntry, num_top: int, table: TokenTable) -> dict[str, float]:
    """The best ``num_top`` and the chosen token."""
    assert entry.logprobs is not None
    tops = {table.token_text(token_id): _finite(logprob) for token_id, logprob in _tops(entry, num_top, table)}
    tops.setdefault(table.token_text(entry.token_id), _finite(entry.logprobs.logprob))
    return tops


def _tops(entry: TokenEntry, num_top: int, table: TokenTable) -> list[tuple[int, float]]:
    """Alternatives the tokenizer knows: ids of vocabulary padding have no text to report."""
    assert entry.logprobs is not None
    pairs = zip(entry.logprobs.top_ids, entry.logprobs.top_logprobs, strict=False)
    return [(token_id, logprob) for token_id, logprob in pairs if table.is_known(token_id)][:num_top]


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's own floor stands for a probability of zero."""
    return logprob if logprob > -9999.0 else -9999.0


class EventWriter:
    """Formats one stream's events. The fixed parts are encoded once; only text is escaped for each event."""

    def __init__(self, head: AnswerHead, table: TokenTable, *, fingerprint: str | None, usage_field: bool) -> None:
        self._head = head
        self._table = table
        kind = "chat.completion.chunk" if head.is_chat else "text_completion"
        fixed: dict[str, Any] = {"id": head.answer_id, "object": kind, "created": head.created, "model": head.model}
        self._start = b"data: " + _encode({**fixed, "system_fingerprint": fingerprint})[:-1] + b',"choices":['
        self._usage_null = b',"usage":null' if usage_field else b""
        self._text_end = b'},"logprobs":' if head.is_chat else b',"logprobs":'
        self._plain_end = self._text_end + b'null,"finish_reason":null}]' + self._end(None)
        self._text_starts: dict[int, bytes] = {}

    def role(self, index: int, usage: Usage | None, prompt_ids: list[int] | None = None) -> bytes:
        """The first event of a chat choice; the first of all carries the prompt's ids where they were asked for."""
        choice = b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null},' % index
        end = b'"logprobs":null,"finish_reason":null}]' + _prompt_ids_field(prompt_ids) + self._end(usage)
        return self._start + choice + end

    def plain_parts(self, index: int) -> tuple[bytes, bytes]:
        """What stands around the inside of the text's JSON string in an event of new text and nothing else: nearly
        every token's.
        """
        return self._text_start(index) + b'"', b'"' + self._plain_end

    def text(
        self,
        index: int,
        text: str,
        entries: list[TokenEntry],
        token_ids: list[int] | None,
        usage: Usage | None,
        prompt_ids: list[int] | None = None,
    ) -> bytes:
        """New text of one choice, with its logprobs and token ids where they were asked for; the first event of a
        completion's choice carries its prompt's ids then.
        """
        logprobs = _encode(logprobs_json(self._head, entries, self._table))
        ids = b"" if token_ids is None else b',"token_ids":' + _encode(token_ids)
        end = (
            self._text_end
            + logprobs
            + _prompt_ids_field(prompt_ids)
            + ids
            + b',"finish_reason":null}]'
            + self._end(usage)
        )
        return self._text_start(index) + _encode(text) + end

    def part(
        self,
        index: int,
        part: MessageDelta,
        entries: list[TokenEntry],
        token_ids: list[int] | None,
        usage: Usage | None,
    ) -> bytes:
        """A part of a chat message of several: content, reasoning, tool calls."""
        logprobs = _encode(logprobs_json(self._head, entries, self._table) if entries else None)
        ids = b"" if token_ids is None else b',"token_ids":' + _encode(token_ids)
        start = b'{"index":%d,"delta":%b,"logprobs":%b%b' % (index, _encode(delta_json(part)), logprobs, ids)
        return self._start + start + b',"finish_reason":null}]' + self._end(usage)

    def finish(self, index: int, stream: ChoiceStream, usage: Usage | None) -> bytes:
        """The last event of one choice."""
        body = b'"delta":{}' if self._head.is_chat else b'"text":""'
        ending = b'"finish_reason":%b,"stop_reason":%b}]' % (_encode(stream.answer_reason), _encode(stream.stop_reason))
        return self._start + b'{"index":%d,%b,"logprobs":null,%b' % (index, body, ending) + self._end(usage)

    def closing(self, usage: Usage | None, timings: Any = None) -> bytes:
        """The extra last event for whoever asked for usage or timings."""
        extra = b"]" if timings is None else b'],"timings":' + _encode(timings)
        return self._start + extra + self._end(usage)

    def _text_start(self, index: int) -> bytes:
        opening = b'{"index":%d,"delta":{"content":' if self._head.is_chat else b'{"index":%d,"text":'
        start = self._text_starts[index] = self._start + opening % index
        return start

    def _end(self, usage: Usage | None) -> bytes:
        if usage is None:
            return self._usage_null + b"}\n\n"
        return b',"usage":' + _encode(usage.to_json()) + b"}\n\n"


def _prompt_ids_field(prompt_ids: list[int] | None) -> bytes:
    return b"" if prompt_ids is None else b',"prompt_token_ids":' + _encode(prompt_ids)


def error_event(body: bytes) -> bytes:
    """``body`` is an error's JSON object."""
    return b"data: " + body + b"\n\n"
