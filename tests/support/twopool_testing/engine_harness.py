"""An engine on a model that can be computed by hand, and what it ought to answer.

The fake model keeps one integer a position in a KV pool of the usual shape. A position's value depends on its token and
on the value before it *as found through the block table*, and the logits on the last value, so whatever mixes up
blocks, positions or copies changes the tokens.
"""

import asyncio
import functools
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twopool.engine.block_pool import BlockPool
from twopool.engine.core import Engine
from twopool.engine.grammar import GrammarEngine
from twopool.engine.model_runner import ModelRunner
from twopool.engine.requests import AttemptKey, EngineRequest, LocalPrefill, PrefillProgress, PrefillResult, StepOutput
from twopool.engine.scheduler import SchedulerConfig
from twopool.engine.step import FollowUp, StepPlan, StepResult
from twopool.kernels.sampling import ROW_DTYPE, SamplingBatch, sample
from twopool.models.batch import ForwardBatch
from twopool.protocol.ids import Attempt, BlockId, ChoiceIndex, Epoch, RequestId
from twopool.protocol.messages import ChoiceState, ErrorInfo, FinishReason, SamplingParams, TokenDelta, pack_ids

BLOCK_SIZE = 16
VOCAB_SIZE = 97
_MODULUS = (1 << 31) - 1


def next_value(before: int, token: int, position: int) -> int:
    return (before * 48271 + token * 7919 + position * 104729 + 1) % _MODULUS


@functools.lru_cache(maxsize=1 << 16)
def logits_of(value: int) -> Tensor:
    """[VOCAB_SIZE] float32 that depend on ``value`` alone. Not to be written to."""
    return torch.from_numpy(np.random.default_rng(value).normal(0.0, 2.0, VOCAB_SIZE).astype(np.float32))


class FakeModel:
    """Stands in for a decoder. ``bad_tokens``: a sequence that ends in one of them gets NaN for logits."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.bad_tokens: set[int] = set()
        self.num_rows = 0

    def forward(self, batch: ForwardBatch, kv_pool: Tensor) -> Tensor:
        cells = kv_pool[:, 0, 0, 0, :, 0]
        block_size = cells.shape[1]
        tokens, positions, slots = batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist()
        assert len(set(slots)) == len(slots), "two rows write the same slot"
        last = {}
        bounds = batch.cu_seqlens.tolist()
        for sequence, (start, end) in enumerate(itertools.pairwise(bounds)):
            table = batch.block_tables[sequence].tolist()
            for row in range(start, end):
                position = positions[row]
                assert slots[row] == table[position // block_size] * block_size + position % block_size
                before = position - 1
                value = int(cells[table[before // block_size], before % block_size]) if position else 0
                cells[slots[row] // block_size, slots[row] % block_size] = next_value(value, tokens[row], position)
                last[row] = next_value(value, tokens[row], position)
            assert position == int(batch.context_lens[sequence]) - 1
        self.num_rows += len(tokens)
        rows = [
            torch.full((VOCAB_SIZE,), torch.nan) if tokens[row] in self.bad_tokens else logits_of(last[row])
            for row in batch.logit_rows.tolist()
        ]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)


def fake_kv_pool(num_blocks: int, block_size: int = BLOCK_SIZE) -> Tensor:
    """Full of garbage, as a pool is in real life."""
    return torch.randint(0, _MODULUS, (num_blocks, 1, 1, 2, block_size, 1))


class Gate:
    """Runs plans on the event loop. While ``closed``, steps wait before they compute.

    Checks that no block of the step under way is given up before it is over.
    """

    def __init__(self, runner: ModelRunner, pool: BlockPool) -> None:
        self._runner = runner
        self._pool = pool
        self._open = asyncio.Event()
        self._open.set()
        self.entered = asyncio.Event()
        self.fail_next: Exception | None = None
        self.plans: list[StepPlan] = []
        self._is_computing = False
        self._follow_up: FollowUp | None = None

    def execute(self, plan: StepPlan) -> Coroutine[Any, Any, StepResult]:
        self._is_computing = True
        return self._execute(plan)

    def follow(self, follow_up: FollowUp) -> None:
        if self._is_computing:
            self._follow_up = follow_up

    async def _execute(self, plan: StepPlan) -> StepResult:
        blocks = sorted({BlockId(int(block)) for block in (*plan.block_tables.flat, *plan.copies.flat)})
        before = self._pool.generations(blocks).tolist()
        self.plans.append(plan)
        self.entered.set()
        await asyncio.sleep(0)
        await self._open.wait()
        used = [
            BlockId(int(block))
            for table, length in zip(plan.block_tables, plan.context_lens, strict=True)
            for block in table[: -(-int(length) // self._pool.block_size)]
        ]
        for block in {*used, *(BlockId(int(block)) for block in plan.copies.flat)}:
            assert self._pool.generation(block) == before[blocks.index(block)], f"block {block} was given up in a step"
        follow_up, self._follow_up = self._follow_up, None
        self._is_computing = False
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        result = self._runner.run(plan)
        if follow_up is not None and (following := follow_up.make(result)) is not None:
            follow_up.started = following, self.execute(following)
        return result

    def close(self) -> None:
        """Nothing to stop."""

    def shut(self) -> None:
        self.entered.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@dataclass
class Answer:
    """What was reported of one choice."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    deltas: list[TokenDelta] = field(default_factory=list)


