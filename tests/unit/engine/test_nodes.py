"""The nodes of a worker without ranks or models: who is let in, what is said of those missing, what is carried."""

import asyncio
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twopool.engine.node_messages import (
    ChannelEnded,
    JoinNode,
    KillRanks,
    LeaderToNode,
    NodeFailed,
    NodeRefused,
    NodeToLeader,
    RankBytes,
    RankEnded,
    StartRanks,
    StopWorker,
    WorkerEnds,
    WorkerServes,
)
from twopool.engine.node_server import NodeServer
from twopool.engine.nodes import Fact, differences, listed, node_facts
from twopool.engine.rank_messages import Rendezvous, StepDone
from twopool.engine.rank_processes import RankHandle
from twopool.protocol.codec import Decoder, encode
from twopool.protocol.config import DecodeConfig, WorkerConfig
from twopool.protocol.errors import CollectiveError, ConfigError
from twopool.protocol.framing import frame
from twopool.protocol.ids import WorkerId
from twopool.protocol.security import Security, generate_cluster_key
from twopool.protocol.sockets import ClientSocket
from twopool_testing.cluster import free_port, wait_for

MEETING = Rendezvous(backend="gloo", host="127.0.0.1", port=1)


def config(**fields: Any) -> WorkerConfig:
    given: dict[str, Any] = {
        "tensor_parallel_size": 3,
        "nnodes": 2,
        "master_port": free_port(),
        "worker_id": "decode-7",
    }
    return DecodeConfig(**(given | fields))


def facts(of: WorkerConfig, **others: str) -> tuple[Fact, ...]:
    return node_facts(of, **({"role": "decode", "model": "abc", "device": "cpu"} | others))  # type: ignore[arg-type]


class FakeNode:
    """A node's end of the connection, on a thread of its own."""

    def __init__(self, of: WorkerConfig, join: JoinNode | None = None, *, within_s: float = 5.0) -> None:
        self.got: list[LeaderToNode] = []
        self.is_lost = threading.Event()
        self._connected = threading.Event()
        self._config = of
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), daemon=True)
        self._thread.start()
        if not self._connected.wait(within_s):
            self.close()
            raise ConnectionError("no connection")
        if join is not None:
            self.send(join)

    @classmethod
    def joining(cls, of: WorkerConfig, node: int = 1, host: str = "b") -> "FakeNode":
        return cls(of, JoinNode(node=node, host=host, facts=facts(of)))

    def send(self, message: NodeToLeader | bytes) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        self._loop.call_soon_threadsafe(self._socket.send, data)

    def wait(self, kind: type[Any]) -> Any:
        wait_for(lambda: any(isinstance(one, kind) for one in self.got), 5, kind.__name__)
        return next(one for one in self.got if isinstance(one, kind))

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        decoder: Decoder[LeaderToNode] = Decoder(LeaderToNode)
        security = Security(self._config.cluster_key)
        self._socket = ClientSocket(
            security=security,
            address=f"tcp://127.0.0.1:{self._config.master_port}",
            on_message=lambda payload: self.got.append(decoder.decode(payload)),
            on_connected=self._connected.set,
            on_lost=self.is_lost.set,
        )
        await self._closing.wait()
        self._socket.close()
        security.close()


class Server:
    """Node 0's end, and what it reports."""

    def __init__(self, of: WorkerConfig) -> None:
        self.failures: list[str] = []
        self.stops: list[str] = []
        self.nodes = NodeServer(of, facts(of))
        self._threads = ThreadPoolExecutor(1)

    def meet(self, timeout_s: float = 5.0) -> Any:
        return self._threads.submit(self.nodes.meet, timeout_s)

    def start(self, size: int = 3) -> list[RankHandle]:
        handles = self.nodes.start_ranks(WorkerId("decode-7"), size, MEETING)
        self.nodes.watch(self.failures.append, lambda: self.stops.append("stop"))
        return handles

    def close(self) -> None:
        self.nodes.close(None)
        self._threads.shutdown()


@pytest.fixture
def clean() -> Iterator[Callable[[Any], Any]]:
    """Closes what it is given, the last first."""
    given: list[Any] = []

    def note(one: Any) -> Any:
        given.append(one)
        return one

    yield note
    for one in reversed(given):
        one.close()


