"""Ids from the table of words are the tokenizer's own, or there is no table."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from twopool.router.tokenizer import TextTokenizer
from twopool.router.word_ids import MAX_CHARS, WordIds
from twopool_testing.tiny_tokenizers import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
    wordpiece_tokenizer,
)

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(expression: str) -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    return tokenizer


def digits_apart() -> Tokenizer:
    tokenizer = byte_level_tokenizer(added=())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


def with_normalizer() -> Tokenizer:
    tokenizer = byte_level_tokenizer(added=("<think>", "<think><", "th", " a"))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def gaps() -> Tokenizer:
    """An expression that does not find everything."""
    return split_by(r"\p{L}+|\p{N}+")


KNOWN = {
    "gpt2": byte_level_tokenizer(),
    "qwen": split_by(QWEN),
    "llama": split_by(LLAMA),
    "o200k": split_by(O200K),
    "digits": digits_apart(),
    "normalizer": with_normalizer(),
    "gaps": gaps(),
}
TABLES = {name: WordIds.of(tokenizer) for name, tokenizer in KNOWN.items()}
PIECES = ["<|im_start|>", "<|im_end|>", "<|end|>", "<think>", "<|im_", "the ", "Hello", "'s", "'LL", "  ", "\n", "\r\n"]
texts = st.lists(
    st.one_of(st.sampled_from(PIECES), st.text("".join(map(chr, range(128))), max_size=8), st.text(string.printable)),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=400, deadline=None)
@given(text=texts)
def test_ids_are_the_tokenizers_own(name: str, text: str) -> None:
    table = TABLES[name]
    assert table is not None
    ids = table.encode(text)
    if name != "gaps":
        assert ids is not None
    if ids is not None:
        assert ids == KNOWN[name].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", KNOWN)
def test_every_pair_of_ascii_characters_between_letters(name: str) -> None:
    """No two characters meet in a way that one of the two libraries sees otherwise."""
    table = TABLES[name]
    assert table is not None
    for first in map(chr, range(128)):
        text = "".join(f"a{first}{second}b{second}{first} " for second in map(chr, range(128)))
        ids = table.encode(text)
        assert ids is None or ids == KNOWN[name].encode(text, add_special_tokens=False).ids


def test_what_a_table_does_not_answer() -> None:
    table = TABLES["gpt2"]
    assert table is not None
    assert table.encode("caf\u00e9") is None
    assert table.encode("a" * (MAX_CHARS + 1)) is None
    assert table.encode("") == []


def test_tokenizers_without_a_table() -> None:
    strips = byte_level_tokenizer()
    strips.add_tokens([AddedToken("<tool>", lstrip=True)])
    prefixed = byte_level_tokenizer()
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    lower = byte_level_tokenizer()
    lower.normalizer = normalizers.Lowercase()
    removed = byte_level_tokenizer()
    split = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    removed.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    others = [byte_fallback_tokenizer(), metaspace_tokenizer(), wordpiece_tokenizer()]
    odd = [split_by(expression) for expression in (r"\p{Greek}+|.", r"(a)|b", r"\bx", r"(?<=a)b", r"[\p{M}]|a", r"^a")]
    for tokenizer in [strips, prefixed, lower, removed, *others, *odd]:
        assert WordIds.of(tokenizer) is None


def test_added_ids_of_the_post_processor_are_not_left_out() -> None:
    tokenizer = byte_level_tokenizer()
    template = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer.post_processor = template
    text_tokenizer = TextTokenizer(tokenizer, bos_id=0)
    for text in ("the fox", "<|end|>the fox"):
        for add in (True, False):
            ids = text_tokenizer.encode(text, add_special_tokens=add).tolist()
            expected = tokenizer.encode(text, add_special_tokens=add).ids
            assert ids == (expected[1:] if expected[:2] == [0, 0] else expected)


def test_the_table_forgets_rather_than_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twopool.router.word_ids._MAX_WORDS", 8)
    tokenizer = byte_level_tokenizer()
    table = WordIds.of(tokenizer)
    assert table is not None
    for number in range(50):
        text = f"word{chr(97 + number % 26)} x{'y' * number}"
        assert table.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert len(table._ids) <= 8
