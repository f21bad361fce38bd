"""What crosses from the event loop to the compute thread and back: one plan and one result a step."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from twopool.engine.grammar import StepMasks
from twopool.kernels.sampling import Draws, SamplingBatch
from twopool.kernels.token_scores import TokenScores

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StepPlan:
    """One step over S sequences, T rows in all; what every rank is told. Small numpy arrays, but for ``masks``, which
    whoever draws waits for.

    A sequence's rows are its last ones: positions context_len - query_len ... context_len - 1.
    """

    token_ids: Ints
    """[T] int32, the sequences' rows one after another"""
    query_lens: Ints
    """[S] int32, rows of each sequence, at least 1"""
    context_lens: Ints
    """[S] int32, tokens of each sequence in the cache after this step"""
    block_tables: Ints
    """[S, max_blocks] int32, padded with 0"""
    copies: Ints
    """[C, 2] int32, (source block, destination block), done before anything is written; no block is both"""
    logit_sequences: Ints
    """[L] int32, ascending: sequences whose last row's logits are wanted"""
    sampling: SamplingBatch
    """R draws, each from the logits of one of the L sequences"""
    draw_logits: Ints
    """[R] int32, which of the L rows of logits each draw is from"""
    layer_marks: tuple[int, ...] = ()
    """ascending: numbers of layers whose completion is worth a word while the step goes on; others are not reported"""
    scored_rows: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """[N] int32, rows of the T whose logits tell how likely a prompt's next token is"""
    scored_ids: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """[N] int32, those tokens"""
    scores_with_top: bool = False
    """whether the likeliest tokens are wanted beside them"""
    masks: StepMasks | None = None
    """what the grammars of some draws allow"""


@dataclass(frozen=True)
class StepResult:
    """What a step drew: R tokens, in the order of the plan's draws."""

    draws: Draws
    scores: TokenScores | None = None
    """of the plan's scored rows"""


_Future: TypeAlias = "asyncio.Future[StepResult]"


class FollowUp:
    """A step to run right after the one under way, if ``make`` makes a plan of that one's result.

    ``started``, known when that result is: the plan, and what is to be awaited for its own result.
    """

    def __init__(self, make: Callable[[StepResult], StepPlan | None]) -> None:
        self.make = make
        self.started: tuple[StepPlan, Awaitable[StepResult]] | None = None


class StepExecutor(Protocol):
    """Runs plans, one at a time."""

    def execute(self, plan: StepPlan) -> Awaitable[StepResult]:
        """Start now, where it can be, what is to be awaited.

        That raises whatever the computation raised; the executor stays usable.
        """
        ...

    def follow(self, follow_up: FollowUp) -> None:
        """When the step under way is over, go on with this one at once; where it is over already nothing happens.

        ``make`` is called on the thread that computes.
        """
        ...

    def close(self) -> None:
        """Finish the step under way, and what was to follow it, and stop; idempotent."""
        ...


class ThreadExecutor:
    """Runs plans on one thread of its own, so that compute never blocks the event loop. Used by one loop.

    The thread is no daemon: interpreter exit waits for the step under way instead of tearing torch down beneath it.
    """

    def __init__(self, compute: Callable[[StepPlan], StepResult]) -> None:
        self._compute = compute
        self._queue: queue.SimpleQueue[tuple[StepPlan, _Future] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_computing = False
        self._follow_up: FollowUp | None = None
        self._thread = threading.Thread(target=self._run, name="engine-step")
        self._thread.start()

    def execute(self, plan: StepPlan) -> Awaitable[StepResult]:
        """The step goes on when whoever awaits it is cancelled; nobody hears of its end then."""
        future: _Future = asyncio.get_running_loop().create_future()
        self._is_computing = True
        self._queue.put((plan, future))
        return future

    def follow(self, follow_up: FollowUp) -> None:
        with self._lock:
            if self._is_computing:
                self._follow_up = follow_up

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            step: tuple[StepPlan, _Future] | None = item
            while step is not None:
                step = self._step(*step)

    def _step(self, plan: StepPlan, future: _Future) -> tuple[StepPlan, _Future] | None:
        """Compute one step; what follows it."""
        try:
            result = self._compute(plan)
            following = self._following(result, future.get_loop())
        except Exception as error:  # whatever it is, the caller on the event loop has to hear of it
            self._take_follow_up()
            _deliver(future, _fail, error)
            return None
        _deliver(future, _complete, result)
        return following

    def _following(self, result: StepResult, loop: asyncio.AbstractEventLoop) -> tuple[StepPlan, _Future] | None:
        follow_up = self._take_follow_up()
        plan = follow_up.make(result) if follow_up is not None else None
        if follow_up is None or plan is None:
            return None
        future: _Future = loop.create_future()
        self._is_computing = True
        follow_up.started = plan, future
        return plan, future

    def _take_follow_up(self) -> FollowUp | None:
        """The step is over: from here on it is too late to say what follows."""
        with self._lock:
            follow_up, self._follow_up = self._follow_up, None
            self._is_computing = False
            return follow_up


def _deliver(future: _Future, settle: Callable[[_Future, Any], None], value: object) -> None:
    """Settle ``future`` on its own loop; a loop that is closed by now has nobody waiting."""
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(settle, future, value)


def _complete(future: _Future, result: StepResult) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: _Future, error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
