"""The other ranks of a tensor-parallel worker, as its leader sees them: started, watched, ended together.

::

    STARTING ──loaded──► LOADED ──pools──► SERVING ──close──► CLOSED
        └────────────────────┴────────────────┴── a rank ended, is silent or out of step ──► FAILED

The leader is rank 0 and the worker's own process. In FAILED nothing of the worker is of use any more, because the KV of
its ranks is of one piece: every rank is killed and this process ends, within ``EXIT_WITHIN_S`` whatever it is doing. No
rank outlives its leader: the kernel kills it, and the end of the ``life`` connection does where that fails.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from twopool.engine.node_server import NodeServer
from twopool.engine.rank_life import RankWatch
from twopool.engine.rank_messages import (
    AllocatePool,
    ControlAnswer,
    LoadFailed,
    PoolReady,
    ShardLoaded,
    StepCommand,
)
from twopool.engine.rank_processes import RankHandle
from twopool.engine.step import StepPlan
from twopool.kernels.collectives import Collective
from twopool.kv_transfer.group import GroupTransport
from twopool.kv_transfer.interface import KvTransport
from twopool.kv_transfer.rank_messages import KvAnswer
from twopool.protocol.errors import CollectiveError, ConfigError, ModelError, ProtocolError, TwopoolError
from twopool.protocol.framing import FrameConnection, frame
from twopool.protocol.ids import Epoch
from twopool.protocol.processes import describe_exit

logger = logging.getLogger(__name__)

EXIT_WITHIN_S = 0.5
STOP_WITHIN_S = 2.0
STEP_TIMEOUT_S = 60.0
"""How long a rank may take for its part of a step after the leader's own is done."""
LOAD_GRACE_S = 60.0
LOAD_FACTOR = 4.0
"""Ranks load beside the leader: they may take so many times as long as it took, and ``LOAD_GRACE_S``."""


