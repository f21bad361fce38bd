"""A dispatcher without workers: it answers with ids a test chose, or holds still until the test moves it."""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from twopool.protocol.errors import TwopoolError
from twopool.protocol.ids import Attempt, ChoiceIndex, RequestId, WorkerId
from twopool.protocol.messages import FinishReason, HandoverReport, PrefillReport, TokenDelta, TokenLogprobs
from twopool.router.interface import RoutedRequest, TokenLane, TokenSink
from twopool.router.registry import Worker

WORKER = cast(Worker, object())
"""Who sends all tokens."""

Script = Callable[[RoutedRequest, int], list[int]]


@dataclass
class FakeRequest:
    """One submitted request; ``send`` and ``fail`` play the workers."""

    routed: RoutedRequest
    sink: TokenSink
    cached_tokens: int = 0
    logprob: float = -0.5
    next_index: dict[int, int] = field(default_factory=dict)
    open_choices: set[int] = field(default_factory=set)
    cancelled: bool = False
    lane: TokenLane | None = None
    handover: HandoverReport | None = None

    def send(
        self,
        choice: int,
        token_ids: list[int],
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> None:
        """The next tokens of ``choice``; a single one goes the short way where there is one, as the dispatcher does."""
        lane = self.lane
        index = self.next_index.get(choice, 0)
        handover = self.handover if index == 1 else None
        if (
            lane is not None
            and handover is None
            and lane.worker is WORKER
            and len(token_ids) == 1
            and finish_reason is None
        ):
            self.next_index[choice] += 1
            lane.output_ids.append(token_ids[0])
            if not lane.is_marked:
                lane.is_marked = True
                lane.mark(lane)
            return
        self.close_lane()
        report = None
        if not self.next_index:
            report = PrefillReport(
                worker_id=WorkerId("p0"), cached_tokens=self.cached_tokens, queue_s=0.0, compute_s=0.0
            )
        self.next_index[choice] = index + len(token_ids)
        wants = self.routed.sampling.logprobs
        logprobs = None if wants is None else tuple(self._logprobs(token_id, wants) for token_id in token_ids)
        if finish_reason is not None:
            self.open_choices.discard(choice)
        self.sink.on_tokens(
            TokenDelta(
                request_id=self.routed.request_id,
                attempt=Attempt(0),
                choice=ChoiceIndex(choice),
                index=index,
                token_ids=tuple(token_ids),
                finish_reason=finish_reason,
                stop_token_id=stop_token_id,
                logprobs=logprobs,
                prefill=report,
                handover=handover,
            )
        )

        lane = self.sink.lane() if finish_reason is None else None
        if lane is not None:
            lane.open(WORKER, Attempt(0), array("i", [0] * self.next_index[choice]))
            self.lane = lane

    def close_lane(self) -> None:
        if self.lane is not None:
            self.lane = None
            self.sink.close_lane()

    def fail(self, error: TwopoolError) -> None:
        self.close_lane()
        self.open_choices.clear()
        self.sink.on_error(error)

    def _logprobs(self, token_id: int, count: int) -> TokenLogprobs:
        tops = [token_id, *(other for other in range(5, 5 + count) if other != token_id)][:count]
        return TokenLogprobs(self.logprob, tuple(tops), tuple(-0.5 - rank for rank in range(len(tops))))


class FakeDispatcher:
    """Plays ``script(request, choice)`` (ids, one a turn of the event loop), or nothing while ``script`` is ``None``.

    Playing stops a choice as an engine would: at an EOS or stop id (which is part of the ids), or at ``max_tokens``.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.requests: list[FakeRequest] = []
        self.by_id: dict[RequestId, FakeRequest] = {}
        self.cancelled: list[RequestId] = []
        self.finished_choices: list[tuple[RequestId, int]] = []
        self.submit_error: TwopoolError | None = None
        self.fail_submit_after = 0
        self.cached_tokens = 0
        self.logprob = -0.5
        self.handover: HandoverReport | None = None
        self.ready = True
        self.step_s = 0.0
        self.max_model_len: int | None = None
        self.vocab_size: int | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, request: RoutedRequest, sink: TokenSink) -> None:
        if self.submit_error is not None and len(self.requests) >= self.fail_submit_after:
            raise self.submit_error
        fake = FakeRequest(
            request,
            sink,
            self.cached_tokens,
            self.logprob,
            open_choices=set(range(request.sampling.n)),
            handover=self.handover,
        )
        self.requests.append(fake)
        self.by_id[request.request_id] = fake
        self._changed.set()
        if self.script is not None:
            task = asyncio.get_running_loop().create_task(self._play(fake, self.script))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)
        self.by_id[request_id].cancelled = True
        self.by_id[request_id].close_lane()
        self._changed.set()

    def finish_choice(self, request_id: RequestId, choice: ChoiceIndex) -> None:
        self.finished_choices.append((request_id, choice))
        self.by_id[request_id].open_choices.discard(choice)

    def is_ready(self) -> bool:
        return self.ready

    def ready_reason(self) -> str:
        return "one pair" if self.ready else "no decode worker has registered"

    def stacks(self) -> dict[str, dict[str, Any]]:
        return {"fp_fake": {"model": "fake"}}

    async def request(self, number: int = 0) -> FakeRequest:
        """The submitted request with this number, once it is there."""
        await self._until(lambda: len(self.requests) > number)
        return self.requests[number]

    async def until_cancelled(self, fake: FakeRequest) -> None:
        await self._until(lambda: fake.cancelled)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def _play(self, fake: FakeRequest, script: Script) -> None:
        sampling = fake.routed.sampling
        ids = [script(fake.routed, choice) for choice in range(sampling.n)]
        position = 0
        while fake.open_choices and not fake.cancelled:
            await asyncio.sleep(self.step_s)
            for choice in sorted(fake.open_choices):
                token_id = ids[choice][position % len(ids[choice])]
                is_stop = token_id in sampling.all_stop_ids and position >= sampling.min_tokens
                reason: FinishReason | None = "length" if position + 1 == sampling.max_tokens else None
                fake.send(choice, [token_id], "stop" if is_stop else reason, token_id if is_stop else None)
                if fake.cancelled:
                    return
            position += 1
