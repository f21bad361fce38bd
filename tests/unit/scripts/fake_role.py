"""A stand-in for ``twopool router|prefill|decode``: ``fake_role.py BEHAVIOUR ROLE FLAGS...``.

BEHAVIOUR is a JSON object: worker id or role → what that process does. ``error``: ends with that error before it is up.
``exit``: ends with that status once everything is up. ``silent``: is never up. ``stubborn``: ignores SIGTERM.
``not_ready``: /ready never says 200. ``say``: lines for stderr. ``linger_s``: takes so long to stop.
"""

import argparse
import json
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from twopool.scripts import process_control


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour", type=json.loads)
    parser.add_argument("role")
    parser.add_argument("--worker-id", default="router")
    parser.add_argument("--port", type=int, default=0)
    process_control.add_flags(parser)
    arguments, _ = parser.parse_known_args()
    process_control.apply(arguments)
    if arguments.router_on_stdin and not sys.stdin.readline():
        return 1
    behaviour: dict[str, Any] = arguments.behaviour.get(arguments.worker_id, {})

    stop = threading.Event()
    if behaviour.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    for line in behaviour.get("say", ()):
        print(line, file=sys.stderr, flush=True)
    if "error" in behaviour:
        print(f"twopool: error: {behaviour['error']}", file=sys.stderr, flush=True)
        return 1
    if not behaviour.get("silent"):
        announce(arguments, ready=not behaviour.get("not_ready"))
    if "exit" in behaviour:
        while not Path(behaviour["when"]).exists():
            time.sleep(0.01)
        return int(behaviour["exit"])
    while not stop.wait(0.05):
        pass
    time.sleep(behaviour.get("linger_s", 0))
    return 0


def announce(arguments: argparse.Namespace, *, ready: bool) -> None:
    """Print the role's JSON line; the router answers HTTP first."""
    if arguments.role != "router":
        message = {"event": "ready", "role": arguments.role, "worker_id": arguments.worker_id}
        print(json.dumps({**message, "peer_address": "tcp://127.0.0.1:1"}), flush=True)
        return
    listener = socket.create_server(("127.0.0.1", arguments.port))
    threading.Thread(target=answer, args=(listener, b"200 OK" if ready else b"503 Busy"), daemon=True).start()
    port = listener.getsockname()[1]
    print("a line that is no announcement", flush=True)
    message = {"event": "listening", "role": "router", "http": f"http://127.0.0.1:{port}"}
    print(json.dumps({**message, "control": "127.0.0.1:4321"}), flush=True)


def answer(listener: socket.socket, status: bytes) -> None:
    """Answer every request with ``status``."""
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")


if __name__ == "__main__":
    sys.exit(main())
