"""A node of a worker other than its first: it joins node 0, starts its ranks and carries what the leader says to them.

::

    JOINING ──all are there──► RUNNING ──node 0's last word──► ended
       └──refused, or not in time──┴──node 0 is lost, or a second signal──► ended

It serves nothing itself: no router, no peers, no model. Whatever way it ends, its ranks end first.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import uvloop

from twopool.engine.loading import rank_device
from twopool.engine.node_messages import (
    CHANNELS,
    ChannelEnded,
    JoinNode,
    KillRanks,
    LeaderToNode,
    NodeFailed,
    NodeRefused,
    RankBytes,
    RankEnded,
    StartRanks,
    StopWorker,
    WorkerEnds,
    WorkerServes,
)
from twopool.engine.node_server import NODE_HEARTBEATS
from twopool.engine.nodes import node_facts
from twopool.engine.rank_pipes import RankPipes
from twopool.engine.rank_processes import LocalRanks, RankHandle, rank_setups
from twopool.models.fingerprint import model_fingerprint
from twopool.protocol.codec import Decoder, encode
from twopool.protocol.config import WorkerConfig
from twopool.protocol.endpoints import bracketed, resolved, tcp_address
from twopool.protocol.errors import CollectiveError, ConfigError, ProtocolError, TwopoolError
from twopool.protocol.logs import setup_logging
from twopool.protocol.messages import Role
from twopool.protocol.processes import cpu_shares, describe_exit, leave
from twopool.protocol.security import Security
from twopool.protocol.sockets import ClientSocket

logger = logging.getLogger(__name__)

RETRY_S = 0.5
ANSWER_GRACE_S = 5.0
"""Node 0 keeps to its own limit; past so much more, its answer is not waited for."""
STOP_GRACE_S = 15.0
"""What node 0 may take to end beyond its --drain-timeout-s."""

T = TypeVar("T")


def run_node(config: WorkerConfig, role: Role, folder: Path) -> NoReturn:
    """The whole life of the node in the foreground, on the main thread, and its process's."""
    name = config.worker_id or role
    setup_logging(process=f"{name}.n{config.node_rank}", level=config.log_level, style=config.log_format)
    leave(_live(config, role, folder))


