"""What a supervised process does to itself at its start: which CPUs it may use, and dying with its supervisor.

The supervisor asks for it through flags rather than through a function run between fork and exec, which is unsafe in a
process with threads.
"""

import argparse
import ctypes
import os
import signal
import sys

from twopool.protocol.errors import ConfigError

_PR_SET_PDEATHSIG = 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags a supervisor sets; they stay out of ``--help``."""
    parser.add_argument("--die-with-parent", type=int, metavar="PID", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--cpus", type=_cpu_list, default=None, help=argparse.SUPPRESS)


def apply(arguments: argparse.Namespace) -> None:
    """Act on the flags of ``add_flags``; to be called before libraries start threads, which inherit the CPUs."""
    if arguments.die_with_parent is not None:
        die_with_parent(arguments.die_with_parent)
    if arguments.cpus is not None:
        pin_to_cpus(arguments.cpus)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, even of SIGKILL. Linux only; elsewhere nothing happens.

    SIGKILL, because nobody would be left to see to it that a drain ends.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit(1)


def pin_to_cpus(cpus: frozenset[int]) -> None:
    """Run this process, and every thread it starts from now on, on ``cpus`` only."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        named = ",".join(map(str, sorted(cpus)))
        raise ConfigError(f"--cpus {named}: {error.strerror}", param="--cpus") from error


def _cpu_list(text: str) -> frozenset[int]:
    return frozenset(int(part) for part in text.split(","))
