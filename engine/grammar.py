"""Output grammars on a worker: compiled off the event loop, filled into bit masks while a step computes.

Which tokens may come next depends on the output ids alone, and those are known before a step begins. So a step's masks
are filled on a thread of their own while the forward pass runs, and are wanted only when it draws. Compilation has
another thread, so that a large grammar never holds up the masks of the requests that run.

A choice's matcher is a cache of its output ids: it is fed those it has not seen, wherever they came from (another
worker, an earlier attempt, before a preemption).
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from twopool.engine.grammar_cache import GrammarCache, KeptGrammar
from twopool.protocol.errors import InvalidRequestError
from twopool.protocol.grammar import grammar_limits
from twopool.protocol.ids import ChoiceIndex

Ints = npt.NDArray[np.int32]

_MAX_FILL_THREADS = 8
_WORD_BITS = 32


@dataclass(eq=False)
class _ChoiceMatcher:
    matcher: LLMatcher
    num_fed: int = 0

    def feed(self, output_ids: list[int]) -> int:
        """How many ids were new."""
        num_new = len(output_ids) - self.num_fed
        if num_new > 0:
            self.matcher.consume_tokens(output_ids[self.num_fed :])
            self.num_fed = len(output_ids)
        return num_new


@dataclass(eq=False)
class RequestGrammar:
    """One request's grammar and where each of its choices stands in it.

    ``error`` says in words why the request cannot go on: the grammar did not compile, or needs more than
    ``grammar_limits`` allows.
    """

    stop_ids: frozenset[int]
    kept: KeptGrammar
    error: str | None = None
    _prototype: LLMatcher | None = None
    _choices: dict[ChoiceIndex, _ChoiceMatcher] = field(default_factory=dict)

    def compiled(self, prototype: LLMatcher) -> None:
        self._prototype = prototype

    def fail(self, matcher: LLMatcher) -> None:
        """``matcher``, of one of the choices, has an error."""
        self.error = matcher.get_error()[:1000]
        self.kept.spoilt = True

    def is_complete(self, choice: ChoiceIndex, output_ids: list[int]) -> bool:
        """Whether nothing can follow ``output_ids``. Not to be called while a step fills masks."""
        matcher = self._fed(choice, output_ids)
        return matcher is not None and matcher.is_stopped()

    def _fed(self, choice: ChoiceIndex, output_ids: list[int]) -> LLMatcher | None:
        """The choice's matcher after ``output_ids``; ``None`` once there is an error."""
        if self._prototype is None or self.error is not None:
            return None
        state = self._choices.get(choice)
        if state is None:
            state = self._choices[choice] = _ChoiceMatcher(self._prototype.deep_copy())
        self.kept.num_fed += state.feed(output_ids)
        if state.matcher.is_error():
            self.fail(state.matcher)
            return None
        return state.matcher


@dataclass(frozen=True)
class MaskRow:
    """Row ``row`` of a step's draws is drawn within ``grammar``, after ``output_ids``."""

    row: int
    grammar: RequestGrammar
    choice: ChoiceIndex
    output_ids: list[int]


@dataclass(frozen=True)
class StepMasks:
    """The masks of one step, being filled. ``rows``: [G] int32 draws; ``bits``: [G, words] int32, see SamplingBatch."""

    rows: Ints
    bits: "Future[Ints]"


