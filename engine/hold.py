"""Hold points: tests stop a request in a named state of its automaton, long enough to act on it there.

Set by ``--hold-points STATE=SECONDS,...``; with none set, reaching a point costs one dictionary look-up.
"""

import asyncio
import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class HoldPoints:
    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = dict(seconds)

    def seconds(self, state: str) -> float:
        return self._seconds.get(state, 0.0)

    async def reached(self, state: str) -> None:
        """Wait here when ``state`` is held."""
        if state in self._seconds:
            logger.warning("held for a test", extra={"state": state})
            await asyncio.sleep(self._seconds[state])
