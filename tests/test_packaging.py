"""The wheel ships every package: pyproject lists them by hand."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_PACKAGED = {"tests", "build", "dist", "docs"}


def test_every_source_folder_is_listed() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(config["tool"]["setuptools"]["packages"])
    folders = {p.parent.relative_to(ROOT) for p in ROOT.glob("[a-z]*/**/*.py")}
    found = {"twopool." + ".".join(f.parts) for f in folders if f.parts[0] not in NOT_PACKAGED}
    assert found == listed
