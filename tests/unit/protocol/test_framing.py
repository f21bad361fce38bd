"""Messages between the processes of a worker: whole, bounded, and a lost end is told once."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable

import msgspec
import pytest
import uvloop

from twopool.protocol.codec import MAX_MESSAGE_BYTES
from twopool.protocol.errors import ProtocolError
from twopool.protocol.framing import FrameConnection, FrameSocket, frame


class Small(msgspec.Struct, frozen=True, tag="small"):
    number: int


class Large(msgspec.Struct, frozen=True, tag="large"):
    data: bytes


Message = Small | Large
LARGE = Large(bytes(range(256)) * 8000)


@pytest.fixture
def ends() -> tuple[FrameSocket[Message], FrameSocket[Message]]:
    left, right = socket.socketpair()
    return FrameSocket(left, Message), FrameSocket(right, Message)


def test_blocking_ends_exchange_messages_of_any_size(ends: tuple[FrameSocket[Message], FrameSocket[Message]]) -> None:
    left, right = ends
    sender = threading.Thread(target=left.send, args=(frame(LARGE) + frame(Small(1)),), kwargs={"timeout_s": 10})
    sender.start()
    assert right.receive(timeout_s=10) == LARGE
    assert right.receive(timeout_s=10) == Small(1)
    sender.join()
    with pytest.raises(TimeoutError):
        right.receive(timeout_s=0.01)
    left.close()
    with pytest.raises(ConnectionError):
        right.receive(timeout_s=10)
    right.close()


@pytest.mark.parametrize("data", [struct.pack("<I", MAX_MESSAGE_BYTES + 1), struct.pack("<I", 3) + b"abc"])
def test_nonsense_is_refused(ends: tuple[FrameSocket[Message], FrameSocket[Message]], data: bytes) -> None:
    left, right = ends
    left.socket.sendall(data)
    with pytest.raises(ProtocolError):
        right.receive(timeout_s=10)
    left.close()
    right.close()


class Log:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.losses: list[Exception | None] = []
        self.connection: FrameConnection[Message] = FrameConnection(
            Message, on_message=self.messages.append, on_lost=self.losses.append
        )


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a test's poll
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_loop_ends(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Pieces of frames are put together; the loss of the other end comes after its last words, and once."""

    async def main() -> None:
        left, right = socket.socketpair()
        log = Log()
        await log.connection.open(right)
        data = frame(Small(1)) + frame(LARGE) + frame(Small(2))
        for start in range(0, len(data), 100_003):
            await asyncio.get_running_loop().run_in_executor(None, left.sendall, data[start : start + 100_003])
        await until(lambda: len(log.messages) == 3)
        assert log.messages == [Small(1), LARGE, Small(2)]
        log.connection.send(Small(5))
        other: FrameSocket[Message] = FrameSocket(left, Message)
        assert await asyncio.to_thread(other.receive, timeout_s=10) == Small(5)
        left.sendall(frame(Small(3)))
        left.close()
        await until(lambda: log.losses)
        assert log.messages[3:] == [Small(3)]
        log.connection.send(Small(6))
        log.connection.close()
        await asyncio.sleep(0.01)
        assert log.losses == [None]

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def test_nonsense_ends_a_connection() -> None:
    left, right = socket.socketpair()
    log = Log()
    await log.connection.open(right)
    left.sendall(frame(Small(1)) + struct.pack("<I", 3) + b"abc" + frame(Small(2)))
    await until(lambda: log.losses)
    assert log.messages == [Small(1)]
    assert isinstance(log.losses[0], ProtocolError)
    left.close()


async def test_a_closed_connection_says_nothing() -> None:
    left, right = socket.socketpair()
    log = Log()
    await log.connection.open(right)
    log.connection.send(LARGE)
    log.connection.close()
    other: FrameSocket[Message] = FrameSocket(left, Message)
    assert await asyncio.to_thread(other.receive, timeout_s=10) == LARGE
    left.close()
    await asyncio.sleep(0.01)
    assert log.losses == []
