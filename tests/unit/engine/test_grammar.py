"""Grammars on a worker: masks depend on the output ids alone, and outputs stay inside whatever happens to a request."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer

from twopool.engine import grammar as grammar_module
from twopool.engine import grammar_cache
from twopool.engine.grammar import GrammarEngine, MaskRow, RequestGrammar
from twopool.protocol.errors import InvalidRequestError
from twopool.protocol.ids import ChoiceIndex
from twopool_testing.engine_harness import VOCAB_SIZE, Harness, params, prompt, request
from twopool_testing.tiny_tokenizers import byte_level_tokenizer, metaspace_tokenizer

EOS = 2
FIRST = ChoiceIndex(0)
LETTERS = LLMatcher.grammar_from_regex("[a-c]{2,4}")
DIGITS = LLMatcher.grammar_from_regex("[0-9]{12}x")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def grammars(folder: Path) -> Iterator[GrammarEngine]:
    grammars = GrammarEngine(folder, 400)
    yield grammars
    grammars.close()


def ids_of(tokenizer: Tokenizer, letters: str) -> list[int]:
    """One token a letter."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[letter] for letter in letters]


def started(grammars: GrammarEngine, text: str, *stop_ids: int) -> RequestGrammar:
    ready = threading.Event()
    grammar = grammars.start(text, frozenset(stop_ids), ready.set)
    assert ready.wait(30)
    return grammar


