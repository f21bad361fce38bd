"""MessagePack encoding of the typed messages: bounded, validated, no surprises.

Whatever arrives is either one message of the receiver's union or a ``ProtocolError``; decoding never raises anything
else, so a peer's garbage cannot take a connection or a process down.
"""

from typing import Any, Generic, TypeVar

import msgspec

from twopool.protocol.errors import ProtocolError
from twopool.protocol.messages import (
    PeerIdentity,
    ReaderToSource,
    RouterToWorker,
    SourceToReader,
    WorkerToRouter,
)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
M = TypeVar("M")


def encode(message: msgspec.Struct) -> bytes:
    """One message as bytes; raises ``ProtocolError`` when it exceeds ``MAX_MESSAGE_BYTES``."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{type(message).__name__} of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return data


class Decoder(Generic[M]):
    """Decodes the messages of one union."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes) -> M:
        """Raises ``ProtocolError`` for anything that is not exactly one valid message."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(data)
        # ValidationError derives from DecodeError; deep nesting raises RecursionError, bad UTF-8 in a
        # string UnicodeDecodeError (a ValueError), and __post_init__ checks ValueError.
        except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
            raise ProtocolError(f"undecodable message: {error}") from error


def worker_to_router_decoder() -> Decoder[WorkerToRouter]:
    return Decoder(WorkerToRouter)


def router_to_worker_decoder() -> Decoder[RouterToWorker]:
    return Decoder(RouterToWorker)


def reader_to_source_decoder() -> Decoder[ReaderToSource]:
    return Decoder(ReaderToSource)


def source_to_reader_decoder() -> Decoder[SourceToReader]:
    return Decoder(SourceToReader)


def peer_identity_decoder() -> Decoder[PeerIdentity]:
    return Decoder(PeerIdentity)
