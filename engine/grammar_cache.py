"""Compiled grammars that are kept for the next request, bounded in number and in memory.

llguidance does not say how large a grammar is, so its memory is estimated, on the safe side. What grows is the lexer:
it remembers each state it meets, up to the limit in ``protocol/grammar.py``, and all copies of a matcher share one
lexer with their prototype. So a grammar in the cache holds what its requests, also those long over, have met.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher

MAX_KEPT = 128
MAX_KEPT_BYTES = 1 << 30

_BASE_BYTES = 64 * 1024
_BYTES_PER_CHAR = 64
"""Measured: 49 of a schema of 1,500 properties, less of smaller ones."""
_BYTES_PER_TOKEN = 16 * 1024
"""Measured: 12 KB where every token makes the lexer meet new states; most grammars soon know all of theirs."""
_MAX_LEXER_BYTES = 100 << 20


@dataclass(eq=False)
class KeptGrammar:
    """``num_fed`` tokens went through copies of the prototype; ``spoilt`` once one of them failed: a full lexer is full
    for every copy.
    """

    num_chars: int
    prototype: "Future[LLMatcher]"
    num_fed: int = 0
    spoilt: bool = False

    @property
    def num_bytes(self) -> int:
        """What the grammar may take at most."""
        lexer = min(self.num_fed * _BYTES_PER_TOKEN, _MAX_LEXER_BYTES)
        return _BASE_BYTES + self.num_chars * _BYTES_PER_CHAR + lexer

    @property
    def is_usable(self) -> bool:
        """Whether a request may begin with it: it compiles, or did, and none of its requests failed."""
        return not self.spoilt and not (self.prototype.done() and self.prototype.exception() is not None)


class GrammarCache:
    """Grammars by their text; the one not used for longest goes first. For one thread."""

    def __init__(self, compile_text: Callable[[str], "Future[LLMatcher]"]) -> None:
        self._compile = compile_text
        self._kept: OrderedDict[str, KeptGrammar] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """All grammars together, as estimated."""
        return sum(kept.num_bytes for kept in self._kept.values())

    def get(self, text: str) -> KeptGrammar:
        """The grammar of ``text``, compiled anew where there is none that can be used."""
        kept = self._kept.get(text)
        if kept is None or not kept.is_usable:
            kept = self._kept[text] = KeptGrammar(len(text), self._compile(text))
        self._kept.move_to_end(text)
        num_bytes = self.num_bytes
        while len(self._kept) > 1 and (len(self._kept) > MAX_KEPT or num_bytes > MAX_KEPT_BYTES):
            num_bytes -= self._kept.popitem(last=False)[1].num_bytes
        return kept
