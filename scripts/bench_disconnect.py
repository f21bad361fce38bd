"""How soon every party knows that a client has left, and what is computed for it afterwards.

One prefill and one decode worker behind a router, one request at a time. The client closes its socket while its prompt
is being prefilled, or while its stream is under way. From there to the line in which a party logs that it dropped the
request (wall clocks of one machine) is its delay; what workers count as generated beyond what the client had received
is what was computed in vain.
"""

import argparse
import contextlib
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PHASES = ("prefilling", "streaming")
_DROPPED = {"router": "cancelled: ", "decode": "dropped", "prefill": "released: "}
_SETTLE_S = 0.5
_HEARTBEAT_S = 1.2
_START_TIMEOUT_S = 120.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as for `twopool router`")
    parser.add_argument("--num-tokens", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=20, help="disconnects in each phase")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="twopool-bench-") as folder, _server(args.model, Path(folder)) as port:
        rows = [row for phase in _PHASES for row in _measure(port, Path(folder), phase, args)]
    for row in rows:
        figures = " ".join(f"{name} {value:.2f}" for name, value in row.items() if isinstance(value, float))
        print(f"{row['phase']:11} {row['party']:8} {figures}")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    return 0


def _measure(port: int, folder: Path, phase: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    before = _generated_tokens(port)
    left_s, num_received = [], 0
    for _ in range(args.rounds):
        at_s, received = _ask_and_leave(port, phase, args.num_tokens)
        left_s.append(at_s)
        num_received += received
        time.sleep(_SETTLE_S)
    in_vain = (_generated_tokens(port) - before - num_received) / args.rounds
    rows: list[dict[str, Any]] = []
    for party, message in _DROPPED.items():
        if party == "prefill" and phase == "streaming":
            continue  # it has nothing of the request any more
        dropped_s = _stamps(folder / f"{party}.log", message)
        delays = [_first_after(at_s, dropped_s) for at_s in left_s]
        known = sorted(delay * 1e3 for delay in delays if delay is not None)
        row = {"phase": phase, "party": party, "missed": args.rounds - len(known)}
        rows.append(row | {"p50_ms": statistics.median(known), "max_ms": known[-1]} if known else row)
    rows.append({"phase": phase, "party": "workers", "tokens_in_vain": in_vain})
    return rows


def _ask_and_leave(port: int, phase: str, num_tokens: int) -> tuple[float, int]:
    """When the client left (``time.time``), and how many tokens it had by then."""
    prompt = random.SystemRandom().choices(range(100, 400), k=num_tokens)
    body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(data)}\r\n\r\n"
    received = b""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head.encode() + data)
        if phase == "prefilling":
            time.sleep(random.SystemRandom().uniform(0.004, 0.03))
        else:
            while received.count(b"\ndata: ") < 10:
                received += client.recv(1 << 16)
        return time.time(), received.count(b"data: ")


def _stamps(log: Path, message: str) -> list[float]:
    """When a process logged lines that begin so."""
    lines = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{"))
    return [line["time"] for line in lines if line["message"].startswith(message)]


def _first_after(at_s: float, stamps: list[float]) -> float | None:
    return next((stamp - at_s for stamp in stamps if at_s <= stamp < at_s + _SETTLE_S), None)


def _generated_tokens(port: int) -> float:
    time.sleep(_HEARTBEAT_S)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    return sum(map(float, re.findall(r"^twopool_worker_generated_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)))


@contextlib.contextmanager
def _server(model: str, folder: Path) -> Iterator[int]:
    """Yields the router's HTTP port; the parties log to ``folder``."""
    with contextlib.ExitStack() as stack:
        common = ["--model", model, "--log-level", "debug", "--log-format", "json"]
        router = stack.enter_context(_process(folder, "router", *common, "--port", "0", "--control-port", "0"))
        announced = _line(router)
        workers = [
            stack.enter_context(_process(folder, role, *common, "--router", announced["control"], "--num-threads", "1"))
            for role in ("prefill", "decode")
        ]
        for worker in workers:
            _line(worker)
        port = int(announced["http"].rpartition(":")[2])
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not _is_ready(port):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the router was not ready in time")
            time.sleep(0.1)
        yield port


@contextlib.contextmanager
def _process(folder: Path, role: str, *flags: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-P", "-m", "twopool.scripts.cli", role, *flags]
    with (folder / f"{role}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """What a process says when it is up."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with status {process.wait(10)}")
    announced: dict[str, Any] = json.loads(line)
    return announced


def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
        return bool(answer.status == 200)
    return False


if __name__ == "__main__":
    sys.exit(main())
