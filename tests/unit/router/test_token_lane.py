"""Bytes of a lane reach the client once and in order, whatever its socket takes."""

import asyncio
from array import array
from typing import Any, cast

import pytest

from twopool.protocol.ids import Attempt
from twopool.router.choice_stream import ChoiceStream, TextOptions
from twopool.router.detokenizer import TokenTable
from twopool.router.http_protocol import ClientConnection
from twopool.router.registry import Worker
from twopool.router.token_lane import TokenLane, WriteBatcher
from twopool_testing.tiny_tokenizers import byte_level_tokenizer

TABLE = TokenTable(byte_level_tokenizer())


class FakeConnection:
    """A socket that takes what ``takes`` says, call by call, in front of a transport with a buffer."""

    def __init__(self, takes: list[int | OSError]) -> None:
        self.received = b""
        self.buffered = b""
        self.num_sends = 0
        self._takes = takes

    @property
    def num_buffered_bytes(self) -> int:
        return len(self.buffered)

    def direct_send(self) -> Any:
        return self._send

    def write(self, data: bytes) -> None:
        self.buffered += data

    def drain(self) -> None:
        self.received += self.buffered
        self.buffered = b""

    def _send(self, data: bytes) -> int:
        assert not self.buffered, "sent past bytes that wait"
        self.num_sends += 1
        taken = self._takes.pop(0) if self._takes else len(data)
        if isinstance(taken, OSError):
            raise taken
        self.received += data[:taken]
        return min(taken, len(data))


@pytest.mark.parametrize(
    "takes", [[], [7], [0], [BlockingIOError()], [10**6, BrokenPipeError(), 3], [1, 1, 1, 1, 1, 1]], ids=str
)
@pytest.mark.parametrize("drain_every", [1, 3])
async def test_every_byte_once_and_in_order(takes: list[int | OSError], drain_every: int) -> None:
    connection = FakeConnection(list(takes))
    gaps: list[float] = []
    lane = TokenLane(
        ChoiceStream(TABLE, TextOptions()),
        cast(ClientConnection, connection),
        WriteBatcher(gaps.extend),
        b'data: {"text":"',
        b'"}\n\n',
    )
    output_ids = array("i")
    lane.open(cast(Worker, object()), Attempt(0), output_ids)
    ids = TABLE._tokenizer.encode("the quick brown fox").ids
    for number, token_id in enumerate(ids):
        output_ids.append(token_id)
        lane.mark(lane)
        await asyncio.sleep(0)
        if number % drain_every == 0:
            connection.drain()
    connection.drain()
    expected = b""
    for token_id in ids:
        event = b'data: {"text":"%b"}\n\n' % TABLE.decode([token_id], skip_special_tokens=True).encode()
        expected += b"%x\r\n%b\r\n" % (len(event), event)
    assert connection.received == expected
    assert connection.num_sends > 1  # it goes back to the short way once the transport is empty
