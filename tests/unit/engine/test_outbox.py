"""Messages leave in the order they were put, however long one takes to make."""

import asyncio

import msgspec

from twopool.engine.outbox import Outbox
from twopool.protocol.ids import Epoch
from twopool.protocol.messages import Draining


def message(number: int) -> Draining:
    return Draining(Epoch(number))


async def test_order_is_kept() -> None:
    sent: list[msgspec.Struct] = []
    outbox = Outbox(sent.append)
    outbox.put(message(0))
    assert sent == [message(0)], "nothing to wait for"
    slow, fast = asyncio.Event(), asyncio.Event()

    async def make(event: asyncio.Event, number: int) -> msgspec.Struct:
        await event.wait()
        return message(number)

    outbox.put_made(lambda: make(slow, 1))
    outbox.put_made(lambda: make(fast, 2))
    outbox.put(message(3))
    fast.set()
    await asyncio.sleep(0.01)
    assert sent == [message(0)]
    slow.set()
    await asyncio.sleep(0.01)
    assert sent == [message(n) for n in range(4)]
    outbox.put(message(4))
    assert sent[-1] == message(4)


async def test_closed_sends_nothing_more() -> None:
    sent: list[msgspec.Struct] = []
    outbox = Outbox(sent.append)

    async def make() -> msgspec.Struct:
        await asyncio.sleep(0.01)
        return message(1)

    outbox.put_made(make)
    outbox.put(message(2))
    outbox.close()
    await asyncio.sleep(0.05)
    assert sent == []
