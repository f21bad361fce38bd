"""What plain TCP between two processes of this host reaches: the limit next to which READs over TCP are shown."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

TIMEOUT_S = 60.0


@contextmanager
def socket_peer(target: Any, cpus: set[int]) -> Iterator[Callable[[int], None]]:
    """A function that receives so many bytes from another process, on ``cpus``, into ``target``, flat uint8."""
    program = [sys.executable, "-m", "twopool.scripts.bench_socket"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        numbers = [str(server.getsockname()[1]), str(target.nbytes), ",".join(map(str, sorted(cpus)))]
        process = subprocess.Popen([*program, *numbers])
        try:
            connection, _ = server.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(TIMEOUT_S)
                view = memoryview(target)
                yield lambda num_bytes: _receive(connection, view[:num_bytes])
        finally:
            process.kill()
            process.wait()


def _receive(connection: socket.socket, view: "memoryview[int]") -> None:
    connection.sendall(len(view).to_bytes(8, "little"))
    while len(view):
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the socket peer is gone")
        view = view[count:]


def main() -> None:
    """The sending process: port, bytes it has, CPUs."""
    port, num_bytes, cpus = sys.argv[1:]
    os.sched_setaffinity(0, map(int, cpus.split(",")))
    data = memoryview(bytes(int(num_bytes)))
    with socket.create_connection(("127.0.0.1", int(port)), TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        while request := connection.recv(8, socket.MSG_WAITALL):
            connection.sendall(data[: int.from_bytes(request, "little")])


if __name__ == "__main__":
    main()
