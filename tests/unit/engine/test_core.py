"""The engine's answers, whatever happens to a request on the way, against a computation token by token."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twopool.engine.requests import EngineRequest, StepOutput
from twopool.protocol.errors import OverloadedError
from twopool.protocol.ids import ChoiceIndex
from twopool.protocol.messages import SamplingParams
from twopool_testing.engine_harness import BLOCK_SIZE, Answer, Harness, expected, params, prompt, request

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 42},
    "nucleus": {"temperature": 1.2, "seed": -5, "top_p": 0.8, "top_k": 30, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.4, "presence_penalty": 0.8, "frequency_penalty": 0.9},
    "biased": {"temperature": 0.7, "logit_bias": ((5, 3.0), (6, -50.0), (10_000, 99.0))},
    "stopping": {"temperature": 1.5, "eos_token_ids": (3, 4, 5), "stop_token_ids": (6, 7, 50_000), "min_tokens": 3},
}


def first(answers: dict[ChoiceIndex, Answer]) -> tuple[list[int], str | None]:
    return answers[ChoiceIndex(0)].token_ids, answers[ChoiceIndex(0)].finish_reason


def assert_expected(harness: Harness, one: EngineRequest, max_model_len: int = 512) -> None:
    """Every choice of a finished request has the tokens and the end it should have."""
    prompt_ids = one.prompt_ids.tolist()
    for state in one.choices:
        answer = harness.answers[one.key][state.choice]
        wanted = expected(prompt_ids, one.sampling, state.choice, max_model_len=max_model_len)
        accepted = len(state.output_ids) // 4
        assert (answer.token_ids, answer.finish_reason) == (wanted[0][accepted:], wanted[1])
        assert answer.deltas[0].index == accepted


# --- alone, cached, chunked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 200])
async def test_cold_and_cached(length: int, sampling: dict[str, Any]) -> None:
    """PD-24, API-21, M-checkpoint-leak: three times the same, with a full hit where the prompt is whole blocks."""
    tokens = prompt(length)
    async with Harness().running() as harness:
        for attempt in range(3):
            one = request(tokens, params(max_tokens=20, **sampling))
            await harness.answer(one)
            assert_expected(harness, one)
            # The last token is always computed: its logits are needed, and a shared block is never written.
            cached = (length - 1) // BLOCK_SIZE * BLOCK_SIZE if attempt else 0
            assert harness.local_prefills[one.key].cached_tokens == cached
        assert harness.engine.stats.cached_tokens == 2 * ((length - 1) // BLOCK_SIZE * BLOCK_SIZE)


async def test_the_next_turn_finds_the_answer_cached() -> None:
    async with Harness().running() as harness:
        tokens = prompt(40)
        answer, _ = first(await harness.answer(request(tokens, params(max_tokens=30))))
        longer = tokens + answer + prompt(5)
        one = request(longer)
        await harness.answer(one)
        assert_expected(harness, one)
        # The last token drawn was never computed, so its block was not full.
        assert harness.local_prefills[one.key].cached_tokens == (40 + 29) // BLOCK_SIZE * BLOCK_SIZE


async def test_tenants_share_nothing() -> None:
    async with Harness().running() as harness:
        for salt in (b"", b"a", b"b"):
            one = request(prompt(50), salt=salt)
            await harness.answer(one)
            assert_expected(harness, one)
            assert harness.local_prefills[one.key].cached_tokens == 0


@pytest.mark.parametrize("budget", [1, 7, 16, 50, 4096])
async def test_chunks(budget: int) -> None:
    """X-pd-chunked-prefill-hang: chunk-1, chunk, chunk+1, 3*chunk+7 tokens."""
    async with Harness(max_num_batched_tokens=budget, num_blocks=200).running() as harness:
        for length in sorted({max(budget - 1, 1), budget, budget + 1, 3 * budget + 7}):
            if length < 500:
                one = request(prompt(length, seed=length), params(max_tokens=4))
                await harness.answer(one)
                assert_expected(harness, one)


async def test_chunks_end_on_block_boundaries() -> None:
    async with Harness(max_num_batched_tokens=50).running() as harness:
        result = await harness.prefill(request(prompt(130), prefill_only=True))
        reports = harness.progress[result.key]
        assert [report.num_computed for report in reports] == [48, 96]
        assert all(report.block_table == result.block_table for report in reports)
        harness.pool.unpin(result.block_table)


async def test_of_prompts_that_come_at_once_the_shortest_goes_first() -> None:
    async with Harness(max_num_batched_tokens=64, num_blocks=200).running() as harness:
        cached = request(prompt(160, seed=9), prefill_only=True)
        harness.pool.unpin((await harness.prefill(cached)).block_table)
        lengths = [300, 40, 200, 41]
        ones = [request(prompt(length, seed=length), prefill_only=True) for length in lengths]
        ones.append(request(prompt(160, seed=9) + prompt(20), prefill_only=True))  # 20 tokens to compute
        for one in ones:
            harness.engine.submit(one)
        await harness.until(lambda: len(harness.prefilled) == 1 + len(ones))
        order = [key for key in harness.prefilled if key != cached.key]
        assert order == [ones[index].key for index in (4, 1, 3, 2, 0)]
        for one in ones:
            harness.pool.unpin(harness.prefilled[one.key].block_table)


async def test_a_long_prompt_is_not_overtaken_by_later_ones() -> None:
    """However many short ones come while it is computed, it takes its share of every step until it is done."""
    async with Harness(max_num_batched_tokens=64, num_blocks=400).running() as harness:
        long = request(prompt(400), prefill_only=True)
        harness.engine.submit(long)
        shorts: list[EngineRequest] = []

        def more(output: StepOutput) -> None:
            if long.key not in harness.prefilled:
                shorts.append(request(prompt(60, seed=len(shorts)), prefill_only=True))
                harness.engine.submit(shorts[-1])

        harness.on_step = more
        await harness.until(lambda: len(harness.prefilled) > 1 and len(harness.prefilled) == 1 + len(shorts))
        assert next(iter(harness.prefilled)) == long.key
        assert len(shorts) >= 6
        for key in (long.key, *(one.key for one in shorts)):
            harness.pool.unpin(harness.prefilled[key].block_table)


@pytest.mark.parametrize("block_size", [16, 32, 128])
async def test_block_sizes(block_size: int) -> None:
    async with Harness(block_size=block_size, num_blocks=16).running() as harness:
        for length in (block_size - 1, block_size, block_size + 1):
            for _ in range(2):
                one = request(prompt(length), params(max_tokens=block_size + 3))
                await harness.answer(one)
                assert_expected(harness, one)


# --- together --------------------------------------------------------------------------------------------------------


async def test_a_mixed_batch_equals_each_alone() -> None:
    """API-15, API-24, X-temp-mixed-batch: neighbours with every kind of sampling, arriving while others run."""
    requests = [
        request(prompt(5 + 13 * index, seed=index), params(max_tokens=10 + index, **sampling))
        for index, sampling in enumerate([*SAMPLINGS.values()] * 3)
    ]
    async with Harness(num_blocks=400).running() as harness:
        for index, one in enumerate(requests):
            harness.engine.submit(one)
            if index % 4 == 3:
                steps = harness.engine.stats.num_steps
                await harness.until(lambda steps=steps: harness.engine.stats.num_steps >= steps + 3)  # type: ignore[misc]
        await harness.until_ended(*(one.key for one in requests))
        for one in requests:
            assert_expected(harness, one)


async def test_decodes_go_on_while_a_long_prompt_is_prefilled() -> None:
    async with Harness(num_blocks=100, max_num_batched_tokens=32).running() as harness:
        short, long = request(prompt(3), params(max_tokens=60)), request(prompt(400), params(max_tokens=2))
        harness.engine.submit(short)
        await harness.until(lambda: bool(harness.answers[short.key]))
        harness.engine.submit(long)
        await harness.until(lambda: bool(harness.answers[long.key]))
        assert len(first(harness.answers[short.key])[0]) > 400 // 32
        await harness.until_ended(short.key, long.key)
        assert_expected(harness, short)
        assert_expected(harness, long)


async def test_no_more_sequences_in_a_step_than_allowed() -> None:
    async with Harness(num_blocks=200, max_num_seqs=3).running() as harness:
        requests = [request(prompt(20, seed), params(max_tokens=12)) for seed in range(9)]
        for one in requests:
            harness.engine.submit(one)
        await harness.until_ended(*(one.key for one in requests))
        assert max(len(plan.query_lens) for plan in harness.gate.plans) == 3
        for one in requests:
            assert_expected(harness, one)


# --- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_choices_fork(length: int, prefix_caching: bool) -> None:
    """X-pd-n2-hang, API-17: choices are drawn independently, the prompt is computed once."""
    async with Harness(prefix_caching=prefix_caching).running() as harness:
        one = request(prompt(length), params(n=4, temperature=1.5, max_tokens=40))
        answers = await harness.answer(one)
        assert_expected(harness, one)
        assert len({tuple(answer.token_ids) for answer in answers.values()}) == 4
        assert harness.engine.stats.prefill_tokens == length
        assert len([plan for plan in harness.gate.plans if len(plan.copies)]) == (length % BLOCK_SIZE > 0)


async def test_choices_that_end_at_the_first_token() -> None:
    """M-disagg-first-token-stop: n=4 where some end at token 1."""
    sampling = params(n=4, temperature=1.5, seed=3, max_tokens=10)
    firsts = [expected(prompt(20), sampling, choice)[0][0] for choice in range(4)]
    stopping = params(n=4, temperature=1.5, seed=3, max_tokens=10, stop_token_ids=(firsts[0], firsts[2]))
    async with Harness().running() as harness:
        one = request(prompt(20), stopping)
        await harness.answer(one)
        assert_expected(harness, one)
        lengths = [len(harness.answers[one.key][state.choice].token_ids) for state in one.choices]
        assert lengths[0] == lengths[2] == 1


async def test_more_choices_than_sequences_in_a_step() -> None:
    async with Harness(max_num_seqs=4, num_blocks=100).running() as harness:
        one = request(prompt(20), params(n=10, temperature=1.0, max_tokens=20))
        other = request(prompt(30))
        harness.engine.submit(one)
        harness.engine.submit(other)
        await harness.until_ended(one.key, other.key)
        assert_expected(harness, one)
        assert_expected(harness, other)


# --- resumed, handed over --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("accepted", [1, 7, 12])
async def test_resumed_from_accepted_ids(sampling: dict[str, Any], accepted: int) -> None:
    """A request is its tokens: elsewhere it goes on with the same ones."""
    full = params(max_tokens=30, **sampling)
    output, _ = expected(prompt(25), full)
    async with Harness().running() as harness:
        one = request(prompt(25), full, outputs={0: output[: min(accepted, len(output) - 1)]})
        await harness.answer(one)
        assert_expected(harness, one)


async def test_resumed_choices_of_unequal_length() -> None:
    sampling = params(n=4, temperature=1.0, max_tokens=30)
    outputs = {choice: expected(prompt(20), sampling, choice)[0] for choice in (0, 1, 3)}
    async with Harness().running() as harness:
        one = request(prompt(20), sampling, outputs={0: outputs[0][:5], 1: (), 3: outputs[3][:20]})
        await harness.answer(one)
        assert_expected(harness, one)
        assert len(harness.local_prefills) == 1


async def hand_over(source: Harness, sink: Harness, one: EngineRequest) -> None:
    """What prefill and decode worker do: prefill there, copy the blocks, go on here."""
    result = await source.prefill(dataclasses.replace(one, prefill_only=True))
    reservation = sink.engine.reserve(result.num_tokens, len(one.choices))
    blocks = sink.pool.allocate_for_fetch(len(result.block_table), reservation)
    sink.kv_pool[blocks] = source.kv_pool[list(result.block_table)]
    sink.pool.fetched(blocks)
    source.pool.unpin(result.block_table)
    for delta in result.deltas:
        answer = sink.answers[one.key][delta.choice]
        answer.token_ids, answer.finish_reason, answer.deltas = list(delta.token_ids), delta.finish_reason, [delta]
    sink.engine.adopt(one, block_table=blocks, first=result.deltas, reservation=reservation)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("length", [1, 16, 17, 150])
@pytest.mark.parametrize("n", [1, 3])
async def test_handed_over(sampling: dict[str, Any], length: int, n: int) -> None:
    async with Harness().running() as source, Harness().running() as sink:
        for _ in range(2):
            one = request(prompt(length), params(n=n, max_tokens=25, **sampling))
            await hand_over(source, sink, one)
            await sink.until_ended(one.key)
            assert_expected(sink, one)
        assert sink.model.num_rows == 2 * sum(
            len(expected(prompt(length), one.sampling, choice)[0]) - 1 for choice in range(n)
        )
        # What was adopted serves as prefix cache.
        local = request(prompt(length), params(max_tokens=25, **sampling))
        await sink.answer(local)
        assert sink.local_prefills[local.key].cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


async def test_handed_over_mid_answer() -> None:
    sampling = params(temperature=0.8, max_tokens=30, frequency_penalty=1.0)
    output, _ = expected(prompt(20), sampling)
    async with Harness().running() as source, Harness().running() as sink:
        one = request(prompt(20), sampling, outputs={0: output[:13]})
        await hand_over(source, sink, one)
        await sink.until_ended(one.key)
        assert_expected(sink, one)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_handover_with_nothing_left_to_decode(n: int) -> None:
    """M-disagg-first-token-stop: max_tokens 1, no decode step, everything freed."""
    async with Harness().running() as source, Harness().running() as sink:
        one = request(prompt(20), params(n=n, temperature=1.0, max_tokens=1))
        await hand_over(source, sink, one)
        await sink.until_ended(one.key)
        assert_expected(sink, one)
        assert sink.engine.stats.num_steps == 0


async def test_a_prefill_samples_with_all_rules() -> None:
    async with Harness().running() as harness:
        sampling = params(n=3, temperature=1.0, max_tokens=1, logprobs=2, min_tokens=1, eos_token_ids=tuple(range(40)))
        result = await harness.prefill(request(prompt(40), sampling, prefill_only=True))
        assert result.num_tokens == 40
        assert [delta.choice for delta in result.deltas] == [0, 1, 2]
        for delta in result.deltas:
            assert delta.token_ids == tuple(expected(prompt(40), sampling, delta.choice)[0])
            assert delta.token_ids[0] >= 40 and delta.finish_reason == "length"
            assert delta.logprobs is not None and len(delta.logprobs[0].top_ids) == 2
        assert harness.pool.counts().pinned == 3
        harness.pool.unpin(result.block_table)


async def test_an_adoption_that_does_not_fit_takes_nothing() -> None:
    async with Harness().running() as source, Harness().running() as sink:
        one = request(prompt(20), params(n=2, temperature=1.0))
        result = await source.prefill(
            EngineRequest(one.key, one.prompt_ids, one.choices, one.sampling, prefill_only=True)
        )
        source.pool.unpin(result.block_table)
        blocks = sink.pool.allocate(2)
        first_two = result.deltas
        for table, deltas in ((blocks[:1], first_two), (blocks, first_two[:1]), (blocks, (first_two[0], first_two[0]))):
            with pytest.raises(ValueError):
                sink.engine.adopt(one, block_table=table, first=deltas, reservation=None)
        assert sink.engine.idle
        sink.pool.release(blocks)


# --- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
async def test_preempted_choices_go_on_with_the_same_tokens(sampling: dict[str, Any], prefix_caching: bool) -> None:
    """M-preempt-history: a pool far below what the requests grow to."""
    async with Harness(num_blocks=14, prefix_caching=prefix_caching).running() as harness:
        requests = [request(prompt(17, seed), params(max_tokens=80, **sampling)) for seed in range(4)]
        for one in requests:
            harness.engine.submit(one)
        await harness.until_ended(*(one.key for one in requests))
        for one in requests:
            assert_expected(harness, one)
        if "eos_token_ids" not in sampling:
            assert harness.engine.stats.preemptions > 0


async def test_preempted_choices_of_one_request() -> None:
    async with Harness(num_blocks=8).running() as harness:
        one = request(prompt(20), params(n=4, temperature=1.0, max_tokens=90))
        await harness.answer(one)
        assert_expected(harness, one)
        assert harness.engine.stats.preemptions > 0


async def test_adopted_requests_are_recomputed_when_preempted() -> None:
    """M-preempt-reload: nothing is fetched a second time."""
    async with Harness(num_blocks=200).running() as source, Harness(num_blocks=14).running() as sink:
        requests = [request(prompt(17, seed), params(temperature=1.0, max_tokens=80)) for seed in range(4)]
        for one in requests:
            await hand_over(source, sink, one)
        await sink.until_ended(*(one.key for one in requests))
        for one in requests:
            assert_expected(sink, one)
        assert sink.engine.stats.preemptions > 0


async def test_one_request_may_fill_the_whole_pool() -> None:
    async with Harness(num_blocks=4, max_model_len=10_000).running() as harness:
        assert harness.engine.max_model_len == 64
        for length in (1, 40, 63):
            for n in (1, 3):
                one = request(prompt(length), params(max_tokens=1000, n=n, temperature=1.0))
                await harness.answer(one)
                assert_expected(harness, one, max_model_len=64)


async def test_blocks_given_back_by_others_wake_a_preempted_choice() -> None:
    async with Harness(num_blocks=4, prefix_caching=False).running() as harness:
        foreign = harness.pool.allocate(1)
        one = request(prompt(30), params(max_tokens=30))
        harness.engine.submit(one)
        await harness.until(lambda: harness.engine.stats.preemptions > 0 and harness.engine.stats.num_running == 0)
        harness.pool.release(foreign)
        await harness.until_ended(one.key)
        assert_expected(harness, one)


# --- everything at once ----------------------------------------------------------------------------------------------

sampling_strategy = st.builds(
    lambda base, **fields: params(**(base | fields)),
    st.sampled_from([*SAMPLINGS.values()]),
    n=st.integers(1, 3),
    max_tokens=st.integers(1, 50),
)


@settings(max_examples=40, deadline=None)
@given(
    works=st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 2), sampling_strategy, st.integers(0, 8), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    num_blocks=st.integers(10, 40),
    budget=st.integers(1, 80),
    max_num_seqs=st.integers(1, 8),
    prefix_caching=st.booleans(),
)
async def test_any_load(
    works: list[tuple[int, int, SamplingParams, int, bool]],
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    prefix_caching: bool,
) -> None:
    """PD-09 and all of the above: random requests, pauses, cancellations and pools too small for them."""
    harness = Harness(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching,
        max_model_len=120,
    )
    async with harness.running():
        kept: list[EngineRequest] = []
        leaving: list[EngineRequest] = []
        for length, seed, sampling, pause, leave in works:
            one = request(prompt(length, seed), sampling)
            await harness.until(lambda: harness.engine.idle or not harness.engine._scheduler.starved)
            try:
                harness.engine.submit(one)
            except OverloadedError:
                await harness.until(lambda: harness.engine.idle)
                harness.engine.submit(one)
            (leaving if leave else kept).append(one)
            steps = harness.engine.stats.num_steps + pause
            await harness.until(lambda steps=steps: harness.engine.stats.num_steps >= steps or harness.engine.idle)  # type: ignore[misc]
            if leave and pause % 2:
                harness.engine.cancel(one.key)
        for one in leaving:
            harness.engine.cancel(one.key)
        await harness.until_ended(*(one.key for one in kept))
        for one in kept:
            assert_expected(harness, one, max_model_len=120)
