"""Node 0's side of a worker on several nodes: it meets the others, then carries its leader's talk to their ranks.

::

    MEETING ──all are there──► RUNNING ──end──► CLOSED
       └──not in time──► CLOSED    └──a node is lost or fails──► on_failure

A thread of its own with an event loop holds the connections, so that they live while the leader loads or computes.
Nodes prove with the cluster's key that they belong to it, as all peers do; libzmq notices a silent one.
"""

import asyncio
import contextlib
import logging
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, TypeVar

import msgspec
import uvloop

from twopool.engine.node_messages import (
    CHANNELS,
    ChannelEnded,
    JoinNode,
    KillRanks,
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
from twopool.engine.nodes import Fact, differences, listed
from twopool.engine.rank_messages import ControlAnswer, MeetingPlace, StepDone
from twopool.engine.rank_pipes import RankPipes
from twopool.engine.rank_processes import RankHandle
from twopool.protocol.codec import Decoder, encode
from twopool.protocol.config import WorkerConfig, ranks_of_node
from twopool.protocol.endpoints import resolved
from twopool.protocol.errors import CollectiveError, ConfigError, ProtocolError, TwopoolError
from twopool.protocol.framing import FrameSocket
from twopool.protocol.ids import WorkerId
from twopool.protocol.security import Security
from twopool.protocol.sockets import Heartbeats, ServerSocket

logger = logging.getLogger(__name__)

NODE_HEARTBEATS: Final = Heartbeats(interval_ms=250, timeout_ms=900)
"""With the time a worker takes to end, under the 2 s in which a lost node has to take it down."""
_WAITING_LOG_S = 10.0
_LAST_WORD_S = 0.3
_CALL_TIMEOUT_S = 10.0

T = TypeVar("T")


class _Phase(Enum):
    MEETING = auto()
    RUNNING = auto()
    OVER = auto()
    """Nobody looks at what becomes of the nodes."""


@dataclass(eq=False)
class _Node:
    """A node that joined. ``peer``: its connection."""

    number: int
    host: str
    peer: bytes
    ranks: "list[RemoteRank]" = field(default_factory=list)


class RemoteRank:
    """A rank's process on another node. A ``RankProcess``."""

    def __init__(self, rank: int, kill: Callable[[], None]) -> None:
        self.rank = rank
        self.pipes: RankPipes | None = None
        self._kill = kill
        self._ended = threading.Event()
        self._status: int | None = None

    def kill(self) -> None:
        self._kill()

    def wait(self, timeout: float | None = None) -> int | None:
        """Its status; ``None`` where its node is gone."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"rank {self.rank}", timeout or 0.0)
        return self._status

    def end(self, status: int | None) -> None:
        if not self._ended.is_set():
            self._status = status
            self._ended.set()


class NodeServer:
    """See the module. In order: ``meet``, ``start_ranks``, ``watch``, ``serves``, ``close``, from any one thread."""

    def __init__(self, config: WorkerConfig, facts: Sequence[Fact]) -> None:
        """Listen. Raises ``ConfigError`` where ``--master-addr`` and ``--master-port`` are not this host's."""
        self._nnodes = config.nnodes
        self._address = f"{config.master_addr}:{config.master_port}"
        self._facts = tuple(facts)
        self._nodes: dict[int, _Node] = {}
        self._ranks: dict[int, RemoteRank] = {}
        self._decoder: Decoder[NodeToLeader] = Decoder(NodeToLeader)
        self._phase = _Phase.MEETING
        self._failure: str | None = None
        self._on_failure: Callable[[str], None] | None = None
        self._on_stop: Callable[[], None] | None = None
        host = resolved(config.master_addr, param="--master-addr")
        self._security = Security(config.cluster_key)
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(host, config.master_port, started), name="nodes", daemon=True
        )
        self._thread.start()
        try:
            started.result(_CALL_TIMEOUT_S)
        except BaseException:
            self._security.close()
            raise

    # --- for the leader's threads

    def meet(self, timeout_s: float) -> None:
        """Wait until every node has joined. Raises ``CollectiveError`` that says who is missing."""
        self._call(self._meet(timeout_s), timeout_s + _CALL_TIMEOUT_S)

    def start_ranks(self, worker_id: WorkerId, size: int, meeting: MeetingPlace) -> list[RankHandle]:
        """Have the nodes start their ranks; handles in the order of the ranks. Raises ``CollectiveError``."""
        return self._call(self._start_ranks(worker_id, size, meeting), _CALL_TIMEOUT_S)

    def watch(self, on_failure: Callable[[str], None], on_stop: Callable[[], None]) -> None:
        """From now on tell, on this server's thread, when a node is lost and when one was told to stop."""

        def register() -> None:
            self._on_failure, self._on_stop = on_failure, on_stop
            if self._failure is not None:
                on_failure(self._failure)

        self._loop.call_soon_threadsafe(register)

    def serves(self) -> None:
        """Tell the nodes that the worker is up."""
        self._tell(WorkerServes())

    def end(self, reason: str | None) -> None:
        """Tell the nodes that the worker ends; what becomes of them is not looked at any more."""

        def tell() -> None:
            self._phase = _Phase.OVER
            self._send_all(WorkerEnds(reason=reason))

        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(tell)

    def close(self, reason: str | None) -> None:
        """Say the last word and let go of all connections. Idempotent."""
        if self._thread.is_alive():
            self.end(reason)
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_CALL_TIMEOUT_S)

    # --- the thread

    def _run(self, host: str, port: int, started: "Future[None]") -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._live(host, port, started))

    async def _live(self, host: str, port: int, started: "Future[None]") -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._changed = asyncio.Event()
        try:
            self._socket = ServerSocket(
                security=self._security,
                host=host,
                port=port,
                on_message=self._on_payload,
                on_lost=self._on_lost,
                port_flag="--master-port",
                heartbeats=NODE_HEARTBEATS,
            )
        except ConfigError as error:
            started.set_exception(error)
            return
        started.set_result(None)
        await self._closing.wait()
        # What is sent right before a socket closes may be lost, whatever its linger: who has read it hangs up.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                while self._nodes:
                    self._changed.clear()
                    await self._changed.wait()
        for rank in self._ranks.values():
            if rank.pipes is not None:
                rank.pipes.close()
            rank.end(None)
        self._socket.close()
        self._security.close()

    async def _meet(self, timeout_s: float) -> None:
        deadline_s = self._loop.time() + timeout_s
        logged_s = self._loop.time() + 1.0  # as a rule they come together
        while missing := self._missing():
            now_s = self._loop.time()
            if now_s > deadline_s:
                there = listed([0, *self._nodes])
                raise CollectiveError(
                    f"--nnodes {self._nnodes}: {listed(missing)} did not come to {self._address} within "
                    f"--node-timeout-s {timeout_s:g}; {there} {'is' if not self._nodes else 'are'} there"
                )
            if now_s >= logged_s:
                logger.info("waiting for %s of %d at %s", listed(missing), self._nnodes, self._address)
                logged_s = now_s + _WAITING_LOG_S
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(deadline_s, logged_s) - now_s + 0.01):
                    await self._changed.wait()
        self._phase = _Phase.RUNNING

    async def _start_ranks(self, worker_id: WorkerId, size: int, meeting: MeetingPlace) -> list[RankHandle]:
        if self._failure is not None:
            raise CollectiveError(self._failure)
        handles = []
        for number, node in sorted(self._nodes.items()):
            self._send(node, StartRanks(worker_id=worker_id, meeting=meeting))
            for rank in ranks_of_node(size, self._nnodes, number):
                handles.append(await self._remote(node, rank))
        return handles

    async def _remote(self, node: _Node, number: int) -> RankHandle:
        pairs = {channel: socket.socketpair() for channel in CHANNELS}
        rank = self._ranks[number] = RemoteRank(number, lambda: self._tell(KillRanks()))
        rank.pipes = RankPipes(
            number, {channel: pair[1] for channel, pair in pairs.items()}, lambda message: self._send(node, message)
        )
        node.ranks.append(rank)
        await rank.pipes.open()
        life, control, steps = (pairs[channel][0] for channel in CHANNELS)
        return RankHandle(
            number,
            rank,
            life,
            FrameSocket(control, ControlAnswer),
            FrameSocket(steps, StepDone),
            where=f" on node {node.number} ({node.host})",
        )

    def _missing(self) -> list[int]:
        return [number for number in range(1, self._nnodes) if number not in self._nodes]

    def _on_payload(self, peer: bytes, payload: bytes) -> None:
        node = next((node for node in self._nodes.values() if node.peer == peer), None)
        try:
            message = self._decoder.decode(payload)
        except ProtocolError as error:
            logger.warning("from a node: %s", error.message)
            if node is None:
                self._refuse(peer, f"node 0 cannot read it, and may be of another version: {error.message}")
            else:
                self._fail(node, f"sent what cannot be read: {error.message}")
            return
        if isinstance(message, JoinNode):
            self._on_join(peer, message)
        elif node is None:
            self._refuse(peer, "it has not joined")
        else:
            self._on_message(node, message)

    def _on_join(self, peer: bytes, message: JoinNode) -> None:
        number = message.node
        taken = self._nodes.get(number)
        if different := differences(number, self._facts, message.facts):
            reason = f"node {number} ({message.host}) does not fit node 0 ({socket.gethostname()}): {different}"
        elif not 0 < number < self._nnodes:
            reason = f"--node-rank {number}: this is --nnodes {self._nnodes}, and node 0 is there"
        elif taken is not None:
            reason = f"--node-rank {number} of {message.host}: node {number} is there already, on {taken.host}"
        elif self._phase is not _Phase.MEETING:
            reason = f"--node-rank {number}: the worker has started without it, and ends"
        else:
            logger.info("node %d of %d is here: %s", number, self._nnodes, message.host)
            self._nodes[number] = _Node(number, message.host, peer)
            self._changed.set()
            return
        logger.warning("refused a node: %s", reason)
        self._refuse(peer, reason)

    def _on_message(self, node: _Node, message: NodeToLeader) -> None:
        match message:
            case RankBytes() | ChannelEnded():
                rank = self._ranks.get(message.rank)
                if rank is None or rank not in node.ranks or rank.pipes is None:
                    self._fail(node, f"speaks for rank {message.rank}, which is not its own")
                elif isinstance(message, RankBytes):
                    rank.pipes.write(message.channel, message.data)
                else:
                    rank.pipes.end(message.channel)
            case RankEnded():
                ended = self._ranks.get(message.rank)
                if ended is not None and ended in node.ranks:
                    ended.end(message.status)
            case StopWorker():
                logger.info("node %d was told to stop", node.number)
                if self._on_stop is not None:
                    self._on_stop()
                else:
                    self._fail(node, "was told to stop")
            case NodeFailed():
                self._fail(node, f"cannot go on: {message.reason}")

    def _on_lost(self, peer: bytes) -> None:
        for number, node in list(self._nodes.items()):
            if node.peer != peer:
                continue
            del self._nodes[number]
            self._changed.set()
            if self._phase is _Phase.MEETING:
                logger.warning("node %d (%s) is gone again", number, node.host)
            else:
                self._fail(node, "is lost: its connection broke")
            for rank in node.ranks:
                rank.end(None)

    def _fail(self, node: _Node, what: str) -> None:
        if self._phase is _Phase.MEETING:
            logger.warning("node %d (%s) %s", node.number, node.host, what)
            self._nodes.pop(node.number, None)
            self._refuse(node.peer, what)
        elif self._phase is _Phase.RUNNING and self._failure is None:
            self._failure = f"node {node.number} of {self._nnodes} ({node.host}) {what}"
            if self._on_failure is not None:
                self._on_failure(self._failure)

    def _refuse(self, peer: bytes, reason: str) -> None:
        self._socket.send(peer, encode(NodeRefused(reason=reason[:8192])))

    def _send(self, node: _Node, message: msgspec.Struct) -> None:
        if not self._socket.send(node.peer, encode(message)):
            self._fail(node, "takes no more messages")

    def _send_all(self, message: msgspec.Struct) -> None:
        for node in list(self._nodes.values()):
            self._send(node, message)

    def _tell(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(self._send_all, message)

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)
        except TimeoutError:
            raise TwopoolError(f"the connections to the nodes did not answer within {timeout_s:g} s") from None
