"""Incremental text equals the text of all ids at once, whatever the tokenizer."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from twopool.router.detokenizer import TokenTable
from twopool_testing.tiny_tokenizers import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
    wordpiece_tokenizer,
)

TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    # The decoder takes "é" for the byte 0xE9 it stands for in the alphabet, and "a b" as it is.
    "byte-level, odd added tokens": byte_level_tokenizer(added=("<think>", "a b", "é", "日本")),
    "byte-fallback": byte_fallback_tokenizer(),
    "byte-fallback without strip": byte_fallback_tokenizer(strip=False),
    "metaspace": metaspace_tokenizer(),
    "wordpiece": wordpiece_tokenizer(),
}
TABLES = {name: TokenTable(tokenizer) for name, tokenizer in TOKENIZERS.items()}
MANY_IDS = st.lists(st.integers(0, 330), max_size=24)
TEXTS = ["👩‍👩‍👧 日本語 é", "  leading and  double  spaces \n\n", "🙂🙂🙂", "Привет 漢字 👍🏽", "hello hello a b"]


def assert_incremental_equals_whole(tokenizer: Tokenizer, table: TokenTable, ids: list[int], skip: bool) -> None:
    detokenizer = table.detokenizer(skip_special_tokens=skip)
    parts = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.finish()]
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert detokenizer.num_pending_bytes == 0


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(ids=MANY_IDS, skip=st.booleans())
def test_any_ids(name: str, ids: list[int], skip: bool) -> None:
    """TOK-03, NUM-05: random ids, special ones and ids beyond the vocabulary among them."""
    assert_incremental_equals_whole(TOKENIZERS[name], TABLES[name], ids, skip)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_json_table_is_what_push_gives_after_whole_characters(name: str) -> None:
    for skip in (True, False):
        jsons = TABLES[name].detokenizer(skip_special_tokens=skip).jsons
        assert bool(jsons) == name.startswith("byte-level")
        for token_id, known in enumerate(jsons):
            detokenizer = TABLES[name].detokenizer(skip_special_tokens=skip)
            text = detokenizer.push(token_id)
            if known is None:
                assert detokenizer.num_pending_bytes or "\ufffd" in text
            else:
                assert json.loads(b'"' + known + b'"') == text and not detokenizer.num_pending_bytes


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.sampled_from([*range(3, 259), 259, 261, 263, 268, 269]), max_size=20))
def test_runs_of_byte_tokens(ids: list[int]) -> None:
    """One invalid byte turns a whole run of byte-fallback tokens into U+FFFD; nothing of it may have been sent."""
    assert_incremental_equals_whole(TOKENIZERS["byte-fallback"], TABLES["byte-fallback"], ids, True)


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_encoded_texts_come_back_without_replacement(name: str, text: str) -> None:
    """API-06, X-utf8-stream: characters split over tokens never show up as U+FFFD."""
    tokenizer, table = TOKENIZERS[name], TABLES[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = table.detokenizer(skip_special_tokens=True)
    parts = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.finish()]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(parts).strip() == text.strip()


@pytest.mark.parametrize("text", TEXTS)
def test_cut_inside_a_character_ends_as_decode_does(text: str) -> None:
    """API-06: every cut of a text, also inside a character."""
    for name in ("byte-level", "byte-fallback"):
        ids = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
        for end in range(len(ids) + 1):
            assert_incremental_equals_whole(TOKENIZERS[name], TABLES[name], ids[:end], True)


def test_text_is_given_as_soon_as_it_is_certain() -> None:
    table = TABLES["byte-level"]
    emoji = TOKENIZERS["byte-level"].encode("🙂", add_special_tokens=False).ids
    assert len(emoji) > 1
    detokenizer = table.detokenizer(skip_special_tokens=True)
    assert [detokenizer.push(token_id) for token_id in emoji] == [""] * (len(emoji) - 1) + ["🙂"]
    fallback = TABLES["byte-fallback"].detokenizer(skip_special_tokens=True)
    assert [fallback.push(token_id) for token_id in (275, 261, 262)] == ["hello", "a", "b"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_beyond_the_vocabulary_are_empty(name: str) -> None:
    """NUM-05: vocabulary padding decodes to nothing."""
    table = TABLES[name]
    padding = len(table) + 7
    assert table.decode([padding], skip_special_tokens=False) == ""
    assert (table.token_text(padding), table.token_bytes(padding), table.is_known(padding)) == ("", b"", False)


def test_pieces_join_to_the_text_and_names_are_printable() -> None:
    table = TABLES["byte-level"]
    ids = TOKENIZERS["byte-level"].encode("Hello 🙂 world", add_special_tokens=False).ids
    detokenizer = table.detokenizer(skip_special_tokens=True)
    pieces = []
    for token_id in ids:
        detokenizer.push(token_id)
        pieces.append(detokenizer.piece)
    assert b"".join(pieces).decode() == "Hello 🙂 world"
    half = next(token_id for token_id in ids if table.token_bytes(token_id) == b"\x99\x82")
    assert table.token_text(half) == "bytes:\\x99\\x82"


def test_pieces_of_byte_tokens_are_single_bytes() -> None:
    """The pieces of a character in byte-fallback tokens are its bytes; the token after it has only its own."""
    table = TABLES["byte-fallback"]
    ids = [275, *(3 + byte for byte in "🙂".encode()), 261]
    detokenizer = table.detokenizer(skip_special_tokens=True)
    pieces = []
    for token_id in ids:
        detokenizer.push(token_id)
        pieces.append(detokenizer.piece)
    assert pieces == [b"hello", b"\xf0", b"\x9f", b"\x99", b"\x82", b"a"]


@pytest.mark.real_model
def test_a_real_tokenizer() -> None:
    path = Path.home() / ".cache/twopool/models/smollm2-135m-instruct/tokenizer.json"
    if not path.is_file():
        pytest.skip("SmolLM2-135M-Instruct is not in the model cache")
    tokenizer = Tokenizer.from_file(str(path))
    table = TokenTable(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(f"<|im_start|>{text}<|im_end|>", add_special_tokens=False).ids
        for skip in (True, False):
            assert_incremental_equals_whole(tokenizer, table, ids, skip)
    rng = random.Random(5)
    for _ in range(200):
        assert_incremental_equals_whole(tokenizer, table, [rng.randrange(49152) for _ in range(20)], True)