def test_differences_name_both_sides() -> None:
    ours = config(tensor_parallel_size=4, max_num_seqs=8)
    theirs = replace(ours, tensor_parallel_size=2, node_rank=1, num_threads=3, model="elsewhere", worker_id=None)
    assert differences(1, facts(ours), facts(replace(theirs, tensor_parallel_size=4))) is None
    words = differences(1, facts(ours), facts(theirs, model="xyz", role="prefill"))
    assert words is not None
    for part in (
        "--tensor-parallel-size is 2 on node 1, 4 on node 0",
        "model fingerprint is xyz on node 1, abc on node 0",
        "role is prefill on node 1, decode on node 0",
    ):
        assert part in words
    assert "--num-threads" not in words and "--worker-id" not in words
    other_name = differences(1, facts(ours), facts(replace(ours, node_rank=1, worker_id="decode-8")))
    assert other_name == "--worker-id is decode-8 on node 1, decode-7 on node 0"
    older = tuple(fact for fact in facts(ours) if fact.name != "torch")
    assert "torch is unknown on node 1" in (differences(1, facts(ours), older) or "")


def test_nodes_are_listed() -> None:
    assert (listed([2]), listed([1, 3])) == ("node 2", "nodes 1, 3")


def test_those_who_do_not_come_are_named(clean: Callable[[Any], Any]) -> None:
    """Whoever came hears who did not."""
    of = config(tensor_parallel_size=4, nnodes=4)
    server = clean(Server(of))
    node = clean(FakeNode.joining(of, 2))
    wait_for(lambda: 2 in server.nodes._nodes, 5, "the node")
    with pytest.raises(CollectiveError) as late:
        server.meet(0.3).result(5)
    assert "nodes 1, 3 did not come" in late.value.message and "--node-timeout-s 0.3" in late.value.message
    assert "nodes 0, 2 are there" in late.value.message
    server.nodes.close(late.value.message)
    assert node.wait(WorkerEnds).reason == late.value.message


def test_who_does_not_fit_is_refused_and_the_others_go_on(clean: Callable[[Any], Any]) -> None:
    of = config()
    server = clean(Server(of))
    met = server.meet(20)
    wrong = clean(FakeNode.joining(replace(of, max_num_seqs=7, node_rank=1)))
    reason = wrong.wait(NodeRefused).reason
    assert "--max-num-seqs is 7 on node 1, 64 on node 0" in reason and "node 1 (b)" in reason
    outside = clean(FakeNode(of, JoinNode(node=5, host="c", facts=facts(of))))
    assert "--node-rank 5" in outside.wait(NodeRefused).reason
    silent = clean(FakeNode(of))
    silent.send(b"\x01\x02")
    assert "of another version" in silent.wait(NodeRefused).reason
    stranger = clean(FakeNode(of))
    stranger.send(StopWorker())
    assert "has not joined" in stranger.wait(NodeRefused).reason
    assert not met.done()
    clean(FakeNode.joining(of))
    met.result(5)


def test_a_node_is_there_once(clean: Callable[[Any], Any]) -> None:
    of = config(tensor_parallel_size=3, nnodes=3)
    server = clean(Server(of))
    met = server.meet(20)
    first = clean(FakeNode.joining(of, host="here"))
    wait_for(lambda: 1 in server.nodes._nodes, 5, "the node")
    second = clean(FakeNode.joining(of, host="there"))
    assert second.wait(NodeRefused).reason == "--node-rank 1 of there: node 1 is there already, on here"
    # One that goes away again before all are there makes room.
    first.close()
    wait_for(lambda: 1 not in server.nodes._nodes, 5, "the node to go")
    third = clean(FakeNode.joining(of, host="there"))
    clean(FakeNode.joining(of, 2))
    met.result(5)
    late = clean(FakeNode.joining(of, host="late"))
    assert "node 1 is there already, on there" in late.wait(NodeRefused).reason
    assert not any(isinstance(one, NodeRefused) for one in third.got)


def test_the_address_must_be_free(clean: Callable[[Any], Any]) -> None:
    of = config()
    clean(Server(of))
    with pytest.raises(ConfigError, match=f"--master-port {of.master_port}: cannot listen on 127.0.0.1"):
        NodeServer(of, facts(of))
    with pytest.raises(ConfigError, match=r"--master-addr no-such-host\.invalid"):
        NodeServer(replace(of, master_addr="no-such-host.invalid", cluster_key=Path("key")), facts(of))


