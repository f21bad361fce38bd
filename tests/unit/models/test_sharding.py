"""Every degree that is offered cuts a decoder into whole, non-empty parts, and says what unevenness costs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twopool.models.config import DecoderConfig
from twopool.models.sharding import (
    MAX_RANKS,
    RankPart,
    Shard,
    kv_head_ranges,
    largest_degree,
    plan_shards,
    segment_bytes,
)
from twopool.protocol.errors import ConfigError


def _config(heads: int, kv_heads: int, inner: int = 1536, vocab: int = 49152) -> DecoderConfig:
    return DecoderConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab,
            "hidden_size": 64 * heads,
            "intermediate_size": inner,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 512,
        }
    )


@st.composite
def geometries(draw: st.DrawFn) -> tuple[DecoderConfig, int]:
    kv_heads, group = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    config = _config(kv_heads * group, kv_heads, draw(st.integers(1, 5000)), draw(st.integers(1, 200_000)))
    return config, draw(st.integers(1, largest_degree(config)))


def _joined(parts: list[range]) -> range:
    """The range that neighbouring ones cover; none of them is empty."""
    for left, right in itertools.pairwise(parts):
        assert left.stop == right.start
    assert all(len(part) > 0 for part in parts)
    return range(parts[0].start, parts[-1].stop)


@given(geometries())
def test_kv_heads_of_ranks_are_those_of_their_parts(geometry: tuple[DecoderConfig, int]) -> None:
    config, size = geometry
    assert kv_head_ranges(config.num_kv_heads, size) == [part.kv_heads for part in plan_shards(config, size).parts]


@given(geometries())
def test_parts_are_the_whole(geometry: tuple[DecoderConfig, int]) -> None:
    config, size = geometry
    plan = plan_shards(config, size)
    assert plan.size == size == len(plan.parts)
    assert _joined([part.query_heads for part in plan.parts]) == range(config.num_heads)
    assert _joined([part.mlp_rows for part in plan.parts]) == range(config.intermediate_size)
    assert _joined([part.vocab_rows for part in plan.parts]) == range(config.vocab_size)
    assert plan.vocab_bounds == (0, *(part.vocab_rows.stop for part in plan.parts))


@given(geometries())
def test_query_heads_stand_beside_their_kv_heads(geometry: tuple[DecoderConfig, int]) -> None:
    config, size = geometry
    group = config.num_heads // config.num_kv_heads
    parts = plan_shards(config, size).parts
    for part in parts:
        assert sorted({head // group for head in part.query_heads}) == list(part.kv_heads)
        assert part.num_heads_local % part.num_kv_heads_local == 0
        assert (part.kv_head_start, part.num_kv_heads_local) == (part.kv_heads.start, len(part.kv_heads))
    held = [head for part in parts for head in part.kv_heads]
    copies = [held.count(head) for head in range(config.num_kv_heads)]
    assert max(copies) - min(copies) <= 1, "replicas are spread evenly"
    assert min(copies) == 1 or size > config.num_kv_heads, "nothing is replicated without need"
    if size <= config.num_kv_heads:
        assert max(copies) == 1


@given(geometries())
def test_no_rank_has_more_than_one_unit_beyond_another(geometry: tuple[DecoderConfig, int]) -> None:
    config, size = geometry
    parts = plan_shards(config, size).parts
    for total, lengths in (
        (config.intermediate_size, [len(part.mlp_rows) for part in parts]),
        (config.vocab_size, [len(part.vocab_rows) for part in parts]),
    ):
        unit = min(32, total // size)
        assert max(lengths) - min(lengths) < 2 * unit
        if total // 32 >= size:
            assert all(length % 32 == 0 for length in lengths[:-1]), "kernels compute 32 rows at a time"


@given(geometries())
def test_report_names_what_is_uneven_and_nothing_else(geometry: tuple[DecoderConfig, int]) -> None:
    config, size = geometry
    plan = plan_shards(config, size)
    uneven = [
        len({len(getattr(part, name)) for part in plan.parts}) > 1 for name in ("query_heads", "mlp_rows", "vocab_rows")
    ]
    replicated = sum(part.num_kv_heads_local for part in plan.parts) > config.num_kv_heads
    lines = plan.report()
    assert len(lines) == sum(uneven) + replicated
    assert all("%" in line and "\n" not in line and f"--tensor-parallel-size {size}:" in line for line in lines)


def test_smollm2_on_two_ranks() -> None:
    plan = plan_shards(_config(9, 3), 2)
    assert plan.parts == (
        RankPart(range(6), range(2), range(768), range(24576)),
        RankPart(range(6, 9), range(2, 3), range(768, 1536), range(24576, 49152)),
    )
    (line,) = plan.report()
    assert "6+3 of 9" in line and "+33 %" in line


def test_smollm2_on_four_ranks() -> None:
    plan = plan_shards(_config(9, 3), 4)
    assert [part.query_heads for part in plan.parts] == [range(2), range(2, 3), range(3, 6), range(6, 9)]
    assert [part.kv_heads for part in plan.parts] == [range(1), range(1), range(1, 2), range(2, 3)]
    uneven, replicated = plan.report()
    assert "2+1+3+3 of 9" in uneven and "rank 2" in uneven
    assert "4 are stored for 3" in replicated and "+33 %" in replicated


def test_an_even_split_has_nothing_to_report() -> None:
    assert plan_shards(_config(32, 8), 4).report() == []


@pytest.mark.parametrize("size", [-1, 0, 10, 1000])
def test_refused_degrees_are_told_which_ones_work(size: int) -> None:
    with pytest.raises(ConfigError, match=r"1 to 9 ranks") as refused:
        plan_shards(_config(9, 3), size)
    assert refused.value.param == "--tensor-parallel-size"


def test_largest_degree_is_bounded() -> None:
    assert largest_degree(_config(9, 3, inner=5)) == 5
    assert largest_degree(_config(128, 128)) == MAX_RANKS


def test_a_rank_stands_within_its_group() -> None:
    with pytest.raises(ValueError, match="rank 2"):
        Shard(2, 2)


def test_segment_holds_a_step() -> None:
    plan = plan_shards(_config(9, 3), 2)
    assert segment_bytes(plan, 1) == 4 * 64 * 24576, "few tokens: the logits decide"
    assert segment_bytes(plan, 100_000) >= 4 * 100_000 * plan.config.hidden_size
