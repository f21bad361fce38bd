"""What is shipped: every package (pyproject lists them by hand), and the commands README.md promises."""

import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_PACKAGED = {"tests", "build", "dist", "docs"}


def test_every_source_folder_is_listed() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(config["tool"]["setuptools"]["packages"])
    folders = {p.parent.relative_to(ROOT) for p in ROOT.glob("[a-z]*/**/*.py")}
    found = {"twopool." + ".".join(f.parts) for f in folders if f.parts[0] not in NOT_PACKAGED}
    assert found == listed


def test_every_package_is_type_checked() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    checked = set(config["tool"]["mypy"]["packages"])  # a package's subpackages are checked with it
    assert {
        name for name in config["tool"]["setuptools"]["packages"] if name.rpartition(".")[0] not in checked
    } == checked


def test_nothing_at_the_root_or_in_kernels_is_a_top_level_package() -> None:
    """``kernels`` is a package on PyPI that transformers looks for; ours must not be found in its place."""
    for name in ("__init__.py", "conftest.py", "kernels/__init__.py", "tests/__init__.py"):
        assert not (ROOT / name).exists(), name


def test_the_readme_starts_with_the_two_commands() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks[:2] == ["./scripts/quickstart\n", "./scripts/test\n"]


@pytest.mark.parametrize("name", ["scripts/quickstart", "scripts/test", "scripts/check", "scripts/in_venv", ".ci/run"])
def test_commands_are_executable(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)


def test_links_in_the_documents_lead_somewhere() -> None:
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
