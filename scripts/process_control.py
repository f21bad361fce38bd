"""What a supervised process does to itself at its start: its CPUs, dying with its supervisor, asking it for the router.

The supervisor asks for it through flags rather than through a function run between fork and exec, which is unsafe in a
process with threads.
"""

import argparse
import os
import sys
from dataclasses import replace
from typing import TypeVar

from twopool.protocol.config import WorkerConfig
from twopool.protocol.errors import ConfigError, TwopoolError
from twopool.protocol.processes import die_with_parent

C = TypeVar("C", bound=WorkerConfig)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags a supervisor sets; they stay out of ``--help``."""
    parser.add_argument("--die-with-parent", type=int, metavar="PID", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--cpus", type=_cpu_list, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--router-on-stdin", action="store_true", help=argparse.SUPPRESS)


def apply(arguments: argparse.Namespace) -> None:
    """Act on the flags of ``add_flags``; to be called before libraries start threads, which inherit the CPUs."""
    if arguments.die_with_parent is not None:
        die_with_parent(arguments.die_with_parent)
    if arguments.cpus is not None:
        pin_to_cpus(arguments.cpus)


def with_router(config: C, arguments: argparse.Namespace) -> C:
    """The worker's configuration with the router that the supervisor names on stdin, where it was to wait for that.

    A worker is started before its router is up: to be called when its libraries are loaded. The supervisor sees to it
    that this does not last.
    """
    if not arguments.router_on_stdin:
        return config
    addresses = sys.stdin.readline().strip()
    if not addresses:
        raise TwopoolError("the supervisor ended before it named a router")
    return replace(config, router=tuple(addresses.split(",")))


def pin_to_cpus(cpus: frozenset[int]) -> None:
    """Run this process, and every thread it starts from now on, on ``cpus`` only."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        named = ",".join(map(str, sorted(cpus)))
        raise ConfigError(f"--cpus {named}: {error.strerror}", param="--cpus") from error


def _cpu_list(text: str) -> frozenset[int]:
    return frozenset(int(part) for part in text.split(","))
