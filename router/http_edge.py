"""The outermost ASGI layer: request ids, API keys, limits, and the one place where an error becomes an answer."""

import logging
import re
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twopool.protocol.errors import TwopoolError
from twopool.protocol.ids import new_request_id
from twopool.router.auth import ApiKeys
from twopool.router.http_errors import error_response
from twopool.router.http_protocol import connection_of

_log = logging.getLogger("twopool.router")
_STATE_KEY = "twopool.request"
_CLIENT_ID = re.compile(rb"[\x21-\x7e]{1,128}")

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
"""Answered without an API key: probes and scrapers have none."""


@dataclass
class RequestContext:
    """What the edge knows of a request. ``http_id`` is the client's own X-Request-Id where it sent a sane one."""

    http_id: bytes
    arrived_s: float
    tenant: bytes


def context_of(scope: Scope) -> RequestContext:
    context: RequestContext = scope["state"][_STATE_KEY]
    return context


class HttpEdge:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = time.monotonic()
        headers = dict(scope["headers"])
        client_id = headers.get(b"x-request-id", b"")
        http_id = client_id if _CLIENT_ID.fullmatch(client_id) else new_request_id().encode()
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", http_id)]
            await send(message)

        try:
            tenant = self._admit(scope, headers.get(b"authorization"))
            scope["state"][_STATE_KEY] = RequestContext(http_id, arrived_s, tenant)
            await self._app(scope, receive, send_with_id)
        except TwopoolError as error:  # from ``_admit``; the application answers its own
            await error_response(error)(scope, receive, send_with_id)
        except Exception:  # the last resort: a defect must cost one request, with a trace, not the process
            _log.exception("internal error", extra={"request_id": http_id.decode()})
            if not is_started:
                await error_response(TwopoolError("internal server error"))(scope, receive, send_with_id)
            else:
                await connection_of(scope).close(timeout_s=0)

    def _admit(self, scope: Scope, authorization: bytes | None) -> bytes:
        header_error = connection_of(scope).header_error
        if header_error is not None:
            raise header_error
        if scope["path"] in OPEN_PATHS:
            return b""
        return self._keys.tenant(authorization)
