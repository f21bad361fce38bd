"""docs/configuration.md says what the flags are."""

from pathlib import Path

from twopool.scripts import configuration_docs

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_written_file_is_current() -> None:
    written = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert written == configuration_docs.render(), "run: python -m twopool.scripts.configuration_docs"
