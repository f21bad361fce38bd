"""Ranks that each hold a part of a decoder compute what one that holds all of it computes."""

import functools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from twopool.kernels.native_step import native_available
from twopool.models.batch import ForwardBatch
from twopool.models.cache import default_cache_dir
from twopool.models.config import DecoderConfig
from twopool.models.decoder import Decoder
from twopool.models.native_decoder import NativeDecoder
from twopool.models.sharding import Shard, plan_shards, segment_bytes
from twopool.protocol.errors import CollectiveError, ConfigError
from twopool_testing.ranks import on_every_rank, shared_collectives

UNAVAILABLE = native_available()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"no native library: {UNAVAILABLE}")

CPU = torch.device("cpu")
MAX_TOKENS = 256
SMOLLM2 = default_cache_dir() / "models" / "smollm2-135m-instruct"
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


def _in_chunks(driver: Any, ids: list[int], chunk: int) -> torch.Tensor:
    logits: torch.Tensor = driver.in_chunks(ids, chunk)
    return logits


def _prefill(driver: Any, ids: list[int], rows: list[int] | None = None) -> torch.Tensor:
    logits: torch.Tensor = driver.step([(0, ids, 0)], rows=rows)
    return logits


def _prefill_at(driver: Any, ids: list[int], first: int) -> torch.Tensor:
    """[1, vocab_size]: the logits after the last of ``ids``, the first of which stands at ``first``."""
    logits: torch.Tensor = driver.step([(0, ids, first)], rows=[len(ids) - 1])
    return logits


def _step_of(drivers: list[Any], ids: list[int], rank: int) -> torch.Tensor:
    return _prefill(drivers[rank], ids)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_neighbours_and_threads_do_not_alter_a_bit(
    dtype: torch.dtype, make_group: Callable[..., Group], tiny_model: Callable[[str], Any]
) -> None:
    """Within one degree, as for a decoder that is whole."""
    prompt = tiny_model("llama_9_3").prompt

    def group(threads: int = 1, max_sequences: int = 1) -> Group:
        return make_group("llama_9_3", 2, NativeDecoder, dtype=dtype, threads=threads, max_sequences=max_sequences)

    whole = group().call(lambda driver: driver.step([(0, prompt, 0)]))
    assert whole.isfinite().all()
    for chunk in (1, 16, 37):
        call = functools.partial(_in_chunks, ids=prompt, chunk=chunk)
        assert torch.equal(group(threads=2).call(call), whole), chunk
    crowd = group(max_sequences=9)
    others = [(other, prompt[other : other + 20], 0) for other in range(1, 9)]
    assert torch.equal(crowd.call(lambda driver: driver.step([*others, (0, prompt[:60], 0)]))[-60:], whole[:60])
    decoded = crowd.call(lambda driver: driver.step([(0, [prompt[60]], 60), *[(s, [5], 20) for s, _, _ in others]]))
    assert torch.equal(decoded[0], whole[60])


@pytest.mark.parametrize("kind", [Decoder, NativeDecoder])
def test_wanted_rows_and_steps_without_any(
    kind: type[Any], make_group: Callable[..., Group], tiny_model: Callable[[str], Any]
) -> None:
    prompt = tiny_model("llama_tied").prompt
    whole = make_group("llama_tied", 3, kind).call(lambda driver: driver.step([(0, prompt, 0)]))
    group = make_group("llama_tied", 3, kind)
    assert group.call(lambda driver: driver.step([(0, prompt[:100], 0)], rows=[])).shape == (0, whole.shape[1])
    picked = group.call(lambda driver: driver.step([(0, prompt[100:], 100)], rows=[109, 3, 3]))
    wanted = whole[[209, 103, 103]]
    assert torch.equal(picked, wanted) if kind is NativeDecoder else (picked - wanted).abs().max() < 1e-5


def test_more_logits_than_the_segment_holds_go_in_pieces(
    make_driver: Callable[..., Any], tiny_model: Callable[[str], Any]
) -> None:
    """131 tokens on two ranks: 67 columns at most, of 32 rows a time in the smallest segment that is taken."""
    model = tiny_model("llama_tied")
    results = []
    for max_bytes in (4 * 67 * 32, 1 << 20):
        collectives = shared_collectives(2, max(max_bytes, 4 * 224 * 128))
        decoders = [
            NativeDecoder.load(
                model.folder, dtype=torch.float32, device=CPU, num_threads=1, shard=Shard(rank, 2), collective=ranks
            )
            for rank, ranks in enumerate(collectives)
        ]
        drivers = [make_driver(decoder) for decoder in decoders]
        results.append(on_every_rank(2, functools.partial(_step_of, drivers, model.prompt))[0])
        for decoder in decoders:
            decoder.close()
    assert torch.equal(*results)


