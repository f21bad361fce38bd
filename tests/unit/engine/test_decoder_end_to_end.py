"""The engine with a real decoder, in fp32, against transformers and against itself."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from twopool.engine.kv_cache import allocate_kv_pool
from twopool.engine.requests import EngineRequest
from twopool.models.decoder import Decoder
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import ChoiceIndex
from twopool.protocol.messages import SamplingParams
from twopool_testing.engine_harness import Answer, Harness, expected, params, request
from twopool_testing.tiny_model import build_tiny_llama

NUM_BLOCKS = 40
ZERO = ChoiceIndex(0)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = build_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return Decoder.load(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[int]], Tensor]:
    """ids -> [vocab_size] float32 logits after them, by transformers, all computed anew."""
    from transformers import AutoModelForCausalLM

    folder = build_tiny_llama(tmp_path_factory.mktemp("reference"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logits(ids: list[int]) -> Tensor:
        with torch.inference_mode():
            row: Tensor = model(torch.tensor([ids])).logits[0, -1].float()
        return row

    return logits


def make_harness(decoder: Decoder, *, num_blocks: int = NUM_BLOCKS, block_size: int = 16, **config: Any) -> Harness:
    shape = decoder.config
    geometry = KvGeometry(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        num_kv_heads_local=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype="float32",
    )
    kv_pool = allocate_kv_pool(geometry, decoder.device)
    kv_pool.fill_(torch.nan)  # stale bytes may be anything
    return Harness(
        num_blocks=num_blocks,
        block_size=block_size,
        model=decoder,
        kv_pool=kv_pool,
        vocab_size=shape.vocab_size,
        **config,
    )


def prompt(decoder: Decoder, length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng([seed, length]).integers(0, decoder.config.vocab_size, length).tolist()
    return ids


SAMPLINGS: dict[str, SamplingParams] = {
    "greedy": params(max_tokens=24),
    "seeded": params(max_tokens=24, temperature=1.0, seed=11, top_p=0.95),
    "penalised": params(max_tokens=24, temperature=0.8, seed=5, repetition_penalty=1.3, frequency_penalty=0.5),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 150])
async def test_equal_to_transformers(
    decoder: Decoder, reference: Callable[[list[int]], Tensor], length: int, sampling: SamplingParams
) -> None:
    """Cold and cached, for prompts around block boundaries and of several chunks."""
    tokens = prompt(decoder, length)
    async with make_harness(decoder).running() as harness:
        for _ in range(2):
            one = request(tokens, sampling)
            answers = await harness.answer(one)
            assert answers[ZERO].token_ids == expected(tokens, sampling, logits=reference)[0]


async def alone(decoder: Decoder, one: EngineRequest) -> dict[ChoiceIndex, list[int]]:
    """What a request answers in an engine of its own that computes it in one chunk."""
    async with make_harness(decoder, max_num_batched_tokens=4096).running() as harness:
        answers = await harness.answer(one)
        return {choice: answer.token_ids for choice, answer in answers.items()}


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("budget", "num_blocks"), [(4096, 100), (33, 100), (20, 24)])
async def test_in_a_batch_in_chunks_and_preempted(
    decoder: Decoder, budget: int, num_blocks: int, block_size: int
) -> None:
    """Greedy, seeded, penalised and forked requests together, at last in a pool too small for them."""
    samplings = [*SAMPLINGS.values(), params(n=3, temperature=1.0, seed=9, max_tokens=40)] * 2
    num_blocks = num_blocks * 16 // block_size
    harness = make_harness(decoder, num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=budget)
    async with harness.running():
        requests = [
            request(prompt(decoder, 10 + 9 * index, index % 3), sampling) for index, sampling in enumerate(samplings)
        ]
        for one in requests:
            await harness.until(lambda one=one: harness.engine.idle or _fits(harness, one))  # type: ignore[misc]
            harness.engine.submit(one)
        await harness.until_ended(*(one.key for one in requests))
        for one in requests:
            answers = {choice: answer.token_ids for choice, answer in harness.answers[one.key].items()}
            assert answers == await alone(decoder, one)
    if num_blocks == 24:
        assert harness.engine.stats.preemptions > 0


def _fits(harness: Harness, one: EngineRequest) -> bool:
    wanted = -(-len(one.prompt_ids) // harness.pool.block_size) + len(one.choices)
    return harness.pool.num_obtainable >= wanted and not harness.engine._scheduler.starved


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
async def test_resumed_after_every_token(decoder: Decoder, sampling: SamplingParams) -> None:
    """A position's logits do not depend on whether it was prefilled or decoded."""
    tokens = prompt(decoder, 21)
    async with make_harness(decoder, num_blocks=200, max_num_seqs=32).running() as harness:
        whole = (await harness.answer(request(tokens, sampling)))[ZERO].token_ids
        resumed = [request(tokens, sampling, outputs={0: whole[:count]}) for count in range(1, len(whole))]
        for one in resumed:
            harness.engine.submit(one)
        await harness.until_ended(*(one.key for one in resumed))
        for count, one in enumerate(resumed, start=1):
            assert harness.answers[one.key][ZERO].token_ids == whole[count:]


