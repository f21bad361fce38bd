"""Threads for what takes too long on the event loop: large prompts to tokenise, grammars to check.

``WAITING → WORKING → DONE``. A request waits for a thread in a bounded queue, while its client is there and its
deadline has not passed. Work that has begun cannot be stopped: its result is thrown away then, and it keeps its thread
until it ends.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from twopool.protocol.errors import DeadlineError, OverloadedError
from twopool.router.http_errors import ClientLeftError
from twopool.router.http_protocol import ClientConnection
from twopool.router.waiting import retry_after_s

_MAX_THREADS = 8
"""More would only take the event loop's time: most of the work holds the interpreter's lock."""

_Result = TypeVar("_Result")


class Preparation:
    """Use on one event loop."""

    def __init__(self, max_waiting: int, num_threads: int | None = None) -> None:
        num_threads = num_threads or min(_MAX_THREADS, max(2, len(os.sched_getaffinity(0))))
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="prepare")
        self._free = asyncio.Semaphore(num_threads)
        self._waiting: dict[object, float] = {}  # since when, oldest first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def run(self, work: Callable[[], _Result], connection: ClientConnection, deadline_s: float) -> _Result:
        """``work()`` in a thread. Raises what it raises; ``OverloadedError`` at once where too many wait,
        ``ClientLeftError`` and ``DeadlineError`` (a ``time.monotonic()`` stamp) whenever that happens.
        """
        now_s = time.monotonic()
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} requests are waiting to be prepared already; try again later",
                retry_after_s=retry_after_s(now_s - next(iter(self._waiting.values()))),
            )
        task = asyncio.get_running_loop().create_task(self._when_free(work))

        def client_left() -> None:
            task.cancel()

        connection.watch(client_left)
        try:
            async with asyncio.timeout(deadline_s - now_s):
                return await task
        except TimeoutError:
            raise DeadlineError("the request's deadline passed while it was being prepared") from None
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if connection.is_lost and this is not None and not this.cancelling():
                raise ClientLeftError("the client left") from None
            raise
        finally:
            connection.unwatch()

    async def _when_free(self, work: Callable[[], _Result]) -> _Result:
        place = object()
        self._waiting[place] = time.monotonic()
        try:
            await self._free.acquire()
        finally:
            del self._waiting[place]
        loop = asyncio.get_running_loop()

        def is_over(_: "Future[_Result]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._free.release)

        future = self._threads.submit(work)
        future.add_done_callback(is_over)
        return await asyncio.wrap_future(future)