def test_another_key_is_not_let_in(clean: Callable[[Any], Any], tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        generate_cluster_key(tmp_path / name)
    of = config(cluster_key=tmp_path / "ours")
    server = clean(Server(of))
    met = server.meet(20)
    with pytest.raises(ConnectionError):
        FakeNode(replace(of, cluster_key=tmp_path / "theirs"), within_s=1.0)
    assert not server.nodes._nodes
    clean(FakeNode.joining(of))
    met.result(5)


@pytest.fixture
def running(clean: Callable[[Any], Any]) -> tuple[Server, FakeNode, list[RankHandle]]:
    """Node 0 of two ranks, node 1 of one."""
    of = config()
    server, node = clean(Server(of)), clean(FakeNode.joining(of))
    server.meet().result(5)
    handles = server.start()
    start = node.wait(StartRanks)
    assert (start.worker_id, start.meeting) == ("decode-7", MEETING)
    for handle in handles:
        clean(handle)
    return server, node, handles


Running = tuple[Server, FakeNode, list[RankHandle]]


def test_what_the_leader_and_its_rank_say_is_carried(running: Running) -> None:
    _, node, handles = running
    (handle,) = handles
    assert handle.rank == 2 and handle.where == " on node 1 (b)"
    big = bytes(range(256)) * 8192
    handle.steps.send(big, timeout_s=5)
    wait_for(lambda: sum(len(one.data) for one in node.got if isinstance(one, RankBytes)) == len(big), 5, "all of it")
    parts = [one for one in node.got if isinstance(one, RankBytes)]
    assert b"".join(part.data for part in parts) == big
    assert {(part.rank, part.channel) for part in parts} == {(2, "steps")}
    done = frame(StepDone(4))
    node.send(RankBytes(2, "steps", done[:3]))
    node.send(RankBytes(2, "steps", done[3:]))
    assert handle.steps.receive(timeout_s=5) == StepDone(4)
    node.send(RankBytes(2, "life", b"."))
    handle.life.settimeout(5)
    assert handle.life.recv(10) == b"."


def test_ends_are_carried(running: Running) -> None:
    server, node, (handle,) = running
    handle.control.socket.shutdown(socket.SHUT_RDWR)
    assert node.wait(ChannelEnded) == ChannelEnded(2, "control")
    with pytest.raises(subprocess.TimeoutExpired):
        handle.process.wait(0.01)
    node.send(RankEnded(rank=2, status=-9))
    node.send(ChannelEnded(2, "life"))
    assert handle.process.wait(5) == -9
    handle.life.settimeout(5)
    assert handle.life.recv(10) == b""
    handle.process.kill()
    node.wait(KillRanks)
    server.nodes.serves()
    node.wait(WorkerServes)
    node.send(StopWorker())
    wait_for(lambda: server.stops, 5, "the stop")
    server.nodes.close(None)
    assert node.wait(WorkerEnds).reason is None
    assert not server.failures


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (lambda node: node.close(), "is lost: its connection broke"),
        (lambda node: node.send(NodeFailed(reason="no memory")), "cannot go on: no memory"),
        (lambda node: node.send(RankBytes(1, "life", b".")), "speaks for rank 1, which is not its own"),
        (lambda node: node.send(b"\xc1"), "sent what cannot be read"),
    ],
)
def test_a_node_that_fails_is_reported_once(running: Running, does: Callable[[FakeNode], None], words: str) -> None:
    server, node, (handle,) = running
    does(node)
    wait_for(lambda: server.failures, 5, "the failure")
    assert words in server.failures[0] and "node 1 of 2 (b)" in server.failures[0]
    node.close()
    assert handle.process.wait(5) is None
    assert len(server.failures) == 1


def test_a_failure_before_anybody_watches_is_told_then(clean: Callable[[Any], Any]) -> None:
    of = config()
    server, node = clean(Server(of)), clean(FakeNode.joining(of))
    server.meet().result(5)
    node.close()
    wait_for(lambda: server.nodes._failure, 5, "the failure")
    with pytest.raises(CollectiveError, match="node 1 of 2"):
        server.start()
    server.nodes.watch(server.failures.append, lambda: None)
    wait_for(lambda: server.failures, 5, "the report")
