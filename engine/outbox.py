"""Messages to one reader that must arrive in the order they were given, although some take a thread to make."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

MakeMessage = Callable[[], Awaitable[msgspec.Struct]]


class Outbox:
    """``send`` is called for each message in turn, at once where nothing before it is still being made."""

    def __init__(self, send: Callable[[msgspec.Struct], None]) -> None:
        self._send = send
        self._waiting: list[asyncio.Task[None]] = []

    def put(self, message: msgspec.Struct) -> None:
        if not self._waiting:
            self._send(message)
            return

        async def made() -> msgspec.Struct:
            return message

        self.put_made(made)

    def put_made(self, make: MakeMessage) -> None:
        """A message that ``make`` gives; it is made while those before it are."""
        before = self._waiting[-1] if self._waiting else None
        task = asyncio.create_task(self._make(make, before))
        self._waiting.append(task)
        task.add_done_callback(self._waiting.remove)

    def close(self) -> None:
        """Send nothing more."""
        for task in list(self._waiting):
            task.cancel()

    async def _make(self, make: MakeMessage, before: "asyncio.Task[None] | None") -> None:
        message = await make()
        if before is not None:
            await asyncio.wait([before])
        self._send(message)
