"""A prompt's log-probabilities as a worker sent them, and as clients read them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from twopool.protocol.messages import PromptLogprobs, TokenLogprobs
from twopool.router.detokenizer import TokenTable


@dataclass(frozen=True)
class PromptScores:
    """One prompt: its ids, and for each what is known of it; nothing of the first."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    ranks: list[int]

    @classmethod
    def of(cls, token_ids: list[int], message: PromptLogprobs) -> "PromptScores":
        """Raises ``ValueError`` where the message is not about ``token_ids``."""
        count, num_top = len(token_ids) - 1, message.num_top
        logprobs = np.frombuffer(message.logprobs, dtype="<f4")
        ranks = np.frombuffer(message.ranks, dtype="<i4")
        top_ids = np.frombuffer(message.top_ids, dtype="<i4")
        top_logprobs = np.frombuffer(message.top_logprobs, dtype="<f4")
        if len(logprobs) != count or len(ranks) != count or not len(top_ids) == len(top_logprobs) == count * num_top:
            raise ValueError(f"log-probabilities of another prompt than the one of {count + 1} tokens")
        shape = (count, num_top)
        rows = zip(
            logprobs.tolist(), top_ids.reshape(shape).tolist(), top_logprobs.reshape(shape).tolist(), strict=True
        )
        known = [TokenLogprobs(logprob, tuple(ids), tuple(tops)) for logprob, ids, tops in rows]
        return cls(token_ids, [None, *known], [0, *ranks.tolist()])


def prompt_logprobs_json(scores: PromptScores, num_top: int, table: TokenTable) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token its own and the likeliest ones, by id; null for the first."""
    result: list[dict[str, Any] | None] = []
    for token_id, logprobs, rank in zip(scores.token_ids, scores.logprobs, scores.ranks, strict=True):
        if logprobs is None:
            result.append(None)
            continue
        tops = zip(logprobs.top_ids[:num_top], logprobs.top_logprobs[:num_top], strict=True)
        known = {token_id: (logprobs.logprob, rank)}
        known |= {top: (value, place) for place, (top, value) in enumerate(tops, 1) if table.is_known(top)}
        result.append(
            {
                str(one): {"logprob": max(value, -9999.0), "rank": place, "decoded_token": table.token_text(one)}
                for one, (value, place) in known.items()
            }
        )
    return result
