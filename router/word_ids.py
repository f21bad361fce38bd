"""Token ids of short ASCII texts, word by word from a table: several times cheaper than asking the tokenizer.

A byte-level BPE tokenizer cuts a text at its added tokens, cuts what is between into words by regular expressions,
and merges inside words only. So a word's ids are the same wherever it stands, and a table learns them. Only the
cutting is done here, with Python's ``re``; ids of words are the tokenizer's own. ``WordIds.of`` gives a table only for
tokenizers understood to the last detail, and ``None`` for all others; so does ``encode`` for texts.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

MAX_CHARS = 16 * 1024
"""Longer texts go to the tokenizer, which lets other threads run meanwhile."""

_MAX_WORDS = 1 << 16
_MAX_WORD_CHARS = 64

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_IN_ASCII = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
"""They leave ASCII as it is."""

Cut = Callable[[str], list[str]]


class WordIds:
    """One tokenizer's table. May be used in any thread."""

    def __init__(self, tokenizer: Tokenizer, cuts: list[Cut], added: list[re.Pattern[str]]) -> None:
        self._model = tokenizer.model
        self._added_ids = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
        self._first_cut, self._more_cuts = cuts[0], cuts[1:]
        self._added = added
        self._ids: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "WordIds | None":
        """``None`` for a tokenizer that does anything not understood here."""
        config = json.loads(tokenizer.to_str())
        cuts = _cuts(config["pre_tokenizer"])
        added = _added_patterns(config["added_tokens"])
        if cuts is None or added is None or not _leaves_ascii(config["normalizer"]) or not _is_plain(config["model"]):
            return None
        return cls(tokenizer, cuts, added)

    def encode(self, text: str) -> list[int] | None:
        """The ids of ``text`` without what the post-processor would add; ``None`` if it has to be asked elsewhere."""
        if len(text) > MAX_CHARS or not text.isascii():
            return None
        ids: list[int] = []
        return ids if self._add(text, 0, ids) else None

    def _add(self, text: str, level: int, ids: list[int]) -> bool:
        """Add the ids of a part of a text, in which the first ``level`` kinds of added tokens do not occur. ``False``
        when an expression leaves something out.
        """
        if level < len(self._added):
            for index, part in enumerate(self._added[level].split(text)):
                if index % 2:  # every second part is what was found
                    ids.append(self._added_ids[part])
                elif part and not self._add(part, level + 1, ids):
                    return False
            return True
        words = self._first_cut(text)
        for cut in self._more_cuts:
            words = [part for word in words for part in cut(word)]
        known = self._ids.get
        num_chars = 0
        for word in words:
            num_chars += len(word)
            found = known(word)
            ids += self._learn(word) if found is None else found
        return num_chars == len(text)

    def _learn(self, word: str) -> tuple[int, ...]:
        ids = tuple([token.id for token in self._model.tokenize(word.translate(_BYTE_LEVEL))])
        if len(word) <= _MAX_WORD_CHARS:
            if len(self._ids) >= _MAX_WORDS:
                self._ids.clear()
            self._ids[word] = ids
        return ids


def _leaves_ascii(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(_leaves_ascii(step) for step in normalizer["normalizers"])
    return normalizer["type"] in _NORMALIZERS


def _is_plain(model: dict[str, Any]) -> bool:
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    return model.get("type") == "BPE" and not any(model.get(name) for name in odd)


def _added_patterns(tokens: list[dict[str, Any]]) -> list[re.Pattern[str]] | None:
    """Those that are looked for before normalization, then those after, each with one group; the longest wins."""
    if any(token["single_word"] or token["lstrip"] or token["rstrip"] or not token["content"] for token in tokens):
        return None
    patterns = []
    for is_normalized in (False, True):
        texts = [token["content"] for token in tokens if token["normalized"] is is_normalized]
        if texts := sorted((text for text in texts if text.isascii()), key=len, reverse=True):
            patterns.append(re.compile(f"({'|'.join(map(re.escape, texts))})"))
    return patterns


def _cuts(step: dict[str, Any] | None) -> list[Cut] | None:
    """The pre-tokenizer's steps, each as what it makes of a word; ``None`` for one that is not byte-level BPE's."""
    if step is None:
        return None
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    last = steps[-1] if steps else None
    if last is None or last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    cuts: list[Cut] = []
    for one in steps[:-1]:
        if one["type"] == "Digits" and one["individual_digits"]:
            cuts.append(re.compile("[0-9]|[^0-9]+").findall)
            continue
        is_split = one["type"] == "Split" and one["behavior"] == "Isolated" and not one["invert"]
        pattern = _in_ascii(one["pattern"].get("Regex", r"\p{Unknown}")) if is_split else None
        if pattern is None:
            return None
        cuts.append(pattern.findall)
    if last["use_regex"]:
        gpt2 = _in_ascii(_GPT2)
        assert gpt2 is not None
        cuts.append(gpt2.findall)
    return cuts or [lambda text: [text]]


def _in_ascii(expression: str) -> re.Pattern[str] | None:
    """What Oniguruma's ``expression`` finds in ASCII text; ``None`` where that is not certain."""
    if re.search(r"&&|\[\[|\[:|\{[0-9,]+\}\+|\\[^-\\pnrtsS./|()\[\]{}*+?^$'\"]|\(\?[^:!=i]|\(\?i[^:]", expression):
        return None
    out: list[str] = []
    in_class, class_at, at = False, 0, 0
    while at < len(expression):
        char = expression[at]
        if expression.startswith("\\p{", at):
            end = expression.find("}", at)
            ascii_chars = _IN_ASCII.get(expression[at + 3 : end])
            if end < 0 or ascii_chars is None or not (in_class or ascii_chars):
                return None
            out.append(ascii_chars if in_class else f"[{ascii_chars}]")
            at = end + 1
            continue
        if char == "\\":
            if expression[at + 1 : at + 2] in ("", "p"):
                return None
            out.append(expression[at : at + 2])
            at += 2
            continue
        if in_class and char == "]":
            if "".join(out[class_at:]) in ("[", "[^"):
                return None  # nothing left in the class
            in_class = False
        elif not in_class and char in "^$.":
            return None  # in some modes they are not what they are in Python
        elif not in_class and char == "[":
            in_class, class_at = True, len(out)
        out.append(char)
        at += 1
    try:
        pattern = re.compile("".join(out), re.ASCII)
    except re.error:
        return None
    return None if pattern.groups else pattern


def _byte_level_table() -> dict[int, int]:
    """Printable ASCII stands for itself; the other 34 are shifted up, in order, as byte-level BPE writes bytes."""
    shifted = [byte for byte in range(128) if not 0x21 <= byte <= 0x7E]
    return {byte: 256 + index for index, byte in enumerate(shifted)}


_BYTE_LEVEL = _byte_level_table()
