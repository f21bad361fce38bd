"""Models and clusters of real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from twopool_testing.cluster import Cluster, running_cluster
from twopool_testing.tiny_model import Reference, build_tiny_llama

CHUNK = 64
BLOCK = 16
WORKER_FLAGS = (
    *("--max-num-batched-tokens", str(CHUNK), "--block-size", str(BLOCK)),
    *("--kv-cache-memory", str(32 * 1024 * 1024)),
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker, shared by a module's tests."""
    with running_cluster(tiny_model, tmp_path_factory.mktemp("pair"), worker_flags=WORKER_FLAGS) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def balanced(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to the shared pair, no block stays held."""
    yield
    if "pair" in request.fixturenames:
        request.getfixturevalue("pair").assert_balanced()
