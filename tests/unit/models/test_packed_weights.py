"""Packed weights on disk: found again as they were, and used only where nobody else can have written them."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from twopool.kernels.native_step import NativeStep, native_available
from twopool.models import packed_weights
from twopool.models.native_decoder import NativeDecoder
from twopool.models.packed_weights import PackedStore

CPU = torch.device("cpu")
SIZE = 5 * 1024**2
needs_native = pytest.mark.skipif(native_available() is not None, reason="no native step")


@pytest.fixture(autouse=True)
def small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "MIN_BYTES", 0)


@pytest.fixture
def store(tmp_path: Path) -> PackedStore:
    return PackedStore(tmp_path / "packed", 16 * 1024**2)


def image(seed: int) -> Tensor:
    return torch.randint(256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def keep(store: PackedStore, key: str, *parts: Tensor) -> None:
    thread = store.keep_later(key, parts)
    assert thread is not None
    thread.join(timeout=60)
    assert not thread.is_alive()


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "packed").iterdir()}


def test_what_was_kept_is_found(store: PackedStore, tmp_path: Path) -> None:
    content = image(1)
    assert store.open("a", SIZE) is None
    keep(store, "a", content[:3_000_001], content[3_000_001:])
    found = store.open("a", SIZE)
    assert found is not None and torch.equal(found.image, content)
    assert store.open("b", SIZE) is None
    assert files(tmp_path) == {"a.packed", "a.lock"}
    assert (tmp_path / "packed").stat().st_mode & 0o777 == 0o700


def _short(path: Path) -> None:
    os.truncate(path, SIZE)


def _changed(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(2 * 1024**2)
        byte = file.read(1)
        file.seek(2 * 1024**2)
        file.write(bytes([byte[0] ^ 1]))


def _writable(path: Path) -> None:
    path.chmod(0o620)


def _folder_writable(path: Path) -> None:
    path.parent.chmod(0o777)


def _linked(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def _of_another_key(path: Path) -> None:
    path.write_bytes(path.with_name("other.packed").read_bytes())


@pytest.mark.parametrize("spoil", [_short, _changed, _writable, _folder_writable, _linked, _of_another_key])
def test_what_cannot_be_trusted_is_not_used(
    spoil: Callable[[Path], None], store: PackedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(store, "a", image(1))
    keep(store, "other", image(2))
    spoil(tmp_path / "packed" / "a.packed")
    with caplog.at_level(logging.WARNING):
        assert store.open("a", SIZE) is None
    assert "packed ones cannot be used" in caplog.text


def test_of_another_user(store: PackedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    keep(store, "a", image(1))
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with caplog.at_level(logging.WARNING):
        assert store.open("a", SIZE) is None
        keep(store, "b", image(1))
    assert "packed ones cannot be used" in caplog.text and "are not kept" in caplog.text


def test_the_least_recently_used_goes_first(store: PackedStore, tmp_path: Path) -> None:
    for age, key in ((30, "a"), (20, "b"), (10, "c")):
        keep(store, key, image(1))
        path = tmp_path / "packed" / f"{key}.packed"
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert store.open("a", SIZE) is not None  # used just now
    keep(store, "d", image(2))
    assert {name for name in files(tmp_path) if name.endswith(".packed")} == {"a.packed", "c.packed", "d.packed"}


def test_what_exceeds_the_limit_is_not_kept(store: PackedStore) -> None:
    assert store.keep_later("a", [image(1)] * 4) is None


def test_a_full_disk_is_said_and_leaves_nothing(
    store: PackedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        keep(store, "a", image(1))
    assert "No space left" in caplog.text and files(tmp_path) == {"a.lock"}


@needs_native
@pytest.mark.parametrize("in_huge_pages", [False, True])
@pytest.mark.parametrize("name", ["llama_9_3", "qwen3_tied_bias"])
def test_a_decoder_computes_the_same_from_packed_weights(
    name: str,
    in_huge_pages: bool,
    store: PackedStore,
    tiny_model: Callable[[str], Any],
    make_driver: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(name)

    def load() -> NativeDecoder:
        return NativeDecoder.load(model.folder, dtype=torch.bfloat16, device=CPU, num_threads=1, packed_store=store)

    first = load()
    wanted, fingerprint = make_driver(first).step([(0, model.prompt, 0)]), first.fingerprint()
    first.close()

    def pack(*_: Any, **__: Any) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr(NativeStep, "set_matrix", pack)
    monkeypatch.setattr(packed_weights, "_huge_bytes", lambda _: 2**40 if in_huge_pages else 0)
    second = load()
    assert torch.equal(make_driver(second).step([(0, model.prompt, 0)]), wanted)
    assert second.fingerprint() == fingerprint
    second.close()
    weights = model.folder / "model.safetensors"
    os.utime(weights, (0, weights.stat().st_mtime - 1))  # written to by somebody
    with pytest.raises(AssertionError, match="packed again"):
        load()