class Harness:
    """A running engine and everything it reported. Checks what holds for any output: indexes, one end, no leftovers."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = BLOCK_SIZE,
        prefix_caching: bool = True,
        model: Any = None,
        kv_pool: Tensor | None = None,
        vocab_size: int = VOCAB_SIZE,
        grammars: GrammarEngine | None = None,
        **config: int,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, epoch=Epoch(1), prefix_caching=prefix_caching)
        self.kv_pool = fake_kv_pool(num_blocks, block_size) if kv_pool is None else kv_pool
        self.model = model or FakeModel()
        self.gate = Gate(ModelRunner(self.model, self.kv_pool), self.pool)
        limits = {
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "max_waiting": 256,
            "max_model_len": 512,
            "vocab_size": vocab_size,
        }
        self.engine = Engine(
            pool=self.pool,
            scheduler_config=SchedulerConfig(**(limits | config)),
            executor=self.gate,
            on_step=self._on_step,
            grammars=grammars,
        )
        self.answers: dict[AttemptKey, dict[ChoiceIndex, Answer]] = defaultdict(lambda: defaultdict(Answer))
        self.finished: list[AttemptKey] = []
        self.failed: dict[AttemptKey, ErrorInfo] = {}
        self.prefilled: dict[AttemptKey, PrefillResult] = {}
        self.local_prefills: dict[AttemptKey, LocalPrefill] = {}
        self.progress: dict[AttemptKey, list[PrefillProgress]] = defaultdict(list)
        self.on_step: Callable[[StepOutput], None] = lambda output: None
        self._changed = asyncio.Condition()

    def _on_step(self, output: StepOutput) -> None:
        assert output
        ended = {*self.finished, *self.failed, *self.prefilled}
        for delta in output.deltas:
            key = AttemptKey(delta.request_id, delta.attempt)
            assert key not in ended
            answer = self.answers[key][delta.choice]
            assert answer.finish_reason is None
            base = answer.deltas[0].index if answer.deltas else delta.index
            assert delta.index == base + len(answer.token_ids)
            answer.token_ids += delta.token_ids
            answer.finish_reason, answer.stop_token_id = delta.finish_reason, delta.stop_token_id
            answer.deltas.append(delta)
        for key in (*output.finished, *(key for key, _ in output.failed), *(one.key for one in output.prefilled)):
            assert key not in ended
        self.finished += output.finished
        self.failed |= dict(output.failed)
        self.prefilled |= {one.key: one for one in output.prefilled}
        self.local_prefills |= {one.key: one for one in output.local_prefills}
        for progress in output.progress:
            self.progress[progress.key].append(progress)
        self.on_step(output)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Harness"]:
        """Runs the engine; at the end it must hold nothing but cached blocks."""
        task = asyncio.create_task(self.engine.run())
        try:
            yield self
            await self.until(lambda: self.engine.idle)
            self.assert_balanced()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task.exception()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the engine work until ``condition`` holds."""
        for _ in range(20_000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError(f"the engine came to nothing: {self.engine.stats}, {self.pool.counts()}")

    async def until_ended(self, *keys: AttemptKey) -> None:
        await self.until(lambda: all(key in self.failed or key in self.finished for key in keys))

    def assert_balanced(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts.free + counts.cached == self.pool.num_blocks, counts
        assert self.pool.num_reserved == 0

    async def answer(self, request: EngineRequest) -> dict[ChoiceIndex, Answer]:
        self.engine.submit(request)
        await self.until_ended(request.key)
        assert request.key not in self.failed, self.failed
        return self.answers[request.key]

    async def prefill(self, request: EngineRequest) -> PrefillResult:
        self.engine.submit(request)
        await self.until(lambda: request.key in self.prefilled)
        return self.prefilled[request.key]


_count = iter(range(1 << 30))


def new_key() -> AttemptKey:
    return AttemptKey(RequestId(f"r{next(_count)}"), Attempt(0))


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 1, "temperature": 0.0, "max_tokens": 8} | fields))


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng([seed, length]).integers(0, VOCAB_SIZE, length).tolist()
    return tokens


