"""The two endpoints that generate: prepare, submit, answer, and never outlive the client."""

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from twopool.protocol.config import RouterConfig
from twopool.protocol.errors import TwopoolError
from twopool.router.generation import Generation
from twopool.router.grammar import may_take_long
from twopool.router.http_edge import RequestContext, context_of
from twopool.router.http_errors import ClientLeftError
from twopool.router.http_metrics import HttpMetrics, outcome_of
from twopool.router.http_protocol import ClientConnection, connection_of
from twopool.router.interface import Dispatcher
from twopool.router.model_info import ModelInfo
from twopool.router.preparation import Preparation
from twopool.router.prepared_request import PreparedRequest, RequestLimits, prepare_chat, prepare_completion
from twopool.router.request_body import BodyRoom, RequestBody
from twopool.router.responses import WholeChoice, whole_answer
from twopool.router.schema import B, decode_chat, decode_completion
from twopool.router.stream_answer import StreamAnswer
from twopool.router.timing_headers import timing_headers
from twopool.router.timings import Arrival
from twopool.router.token_lane import WriteBatcher

_INLINE_BODY_BYTES = 16 * 1024
"""Larger bodies, and those with grammars, are prepared in a thread: milliseconds that streams would wait for."""

Decode = Callable[[bytes], B]
Prepare = Callable[[B, ModelInfo, RequestLimits], PreparedRequest]


class GenerateApi:
    """Answers generation requests through one dispatcher."""

    def __init__(
        self,
        config: RouterConfig,
        dispatcher: Dispatcher,
        model: ModelInfo,
        metrics: HttpMetrics,
        body_room: BodyRoom,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._model = model
        self._metrics = metrics
        self._body_room = body_room
        self._preparation = Preparation(config.max_queue)
        self._batcher = WriteBatcher(metrics.itl.observe_all)
        self._open: set[Generation] = set()

    @property
    def max_model_len(self) -> int:
        """The smallest of what the configuration, the workers and the model allow."""
        smallest = self._model.max_model_len
        for limit in (self._config.max_model_len, self._dispatcher.max_model_len):
            if limit is not None and limit < smallest:
                smallest = limit
        return smallest

    async def chat(self, request: Request) -> ASGIApp:
        return await self._answer(request, decode_chat, prepare_chat)

    async def completions(self, request: Request) -> ASGIApp:
        return await self._answer(request, decode_completion, prepare_completion)

    def fail_open(self, error: TwopoolError) -> None:
        """End every open answer with ``error``: the server has waited for them long enough."""
        for generation in list(self._open):
            generation.failed(error)

    async def _answer(self, request: Request, decode: Decode[B], prepare: Prepare[B]) -> ASGIApp:
        try:
            prepared = await self._prepare(request, decode, prepare)
        except ClientLeftError:
            self._metrics.count_outcome("cancelled")
            raise
        except TwopoolError as error:
            self._metrics.count_outcome(outcome_of(error))
            raise
        context = context_of(request.scope)
        generation = Generation(
            prepared.prompts,
            dispatcher=self._dispatcher,
            metrics=self._metrics,
            arrival=Arrival(context.arrived_s, context.received_s, time.monotonic()),
            http_id=context.http_id.decode(),
            on_over=self._open.discard,
        )
        self._open.add(generation)
        connection = connection_of(request.scope)
        if prepared.is_stream:
            return await self._stream(prepared, generation, connection)
        return await self._whole(prepared, generation, connection)

    async def _prepare(self, request: Request, decode: Decode[B], prepare: Prepare[B]) -> PreparedRequest:
        context = context_of(request.scope)
        room = RequestBody(self._body_room)
        try:
            data = await room.read(request)
            context.received_s = time.monotonic()
            limits = self._limits(context)
            if len(data) <= _INLINE_BODY_BYTES:
                body = decode(data)
                if not may_take_long(body):
                    return prepare(body, self._model, limits)
                work = partial(prepare, body, self._model, limits)
            else:
                work = partial(_decode_and_prepare, data, decode, prepare, self._model, limits)
            deadline_s = limits.arrived_s + limits.timeout_s
            return await self._preparation.run(work, connection_of(request.scope), deadline_s)
        finally:
            room.release()

    def _limits(self, context: RequestContext) -> RequestLimits:
        worker_vocab_size = self._dispatcher.vocab_size
        vocab_size = self._model.vocab_size
        return RequestLimits(
            served_names=self._config.served_names,
            max_model_len=self.max_model_len,
            vocab_size=vocab_size if worker_vocab_size is None else min(vocab_size, worker_vocab_size),
            timeout_s=min(self._config.request_timeout_s, context.timeout_s or math.inf),
            arrived_s=context.arrived_s,
            tenant=context.tenant,
            tool_call_parser=self._config.tool_call_parser,
            reasoning_parser=self._config.reasoning_parser,
            wants_timings=context.wants_timings,
        )

    async def _stream(self, prepared: PreparedRequest, generation: Generation, connection: ClientConnection) -> ASGIApp:
        answer = StreamAnswer(
            generation,
            prepared.head,
            self._model.tokenizer.table,
            connection,
            self._batcher,
            include_usage=prepared.include_usage,
            include_timings=prepared.include_timings,
            continuous_usage=prepared.continuous_usage,
            last_bytes_timeout_s=self._config.drain_timeout_s,
        )
        await _run(generation, answer, connection, answer.first)
        return answer

    async def _whole(self, prepared: PreparedRequest, generation: Generation, connection: ClientConnection) -> ASGIApp:
        answer = _WholeAnswer(generation, asyncio.get_running_loop().create_future())
        await _run(generation, answer, connection, answer.done)
        wants_entries = prepared.head.num_top_logprobs is not None
        choices = []
        for index, choice in enumerate(prepared.shown_choices()):
            parts = choice.take_parts() if choice.has_parts else None
            text = choice.take_text()
            entries = choice.take_entries() if wants_entries else []
            choices.append(WholeChoice(index, text, choice, parts, entries))
        timings = generation.timings() if prepared.include_timings else None
        table = self._model.tokenizer.table
        fingerprint = generation.fingerprint
        body = whole_answer(prepared.head, choices, generation.usage, table, fingerprint=fingerprint, timings=timings)
        response = Response(body, media_type="application/json")
        response.raw_headers.extend(timing_headers(generation.timelines, fingerprint, is_whole=True))
        return response


def _decode_and_prepare(
    data: bytes, decode: Decode[B], prepare: Prepare[B], model: ModelInfo, limits: RequestLimits
) -> PreparedRequest:
    return prepare(decode(data), model, limits)


class _WholeAnswer:
    """Waits for a generation's end; the text stays in its choices."""

    def __init__(self, generation: Generation, done: "asyncio.Future[None]") -> None:
        self._generation = generation
        self.done = done

    def on_progress(self, index: int) -> None:
        """Nothing to do before the end."""

    def lane(self) -> None:
        """Nobody looks at the text before the end."""

    def on_granted(self) -> None:
        """Nobody asks by whom before the end."""

    def on_completed(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_failed(self, error: TwopoolError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


async def _run(
    generation: Generation,
    listener: StreamAnswer | _WholeAnswer,
    connection: ClientConnection,
    outcome: "asyncio.Future[None]",
) -> None:
    """Start the generation and wait for ``outcome``; a client that leaves meanwhile cancels it at once."""

    def client_left() -> None:
        generation.cancel()
        if not outcome.done():
            outcome.set_exception(ClientLeftError("the client left"))

    generation.start(listener)
    try:
        connection.watch(client_left)
        await outcome
    except BaseException:
        generation.cancel()
        raise
    finally:
        connection.unwatch()
