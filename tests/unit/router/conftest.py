"""A tiny model folder, read once a session."""

from pathlib import Path

import pytest

from twopool.router.model_info import ModelInfo, load_model_info
from twopool_testing.tiny_tokenizers import byte_level_tokenizer, write_model_folder


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE, ChatML, eos ``<|im_end|>`` (2), eight ids of vocabulary padding."""
    return write_model_folder(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


@pytest.fixture(scope="session")
def tiny_model(tiny_model_folder: Path) -> ModelInfo:
    return load_model_info(tiny_model_folder)
