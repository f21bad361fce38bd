"""Faults on purpose: tests make named points of a worker slow, lossy, wrong or deadly.

``--fault-points FILE`` names a file of ``POINT=FAULT`` lines that is read whenever a point is reached, so that one
running worker serves many tests. Without the flag, reaching a point costs a comparison.

A fault is ``ACTION[:SECONDS][*COUNT]`` (``fetching=delay:1.5``, ``read=corrupt*1``); a number alone is a delay. With a
count it happens that often; changing the file starts the counts anew.

========  ==========================================================================================================
delay     wait before going on
drop      what was to be done here is not done: a message is not sent, a READ not posted (it fails after SECONDS)
corrupt   READs: bytes land changed
late      READs: the READ happens SECONDS later, and brings what is there by then
partial   READs: half of it lands, then it fails
refuse    what was to be done here fails
stop      SIGSTOP to this process
kill      SIGKILL to this process
========  ==========================================================================================================
"""

import asyncio
import logging
import os
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from twopool.protocol.errors import ConfigError, TransferError

logger = logging.getLogger(__name__)

ACTIONS = ("delay", "drop", "corrupt", "late", "partial", "refuse", "stop", "kill")


@dataclass(frozen=True)
class Fault:
    """One line of the file. ``count``: how often it happens; ``None``: always."""

    point: str
    action: str
    seconds: float = 0.0
    count: int | None = None

    @classmethod
    def parse(cls, line: str) -> "Fault":
        """Raises ``ConfigError`` for a line that names no fault."""
        point, _, text = line.strip().partition("=")
        text, _, count = text.partition("*")
        action, _, seconds = text.partition(":")
        try:
            if action in ACTIONS:
                return cls(point, action, float(seconds or 0), int(count) if count else None)
            return cls(point, "delay", float(text), int(count) if count else None)
        except ValueError as error:
            raise ConfigError(f"fault point {line!r}: {error}", param="--fault-points") from error


class FaultPoints:
    """The points of one worker; ``file`` is ``None`` outside tests. May be asked from any thread."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._text = ""
        self._faults: list[Fault] = []
        self._happened: Counter[Fault] = Counter()

    @property
    def is_active(self) -> bool:
        return self._file is not None

    @property
    def num_happened(self) -> int:
        """Faults that happened since the file changed last."""
        with self._lock:
            if self._file is not None:
                self._reload(self._file)
            return self._happened.total()

    def take(self, point: str) -> Fault | None:
        """The fault that happens at ``point`` now, counted as having happened."""
        if self._file is None:
            return None
        with self._lock:
            self._reload(self._file)
            for fault in self._faults:
                if fault.point == point and (fault.count is None or self._happened[fault] < fault.count):
                    self._happened[fault] += 1
                    logger.warning("a fault on purpose: %s at %s", fault.action, point)
                    return fault
        return None

    async def reached(self, point: str) -> bool:
        """Let what happens at ``point`` happen: ``False`` when what follows is to be left out.

        Raises ``TransferError`` where it is refused.
        """
        fault = self.take(point)
        if fault is None:
            return True
        if fault.seconds:
            await asyncio.sleep(fault.seconds)
        end_process(fault)
        if fault.action == "refuse":
            raise TransferError(f"{point} is refused on purpose")
        return fault.action != "drop"

    def _reload(self, file: Path) -> None:
        text = file.read_text() if file.exists() else ""
        if text != self._text:
            self._text = text
            self._faults = [Fault.parse(line) for line in text.splitlines() if "=" in line]
            self._happened.clear()


def end_process(fault: Fault) -> None:
    """Stop or kill this process if that is the fault."""
    if fault.action in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if fault.action == "stop" else signal.SIGKILL)
