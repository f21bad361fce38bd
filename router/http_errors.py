"""Errors as the OpenAI API shows them; the one place where they become HTTP."""

import re
from typing import Any

import msgspec
from starlette.responses import Response

from twopool.protocol.errors import InvalidRequestError, RequestTooLargeError, TwopoolError

_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `([^`]+)`")


class HeadersTooLargeError(RequestTooLargeError):
    """Request line and headers exceed their limit."""

    http_status = 431


class MethodNotAllowedError(TwopoolError):
    """The path exists, the method does not."""

    http_status = 405
    error_type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeoutError(TwopoolError):
    """The client took too long to send its request."""

    http_status = 408
    error_type = "invalid_request_error"
    code = "request_timeout"


class ClientLeftError(TwopoolError):
    """The client closed its connection; nobody will read the answer."""

    http_status = 499
    error_type = "client_left"


def error_body(error: TwopoolError) -> bytes:
    """``{"error": {message, type, param, code}}``."""
    detail: dict[str, Any] = {
        "message": error.message,
        "type": error.error_type,
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"error": detail})


def error_headers(error: TwopoolError) -> dict[str, str]:
    """Retry-After where the error knows when to come back, and the scheme a missing key should use."""
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: TwopoolError) -> Response:
    return Response(error_body(error), error.http_status, error_headers(error), media_type="application/json")


def invalid_json_error(error: Exception) -> InvalidRequestError:
    """A body that does not decode; msgspec's ``$.path``, or the field it misses there, becomes the ``param``."""
    message = str(error)
    path = _PATH.search(message)
    missing = _MISSING.match(message)
    if missing is not None:  # of the body itself there is no path
        field = missing[1] if path is None or not path[1] else f"{path[1]}.{missing[1]}"
        return InvalidRequestError(f"{field}: a required field is missing", param=field)
    if path is None:
        return InvalidRequestError(f"the request body is not a valid JSON object: {message}")
    field = re.sub(r"\[\.\.\.\]$", "", path[1])
    reason = message[: path.start()]
    return InvalidRequestError(f"{field}: {reason[:1].lower()}{reason[1:]}", param=field)
