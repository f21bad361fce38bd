"""Reading requests' bodies, bounded: each of them, and all that are held at once together."""

from starlette.requests import Request

from twopool.protocol.errors import OverloadedError, RequestTooLargeError
from twopool.router.http_errors import ClientLeftError


class BodyRoom:
    """``max_bytes`` for each body, ``max_total_bytes`` for all that are being read or wait to be worked on."""

    def __init__(self, max_bytes: int, max_total_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self.num_held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises ``OverloadedError``: the others will be done soon."""
        if self.num_held_bytes + num_bytes > self._max_total_bytes:
            raise OverloadedError(f"request bodies of {self.num_held_bytes} bytes are being read; try again later")
        self.num_held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_held_bytes -= num_bytes


class RequestBody:
    """One body and the room it takes, from ``read`` to ``release``."""

    __slots__ = ("_num_bytes", "_room")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._num_bytes = 0

    def release(self) -> None:
        """The body is not needed any more. Idempotent."""
        self._room.give_back(self._num_bytes)
        self._num_bytes = 0

    async def read(self, request: Request) -> bytes:
        """The whole body; raises ``RequestTooLargeError`` before reading more than is allowed, ``OverloadedError``
        where there is no room left.

        The rest of a body that is refused is discarded as it comes, so that the client reads the answer.
        """
        max_bytes = self._room.max_bytes
        # As they are: a view of all headers costs more than looking for one.
        length = next((value for name, value in request.scope["headers"] if name == b"content-length"), None)
        if length is not None and int(length) > max_bytes:  # httptools lets only digits through
            raise RequestTooLargeError(f"a request body of {int(length)} bytes exceeds the limit of {max_bytes}")
        parts: list[bytes] = []
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError("the client left while sending its request")
            part: bytes = message.get("body", b"")
            if part:
                if self._num_bytes + len(part) > max_bytes:
                    raise RequestTooLargeError(f"the request body exceeds the limit of {max_bytes} bytes")
                self._room.take(len(part))
                self._num_bytes += len(part)
                parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)
