"""One mock prefill and one mock decode worker for the router benchmark, in a process of their own.

They speak the real protocol over real sockets and compute nothing: the prefill worker gives every request its first
token at once, the decode worker one token a step to each. Lines on stdin set the time of a step in milliseconds (0: as
fast as it goes); the end of stdin ends the process.
"""

import argparse
import asyncio
import sys
from collections import defaultdict
from pathlib import Path

import uvloop

from twopool.engine.router_link import RequestMessage, RouterLinks
from twopool.protocol.ids import ChoiceIndex, Epoch, RequestId, RouterId, WorkerId, new_epoch
from twopool.protocol.messages import (
    PROTOCOL_VERSION,
    BlockCounts,
    Busy,
    Cancel,
    CancelChoice,
    Generate,
    HandoverReport,
    Heartbeat,
    PeerInfo,
    PeerRef,
    PrefillReport,
    Register,
    ResendFrom,
    Role,
    TokenDelta,
    Tokens,
    WorkerStats,
)
from twopool.protocol.security import Security
from twopool.scripts.bench_router_control import follow_stdin
from twopool.scripts.bench_router_model import MAX_MODEL_LEN, VOCAB_SIZE, read_answer

_NUM_BLOCKS = 1 << 20
_MAX_SEQS = 4096
_HANDOVER = HandoverReport(num_bytes=1 << 20, num_ranges=8, num_posts=1, transfer_s=0.001, exposed_s=0.0005)


class _Running:
    """One request on the decode worker."""

    def __init__(self, router_id: RouterId, request: Generate) -> None:
        self.router_id = router_id
        self.request = request
        self.choices = [state.choice for state in request.choices]
        self.index = 0


