"""What a process that another one started does to itself at its start: dying with it, keeping to its CPUs.

Asked for through flags rather than done between fork and exec, which is unsafe in a process with threads.
"""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Collection
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, even of SIGKILL. Linux only; elsewhere nothing happens.

    SIGKILL, because nobody would be left to see to it that a drain ends. The kernel takes the *thread* that started
    this process for its parent: start processes from a thread that lives as long as the process.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit(1)


def leave(status: int) -> NoReturn:
    """End this process at once: the interpreter takes a second to go with torch loaded, and the kernel frees all."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def cpu_shares(cpus: Collection[int], num_shares: int) -> list[list[int]]:
    """Disjoint shares of ``cpus`` of equal size, ascending; all get every CPU where there are fewer than shares."""
    ordered = sorted(cpus)
    each = len(ordered) // num_shares
    if each == 0:
        return [ordered] * num_shares
    return [ordered[index * each : (index + 1) * each] for index in range(num_shares)]


def describe_exit(returncode: int | None) -> str:
    """``"exit status 3"`` or ``"signal SIGKILL"``."""
    if returncode is None:
        return "no exit status"
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal
        return f"signal {-returncode}"
