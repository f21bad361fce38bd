"""One HTTP request's prompts on their way through the dispatcher.

``NEW → RUNNING → COMPLETED | FAILED | CANCELLED``: completed when every choice of every prompt has finished, failed by
the first error of any prompt (the others are cancelled), cancelled by the client or the server. The listener hears of
progress while running, then of exactly one ending, except that a cancellation is not reported back to who asked for it.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from twopool.protocol.errors import TwopoolError
from twopool.protocol.ids import ChoiceIndex
from twopool.protocol.messages import TokenDelta
from twopool.router.choice_stream import ChoiceStream
from twopool.router.http_metrics import HttpMetrics, outcome_of
from twopool.router.interface import Dispatcher, RoutedRequest
from twopool.router.prompt_scores import PromptScores
from twopool.router.responses import Usage
from twopool.router.stack import combined
from twopool.router.timings import Arrival, Grant, Timeline
from twopool.router.token_lane import TokenLane

_log = logging.getLogger("twopool.router")

_MAX_GAPS = 64
"""Inter-token gaps kept until they are observed together."""


class GenerationListener(Protocol):
    """Who turns progress into an answer."""

    def on_progress(self, index: int) -> None:
        """Choice ``index`` has new tokens, or has finished."""

    def lane(self) -> TokenLane | None:
        """The short way for the tokens of the only choice, closed, where there is one now."""

    def on_granted(self) -> None:
        """Workers were found for a prompt, or other ones; ``Generation.fingerprint`` may be another now."""

    def on_completed(self) -> None:
        """All choices have finished; follows the last ``on_progress``."""

    def on_failed(self, error: TwopoolError) -> None:
        """There will be no (further) answer."""


class PlannedPrompt(msgspec.Struct, frozen=True):
    """One prompt's request (``None`` when nothing is to be generated) and its choices."""

    request: RoutedRequest | None
    num_prompt_tokens: int
    choices: list[ChoiceStream]


class Generation:
    """All prompts of one HTTP request."""

    def __init__(
        self,
        prompts: list[PlannedPrompt],
        *,
        dispatcher: Dispatcher,
        metrics: HttpMetrics,
        arrival: Arrival,
        http_id: str,
        on_over: Callable[["Generation"], None],
    ) -> None:
        """``http_id`` is what the client calls the request (``http_ids``)."""
        self.choices: list[ChoiceStream] = [choice for prompt in prompts for choice in prompt.choices]
        self._dispatcher = dispatcher
        self._metrics = metrics
        self.arrival = arrival
        self.http_id = http_id
        self._on_over = on_over
        self._prompts = prompts
        # Sinks and listener know this generation too. Both are let go of at its end: a cycle would keep all of the
        # request's objects until the collector comes, and make it come.
        self._sinks: list[_PromptSink] = []
        self._listener: GenerationListener | None = None
        self.timelines: list[Timeline] = []
        """One for each prompt that had something generated."""
        self._num_open = len(self.choices)
        self._num_prompt_tokens = sum(prompt.num_prompt_tokens for prompt in prompts)
        self.num_cached_tokens = 0
        self.is_over = False

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        generated = sum([choice.num_tokens for choice in self.choices])
        return Usage(self._num_prompt_tokens, generated, self.num_cached_tokens)

    @property
    def fingerprint(self) -> str | None:
        """Names what the answer has come from so far; ``None`` where no worker had a part in it."""
        grants = [timeline.last_grant for timeline in self.timelines]
        return combined(frozenset().union(*[grant.fingerprints for grant in grants if grant is not None]))

    def timings(self) -> Any:
        """What an answer says of its time: an object, or a list of them, prompt by prompt."""
        figures = [timeline.to_json() for timeline in self.timelines]
        return figures[0] if len(figures) == 1 else figures

    def first_written(self) -> None:
        """The first tokens there are have just been written to the client."""
        now = time.monotonic()
        for timeline in self.timelines:
            if timeline.first_s is not None and timeline.written_s is None:
                timeline.written_s = now

    def start(self, listener: GenerationListener) -> None:
        """Submit every prompt, or none: raises what the dispatcher raises."""
        self._listener = listener
        self._metrics.in_flight += 1
        first = 0
        try:
            for prompt in self._prompts:
                if prompt.request is not None:
                    sink = _PromptSink(self, listener, prompt.request, prompt.choices, first, prompt.num_prompt_tokens)
                    self._dispatcher.submit(prompt.request, sink)
                    self._sinks.append(sink)
                    self.timelines.append(sink.timeline)
                first += len(prompt.choices)
        except TwopoolError as error:
            self._end(outcome_of(error))
            raise
        self._finish_empty_choices()

    def cancel(self, outcome: str = "cancelled") -> None:
        """Stop everything; the listener is not told. Idempotent."""
        if not self.is_over:
            self._end(outcome)

    def progressed(self, index: int) -> None:
        """A sink's report that choice ``index`` took tokens."""
        listener = self._listener
        if listener is None:
            return
        if self.choices[index].finish_reason is None:
            listener.on_progress(index)
            return
        self._num_open -= 1
        listener.on_progress(index)
        if not self._num_open:
            self._end("completed")
            listener.on_completed()

    def failed(self, error: TwopoolError) -> None:
        """A sink's report that its prompt will get no answer."""
        listener = self._listener
        if listener is None:
            return
        self._end(outcome_of(error))
        listener.on_failed(error)

    def _finish_empty_choices(self) -> None:
        for index, choice in enumerate(self.choices):
            if choice.finish_reason is not None:
                self.progressed(index)

    def _end(self, outcome: str) -> None:
        self.is_over = True
        self._on_over(self)
        metrics = self._metrics
        metrics.in_flight -= 1
        metrics.count_outcome(outcome)
        sinks, self._sinks, self._listener = self._sinks, [], None
        for sink in sinks:
            if outcome != "completed":
                self._dispatcher.cancel(sink.request_id)
            sink.record(metrics, completed=outcome == "completed")
            if _log.isEnabledFor(logging.INFO):
                _log.info(
                    "%s: %d prompt tokens (%d cached), %d generated, first after %.1f ms, %.1f ms in all",
                    outcome,
                    sink.num_prompt_tokens,
                    sink.timeline.num_cached_tokens,
                    sink.num_tokens,
                    (sink.timeline.ttft_s or 0.0) * 1e3,
                    (time.monotonic() - self.arrival.began_s) * 1e3,
                    extra={"request_id": sink.request_id, "http_id": self.http_id},
                )