class MockDecode:
    """Runs every request it is given, one token a step; ``max_running`` at once, where it is given."""

    def __init__(self, answer_ids: list[int], prefill: "MockPrefill", max_running: int | None = None) -> None:
        self.step_ms = 0.0
        self.links: RouterLinks | None = None
        self._answer = answer_ids
        self._prefill = prefill
        self._running: dict[RequestId, _Running] = {}
        self._has_work = asyncio.Event()
        self._num_steps = 0
        self._max_running = max_running

    def on_request_message(self, router_id: RouterId, message: RequestMessage) -> None:
        match message:
            case Generate() if self._max_running is not None and len(self._running) >= self._max_running:
                if self.links is not None:
                    worker_id = WorkerId("decode-0")
                    self.links.send(
                        router_id,
                        Busy(request_id=message.request_id, attempt=message.attempt, worker_id=worker_id),
                    )
            case Generate():
                self._prefill.first_token(router_id, message)
                self._running[message.request_id] = _Running(router_id, message)
                self._has_work.set()
            case Cancel():
                self._running.pop(message.request_id, None)
            case CancelChoice():
                running = self._running.get(message.request_id)
                if running is not None and message.choice in running.choices:
                    running.choices.remove(message.choice)
            case ResendFrom():
                raise RuntimeError("the router misses tokens that this process sent")

    def on_peers(self, router_id: RouterId, peers: tuple[PeerInfo, ...]) -> None:
        """Hands are shaken without asking: the heartbeat lists the prefill worker from the start."""

    def on_router_lost(self, router_id: RouterId) -> None:
        """Its requests go with it, and nobody else's."""
        self._running = {
            request_id: running for request_id, running in self._running.items() if running.router_id != router_id
        }

    def stats(self) -> WorkerStats:
        return _stats(num_running=len(self._running), num_steps=self._num_steps)

    async def run(self) -> None:
        """Step for ever; a step that comes late does not shift the ones after it."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._has_work.clear()
            if not self._running:
                await self._has_work.wait()
                due = loop.time()
            due = max(due + self.step_ms / 1e3, loop.time() - 0.1)
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._step()

    def _step(self) -> None:
        self._num_steps += 1
        deltas: dict[RouterId, list[TokenDelta]] = defaultdict(list)
        over: list[RequestId] = []
        for request_id, running in self._running.items():
            out = deltas[running.router_id]
            if running.index == 0:
                out += self._deltas(running, handover=_HANDOVER)
                running.index = 1
            if running.index < running.request.sampling.max_tokens:
                out += self._deltas(running)
                running.index += 1
            if running.index >= running.request.sampling.max_tokens:
                over.append(request_id)
        for request_id in over:
            del self._running[request_id]
        if self.links is not None:
            for router_id, batch in deltas.items():
                self.links.send(router_id, Tokens(tuple(batch)))

    def _deltas(self, running: _Running, handover: HandoverReport | None = None) -> list[TokenDelta]:
        request, index = running.request, running.index
        return [token_delta(request, choice, index, self._answer, handover=handover) for choice in running.choices]


class MockPrefill:
    """Knows every first token already."""

    def __init__(self, answer_ids: list[int]) -> None:
        self.links: RouterLinks | None = None
        self._answer = answer_ids

    def first_token(self, router_id: RouterId, request: Generate) -> None:
        report = PrefillReport(worker_id=WorkerId("prefill-0"), cached_tokens=0, queue_s=0.0, compute_s=0.0)
        if self.links is not None:
            choices = [state.choice for state in request.choices]
            deltas = [token_delta(request, choice, 0, self._answer, prefill=report) for choice in choices]
            self.links.send(router_id, Tokens(tuple(deltas)))

    def on_request_message(self, router_id: RouterId, message: RequestMessage) -> None:
        """A cancelled prefill is over already."""

    def on_peers(self, router_id: RouterId, peers: tuple[PeerInfo, ...]) -> None: ...

    def on_router_lost(self, router_id: RouterId) -> None: ...


def token_delta(
    request: Generate,
    choice: ChoiceIndex,
    index: int,
    answer_ids: list[int],
    *,
    prefill: PrefillReport | None = None,
    handover: HandoverReport | None = None,
) -> TokenDelta:
    """Token ``index`` of the answer that every request gets."""
    return TokenDelta(
        request_id=request.request_id,
        attempt=request.attempt,
        choice=choice,
        index=index,
        token_ids=(answer_ids[index % len(answer_ids)],),
        finish_reason="length" if index + 1 >= request.sampling.max_tokens else None,
        prefill=prefill,
        handover=handover,
    )


def _stats(*, num_running: int = 0, num_steps: int = 0) -> WorkerStats:
    blocks = BlockCounts(free=_NUM_BLOCKS, cached=0, active=0, pinned=0, fetching=0, quarantined=0)
    return WorkerStats(blocks=blocks, num_running=num_running, num_steps=num_steps)


def _registration(role: Role, epoch: Epoch) -> Register:
    return Register(
        protocol_version=PROTOCOL_VERSION,
        worker_id=WorkerId(f"{role}-0"),
        role=role,
        epoch=epoch,
        model="bench",
        compatibility_hash="bench",
        peer_address="tcp://127.0.0.1:1",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=_MAX_SEQS,
        vocab_size=VOCAB_SIZE,
        block_size=16,
        num_blocks=_NUM_BLOCKS,
        tp_size=1,
        dtype="bfloat16",
        kernel_backend="mock",
        local_prefill=False,
    )


async def _serve(routers: tuple[str, ...], answer_ids: list[int], max_running: int | None) -> None:
    security = Security(None)
    epoch = new_epoch()
    prefill = MockPrefill(answer_ids)
    decode = MockDecode(answer_ids, prefill, max_running)
    peers = (PeerRef(WorkerId("prefill-0"), epoch),)
    try:
        prefill.links = RouterLinks(
            routers,
            security=security,
            registration=lambda: _registration("prefill", epoch),
            heartbeat=lambda: Heartbeat(epoch=epoch, stats=_stats()),
            handler=prefill,
            on_drain=lambda: None,
        )
        decode.links = RouterLinks(
            routers,
            security=security,
            registration=lambda: _registration("decode", epoch),
            heartbeat=lambda: Heartbeat(epoch=epoch, stats=decode.stats(), peers=peers),
            handler=decode,
            on_drain=lambda: None,
        )
        work = [asyncio.ensure_future(task) for task in (prefill.links.run(), decode.links.run(), decode.run())]
        await asyncio.wait([*work, asyncio.ensure_future(follow_stdin(decode))], return_when=asyncio.FIRST_COMPLETED)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    finally:
        security.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the benchmark's model")
    parser.add_argument("--router", action="append", required=True, help="control endpoint; once for each router")
    parser.add_argument("--max-running", type=int, help="requests taken at once; more are told that all is full")
    args = parser.parse_args()
    answer_ids, _ = read_answer(args.model)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(tuple(args.router), answer_ids, args.max_running))
    return 0


if __name__ == "__main__":
    sys.exit(main())
