"""How requests end: by rule, by cancellation, by failure; and what is refused."""

import asyncio
import logging
import threading
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

from twopool.engine.requests import EngineRequest, StepOutput
from twopool.engine.step import StepPlan, StepResult, ThreadExecutor
from twopool.kernels.sampling import Draws
from twopool.protocol.errors import ContextLengthError, InvalidRequestError, OverloadedError
from twopool.protocol.ids import ChoiceIndex
from twopool.protocol.messages import ChoiceState
from twopool_testing.engine_harness import (
    VOCAB_SIZE,
    Harness,
    expected,
    new_key,
    params,
    prompt,
    request,
)

ZERO = ChoiceIndex(0)


# --- rules -----------------------------------------------------------------------------------------------------------


async def test_stop_on_the_first_token() -> None:
    token = expected(prompt(20), params())[0][0]
    async with Harness().running() as harness:
        for field in ("eos_token_ids", "stop_token_ids"):
            answers = await harness.answer(request(prompt(20), params(**{field: (token,)})))
            answer = answers[ZERO]
            assert (answer.token_ids, answer.finish_reason, answer.stop_token_id) == ([token], "stop", token)


async def test_max_tokens() -> None:
    async with Harness().running() as harness:
        for max_tokens in (1, 2, 17):
            answer = (await harness.answer(request(prompt(20), params(max_tokens=max_tokens))))[ZERO]
            assert len(answer.token_ids) == max_tokens
            assert (answer.finish_reason, answer.stop_token_id) == ("length", None)


async def test_the_context_ends() -> None:
    async with Harness(max_model_len=50).running() as harness:
        for length in (1, 48, 49):
            answer = (await harness.answer(request(prompt(length), params(max_tokens=1000))))[ZERO]
            assert len(answer.token_ids) == 50 - length
            assert answer.finish_reason == "length"


async def test_min_tokens_holds_back_every_stop_id_exactly_so_long() -> None:
    """API-23: counted from the outputs alone, released in time, ids beyond the vocabulary ignored."""
    eos, stop = 3, 4
    sampling: dict[str, Any] = {
        "eos_token_ids": (eos, 10**6),
        "stop_token_ids": (stop, VOCAB_SIZE),
        "logit_bias": ((eos, 90.0), (stop, 100.0)),
        "max_tokens": 30,
    }
    async with Harness().running() as harness:
        for min_tokens in (0, 1, 4):
            answer = (await harness.answer(request(prompt(20), params(min_tokens=min_tokens, **sampling))))[ZERO]
            assert len(answer.token_ids) == min_tokens + 1
            assert (answer.token_ids[-1], answer.stop_token_id) == (stop, stop)


async def test_logprobs_ride_with_every_token() -> None:
    async with Harness().running() as harness:
        plain = (await harness.answer(request(prompt(20), params(n=2, temperature=1.0, logprobs=0))))[ZERO]
        rich = (await harness.answer(request(prompt(20), params(n=2, temperature=1.0, logprobs=3))))[ZERO]
        assert plain.token_ids == rich.token_ids
        for delta, other in zip(rich.deltas, plain.deltas, strict=True):
            assert delta.logprobs is not None and other.logprobs is not None
            assert len(delta.logprobs[0].top_ids) == len(delta.logprobs[0].top_logprobs) == 3
            assert other.logprobs[0].top_ids == ()
            assert delta.logprobs[0].logprob == other.logprobs[0].logprob <= delta.logprobs[0].top_logprobs[0]


# --- cancellation ----------------------------------------------------------------------------------------------------


async def test_cancel_while_waiting() -> None:
    async with Harness(max_num_seqs=1).running() as harness:
        running, waiting = request(prompt(20), params(max_tokens=50)), request(prompt(30))
        harness.engine.submit(running)
        harness.engine.submit(waiting)
        await harness.until(lambda: bool(harness.answers[running.key]))
        harness.engine.cancel(waiting.key)
        await harness.until_ended(running.key)
        assert waiting.key not in harness.answers and waiting.key not in harness.finished


