"""Text to token ids, as the model's own files say, without transformers."""

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, processors

from twopool.protocol.errors import ModelError
from twopool.protocol.token_hash import TokenIds
from twopool.router.detokenizer import TokenTable
from twopool.router.word_ids import WordIds

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextTokenizer:
    """One model's tokenizer. ``encode`` may run in any thread."""

    def __init__(self, tokenizer: Tokenizer, *, bos_id: int | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _count_spaces(tokenizer)
        self._tokenizer = tokenizer
        self._bos_id = bos_id
        self.table = TokenTable(tokenizer)
        self._word_ids = WordIds.of(tokenizer)
        self._adds_nothing = not tokenizer.encode("", add_special_tokens=True).ids

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """``[n]`` int32. A BOS that ``text`` already begins with is not added a second time."""
        ids = None
        if self._word_ids is not None and (self._adds_nothing or not add_special_tokens):
            ids = self._word_ids.encode(text)
        if ids is None:
            # The "fast" of a batch leaves out offsets, which hardly anybody reads; there is no such call for one text.
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self._begins_twice(ids):
            ids = ids[1:]
        return np.array(ids, dtype=np.int32)

    def offsets(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Where in ``text`` each token of ``encode`` begins, in characters; a token that begins inside a character, at
        that character. Tokens that are added to the text take none of it.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        offsets, taken = [], 0
        for (start, end), is_added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            # Some leave the white space before a token out: it begins where the one before it ended.
            offsets.append(taken if is_added else min(start, taken))
            taken = taken if is_added else max(end, taken)
        return offsets[1:] if add_special_tokens and self._begins_twice(encoding.ids) else offsets

    def _begins_twice(self, ids: list[int]) -> bool:
        return self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its exact string."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id


def _count_spaces(tokenizer: Tokenizer) -> None:
    """Make white space part of the tokens that write it; ids do not depend on that."""
    last = tokenizer.post_processor
    steps: Any = last if isinstance(last, processors.Sequence) else [last]  # iterable, whatever its stub says
    for step in steps:
        if hasattr(step, "trim_offsets"):
            step.trim_offsets = False


def special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens (``bos_token`` ...) and others a template may use, as plain strings."""
    named = {name: _content(tokenizer_config.get(name)) for name in _NAMED_TOKENS}
    extra = {
        name: _content(value)
        for name, value in tokenizer_config.items()
        if name.endswith("_token") and name not in named and not isinstance(value, bool)
    }
    return {name: content for name, content in {**named, **extra}.items() if content is not None}


def load_tokenizer(folder: Path, tokenizer_config: dict[str, Any]) -> TextTokenizer:
    """Read ``tokenizer.json`` and the special tokens of ``tokenizer_config.json``; raises ``ModelError``.

    Whether a BOS or EOS is added is the post-processor's say alone: as in transformers, ``add_bos_token`` does not
    count beside a ``tokenizer.json``.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}") from error
    named = special_tokens(tokenizer_config)
    _add_missing_special_tokens(tokenizer, named)
    bos = named.get("bos_token")
    return TextTokenizer(tokenizer, bos_id=None if bos is None else tokenizer.token_to_id(bos))


def _content(token: Any) -> str | None:
    """A token written as a string or as ``{"content": ...}``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_missing_special_tokens(tokenizer: Tokenizer, named: dict[str, str]) -> None:
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [AddedToken(content, special=True) for content in dict.fromkeys(named.values()) if content not in known]
    if missing:
        tokenizer.add_special_tokens(missing)
