"""The native decoder computes what transformers computes, and the same bits however the work is cut into steps."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from twopool.kernels.native_step import native_available, supported_isas
from twopool.models.batch import ForwardBatch
from twopool.models.cache import default_cache_dir
from twopool.models.config import DecoderConfig
from twopool.models.decoder import Decoder
from twopool.models.native_decoder import NativeDecoder

UNAVAILABLE = native_available()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"no native step: {UNAVAILABLE}")

CPU = torch.device("cpu")
ISAS = () if UNAVAILABLE else supported_isas()
DTYPES = (torch.float32, torch.bfloat16)
SMOLLM2 = default_cache_dir() / "models" / "smollm2-135m-instruct"
# What differs in the native code: groups of heads, head sizes that fill no vector or several, windows, norms, biases.
SHAPES = ("llama_9_3", "llama_7_1", "mistral_window_33", "qwen3_tied_bias", "llama_9_3_head_64", "llama_7_1_head_128")
Loader = Callable[..., NativeDecoder]


@pytest.fixture
def load() -> Iterator[Loader]:
    """Loads decoders and stops their threads at the end."""
    made: list[NativeDecoder] = []

    def make(
        folder: Path, dtype: torch.dtype = torch.float32, threads: int = 2, isa: str | None = None
    ) -> NativeDecoder:
        made.append(NativeDecoder.load(folder, dtype=dtype, device=CPU, num_threads=threads, isa=isa))
        return made[-1]

    yield make
    for decoder in made:
        decoder.close()


def _differ(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    assert got.dtype == torch.float32
    return (got - wanted).abs().max().item()


def test_logits_equal_transformers(
    load: Loader, model_names: list[str], tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]
) -> None:
    """Every family, over a pool of NaN, whole and in chunks."""
    for name in model_names:
        model = tiny_model(name)
        decoder = load(model.folder)
        whole = make_driver(decoder).step([(0, model.prompt, 0)])
        assert _differ(whole, model.logits) < 1e-4, name
        assert torch.equal(make_driver(decoder).in_chunks(model.prompt, 37), whole), name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_instruction_set(
    isa: str, name: str, load: Loader, tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]
) -> None:
    model = tiny_model(name)
    exact = make_driver(load(model.folder, isa=isa)).step([(0, model.prompt, 0)])
    assert _differ(exact, model.logits) < 1e-4
    decoder = load(model.folder, torch.bfloat16, isa=isa)
    assert decoder.isa == isa
    rounded = make_driver(decoder).step([(0, model.prompt, 0)])
    for chunk in (1, 16):
        assert torch.equal(make_driver(decoder).in_chunks(model.prompt, chunk), rounded)
    theirs = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        peer = theirs(torch.tensor([model.prompt])).logits[0].float()
    ours, peers = ((logits - model.logits).square().mean().sqrt().item() for logits in (rounded, peer))
    assert 0 < ours < 1.1 * peers, "bfloat16 rounds no worse than transformers"


LONG = 1100  # three splits of the keys, so that they are combined


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama_9_3", "mistral_window_33", "llama_7_1_head_128", "mistral_window_33_head_64"])
def test_chunks_and_threads_do_not_alter_a_bit(
    name: str, dtype: torch.dtype, load: Loader, tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]
) -> None:
    model = tiny_model(name)
    ids = torch.randint(131, (LONG,), generator=torch.Generator().manual_seed(1)).tolist()
    one, two, three = (load(model.folder, dtype, threads) for threads in (1, 2, 3))
    whole = make_driver(one, max_length=LONG).step([(0, ids, 0)])
    assert whole.isfinite().all()
    for decoder in (two, three):
        assert torch.equal(make_driver(decoder, max_length=LONG).step([(0, ids, 0)]), whole)
    for decoder, chunk in ((two, 16), (one, 37), (two, 37), (two, 512)):
        assert torch.equal(make_driver(decoder, max_length=LONG).in_chunks(ids, chunk), whole), chunk
    # One by one: the first tokens, and each place where the keys' tiles and splits end.
    driver = make_driver(two, max_length=LONG)
    done = 0
    for first, count in ((0, 20), (120, 12), (508, 8), (636, 8), (1020, 8), (1090, 10)):
        if first > done:
            driver.step([(0, ids[done:first], done)], rows=[])
        steps = [driver.step([(0, [ids[i]], i)]) for i in range(first, first + count)]
        assert torch.equal(torch.cat(steps), whole[first : first + count]), first
        done = first + count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama_9_3", "llama_9_3_head_64"])
def test_neighbours_do_not_alter_a_bit(
    name: str, dtype: torch.dtype, load: Loader, tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]
) -> None:
    """A decode and a chunk alone, and in batches of 2 to 33 whose other sequences are random."""
    model = tiny_model(name)
    decoder = load(model.folder, dtype)
    random = np.random.default_rng(2)
    ids = model.prompt
    mine = [(0, ids[150:151], 150), (1, ids[40:77], 40)]
    driver = make_driver(decoder, max_sequences=35)
    driver.step([(0, ids[:150], 0), (1, ids[:40], 0)], rows=[])
    alone = [driver.step([part]) for part in mine]
    for number in range(2, 35):  # what the neighbours have in the cache
        driver.step([(number, random.integers(131, size=64).tolist(), 0)], rows=[])
    for size in (2, 3, 5, 8, 13, 16, 17, 24, 25, 32, 33):
        others = [
            (number, random.integers(131, size=count).tolist(), int(random.integers(64)))
            for number, count in zip(range(2, size + 1), random.integers(1, 40, size=size), strict=False)
        ]
        for part, wanted in zip(mine, alone, strict=True):
            place = int(random.integers(len(others) + 1))
            first = sum(len(tokens) for _, tokens, _ in others[:place])
            got = driver.step([*others[:place], part, *others[place:]])
            assert torch.equal(got[first : first + len(part[1])], wanted), (size, place)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix_hit_does_not_alter_a_bit(
    dtype: torch.dtype, load: Loader, tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]
) -> None:
    model = tiny_model("llama_9_3")
    decoder = load(model.folder, dtype)
    ids = model.prompt
    driver = make_driver(decoder, max_sequences=2)
    wanted = driver.step([(0, ids, 0)])
    cached = 96
    driver.tables[1, : cached // 16] = driver.tables[0, : cached // 16]
    assert torch.equal(driver.step([(1, ids[cached:], cached)]), wanted[cached:])
    # A full hit computes the last token again, its K and V written to where they are already.
    assert torch.equal(driver.step([(1, ids[-1:], len(ids) - 1)]), wanted[-1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_may_be_read_in_the_step_that_writes_it(
    dtype: torch.dtype, load: Loader, tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]
) -> None:
    """The tail of a prompt whose shared first block another sequence of the batch computes only now."""
    model = tiny_model("llama_9_3")
    decoder = load(model.folder, dtype)
    ids = model.prompt[:21]
    wanted = make_driver(decoder).step([(0, ids, 0)])
    for _ in range(10):
        driver = make_driver(decoder, max_sequences=2)
        driver.tables[0, 0] = driver.tables[1, 0]
        assert torch.equal(driver.step([(0, ids[16:], 16), (1, ids[:16], 0)])[:5], wanted[16:])


def _batch(ids: Sequence[int], first: int, table: Sequence[int], block_size: int, rows: Sequence[int]) -> ForwardBatch:
    positions = np.arange(first, first + len(ids))
    blocks = np.array(table)[positions // block_size]
    lens = (np.array([len(ids)], dtype=np.int32), np.array([first + len(ids)], dtype=np.int32))
    return ForwardBatch(
        token_ids=torch.tensor(list(ids)),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(blocks * block_size + positions % block_size),
        cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32),
        context_lens=torch.from_numpy(lens[1]),
        block_tables=torch.tensor([list(table)], dtype=torch.int32),
        logit_rows=torch.tensor(list(rows), dtype=torch.int64),
        query_lens_host=lens[0],
        context_lens_host=lens[1],
    )


def _pool(decoder: Decoder | NativeDecoder, num_blocks: int, block_size: int) -> torch.Tensor:
    config = decoder.config
    shape = (num_blocks, config.num_kv_heads, config.num_layers, 2, block_size, config.head_dim)
    return torch.full(shape, torch.nan, dtype=decoder.dtype)


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_block_sizes_do_not_alter_a_bit(block_size: int, load: Loader, tiny_model: Callable[[str], Any]) -> None:
    model = tiny_model("llama_9_3")
    decoder = load(model.folder, torch.bfloat16)
    rows = range(len(model.prompt))
    table = list(range(14, 0, -1))[: -(-len(model.prompt) // block_size)]
    got = decoder.forward(_batch(model.prompt, 0, table, block_size, rows), _pool(decoder, 15, block_size))
    plain = list(range(1, 15))
    assert torch.equal(got, decoder.forward(_batch(model.prompt, 0, plain, 16, rows), _pool(decoder, 15, 16)))


def test_the_pool_is_the_torch_decoders(load: Loader, tiny_model: Callable[[str], Any]) -> None:
    """What one decoder left in the pool, plain rows of a head, the other goes on from."""
    model = tiny_model("llama_9_3")
    native, torch_decoder = load(model.folder), Decoder.load(model.folder, dtype=torch.float32, device=CPU)
    ids, table = model.prompt, list(range(1, 15))
    for first, second in ((native, torch_decoder), (torch_decoder, native)):
        pool = _pool(first, 15, 16)
        first.forward(_batch(ids[:100], 0, table, 16, []), pool)
        got = second.forward(_batch(ids[100:], 100, table, 16, range(len(ids) - 100)), pool)
        assert _differ(got, model.logits[100:]) < 1e-4
    assert native.fingerprint() == torch_decoder.fingerprint()


def test_only_the_wanted_rows(load: Loader, tiny_model: Callable[[str], Any], make_driver: Callable[..., Any]) -> None:
    model = tiny_model("qwen3")
    decoder = load(model.folder)
    wanted = make_driver(decoder).step([(0, model.prompt, 0)])
    assert torch.equal(make_driver(decoder).step([(0, model.prompt, 0)], rows=[209, 3, 3]), wanted[[209, 3, 3]])
    many = [7] * 400  # more rows than the batch has
    assert torch.equal(make_driver(decoder).step([(0, model.prompt, 0)], rows=many), wanted[many])
    driver = make_driver(decoder)
    assert driver.step([(0, model.prompt[:100], 0)], rows=[]).shape == (0, decoder.config.vocab_size)
    assert torch.equal(driver.step([(0, model.prompt[100:], 100)]), wanted[100:])


def test_what_it_cannot_serve_is_said(tiny_model: Callable[[str], Any]) -> None:
    folder = tiny_model("llama").folder
    config = DecoderConfig.from_folder(folder)
    assert NativeDecoder.unavailable_reason(config, dtype=torch.bfloat16, device=CPU) is None
    reason = NativeDecoder.unavailable_reason(config, dtype=torch.float16, device=CPU)
    assert reason is not None and "float16" in reason
    reason = NativeDecoder.unavailable_reason(config, dtype=torch.float32, device=torch.device("cuda"))
    assert reason is not None and "cuda" in reason
    with pytest.raises(ValueError, match="float16"):
        NativeDecoder.load(folder, dtype=torch.float16, device=CPU)


@pytest.mark.real_model
@pytest.mark.skipif(not (SMOLLM2 / "config.json").is_file(), reason=f"SmolLM2 is not in {SMOLLM2}")
def test_smollm2_greedy_in_bfloat16_equals_float32(load: Loader, make_driver: Callable[..., Any]) -> None:
    """Greedy ids of the torch decoder in float32, as far as its two best tokens lie clearly apart."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
    reference = Decoder.load(SMOLLM2, dtype=torch.float32, device=CPU)
    decoder = load(SMOLLM2, torch.bfloat16)
    for prompt in ("The capital of France is", "def fibonacci(n):"):
        ids = tokenizer.encode(prompt).ids
        ours, theirs = make_driver(decoder), make_driver(reference)
        step = ids
        for position in range(len(ids), len(ids) + 24):
            first = position - len(step)
            got = ours.step([(0, step, first)], rows=[len(step) - 1])[0]
            wanted = theirs.step([(0, step, first)], rows=[len(step) - 1])[0]
            best = wanted.topk(2)
            assert (got - wanted).square().mean().sqrt() < 0.06 * wanted.square().mean().sqrt()
            if best.values[0] - best.values[1] > 0.2:
                assert got.argmax() == best.indices[0], (prompt, position)
            step = [int(best.indices[0])]
