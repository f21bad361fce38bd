"""Runs a step's plan on all ranks of a worker, seen from the first."""

from twopool.engine.model_runner import ModelRunner
from twopool.engine.step import StepPlan, StepResult
from twopool.engine.tp_group import TpGroup
from twopool.protocol.errors import CollectiveError


class GroupRunner:
    """``ModelRunner``'s ``run`` and ``warm_up`` for a group: the plan is told once, tokens are drawn here.

    A step that one rank computes and another does not leaves ranks that no longer agree, so any failure of the
    computation is the group's, and the worker's end; one of drawing is the step's alone.
    """

    def __init__(self, runner: ModelRunner, group: TpGroup) -> None:
        self._runner = runner
        self._group = group

    def run(self, plan: StepPlan) -> StepResult:
        """Raises ``CollectiveError`` once the group has failed, and whatever drawing raises."""
        if self._group.failure is not None:
            raise self._group.failure
        try:
            self._group.begin_step(plan)
            logits = self._runner.compute(plan)
        except Exception as error:
            raise self._fail(error) from error
        try:
            return self._runner.draw(plan, logits)
        finally:
            self._end_step()

    def warm_up(self) -> None:
        """See ``ModelRunner.warm_up``; every rank is warm then."""
        self._runner.warm_up(self.run)

    def _end_step(self) -> None:
        try:
            self._group.end_step()
        except CollectiveError as error:
            raise self._fail(error) from error

    def _fail(self, error: Exception) -> CollectiveError:
        self._group.fail(f"a step failed: {error}")
        reason = self._group.failure
        return reason if isinstance(reason, CollectiveError) else CollectiveError(str(error))
