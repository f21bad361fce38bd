"""The draw of one token a row on a CPU: temperature, top-k, min-p, top-p, then Gumbel-max.

Row by row, so that a row's weights stay in the processor's second-level cache from the first pass to the last, and with
numpy alone: after a native step this thread may be pinned, and threads that torch started would share its CPU.
"""

import numpy as np
import numpy.typing as npt

from twopool.kernels.philox import gumbel_noise

GROUP = 256
"""Tokens in a group of the two-level draw."""

_SETS = 1024
"""Sets of tokens whose maxima bound the k-th largest weight from below."""

_FEW = 2048
"""Values that are sorted as they are."""

_BOUNDS = (2.0**-6, 2.0**-9, 2.0**-12)
"""Weights, in parts of the largest, above which most of the probability may lie."""

_BIN_SHIFT = 19
"""Bits of a float32 that do not tell its bin: 16 bins to an octave."""

Floats = npt.NDArray[np.float32]


def draw(
    logits: Floats, rows: npt.NDArray[np.void], is_random: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """[R] int64 tokens, and [R] bool: rows without usable logits, whose token means nothing.

    logits: [R, vocab_size], rows contiguous; rows: [R] of ``sampling.ROW_DTYPE``. Where ``is_random`` is False the most
    likely token is taken, of equal ones the first.
    """
    num_rows, vocab_size = logits.shape
    tokens = logits.argmax(axis=1)  # NaN counts as the largest
    best = logits[np.arange(num_rows), tokens]
    bad = ~np.isfinite(best)
    drawing = np.flatnonzero(is_random & ~bad).tolist()
    if drawing:
        scratch = _Scratch(vocab_size)
        for index, noise in zip(drawing, _noise(rows[drawing], vocab_size), strict=True):
            tokens[index] = scratch.draw(logits[index], best[index], rows[index], noise)
    return tokens, bad


def _noise(keys: npt.NDArray[np.void], vocab_size: int) -> npt.NDArray[np.float64]:
    """For each row GROUP values for the tokens of a group, then one for each group."""
    return gumbel_noise(
        keys["seed"].astype(np.int64),
        keys["position"].astype(np.int64),
        keys["choice"].astype(np.int64),
        GROUP + -(-vocab_size // GROUP),
    )


class _Scratch:
    """Memory that every row is drawn in."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._grouped = slice(-(-vocab_size // GROUP) * GROUP)
        width = -(-vocab_size // _SETS) * _SETS
        self._weights = np.zeros(width, dtype=np.float32)

    def draw(self, logits: Floats, best: np.float32, row: np.void, noise: npt.NDArray[np.float64]) -> int:
        """A token with probability proportional to exp((logit - best) / temperature) among those that are kept."""
        weights = self._weights
        own = weights[: self._vocab_size]
        # The maximum is subtracted first: it becomes 0 exactly, and nothing overflows however small the temperature.
        np.subtract(logits, best, out=own)
        temperature = np.float32(row["temperature"])
        if temperature != 1.0:
            with np.errstate(over="ignore"):
                np.divide(own, temperature, out=own)
        np.exp(own, out=own)
        top_k = int(row["top_k"]) if 0 < row["top_k"] < self._vocab_size else 0
        top_p, min_p = float(row["top_p"]), np.float32(row["min_p"])
        if top_k or top_p < 1.0 or min_p > 0.0:
            self._truncate(top_k, top_p, min_p)
        return _by_weight(weights[self._grouped], noise)

    def _truncate(self, top_k: int, top_p: float, min_p: np.float32) -> None:
        """Set the weights to 0 that top-k, min-p and then top-p leave out; the largest is 1. top_k 0: off.

        Of equal weights at the edge the first ones stay.
        """
        weights = self._weights
        smallest, num_equal = max(min_p, np.finfo(np.float32).smallest_subnormal), None
        if top_k or top_p < 1.0:
            values = weights
            if top_k:
                values = np.sort(weights[weights >= max(smallest, self._bound(top_k))])[-top_k:]
                smallest = values[0]
                num_equal = int(np.searchsorted(values, smallest, side="right"))
            elif min_p > 0.0:
                values = weights[weights >= smallest]
            if top_p < 1.0:
                smallest, num_equal = _nucleus(values, top_p * _sum(values))
        np.multiply(weights, weights >= smallest, out=weights)
        if num_equal is not None:
            weights[np.flatnonzero(weights == smallest)[num_equal:]] = 0.0

    def _bound(self, top_k: int) -> np.float32:
        """Not above the k-th largest weight: as many sets of weights as that have one at least as large."""
        weights = self._weights
        maxima = np.maximum.reduce(weights.reshape(-1, _SETS), axis=0) if top_k <= _SETS else weights
        bound: np.float32 = np.partition(maxima, len(maxima) - top_k)[len(maxima) - top_k]
        return bound


def _nucleus(values: Floats, needed: float) -> tuple[np.float32, int]:
    """The smallest of the largest values that together reach ``needed``, and how many equal to it are among them.

    Sorting is for few values: those that hold most of a likely distribution, or one narrow bin of a flat one.
    """
    for bound in _BOUNDS if len(values) > _FEW else ():
        upper = values[values >= bound]
        if _sum(upper) >= needed:
            values = upper
            break
    if len(values) <= _FEW:
        return _edge(values, 0.0, needed)
    bins = values.view(np.int32) >> _BIN_SHIFT  # positive floats are ordered as their bits are
    reached = np.add.accumulate(np.bincount(bins, weights=values)[::-1])
    place = int(np.searchsorted(reached, min(needed, reached[-1])))
    return _edge(values[bins == len(reached) - 1 - place], float(reached[place - 1]) if place else 0.0, needed)


def _edge(values: Floats, before: float, needed: float) -> tuple[np.float32, int]:
    """``_nucleus`` among ``values`` alone, where larger ones add up to ``before``."""
    largest = np.sort(values)[::-1]
    sums = before + np.add.accumulate(largest[:-1], dtype=np.float64)
    count = 1 + int(np.searchsorted(sums, needed))
    smallest = largest[count - 1]
    return smallest, int(np.count_nonzero(largest[:count] == smallest))


def _sum(values: Floats) -> float:
    return float(np.add.reduce(values, dtype=np.float64))


def _by_weight(weights: Floats, noise: npt.NDArray[np.float64]) -> int:
    """A token with probability proportional to its weight.

    Gumbel-max over groups of tokens, then over the tokens of the group: the same distribution as over all tokens, with
    noise for GROUP + groups values in place of the vocabulary, and a last-bit change of a logit still changes the
    outcome with a probability of that order only.
    """
    groups = weights.reshape(-1, GROUP)
    group = int((_log(groups.sum(axis=1)) + noise[GROUP:]).argmax())
    return group * GROUP + int((_log(groups[group]) + noise[:GROUP]).argmax())


def _log(values: Floats) -> npt.NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.log(values, dtype=np.float64)
