"""The parts of a tensor-parallel worker that need no model: what travels, who is seen to end, whose fault a step is."""

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from twopool.engine.group_runner import GroupRunner
from twopool.engine.model_runner import ModelRunner
from twopool.engine.rank_life import RankWatch, live_with_leader
from twopool.engine.rank_messages import StepCommand
from twopool.engine.step import StepPlan
from twopool.engine.tp_group import TpGroup
from twopool.kernels.sampling import ROW_DTYPE, SamplingBatch
from twopool.protocol.errors import CollectiveError
from twopool.protocol.processes import cpu_shares


def plan(num_sequences: int) -> StepPlan:
    rng = np.random.default_rng(num_sequences)

    def ints(*shape: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return rng.integers(0, 2**31 - 1, shape, dtype=np.int32)

    return StepPlan(
        token_ids=ints(7 * num_sequences),
        query_lens=ints(num_sequences),
        context_lens=ints(num_sequences),
        block_tables=ints(num_sequences, 5),
        copies=ints(num_sequences - 1, 2),
        logit_sequences=ints(num_sequences),
        sampling=SamplingBatch(rows=np.zeros(3, dtype=ROW_DTYPE)),
        draw_logits=ints(3),
        scored_rows=ints(4),
        scored_ids=ints(4),
    )


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_rank_gets_what_computing_needs(num_sequences: int) -> None:
    sent = plan(num_sequences)
    data = msgspec.msgpack.encode(StepCommand.of(9, sent))
    command = msgspec.msgpack.decode(data, type=StepCommand)
    got = command.plan()
    assert command.number == 9
    for name in ("token_ids", "query_lens", "context_lens", "block_tables", "copies", "logit_sequences", "scored_rows"):
        ours, theirs = getattr(sent, name), getattr(got, name)
        assert np.array_equal(ours, theirs) and theirs.dtype == np.int32 and theirs.flags.writeable
    assert len(got.sampling.rows) == len(got.draw_logits) == len(got.scored_ids) == 0


class Ends:
    """Two ranks' life connections under a watch."""

    def __init__(self, silence_s: float) -> None:
        pairs = {rank: socket.socketpair() for rank in (1, 2)}
        self.ours = {rank: pair[0] for rank, pair in pairs.items()}
        self.theirs = {rank: pair[1] for rank, pair in pairs.items()}
        self.seen: list[tuple[int, bool]] = []
        self.watch = RankWatch(self.ours, lambda rank, silent: self.seen.append((rank, silent)), silence_s=silence_s)

    def close(self) -> None:
        self.watch.close()
        for sock in (*self.ours.values(), *self.theirs.values()):
            sock.close()


@pytest.fixture
def ends() -> Any:
    made: list[Ends] = []

    def make(silence_s: float = 60.0) -> Ends:
        made.append(Ends(silence_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_rank_that_ends_is_seen_at_once(ends: Callable[..., Ends]) -> None:
    watched = ends()
    started = time.monotonic()
    watched.theirs[2].close()
    until(lambda: watched.seen)
    assert watched.seen == [(2, False)]
    assert time.monotonic() - started < 1


def test_a_rank_that_says_nothing_is_missed(ends: Callable[..., Ends]) -> None:
    watched = ends(silence_s=1.2)
    live_with_leader(watched.theirs[1], on_end=lambda: None)
    until(lambda: watched.seen)
    assert watched.seen == [(2, True)]


def test_a_watch_that_was_closed_sees_nothing(ends: Callable[..., Ends]) -> None:
    watched = ends()
    watched.watch.close()
    watched.watch.close()
    watched.theirs[1].close()
    time.sleep(0.05)
    assert not watched.seen


def test_a_rank_ends_with_its_leader() -> None:
    ours, theirs = socket.socketpair()
    ended = threading.Event()
    live_with_leader(theirs, ended.set)
    assert ours.recv(1) == b"."
    assert not ended.is_set()
    ours.close()
    assert ended.wait(2)
    theirs.close()


def test_a_leader_that_does_not_listen_harms_nobody() -> None:
    """Stopped for hours, it finds its ranks alive."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            theirs.send(b"." * 1000)
    ended = threading.Event()
    live_with_leader(theirs, ended.set)
    assert not ended.wait(0.7)
    ours.close()
    assert ended.wait(2)
    theirs.close()


class FakeGroup:
    def __init__(self) -> None:
        self.failure: CollectiveError | None = None
        self.log: list[str] = []
        self.ends_with: Exception | None = None

    def begin_step(self, plan: StepPlan) -> None:
        self.log.append("begin")

    def end_step(self) -> None:
        self.log.append("end")
        if self.ends_with is not None:
            raise self.ends_with

    def fail(self, reason: str) -> None:
        self.log.append("fail")
        self.failure = CollectiveError(reason)


class FakeRunner:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.errors: dict[str, Exception] = {}

    def compute(self, plan: StepPlan) -> str:
        return self._do("compute")

    def draw(self, plan: StepPlan, logits: str) -> str:
        assert logits == "compute"
        return self._do("draw")

    def _do(self, what: str) -> str:
        self.log.append(what)
        if what in self.errors:
            raise self.errors[what]
        return what


@pytest.fixture
def scene() -> tuple[FakeGroup, FakeRunner, GroupRunner]:
    group = FakeGroup()
    runner = FakeRunner(group.log)
    return group, runner, GroupRunner(cast(ModelRunner, runner), cast(TpGroup, group))


def test_a_step_of_all_ranks(scene: tuple[FakeGroup, FakeRunner, GroupRunner]) -> None:
    """Tokens are drawn while the other ranks finish."""
    group, _, together = scene
    assert cast(str, together.run(plan(1))) == "draw"
    assert group.log == ["begin", "compute", "draw", "end"]


def test_a_failed_draw_is_the_steps_alone(scene: tuple[FakeGroup, FakeRunner, GroupRunner]) -> None:
    group, runner, together = scene
    runner.errors["draw"] = ValueError("a grammar")
    with pytest.raises(ValueError, match="a grammar"):
        together.run(plan(1))
    assert group.log == ["begin", "compute", "draw", "end"]
    runner.errors.clear()
    together.run(plan(1))


@pytest.mark.parametrize("where", ["compute", "end"])
def test_a_failed_computation_ends_the_group(scene: tuple[FakeGroup, FakeRunner, GroupRunner], where: str) -> None:
    group, runner, together = scene
    if where == "compute":
        runner.errors["compute"] = MemoryError("on one rank")
    else:
        group.ends_with = CollectiveError("on one rank")
    with pytest.raises(CollectiveError, match="a step failed: on one rank"):
        together.run(plan(1))
    assert group.log[-1] == "fail"
    group.log.clear()
    with pytest.raises(CollectiveError):
        together.run(plan(1))
    assert not group.log


def test_cpus_are_shared_out() -> None:
    assert cpu_shares({3, 1, 2, 0, 9}, 2) == [[0, 1], [2, 3]]
    assert cpu_shares({4, 5}, 3) == [[4, 5]] * 3
    assert cpu_shares(os.sched_getaffinity(0), 1) == [sorted(os.sched_getaffinity(0))]