def allowed(grammars: GrammarEngine, *states: tuple[RequestGrammar, list[int]]) -> list[set[int]]:
    masks = grammars.fill([MaskRow(row, state, FIRST, ids) for row, (state, ids) in enumerate(states)])
    assert masks.rows.tolist() == list(range(len(states)))
    bits = np.unpackbits(masks.bits.result(30).view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def test_masks_follow_the_ids(grammars: GrammarEngine, tokenizer: Tokenizer) -> None:
    """NUM-05: the model's 79 rows beyond the tokenizer are never allowed; ends only where the grammar accepts."""
    a, b, c = ids_of(tokenizer, "abc")
    grammar = started(grammars, LETTERS, EOS, 7)
    assert {a, b, c} <= allowed(grammars, (grammar, []))[0] <= set(range(tokenizer.get_vocab_size()))
    assert not {EOS, 7, 0} & allowed(grammars, (grammar, [a]))[0]
    assert not grammar.is_complete(FIRST, [a])
    assert {EOS, 7} <= allowed(grammars, (grammar, [a, b]))[0]
    assert 0 not in allowed(grammars, (grammar, [a, b]))[0]  # an end of the tokenizer's that is none of the request's
    assert not grammar.is_complete(FIRST, [a, b])
    assert grammar.is_complete(FIRST, [a, b, c, a])
    assert grammar.error is None


def test_a_state_is_replayed(grammars: GrammarEngine, tokenizer: Tokenizer) -> None:
    """What another worker, or this one before a preemption, has done is found in the ids."""
    ids = ids_of(tokenizer, "0123456789")
    grown = started(grammars, DIGITS, EOS)
    for length in range(len(ids)):
        fresh = started(grammars, DIGITS, EOS)
        first, second = allowed(grammars, (grown, ids[:length]), (fresh, ids[:length]))
        assert first == second
        assert first


def test_choices_have_a_state_each(grammars: GrammarEngine, tokenizer: Tokenizer) -> None:
    (a,) = ids_of(tokenizer, "a")
    grammar = started(grammars, LETTERS)
    assert grammar.is_complete(FIRST, [a] * 4)
    assert not grammar.is_complete(ChoiceIndex(1), [a])


def test_faults_are_told_in_words(grammars: GrammarEngine, tokenizer: Tokenizer, tmp_path: Path) -> None:
    broken = started(grammars, LLMatcher.grammar_from_regex("("))
    assert broken.error is not None and "does not compile" in broken.error
    assert len(allowed(grammars, (broken, []))[0]) > 300  # left open: the request fails at this step's end
    strayed = started(grammars, LETTERS)
    assert not strayed.is_complete(FIRST, ids_of(tokenizer, "z"))
    assert strayed.error is not None
    metaspace_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for place in (tmp_path, tmp_path / "missing"):
        other = GrammarEngine(place, 400)
        assert "cannot follow a grammar" in (started(other, LETTERS).error or "")
        other.close()


def test_grammars_are_compiled_once_and_kept_for_a_while(grammars: GrammarEngine) -> None:
    first = grammars.prepare(LETTERS)
    assert grammars.prepare(LETTERS) is first
    for number in range(grammar_cache.MAX_KEPT):
        grammars.prepare(LLMatcher.grammar_from_regex(f"a{number}")).result(30)
    assert grammars.prepare(LETTERS) is not first


def test_grammars_that_may_be_large_are_kept_for_less_long(
    grammars: GrammarEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is the text's length and how many tokens went through it; the grammar in use always stays."""
    monkeypatch.setattr(grammar_cache, "MAX_KEPT_BYTES", 1 << 20)
    long_text = LLMatcher.grammar_from_regex("a" * 4000)
    texts = [LETTERS, DIGITS, long_text]
    before = [grammars.prepare(text) for text in texts]
    assert [grammars.prepare(text) for text in texts] == before
    state = started(grammars, DIGITS)
    allowed(grammars, (state, ids_of(tokenizer, "0123456789")))
    assert [grammars.prepare(text) for text in texts] == before  # 160 KiB more
    for _ in range(5):
        allowed(grammars, (started(grammars, DIGITS), ids_of(tokenizer, "0123456789")))
    assert grammars.prepare(DIGITS) is before[1]
    assert grammars.prepare(LETTERS) is not before[0]
    assert grammars.prepare(long_text) is not before[2]
    assert not state.is_complete(FIRST, ids_of(tokenizer, "0123456789"))  # who has it goes on with it


def test_a_grammar_whose_lexer_is_full_is_compiled_anew(
    grammars: GrammarEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests of a grammar share its lexer's states: one that used them up must not fail those to come."""
    limits = LLParserLimits(max_lexer_states=200, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "grammar_limits", lambda: limits)
    text = LLMatcher.grammar_from_regex("[a-z]{0,2000}!")
    ids = ids_of(tokenizer, "abcdefgh" * 100)
    for _ in range(2):
        state = started(grammars, text)
        assert ids[0] in allowed(grammars, (state, []))[0]
        length = next((length for length in range(len(ids)) if not steps(grammars, state, ids[:length])), None)
        assert length is not None and length > 10
        assert state.error is not None and "too many states" in state.error


def steps(grammars: GrammarEngine, state: RequestGrammar, ids: list[int]) -> bool:
    """Whether the grammar goes on after ``ids``."""
    allowed(grammars, (state, ids))
    return state.error is None


# --- in the engine ---------------------------------------------------------------------------------------------------


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids))


@pytest.mark.parametrize("num_blocks", [64, 5])
async def test_outputs_conform_also_after_preemptions(folder: Path, tokenizer: Tokenizer, num_blocks: int) -> None:
    grammars = GrammarEngine(folder, VOCAB_SIZE)
    grammars.prepare(DIGITS).result(30)
    async with Harness(num_blocks=num_blocks, grammars=grammars).running() as harness:
        tokens = prompt(30)
        one = request(tokens, params(n=3, temperature=1.0, max_tokens=60, grammar=DIGITS, eos_token_ids=(EOS,)))
        free = request(tokens, params(max_tokens=20))
        harness.engine.submit(one)
        await harness.until_ended(one.key)
        await harness.answer(free)
        texts = [text_of(tokenizer, answer.token_ids) for answer in harness.answers[one.key].values()]
        assert len(set(texts)) == 3
        for text, answer in zip(texts, harness.answers[one.key].values(), strict=True):
            assert len(text) == 13 and text[:12].isdigit() and text[12] == "x"
            assert (answer.finish_reason, answer.stop_token_id) == ("stop", None)
        assert (harness.engine.stats.preemptions > 0) == (num_blocks == 5)
        assert harness.answers[free.key][FIRST].finish_reason == "length"
    harness.engine.close()


async def test_resumed_requests_go_on(folder: Path, tokenizer: Tokenizer) -> None:
    grammars = GrammarEngine(folder, VOCAB_SIZE)
    grammars.prepare(DIGITS).result(30)
    sampling = params(temperature=1.0, max_tokens=60, grammar=DIGITS)
    async with Harness(grammars=grammars).running() as harness:
        whole = (await harness.answer(request(prompt(20), sampling)))[FIRST].token_ids
        for cut in (1, 5, len(whole) - 1):
            rest = (await harness.answer(request(prompt(20), sampling, outputs={0: whole[:cut]})))[FIRST]
            assert whole[:cut] + rest.token_ids == whole
            assert rest.finish_reason == "stop"
    harness.engine.close()


async def test_what_cannot_be_followed_fails_alone(folder: Path) -> None:
    grammars = GrammarEngine(folder, VOCAB_SIZE)
    grammars.prepare(LETTERS).result(30)
    async with Harness(grammars=grammars).running() as harness:
        bad = request(prompt(20), params(grammar=LLMatcher.grammar_from_regex("(")))
        good = request(prompt(20), params(grammar=LETTERS, max_tokens=4))
        harness.engine.submit(bad)
        await harness.answer(good)
        await harness.until_ended(bad.key)
        error = harness.failed[bad.key]
        assert (error.kind, error.param, error.retryable) == ("invalid_request", "response_format", False)
        assert error.message
    harness.engine.close()
    async with Harness().running() as harness:
        with pytest.raises(InvalidRequestError):
            harness.engine.submit(request(prompt(20), params(grammar=LETTERS)))
