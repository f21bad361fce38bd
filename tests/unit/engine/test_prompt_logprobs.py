"""The log-probabilities of a prompt, whatever is cached, however it is cut into chunks."""

from typing import Any

import numpy as np
import pytest
import torch

from twopool.engine.prompt_logprobs import PromptScores
from twopool.engine.scheduler import MAX_SCORED_ROWS
from twopool.protocol.errors import InvalidRequestError, OverloadedError
from twopool.protocol.ids import ChoiceIndex
from twopool.protocol.messages import MAX_PROMPT_LOGPROBS_BYTES, PromptLogprobs, prompt_logprobs_bytes
from twopool_testing.engine_harness import Harness, logits_of, next_value, params, prompt, request

FIRST = ChoiceIndex(0)


def expected(tokens: list[int]) -> list[torch.Tensor]:
    """Log-probabilities of all tokens after each position of the prompt but the last."""
    rows, value = [], 0
    for position, token in enumerate(tokens[:-1]):
        value = next_value(value, token, position)
        rows.append(torch.log_softmax(logits_of(value), dim=-1))
    return rows


def assert_expected(message: PromptLogprobs | None, tokens: list[int], num_top: int) -> None:
    assert message is not None and message.num_top == num_top
    count = len(tokens) - 1
    logprobs = np.frombuffer(message.logprobs, dtype="<f4")
    ranks = np.frombuffer(message.ranks, dtype="<i4")
    top_ids = np.frombuffer(message.top_ids, dtype="<i4").reshape(count, num_top)
    top_logprobs = np.frombuffer(message.top_logprobs, dtype="<f4").reshape(count, num_top)
    rows = expected(tokens)
    assert len(logprobs) == len(ranks) == count
    for position, row in enumerate(rows):
        token = tokens[position + 1]
        assert logprobs[position] == pytest.approx(float(row[token]), abs=1e-5)
        assert ranks[position] == int((row > row[token]).sum()) + 1
        best = row.topk(num_top)
        assert top_ids[position].tolist() == best.indices.tolist()
        assert top_logprobs[position].tolist() == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 200])
@pytest.mark.parametrize("fields", [{"n": 1}, {"n": 3, "temperature": 1.0}], ids=["one", "three"])
async def test_cold_cached_and_chunked(length: int, fields: dict[str, Any]) -> None:
    """NUM-08: equal with a full prefix cache, which is not used."""
    tokens = prompt(length)
    async with Harness().running() as harness:
        for _ in range(2):
            one = request(tokens, params(prompt_logprobs=3, **fields))
            answers = await harness.answer(one)
            assert_expected(answers[FIRST].deltas[0].prompt_logprobs, tokens, 3)
            later = [delta for answer in answers.values() for delta in answer.deltas][1:]
            assert all(delta.prompt_logprobs is None for delta in later[: len(answers[FIRST].deltas) - 1])
            assert harness.local_prefills[one.key].cached_tokens == 0
            resent = harness.engine.outputs(one.key, FIRST, 0)
            assert resent is not None
            assert_expected(resent.prompt_logprobs, tokens, 3)
            await harness.answer(request(tokens, params()))


async def test_beside_others_and_after_preemption() -> None:
    """Prompts that share steps, in a pool too small for what they grow to."""
    prompts = [prompt(40 + 7 * seed, seed) for seed in range(4)]
    async with Harness(num_blocks=24).running() as harness:
        scored = [request(tokens, params(prompt_logprobs=index, max_tokens=60)) for index, tokens in enumerate(prompts)]
        plain = [request(tokens, params(max_tokens=30)) for tokens in prompts]
        waiting = [*scored, *plain]
        while waiting:
            try:
                harness.engine.submit(waiting[0])
                waiting.pop(0)
            except OverloadedError:
                done = len(harness.finished)
                await harness.until(lambda done=done: len(harness.finished) > done)  # type: ignore[misc]
        await harness.until_ended(*(one.key for one in (*scored, *plain)))
        for index, (one, tokens) in enumerate(zip(scored, prompts, strict=True)):
            assert_expected(harness.answers[one.key][FIRST].deltas[0].prompt_logprobs, tokens, index)


async def test_a_step_scores_no_more_than_so_many_rows() -> None:
    tokens = [prompt(400, seed) for seed in range(3)]
    async with Harness(num_blocks=128, max_num_batched_tokens=1024).running() as harness:
        keys = [request(one, params(prompt_logprobs=0)) for one in tokens]
        for one in keys:
            harness.engine.submit(one)
        await harness.until_ended(*(one.key for one in keys))
        assert max(len(plan.scored_rows) for plan in harness.gate.plans) <= MAX_SCORED_ROWS
        for one, ids in zip(keys, tokens, strict=True):
            assert_expected(harness.answers[one.key][FIRST].deltas[0].prompt_logprobs, ids, 0)


async def test_prefills_hand_them_over_and_resumed_requests_have_none() -> None:
    tokens = prompt(50)
    async with Harness().running() as harness:
        result = await harness.prefill(request(tokens, params(prompt_logprobs=2), prefill_only=True))
        assert_expected(result.deltas[0].prompt_logprobs, tokens, 2)
        harness.pool.unpin(result.block_table)
        resumed = await harness.answer(request(tokens, params(prompt_logprobs=2), outputs={0: [5]}))
        assert all(delta.prompt_logprobs is None for delta in resumed[FIRST].deltas)


async def test_too_much_is_refused() -> None:
    async with Harness().running() as harness:
        length = MAX_PROMPT_LOGPROBS_BYTES // prompt_logprobs_bytes(1, 20) + 1
        with pytest.raises(InvalidRequestError) as caught:
            harness.engine.check(request(np.zeros(length, dtype=np.int32), params(prompt_logprobs=20)))  # type: ignore[arg-type]
        assert caught.value.param is not None


def test_rows_that_score_nothing() -> None:
    scores = PromptScores(5, 0)
    assert [scores.rows_of(start, 3) for start in range(6)] == [3, 3, 2, 1, 0, 0]
    assert PromptScores(1, 2).message().logprobs == b""
