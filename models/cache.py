"""The model cache on disk: who may write an entry, when it counts as whole, and how it is replaced.

An entry is a folder with a manifest that names its source, the converter's version and every file's size. It is built
in a folder beside it and renamed into place, so a reader sees all of it or none; a file lock makes concurrent processes
build it once. A process that dies while building leaves a temporary folder that the next builder removes.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twopool.protocol.errors import ModelError

# Raised whenever the converter writes something else for the same source, so that old entries are built again.
FORMAT_VERSION = 1
MANIFEST = "twopool_manifest.json"

_LOCK_TIMEOUT_S = 1800.0
_LOCK_POLL_S = 0.1


@dataclass(frozen=True)
class Source:
    """What an entry was made from: words for people, and the hash that identifies the bytes."""

    description: str
    sha256: str


def default_cache_dir() -> Path:
    """``$TWOPOOL_CACHE``, else ``$XDG_CACHE_HOME/twopool``, else ``~/.cache/twopool``."""
    if explicit := os.environ.get("TWOPOOL_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "twopool"


def is_whole(folder: Path, sha256: str) -> bool:
    """Whether ``folder`` was made by this converter from that source and its files have their recorded sizes."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format_version"] != FORMAT_VERSION or manifest["source"]["sha256"] != sha256:
            return False
        sizes: dict[str, int] = manifest["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def get_or_build(
    cache_dir: Path,
    name: str,
    source: Source,
    build: Callable[[Path], None],
    on_wait: Callable[[], None] | None = None,
) -> Path:
    """The entry ``name`` made from ``source``, calling ``build(empty_folder)`` when there is none.

    ``on_wait`` is called once if another process is building it. Raises ModelError when the cache cannot be written or
    the other process takes over half an hour; what ``build`` raises passes through, and leaves nothing behind.
    """
    target = cache_dir / "models" / name
    if is_whole(target, source.sha256):  # without the lock: a read-only cache serves what it has
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{name}.lock", on_wait):
            if not is_whole(target, source.sha256):  # another process may have built it meanwhile
                _build(target, source, build)
    except OSError as error:
        raise ModelError(
            f"Cannot write the model cache {cache_dir} ({error.strerror or error}); "
            "free or repair it, or set TWOPOOL_CACHE to another folder."
        ) from error
    return target


def _build(target: Path, source: Source, build: Callable[[Path], None]) -> None:
    """Build beside ``target`` and rename. The lock is held, so every temporary folder of this name is stale."""
    prefix = f".{target.name}.tmp-"
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        build(temporary)
        _write_manifest(temporary, source)
        temporary.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from other users
        _sync(temporary)
        if target.exists():
            # A rename cannot replace a folder that is not empty; a running reader keeps its mapped files.
            target.rename(target.parent / f"{temporary.name}-old")
        temporary.rename(target)
        _sync_path(target.parent)
    finally:
        for left in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)


def _write_manifest(folder: Path, source: Source) -> None:
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "source": asdict(source),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        _sync_path(path)
    _sync_path(folder)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None] | None) -> Iterator[None]:
    """Hold an exclusive lock on ``path``. The kernel drops it when the holder dies; the file itself stays."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting and on_wait is not None:
                    on_wait()
                waiting = True
                if time.monotonic() > deadline:
                    raise ModelError(f"Another process has held {path} for too long; stop it first.") from None
                time.sleep(_LOCK_POLL_S)
        yield
