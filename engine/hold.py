"""Hold points: tests stop a request in a named state of its automaton, long enough to act on it there.

``--hold-points FILE`` names a file of ``STATE=SECONDS`` lines that is read whenever a point is reached, so that one
running worker serves many tests. Without the flag, reaching a point costs a comparison.
"""

import asyncio
import logging
from pathlib import Path

logger = logging.getLogger(__name__)


class HoldPoints:
    """The points of one worker; ``file`` is ``None`` outside tests."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    @property
    def is_active(self) -> bool:
        return self._file is not None

    def seconds(self, state: str) -> float:
        """How long ``state`` is held now; 0 when it is not."""
        if self._file is None or not self._file.exists():
            return 0.0
        lines = [line.partition("=") for line in self._file.read_text().splitlines()]
        return max((float(seconds) for name, _, seconds in lines if name == state), default=0.0)

    async def reached(self, state: str) -> None:
        """Wait here while ``state`` is held."""
        seconds = self.seconds(state)
        if seconds:
            logger.warning("held for a test", extra={"state": state})
            await asyncio.sleep(seconds)
