"""Token ids to text, one token at a time, equal to decoding all ids at once.

Two ways, chosen once a tokenizer:

* byte-level BPE: a table token id → bytes, and UTF-8 decoded incrementally (``ByteLevelDetokenizer``);
* everything else (sentencepiece, byte fallback, WordPiece ...): the tokenizer's own decoder over a short window of ids
  (``WindowDetokenizer``).

One policy for bytes that never become a character, whether invalid or cut off by ``max_tokens``: they turn into U+FFFD
exactly as in ``tokenizer.decode``, at the latest when the choice ends. Nothing is cleaned up or stripped besides what
the tokenizer's decoder does. Ids the tokenizer does not know (vocabulary padding) are empty text.
"""

import codecs
import json
import re
from dataclasses import dataclass
from typing import Protocol

import msgspec
from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one growing sequence of tokens."""

    piece: bytes
    """The bytes the last pushed token contributed; what a token's logprobs entry reports."""
    jsons: list[bytes | None]
    """By token id its text, where that does not depend on others, as the inside of a JSON string. May be empty."""

    @property
    def num_pending_bytes(self) -> int:
        """Bytes pushed that have not become text yet."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, often empty."""

    def finish(self) -> str:
        """The text still held back; nothing may be pushed afterwards."""


class TokenTable:
    """What one tokenizer's ids stand for; makes detokenizers. Shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in self._added.items() if token.special)
        decoder = _decoder_kinds(tokenizer)
        self._byte_level = decoder == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in decoder
        names = self._names = _token_names(tokenizer)
        self._byte_ids = frozenset(i for i, name in enumerate(names) if self._byte_fallback and _is_byte_token(name))
        self.pieces: list[bytes] = [self._piece(token_id, name) for token_id, name in enumerate(names)]
        self.texts: list[str | None] = [_whole_text(piece) for piece in self.pieces]
        hidden = self._special_ids
        visible_pieces = [b"" if i in hidden else piece for i, piece in enumerate(self.pieces)]
        visible_texts = ["" if i in hidden else text for i, text in enumerate(self.texts)]
        self._all = ByteTable.of(self.pieces, self.texts)
        self._visible = ByteTable.of(visible_pieces, visible_texts)

    def __len__(self) -> int:
        return len(self._names)

    def is_known(self, token_id: int) -> bool:
        """Whether the tokenizer has this id (vocabulary padding it has not)."""
        return token_id < len(self._names) and self._names[token_id] is not None

    def token_name(self, token_id: int) -> str | None:
        """The tokenizer's own string of an id; ``None`` for vocabulary padding."""
        return self._names[token_id] if token_id < len(self._names) else None

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the id is a byte-fallback token such as ``<0x0A>``."""
        return token_id in self._byte_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token on its own."""
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    def token_text(self, token_id: int) -> str:
        """How a logprobs entry names a token: its text, or ``bytes:\\x..`` where that is no whole UTF-8."""
        if token_id >= len(self.pieces):
            return ""
        text = self.texts[token_id]
        return text if text is not None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.pieces[token_id])

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer for one sequence."""
        if self._byte_level:
            return ByteLevelDetokenizer(self._visible if skip_special_tokens else self._all)
        return WindowDetokenizer(self._tokenizer, self, skip_special_tokens=skip_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.finish()

    def _piece(self, token_id: int, name: str | None) -> bytes:
        if name is None:
            return b""
        if self._byte_level:
            return _byte_level_piece(name)
        if token_id in self._added:
            return name.encode()
        if token_id in self._byte_ids:
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode()


@dataclass(frozen=True, slots=True)
class ByteTable:
    """By token id: its bytes, and where they are whole UTF-8 on their own, their text and that text in JSON."""

    pieces: list[bytes]
    texts: list[str | None]
    jsons: list[bytes | None]

    @classmethod
    def of(cls, pieces: list[bytes], texts: list[str | None]) -> "ByteTable":
        return cls(pieces, texts, [None if text is None else json_inside(text) for text in texts])


class ByteLevelDetokenizer:
    """Byte-level BPE: every token is a run of bytes, whatever stands beside it."""

    __slots__ = ("_pending", "_pieces", "_texts", "jsons", "piece")

    def __init__(self, table: ByteTable) -> None:
        self._pieces = table.pieces
        self._texts = table.texts
        self.jsons = table.jsons
        self._pending = b""
        self.piece = b""

    @property
    def num_pending_bytes(self) -> int:
        return len(self._pending)

    def push(self, token_id: int) -> str:
        if token_id >= len(self._pieces):
            self.piece = b""
            return ""
        piece = self.piece = self._pieces[token_id]
        if not self._pending:
            text = self._texts[token_id]
            if text is not None:
                return text
        data = self._pending + piece
        text, consumed = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return text

    def finish(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class WindowDetokenizer:
    """Any tokenizer: decodes a window of ids with and without the newest and hands out the difference.

    The window always starts at a token that has given text, so whatever the decoder does to the first token (strip a
    space, say) is done to both decodings. Text is held while it may still change: a run of byte-fallback tokens until
    it ends (one invalid byte turns the whole run into U+FFFD), and a trailing U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, table: TokenTable, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._skip_special = skip_special_tokens
        self._window: list[int] = []
        self._given_chars = 0  # characters of the window's decoding that were handed out
        self._num_given_ids = 0  # ids at the window's start whose text was handed out
        self._num_pending_bytes = 0
        self.jsons: list[bytes | None] = []
        self._decoded: str | None = ""  # the window's decoding, None while it is out of date
        self.piece = b""

    @property
    def num_pending_bytes(self) -> int:
        return self._num_pending_bytes

    def push(self, token_id: int) -> str:
        table = self._table
        if not table.is_known(token_id) or (self._skip_special and table.is_special(token_id)):
            self.piece = b""  # the decoder never sees these, so the window must not either
            return ""
        if table.is_byte_token(token_id):
            # Nothing is decoded while a run goes on: a long one would cost the square of its length.
            self._window.append(token_id)
            self._decoded = None
            self.piece = table.token_bytes(token_id)
            self._num_pending_bytes += 1
            return ""
        before = self._window_text()
        self._window.append(token_id)
        after = self._decoded = self._decode(self._window)
        self.piece = _added_text(before, after).encode()
        if after.endswith(_REPLACEMENT):
            self._num_pending_bytes += len(self.piece)
            return ""
        return self._give(after)

    def finish(self) -> str:
        return self._give(self._window_text())

    def _window_text(self) -> str:
        if self._decoded is None:
            self._decoded = self._decode(self._window)
        return self._decoded

    def _give(self, decoded: str) -> str:
        self._num_pending_bytes = 0
        text = decoded[self._given_chars :]
        self._given_chars = len(decoded)
        if text:
            # The next window starts at the ids just handed out: the shortest context that has text.
            self._window = self._window[self._num_given_ids :]
            self._decoded = self._decode(self._window)
            self._given_chars = len(self._decoded)
        self._num_given_ids = len(self._window)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def json_inside(text: str) -> bytes:
    """``text`` as JSON without the quotes around it."""
    return msgspec.json.encode(text)[1:-1]


def _added_text(before: str, after: str) -> str:
    return after[len(before) :] if after.startswith(before) else after.removeprefix(before.rstrip(_REPLACEMENT))


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """The names of the tokenizer's decoder steps, in order."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    steps = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    return [step.get("type", "") for step in steps]


def _token_names(tokenizer: Tokenizer) -> list[str | None]:
    """Token strings by id; ids nobody uses are ``None``."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    names: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for name, token_id in vocab.items():
        names[token_id] = name
    return names


def _is_byte_token(name: str | None) -> bool:
    return name is not None and _BYTE_TOKEN.fullmatch(name) is not None


def _byte_alphabet() -> dict[str, int]:
    """The characters byte-level BPE writes bytes as: printable ones stand for themselves, the rest is shifted up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(shifted)}


_BYTE_OF_CHAR = _byte_alphabet()


def _byte_level_piece(name: str) -> bytes:
    """As the ByteLevel decoder does, added tokens included: mapped if every character maps, else taken as it is."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in name])
    except KeyError:
        return name.encode()


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
