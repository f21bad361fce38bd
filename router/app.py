"""The HTTP application: routes, and the small endpoints that generate nothing."""

import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from twopool.protocol.config import RouterConfig
from twopool.protocol.errors import NotFoundError, TwopoolError, UnavailableError
from twopool.router import openapi, text_api, timing_headers
from twopool.router.auth import ApiKeys
from twopool.router.generate_api import GenerateApi
from twopool.router.http_edge import HttpEdge, context_of, log_refusal
from twopool.router.http_errors import MethodNotAllowedError, error_response
from twopool.router.http_metrics import HttpMetrics
from twopool.router.interface import Dispatcher
from twopool.router.model_info import ModelInfo
from twopool.router.request_body import BodyRoom, RequestBody
from twopool.router.served_names import served_name

_PREFIXES = ("/v1", "")
"""Clients that forget the version find the same endpoints."""


class RouterApp:
    """The ASGI application over one dispatcher and one model."""

    def __init__(
        self,
        config: RouterConfig,
        dispatcher: Dispatcher,
        model: ModelInfo,
        *,
        registry: CollectorRegistry,
        api_keys: ApiKeys,
        metrics_page: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        """``registry`` is what ``/metrics`` shows, unless ``metrics_page`` gives it; this registers the HTTP half's own
        metrics with it.
        """
        self._given_metrics_page = metrics_page
        self.metrics = HttpMetrics()
        registry.register(self.metrics)
        self._config = config
        self._dispatcher = dispatcher
        self._info = model
        self._registry = registry
        self._body_room = BodyRoom(config.max_body_bytes, config.max_pending_body_bytes)
        self._generate = GenerateApi(config, dispatcher, model, self.metrics, self._body_room)
        self._created = int(time.time())
        hot = {}
        for prefix in _PREFIXES:
            hot[f"{prefix}/chat/completions"] = _direct(self._generate.chat)
            hot[f"{prefix}/completions"] = _direct(self._generate.completions)
        self._app: ASGIApp = HttpEdge(self._routes(), api_keys, hot=hot)
        if config.cors_allow_origins:
            self._app = CORSMiddleware(
                self._app,
                allow_origins=config.cors_allow_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "retry-after", *timing_headers.NAMES),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def fail_open(self, error: TwopoolError) -> None:
        """End every open answer with ``error``."""
        self._generate.fail_open(error)

    def _routes(self) -> ASGIApp:
        generate = self._generate
        routes = []
        for prefix in _PREFIXES:
            routes += [
                Route(f"{prefix}/chat/completions", generate.chat, methods=["POST"]),
                Route(f"{prefix}/completions", generate.completions, methods=["POST"]),
                Route(f"{prefix}/models", self._models),
                Route(f"{prefix}/models/{{name:path}}", self._model),
            ]
        for prefix in _PREFIXES:
            routes += [
                Route(f"{prefix}/tokenize", self._tokenize, methods=["POST"]),
                Route(f"{prefix}/detokenize", self._detokenize, methods=["POST"]),
            ]
        routes += [
            Route("/openapi.json", self._openapi),
            Route("/docs", self._docs),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics_page),
            Route("/version", self._version),
        ]
        return Starlette(routes=routes, exception_handlers=_EXCEPTION_HANDLERS)

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card(name) for name in self._config.served_names]})

    async def _model(self, request: Request) -> Response:
        return _json(self._model_card(served_name(request.path_params["name"], self._config.served_names)))

    def _model_card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "twopool",
            "root": self._config.model,
            "parent": None,
            "max_model_len": self._generate.max_model_len,
        }

    async def _tokenize(self, request: Request) -> Response:
        body = RequestBody(self._body_room)
        try:
            data = await body.read(request)
            return _json(
                await text_api.tokenize(data, self._info, self._generate.max_model_len, self._config.served_names)
            )
        finally:
            body.release()

    async def _detokenize(self, request: Request) -> Response:
        body = RequestBody(self._body_room)
        try:
            data = await body.read(request)
            return _json(await text_api.detokenize(data, self._info, self._config.served_names))
        finally:
            body.release()

    async def _openapi(self, request: Request) -> Response:
        return _json(openapi.document())

    async def _docs(self, request: Request) -> Response:
        return Response(openapi.page(), media_type="text/html")

    async def _health(self, request: Request) -> Response:
        """The process answers; whether it can serve is ``/ready``."""
        return _json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        reason = self._dispatcher.ready_reason()
        if not self._dispatcher.is_ready():
            return error_response(UnavailableError(reason))  # an answer to a probe, and no line for each of them
        return _json({"status": "ready", "reason": reason})

    async def _metrics_page(self, request: Request) -> Response:
        given = self._given_metrics_page
        page = generate_latest(self._registry) if given is None else await given()
        return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _version(self, request: Request) -> Response:
        return _json({"version": version("twopool"), "system_fingerprints": self._dispatcher.stacks()})


def _direct(endpoint: Callable[[Request], Awaitable[ASGIApp]]) -> ASGIApp:
    """An endpoint as an application; errors are the edge's to answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answer = await endpoint(Request(scope, receive))
        await answer(scope, receive, send)

    return app


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _twopool_exception(request: Request, error: Exception) -> Response:
    known = error if isinstance(error, TwopoolError) else TwopoolError("internal server error")
    log_refusal(known, context_of(request.scope).http_id)
    return error_response(known)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such path, wrong method) in OpenAI's shape."""
    path = request.url.path[:256]
    if isinstance(error, HTTPException) and error.status_code == 405:
        response = error_response(MethodNotAllowedError(f"{request.method} is not allowed on {path}"))
        response.headers.update(error.headers or {})
        return response
    return error_response(NotFoundError(f"no such path: {path}"))


_EXCEPTION_HANDLERS = {
    TwopoolError: _twopool_exception,
    HTTPException: _http_exception,
    Exception: _twopool_exception,  # Starlette answers with this, then raises on to the edge, which logs the trace
}