@pytest.mark.parametrize("prefill_only", [False, True])
async def test_cancel_in_the_middle_of_a_prefill(prefill_only: bool) -> None:
    async with Harness().running() as harness:
        one = request(prompt(400), prefill_only=prefill_only)
        harness.engine.submit(one)
        await harness.until(lambda: harness.engine.stats.num_steps == 2)
        harness.engine.cancel(one.key)
        await harness.until(lambda: harness.engine.stats.num_running == 0)
        assert harness.engine.stats.prefill_tokens <= 3 * 64
        assert not harness.prefilled and not harness.finished and not harness.failed


@pytest.mark.parametrize("length", [20, 100])
async def test_blocks_of_a_step_under_way_are_kept_until_it_is_over(length: int) -> None:
    """PD-09: what the step still writes must not belong to somebody else by then."""
    async with Harness(num_blocks=10, prefix_caching=False).running() as harness:
        one = request(prompt(length))
        harness.gate.shut()
        harness.engine.submit(one)
        await harness.gate.entered.wait()
        active = harness.pool.counts().active
        harness.engine.cancel(one.key)
        harness.engine.cancel(one.key)
        assert harness.pool.counts().active == active > 0
        with pytest.raises(OverloadedError):
            harness.pool.allocate(10)
        harness.gate.open()
        await harness.until(lambda: harness.pool.counts().free == 10)
        assert not harness.answers[one.key]


async def test_cancel_while_decoding_leaves_the_others_alone() -> None:
    async with Harness().running() as harness:
        requests = [request(prompt(20, seed), params(max_tokens=30)) for seed in range(3)]
        for one in requests:
            harness.engine.submit(one)
        await harness.until(lambda: len(harness.answers[requests[1].key][ZERO].token_ids) == 5)
        harness.engine.cancel(requests[1].key)
        await harness.until_ended(requests[0].key, requests[2].key)
        for one in (requests[0], requests[2]):
            assert (
                harness.answers[one.key][ZERO].token_ids == expected(prompt(20, requests.index(one)), one.sampling)[0]
            )
        assert len(harness.answers[requests[1].key][ZERO].token_ids) <= 6


async def test_cancel_from_within_on_step() -> None:
    async with Harness().running() as harness:
        one = request(prompt(20), params(max_tokens=30))
        harness.on_step = lambda output: harness.engine.cancel(one.key)
        harness.engine.submit(one)
        await harness.until(lambda: harness.engine.idle)
        assert len(harness.answers[one.key][ZERO].token_ids) == 1


async def test_cancel_a_preempted_request() -> None:
    async with Harness(num_blocks=6, prefix_caching=False).running() as harness:
        first, second = (request(prompt(17, seed), params(max_tokens=70)) for seed in range(2))
        harness.engine.submit(first)
        harness.engine.submit(second)
        await harness.until(lambda: harness.engine.stats.preemptions > 0)
        with pytest.raises(OverloadedError):  # who lost its blocks comes before anything new
            harness.engine.submit(request(prompt(1)))
        with pytest.raises(OverloadedError):
            harness.engine.reserve(1, 1)
        harness.engine.cancel(second.key)
        await harness.until_ended(first.key)
        assert harness.answers[first.key][ZERO].token_ids == expected(prompt(17), first.sampling)[0]


@pytest.mark.parametrize("when", ["waiting", "in the first step", "decoding"])
async def test_cancel_choices(when: str) -> None:
    sampling = params(n=3, temperature=1.0, max_tokens=20)
    async with Harness().running() as harness:
        one = request(prompt(20), sampling)
        if when == "in the first step":
            harness.gate.shut()
        harness.engine.submit(one)
        if when == "in the first step":
            await harness.gate.entered.wait()
        elif when == "decoding":
            await harness.until(lambda: len(harness.answers[one.key][ChoiceIndex(2)].token_ids) == 5)
        for _ in range(2):
            harness.engine.cancel_choice(one.key, ChoiceIndex(0))
            harness.engine.cancel_choice(one.key, ChoiceIndex(2))
        harness.engine.cancel_choice(one.key, ChoiceIndex(9))
        harness.gate.open()
        await harness.until_ended(one.key)
        answers = harness.answers[one.key]
        assert answers[ChoiceIndex(1)].token_ids == expected(prompt(20), sampling, 1)[0]
        for choice in (0, 2):
            assert len(answers[ChoiceIndex(choice)].token_ids) == (5 if when == "decoding" else 0)


