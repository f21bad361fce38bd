"""Several router processes behind one HTTP address.

The parent opens the listening socket and forks; each child accepts from it, with a control endpoint of its own that the
workers connect to. Whoever is free takes the next connection. A child that ends is replaced, at the same control port,
unless all are to stop: SIGTERM to one child is how it is renewed, its streams finish while the others take what is
new. SIGTERM to the parent drains all. Should the parent be killed, the children drain by themselves.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from twopool.protocol.config import RouterConfig
from twopool.router.queue_lengths import QueueLength, QueueLengths
from twopool.router.server import listen

logger = logging.getLogger(__name__)

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
_RESTART_PAUSE_S = 1.0


@dataclass(frozen=True)
class Share:
    """What one of several processes is told. ``parent_fd`` reads end of file when the parent is gone."""

    index: int
    count: int
    listener: socket.socket
    folder: Path
    announce_fd: int
    parent_fd: int
    control_port: int
    is_replacement: bool
    queue_length: QueueLength

    def announce(self, line: bytes) -> None:
        """Tell the parent that this process is up."""
        os.write(self.announce_fd, line + b"\n")
        os.close(self.announce_fd)


class Listening(msgspec.Struct):
    """The announcement of a router process."""

    event: str
    role: str
    http: str
    control: str


Serve = Callable[[RouterConfig, Share], int]


def run_processes(config: RouterConfig, serve: Serve) -> int:
    """Fork ``config.router_processes`` children that run ``serve``; returns the exit status when all have ended.

    Must be called before the process starts threads or event loops.
    """
    listener = listen(config)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    with tempfile.TemporaryDirectory(prefix="twopool-router-") as folder:
        parent = _Parent(config, serve, listener, Path(folder))
        try:
            return parent.run()
        finally:
            parent.kill()
            if config.uds is not None:
                config.uds.unlink(missing_ok=True)


class _Parent:
    def __init__(self, config: RouterConfig, serve: Serve, listener: socket.socket, folder: Path) -> None:
        self._config = config
        self._serve = serve
        self._listener = listener
        self._folder = folder
        self._parent_fds = os.pipe()
        self._ports: dict[int, int] = {}
        self._index_of: dict[int, int] = {}
        self._queue_lengths = QueueLengths(config.router_processes)

    def run(self) -> int:
        first: list[Listening] = []
        for index in range(self._config.router_processes):
            listening = self._start(index)
            if listening is None:
                return self._status_of_failed()
            first.append(listening)
        controls = ",".join(listening.control for listening in first)
        line = Listening("listening", "router", first[0].http, controls)
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()
        return self._watch()

    def _status_of_failed(self) -> int:
        """The exit status of the child that did not come up; it has said why."""
        while not (ended := self._reap()):
            time.sleep(0.01)
        return ended[0][1] or 1

    def kill(self) -> None:
        """Nothing of this outlives the parent's ordinary end."""
        for pid in list(self._index_of):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self._index_of.clear()

    def _watch(self) -> int:
        stopping = False
        worst = 0
        while self._index_of:
            if signal.sigwait(_SIGNALS) != signal.SIGCHLD:
                stopping = True
                for pid in self._index_of:
                    os.kill(pid, signal.SIGTERM)
                continue
            for index, status in self._reap():
                if stopping:
                    worst = max(worst, status)
                    continue
                logger.warning("router process %d ended with status %d; starting another", index, status)
                if status != 0:
                    time.sleep(_RESTART_PAUSE_S)
                self._start(index)
        return worst

    def _reap(self) -> list[tuple[int, int]]:
        """Index and exit status of every child that has ended; 128 and the number for one that a signal killed."""
        ended = []
        for pid in list(self._index_of):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                index = self._index_of.pop(pid)
                self._queue_lengths.of(index).set(0)  # what waited there is gone with it
                ended.append((index, code if code >= 0 else 128 - code))
        return ended

    def _start(self, index: int) -> Listening | None:
        """Fork one child and wait until it is up; ``None`` when it ended instead."""
        reading_fd, writing_fd = os.pipe()
        port = self._config.control_port
        share = Share(
            index=index,
            count=self._config.router_processes,
            listener=self._listener,
            folder=self._folder,
            announce_fd=writing_fd,
            parent_fd=self._parent_fds[0],
            control_port=self._ports.get(index, port + index if port else 0),
            is_replacement=index in self._ports,
            queue_length=self._queue_lengths.of(index),
        )
        pid = os.fork()
        if pid == 0:
            self._child(share, reading_fd)
        os.close(writing_fd)
        self._index_of[pid] = index
        with os.fdopen(reading_fd, "rb") as reader:
            line = reader.readline()
        if not line:
            return None
        listening = msgspec.json.decode(line, type=Listening)
        self._ports[index] = int(listening.control.rpartition(":")[2])
        return listening

    def _child(self, share: Share, reading_fd: int) -> None:
        """Never returns."""
        status = 1
        try:
            os.close(reading_fd)
            os.close(self._parent_fds[1])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            status = self._serve(self._config, share)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
