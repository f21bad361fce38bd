"""Nodes that share no network but a wire: two network namespaces, and the wire is cut.

Names of hosts lead nowhere here, traffic is encrypted with the cluster's key, and KV goes over TCP.
"""

import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from twopool.protocol.security import generate_cluster_key
from twopool_testing.cluster import Process, wait_for
from twopool_testing.rank_pids import assert_gone, rank_pids, shared_inodes
from twopool_testing.tiny_model import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HERE, THERE = "twopool-a", "twopool-b"
ADDRESSES = {HERE: "10.231.99.1", THERE: "10.231.99.2"}
WIRES = {HERE: "twopool0", THERE: "twopool1"}
GONE_WITHIN_S = 2.0
NUM_TOKENS = 16


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def networks() -> Iterator[None]:
    """Two networks and a wire between them."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command")
    made = []
    try:
        try:
            for name in ADDRESSES:
                ip("netns", "add", name)
                made.append(name)
            wire = ("link", "add", WIRES[HERE], "netns", HERE, "type", "veth", "peer", "name", WIRES[THERE])
            ip(*wire, "netns", THERE)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for name, address in ADDRESSES.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", WIRES[name])
            for link in ("lo", WIRES[name]):
                ip("-n", name, "link", "set", link, "up")
        yield
    finally:
        for name in made:
            ip("netns", "del", name)


class Deployment:
    """A router beside node 0 of the prefill worker and node 1 of the decode worker; their other nodes over the wire."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._folder = folder
        self._key = folder / "cluster.key"
        generate_cluster_key(self._key)
        self._model = model
        self._uds = folder / "http"
        self.processes: dict[str, Process] = {}
        transport = httpx.HTTPTransport(uds=str(self._uds))
        self.client = httpx.Client(transport=transport, base_url="http://router", timeout=60)

    def start_all(self) -> None:
        model = ("--model", str(self._model))
        router = ["router", *model, "--served-model-name", "m", "--uds", str(self._uds), "--control-port", "0"]
        self.start("router", HERE, *router)
        control = self.processes["router"].wait_announced()["control"]
        common = [*model, "--router", control, "--dtype", "float32", "--num-threads", "1"]
        common += ["--tensor-parallel-size", "2", "--nnodes", "2", "--kv-cache-memory", str(16 * 1024 * 1024)]
        common += ["--ucx-tls", "tcp"]
        for role, port, places in (("prefill", 29511, (HERE, THERE)), ("decode", 29512, (THERE, HERE))):
            for number, place in enumerate(places):
                meeting = ["--node-rank", str(number), "--master-addr", ADDRESSES[places[0]]]
                self.start(f"{role}.n{number}", place, role, *common, *meeting, "--master-port", str(port))
        for process in self.processes.values():
            if not process.announced:
                process.wait_announced()
        wait_for(lambda: self.client.get("/ready").status_code == 200, 60, "/ready")

    def start(self, name: str, place: str, *command: str) -> None:
        prefix = ("ip", "netns", "exec", place)
        own = [*command, "--host", ADDRESSES[place], "--cluster-key", str(self._key)]
        self.processes[name] = Process(own, self._folder / f"{name}.log", prefix=prefix)

    def token_ids(self, prompt: list[int]) -> list[int]:
        body = {"model": "m", "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
        response = self.client.post("/v1/completions", json=body | {"return_token_ids": True})
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["choices"][0]["token_ids"]
        return ids

    def close(self) -> None:
        self.client.close()
        for process in self.processes.values():
            process.kill()


def test_two_hosts_and_a_wire_that_is_cut(
    networks: None, tiny_model: Path, reference: Reference, tmp_path: Path
) -> None:
    deployment = Deployment(tiny_model, tmp_path)
    try:
        deployment.start_all()
        for length in (1, 33, 200):
            prompt = random.Random(length).choices(range(3, 360), k=length)
            assert deployment.token_ids(prompt) == reference.greedy(prompt, NUM_TOKENS)
        workers = [process for name, process in deployment.processes.items() if name != "router"]
        pids = [pid for process in workers for pid in (process.pid, *rank_pids(process.pid))]
        assert len(pids) == 6
        inodes = shared_inodes(pids)
        ip("-n", HERE, "link", "set", WIRES[HERE], "down")
        cut_s = time.monotonic()
        for process in workers:
            assert process.wait(GONE_WITHIN_S - (time.monotonic() - cut_s)) == 1
        assert_gone(pids, inodes, within_s=GONE_WITHIN_S - (time.monotonic() - cut_s))
    except BaseException:
        for log in sorted(tmp_path.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        raise
    finally:
        deployment.close()