class GrammarEngine:
    """Compiles grammars for the tokenizer of one model folder and fills masks ``vocab_size`` wide."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Reading the tokenizer begins at once, on the compile thread."""
        self._vocab_size = vocab_size
        self._compiling = ThreadPoolExecutor(1, "grammar-compile")
        self._filling = ThreadPoolExecutor(1, "grammar-masks")
        self._tokenizer = self._compiling.submit(_load_tokenizer, folder, vocab_size)
        self._cache = GrammarCache(lambda text: self._compiling.submit(self._compile, text))
        self._executor: LLExecutor | None = None

    def close(self) -> None:
        """Finish what is under way and stop the threads; idempotent."""
        self._compiling.shutdown(cancel_futures=True)
        self._filling.shutdown()

    def prepare(self, text: str) -> "Future[LLMatcher]":
        """Compile ``text``, or find it compiled; the result is to be copied. Called on one thread."""
        return self._cache.get(text).prototype

    def start(self, text: str, stop_ids: frozenset[int], on_ready: Callable[[], None]) -> RequestGrammar:
        """A request's grammar; ``on_ready`` is called, on any thread, once it is compiled or has an ``error``.

        ``stop_ids`` may be drawn wherever the output could end.
        """
        kept = self._cache.get(text)
        grammar = RequestGrammar(stop_ids, kept)

        def settle(prototype: "Future[LLMatcher]") -> None:
            if prototype.cancelled():
                grammar.error = "the worker closes"
            elif (error := prototype.exception()) is not None:
                grammar.error = str(error)[:1000]
            else:
                grammar.compiled(prototype.result())
            on_ready()

        kept.prototype.add_done_callback(settle)
        return grammar

    def fill(self, rows: list[MaskRow]) -> StepMasks:
        """Begin to fill the masks of one step."""
        numbers = np.array([row.row for row in rows], dtype=np.int32)
        return StepMasks(numbers, self._filling.submit(self._fill, rows))

    # --- on the threads

    def _compile(self, text: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer.result(), text, log_level=0, limits=grammar_limits())
        if matcher.is_error():
            raise InvalidRequestError(f"the grammar does not compile: {matcher.get_error()[:1000]}")
        return matcher

    def _fill(self, rows: list[MaskRow]) -> Ints:
        """[G, words] int32. A row whose grammar has an error is left open: its request is about to fail."""
        tokenizer = self._tokenizer.result()
        bits = np.full((len(rows), -(-max(self._vocab_size, tokenizer.vocab_size) // _WORD_BITS)), -1, dtype=np.int32)
        wanted = []
        for index, row in enumerate(rows):
            matcher = row.grammar._fed(row.choice, row.output_ids)
            if matcher is not None:
                wanted.append((index, matcher))
        if len(wanted) == 1:
            index, matcher = wanted[0]
            matcher.unsafe_compute_mask_ptr(bits[index].ctypes.data, bits[index].nbytes)
        elif wanted:
            self._threads().unsafe_compute_mask_ptr(
                [(matcher, index) for index, matcher in wanted], bits.ctypes.data, bits[0].nbytes, len(bits)
            )
        for index, matcher in wanted:
            if matcher.is_error():
                rows[index].grammar.fail(matcher)
                bits[index] = -1
            else:
                _set_ends(bits[index], matcher.is_accepting(), tokenizer.eos_tokens, rows[index].grammar.stop_ids)
        return bits

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            self._executor = LLExecutor(max(1, min(_MAX_FILL_THREADS, len(os.sched_getaffinity(0)) - 1)))
        return self._executor


def _set_ends(bits: Ints, accepting: bool, tokenizer_eos: list[int], stop_ids: frozenset[int]) -> None:
    """Allow exactly the request's own stop ids where the grammar accepts. bits: [words]."""
    for token in tokenizer_eos:
        _set(bits, token, False)
    if accepting:
        for token in stop_ids:
            _set(bits, token, True)
        if not bits.any():  # nothing may follow, and the request has no stop ids
            for token in tokenizer_eos:
                _set(bits, token, True)


def _set(bits: Ints, token: int, on: bool) -> None:
    word = bits.view(np.uint32)
    flag = np.uint32(1 << token % _WORD_BITS)
    if on:
        word[token // _WORD_BITS] |= flag
    else:
        word[token // _WORD_BITS] &= ~flag


def _load_tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        tokenizer = LLTokenizer(text)
        if tokenizer.vocab_size < vocab_size:  # the model's logits are wider
            tokenizer = LLTokenizer(text, n_vocab=vocab_size)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"this model's tokenizer cannot follow a grammar: {error}") from error
    return tokenizer
