"""Which part of a decoder each rank of a tensor-parallel group holds: pure arithmetic, no tensors.

Attention is split by query heads and their KV heads, the MLP by its inner rows, embedding and head by rows of the
vocabulary; norms are whole on every rank. A rank's heads, rows and tokens are ranges, in the order of the ranks.

What does not divide is spread unevenly, the first ranks taking one unit more:

* up to as many ranks as KV heads, whole *groups* (a KV head and the query heads that share it) are dealt out;
* beyond that every rank has one KV head, some of them replicated, and the replicas share their group's query heads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twopool.models.config import DecoderConfig
from twopool.protocol.errors import ConfigError

MAX_RANKS = 64
_FLAG = "--tensor-parallel-size"
# Kernels compute 32 rows at a time at least, so parts end on multiples of that where there are enough of them.
_UNITS = (32, 16, 8, 4, 2, 1)
_BYTES_A_SUM = 4
_LOGIT_ROWS_AT_ONCE = 64
_ROW_PADDING = 64


@dataclass(frozen=True)
class Shard:
    """One rank's place in its group."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not one of 0 ... {self.size - 1}")


@dataclass(frozen=True)
class RankPart:
    """What one rank holds, numbered as in the whole model."""

    query_heads: range
    kv_heads: range
    mlp_rows: range
    vocab_rows: range

    @property
    def num_heads_local(self) -> int:
        return len(self.query_heads)

    @property
    def kv_head_start(self) -> int:
        return self.kv_heads.start

    @property
    def num_kv_heads_local(self) -> int:
        return len(self.kv_heads)


@dataclass(frozen=True)
class ShardPlan:
    """The parts of all ranks; made by `plan_shards`."""

    config: DecoderConfig
    parts: tuple[RankPart, ...]

    @property
    def size(self) -> int:
        return len(self.parts)

    @property
    def vocab_bounds(self) -> tuple[int, ...]:
        """[size + 1]: rank r has the tokens vocab_bounds[r] ... vocab_bounds[r + 1] - 1."""
        return (0, *(part.vocab_rows.stop for part in self.parts))

    def report(self) -> list[str]:
        """One line for each thing that is uneven or held twice, with what it costs; empty for an even split."""
        heads = [part.num_heads_local for part in self.parts]
        parts = (
            ("query heads", heads, self.config.num_heads),
            ("MLP rows", [len(part.mlp_rows) for part in self.parts], self.config.intermediate_size),
            ("vocabulary rows", [len(part.vocab_rows) for part in self.parts], self.config.vocab_size),
        )
        work = {"query heads": "the attention", "MLP rows": "the MLP", "vocabulary rows": "the logits"}
        lines = [
            f"{work[noun]} is uneven: {noun} {'+'.join(map(str, counts))} of {total}; rank {counts.index(max(counts))} "
            f"does {max(counts) / total:.0%} of it, {_excess(max(counts) * self.size / total)} over an even split"
            for noun, counts, total in parts
            if max(counts) * self.size != total
        ]
        stored = sum(part.num_kv_heads_local for part in self.parts)
        if stored != self.config.num_kv_heads:
            lines.append(
                f"KV heads are replicated: {stored} are stored for {self.config.num_kv_heads}, "
                f"{_excess(stored / self.config.num_kv_heads)} KV memory over all ranks"
            )
        return [f"{_FLAG} {self.size}: {line}" for line in lines]


def plan_shards(config: DecoderConfig, size: int) -> ShardPlan:
    """Cut a decoder for `size` ranks. Raises ConfigError naming the degrees that work where this one cannot."""
    largest = largest_degree(config)
    if not 1 <= size <= largest:
        raise ConfigError(
            f"{_FLAG} {size}: this model of {config.num_heads} query heads can be cut for 1 to {largest} ranks "
            "(each needs at least one query head)",
            param=_FLAG,
        )
    attention = list(_attention(config, size))
    mlp = _split(config.intermediate_size, size)
    vocab = _split(config.vocab_size, size)
    return ShardPlan(
        config,
        tuple(
            RankPart(query_heads=queries, kv_heads=keys, mlp_rows=rows, vocab_rows=tokens)
            for (queries, keys), rows, tokens in zip(attention, mlp, vocab, strict=True)
        ),
    )


def largest_degree(config: DecoderConfig) -> int:
    """The most ranks a decoder can be cut for; every smaller degree works too."""
    return min(config.num_heads, config.intermediate_size, config.vocab_size, MAX_RANKS)


def kv_head_ranges(num_kv_heads: int, size: int) -> list[range]:
    """The KV heads of each of `size` ranks; of more ranks than heads some have the same one."""
    if size <= num_kv_heads:
        return _ranges(_shares(num_kv_heads, size))
    shares = _shares(size, num_kv_heads)
    return [range(head, head + 1) for head, replicas in enumerate(shares) for _ in range(replicas)]


def segment_bytes(plan: ShardPlan, max_tokens: int) -> int:
    """Bytes a rank may have to hand to the others at once, when no step has more than `max_tokens` rows.

    What `twopool.kernels.collectives.create_segment` takes as ``max_bytes``.
    """
    hidden = max_tokens * (plan.config.hidden_size + _ROW_PADDING)
    logits = _LOGIT_ROWS_AT_ONCE * max(len(part.vocab_rows) for part in plan.parts)
    return _BYTES_A_SUM * max(hidden, logits)


def _attention(config: DecoderConfig, size: int) -> Iterable[tuple[range, range]]:
    """-> (query heads, KV heads) of each rank."""
    group = config.num_heads // config.num_kv_heads
    if size <= config.num_kv_heads:
        for keys in kv_head_ranges(config.num_kv_heads, size):
            yield range(keys.start * group, keys.stop * group), keys
        return
    for head, replicas in enumerate(_shares(size, config.num_kv_heads)):
        for queries in _ranges(_shares(group, replicas)):
            yield range(head * group + queries.start, head * group + queries.stop), range(head, head + 1)


def _split(total: int, size: int) -> list[range]:
    """Ranges of whole units, of the largest that gives every rank one; the last range may end within a unit."""
    unit = next(unit for unit in _UNITS if total // unit >= size)
    ranges = _ranges([unit * share for share in _shares(-(-total // unit), size)])
    return [range(part.start, min(part.stop, total)) for part in ranges]


def _shares(total: int, count: int) -> list[int]:
    """`total` as `count` numbers that differ by one at most, the larger ones first."""
    return [total // count + (number < total % count) for number in range(count)]


def _ranges(lengths: Sequence[int]) -> list[range]:
    ranges = []
    start = 0
    for length in lengths:
        ranges.append(range(start, start + length))
        start += length
    return ranges


def _excess(ratio: float) -> str:
    percent = 100 * (ratio - 1)
    return f"+{percent:.0f} %" if percent >= 10 else f"+{percent:.1f} %"
