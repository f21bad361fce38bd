"""The processes of the peers' benchmark: one an engine, stopped whenever it is not the one that is measured."""

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any, Final

_SCRIPT: Final = Path(__file__).with_name("bench_peers_engine.py")
_START_TIMEOUT_S: Final = 300.0
_TASK_TIMEOUT_S: Final = 180.0


class EngineFailure(Exception):
    """An engine that did not start or did not answer; its words go into the table."""


class EngineProcess:
    """Started and ready when constructed, then stopped. Raises EngineFailure."""

    def __init__(self, name: str, python: Path, model: Path, *, threads: int, log: Path) -> None:
        command = [str(python), "-P", str(_SCRIPT), name, str(model), "--threads", str(threads)]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, start_new_session=True
            )
        self._log = log
        self._unread = b""
        try:
            self.version: str = self._answer(_START_TIMEOUT_S)["version"]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def measure(self, task: dict[str, Any]) -> dict[str, Any]:
        """What the engine answers to one task; it runs only meanwhile."""
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
            return self._answer(_TASK_TIMEOUT_S)
        except OSError as error:
            raise EngineFailure(f"ended while it was measured, see {self._log}") from error
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Kill it and whatever it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                raise EngineFailure(f"did not answer within {timeout_s:g} s, see {self._log}")
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                raise EngineFailure(f"ended with status {self._process.wait()}, see {self._log}")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