class _PromptSink:
    """Receives one prompt's tokens; ``first`` is the answer's index of its first choice."""

    __slots__ = (
        "_choices",
        "_first",
        "_gaps_s",
        "_generation",
        "_itl",
        "_lane",
        "_last_s",
        "_listener",
        "_may_have_lane",
        "_on_progress",
        "_prompt_ids",
        "num_prompt_tokens",
        "request_id",
        "timeline",
    )

    def __init__(
        self,
        generation: Generation,
        listener: GenerationListener,
        request: RoutedRequest,
        choices: list[ChoiceStream],
        first: int,
        num_prompt_tokens: int,
    ) -> None:
        self.request_id = request.request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.timeline = Timeline(generation.arrival)
        self._generation = generation
        self._choices = choices
        self._first = first
        self._prompt_ids = request.prompt_ids
        self._last_s: list[float | None] = [None] * len(choices)
        self._listener = listener
        self._may_have_lane = len(generation.choices) == 1 and choices[0].is_plain
        self._lane: TokenLane | None = None
        self._on_progress = listener.on_progress
        self._itl = generation._metrics.itl
        self._gaps_s: list[float] = []

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    def on_tokens(self, delta: TokenDelta) -> None:
        index = delta.choice
        choice = self._choices[index]
        if choice.finish_reason is not None:
            return
        now = time.monotonic()
        last_s = self._last_s[index]
        self._last_s[index] = now
        if last_s is None:
            self._first_of_choice(delta, now)
        else:
            self._gaps_s.append(now - last_s)
            if len(self._gaps_s) >= _MAX_GAPS:
                self._observe_gaps()
        generation = self._generation
        if delta.handover is not None:
            self.timeline.handover = delta.handover
            self.timeline.taken_over_s = now
        if choice.push(delta):
            generation._dispatcher.finish_choice(self.request_id, ChoiceIndex(index))
        if choice.finish_reason is None:
            self._on_progress(self._first + index)
        else:
            self.timeline.last_s = now
            generation.progressed(self._first + index)

    def lane(self) -> TokenLane | None:
        last_s = self._last_s[0]
        lane = self._listener.lane() if self._may_have_lane and last_s is not None else None
        if lane is not None and last_s is not None:
            self._lane = lane
            lane.last_s = last_s
        return lane

    def close_lane(self) -> None:
        lane, self._lane = self._lane, None
        if lane is None:
            return
        num_waiting = lane.close()
        self._last_s[0] = now = time.monotonic() if num_waiting else lane.last_s
        if num_waiting:
            self._gaps_s += [now - lane.last_s, *[0.0] * (num_waiting - 1)]
            self._on_progress(self._first)

    def on_granted(self, grant: Grant) -> None:
        self.timeline.granted(grant)
        self._listener.on_granted()

    def on_error(self, error: TwopoolError) -> None:
        generation = self._generation
        ids = {"request_id": self.request_id, "http_id": generation.http_id}
        _log.warning("request failed: %s", error.message, extra=ids)
        generation.failed(error)

    def record(self, metrics: HttpMetrics, *, completed: bool) -> None:
        """The prompt's observations, once, at its end."""
        self._observe_gaps()
        num_tokens = self.num_tokens
        metrics.generation_tokens += num_tokens
        ttft_s = self.timeline.ttft_s
        if ttft_s is not None:
            metrics.prompt_tokens += self.num_prompt_tokens
            metrics.cached_tokens += self.timeline.num_cached_tokens
            metrics.ttft.observe(ttft_s)
            parts = self.timeline.seconds()
            metrics.observe_phases(parts)
            not_waiting_s = sum(parts.get(name, 0.0) for name in ("receive", "tokenize", "prefill"))
            metrics.queue.observe(max(0.0, ttft_s - not_waiting_s))
        if completed:
            metrics.end_to_end.observe(time.monotonic() - self.timeline.arrival.began_s)
            metrics.prompt_sizes.observe(self.num_prompt_tokens)
            metrics.generation_sizes.observe(num_tokens)

    def _observe_gaps(self) -> None:
        self._itl.observe_all(self._gaps_s)
        self._gaps_s.clear()

    def _first_of_choice(self, delta: TokenDelta, now: float) -> None:
        if self.timeline.first_s is None:
            self.timeline.first_s = now
        if delta.prompt_logprobs is not None:
            scores = PromptScores.of(self._prompt_ids.tolist(), delta.prompt_logprobs)
            for choice in self._choices:
                choice.take_prompt(scores)
        if delta.prefill is not None:
            self.timeline.prefill = delta.prefill
            self._generation.num_cached_tokens += delta.prefill.cached_tokens
