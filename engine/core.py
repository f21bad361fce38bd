"""The engine of a worker: continuous batching over a paged KV cache."""

from collections.abc import Callable, Sequence

from twopool.engine.block_pool import BlockPool, Reservation
from twopool.engine.requests import (
    AttemptKey,
    EngineRequest,
    LocalPrefill,
    PrefillProgress,
    PrefillResult,
    StepOutput,
)
from twopool.engine.scheduler import SchedulerConfig
from twopool.engine.step import StepExecutor
from twopool.protocol.ids import BlockId, ChoiceIndex
from twopool.protocol.messages import TokenDelta

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


class EngineStats:
    """Gauges and monotonic counters."""

    num_running: int
    num_waiting: int
    num_steps: int
    prefill_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int


class Engine:
    def __init__(
        self,
        *,
        pool: BlockPool,
        scheduler_config: SchedulerConfig,
        executor: StepExecutor,
        on_step: Callable[[StepOutput], None],
    ) -> None:
        raise NotImplementedError

    @property
    def stats(self) -> EngineStats:
        raise NotImplementedError

    @property
    def max_model_len(self) -> int:
        """The configured length or what the whole pool holds, whichever is less: what to register with."""
        raise NotImplementedError

    def reserve(self, num_tokens: int, num_choices: int) -> Reservation:
        """Room for ``num_tokens`` of KV plus one growth block a choice, for a request that will be adopted.

        Raises ``OverloadedError`` as ``submit`` does: also while preempted choices wait for blocks.
        """
        raise NotImplementedError

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises ``OverloadedError``, ``ContextLengthError`` or ``InvalidRequestError``."""
        raise NotImplementedError

    def adopt(
        self,
        request: EngineRequest,
        *,
        block_table: list[BlockId],
        first: Sequence[TokenDelta],
        reservation: Reservation | None,
    ) -> None:
        raise NotImplementedError

    def cancel(self, key: AttemptKey) -> None:
        raise NotImplementedError

    def cancel_choice(self, key: AttemptKey, choice: ChoiceIndex) -> None:
        raise NotImplementedError

    def outputs(self, key: AttemptKey, choice: ChoiceIndex, from_index: int) -> TokenDelta | None:
        raise NotImplementedError

    async def run(self) -> None:
        raise NotImplementedError
