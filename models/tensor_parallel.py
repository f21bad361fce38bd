"""A rank's part of a decoder: which slices of the weights it reads, and the ranks it computes with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from twopool.kernels.collectives import Collective
from twopool.models.config import DecoderConfig
from twopool.models.layers import TensorSource
from twopool.models.sharding import RankPart, Shard, ShardPlan, plan_shards


@dataclass(frozen=True)
class TensorParallel:
    """One rank, its part of the model and the others."""

    plan: ShardPlan
    collective: Collective

    @classmethod
    def of(cls, config: DecoderConfig, shard: Shard | None, collective: Collective | None) -> "TensorParallel | None":
        """None for a decoder that is whole. Raises ConfigError for a degree this model cannot be cut for."""
        if shard is None or shard.size == 1:
            return None
        if collective is None or (collective.rank, collective.size) != (shard.rank, shard.size):
            raise ValueError(f"{shard} needs a collective of that rank and size")
        return cls(plan_shards(config, shard.size), collective)

    @property
    def rank(self) -> int:
        return self.collective.rank

    @property
    def part(self) -> RankPart:
        return self.plan.parts[self.rank]

    @property
    def vocab_widths(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(len(part.vocab_rows) for part in self.plan.parts)


def whole(config: DecoderConfig) -> RankPart:
    """The part of a rank that is alone."""
    return plan_shards(config, 1).parts[0]


class PartSource:
    """A rank's slices of another source, by the names and in the order the whole has.

    Biases that are added to a sum over the ranks are rank 0's; the others have zeros.
    """

    def __init__(self, source: TensorSource, config: DecoderConfig, parallel: TensorParallel) -> None:
        self._source = source
        self._rank = parallel.rank
        part, head_dim = parallel.part, config.head_dim
        queries = slice(part.query_heads.start * head_dim, part.query_heads.stop * head_dim)
        keys = slice(part.kv_heads.start * head_dim, part.kv_heads.stop * head_dim)
        mlp = slice(part.mlp_rows.start, part.mlp_rows.stop)
        vocab = slice(part.vocab_rows.start, part.vocab_rows.stop)
        self._rows = {
            "q_proj": queries,
            "k_proj": keys,
            "v_proj": keys,
            "gate_proj": mlp,
            "up_proj": mlp,
            "embed_tokens": vocab,
            "lm_head": vocab,
        }
        self._columns = {"o_proj": queries, "down_proj": mlp}

    def read(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The rank's part of the tensor ``name``; rows and columns are chosen here and stay None."""
        module, kind = name.split(".")[-2:]
        if module in self._columns:
            if kind == "weight":
                return self._source.read(name, columns=self._columns[module])
            bias = self._source.read(name)
            return bias if self._rank == 0 else torch.zeros_like(bias)
        return self._source.read(name, rows=self._rows.get(module))
