"""A `twopool up` for a benchmark or a check: started on a free port, waited for, stopped at the end."""

import contextlib
import http.client
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from twopool.scripts.up_plan import LAUNCHER

_POLL_S = 0.02
_ANSWER_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 30.0
_WORDS_OF_LOG = 800


class NotReadyError(Exception):
    """A deployment that cannot take requests, and the end of what it said."""


class Deployment:
    """Its ``port`` on loopback and its supervisor's ``pid``."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path | None) -> None:
        self.port = port
        self.pid = process.pid
        self._process = process
        self._log = log

    def wait_ready(self, timeout_s: float) -> tuple[float, float]:
        """When it first answered and when it could take requests (``time.monotonic``). Raises ``NotReadyError``."""
        deadline_s = time.monotonic() + timeout_s
        listening_s = 0.0
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_TIMEOUT_S)
                try:
                    connection.request("GET", "/ready")
                    status = connection.getresponse().status
                finally:
                    connection.close()
                listening_s = listening_s or time.monotonic()
                if status == 200:
                    return listening_s, time.monotonic()
            time.sleep(_POLL_S)
        said = "" if self._log is None else self._log.read_text(errors="replace")[-_WORDS_OF_LOG:]
        raise NotReadyError(f"not ready within {timeout_s:g} s: {said}")


@contextlib.contextmanager
def deployment(model: str, flags: Sequence[str], *, log: Path | None = None) -> Iterator[Deployment]:
    """A `twopool up` that was just started; what it says goes to ``log``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [*LAUNCHER, "up", f"--model={model}", f"--port={port}", *flags]
    with contextlib.ExitStack() as stack:
        output = subprocess.DEVNULL if log is None else stack.enter_context(log.open("wb"))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            yield Deployment(process, port, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its children die with it
                process.wait()
