"""The engine of a worker: continuous batching over a paged KV cache.

All state lives on the event loop's thread. A step's computation runs elsewhere, behind a ``StepExecutor``; while one is
under way requests may come, be adopted and be cancelled, but no block of a sequence in that step is given back before
it is over: it may still be written.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace

import msgspec

from twopool.engine.admission import blocks_to_reserve, check_request, make_sequences, make_state
from twopool.engine.block_pool import BlockPool, Reservation
from twopool.engine.constraints import Constraints, grammar_failure
from twopool.engine.grammar import GrammarEngine
from twopool.engine.next_step import NextStep, prepare_next
from twopool.engine.outputs import DrawnTokens, adopt_delta, record_token, resend
from twopool.engine.plan import build_plan
from twopool.engine.requests import (
    AttemptKey,
    EngineRequest,
    EngineStats,
    LayerProgress,
    LocalPrefill,
    PrefillProgress,
    PrefillResult,
    StepOutput,
)
from twopool.engine.scheduler import Chunk, Schedule, Scheduler, SchedulerConfig, blocks_for
from twopool.engine.sequence import RequestState, Sequence, Status
from twopool.engine.step import FollowUp, StepExecutor, StepPlan, StepResult
from twopool.kernels.token_scores import TokenScores
from twopool.protocol.errors import OverloadedError
from twopool.protocol.ids import BlockId, ChoiceIndex
from twopool.protocol.messages import ErrorInfo, TokenDelta

__all__ = [
    "AttemptKey",
    "Engine",
    "EngineRequest",
    "EngineStats",
    "LocalPrefill",
    "PrefillProgress",
    "PrefillResult",
    "StepOutput",
]

log = logging.getLogger(__name__)

RETAINED_REQUESTS = 256
"""Finished requests whose outputs can still be asked for: their last message may have been lost."""

CHECK_INTERVAL_S = 10.0
"""An idle engine recounts its blocks, but no more often than this: it takes a while in a large pool."""


class Engine:
    """Computes requests step by step and reports each step through ``on_step``, on the event loop's thread.

    What a step brought decides the next one, which starts at once; it is reported while that one computes.

    ``on_step`` may call any method of the engine. It must not raise: what it raises ends ``run``.
    Without ``grammars`` requests that have one are refused.
    """

    def __init__(
        self,
        *,
        grammars: GrammarEngine | None = None,
        pool: BlockPool,
        scheduler_config: SchedulerConfig,
        executor: StepExecutor,
        on_step: Callable[[StepOutput], None],
        layer_marks: tuple[int, ...] = (),
    ) -> None:
        self._constraints = Constraints(grammars, self._grammar_settled)
        self._pool = pool
        self._config = scheduler_config
        self._executor = executor
        self._on_step = on_step
        self._scheduler = Scheduler(scheduler_config, pool)
        self._max_len = min(scheduler_config.max_model_len, pool.num_blocks * pool.block_size)
        self._requests: dict[AttemptKey, RequestState] = {}
        self._retained: OrderedDict[AttemptKey, RequestState] = OrderedDict()
        self._doomed: list[Sequence] = []
        self._in_step = False
        self._layer_marks = layer_marks
        self._last_chunks: list[Chunk] = []
        self._output = StepOutput()
        self._wake = asyncio.Event()
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_prepared_steps = 0
        self._prefill_tokens = 0
        self._generated_tokens = 0
        self._checked_at: float | None = None
        pool.on_obtainable = self._wake.set

    @property
    def max_model_len(self) -> int:
        """The configured length or what the whole pool holds, whichever is less: what to register with."""
        return self._max_len

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_steps=self._num_steps,
            num_prepared_steps=self._num_prepared_steps,
            prefill_tokens=self._prefill_tokens,
            cached_tokens=self._scheduler.num_cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._scheduler.num_preemptions,
        )

    @property
    def idle(self) -> bool:
        """Whether the engine holds no request and no step is under way."""
        return not self._requests and not self._in_step

    def close(self) -> None:
        """Stop the threads of the grammars; ``run`` is over by then."""
        self._constraints.close()

    def check(self, request: EngineRequest) -> None:
        """Raises ``ContextLengthError`` or ``InvalidRequestError`` as ``submit`` would."""
        check_request(request, self._config, self._max_len)
        self._constraints.check(request)

    def expect(self, request: EngineRequest) -> None:
        """A request will be adopted: begin to compile its grammar."""
        self._constraints.expect(request)

    def reserve(self, num_tokens: int, num_choices: int) -> Reservation:
        """Room for the KV of ``num_tokens`` plus a block to grow into for each choice, for a request to be adopted.

        Raises ``OverloadedError`` when there is too little, and while preempted choices wait for theirs.
        """
        self._refuse_if_starved()
        wanted = blocks_for(num_tokens, self._pool.block_size) + num_choices
        return self._pool.reserve(min(wanted, self._pool.num_blocks))

    def submit(self, request: EngineRequest) -> None:
        """Queue a request whose KV is to be computed here.

        Its blocks are claimed at once: all of its tokens' and one to grow into for each choice. Raises
        ``OverloadedError`` when they are not to be had or the queue is full, ``ContextLengthError`` or
        ``InvalidRequestError`` when the request can never be computed; the engine then holds nothing of it.
        """
        self._require_new(request.key)
        self.check(request)
        if len(self._scheduler.waiting) >= self._config.max_waiting:
            raise OverloadedError(f"{self._config.max_waiting} requests wait for this worker already.")
        self._refuse_if_starved()
        state = self._make_state(request, None)
        state.sequences = make_sequences(state, request)
        self._claim_blocks(state)
        self._requests[request.key] = state
        self._constraints.start(state)
        for sequence in state.sequences:
            self._scheduler.add(sequence)
        self._wake.set()

    def adopt(
        self,
        request: EngineRequest,
        *,
        block_table: list[BlockId],
        first: AbstractSequence[TokenDelta],
        reservation: Reservation | None,
    ) -> None:
        """Go on with a request whose KV was computed elsewhere.

        ``block_table`` holds the KV of all of the request's ids, proven, one reference each, which passes to the
        engine; so does ``reservation``, for growth. ``first`` has one delta for each choice with the token the prefill
        drew and perhaps a finish reason; the engine does not report them again, but can resend them. If they end all
        choices, the next ``StepOutput`` says so. Raises ``ValueError``, taking nothing over, when the parts do not fit.
        """
        self._require_new(request.key)
        state = self._make_state(request, reservation)
        state.sequences = sequences = make_sequences(state, request)
        if len(sequences) != 1 or len(block_table) != blocks_for(sequences[0].num_tokens, self._pool.block_size):
            raise ValueError(f"{len(block_table)} blocks do not hold the tokens of {request.key}")
        for delta in first:
            adopt_delta(state, delta)
        if any(len(output.output_ids) == output.base and not output.ended for output in state.outputs.values()):
            raise ValueError(f"the prefill of {request.key} drew no token for some choice")
        state.prefill_reported = True
        sequence = sequences[0]
        sequence.append_blocks(block_table)
        sequence.num_computed = sequence.num_tokens
        sequence.status = Status.RUNNING
        self._requests[request.key] = state
        self._constraints.start(state)
        self._scheduler.add(sequence)
        self._publish(sequence)
        self._continue(sequence)
        self._wake.set()

    def cancel(self, key: AttemptKey) -> None:
        """Forget a request, now or, where it is in the step under way, at that step's end. Idempotent."""
        self._retained.pop(key, None)
        state = self._requests.pop(key, None)
        if state is not None:
            self._abandon(state)

    def cancel_choice(self, key: AttemptKey, choice: ChoiceIndex) -> None:
        """Go on without one choice. Idempotent; the last one to go finishes the request (ends it, for a prefill)."""
        state = self._requests.get(key)
        if state is None or choice not in state.outputs or state.outputs[choice].ended:
            return
        state.outputs[choice].cancelled = True
        for sequence in state.sequences:
            if sequence.status is not Status.FINISHED and not sequence.open_choices:
                self._drop(sequence)
        if state.ended:
            if state.prefill_only:
                self.cancel(key)
            else:
                self._finish(state)
            self._wake.set()

    def outputs(self, key: AttemptKey, choice: ChoiceIndex, from_index: int) -> TokenDelta | None:
        """A choice's tokens from output index ``from_index`` on, to be sent again; None when there are none.

        Works for the requests the engine has and for the latest it finished. Where log-probabilities were asked for,
        the delta starts no earlier than the tokens this attempt brought.
        """
        state = self._requests.get(key) or self._retained.get(key)
        return resend(state, choice, from_index) if state is not None else None

    async def run(self) -> None:
        """Compute steps for as long as there is work; wait otherwise. Runs until cancelled."""
        while True:
            self._wake.clear()
            schedule = self._scheduler.schedule()
            if schedule.chunks:
                await self._step(schedule)
                continue
            self._report()
            if self.idle:
                self._check_pool()
            await self._wake.wait()

    def layers_done(self, layer_end: int) -> list[LayerProgress]:
        """What the step under way has completed of prefills' last chunks, once layers below ``layer_end`` are done."""
        if not self._in_step:
            return []
        return [
            LayerProgress(sequence.request.key, tuple(sequence.blocks), sequence.num_tokens, layer_end)
            for sequence in (chunk.sequence for chunk in self._last_chunks)
            if not sequence.request.abandoned
        ]

    # --- a step

    async def _step(self, schedule: Schedule) -> None:
        """Compute a schedule, and after it for as long as nothing changes what was prepared meanwhile."""
        now = time.monotonic()
        for chunk in schedule.chunks:
            request = chunk.sequence.request
            if request.first_scheduled_at is None:
                request.first_scheduled_at = now
        plan = build_plan(schedule, self._pool.block_size)
        self._last_chunks = [one for one in schedule.chunks if one.draws and one.sequence.request.prefill_only]
        # Stays set when the task is cancelled right here: the thread goes on writing, so nothing may be released.
        self._in_step = True
        computing = self._start(schedule, plan)
        while True:
            self._report()
            following = prepare_next(schedule, plan, self._scheduler, self._pool)
            follow_up = self._offer(following) if following is not None else None
            result = await _settled(computing)
            if following is None or follow_up is None or follow_up.started is None:
                break
            plan, computing = follow_up.started
            self._num_prepared_steps += 1
            self._take_in(schedule, result)
            schedule = following.schedule
        self._in_step = False
        self._take_in(schedule, result)
        doomed, self._doomed = self._doomed, []
        for sequence in doomed:
            self._scheduler.drop(sequence)

    def _offer(self, following: NextStep) -> FollowUp:
        """To be computed as soon as the step under way is over, unless something happens before that."""

        def make(result: StepResult) -> StepPlan | None:  # on the thread that computes
            return None if self._doomed else following.plan(result.draws, self._scheduler)

        follow_up = FollowUp(make)
        self._executor.follow(follow_up)
        return follow_up

    def _start(self, schedule: Schedule, plan: StepPlan) -> Awaitable[StepResult] | Exception:
        try:
            if self._last_chunks:
                plan = replace(plan, layer_marks=self._layer_marks)
            return self._executor.execute(self._constraints.with_masks(schedule, plan))
        except Exception as error:
            log.exception("a step did not start")
            return error

    def _take_in(self, schedule: Schedule, result: StepResult | Exception) -> None:
        """What a step means for its requests."""
        if isinstance(result, StepResult):
            self._apply(schedule, DrawnTokens(result.draws), result.scores)
        else:
            message = f"The computation failed: {result!r}"[:4096]
            for chunk in schedule.chunks:
                self._fail(chunk.sequence.request, ErrorInfo(kind="internal", message=message, retryable=True))
        self._pool.release([source for source, _ in schedule.copies])
        self._num_steps += 1

    def _apply(self, schedule: Schedule, drawn: DrawnTokens, scores: TokenScores | None) -> None:
        index = num_scored = 0
        for chunk in schedule.chunks:
            first, index = index, index + len(chunk.draws)
            sequence = chunk.sequence
            first_scored = num_scored
            if scores is not None:
                num_scored += sequence.num_scored(chunk.num_rows)
            if sequence.request.abandoned or not sequence.open_choices:
                continue  # cancelled while the step was under way
            failure = grammar_failure(sequence.request)
            if failure is not None:
                self._fail(sequence.request, failure)
                continue
            scored = scores is None or _keep_scores(sequence, scores, first_scored, num_scored - first_scored)
            if not scored or True in drawn.bad[first:index]:
                message = "The model's output for this request is not a number."
                self._fail(sequence.request, ErrorInfo(kind="bad_logits", message=message))
                continue
            if not (chunk.num_rows == 1 and sequence.num_outputs):
                self._prefill_tokens += chunk.num_rows
            sequence.num_computed += chunk.num_rows
            self._publish(sequence)
            if chunk.draws:
                self._draw(chunk, drawn, first)
            elif sequence.request.prefill_only:
                progress = PrefillProgress(sequence.request.key, tuple(sequence.blocks), sequence.num_computed)
                self._output.progress.append(progress)

    def _draw(self, chunk: Chunk, drawn: DrawnTokens, first: int) -> None:
        """All of a sequence's tokens are computed and the next ones drawn."""
        sequence, request = chunk.sequence, chunk.sequence.request
        deltas = [
            record_token(request, choice, drawn, first + offset)
            for offset, choice in enumerate(chunk.draws)
            if not request.outputs[choice].cancelled
        ]
        self._generated_tokens += len(deltas)
        if request.prompt_scores is not None:
            request.prompt_logprobs, request.prompt_scores = request.prompt_scores.message(), None
            if deltas:
                deltas[0] = msgspec.structs.replace(deltas[0], prompt_logprobs=request.prompt_logprobs)
        if request.prefill_only:
            self._hand_over(sequence, deltas)
            return
        if not request.prefill_reported:
            request.prefill_reported = True
            self._output.local_prefills.append(LocalPrefill(request.key, request.cached_tokens, *request.times_s))
        self._output.deltas.extend(deltas)
        self._continue(sequence)

    def _continue(self, sequence: Sequence) -> None:
        """Append the choices' latest tokens: each choice that goes on gets a sequence of its own."""
        outputs = sequence.request.outputs
        going_on = sequence.open_choices
        for choice in going_on[1:]:
            twin = sequence.fork(choice, self._pool.block_size)
            self._pool.share(twin.blocks)
            twin.append_token(outputs[choice].output_ids[-1])
            sequence.request.sequences.append(twin)
            self._scheduler.add(twin)
        if going_on:
            sequence.choices = going_on[:1]
            sequence.append_token(outputs[going_on[0]].output_ids[-1])
        else:
            self._drop(sequence)
            if sequence.request.ended:
                self._finish(sequence.request)

    def _hand_over(self, sequence: Sequence, deltas: list[TokenDelta]) -> None:
        request = sequence.request
        blocks = tuple(sequence.blocks)
        self._pool.pin(blocks)
        self._output.prefilled.append(
            PrefillResult(
                request.key, blocks, sequence.num_computed, tuple(deltas), request.cached_tokens, *request.times_s
            )
        )
        del self._requests[request.key]
        self._drop(sequence)
        request.release_reservation()

    def _publish(self, sequence: Sequence) -> None:
        num_full = sequence.num_computed // self._pool.block_size
        if num_full > sequence.num_published:
            self._pool.publish(sequence.blocks, sequence.chain, sequence.token_ids, sequence.num_computed)
            sequence.num_published = num_full

    def _report(self) -> None:
        if self._output:
            output, self._output = self._output, StepOutput()
            self._on_step(output)

    # --- ends

    def _finish(self, state: RequestState) -> None:
        """All choices of a full request have ended."""
        del self._requests[state.key]
        state.release_reservation()
        state.sequences = []
        self._retained[state.key] = state
        if len(self._retained) > RETAINED_REQUESTS:
            self._retained.popitem(last=False)
        self._output.finished.append(state.key)

    def _fail(self, state: RequestState, error: ErrorInfo) -> None:
        """End a request without an answer; what it computed may be wrong and must not serve others."""
        if state.abandoned:
            return
        for sequence in state.sequences:
            self._pool.retract(sequence.blocks)
        del self._requests[state.key]
        self._abandon(state)
        self._output.failed.append((state.key, error))

    def _abandon(self, state: RequestState) -> None:
        state.abandoned = True
        for sequence in state.sequences:
            self._drop(sequence)
        state.release_reservation()

    def _drop(self, sequence: Sequence) -> None:
        if self._in_step:
            self._doomed.append(sequence)
        else:
            self._scheduler.drop(sequence)

    def _grammar_settled(self, state: RequestState) -> None:
        failure = grammar_failure(state)
        if failure is not None and state.key in self._requests:
            self._fail(state, failure)
        self._wake.set()

    # --- private

    def _claim_blocks(self, state: RequestState) -> None:
        """Take the blocks the cache has for a request's first sequence and reserve the rest."""
        pool, sequence = self._pool, state.sequences[0]
        held = pool.match(sequence.chain, sequence.token_ids, sequence.cacheable_tokens)
        wanted = blocks_to_reserve(state.sequences, len(held), pool.block_size, pool.num_blocks)
        try:
            state.reservation = pool.reserve(wanted)
        except OverloadedError:
            pool.release(held)
            raise
        sequence.append_blocks(held)
        state.missing_tokens = sequence.num_tokens - len(held) * pool.block_size
        for other in state.sequences[1:]:
            other.preempted = True  # the claim may not suffice for all: treated like one that lost its blocks

    def _require_new(self, key: AttemptKey) -> None:
        if key in self._requests:
            raise ValueError(f"the engine has {key} already")

    def _refuse_if_starved(self) -> None:
        if self._scheduler.starved:
            raise OverloadedError("Running requests wait for KV blocks on this worker.")

    def _make_state(self, request: EngineRequest, reservation: Reservation | None) -> RequestState:
        self._num_arrivals += 1
        return make_state(
            request,
            arrival=self._num_steps,
            number=self._num_arrivals,
            max_len=self._max_len,
            reservation=reservation,
        )

    def _check_pool(self) -> None:
        now = time.monotonic()
        if self._checked_at is None or now - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            self._pool.check()


async def _settled(computing: Awaitable[StepResult] | Exception) -> StepResult | Exception:
    """What a step gives or raises."""
    if isinstance(computing, Exception):
        return computing
    try:
        return await computing
    except Exception as error:  # whatever goes wrong in a step is the fault of its requests, not of the others
        log.exception("a step failed")
        return error


def _keep_scores(sequence: Sequence, scores: TokenScores, first: int, num_rows: int) -> bool:
    """Keep the rows of ``scores`` that are a sequence's; whether they are numbers."""
    gathered = sequence.request.prompt_scores
    return gathered is None or not num_rows or gathered.put(sequence.num_computed, scores, first, num_rows)
