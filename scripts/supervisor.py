"""A set of child processes that live and die together.

Whatever ends the set (a signal, a child's death, a failed start), ``Supervisor.stop`` leaves no process behind: SIGTERM
first, so that each drains, and SIGKILL for those that are not gone in time or when a second signal asks for haste.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from twopool.protocol.processes import describe_exit
from twopool.scripts.child import Child, ChildSpec, LineSink

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILL_GRACE_S = 5.0

StopOrder = Callable[[Sequence[Child]], Sequence[Sequence[Child]]]
"""Sorts the children into groups that are stopped one after the other."""


class StopRequestedError(Exception):
    """A signal asked this process to stop."""


class Supervisor:
    """Owns the children it starts and the process's stop signals.

    Used as an async context manager: inside, SIGINT, SIGTERM and SIGHUP set ``stopping`` (``stop_signal`` raises
    ``StopRequestedError``), and a second one sets ``hurry``.
    """

    def __init__(self, sink: LineSink) -> None:
        self.children: list[Child] = []
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()
        self._sink = sink

    async def __aenter__(self) -> "Supervisor":
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill what is left: ``stop`` has left nothing unless an error came in between."""
        await self._kill([child for child in self.children if child.returncode is None])
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)

    async def start(self, spec: ChildSpec) -> Child:
        child = await Child.start(spec, self._sink)
        self.children.append(child)
        return child

    async def stop_signal(self) -> None:
        """Return never; raises ``StopRequestedError`` when a signal comes."""
        await self.stopping.wait()
        raise StopRequestedError

    async def stop(self, order: StopOrder, limit_s: float) -> list[str]:
        """Stop every child, group by group, each group within ``limit_s``; returns what did not go cleanly, in words.

        A child that a failure has already ended is not reported again.
        """
        unclean: list[str] = []
        for group in order([child for child in self.children if child.returncode is None]):
            for child in group:
                child.send(signal.SIGTERM)
            late = await self._wait_exits(group, limit_s)
            hurried = "was killed: a second signal asked for haste"
            why = hurried if self.hurry.is_set() else f"did not stop within {limit_s:g} s and was killed"
            unclean += [f"{child.name} {why}" for child in late]
            await self._kill(late)
            unclean += [
                f"{child.name} ended with {describe_exit(child.returncode)}"
                for child in group
                if child not in late and not _stopped_cleanly(child)
            ]
        return unclean

    async def _wait_exits(self, children: Sequence[Child], limit_s: float) -> list[Child]:
        """Wait for all exits, for ``limit_s`` or until somebody is in a hurry; returns the children that still run."""
        hurry = asyncio.create_task(self.hurry.wait())
        exits = asyncio.gather(*(child.exited() for child in children), return_exceptions=True)
        either: set[asyncio.Future[Any]] = {hurry, exits}
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        exits.cancel()
        await asyncio.gather(hurry, exits, return_exceptions=True)
        return [child for child in children if child.returncode is None]

    async def _kill(self, children: Sequence[Child]) -> None:
        for child in children:
            child.send(signal.SIGKILL)
        if children:  # bounded: a process in uninterruptible sleep outlives even SIGKILL
            await asyncio.wait([asyncio.create_task(child.exited()) for child in children], timeout=_KILL_GRACE_S)

    def _on_signal(self) -> None:
        if self.stopping.is_set():
            self.hurry.set()
        self.stopping.set()


def _stopped_cleanly(child: Child) -> bool:
    """Exit status 0, or death by our SIGTERM before the child was up, when it has no handler for it yet."""
    return child.returncode == 0 or (child.announcement is None and child.returncode == -signal.SIGTERM)
