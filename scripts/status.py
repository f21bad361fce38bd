"""What ``twopool up`` shows: the children's log lines, its progress, the table of processes, how to send a request."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table

from twopool.scripts.child import Child

_COLOURS = {"router": "cyan", "prefill": "magenta", "decode": "green"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table of processes."""

    child: Child
    address: str
    cpus: str
    started_in_s: float


class StatusView:
    """Status goes to stdout; the children's logs go to stderr, each line behind its process's name.

    JSON logs stay as they are: the prefix would make them no JSON.
    """

    def __init__(self, *, log_format: str, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._out = Console(file=stdout, highlight=False, soft_wrap=True)
        self._log = Console(file=stderr, stderr=stderr is None, highlight=False, soft_wrap=True)
        self._prefix = log_format != "json"
        self._since = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._since

    def log_line(self, name: str, line: str) -> None:
        """One line a child wrote."""
        if self._prefix:
            self._log.out(f"[{name}]", style=_COLOURS.get(name.partition("-")[0]), end=" ")
        self._log.out(line)

    def progress(self, text: str) -> None:
        """One step of starting or stopping."""
        self._out.out(f"{self.elapsed_s:6.1f} s  {text}")

    def serving(self, rows: Sequence[Row], url: str, model: str) -> None:
        """Everything is up."""
        table = Table()
        for heading in ("process", "pid", "address", "CPUs", "state"):
            table.add_column(heading)
        for row in rows:
            state = f"ready after {row.started_in_s:.1f} s"
            table.add_row(row.child.name, str(row.child.pid), row.address, row.cpus, state)
        self._out.print(table)
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
        self._out.out(f"Serving {model} at {url}/v1 (Ctrl-C stops). Try:\n")
        self._out.out(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n")

    def error(self, text: str) -> None:
        """What went wrong, on stderr."""
        self._log.out(f"twopool: error: {text}")
