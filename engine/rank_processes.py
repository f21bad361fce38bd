"""The processes of a worker's ranks: starting those of this host, and what the leader holds of each."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import msgspec

from twopool.engine.rank_messages import ControlAnswer, MeetingPlace, RankSetup, StepDone
from twopool.kv_transfer.rank_messages import KvAnswer
from twopool.protocol.config import WorkerConfig, flags_of
from twopool.protocol.framing import FrameConnection, FrameSocket, frame
from twopool.protocol.messages import RankPool

SEND_TIMEOUT_S: Final = 60.0


class RankProcess(Protocol):
    """A rank's process, here or on another node."""

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit status, None where nobody knows it. Raises ``subprocess.TimeoutExpired``."""
        ...


@dataclass(eq=False)
class RankHandle:
    """One other rank. A ``RankPort``."""

    rank: int
    process: RankProcess
    life: socket.socket
    control: FrameSocket[ControlAnswer]
    steps: FrameSocket[StepDone]
    where: str = ""
    """" on node 1 (its host)", for messages; nothing on this one"""
    pools: list[RankPool] = field(default_factory=list)
    connection: FrameConnection[KvAnswer] | None = None

    @property
    def pool(self) -> RankPool:
        return self.pools[0]

    def send(self, message: msgspec.Struct) -> None:
        if self.connection is not None:
            self.connection.send(message)

    def close(self) -> None:
        for sock in (self.control.socket, self.steps.socket, self.life):
            sock.close()


class LocalRanks:
    """Starts the rank processes of this host. Use it on the main thread: the kernel ties a child to its thread."""

    PROGRAM = (sys.executable, "-P", "-m", "twopool.engine.rank_process")

    @classmethod
    def start(cls, setups: Sequence[RankSetup], *, inherit: Sequence[int] = ()) -> list[RankHandle]:
        """One process a setup, each told its own. ``inherit``: descriptors they need."""
        handles: list[RankHandle] = []
        try:
            for setup in setups:
                handles.append(cls._start_one(setup, inherit))
                handles[-1].control.send(frame(setup), timeout_s=SEND_TIMEOUT_S)
        except BaseException:
            cls.end(handles)
            raise
        return handles

    @staticmethod
    def end(handles: Sequence[RankHandle]) -> None:
        """Kill them, and let go of them."""
        for handle in handles:
            handle.process.kill()
            handle.process.wait()
            handle.close()

    @classmethod
    def _start_one(cls, setup: RankSetup, inherit: Sequence[int]) -> RankHandle:
        ours, theirs = zip(*(socket.socketpair() for _ in range(3)), strict=True)
        fds = [sock.fileno() for sock in theirs]
        try:
            process = subprocess.Popen(
                [*cls.PROGRAM, f"--parent={os.getpid()}", *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is the leader's, for the one line that says it is up
                pass_fds=(*fds, *inherit),
            )
        except BaseException:
            for sock in ours:
                sock.close()
            raise
        finally:
            for sock in theirs:
                sock.close()
        life, control, steps = ours
        return RankHandle(setup.rank, process, life, FrameSocket(control, ControlAnswer), FrameSocket(steps, StepDone))


def rank_setups(
    config: WorkerConfig,
    folder: Path,
    meeting: MeetingPlace,
    cpus: Sequence[tuple[int, ...]],
) -> list[RankSetup]:
    """What each of this node's ranks is told, with its share of the CPUs."""
    given = {name: value for name, value in vars(config).items() if value is not None}  # what no flag can give
    flags = flags_of(type(config), given)
    return [
        RankSetup(
            rank=rank,
            local_rank=local_rank,
            size=config.tensor_parallel_size,
            flags=flags,
            folder=str(folder),
            meeting=meeting,
            cpus=cpus[local_rank],
        )
        for local_rank, rank in enumerate(config.local_ranks)
    ]
