"""How the router benchmark tells its mock workers, which run in other processes, what a step takes."""

import asyncio
import subprocess
import sys
from typing import Protocol


class Stepping(Protocol):
    """Whoever gives its requests one token a step. ``step_ms``: 0 is as fast as it goes."""

    step_ms: float


async def follow_stdin(target: Stepping) -> None:
    """Set ``target.step_ms`` from lines of stdin, each acknowledged on stdout, until stdin ends."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        while line := await reader.readline():
            target.step_ms = float(line)
            print("ok", flush=True)
    finally:
        transport.close()


def set_step(process: "subprocess.Popen[str]", step_ms: float) -> None:
    """The other end of ``follow_stdin``; returns when the process has taken it over."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{step_ms}\n")
    process.stdin.flush()
    if process.stdout.readline() != "ok\n":
        raise RuntimeError(f"the mock workers ended with status {process.wait(5)}")
