"""One choice from token ids to text: detokenising, stop strings, logprobs, and what is ready to be sent.

``RUNNING → FINISHED``: by the engine's finish reason or by a stop string found here; nothing is taken afterwards.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from twopool.protocol.messages import FinishReason, TokenDelta, TokenLogprobs
from twopool.router.detokenizer import TokenTable, json_inside
from twopool.router.message_parser import AnswerReason, MessageOptions, MessageParser
from twopool.router.prompt_scores import PromptScores
from twopool.router.stop_strings import StopMatch, StopMatcher
from twopool.router.tool_parsers import MessageDelta


class TextOptions(msgspec.Struct, frozen=True):
    """How a choice's ids become text; the same for all choices of a request.

    The text of the first ``min_tokens`` tokens is not searched for stop strings. ``stop_token_ids`` are the client's
    own (not the model's EOS): ending at one is worth telling. ``ranked`` choices are compared by their ``mean_logprob``
    in the end. ``markers`` are special tokens whose text is shown
    whatever ``skip_special_tokens`` says: whoever reads the message needs it.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    min_tokens: int = 0
    logprobs: bool = False
    ranked: bool = False
    markers: Mapping[int, str] = msgspec.field(default_factory=dict)


@dataclass
class TokenEntry:
    """One token's logprobs; of a prompt's first token there are none.

    ``piece`` are the bytes it contributed to the text shown (not told of prompts: only completions echo them, whose
    entries have no bytes), ``offset`` is in characters.

    ``ready_at`` is how many characters must have been shown before the entry may be: ``None`` while its bytes wait for
    the rest of a character.
    """

    token_id: int
    piece: bytes
    offset: int
    logprobs: TokenLogprobs | None
    ready_at: int | None = None


class ChoiceStream:
    """Takes accepted tokens, gives text that is certain."""

    __slots__ = (
        "_detokenizer",
        "_entries",
        "_is_empty",
        "_matcher",
        "_message",
        "_message_is_over",
        "_new_ids",
        "_num_decoded",
        "_num_prefix",
        "_num_shown",
        "_options",
        "_plain",
        "_prefix_offsets",
        "_push_id",
        "_ready",
        "_sum_logprobs",
        "_table",
        "finish_reason",
        "num_tokens",
        "prompt_ids",
        "prompt_scores",
        "prompt_top",
        "stop_reason",
    )

    def __init__(
        self,
        table: TokenTable,
        options: TextOptions,
        *,
        prefix: str = "",
        prefix_offsets: list[int] | None = None,
        prompt_ids: list[int] | None = None,
        message: MessageOptions | None = None,
        prompt_top: int | None = None,
        is_empty: bool = False,
    ) -> None:
        """``prefix`` is shown before the choice's own text (the echoed prompt); offsets count it. Its tokens begin at
        ``prefix_offsets``; without those it is what they decode to. With ``prompt_ids`` the answer carries token ids.
        With ``message`` the text is a chat message of several parts. With ``prompt_top`` the answer tells the
        log-probabilities of the prompt and of that many alternatives. A choice that ``is_empty`` shows its prompt and
        nothing else.
        """
        self.prompt_top = prompt_top
        self.prompt_scores: PromptScores | None = None
        self._is_empty = is_empty
        self._num_prefix = len(prefix)
        self._prefix_offsets = prefix_offsets
        self._table = table
        self._message = None if message is None else MessageParser(message)
        self._message_is_over = False
        self.prompt_ids = prompt_ids
        self._new_ids: list[int] = []
        self._detokenizer = table.detokenizer(skip_special_tokens=options.skip_special_tokens)
        self._push_id = self._detokenizer.push
        self._options = options
        self._matcher = StopMatcher(options.stops, include_stop=options.include_stop) if options.stops else None
        needs_logprobs = options.logprobs or options.ranked
        self._plain = self._matcher is None and not needs_logprobs and not options.markers and not is_empty
        self._ready: list[str] = [prefix] if prefix else []
        self._entries: list[TokenEntry] = []
        self._num_decoded = len(prefix)  # characters decoded, shown or not
        self._num_shown = 0
        self._sum_logprobs = 0.0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a token is its text and nothing else, so that it may take ``TokenLane``."""
        return self._plain and self.prompt_ids is None and self._message is None

    @property
    def mean_logprob(self) -> float:
        """Of the tokens of a ranked choice, the one that stopped it among them."""
        return self._sum_logprobs / max(1, self.num_tokens)

    @property
    def is_clean(self) -> bool:
        """Whether the next token's text does not depend on those before."""
        return not self._detokenizer.num_pending_bytes

    @property
    def json_table(self) -> list[bytes | None]:
        """``Detokenizer.jsons``."""
        return self._detokenizer.jsons

    def push_ids(self, ids: Iterable[int]) -> None:
        """Further tokens of a plain choice."""
        texts = list(map(self._push_id, ids))
        self._ready += texts
        self.num_tokens += len(texts)

    def json_of(self, ids: Iterable[int]) -> bytes:
        """The text that becomes certain with further tokens of a plain choice, as the inside of a JSON string.

        They are to be counted with ``took_elsewhere``, and what was pushed before has been taken.
        """
        return json_inside("".join(map(self._push_id, ids)))

    def took_elsewhere(self, num_tokens: int) -> None:
        """Count tokens of a plain choice that were shown without this stream, or by ``json_of``."""
        self.num_tokens += num_tokens

    def push(self, delta: TokenDelta) -> bool:
        """Take ``delta``; whether a stop string ended the choice although the engine goes on."""
        if self.finish_reason is not None:
            return False
        ids = delta.token_ids
        if self._plain and delta.finish_reason is None:
            if len(ids) == 1:
                self._ready.append(self._push_id(ids[0]))
                self.num_tokens += 1
            else:
                self._ready += map(self._push_id, ids)
                self.num_tokens += len(ids)
            if self.prompt_ids is not None:
                self._new_ids.extend(ids)
            return False
        if self._is_empty:
            self.finish_empty()
            return delta.finish_reason is None
        hides_stop = delta.finish_reason == "stop" and not self._options.include_stop
        last = len(ids) - 1
        for position, token_id in enumerate(ids):
            hide = hides_stop and position == last and token_id == delta.stop_token_id
            logprobs = delta.logprobs[position] if delta.logprobs else None
            if self._push_token(token_id, logprobs, hide=hide):
                return delta.finish_reason is None
        if delta.finish_reason is not None:
            self._finish(delta)
        return False

    def take_prompt(self, scores: PromptScores) -> None:
        """The prompt's log-probabilities, before the first token."""
        self.prompt_scores = scores
        if not (self._options.logprobs and self._num_prefix):
            return
        offsets = self._prefix_offsets
        if offsets is None:
            offsets = self._decoded_offsets(scores.token_ids)
        self._entries[:0] = [
            TokenEntry(token_id, b"", offset, logprobs, ready_at=self._num_prefix)
            for token_id, offset, logprobs in zip(scores.token_ids, offsets, scores.logprobs, strict=True)
        ]

    def finish_empty(self) -> None:
        """End a choice that was to generate nothing."""
        self.finish_reason = "length"

    def take_text(self) -> str:
        """The text that became certain since the last call."""
        ready = self._ready
        if not ready:
            return ""
        text = ready[0] if len(ready) == 1 else "".join(ready)
        self._ready = []
        self._num_shown += len(text)
        return text

    @property
    def has_parts(self) -> bool:
        """Whether the text is to be taken with ``take_parts``."""
        return self._message is not None

    @property
    def answer_reason(self) -> AnswerReason | None:
        """The finish reason the client is told; all parts have been taken by then."""
        return self.finish_reason if self._message is None else self._message.finish_reason(self.finish_reason)

    def take_parts(self) -> list[MessageDelta]:
        """What of the message became certain since the last call, in order."""
        assert self._message is not None
        parts = [self._message.push(self.take_text())]
        if self.finish_reason is not None and not self._message_is_over:
            self._message_is_over = True
            parts.append(self._message.finish())
        return [part for part in parts if part]

    def take_ids(self) -> list[int]:
        """The token ids accepted since the last call, where the answer carries them; the stop's among them."""
        ids, self._new_ids = self._new_ids, []
        return ids

    def take_entries(self) -> list[TokenEntry]:
        """The logprobs entries whose text has been taken."""
        entries = self._entries
        count = 0
        for entry in entries:
            if entry.ready_at is None or entry.ready_at > self._num_shown:
                break
            count += 1
        self._entries = entries[count:]
        return entries[:count]

    def _decoded_offsets(self, ids: list[int]) -> list[int]:
        detokenizer = self._table.detokenizer(skip_special_tokens=self._options.skip_special_tokens)
        lengths = [len(detokenizer.push(token_id)) for token_id in ids]
        return list(itertools.accumulate(lengths[:-1], initial=0))

    def _push_token(self, token_id: int, logprobs: TokenLogprobs | None, *, hide: bool) -> bool:
        """Whether a stop string was completed by this token."""
        detokenizer = self._detokenizer
        self.num_tokens += 1
        if self.prompt_ids is not None:
            self._new_ids.append(token_id)
        if logprobs is not None:
            self._sum_logprobs += logprobs.logprob
        marker = self._options.markers.get(token_id)
        if marker is not None and not hide:
            return self._push_marker(token_id, marker, logprobs)
        text = "" if hide else detokenizer.push(token_id)
        if self._options.logprobs and logprobs is not None:
            piece = b"" if hide else detokenizer.piece
            self._entries.append(TokenEntry(token_id, piece, self._num_decoded, logprobs))
        self._num_decoded += len(text)
        if not detokenizer.num_pending_bytes:
            self._settle_entries()
        return self._show(text, searched=self.num_tokens > self._options.min_tokens)

    def _push_marker(self, token_id: int, marker: str, logprobs: TokenLogprobs | None) -> bool:
        """A special token that is shown: no text runs on over it."""
        text = self._detokenizer.finish()
        self._detokenizer = self._table.detokenizer(skip_special_tokens=self._options.skip_special_tokens)
        self._push_id = self._detokenizer.push
        if self._options.logprobs and logprobs is not None:
            self._entries.append(TokenEntry(token_id, marker.encode(), self._num_decoded + len(text), logprobs))
        self._num_decoded += len(text) + len(marker)
        self._settle_entries()
        return self._show(text + marker, searched=self.num_tokens > self._options.min_tokens)

    def _settle_entries(self) -> None:
        for entry in reversed(self._entries):
            if entry.ready_at is not None:
                break
            entry.ready_at = self._num_decoded

    def _show(self, text: str, *, searched: bool) -> bool:
        """Pass decoded text through the stop strings; whether one matched."""
        if self._matcher is None or not searched:
            if text:
                self._ready.append(text)
            return False
        result = self._matcher.push(text)
        if isinstance(result, StopMatch):
            self._ready.append(result.text)
            self._cut(result)
            return True
        if result:
            self._ready.append(result)
        return False

    def _cut(self, match: StopMatch) -> None:
        """End the choice at a stop string; entries lose the bytes that are not shown."""
        self.finish_reason = "stop"
        self.stop_reason = match.stop
        self._num_decoded -= len(match.cut)
        # Bytes of an unfinished character at the very end never became text; they go first.
        excess = len(match.cut.encode()) + self._detokenizer.num_pending_bytes
        for entry in reversed(self._entries):
            taken = min(excess, len(entry.piece))
            entry.piece = entry.piece[: len(entry.piece) - taken]
            excess -= taken
            entry.offset = min(entry.offset, self._num_decoded)
            entry.ready_at = self._num_decoded

    def _finish(self, delta: TokenDelta) -> None:
        tail = self._detokenizer.finish()
        self._num_decoded += len(tail)
        if self._show(tail, searched=self.num_tokens > self._options.min_tokens):
            return
        if self._matcher is not None and (held := self._matcher.release()):
            self._ready.append(held)
        self._settle_entries()
        self.finish_reason = delta.finish_reason
        if delta.stop_token_id in self._options.stop_token_ids:
            self.stop_reason = delta.stop_token_id
