"""What a grammar may cost, the same on the router, which admits it, and on the workers, which follow it."""

from llguidance import LLParserLimits


def grammar_limits() -> LLParserLimits:
    """Bounds of one grammar: about a second to compile at most, 20 ms a mask, 100 MB of lexer states."""
    return LLParserLimits(max_grammar_size=20_000, max_lexer_states=50_000, verbose_errors=False)
