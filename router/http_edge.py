"""The outermost ASGI layer: request ids, API keys, limits, and the one place where an error becomes an answer."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twopool.protocol.errors import InvalidRequestError, TwopoolError
from twopool.router.auth import ApiKeys
from twopool.router.http_errors import error_response
from twopool.router.http_ids import HEADER, http_id_of
from twopool.router.http_protocol import connection_of

_log = logging.getLogger("twopool.router")
_STATE_KEY = "twopool.request"

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs"})
"""Answered without an API key: probes and scrapers have none."""


@dataclass
class RequestContext:
    """What the edge knows of a request. ``http_id``: see ``http_ids``. ``arrived_s`` is when its first byte was read,
    ``received_s`` its last. ``timeout_s`` is the client's own deadline (X-Request-Timeout).
    """

    http_id: bytes
    arrived_s: float
    tenant: bytes
    timeout_s: float | None = None
    wants_timings: bool = False
    received_s: float = 0.0


def context_of(scope: Scope) -> RequestContext:
    context: RequestContext = scope["state"][_STATE_KEY]
    return context


def log_refusal(error: TwopoolError, http_id: bytes) -> None:
    """The one line about a request that ends in ``error`` instead of an answer."""
    _log.info("answered %d: %s", error.http_status, error.message, extra={"http_id": http_id.decode()})


class HttpEdge:
    """Wraps the application. POSTs to the paths of ``hot`` go there directly: most of a router's traffic, and half of
    what a request costs beside its tokenisation is the way through general routing.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, hot: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._hot = hot
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        headers = dict(scope["headers"])
        http_id = connection.http_id = http_id_of(headers.get(HEADER))
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                message["headers"] = [*message.get("headers", ()), (HEADER, http_id)]
            await send(message)

        try:
            tenant = self._admit(scope, headers.get(b"authorization"))
            scope["state"][_STATE_KEY] = RequestContext(
                http_id,
                connection.began_s,
                tenant,
                timeout_s=_timeout_s(headers.get(b"x-request-timeout")),
                wants_timings=headers.get(b"x-timings", b"") in (b"1", b"true"),
            )
            app = self._hot.get(scope["path"], self._app) if scope["method"] == "POST" else self._app
            await app(scope, receive, send_with_id)
        except Exception as error:
            if not isinstance(error, TwopoolError) or is_started:
                # The last resort: a defect must cost one request, with a trace, not the process.
                _log.exception("internal error", extra={"http_id": http_id.decode()})
            if is_started:
                await connection.close(timeout_s=0)
                return
            known = error if isinstance(error, TwopoolError) else TwopoolError("internal server error")
            log_refusal(known, http_id)
            await error_response(known)(scope, receive, send_with_id)
        finally:
            connection.release()

    def _admit(self, scope: Scope, authorization: bytes | None) -> bytes:
        header_error = connection_of(scope).header_error
        if header_error is not None:
            raise header_error
        if scope["path"] in OPEN_PATHS:
            return b""
        return self._keys.tenant(authorization)


def _timeout_s(value: bytes | None) -> float | None:
    """The client's own deadline, in seconds; raises ``InvalidRequestError``."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequestError("X-Request-Timeout: not a positive number of seconds", param="X-Request-Timeout")
    return seconds
