"""Ranks that each hold a part of a decoder compute what one that holds all of it computes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from twopool.kernels.native_step import native_available
from twopool.models.config import DecoderConfig
from twopool.models.decoder import Decoder
from twopool.models.native_decoder import NativeDecoder
from twopool.models.sharding import Shard, plan_shards, segment_bytes
from twopool_testing.ranks import on_every_rank, shared_collectives

UNAVAILABLE = native_available()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"no native library: {UNAVAILABLE}")

CPU = torch.device("cpu")
MAX_TOKENS = 256
# Groups that divide and do not, KV heads that are replicated, biases, norms of heads, windows, tied embeddings.
SHAPES = {
    "llama_9_3": (2, 3, 4),
    "llama_tied": (2, 3, 4),
    "llama_7_1": (2, 3, 4),
    "llama_attention_bias": (2, 4),
    "llama_mlp_bias": (2, 3),
    "mistral_window_33": (2,),
    "qwen2": (3,),
    "qwen3_tied_bias": (2, 3, 4),
}
CASES = [(name, size) for name, sizes in SHAPES.items() for size in sizes]


class Group:
    """A decoder's ranks, each with a driver and a KV pool of its own."""

    def __init__(self, model: Any, make_driver: Callable[..., Any], size: int, kind: type[Any], **options: Any) -> None:
        threads = options.pop("threads", 1)
        dtype = options.pop("dtype", torch.float32)
        plan = plan_shards(DecoderConfig.from_folder(model.folder), size)
        self.collectives = shared_collectives(size, segment_bytes(plan, MAX_TOKENS))
        extra = {"num_threads": threads} if kind is NativeDecoder else {}
        self.decoders = [
            kind.load(model.folder, dtype=dtype, device=CPU, shard=Shard(rank, size), collective=collective, **extra)
            for rank, collective in enumerate(self.collectives)
        ]
        self.drivers = [make_driver(decoder, **options) for decoder in self.decoders]

    def call(self, what: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """what(driver) on every rank -> rank 0's."""
        first, *others = on_every_rank(len(self.drivers), lambda rank: what(self.drivers[rank]))
        assert all(other.shape == (0, first.shape[1]) for other in others)
        return first

    def close(self) -> None:
        for decoder in self.decoders:
            if isinstance(decoder, NativeDecoder):
                decoder.close()
        for collective in self.collectives:
            collective.close()


@pytest.fixture
def make_group(tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]) -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(name: str, size: int, kind: type[Any], **options: Any) -> Group:
        made.append(Group(tiny_model(name), make_driver, size, kind, **options))
        return made[-1]

    yield make
    for group in made:
        group.close()


@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.parametrize("kind", [Decoder, NativeDecoder])
def test_logits_equal_those_of_the_whole(
    kind: type[Any],
    name: str,
    size: int,
    make_group: Callable[..., Group],
    tiny_model: Callable[[str], Any],
    make_driver: Callable[..., Any],
) -> None:
    model = tiny_model(name)
    group = make_group(name, size, kind)
    logits = group.call(lambda driver: driver.step([(0, model.prompt, 0)]))
    assert (logits - model.logits).abs().max() < 1e-4
    assert torch.equal(logits.argmax(-1), model.logits.argmax(-1))
    whole = kind.load(model.folder, dtype=torch.float32, device=CPU)
    assert {decoder.fingerprint() for decoder in group.decoders} == {whole.fingerprint()}
    reference = make_driver(whole)
    assert (logits - reference.step([(0, model.prompt, 0)])).abs().max() < 1e-4
    for driver, decoder in zip(group.drivers, group.decoders, strict=True):
        heads = slice(decoder.kv_head_start, decoder.kv_head_start + decoder.num_kv_heads_local)
        theirs = reference.pool[:, heads]
        assert torch.equal(driver.pool.isnan(), theirs.isnan())
        assert (driver.pool - theirs).nan_to_num().abs().max() < 1e-4
    if kind is NativeDecoder:
        whole.close()