@pytest.mark.parametrize("shut", [True, False])
async def test_cancelling_the_last_choice_finishes_the_request(shut: bool) -> None:
    async with Harness().running() as harness:
        one = request(prompt(20), params(n=2, temperature=1.0, max_tokens=50))
        if shut:
            harness.gate.shut()
        harness.engine.submit(one)
        await harness.gate.entered.wait()
        for choice in range(2):
            harness.engine.cancel_choice(one.key, ChoiceIndex(choice))
        harness.gate.open()
        await harness.until_ended(one.key)


async def test_cancelling_the_choices_of_a_prefill_ends_it() -> None:
    async with Harness().running() as harness:
        one = request(prompt(300), params(n=2), prefill_only=True)
        harness.engine.submit(one)
        await harness.gate.entered.wait()
        for choice in range(2):
            harness.engine.cancel_choice(one.key, ChoiceIndex(choice))
        await harness.until(lambda: harness.engine.idle and harness.pool.counts().active == 0)
        assert not harness.prefilled


# --- failure ---------------------------------------------------------------------------------------------------------


async def test_bad_logits_fail_one_request_and_are_not_cached() -> None:
    async with Harness().running() as harness:
        bad_token = prompt(100)[-1]
        bad, good = request(prompt(100)), request([token for token in prompt(30, 1) if token != bad_token])
        harness.model.bad_tokens = {bad_token}
        harness.engine.submit(bad)
        harness.engine.submit(good)
        await harness.until_ended(bad.key, good.key)
        assert harness.failed[bad.key].kind == "bad_logits"
        assert good.key in harness.finished
        harness.model.bad_tokens = set()
        again = request(prompt(100))
        await harness.answer(again)
        assert harness.local_prefills[again.key].cached_tokens == 0
        assert harness.answers[again.key][ZERO].token_ids == expected(prompt(100), again.sampling)[0]


async def test_a_step_that_fails_takes_its_requests_along_and_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    async with Harness(max_num_seqs=1).running() as harness:
        first, second = request(prompt(20)), request(prompt(30), prefill_only=True)
        harness.gate.fail_next = RuntimeError("out of luck")
        harness.engine.submit(first)
        harness.engine.submit(second)
        with caplog.at_level(logging.CRITICAL):
            await harness.until(lambda: second.key in harness.prefilled)
        assert harness.failed[first.key].kind == "internal" and harness.failed[first.key].retryable
        assert "out of luck" in harness.failed[first.key].message
        harness.pool.unpin(harness.prefilled[second.key].block_table)


# --- admission -------------------------------------------------------------------------------------------------------


def refused(**changes: Any) -> EngineRequest:
    fields: dict[str, Any] = {
        "key": new_key(),
        "prompt_ids": np.array([1, 2, 3], dtype=np.int32),
        "choices": (ChoiceState(ZERO),),
        "sampling": params(),
    }
    return EngineRequest(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": np.empty(0, dtype=np.int32)},
        {"prompt_ids": np.array([1, VOCAB_SIZE], dtype=np.int32)},
        {"prompt_ids": np.array([-1, 1], dtype=np.int32)},
        {"choices": ()},
        {"choices": (ChoiceState(ZERO), ChoiceState(ZERO))},
        {"choices": (ChoiceState(ZERO, b"abc"),)},
        {"choices": (ChoiceState(ZERO, (10**6).to_bytes(4, "little")),)},
        {"choices": (ChoiceState(ZERO, bytes(4 * 8)),)},
        {"choices": (ChoiceState(ZERO), ChoiceState(ChoiceIndex(1), bytes(4))), "prefill_only": True},
        {"sampling": params(temperature=float("nan"))},
        {"sampling": params(logit_bias=((1, float("inf")),))},
    ],
)
async def test_invalid_requests(changes: dict[str, Any]) -> None:
    async with Harness().running() as harness:
        with pytest.raises(InvalidRequestError):
            harness.engine.submit(refused(**changes))
        with pytest.raises(InvalidRequestError):
            harness.engine.check(refused(**changes))