class TpGroup:
    """See the module. In order: ``loaded``, ``allocate``, ``transport``, ``serve`` and steps, ``close``."""

    def __init__(
        self,
        handles: Sequence[RankHandle],
        epoch: Epoch,
        *,
        nodes: NodeServer | None = None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """``nodes``: where some of the ranks are on other nodes."""
        self.epoch = epoch
        self.failure: TwopoolError | None = None
        self.collective: Collective | None = None
        """this process's side, once the ranks have met"""
        self._handles = tuple(handles)
        self._nodes = nodes
        self._exit_process = exit_process
        self._lock = threading.Lock()
        self._is_closing = False
        self._transport: GroupTransport | None = None
        self._on_failure: Callable[[TwopoolError], None] | None = None
        self._on_stop: Callable[[], None] | None = None
        self._started_s = time.monotonic()
        self._num_steps = 0
        self._watch = RankWatch({handle.rank: handle.life for handle in handles}, self._on_end)
        if nodes is not None:
            nodes.watch(self.fail, self._on_node_stop)

    @property
    def size(self) -> int:
        return len(self._handles) + 1

    # --- loading, on the main thread

    def loaded(self, own: ShardLoaded) -> int:
        """Wait until every rank has loaded; the blocks that all of them can have.

        Raises what a rank could not do as ``ConfigError`` or ``ModelError``, ``CollectiveError`` for a lost rank.
        """
        timeout_s = LOAD_GRACE_S + LOAD_FACTOR * (time.monotonic() - self._started_s)
        num_blocks = own.num_blocks
        for handle in self._handles:
            answer = self._answer(handle, timeout_s)
            if not isinstance(answer, ShardLoaded):
                raise CollectiveError(f"{self._name(handle)} answered {type(answer).__name__} while loading")
            for name, ours, theirs in (
                ("weights", own.fingerprint, answer.fingerprint),
                ("kernels", own.kernel_backend, answer.kernel_backend),
            ):
                if ours != theirs:
                    raise ModelError(f"{self._name(handle)} has other {name} than rank 0: {theirs}, not {ours}")
            num_blocks = min(num_blocks, answer.num_blocks)
        return num_blocks

    def allocate(self, num_blocks: int) -> None:
        """Have every rank allocate its pool; ``ports`` are complete then. Raises as ``loaded`` does."""
        command = frame(AllocatePool(num_blocks=num_blocks, epoch=self.epoch))
        for handle in self._handles:
            try:
                handle.control.send(command, timeout_s=STEP_TIMEOUT_S)
            except OSError as error:
                raise self._lost(handle, error) from error
        for handle in self._handles:
            answer = self._answer(handle, LOAD_GRACE_S + LOAD_FACTOR * (time.monotonic() - self._started_s))
            if not isinstance(answer, PoolReady):
                raise CollectiveError(f"{self._name(handle)} answered {type(answer).__name__} to its allocation")
            handle.pools.append(answer.pool)

    # --- serving, on the event loop

    def transport(self, local: KvTransport) -> GroupTransport:
        """The transport of the whole worker, around this process's."""
        transport = self._transport = GroupTransport(local, self._handles)
        for handle in self._handles:
            handle.connection = FrameConnection(
                KvAnswer,
                on_message=partial(transport.on_answer, handle.rank),
                on_lost=partial(self._on_connection_lost, handle),
            )
        return transport

    async def serve(self, on_stop: Callable[[], None]) -> NoReturn:
        """Let the ranks' transports talk on this loop until the group fails, which is raised.

        ``on_stop``: called on the loop when another node was told to stop.
        """
        loop = asyncio.get_running_loop()
        self._on_stop = lambda: _soon(loop, on_stop)
        failed: asyncio.Future[TwopoolError] = loop.create_future()

        def settle(error: TwopoolError) -> None:
            if not failed.done():
                failed.set_result(error)

        def on_failure(error: TwopoolError) -> None:
            _soon(loop, settle, error)

        for handle in self._handles:
            if handle.connection is not None:
                await handle.connection.open(handle.control.socket)
        with self._lock:
            self._on_failure = on_failure
            if self.failure is not None:
                settle(self.failure)
        error = await failed
        if self._transport is not None:
            self._transport.fail(error.message)
        raise error

    def announce(self) -> None:
        """Tell the other nodes that the worker is up."""
        if self._nodes is not None:
            self._nodes.serves()

    # --- steps, on the compute thread

    def begin_step(self, plan: StepPlan) -> None:
        """Tell every rank what to compute. Raises ``CollectiveError`` when one is gone."""
        self._num_steps += 1
        data = frame(StepCommand.of(self._num_steps, plan))
        for handle in self._handles:
            try:
                handle.steps.send(data, timeout_s=STEP_TIMEOUT_S)
            except OSError as error:
                raise self._lost(handle, error) from error

    def end_step(self) -> None:
        """Wait until every rank's part of the step is in its memory. Raises ``CollectiveError``."""
        for handle in self._handles:
            try:
                done = handle.steps.receive(timeout_s=STEP_TIMEOUT_S)
            except (OSError, TwopoolError) as error:
                raise self._lost(handle, error) from error
            if done.error is not None or done.number != self._num_steps:
                raise CollectiveError(
                    f"{self._name(handle)}, step {done.number}: {done.error or 'another was asked for'}"
                )

    # --- ends

    def fail(self, reason: str) -> None:
        """End the worker: from any thread, at any time; only the first call counts."""
        with self._lock:
            if self.failure is not None or self._is_closing:
                return
            self.failure = CollectiveError(reason)
            on_failure = self._on_failure
        logger.error("this worker ends: %s", reason)
        timer = threading.Timer(EXIT_WITHIN_S, self._exit_process, (1,))
        timer.daemon = True
        timer.start()
        if self._nodes is not None:
            self._nodes.end(reason)
        for handle in self._handles:
            with contextlib.suppress(ProcessLookupError):
                handle.process.kill()
        if self.collective is not None:
            self.collective.abort()
        if on_failure is not None:
            on_failure(self.failure)

    def close(self, reason: str | None = None) -> None:
        """End the other ranks, by force if they do not go by themselves. Idempotent; blocks for a moment.

        ``reason``: why a worker that has not failed ends before its time, for its other nodes.
        """
        with self._lock:
            self._is_closing = True
        self._watch.close()
        for handle in self._handles:
            if handle.connection is not None:
                handle.connection.close()
            with contextlib.suppress(OSError):  # lost already
                handle.control.socket.shutdown(socket.SHUT_RDWR)
        deadline_s = time.monotonic() + (STOP_WITHIN_S if self.failure is None else 0.0)
        for handle in self._handles:
            try:
                handle.process.wait(max(deadline_s - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                handle.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # of a node that stands still
                    handle.process.wait(STOP_WITHIN_S)
            handle.close()
        if self._nodes is not None:
            self._nodes.close(reason if self.failure is None else self.failure.message)
        if self.collective is not None:
            self.collective.close()

    # --- private

    def _answer(self, handle: RankHandle, timeout_s: float) -> ControlAnswer:
        try:
            answer = handle.control.receive(timeout_s=timeout_s)
        except (OSError, TwopoolError) as error:
            raise self._lost(handle, error) from error
        if isinstance(answer, LoadFailed):
            raise (ConfigError if answer.is_config else ModelError)(f"{self._name(handle)}: {answer.message}")
        return answer

    def _lost(self, handle: RankHandle, error: Exception) -> TwopoolError:
        """What to raise where a rank's connection ended or stood still."""
        what = "does not answer" if isinstance(error, TimeoutError) else f"is lost ({error})"
        return CollectiveError(f"{self._name(handle)} {what}")

    def _on_connection_lost(self, handle: RankHandle, error: Exception | None) -> None:
        if isinstance(error, ProtocolError):
            self.fail(f"{self._name(handle)}: {error.message}")
        # Else its process is ending: the watch will say how.

    def _on_node_stop(self) -> None:
        if self._on_stop is not None:
            self._on_stop()
        else:
            self.fail("a node was told to stop before the worker was up")

    def _on_end(self, rank: int, silent: bool) -> None:
        handle = self._handles[rank - 1]
        if silent:
            self.fail(f"{self._name(handle)} has not been heard of for too long")
            return
        try:
            status: int | None = handle.process.wait(0.2)
        except subprocess.TimeoutExpired:
            status = None
        self.fail(f"{self._name(handle)} ended with {describe_exit(status)}")

    def _name(self, handle: RankHandle) -> str:
        return f"rank {handle.rank} of {self.size}{handle.where}"


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    """``call`` on ``loop``, from any thread."""
    with contextlib.suppress(RuntimeError):  # a loop that is closed has nobody waiting
        loop.call_soon_threadsafe(call, *arguments)
