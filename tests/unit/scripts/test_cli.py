"""The ``twopool`` command: what it hands to the roles, what it prints, how it exits."""

import stat
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from twopool.models import store
from twopool.protocol.config import DecodeConfig, PrefillConfig, RouterConfig
from twopool.protocol.errors import ConfigError, TwopoolError
from twopool.protocol.security import load_cluster_key
from twopool.scripts.cli import main

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Stands in for the roles' processes and the model store; records what they are called with."""
    seen: list[Any] = []

    def stand_in(config: Any, folder: Path) -> int:
        seen.append((config, folder))
        return 5

    for role in ("router", "prefill", "decode"):
        module = types.ModuleType(f"twopool.{role}.process")
        setattr(module, f"run_{role}", stand_in)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(store, "resolve_model", lambda model: tmp_path / model)
    return seen


@pytest.mark.parametrize(
    ("role", "config"), [("router", RouterConfig), ("prefill", PrefillConfig), ("decode", DecodeConfig)]
)
def test_roles_get_their_flags_and_the_model_folder(
    calls: list[Any], tmp_path: Path, role: str, config: type[Any]
) -> None:
    assert main([role, "--model=m", "--port=7000"]) == 5
    assert calls == [(config(model="m", port=7000), tmp_path / "m")]


def test_a_wrong_flag_exits_2_with_one_sentence(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "--block-size=17"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "twopool: error: --block-size 17: must be a power of two, at least 16\n"
    assert (captured.out, calls) == ("", [])


@pytest.mark.parametrize(("error", "status"), [(ConfigError("wrong"), 2), (TwopoolError("broken"), 1)])
def test_errors_at_the_start_are_one_sentence(
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: TwopoolError,
    status: int,
) -> None:
    def fail(model: str) -> Path:
        raise error

    monkeypatch.setattr(store, "resolve_model", fail)
    assert main(["router"]) == status
    assert capsys.readouterr().err == f"twopool: error: {error.message}\n"
    assert calls == []


def test_an_abbreviated_flag_is_unknown(calls: list[Any]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["router", "--max-q=3"])


def test_keygen_writes_a_key_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.key"
    assert main(["keygen", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = load_cluster_key(path)
    assert main(["keygen", str(path)]) == 2
    assert "File exists" in capsys.readouterr().err
    assert load_cluster_key(path) == key


def test_model_fetch_prints_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "fetch_model", lambda name: tmp_path / name)
    assert main(["model", "fetch", "m"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'm'}\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("twopool 0.")


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_launch_scripts_are_the_commands(role: str) -> None:
    script = ROOT / "scripts" / f"launch_{role}.py"
    result = subprocess.run([sys.executable, str(script), "--port=-1"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (2, "twopool: error: --port -1: not a port number\n")


def test_the_command_itself_loads_no_heavy_library() -> None:
    code = """if True:
        import sys
        import twopool.scripts.cli, twopool.models.store
        print([name for name in ("torch", "transformers", "nixl", "numpy.testing") if name in sys.modules])
    """
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr
