"""The rank processes of a worker live and die together: a thread on either side watches the other one.

Each rank holds one end of a socket pair, on which it says twice a second that it lives and over which nothing else
goes. An end that closes is a process that ended; a rank that says nothing is stopped or stuck. The threads depend on no
event loop and on no lock, so that they see an end in the middle of loading or of a step.
"""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping

BEAT_S = 0.5
SILENCE_S = 10.0
"""A rank not heard for so long is taken for lost. Long, because importing a library may hold its threads up."""

_OWN_PAUSE_S = 2.0


def live_with_leader(life: socket.socket, on_end: Callable[[], None]) -> None:
    """Tell the leader that this process lives; ``on_end`` is called on the watching thread when the leader does not."""
    life.setblocking(False)

    def watch() -> None:
        poll = select.poll()
        poll.register(life, select.POLLIN)
        while True:
            try:
                life.send(b".")
            except BlockingIOError:  # a leader that is stopped reads nothing
                pass
            except OSError:
                break
            if poll.poll(BEAT_S * 1000) and not _is_alive(life):
                break
        on_end()

    threading.Thread(target=watch, name="rank-life", daemon=True).start()


class RankWatch:
    """The leader's side. ``on_end(rank, silent)`` is called once for the first rank that ends or falls silent."""

    def __init__(
        self,
        lives: Mapping[int, socket.socket],
        on_end: Callable[[int, bool], None],
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._lives = dict(lives)
        self._on_end = on_end
        self._silence_s = silence_s
        self._stopping, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer; nothing is called from now on. Idempotent, but not from ``on_end``."""
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1
            self._thread.join()
            os.close(self._stopping)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._stopping, select.POLLIN | select.POLLHUP)
        ranks = {life.fileno(): rank for rank, life in self._lives.items()}
        for fd in ranks:
            poll.register(fd, select.POLLIN)
        looked = time.monotonic()
        heard = dict.fromkeys(self._lives, looked)
        while True:
            events = poll.poll(BEAT_S * 1000)
            now = time.monotonic()
            if now - looked > _OWN_PAUSE_S:  # this process was stopped, and perhaps all of them were
                heard = dict.fromkeys(self._lives, now)
            looked = now
            for fd, _ in events:
                if fd == self._stopping:
                    return
                rank = ranks[fd]
                if not _is_alive(self._lives[rank]):
                    self._on_end(rank, False)
                    return
                heard[rank] = now
            for rank, last in heard.items():
                if now - last > self._silence_s:
                    self._on_end(rank, True)
                    return


def _is_alive(life: socket.socket) -> bool:
    try:
        return bool(life.recv(4096, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False
