"""What a child does to itself at its start."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import argparse, os
from twopool.scripts import process_control
parser = argparse.ArgumentParser()
process_control.add_flags(parser)
process_control.apply(parser.parse_args())
print(sorted(os.sched_getaffinity(0)))
"""

_TOLD = """
import argparse
from twopool.protocol.config import PrefillConfig
from twopool.protocol.errors import TwopoolError
from twopool.scripts import process_control
parser = argparse.ArgumentParser()
process_control.add_flags(parser)
try:
    print(process_control.with_router(PrefillConfig(router=("127.0.0.9:1",)), parser.parse_args()).router)
except TwopoolError as error:
    print(error.message)
"""


@pytest.mark.parametrize(
    ("flags", "line", "answer"),
    [
        ([], "", "('127.0.0.9:1',)"),
        (["--router-on-stdin"], "127.0.0.1:1,127.0.0.1:2\n", "('127.0.0.1:1', '127.0.0.1:2')"),
        (["--router-on-stdin"], "", "the supervisor ended before it named a router"),
        (["--router-on-stdin"], "127.0.0.1\n", "--router 127.0.0.1"),
    ],
)
def test_the_router_may_be_told_later(flags: list[str], line: str, answer: str) -> None:
    command = [sys.executable, "-P", "-c", _TOLD, *flags]
    result = subprocess.run(command, input=line, capture_output=True, text=True, timeout=60)
    assert result.stdout.startswith(answer) and not result.stderr


def run(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-P", "-c", _PROGRAM, *argv], capture_output=True, text=True, timeout=60)


def test_pins_itself() -> None:
    cpu = max(os.sched_getaffinity(0))
    assert run(f"--cpus={cpu}").stdout == f"[{cpu}]\n"


def test_without_flags_nothing_changes() -> None:
    assert run().stdout == f"{sorted(os.sched_getaffinity(0))}\n"


def test_a_cpu_that_does_not_exist() -> None:
    result = run("--cpus=1000")
    assert result.returncode != 0
    assert "--cpus 1000: Invalid argument" in result.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's parent-death signal is Linux's")
def test_ends_when_its_parent_is_gone_already() -> None:
    result = run(f"--die-with-parent={os.getppid()}")  # not its parent: as if that had died and it were adopted
    assert (result.returncode, result.stdout) == (1, "")
