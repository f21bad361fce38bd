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


class StepExecutor(Protocol):
    """Runs plans, one at a time."""

    def execute(self, plan: StepPlan) -> Awaitable[StepResult]:
        """Start now, where it can be, what is to be awaited.

        That raises whatever the computation raised; the executor stays usable.
        """
        ...

    def close(self) -> None:
        """Finish the step under way and stop; idempotent."""
        ...


class ThreadExecutor:
    """Runs plans on one thread of its own, so that compute never blocks the event loop.

    The thread is no daemon: interpreter exit waits for the step under way instead of tearing torch down beneath it.
    """

    def __init__(self, compute: Callable[[StepPlan], StepResult]) -> None:
        self._compute = compute
        self._queue: queue.SimpleQueue[tuple[StepPlan, _Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-step")
        self._thread.start()

    def execute(self, plan: StepPlan) -> Awaitable[StepResult]:
        """The step goes on when whoever awaits it is cancelled; nobody hears of its end then."""
        future: _Future = asyncio.get_running_loop().create_future()
        self._queue.put((plan, future))
        return future

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            plan, future = item
            try:
                result = self._compute(plan)
            except Exception as error:  # whatever it is, the caller on the event loop has to hear of it
                _deliver(future, _fail, error)
            else:
                _deliver(future, _complete, result)


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
