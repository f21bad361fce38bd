"""One fetch: what its owner sees on the event loop, and what the reading thread counts."""

import asyncio
from collections.abc import Callable

from twopool.kv_transfer.interface import FetchReport
from twopool.protocol.errors import TransferError, TransferTimeoutError

FetchResult = FetchReport | TransferError


class Fetch:
    """A ``FetchHandle``. Methods are called on the event loop; ``progress`` belongs to the reading thread.

    ``on_abandon`` tells the reading thread that nothing more of the fetch need be posted; ``on_over`` tells the link
    that the result is known.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        on_abandon: Callable[["Fetch"], None],
        on_over: Callable[["Fetch"], None],
    ) -> None:
        self.settled: asyncio.Future[None] = loop.create_future()
        self.progress = FetchProgress()
        self._result: asyncio.Future[FetchResult] = loop.create_future()
        self._timer = loop.call_later(timeout_s, self._expire, timeout_s)
        self._on_abandon = on_abandon
        self._on_over = on_over

    def poll(self) -> bool:
        return self._result.done()

    async def wait(self) -> FetchReport:
        result = await asyncio.shield(self._result)
        if isinstance(result, TransferError):
            raise result
        return result

    def cancel(self) -> None:
        self.fail(TransferError("the fetch was cancelled"))

    def release(self) -> None:
        self.cancel()

    def fail(self, error: TransferError) -> None:
        """End the fetch without its data, unless it is over. The destination settles later."""
        if self._result.done():
            return
        self._resolve(error)
        self.progress.is_abandoned = True
        self._on_abandon(self)

    def complete(self, report: FetchReport) -> None:
        """All bytes have landed, which a cancel or the deadline may have forestalled."""
        if not self._result.done():
            self._resolve(report)

    def settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)

    def _expire(self, timeout_s: float) -> None:
        self.fail(TransferTimeoutError(f"the KV transfer did not finish within {timeout_s:g} s"))

    def _resolve(self, result: FetchResult) -> None:
        self._timer.cancel()
        self._result.set_result(result)
        self._on_over(self)


class FetchProgress:
    """The reading thread's account of a fetch. Both sides set ``is_abandoned``, for good; the rest is the thread's."""

    def __init__(self) -> None:
        self.is_abandoned = False
        self.is_settled = False
        self.num_bytes = 0
        self.num_converted_bytes = 0
        self.num_ranges = 0
        self.num_posts = 0
        self.num_unposted = 0
        self.num_open_posts = 0
        self.started_at: float | None = None
        """``time.perf_counter()`` at the first post."""

    @property
    def is_quiet(self) -> bool:
        """Whether no READ writes the destination now or, the fetch being abandoned, later."""
        return self.num_open_posts == 0 and (self.is_abandoned or self.num_unposted == 0)

    def report(self, now: float) -> FetchReport:
        return FetchReport(
            num_bytes=self.num_bytes,
            num_converted_bytes=self.num_converted_bytes,
            num_ranges=self.num_ranges,
            num_posts=self.num_posts,
            transfer_s=0.0 if self.started_at is None else now - self.started_at,
        )