async def test_prompts_longer_than_the_context_or_the_pool() -> None:
    async with Harness(max_model_len=40).running() as harness:
        with pytest.raises(ContextLengthError, match="40 tokens"):
            harness.engine.submit(request(prompt(40)))
    async with Harness(num_blocks=2).running() as harness:
        with pytest.raises(ContextLengthError):
            harness.engine.submit(request(prompt(32)))


async def test_no_room() -> None:
    """All blocks of a prompt, and one to grow into for each choice, or nothing."""
    async with Harness(num_blocks=6).running() as harness:
        harness.gate.shut()
        first = request(prompt(40), params(n=1))  # 3 + 1 blocks
        harness.engine.submit(first)
        with pytest.raises(OverloadedError):
            harness.engine.submit(request(prompt(17, 1)))  # 2 + 1
        with pytest.raises(OverloadedError):
            harness.engine.submit(request(prompt(1), params(n=2)))  # 1 + 2
        with pytest.raises(ValueError, match="has"):
            harness.engine.submit(first)
        second = request(prompt(32, 1), prefill_only=True)  # 2, and none to grow
        harness.engine.submit(second)
        harness.gate.open()
        await harness.until(lambda: second.key in harness.prefilled and first.key in harness.finished)
        harness.pool.unpin(harness.prefilled[second.key].block_table)


async def test_a_full_queue() -> None:
    async with Harness(max_waiting=2).running() as harness:
        harness.gate.shut()
        requests = [request(prompt(10, seed)) for seed in range(3)]
        harness.engine.submit(requests[0])
        await harness.gate.entered.wait()
        harness.engine.submit(requests[1])
        harness.engine.submit(requests[2])
        with pytest.raises(OverloadedError, match="wait"):
            harness.engine.submit(request(prompt(10)))
        harness.gate.open()
        await harness.until_ended(*(one.key for one in requests))


async def test_a_shared_prefix_is_not_counted_twice() -> None:
    """Many requests with the same long prompt fit where each alone would fill most of the pool."""
    async with Harness(num_blocks=16).running() as harness:
        tokens = prompt(160)
        await harness.answer(request(tokens))
        harness.gate.shut()
        requests = [request(tokens) for _ in range(3)]
        for one in requests:
            harness.engine.submit(one)
        harness.gate.open()
        await harness.until_ended(*(one.key for one in requests))


async def test_prefixes_computed_while_a_request_waited_count() -> None:
    async with Harness(max_num_batched_tokens=160, num_blocks=100).running() as harness:
        first, second = request(prompt(160)), request(prompt(160) + prompt(10))
        harness.engine.submit(first)
        harness.engine.submit(second)
        await harness.until_ended(first.key, second.key)
        assert harness.local_prefills[second.key].cached_tokens == 160


# --- resending -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [None, 2])
async def test_outputs_can_be_sent_again(logprobs: int | None) -> None:
    async with Harness().running() as harness:
        sampling = params(max_tokens=30, logprobs=logprobs)
        tokens, _ = expected(prompt(20), sampling)
        one = request(prompt(20), sampling, outputs={0: tokens[:4]})
        harness.engine.submit(one)
        await harness.until(lambda: len(harness.answers[one.key][ZERO].token_ids) == 10)
        delta = harness.engine.outputs(one.key, ZERO, 7)
        assert delta is not None and (delta.index, delta.token_ids) == (7, tuple(tokens[7:14]))
        assert harness.engine.outputs(one.key, ZERO, 14) is None
        assert harness.engine.outputs(one.key, ChoiceIndex(3), 0) is None
        await harness.until_ended(one.key)
        # The last message may have been lost: finished requests answer too.
        delta = harness.engine.outputs(one.key, ZERO, 0)
        assert delta is not None and delta.finish_reason == "length"
        start = 0 if logprobs is None else 4
        assert (delta.index, delta.token_ids) == (start, tuple(tokens[start:]))
        reported = [item for sent in harness.answers[one.key][ZERO].deltas for item in sent.logprobs or ()]
        assert list(delta.logprobs or ()) == reported
        end = harness.engine.outputs(one.key, ZERO, 30)
        assert end is not None and (end.token_ids, end.finish_reason) == ((), "length")
        harness.engine.cancel(one.key)
        assert harness.engine.outputs(one.key, ZERO, 0) is None


