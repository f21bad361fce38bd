"""A tiny model folder, read once a session."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from twopool.router.model_info import ModelInfo, load_model_info
from twopool_testing.mock_control import defects_surface
from twopool_testing.tiny_tokenizers import byte_level_tokenizer, write_model_folder


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], Any]]:
    """The event loop the router runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE, ChatML, eos ``<|im_end|>`` (2), eight ids of vocabulary padding."""
    return write_model_folder(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


@pytest.fixture(scope="session")
def tiny_model(tiny_model_folder: Path) -> ModelInfo:
    return load_model_info(tiny_model_folder)


@pytest.fixture
def no_defects() -> Iterator[None]:
    """What the router would catch and log as a defect of its own fails the test."""
    with defects_surface():
        yield
