"""A streamed answer: server-sent events written straight to the client's transport.

No task and no queue wakes up for a token. Tokens mark their answer in the ``WriteBatcher``; one callback, later in the
same turn of the event loop, lets every marked answer format what it has and write once. Steps that pile up meanwhile
merge into one event a choice.

Before the first token nothing is sent, so an early failure still has its own HTTP status. A failure after that is one
``data: {"error": ...}`` event, then the connection is closed without the end of the chunked body and without
``[DONE]``: no client can take it for a whole answer.
"""

import asyncio

from starlette.types import Receive, Scope, Send

from twopool.protocol.errors import TwopoolError
from twopool.router.detokenizer import TokenTable
from twopool.router.generation import Generation
from twopool.router.http_errors import error_body
from twopool.router.http_protocol import ClientConnection
from twopool.router.responses import DONE_EVENT, AnswerHead, EventWriter, Usage, error_event
from twopool.router.timing_headers import timing_headers
from twopool.router.token_lane import TokenLane, WriteBatcher

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class StreamAnswer:
    """Listens to one ``Generation`` and writes its events. Also the ASGI response that owns the connection meanwhile.

    ``WAITING`` (nothing sent) ``→ OPEN → DONE | BROKEN``.

    Slots, here and in whatever else a token touches: with many streams each is cold in the cache when its turn comes,
    and every object that keeps its fields elsewhere costs a miss more.
    """

    __slots__ = (
        "_batcher",
        "_connection",
        "_continuous_usage",
        "_dirty",
        "_ended",
        "_error",
        "_fingerprint",
        "_generation",
        "_head",
        "_include_timings",
        "_include_usage",
        "_is_chunked",
        "_is_completed",
        "_is_open",
        "_is_over",
        "_is_plain",
        "_lane",
        "_last_bytes_timeout_s",
        "_started",
        "_table",
        "_writer",
        "first",
    )

    def __init__(
        self,
        generation: Generation,
        head: AnswerHead,
        table: TokenTable,
        connection: ClientConnection,
        batcher: WriteBatcher,
        *,
        include_usage: bool,
        include_timings: bool,
        continuous_usage: bool,
        last_bytes_timeout_s: float,
    ) -> None:
        loop = batcher.loop
        self._generation = generation
        self._head = head
        self._connection = connection
        self._batcher = batcher
        self._table = table
        self._fingerprint: str | None = None
        self._writer: EventWriter  # from the first token on
        self._include_usage = include_usage
        self._include_timings = include_timings
        self._continuous_usage = continuous_usage
        self._last_bytes_timeout_s = last_bytes_timeout_s
        carries_ids = any(choice.prompt_ids is not None for choice in generation.choices)
        has_parts = any(choice.has_parts for choice in generation.choices)
        is_plain = head.num_top_logprobs is None and not continuous_usage and not carries_ids and not has_parts
        self._is_plain = is_plain and len(generation.choices) == 1
        self._is_over = False
        self._dirty: dict[int, None] = {}
        self._started: set[int] = set()
        self._lane: TokenLane | None = None  # of a plain answer with one choice, once it has its first event
        self._is_chunked = True
        self._is_open = False
        self._error: TwopoolError | None = None
        self._is_completed = False
        self.first: asyncio.Future[None] = loop.create_future()
        """Done with the first token; carries the error of an answer that fails before."""
        self._ended: asyncio.Future[bytes | None] = loop.create_future()
        """The answer's last events, ``None`` when it is broken off."""

    def on_progress(self, index: int) -> None:
        if not self._dirty and self._is_open:
            self._batcher.mark(self)
        self._dirty[index] = None
        if not self._is_open and not self.first.done():
            self.first.set_result(None)

    def lane(self) -> TokenLane | None:
        if self._lane is None or self._connection.is_write_paused or self._is_over:
            return None
        return self._lane

    def on_granted(self) -> None:
        """Events that follow a re-pairing with other kinds of workers say so: their fingerprint is of all so far."""
        if self._is_open and self._generation.fingerprint != self._fingerprint:
            self._renew_writer()

    def on_completed(self) -> None:
        self._is_completed = True

    def on_failed(self, error: TwopoolError) -> None:
        if not self.first.done():
            self.first.set_exception(error)
            return
        self._error = error
        if self._is_open:
            self._batcher.mark(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers, own the stream until its end; the generation never outlives this call."""
        try:
            self._connection.watch(self._on_lost)
            self._is_chunked = self._connection.begin_stream()
            self._is_plain = self._is_plain and self._is_chunked  # chunks are all that a lane can write
            self._renew_writer()
            headers = [*_HEADERS, *timing_headers(self._generation.timelines, self._fingerprint, is_whole=False)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self._is_open = True
            self.flush()
            self._generation.first_written()
            last_events = await self._ended
            if last_events is not None:
                await self._finish(last_events, send)
            else:
                await self._connection.close(timeout_s=self._last_bytes_timeout_s)
        finally:
            self._generation.cancel()
            self._connection.unwatch()

    async def _finish(self, last_events: bytes, send: Send) -> None:
        """A reader that stops reading with the end of the answer still in its buffer is not waited for for ever."""
        if not await self._is_drained():
            await self._connection.close(timeout_s=0)
            return
        if not self._is_chunked:
            self._connection.write_chunk(last_events)
            last_events = b""
        await send({"type": "http.response.body", "body": last_events, "more_body": False})
        if not await self._is_drained():
            self._connection.abort()

    async def _is_drained(self) -> bool:
        """Whether the client takes nearly all that was written in time."""
        if not self._connection.is_write_paused:
            return True
        try:
            async with asyncio.timeout(self._last_bytes_timeout_s):
                await self._connection.drained()
        except TimeoutError:
            return False
        return True

    def _on_lost(self) -> None:
        self._generation.cancel()
        self._end(None)

    def _end(self, last_events: bytes | None) -> None:
        self._is_over = True
        if not self._ended.done():
            self._ended.set_result(last_events)

    def flush(self) -> None:
        """Format all that is new and write it at once."""
        if self._is_over:
            return
        connection = self._connection
        if connection.is_behind:
            self._generation.cancel("slow_reader")
            connection.abort()
            self._end(None)
            return
        self._flush_events()

    def _flush_events(self) -> None:
        events: list[bytes] = []
        for index in self._dirty:
            self._add_choice_events(index, events)
        self._dirty.clear()
        if self._error is not None:
            events.append(error_event(error_body(self._error)))
        elif self._is_completed:
            if self._include_usage or self._include_timings:
                usage = self._generation.usage if self._include_usage else None
                timings = self._generation.timings() if self._include_timings else None
                events.append(self._writer.closing(usage, timings))
            events.append(DONE_EVENT)
            self._end(b"".join(events))  # goes out with the end of the body
            return
        if events:
            self._connection.write_chunk(events[0] if len(events) == 1 else b"".join(events))
        if self._error is not None:
            self._end(None)
            return
        choices = self._generation.choices
        if self._is_plain and self._lane is None and self._started and choices[0].finish_reason is None:
            start, end = self._writer.plain_parts(0)
            self._lane = TokenLane(choices[0], self._connection, self._batcher, start, end)
            # In the lane nobody looks at how much the client leaves unread.
            self._connection.on_write_paused = self._lane.hold

    def _renew_writer(self) -> None:
        self._fingerprint = self._generation.fingerprint
        self._writer = EventWriter(
            self._head, self._table, fingerprint=self._fingerprint, usage_field=self._include_usage
        )
        self._lane = None  # it has the start of the events in it; a new one is made with the next event

    def _add_choice_events(self, index: int, events: list[bytes]) -> None:
        choice = self._generation.choices[index]
        usage = self._running_usage()
        prompt_ids = None
        if index not in self._started:
            if self._head.is_chat:
                events.append(self._writer.role(index, usage, None if self._started else choice.prompt_ids))
            else:
                prompt_ids = choice.prompt_ids
            self._started.add(index)
        parts = choice.take_parts() if choice.has_parts else None
        text = choice.take_text()
        entries = choice.take_entries() if self._head.num_top_logprobs is not None else []
        token_ids = choice.take_ids() if choice.prompt_ids is not None else None
        if parts:
            for part in parts:
                events.append(self._writer.part(index, part, entries, token_ids, usage))
                entries, token_ids = [], None
        if text or entries or token_ids or prompt_ids:
            events.append(self._writer.text(index, text, entries, token_ids, usage, prompt_ids))
        if choice.finish_reason is not None:
            events.append(self._writer.finish(index, choice, usage))

    def _running_usage(self) -> Usage | None:
        return self._generation.usage if self._continuous_usage else None