# --- figures, threads ------------------------------------------------------------------------------------------------


async def test_stats() -> None:
    async with Harness().running() as harness:
        await harness.answer(request(prompt(100), params(max_tokens=9)))
        stats = harness.engine.stats
        assert (stats.num_running, stats.num_waiting, stats.preemptions) == (0, 0, 0)
        assert (stats.prefill_tokens, stats.generated_tokens, stats.num_steps) == (100, 9, 10)
        local = next(iter(harness.local_prefills.values()))
        assert local.queue_s >= 0 and local.compute_s > 0


async def test_an_idle_engine_waits_without_computing() -> None:
    async with Harness().running() as harness:
        await harness.answer(request(prompt(10)))
        before = harness.engine.stats
        for _ in range(50):
            await asyncio.sleep(0)
        assert harness.engine.stats == before


def _result(plan: StepPlan) -> StepResult:
    return StepResult(Draws(np.array([threading.get_ident()]), np.zeros(1, dtype=np.bool_)))


async def test_thread_executor_runs_plans_on_one_other_thread() -> None:
    executor = ThreadExecutor(_result)
    plan: Any = None
    threads = {int((await executor.execute(plan)).draws.token_ids[0]) for _ in range(3)}
    assert len(threads) == 1 and threading.get_ident() not in threads
    executor.close()
    executor.close()


async def test_thread_executor_reports_errors_and_goes_on() -> None:
    calls = []

    def compute(plan: StepPlan) -> StepResult:
        calls.append(plan)
        if len(calls) == 1:
            raise ArithmeticError("once")
        return _result(plan)

    executor = ThreadExecutor(compute)
    plan: Any = None
    with pytest.raises(ArithmeticError, match="once"):
        await executor.execute(plan)
    await executor.execute(plan)
    executor.close()


async def test_a_step_is_reported_while_the_next_one_computes() -> None:
    """Whoever is told of a step's tokens takes time that the next step does not wait for."""
    log: list[str] = []
    harness = Harness()
    execute = harness.gate.execute

    def starting(plan: StepPlan) -> Awaitable[StepResult]:
        log.append("starts")
        return execute(plan)

    harness.gate.execute = starting  # type: ignore[method-assign, assignment]
    async with harness.running():
        harness.on_step = lambda output: log.append(f"{len(output.deltas)} told")
        await harness.answer(request(prompt(20), params(max_tokens=3)))
    assert log == ["starts", "starts", "1 told", "starts", "1 told", "1 told"]


async def test_an_error_of_whoever_is_told_ends_the_engine_not_the_step() -> None:
    """The step goes on writing: nothing of its requests may be given up."""
    harness = Harness()
    execute = harness.gate.execute
    computing: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()  # never done

    def second_takes_long(plan: StepPlan) -> Awaitable[StepResult]:
        return computing if harness.gate.plans else execute(plan)

    def on_step(output: StepOutput) -> None:
        raise ArithmeticError("told too much")

    harness.gate.execute = second_takes_long  # type: ignore[method-assign, assignment]
    harness.on_step = on_step
    one = request(prompt(20), params(max_tokens=3))
    harness.engine.submit(one)
    with pytest.raises(ArithmeticError):
        await harness.engine.run()
    assert not harness.engine.idle
    assert one.key not in harness.failed
    assert not computing.done()


async def test_thread_executor_finishes_a_step_whose_caller_is_gone() -> None:
    started, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def compute(plan: StepPlan) -> StepResult:
        started.set()
        go_on.wait(10)
        done.set()
        return _result(plan)

    executor = ThreadExecutor(compute)
    plan: Any = None
    task = asyncio.ensure_future(executor.execute(plan))
    await asyncio.to_thread(started.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not done.is_set()
    go_on.set()
    await asyncio.to_thread(executor.close)
    assert done.is_set()
