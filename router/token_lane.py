"""The short way of nearly every token: from the control message that brings it to the client's write.

Most streams are of one plain choice: its text, no logprobs, no stop strings, no parts. Once such a stream has its first
event, and while its client keeps up, each token that comes alone takes this way: the intake appends it to the request's
output ids and marks the lane, and the batcher has the lane write. All that is needed for that stands in one object,
because with many streams each is cold in the processor's cache when its turn comes, and every object more costs a miss.

``CLOSED ⇄ OPEN``. The intake opens it after a token that went the long way, and closes it before one that has to.
"""

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any, Protocol

from twopool.protocol.ids import Attempt
from twopool.router.choice_stream import ChoiceStream
from twopool.router.http_protocol import ClientConnection
from twopool.router.registry import Worker

_CHUNK_HEADS = tuple(b"%x\r\n" % size for size in range(2048))
"""What stands before a chunk of so many bytes."""


class Flushable(Protocol):
    """An answer that has something to write."""

    def flush(self) -> None: ...


class WriteBatcher:
    """Flushes every marked answer and lane once, in one callback a turn of the event loop.

    ``on_gaps`` is told the seconds between the tokens that went through lanes.
    """

    def __init__(self, on_gaps: Callable[[list[float]], None]) -> None:
        self._on_gaps = on_gaps
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: list[Flushable] = []
        self._lanes: list[TokenLane] = []

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one that runs; asked for once, because asking costs a system call."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        return loop

    def mark(self, answer: Flushable) -> None:
        if not self._answers and not self._lanes:
            self.loop.call_soon(self._flush_all)
        self._answers.append(answer)

    def mark_lane(self, lane: "TokenLane") -> None:
        if not self._lanes and not self._answers:
            self.loop.call_soon(self._flush_all)
        self._lanes.append(lane)

    def _flush_all(self) -> None:
        lanes, self._lanes = self._lanes, []
        answers, self._answers = self._answers, []
        for answer in answers:
            answer.flush()
        # Afterwards: what an answer has to write came before what is in its lane, which is closed for all that follows.
        if lanes:
            now_s = time.monotonic()
            gaps_s: list[float] = []
            for lane in lanes:
                lane.flush(now_s, gaps_s)
            self._on_gaps(gaps_s)


class TokenLane:
    """``start`` and ``end`` are what stands in an event around the inside of its text's JSON string."""

    __slots__ = (
        "_connection",
        "_end",
        "_is_clean",
        "_is_direct",
        "_jsons",
        "_num_around",
        "_num_opened",
        "_num_written",
        "_send",
        "_start",
        "_stream",
        "_write",
        "attempt",
        "is_marked",
        "last_s",
        "mark",
        "output_ids",
        "worker",
    )

    def __init__(
        self, stream: ChoiceStream, connection: ClientConnection, batcher: WriteBatcher, start: bytes, end: bytes
    ) -> None:
        self.worker: Worker | None = None
        """Whose tokens may come, of which attempt; ``None`` while the lane is closed."""
        self.attempt = Attempt(0)
        self.output_ids: array[int] = array("i")
        """All of the choice's tokens; who brings one appends it, and calls ``mark`` unless ``is_marked``."""
        self.is_marked = False
        self.last_s = 0.0
        """When the last token came."""
        self.mark: Callable[[Any], None] = batcher.mark_lane
        self._stream = stream
        self._jsons = stream.json_table
        self._is_clean = True
        self._connection = connection
        self._write = connection.write
        self._send = connection.direct_send()
        self._is_direct = False  # whether the transport is known to have nothing buffered
        self._start, self._end = start, end + b"\r\n"
        self._num_around = len(start) + len(end)
        self._num_opened = self._num_written = 0

    def open(self, worker: Worker, attempt: Attempt, output_ids: "array[int]") -> None:
        """Take tokens of ``worker`` after those in ``output_ids``."""
        self.worker, self.attempt, self.output_ids = worker, attempt, output_ids
        self._num_opened = self._num_written = len(output_ids)
        self._is_clean = self._stream.is_clean
        self._is_direct = False

    def hold(self) -> None:
        """Tokens go the long way from now on, until the lane is opened again."""
        self.worker = None

    def close(self) -> int:
        """Take no more; what waits goes to the stream. Returns how many tokens did."""
        self.worker = None
        waiting = self.output_ids[self._num_written :]
        self._stream.took_elsewhere(self._num_written - self._num_opened)
        self._stream.push_ids(waiting)
        self.output_ids = array("i")  # the array goes on to grow, and the lane may still be marked
        self._num_opened = self._num_written = 0
        return len(waiting)

    def flush(self, now_s: float, gaps_s: list[float]) -> None:
        """Write what waits; adds how long it was since the last time to ``gaps_s``, once a token."""
        self.is_marked = False
        output_ids = self.output_ids
        num_new = len(output_ids) - self._num_written
        if not num_new:
            return  # the lane was closed meanwhile
        self._num_written += num_new
        gaps_s.append(now_s - self.last_s)
        self.last_s = now_s
        data = self._json_of(output_ids[-1]) if num_new == 1 and self._is_clean else None
        if data is None:
            gaps_s += [0.0] * (num_new - 1)
            data = self._stream.json_of(output_ids[-num_new:])
            self._is_clean = self._stream.is_clean
        if data:
            size = self._num_around + len(data)
            head = _CHUNK_HEADS[size] if size < 2048 else b"%x\r\n" % size
            self._write_chunk(b"".join((head, self._start, data, self._end)))

    def _write_chunk(self, chunk: bytes) -> None:
        """Past the transport while it has nothing buffered."""
        send = self._send
        if send is not None and (self._is_direct or not self._connection.num_buffered_bytes):
            try:
                num_sent = send(chunk)
            except OSError:  # the client's buffer is full; if it is gone, the transport says so
                num_sent = 0
            self._is_direct = num_sent == len(chunk)
            if self._is_direct:
                return
            chunk = chunk[num_sent:]
        self._write(chunk)

    def _json_of(self, token_id: int) -> bytes | None:
        jsons = self._jsons
        return jsons[token_id] if token_id < len(jsons) else None
