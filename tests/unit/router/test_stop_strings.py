"""Stop strings over text in pieces."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from twopool.router.stop_strings import StopMatch, StopMatcher

TEXT = st.text("abc", max_size=14)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3, unique=True).map(tuple)


def run(stops: tuple[str, ...], parts: list[str], *, include: bool = False) -> tuple[list[str], StopMatch | None]:
    matcher = StopMatcher(stops, include_stop=include)
    shown: list[str] = []
    for part in parts:
        result = matcher.push(part)
        if isinstance(result, StopMatch):
            return [*shown, result.text], result
        shown.append(result)
    return [*shown, matcher.release()], None


def first_end(stops: tuple[str, ...], text: str) -> tuple[int, int] | None:
    """(end, start) of the match that ends first, the longest of those that end together."""
    ends = [
        (end, end - len(stop))
        for end in range(len(text) + 1)
        for stop in stops
        if end >= len(stop) and text[end - len(stop) : end] == stop
    ]
    return min(ends, default=None)


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 14), max_size=6), include=st.booleans())
def test_the_cut_does_not_depend_on_the_pieces(
    text: str, stops: tuple[str, ...], cuts: list[int], include: bool
) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[start:end] for start, end in itertools.pairwise(bounds)]
    shown, match = run(stops, parts, include=include)
    expected = first_end(stops, text)
    if expected is None:
        assert (match, "".join(shown)) == (None, text)
        return
    end, start = expected
    assert match is not None
    assert "".join(shown) == text[: end if include else start]
    assert match.stop == text[start:end]


@given(text=TEXT, stops=STOPS)
def test_no_prefix_of_a_match_is_ever_shown(text: str, stops: tuple[str, ...]) -> None:
    expected = first_end(stops, text)
    matcher = StopMatcher(stops, include_stop=False)
    shown = ""
    for char in text:
        result = matcher.push(char)
        if isinstance(result, StopMatch):
            break
        shown += result
        assert expected is None or len(shown) <= expected[1]


def test_a_stop_that_ends_inside_a_piece() -> None:
    """API-02: 'DE' inside 'DEF'."""
    shown, match = run(("DE",), ["abc", "DEF"])
    assert match == StopMatch(stop="DE", text="", cut="DEF")
    assert "".join(shown) == "abc"


def test_text_that_cannot_match_is_not_held() -> None:
    matcher = StopMatcher(("\n\nUser:",), include_stop=False)
    assert [matcher.push(part) for part in ("Hello", "\n", "\n", "x", "\n\nUse")] == ["Hello", "", "", "\n\nx", ""]
    assert matcher.release() == "\n\nUse"
