"""The grammars of an engine's requests: between the compile thread, the scheduler and the steps."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

from twopool.engine.grammar import GrammarEngine, MaskRow
from twopool.engine.requests import EngineRequest
from twopool.engine.scheduler import Schedule
from twopool.engine.sequence import RequestState
from twopool.engine.step import StepPlan
from twopool.protocol.errors import InvalidRequestError
from twopool.protocol.messages import ErrorInfo


class Constraints:
    """Without ``grammars`` requests that have one are refused. ``on_settled`` is called on the event loop when a
    request need not be held back any longer: its grammar is compiled, or has an error.
    """

    def __init__(self, grammars: GrammarEngine | None, on_settled: Callable[[RequestState], None]) -> None:
        self._grammars = grammars
        self._on_settled = on_settled

    def check(self, request: EngineRequest) -> None:
        """Raises ``InvalidRequestError``."""
        if request.sampling.grammar is not None and self._grammars is None:
            raise InvalidRequestError("This worker follows no grammars.", param="response_format")

    def expect(self, request: EngineRequest) -> None:
        """Begin to compile the grammar of a request that will come."""
        if request.sampling.grammar is not None and self._grammars is not None:
            self._grammars.prepare(request.sampling.grammar)

    def start(self, state: RequestState) -> None:
        """Hold a request back until its grammar is compiled."""
        if state.sampling.grammar is None or self._grammars is None:
            return
        state.ready = False
        loop = asyncio.get_running_loop()

        def on_ready() -> None:  # on the compile thread, or here and now where the grammar is known
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._settle, state)

        state.grammar = self._grammars.start(state.sampling.grammar, state.stop_ids, on_ready)

    def with_masks(self, schedule: Schedule, plan: StepPlan) -> StepPlan:
        """``plan`` with the masks of its draws, which are filled from now on."""
        if self._grammars is None or all(chunk.sequence.request.grammar is None for chunk in schedule.chunks):
            return plan
        draws = [(chunk.sequence.request, choice) for chunk in schedule.chunks for choice in chunk.draws]
        rows = [
            MaskRow(row, state.grammar, choice, state.outputs[choice].output_ids.copy())
            for row, (state, choice) in enumerate(draws)
            if state.grammar is not None
        ]
        return replace(plan, masks=self._grammars.fill(rows)) if rows else plan

    def close(self) -> None:
        """Stop the threads."""
        if self._grammars is not None:
            self._grammars.close()

    def _settle(self, state: RequestState) -> None:
        state.ready = True
        self._on_settled(state)


def grammar_failure(state: RequestState) -> ErrorInfo | None:
    """Why a request cannot go on within its grammar, if it cannot."""
    if state.grammar is None or state.grammar.error is None:
        return None
    message = f"The output's grammar cannot be followed: {state.grammar.error}"
    return ErrorInfo(kind="invalid_request", message=message, param="response_format")
