"""``twopool up -f`` with pools of unequal degrees: they serve, and end with ``up`` whichever way that ends."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from twopool_testing.cluster import wait_for
from twopool_testing.rank_pids import assert_gone, shared_inodes
from twopool_testing.tiny_model import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

POOLS = """
router: {{port: 0, served_model_name: m}}
workers: {{model: {model}, dtype: float32, device: cpu, num_threads: 1, kv-cache-memory: 16777216}}
pools:
  - {{role: prefill, tp: 2, block_size: 32, flags: {{max_num_batched_tokens: 64}}}}
  - {{role: decode}}
  - {{role: decode, tp: 3, block_size: 32}}
"""


@pytest.fixture
def up(tiny_model: Path, tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    pools = tmp_path / "pools.yaml"
    pools.write_text(POOLS.format(model=json.dumps(str(tiny_model))))
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "twopool.scripts.cli", "up", "-f", str(pools)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    yield process
    process.kill()
    process.wait()
    sys.stderr.write((tmp_path / "out").read_text()[-4000:])


def url(folder: Path) -> str:
    out = folder / "out"
    wait_for(lambda: "Serving m at" in out.read_text(), 90, "up to serve")
    found = re.search(r"Serving m at (\S+)/v1", out.read_text())
    assert found is not None
    return found[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_pools_of_a_file(
    up: "subprocess.Popen[bytes]", reference: Reference, tmp_path: Path, number: signal.Signals
) -> None:
    with httpx.Client(base_url=url(tmp_path), timeout=60) as client:
        stacks = client.get("/version").json()["system_fingerprints"]
        degrees = {
            tuple(stack[role]["tensor_parallel_size"] for role in ("prefill", "decode")): fingerprint
            for fingerprint, stack in stacks.items()
        }
        assert {(2, 1), (2, 3)} <= degrees.keys()
        for seed in range(6):
            ids = random.Random(seed).choices(range(3, 360), k=20 + 30 * seed)
            body = {"model": "m", "prompt": ids, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body | {"return_token_ids": True}).json()
            assert answer["system_fingerprint"] in (degrees[2, 1], degrees[2, 3])
            assert answer["choices"][0]["token_ids"] == reference.greedy(ids, 12)
    pids = [child.pid for child in psutil.Process(up.pid).children(recursive=True)]
    assert len(pids) >= 7  # the router and six ranks
    inodes = shared_inodes(pids)
    up.send_signal(number)
    assert up.wait(20) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    assert_gone(pids, inodes, within_s=2)
