"""Inputs prepared while a step computes are those that scheduling anew would give."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from twopool.engine import core
from twopool.engine.requests import EngineRequest
from twopool.engine.step import StepPlan
from twopool.protocol.ids import ChoiceIndex
from twopool.protocol.messages import SamplingParams
from twopool_testing.engine_harness import Harness, expected, params, prompt, request

MIXED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 42},
    {"repetition_penalty": 1.4, "presence_penalty": 0.8, "frequency_penalty": 0.9, "max_tokens": 70},
    {"temperature": 0.7, "logit_bias": ((5, 3.0), (6, -50.0))},
    {"temperature": 1.5, "eos_token_ids": (3, 4, 5), "min_tokens": 7},
    {"temperature": 1.1, "repetition_penalty": 1.2, "stop_token_ids": (6, 7), "logprobs": 2},
    {"n": 3, "temperature": 1.0, "presence_penalty": 0.3},
)


def arrays(plan: StepPlan) -> dict[str, list[Any]]:
    """All of a plan but the numbers of its blocks: what ends while another grows decides who gets which."""
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    fields |= {field.name: getattr(plan.sampling, field.name) for field in dataclasses.fields(plan.sampling)}
    fields["block_tables"] = fields["block_tables"].shape
    return {name: np.asarray(value).tolist() for name, value in fields.items() if name not in ("sampling", "copies")}


async def served(works: list[tuple[int, SamplingParams]], num_blocks: int) -> Harness:
    """The fake model sees to it that block tables are right."""
    harness = Harness(num_blocks=num_blocks)
    ones = [request(prompt(length, seed), sampling) for seed, (length, sampling) in enumerate(works)]
    for one in ones:
        harness.engine.submit(one)
    async with harness.running():
        await harness.until_ended(*(one.key for one in ones))
    for one in ones:
        assert_expected(harness, one)
    return harness


def assert_expected(harness: Harness, one: EngineRequest) -> None:
    for choice, answer in harness.answers[one.key].items():
        wanted = expected(one.prompt_ids.tolist(), one.sampling, choice)
        assert (answer.token_ids, answer.finish_reason) == wanted


@pytest.mark.parametrize("num_blocks", [200, 40])
async def test_plans_are_those_of_an_engine_that_prepares_nothing(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [(5 + 9 * index, params(**({"max_tokens": 40} | fields))) for index, fields in enumerate(MIXED)]
    prepared = await served(works, num_blocks)
    assert prepared.engine.stats.num_prepared_steps > 20
    monkeypatch.setattr(core, "prepare_next", lambda *_: None)
    plain = await served(works, num_blocks)
    assert plain.engine.stats.num_prepared_steps == 0
    assert [arrays(plan) for plan in prepared.gate.plans] == [arrays(plan) for plan in plain.gate.plans]
    assert prepared.engine.stats.preemptions == plain.engine.stats.preemptions


async def test_every_step_of_a_plain_decode_is_prepared() -> None:
    harness = await served([(20, params(max_tokens=60)), (21, params(max_tokens=60, temperature=0.8))], 64)
    # All but the prefill, the first decode and none at the end, which both reach at once.
    assert harness.engine.stats.num_prepared_steps == harness.engine.stats.num_steps - 2


async def test_growing_takes_no_block_from_anybody() -> None:
    """Both fill the pool to the last block: the later one gives way when it has to, not a step before."""
    works = [(30, params(max_tokens=60)), (30, params(max_tokens=60))]
    harness = await served(works, 8)
    assert harness.engine.stats.preemptions
    assert harness.engine.stats.num_prepared_steps > 20


@pytest.mark.parametrize("act", ["cancel", "cancel_choice", "submit"])
async def test_what_happens_during_a_step_is_in_the_next_one(act: str) -> None:
    harness = Harness()
    ones = [request(prompt(20, seed), params(max_tokens=40)) for seed in range(2)]
    other = request(prompt(33, 5), params(max_tokens=4))
    async with harness.running():
        for one in ones:
            harness.engine.submit(one)
        await harness.until(lambda: harness.engine.stats.num_prepared_steps >= 5)
        harness.gate.shut()
        await harness.until(lambda: len(harness.gate.plans) > harness.engine.stats.num_steps)
        num_plans = len(harness.gate.plans)
        if act == "cancel":
            harness.engine.cancel(ones[0].key)
        elif act == "cancel_choice":
            harness.engine.cancel_choice(ones[0].key, ChoiceIndex(0))
        else:
            harness.engine.submit(other)
        harness.gate.open()
        await harness.until(lambda: len(harness.gate.plans) > num_plans)
        assert harness.gate.plans[num_plans].query_lens.tolist() == ([1, 1, 33] if act == "submit" else [1])
        await harness.until_ended(ones[1].key)
    assert_expected(harness, ones[1])


async def test_a_prepared_step_that_fails_fails_its_requests_only() -> None:
    harness = Harness()
    one = request(prompt(20), params(max_tokens=40))
    async with harness.running():
        harness.engine.submit(one)
        await harness.until(lambda: harness.engine.stats.num_prepared_steps >= 5)
        harness.gate.fail_next = RuntimeError("on purpose")
        await harness.until_ended(one.key)
        assert "on purpose" in harness.failed[one.key].message
        after = request(prompt(20), params(max_tokens=40))
        await harness.answer(after)
        assert_expected(harness, after)
