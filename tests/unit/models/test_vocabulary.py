"""How many tokens a tokenizer knows, from every kind of tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from twopool.models.vocabulary import num_tokens_known
from twopool.protocol.errors import ModelError
from twopool_testing.tiny_model import build_tokenizer


def _folder(tmp_path: Path, content: Any) -> Path:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return tmp_path


def test_a_real_tokenizer(tmp_path: Path) -> None:
    size = build_tokenizer(tmp_path)
    assert num_tokens_known(tmp_path) == size


@pytest.mark.parametrize(
    ("content", "known"),
    [
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 5}, "merges": []}}, 6),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 9, "content": "<s>"}, {"id": 3, "content": "x"}]}, 10),
        ({"model": {"type": "Unigram", "vocab": [["a", -1.5], ["b", -2]]}, "added_tokens": []}, 2),
    ],
)
def test_ids_may_have_gaps_and_stand_among_the_added(tmp_path: Path, content: Any, known: int) -> None:
    assert num_tokens_known(_folder(tmp_path, content)) == known


@pytest.mark.parametrize("content", [{"model": {"vocab": {}}}, {"model": {}}, [], {"model": {"vocab": {"a": "b"}}}])
def test_what_is_no_vocabulary_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        num_tokens_known(_folder(tmp_path, content))


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        num_tokens_known(tmp_path)