async def test_logprobs_are_the_same_wherever_a_token_was_computed(decoder: Decoder) -> None:
    """NUM-08, but for rounding: cold, from the cache, resumed."""
    sampling = params(max_tokens=20, temperature=1.0, logprobs=5)
    tokens = prompt(decoder, 50)
    async with make_harness(decoder, max_num_batched_tokens=19).running() as harness:
        first = (await harness.answer(request(tokens, sampling)))[ZERO]
        again = (await harness.answer(request(tokens, sampling)))[ZERO]
        resumed = (await harness.answer(request(tokens, sampling, outputs={0: first.token_ids[:7]})))[ZERO]
    assert logprobs(again) == pytest.approx(logprobs(first), abs=1e-4)
    assert logprobs(resumed) == pytest.approx(logprobs(first)[7:], abs=1e-4)


def logprobs(answer: Answer) -> list[float]:
    reported = [item for delta in answer.deltas for item in delta.logprobs or ()]
    assert len(reported) == len(answer.token_ids)
    return [item.logprob for item in reported]


async def test_an_event_loop_stays_free_while_a_step_computes(decoder: Decoder) -> None:
    """Through the thread executor, with a model that takes its time."""
    from twopool.engine.block_pool import BlockPool
    from twopool.engine.core import Engine
    from twopool.engine.model_runner import ModelRunner
    from twopool.engine.requests import StepOutput
    from twopool.engine.scheduler import SchedulerConfig
    from twopool.engine.step import ThreadExecutor
    from twopool.protocol.ids import Epoch

    harness = make_harness(decoder)
    runner = ModelRunner(decoder, harness.kv_pool)
    runner.warm_up()
    executor = ThreadExecutor(runner.run)
    outputs: list[StepOutput] = []
    engine = Engine(
        pool=BlockPool(NUM_BLOCKS, 16, epoch=Epoch(1)),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=64, max_waiting=8, max_model_len=512, vocab_size=400
        ),
        executor=executor,
        on_step=outputs.append,
    )
    task = asyncio.create_task(engine.run())
    one = request([1, 2, 3], params(max_tokens=20))
    engine.submit(one)
    turns = 0
    while not engine.idle:
        turns += 1
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    executor.close()
    assert turns > 20
    tokens = [token for output in outputs for delta in output.deltas for token in delta.token_ids]
    assert tokens == (await alone(decoder, one))[ZERO]


def test_warm_up_writes_only_its_own_blocks(decoder: Decoder, tmp_path: Path) -> None:
    harness = make_harness(decoder, num_blocks=12)
    harness.gate._runner.warm_up()
    assert bool(torch.isnan(harness.kv_pool[-1]).all())
