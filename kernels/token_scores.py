"""Log-probabilities and ranks of given tokens, and the most likely ones beside them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twopool.kernels.sampling import MAX_TOP_LOGPROBS, likeliest


@dataclass(frozen=True)
class TokenScores:
    """N tokens, on the host."""

    logprobs: npt.NDArray[np.float32]
    """[N] float32; NaN where the row's logits are no numbers"""
    ranks: npt.NDArray[np.int64]
    """[N] int64, 1 for the most likely token"""
    top_ids: npt.NDArray[np.int64]
    """[N, K] int64, best first, ties by id"""
    top_logprobs: npt.NDArray[np.float32]
    """[N, K] float32"""


@torch.inference_mode()
def score_tokens(logits: Tensor, token_ids: Tensor, *, with_top: bool, num_valid_tokens: int | None) -> TokenScores:
    """Score one token a row. logits: [N, vocab_size] float32; token_ids: [N] int64. Without ``with_top`` K is 0."""
    log_probs = torch.log_softmax(logits[:, :num_valid_tokens], dim=-1)
    chosen = log_probs.gather(1, token_ids[:, None])
    ranks = (log_probs > chosen).sum(dim=-1) + 1
    # Always as many as anyone may ask for, so that how many a neighbour wants cannot matter.
    top_values, top_ids = likeliest(log_probs, min(MAX_TOP_LOGPROBS, log_probs.shape[1]) if with_top else 0)
    return TokenScores(chosen[:, 0].cpu().numpy(), ranks.cpu().numpy(), top_ids.cpu().numpy(), top_values.cpu().numpy())