def request(
    prompt_ids: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    outputs: dict[int, Sequence[int]] | None = None,
    **fields: Any,
) -> EngineRequest:
    sampling = sampling or params()
    accepted = outputs if outputs is not None else {choice: () for choice in range(sampling.n)}
    return EngineRequest(
        key=new_key(),
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        choices=tuple(ChoiceState(ChoiceIndex(choice), pack_ids(list(ids))) for choice, ids in accepted.items()),
        sampling=sampling,
        **fields,
    )


def expected(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    choice: int = 0,
    *,
    max_model_len: int = 512,
    logits: Callable[[list[int]], Tensor] | None = None,
) -> tuple[list[int], FinishReason]:
    """What the fake model (or ``logits`` of all ids) answers, token by token, without an engine."""
    return _expected(tuple(prompt_ids), sampling, choice, max_model_len, logits)


@functools.lru_cache(maxsize=4096)
def _expected(
    prompt_ids: tuple[int, ...],
    sampling: SamplingParams,
    choice: int,
    max_model_len: int,
    logits: Callable[[list[int]], Tensor] | None,
) -> tuple[list[int], FinishReason]:
    ids, output, value = list(prompt_ids), list[int](), 0
    for position, token in enumerate(ids):
        value = next_value(value, token, position)
    while True:
        row = logits(ids) if logits else logits_of(value)
        token = _draw(row, list(prompt_ids), output, sampling, choice)
        value = next_value(value, token, len(ids))
        ids.append(token)
        output.append(token)
        if token in sampling.all_stop_ids:
            return output, "stop"
        if len(output) == sampling.max_tokens or len(ids) == max_model_len:
            return output, "length"


def _draw(row: Tensor, prompt_ids: list[int], output: list[int], sampling: SamplingParams, choice: int) -> int:
    rows = np.zeros(1, dtype=ROW_DTYPE)
    for name in ("temperature", "top_p", "min_p", "top_k", "seed"):
        rows[name] = getattr(sampling, name)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        rows[name] = getattr(sampling, name)
    rows["choice"], rows["position"] = choice, len(output)
    masked = sampling.all_stop_ids if len(output) < sampling.min_tokens else ()
    penalised = (
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    ) != (1.0, 0.0, 0.0)
    history = prompt_ids + output if penalised else []
    batch = SamplingBatch(
        rows=rows,
        history_rows=_zeros(1 if history else 0),
        history_lens=np.array([len(history)] if history else [], dtype=np.int32),
        history_prompt_lens=np.array([len(prompt_ids)] if history else [], dtype=np.int32),
        history_ids=np.array(history, dtype=np.int32),
        bias_rows=_zeros(len(sampling.logit_bias)),
        bias_ids=np.array([token for token, _ in sampling.logit_bias], dtype=np.int32),
        bias_values=np.array([value for _, value in sampling.logit_bias], dtype=np.float32),
        masked_rows=_zeros(len(masked)),
        masked_ids=np.array(masked, dtype=np.int32),
    )
    return int(sample(row[None].clone(), batch).token_ids[0])


def _zeros(count: int) -> npt.NDArray[np.int32]:
    return np.zeros(count, dtype=np.int32)
