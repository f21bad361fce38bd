"""The id under which a client and this router speak of a request: in both directions ``X-Request-Id``.

It is the client's word, so it is never an id inside; log lines of a request carry both, ``http_id`` and ``request_id``.
"""

import re
from collections.abc import Iterable

from twopool.protocol.ids import new_request_id

HEADER = b"x-request-id"
_CLIENT_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def http_id_of(client_id: bytes | None) -> bytes:
    """The client's own id where it sent a sane one, or a new one."""
    return client_id if client_id is not None and _CLIENT_ID.fullmatch(client_id) else new_request_id().encode()


def client_id_in(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The last one, as everywhere else; names are lower case."""
    found = None
    for name, value in headers:
        if name == HEADER:
            found = value
    return found
