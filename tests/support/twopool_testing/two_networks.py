"""Two networks with nothing but a wire between them: two hosts, as far as sockets can tell."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Network:
    """One end of the wire."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """``words`` as a command to run there."""
        return ["ip", "netns", "exec", self.name, *words]


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[Network, Network]]:
    """Skips the test where network namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command")
    number = os.getpid()
    ends = tuple(Network(f"twopool-{number}-{end}", f"10.231.98.{end}") for end in (1, 2))
    made: list[Network] = []
    try:
        try:
            for end in ends:
                _ip("netns", "add", end.name)
                made.append(end)
            first, second = ends
            wire = ("link", "add", "wire", "netns", first.name, "type", "veth", "peer", "name", "wire")
            _ip(*wire, "netns", second.name)
            for end in ends:
                _ip("-n", end.name, "addr", "add", f"{end.address}/24", "dev", "wire")
                for link in ("lo", "wire"):
                    _ip("-n", end.name, "link", "set", link, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield first, second
    finally:
        for end in made:
            _ip("netns", "del", end.name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
