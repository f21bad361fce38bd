"""Offsets of an echoed prompt's tokens: places in the text that is shown, whatever the tokenizer adds or leaves out."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from twopool.protocol.ids import Attempt, ChoiceIndex, RequestId
from twopool.protocol.messages import TokenDelta, TokenLogprobs
from twopool.router.model_info import ModelInfo
from twopool.router.prepared_request import RequestLimits, prepare_completion
from twopool.router.prompt_scores import PromptScores
from twopool.router.schema import CompletionBody
from twopool.router.tokenizer import TextTokenizer
from twopool_testing.tiny_tokenizers import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
    wordpiece_tokenizer,
)

LIMITS = RequestLimits(
    served_names=("tiny",), max_model_len=512, vocab_size=330, timeout_s=9.0, arrived_s=1.0, tenant=b""
)


def with_bos() -> TextTokenizer:
    """Byte-level BPE that leaves spaces out of its offsets by itself, and adds ``<|im_start|>``."""
    tokenizer = byte_level_tokenizer()
    bos = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), bos])
    return TextTokenizer(tokenizer, bos_id=1)


@settings(deadline=None)
@given(text=st.text(alphabet="abHelo  🙂é日\n", max_size=20), special=st.booleans())
def test_bytes_of_the_tokens_before(text: str, special: bool) -> None:
    """Byte-level BPE writes every byte once: a token begins in the character after all that its predecessors made."""
    for tokenizer in (TextTokenizer(byte_level_tokenizer()), with_bos()):
        ids = tokenizer.encode(text, add_special_tokens=special).tolist()
        is_first_added = ids[:1] == [1]
        pieces = [b"" if is_first_added and not i else tokenizer.table.token_bytes(one) for i, one in enumerate(ids)]
        expected = [len(b"".join(pieces[:i]).decode(errors="ignore")) for i in range(len(ids))]
        assert tokenizer.offsets(text, add_special_tokens=special) == expected


@pytest.mark.parametrize(
    ("tokenizer", "text", "parts"),
    [
        (byte_fallback_tokenizer(), "hello world a🙂b", ["", "hello", " ", *"world", " a", "", "", "", "🙂", "b"]),
        (byte_fallback_tokenizer(), "<s>hello", ["<s>", "hello"]),
        (metaspace_tokenizer(), "hello a b", ["hello", " a", " ", "b"]),
        (wordpiece_tokenizer(), "hello worlda  don!", ["hello", " world", "a", "  do", "n", "!"]),
        (byte_level_tokenizer(), "<|im_start|>hi<think>é", ["<|im_start|>", "h", "i", "<think>", "é"]),
    ],
    ids=["byte-fallback", "own-bos", "metaspace", "wordpiece", "special"],
)
def test_the_text_is_cut_where_its_tokens_begin(tokenizer: Tokenizer, text: str, parts: list[str]) -> None:
    offsets = TextTokenizer(tokenizer, bos_id=1).offsets(text, add_special_tokens=True)
    assert [text[start:end] for start, end in zip(offsets, [*offsets[1:], len(text)], strict=True)] == parts


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("prompt", "shown", "offsets"),
    [
        ("Hello 🙂 world", "Hello 🙂 world", [0, 0, 5, 6, 7, 11]),
        ("<|im_start|>Hello", "<|im_start|>Hello", [0, 12]),
        ("a <think>b", "a <think>b", [0, 0, 1, 2, 9]),
        ([1, 316, 297, 310, 308, 282], "{bos}Hello 🙂 world", [0, 0, 5, 6, 7, 11]),
    ],
)
def test_offsets_of_an_echo(tiny_model: ModelInfo, prompt: Any, shown: str, offsets: list[int], skip: bool) -> None:
    """Text is shown as it came, without the BOS that the tokenizer adds; ids as they decode."""
    model = replace(tiny_model, tokenizer=with_bos())
    body = CompletionBody(prompt=prompt, echo=True, logprobs=0, skip_special_tokens=skip)
    planned = prepare_completion(body, model, LIMITS).prompts[0]
    assert planned.request is not None
    ids = planned.request.prompt_ids.tolist()
    if "{bos}" in shown and not skip:
        offsets = [0, *(12 + offset for offset in offsets[1:])]
    shown = shown.replace("{bos}", "" if skip else "<|im_start|>")
    generated = model.tokenizer.encode(" abc é", add_special_tokens=False).tolist()
    known = TokenLogprobs(-0.5, (), ())
    [choice] = planned.choices
    choice.take_prompt(PromptScores(ids, [None, *[known] * (len(ids) - 1)], [0] * len(ids)))
    logprobs = (known,) * len(generated)
    choice.push(
        TokenDelta(RequestId("r"), Attempt(0), ChoiceIndex(0), 0, tuple(generated), "length", logprobs=logprobs)
    )
    assert choice.take_text() == f"{shown} abc é"
    entries = choice.take_entries()
    assert [entry.token_id for entry in entries] == ids + generated
    assert [entry.offset for entry in entries[: len(ids)]] == offsets
    before = shown.encode()
    for entry in entries[len(ids) :]:
        assert entry.offset == len(before.decode(errors="ignore"))
        before += model.tokenizer.table.token_bytes(entry.token_id)
