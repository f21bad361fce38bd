"""How long `twopool up` takes to its first token, and what it costs while nobody asks for anything.

The clock starts before the process does and stops when a client has the first token of a stream. The first start is not
counted: it leaves the model and the packed weights in the page cache. With --cold both are dropped from it before
every start. With --idle-s the last deployment is left alone for so long, and its processes' CPU time is read.
"""

import argparse
import http.client
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twopool.models.store import default_cache_dir, resolve_model
from twopool.protocol.config import RouterConfig
from twopool.scripts.deployment import Deployment, deployment

_START_TIMEOUT_S = 120.0
_SETTLE_S = 20.0
"""Until an idle deployment is measured: its workers still put their pools' pages together."""


@dataclass(frozen=True)
class Start:
    """Seconds since the command was given."""

    listening_s: float
    ready_s: float
    first_token_s: float


def main(argv: list[str] | None = None) -> int:
    args, flags = _parser().parse_known_args(argv)
    folder = resolve_model(args.model)
    starts: list[Start] = []
    idle: dict[str, float] = {}
    for number in range(args.rounds + 1):
        if args.cold:
            _drop_from_page_cache([folder, default_cache_dir()])
        begin_s = time.monotonic()
        with deployment(args.model, flags) as server:
            start = _first_token(server, begin_s)
            if number == args.rounds and args.idle_s:
                time.sleep(_SETTLE_S)
                idle = _idle_shares(server.pid, args.idle_s)
        print(f"{'not counted' if number == 0 else f'round {number}'}: {_words(start)}", file=sys.stderr, flush=True)
        if number:
            starts.append(start)
    median = {name: statistics.median(asdict(start)[name] for start in starts) for name in asdict(starts[0])}
    print(f"medians of {args.rounds}: {_words(Start(**median))}")
    for name, share in idle.items():
        print(f"idle: {name} {share:.2%} of a core")
    if args.json:
        report: dict[str, Any] = {"cold": args.cold, "median": median, "starts": [asdict(one) for one in starts]}
        args.json.write_text(json.dumps(report | {"idle": idle}, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags go to `twopool up`.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default=RouterConfig.model, help="as for `twopool up`")
    parser.add_argument("--rounds", type=int, default=5, help="starts, after one that is not counted")
    parser.add_argument("--cold", action="store_true", help="drop model and packed weights from the page cache first")
    parser.add_argument("--idle-s", type=float, default=0.0, help="also read CPU times over this long; 0: do not")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def _first_token(server: Deployment, begin_s: float) -> Start:
    listening_s, ready_s = server.wait_ready(_START_TIMEOUT_S)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_START_TIMEOUT_S)
    body = {"prompt": "The quick brown fox", "max_tokens": 8, "stream": True, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200 or not answer.readline().startswith(b"data:"):
        raise SystemExit(f"no token came: status {answer.status}")
    first_token_s = time.monotonic()
    answer.read()
    return Start(listening_s - begin_s, ready_s - begin_s, first_token_s - begin_s)


def _idle_shares(supervisor: int, seconds: float) -> dict[str, float]:
    """Share of a core that each process of a deployment uses."""
    pids = {_name(pid): pid for pid in _descendants(supervisor)} | {"up": supervisor}
    before = {name: _cpu_s(pid) for name, pid in pids.items()}
    begin_s = time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - begin_s
    return {name: (_cpu_s(pid) - before[name]) / took_s for name, pid in pids.items()}


def _descendants(pid: int) -> list[int]:
    children = [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and (stat := _stat(int(path.name))) and int(stat[1]) == pid
    ]
    return children + [one for child in children for one in _descendants(child)]


def _name(pid: int) -> str:
    """The role of a process of a deployment."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    role = words[words.index("twopool.scripts.cli") + 1] if "twopool.scripts.cli" in words else "rank"
    return f"{role} {pid}"


def _cpu_s(pid: int) -> float:
    """From the scheduler's own account: ticks of 10 ms would miss most of what an idle process does."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _stat(pid: int) -> list[str] | None:
    """The fields after the name, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return None


def _drop_from_page_cache(folders: list[Path]) -> None:
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _words(start: Start) -> str:
    return f"listening {start.listening_s:.2f} s, ready {start.ready_s:.2f} s, first token {start.first_token_s:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
