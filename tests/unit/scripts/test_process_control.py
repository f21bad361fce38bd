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
