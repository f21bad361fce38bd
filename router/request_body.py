"""Reading a request's body, bounded."""

from starlette.requests import Request

from twopool.protocol.errors import RequestTooLargeError
from twopool.router.http_errors import ClientLeftError


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; raises ``RequestTooLargeError`` before reading more than ``max_bytes``.

    The rest of a body that is too large is discarded as it comes, so that the client reads the answer.
    """
    # As they are: a view of all headers costs more than looking for one.
    length = next((value for name, value in request.scope["headers"] if name == b"content-length"), None)
    if length is not None and int(length) > max_bytes:  # httptools lets only digits through
        raise RequestTooLargeError(f"a request body of {int(length)} bytes exceeds the limit of {max_bytes}")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError("the client left while sending its request")
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise RequestTooLargeError(f"the request body exceeds the limit of {max_bytes} bytes")
        if part:
            parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
