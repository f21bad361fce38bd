"""Where tests make a source's faults happen; without them everything passes at once."""

import asyncio
from collections.abc import Callable

from twopool.kv_transfer.fault_points import FaultPoints
from twopool.protocol.errors import TransferError

Act = Callable[[], None]


class FaultGate:
    """Does things now or, with a fault at their point, later, not at all, or refuses them.

    Things of one ``line`` (a reader's messages) stay in order: what is late holds up what came after it.
    """

    def __init__(self, faults: FaultPoints) -> None:
        self._faults = faults
        self._last: dict[object, asyncio.Task[None]] = {}

    def do(self, act: Act, *, line: object, point: str | None = None, refuse: Act | None = None) -> None:
        if not self._faults.is_active:
            act()
            return
        task = asyncio.create_task(self._later(self._last.get(line), act, point, refuse))
        self._last[line] = task
        task.add_done_callback(lambda done: self._forget(line, done))

    def close(self) -> None:
        for task in list(self._last.values()):
            task.cancel()

    async def _later(
        self, before: "asyncio.Task[None] | None", act: Act, point: str | None, refuse: Act | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            if point is None or await self._faults.reached(point):
                act()
        except TransferError:
            if refuse is not None:
                refuse()

    def _forget(self, line: object, done: "asyncio.Task[None]") -> None:
        if self._last.get(line) is done:
            del self._last[line]
        if not done.cancelled():
            done.result()
