"""Loading a worker of several ranks, one of which cannot."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from twopool.engine.rank_processes import LocalRanks
from twopool.engine.tp_loading import load_worker
from twopool.protocol.config import DecodeConfig
from twopool.protocol.errors import ConfigError, ModelError, TwopoolError
from twopool_testing import failing_rank
from twopool_testing.rank_pids import left_over
from twopool_testing.tiny_model import build_tiny_llama


@pytest.mark.parametrize("kind", [ModelError, ConfigError])
def test_a_rank_that_cannot_load_says_so_for_the_worker(
    kind: type[TwopoolError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one, which could, goes too; no process and no memory stays."""
    program = (sys.executable, "-P", str(Path(failing_rank.__file__)), kind.__name__)
    monkeypatch.setattr(LocalRanks, "PROGRAM", program)
    config = DecodeConfig(
        worker_id="decode-0",
        tensor_parallel_size=3,
        num_threads=1,
        dtype="float32",
        device="cpu",
        kernel_backend="torch",
        kv_cache_memory=1 << 20,
    )
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(kind, match=r"rank 1 of 3: tensor model\.norm\.weight cannot be read"):
        load_worker(config, "decode", build_tiny_llama(tmp_path / "model"))
    deadline_s = time.monotonic() + 2
    while left := {child.pid for child in psutil.Process().children()} - before:
        assert time.monotonic() < deadline_s, left_over(left, ())
        time.sleep(0.02)
