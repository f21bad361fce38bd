"""A prefill worker in float32 and decode workers in bfloat16: refused, or converted where that was asked for."""

import random
from pathlib import Path

import pytest

from twopool_testing.cluster import running_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = ("--max-num-batched-tokens", "32", "--kv-cache-memory", str(16 * 1024 * 1024), "--kv-verify", "all")
DTYPES = {"prefill-0": ("--dtype", "float32"), "decode-0": ("--dtype", "bfloat16", "--no-local-prefill")}


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 360), k=100)


def test_converted_where_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    """X-pd-wrong-layout-silent: counted, checked on both sides, and the same twice."""
    with running_cluster(tiny_model, tmp_path, worker_flags=(*FLAGS, "--kv-convert-dtype"), flags=DTYPES) as cluster:
        answers = [cluster.token_ids(prompt(seed), max_tokens=8) for seed in (1, 2, 1)]
        assert all(len(answer) == 8 for answer in answers) and answers[0] == answers[2]
        moved = cluster.wait_metric_above("twopool_kv_converted_bytes_total", 0)
        assert moved == cluster.metric_sum("twopool_nixl_bytes_transferred_sum")
        assert cluster.metric_sum("twopool_kv_verified_bytes_total") > 0
        assert cluster.metric_sum("twopool_nixl_num_failed_transfers_total") == 0
        cluster.assert_balanced()
    assert "is converted from float32 to bfloat16" in (tmp_path / "decode-0.log").read_text()


def test_refused_by_default(tiny_model: Path, tmp_path: Path) -> None:
    """The decode worker serves alone; a prefill worker that it cannot read from changes nothing."""
    router_flags = ("--min-prefill", "0")
    with running_cluster(
        tiny_model, tmp_path, prefill=0, worker_flags=(*FLAGS, "--dtype", "bfloat16"), router_flags=router_flags
    ) as cluster:
        cluster.start_worker("prefill-0", *DTYPES["prefill-0"])
        assert len(cluster.token_ids(prompt(1), max_tokens=8)) == 8, "decode computes the prompt itself"
        cluster.wait_metric_above("twopool_kv_handshakes_refused_total", 3, timeout_s=20)  # and tried again
        assert cluster.metric_sum("twopool_nixl_bytes_transferred_sum") == 0
    assert "dtype bfloat16 here, float32 there" in (tmp_path / "decode-0.log").read_text()
    assert (tmp_path / "prefill-0.log").read_text().count("left within the handshake") == 1