def _live(config: WorkerConfig, role: Role, folder: Path) -> int:
    """The exit status."""
    try:
        rank_device(config.device, len(config.local_ranks) - 1)  # a GPU that is not there is better found now
        device = rank_device(config.device, 0).type
        facts = node_facts(config, role, model=model_fingerprint(folder), device=device)
        security = Security(config.cluster_key)
        try:
            join = JoinNode(node=config.node_rank, host=socket.gethostname(), facts=facts)
            node = _Node(config, role, folder, join, security)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(node.run())
        finally:
            security.close()
    except TwopoolError as error:
        sys.stderr.write(f"twopool: error: {error.message}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


class _Node:
    """See the module. ``run`` is its life on the event loop; it raises what ends it before its time."""

    def __init__(self, config: WorkerConfig, role: Role, folder: Path, join: JoinNode, security: Security) -> None:
        self._config = config
        self._role = role
        self._folder = folder
        self._join_message = join
        self._security = security
        self._decoder: Decoder[LeaderToNode] = Decoder(LeaderToNode)
        self._place = f"{bracketed(config.master_addr)}:{config.master_port}"
        self._socket: ClientSocket | None = None
        self._is_connected = False
        self._is_running = False
        self._num_signals = 0
        self._deadline_s = 0.0
        self._handles: list[RankHandle] = []
        self._pipes: dict[int, RankPipes] = {}

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        try:
            start = await self._join()
            if start is not None:
                await self._start(start)
                await self._over
        finally:
            self._is_running = False
            self._end_ranks()
            if self._socket is not None:
                self._socket.close()
        logger.info("stopped")

    # --- joining

    async def _join(self) -> StartRanks | None:
        """Wait for node 0 and all others; ``None`` when told to stop. Raises ``TwopoolError`` where it cannot be."""
        self._deadline_s = self._loop.time() + self._config.node_timeout_s
        logger.info("joining node 0 at %s", self._place)
        reported = ""
        while True:
            self._answer: asyncio.Future[StartRanks | str] = self._loop.create_future()
            self._is_connected = False
            try:
                self._connect()
            except ConfigError as error:  # a name that is not known yet
                self._answer.set_result(error.message)
            answer = await self._before_deadline(self._answer)
            if not isinstance(answer, str):
                return answer
            if answer != reported:
                logger.warning("not joined yet: %s", answer)
                reported = answer
            await asyncio.sleep(RETRY_S)

    def _connect(self) -> None:
        host = resolved(self._config.master_addr, param="--master-addr")
        self._socket = ClientSocket(
            security=self._security,
            address=tcp_address(host, self._config.master_port),
            on_message=self._on_payload,
            on_connected=self._on_connected,
            on_lost=self._on_lost,
            heartbeats=NODE_HEARTBEATS,
        )

    async def _before_deadline(self, answer: "asyncio.Future[T]") -> T | None:
        while not answer.done() and not self._over.done():
            left_s = self._deadline_s - self._loop.time()
            if left_s <= 0:
                limit = f"within --node-timeout-s {self._config.node_timeout_s:g}"
                if self._is_connected:
                    raise CollectiveError(f"node 0 at {self._place} did not start the worker {limit}")
                raise CollectiveError(
                    f"--node-rank {self._config.node_rank}: there was no node 0 at {self._place} {limit} (that is "
                    "--master-addr and --master-port), or none with the same --cluster-key"
                )
            either: list[asyncio.Future[Any]] = [answer, self._over]
            await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if self._over.done():
            self._over.result()
            return None
        return answer.result()

    def _on_connected(self) -> None:
        self._is_connected = True
        # Node 0 has its own limit, which began before: its answer says who is missing.
        self._deadline_s = self._loop.time() + self._config.node_timeout_s + ANSWER_GRACE_S
        self._send(self._join_message)

    def _on_lost(self) -> None:
        if self._is_running:
            self._end(CollectiveError(f"node 0 at {self._place} is lost: its connection broke"))
            return
        reason = (
            "node 0 went away"
            if self._is_connected
            else "node 0 refuses the connection; is its --cluster-key the same?"
        )
        if self._is_connected:
            self._deadline_s = self._loop.time() + self._config.node_timeout_s
        if not self._answer.done():
            self._answer.set_result(f"{self._place}: {reason}")

    # --- running

    async def _start(self, start: StartRanks) -> None:
        config = replace(self._config, worker_id=start.worker_id)
        cpus = [tuple(share) for share in cpu_shares(os.sched_getaffinity(0), len(config.local_ranks))]
        self._config = config
        self._is_running = True
        try:
            self._handles = LocalRanks.start(rank_setups(config, self._folder, start.meeting, cpus))
        except OSError as error:
            self._send(NodeFailed(reason=f"its ranks cannot be started: {error}"))
            raise CollectiveError(f"the ranks cannot be started: {error}") from error
        ranks = ", ".join(str(handle.rank) for handle in self._handles)
        logger.info("started ranks %s of %d for %s", ranks, config.tensor_parallel_size, start.worker_id)
        for handle in self._handles:
            sockets = dict(zip(CHANNELS, (handle.life, handle.control.socket, handle.steps.socket), strict=True))
            self._pipes[handle.rank] = RankPipes(handle.rank, sockets, self._send)
            threading.Thread(target=self._wait_for_end, args=(handle,), name="rank-end", daemon=True).start()
        for pipes in self._pipes.values():
            await pipes.open()

    def _wait_for_end(self, handle: RankHandle) -> None:
        """On a thread of its own."""
        status = handle.process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends, too
            self._loop.call_soon_threadsafe(self._on_rank_end, handle.rank, status or 0)

    def _on_rank_end(self, rank: int, status: int) -> None:
        if self._is_running:
            logger.info("rank %d ended with %s", rank, describe_exit(status))
            self._send(RankEnded(rank=rank, status=status))

    def _on_payload(self, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
        except ProtocolError as error:
            self._end(CollectiveError(f"node 0 at {self._place} is of another version, it seems: {error.message}"))
            return
        match message:
            case NodeRefused():
                self._end(ConfigError(message.reason))
            case StartRanks():
                if not self._answer.done():
                    self._answer.set_result(message)
            case RankBytes() if message.rank in self._pipes:
                self._pipes[message.rank].write(message.channel, message.data)
            case ChannelEnded() if message.rank in self._pipes:
                self._pipes[message.rank].end(message.channel)
            case KillRanks():
                for handle in self._handles:
                    handle.process.kill()
            case WorkerServes():
                self._announce()
            case WorkerEnds():
                self._end(None if message.reason is None else CollectiveError(f"the worker ended: {message.reason}"))
            case _:
                self._end(CollectiveError(f"node 0 at {self._place} speaks of rank {message.rank}, not here"))

    def _announce(self) -> None:
        """The one line on stdout that says the worker is up."""
        line = {
            "event": "ready",
            "role": self._role,
            "worker_id": self._config.worker_id,
            "node_rank": self._config.node_rank,
        }
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()

    # --- ends

    def _on_signal(self) -> None:
        self._num_signals += 1
        if not self._is_running:
            self._end(None)
        elif self._num_signals > 1:
            self._end(CollectiveError("told to stop a second time"))
        else:
            logger.info("asking node 0 to drain")
            self._send(StopWorker())
            limit_s = self._config.drain_timeout_s + STOP_GRACE_S
            late = CollectiveError(f"node 0 did not end within {limit_s:g} s")
            self._loop.call_later(limit_s, self._end, late)

    def _end(self, error: TwopoolError | None) -> None:
        """Only the first call counts."""
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _end_ranks(self) -> None:
        for handle in self._handles:
            handle.process.kill()
        for handle in self._handles:
            handle.process.wait()
        for pipes in self._pipes.values():
            pipes.close()

    def _send(self, message: msgspec.Struct) -> None:
        if self._socket is not None and not self._socket.closed and not self._socket.send(encode(message)):
            self._end(CollectiveError(f"node 0 at {self._place} takes no more messages"))
