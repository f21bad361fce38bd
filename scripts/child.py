"""One supervised process: its start, its output, the line it prints when it is up, and its end.

  STARTING → UP → EXITED      (UP: it has printed its announcement; a process may also exit while it starts)

A child prints one JSON line to stdout when it is up. Everything else it writes, on either stream, is log.
"""

import asyncio
import contextlib
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from twopool.protocol.errors import TwopoolError
from twopool.protocol.processes import describe_exit

ERROR_PREFIX = "twopool: error: "

_TAIL_LINES = 20
_MAX_LINE_BYTES = 16 * 1024
_READ_BYTES = 64 * 1024
_OUTPUT_GRACE_S = 1.0

LineSink = Callable[[str, str], None]
"""Takes (child's name, one line of log)."""


class Listening(msgspec.Struct, frozen=True, tag_field="event", tag="listening"):
    """The router's announcement: the addresses it has bound."""

    role: str
    http: str
    control: str


class Ready(msgspec.Struct, frozen=True, tag_field="event", tag="ready"):
    """A worker's announcement: it has registered with the router."""

    role: str
    worker_id: str
    peer_address: str


Announcement = Listening | Ready


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """A process to run: ``name`` is for people, ``argv`` is executed as it is, without a shell.

    ``is_told``: it reads one line from stdin, which ``Child.tell`` gives it.
    """

    name: str
    argv: tuple[str, ...]
    is_told: bool = False


class ChildExitedError(TwopoolError):
    """A child is gone although nobody asked it to stop."""


class Child:
    """A running process and the tasks that read its output. Make one with ``Child.start``, end it with ``exited``."""

    def __init__(self, spec: ChildSpec, process: Process, sink: LineSink) -> None:
        self.spec = spec
        self.announcement: Announcement | None = None
        self._process = process
        self._sink = sink
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._up = asyncio.Event()
        self._life = asyncio.create_task(self._live(), name=f"life of {spec.name}")

    @classmethod
    async def start(cls, spec: ChildSpec, sink: LineSink) -> "Child":
        """Start the process in a process group of its own, so that Ctrl-C reaches the supervisor alone."""
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.argv, stdin=PIPE if spec.is_told else DEVNULL, stdout=PIPE, stderr=PIPE, process_group=0
            )
        except OSError as error:
            raise ChildExitedError(f"{spec.name} cannot be started: {error.strerror}") from error
        return cls(spec, process, sink)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, a negative signal number, or None while the process runs."""
        return self._process.returncode

    def tell(self, line: str) -> None:
        """The line it reads from stdin. A process that is gone is not told."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")  # a pipe takes a line at once
        self._process.stdin.close()

    async def up(self) -> Announcement:
        """The child's announcement, as soon as it is there; raises ``ChildExitedError`` when it exits first."""
        waiting = asyncio.create_task(self._up.wait())
        try:
            await asyncio.wait({waiting, self._life}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self.announcement is None:
            raise self.death()
        return self.announcement

    async def exited(self) -> int:
        """Wait until the process is gone and its output is read; returns ``returncode``."""
        await asyncio.shield(self._life)
        assert self._process.returncode is not None
        return self._process.returncode

    async def watch(self) -> None:
        """Return never; raises ``ChildExitedError`` when the process exits."""
        await self.exited()
        raise self.death()

    def send(self, signal_number: signal.Signals) -> None:
        """Signal the process unless it is gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal_number)

    def death(self) -> ChildExitedError:
        """Why the process ended: the sentence it gave, or its status and the tail of its log."""
        how = describe_exit(self._process.returncode)
        for line in reversed(self._tail):  # libraries may have words of their own after it
            if line.startswith(ERROR_PREFIX):
                return ChildExitedError(f"{self.name}: {line.removeprefix(ERROR_PREFIX)}")
        tail = "".join(f"\n  {line}" for line in self._tail)
        words = f"; the last it said:{tail}" if tail else " without a word"
        return ChildExitedError(f"{self.name} (pid {self.pid}) ended with {how}{words}")

    async def _live(self) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        readers = {
            asyncio.create_task(_read_lines(self._process.stdout, self._on_stdout)),
            asyncio.create_task(_read_lines(self._process.stderr, self._on_stderr)),
        }
        await self._process.wait()
        # Something the child started may hold the pipes open after it.
        _, open_readers = await asyncio.wait(readers, timeout=_OUTPUT_GRACE_S)
        for reader in open_readers:
            reader.cancel()

    def _on_stdout(self, line: str) -> None:
        if self.announcement is None and (announcement := _parse_announcement(line)):
            self.announcement = announcement
            self._up.set()
        else:
            self._on_stderr(line)

    def _on_stderr(self, line: str) -> None:
        if line.strip():
            self._tail.append(line)
        self._sink(self.name, line)


def _parse_announcement(line: str) -> Announcement | None:
    if not line.startswith("{"):
        return None
    try:
        return msgspec.json.decode(line, type=Announcement)
    except msgspec.MsgspecError:
        return None


async def _read_lines(stream: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    """Call ``on_line`` for each line up to the end of ``stream``; overlong lines are cut into several.

    ``StreamReader.readline`` would fail on a line beyond its limit, and the child would then block on a full pipe.
    """
    pending = b""
    while chunk := await stream.read(_READ_BYTES):
        *lines, pending = (pending + chunk).split(b"\n")
        if len(pending) > _MAX_LINE_BYTES:
            lines.append(pending)
            pending = b""
        for line in lines:
            for start in range(0, max(len(line), 1), _MAX_LINE_BYTES):
                on_line(_text(line[start : start + _MAX_LINE_BYTES]))
    if pending:
        on_line(_text(pending))


def _text(line: bytes) -> str:
    """The line as a terminal would show it: of a progress bar's redraws, the last."""
    return line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
