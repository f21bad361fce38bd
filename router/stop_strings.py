"""Finding stop strings in text that arrives in pieces, without ever letting a part of one out.

The match that ends first wins (among those that end together the longest), so the result does not depend on how the
text was cut into pieces.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """``text`` may be shown; ``cut``, all that was seen after it, must not be."""

    stop: str
    text: str
    cut: str


class StopMatcher:
    """Watches one choice's text for ``stops`` (no empty strings)."""

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """The text that can no longer be part of a match, or the match."""
        if not text:
            return ""
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            start, end, stop = match
            shown = end if self._include_stop else start
            return StopMatch(stop=stop, text=buffer[:shown], cut=buffer[shown:])
        keep = self._num_held(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def release(self) -> str:
        """The held text: no more will come that could complete a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                end = start + len(stop)
                if best is None or (end, start) < (best[1], best[0]):
                    best = (start, end, stop)
        return best

    def _num_held(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