def test_layers_are_told_of_once_every_rank_has_written_them(
    make_group: Callable[..., Group], tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny_model("llama_9_3").prompt
    for kind in (Decoder, NativeDecoder):
        group = make_group("llama_9_3", 2, kind)
        told: list[int] = []
        missing: list[int] = []

        def on_layer(
            num_layers: int, group: Group = group, told: list[int] = told, missing: list[int] = missing
        ) -> None:
            told.append(num_layers)
            block = group.drivers[0].tables[0, 0]
            written = [driver.pool[block, :, num_layers - 1, :, 0].isfinite().all() for driver in group.drivers]
            missing.extend(rank for rank, done in enumerate(written) if not done)

        def forward(
            batch: ForwardBatch,
            pool: torch.Tensor,
            call: Callable[..., torch.Tensor] = group.decoders[0].forward,
            on_layer: Callable[[int], None] = on_layer,
        ) -> torch.Tensor:
            return call(batch, pool, on_layer=on_layer)

        monkeypatch.setattr(group.decoders[0], "forward", forward)
        for wanted in (None, list[int]()):
            told.clear()
            group.call(functools.partial(_prefill, ids=prompt, rows=wanted))
            assert told == [1, 2, 3]
            assert missing == []


def test_ranks_given_different_steps_are_stopped(
    make_group: Callable[..., Group], tiny_model: Callable[[str], Any]
) -> None:
    """As many rows, but not the same: nothing comes out, on any rank."""
    prompt = tiny_model("llama_9_3").prompt
    group = make_group("llama_9_3", 2, NativeDecoder, threads=2)

    def step(rank: int) -> str:
        with pytest.raises(CollectiveError) as stopped:
            group.drivers[rank].step([(0, [*prompt[:9], rank], 0)])
        return stopped.value.message

    assert all("another step" in message for message in on_every_rank(2, step))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [Decoder, NativeDecoder])
def test_a_step_whose_other_rank_is_gone_ends_when_that_is_said(
    kind: type[Any], threads: int, make_group: Callable[..., Group], tiny_model: Callable[[str], Any]
) -> None:
    prompt = tiny_model("llama_9_3").prompt
    group = make_group("llama_9_3", 2, kind, threads=threads)
    watch = threading.Timer(0.2, group.collectives[1].abort)
    watch.start()
    with pytest.raises(CollectiveError):
        group.drivers[0].step([(0, prompt, 0)])
    watch.join()
    with pytest.raises(CollectiveError):
        group.drivers[0].step([(0, prompt, 0)])


def test_steps_that_do_not_fit_the_segment_are_refused(
    make_group: Callable[..., Group], tiny_model: Callable[[str], Any]
) -> None:
    prompt = tiny_model("llama_9_3").prompt
    group = make_group("llama_9_3", 2, NativeDecoder, max_length=2048)
    many = (prompt * 10)[:1000]
    with pytest.raises(ValueError, match="more rows than the ranks' segment"):
        group.drivers[0].step([(0, many, 0)])
    with pytest.raises(ValueError, match="segment is too small"):
        small = shared_collectives(2, 4096)
        NativeDecoder.load(
            tiny_model("llama_9_3").folder, dtype=torch.float32, device=CPU, shard=Shard(0, 2), collective=small[0]
        )


def test_degrees_and_collectives_that_do_not_fit_are_refused(tiny_model: Callable[[str], Any]) -> None:
    folder = tiny_model("llama_7_1").folder
    with pytest.raises(ConfigError, match="1 to 7 ranks"):
        Decoder.load(folder, dtype=torch.float32, device=CPU, shard=Shard(0, 8), collective=shared_collectives(8)[0])
    with pytest.raises(ValueError, match="collective of that rank"):
        Decoder.load(folder, dtype=torch.float32, device=CPU, shard=Shard(0, 2), collective=shared_collectives(2)[1])


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.skipif(not (SMOLLM2 / "config.json").is_file(), reason=f"SmolLM2 is not in {SMOLLM2}")
@pytest.mark.parametrize("size", [2, 3, 4, 9])
def test_smollm2_greedy_is_the_same_at_every_degree(size: int, make_driver: Callable[..., Any]) -> None:
    """In float32."""
    whole = NativeDecoder.load(SMOLLM2, dtype=torch.float32, device=CPU, num_threads=2)
    reference = make_driver(whole)
    group = Group(SimpleNamespace(folder=SMOLLM2), make_driver, size, NativeDecoder)
    try:
        step = torch.randint(49152, (60,), generator=torch.Generator().manual_seed(3)).tolist()
        length = len(step)
        for position in range(length, length + 32):
            first = position - len(step)
            wanted = _prefill_at(reference, step, first)
            got = group.call(functools.partial(_prefill_at, ids=step, first=first))
            assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()  # which is about 25
            assert int(got.argmax()) == int(wanted.argmax())
            step = [int(wanted.argmax())]
    finally:
        group.close()
        whole.close()
