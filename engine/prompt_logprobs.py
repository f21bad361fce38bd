"""Log-probabilities of a prompt's own tokens, gathered chunk by chunk."""

import numpy as np
import numpy.typing as npt

from twopool.kernels.token_scores import TokenScores
from twopool.protocol.messages import PromptLogprobs


class PromptScores:
    """What is known of the prompt ids 1 to ``num_prompt`` - 1. Each position is written where it belongs, so a chunk
    that is computed again after a preemption just writes it again.
    """

    def __init__(self, num_prompt: int, num_top: int) -> None:
        self.num_top = num_top
        self._num_scored = num_prompt - 1
        self._logprobs = np.zeros(self._num_scored, dtype="<f4")
        self._ranks = np.zeros(self._num_scored, dtype="<i4")
        self._top_ids = np.zeros((self._num_scored, num_top), dtype="<i4")
        self._top_logprobs = np.zeros((self._num_scored, num_top), dtype="<f4")

    def rows_of(self, start: int, num_rows: int) -> int:
        """How many of the rows at positions ``start`` on predict a token of the prompt."""
        return max(0, min(start + num_rows, self._num_scored) - start)

    def put(self, start: int, scores: TokenScores, first: int, num_rows: int) -> bool:
        """Take rows ``first`` on for positions ``start`` on; whether all are numbers."""
        here, there = slice(start, start + num_rows), slice(first, first + num_rows)
        self._logprobs[here] = scores.logprobs[there]
        self._ranks[here] = scores.ranks[there]
        self._top_ids[here] = scores.top_ids[there, : self.num_top]
        self._top_logprobs[here] = scores.top_logprobs[there, : self.num_top]
        return not bool(np.isnan(self._logprobs[here]).any())

    def message(self) -> PromptLogprobs:
        return PromptLogprobs(
            num_top=self.num_top,
            logprobs=_bytes(self._logprobs),
            ranks=_bytes(self._ranks),
            top_ids=_bytes(self._top_ids),
            top_logprobs=_bytes(self._top_logprobs),
        )


def _bytes(values: npt.NDArray[np.generic]) -> bytes:
    return values.tobytes()
