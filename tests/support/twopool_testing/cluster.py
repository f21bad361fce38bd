"""A router and workers as real processes, for end-to-end tests.

Every process is reaped, whatever the test does; ``Cluster.assert_balanced`` is the check that nothing leaked.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx

START_TIMEOUT_S = 60.0
BALANCE_S = 2.5
"""In which every block comes back, whatever fails: 2 s, and half a second until a heartbeat says so."""
BLOCK_STATES = ("free", "cached", "active", "pinned", "fetching", "quarantined")


class Process:
    """One twopool process: its first stdout line says it is up; its logs go to a file."""

    def __init__(self, command: list[str], log: Path, *, prefix: tuple[str, ...] = ()) -> None:
        """``prefix``: a command that runs this one in its place."""
        self.command = command
        self.log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "twopool.scripts.cli", *command],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.announced: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_announced(self) -> dict[str, Any]:
        """The line that says the process is up; raises with the log's end when it died instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait(10)
            raise RuntimeError(f"{self.command[0]} ended with {status}:\n{self.log_text()[-3000:]}")
        self.announced = cast(dict[str, Any], json.loads(line))
        return self.announced

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def is_running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """The exit status of a process that was told to end."""
        status = self._process.wait(timeout_s)
        self.kill()
        return status

    def kill(self) -> None:
        """SIGKILL and reap; idempotent."""
        if self.is_running():
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@dataclass
class Cluster:
    """``model`` is a local folder. ``worker_flags`` go to every worker, ``router_flags`` to the router."""

    model: Path
    folder: Path
    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    router: Process = field(init=False)
    workers: dict[str, Process] = field(default_factory=dict)
    nodes: dict[str, list[Process]] = field(default_factory=dict)
    """nodes 1, 2, ... of workers on several, by worker id"""
    client: httpx.Client = field(init=False)
    _num_fault_files: int = field(init=False, default=0)

    def start(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        flags: Mapping[str, tuple[str, ...]] | None = None,
        nnodes: Mapping[str, int] | None = None,
    ) -> None:
        """Start everything and wait until the router is ready. ``flags`` and ``nnodes`` are by worker id."""
        self.start_router()
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        for name in names:
            own = (flags or {}).get(name, ())
            self.start_worker(name, *own, nnodes=(nnodes or {}).get(name, 1), wait=False)
        for name in names:
            self.workers[name].wait_announced()
        self.wait_ready()

    def start_router(self) -> None:
        command = ["router", "--model", str(self.model), "--served-model-name", "m", "--port", "0"]
        self.router = Process([*command, "--control-port", "0", *self.router_flags], self.folder / "router.log")
        announced = self.router.wait_announced()
        self.client = httpx.Client(base_url=announced["http"], timeout=60)

    def start_worker(self, name: str, *flags: str, nnodes: int = 1, wait: bool = True) -> Process:
        """``nnodes``: start as many nodes, all on this host."""
        if nnodes > 1:
            flags += ("--nnodes", str(nnodes), "--master-port", str(free_port()))
            self.nodes[name] = [self.start_node(name, number, *flags) for number in range(1, nnodes)]
        process = self.workers[name] = Process(self.worker_command(name, *flags), self.folder / f"{name}.log")
        if wait:
            for one in (process, *self.nodes.get(name, ())):
                one.wait_announced()
        return process

    def start_node(self, name: str, number: int, *flags: str) -> Process:
        """A node of a worker; ``flags`` are the worker's."""
        command = self.worker_command(name, *flags, "--node-rank", str(number))
        return Process(command, self.folder / f"{name}.n{number}.log")

    def worker_command(self, name: str, *flags: str) -> list[str]:
        role = name.split("-", maxsplit=1)[0]
        common = ["--model", str(self.model), "--router", self.router.announced["control"], "--worker-id", name]
        common += ["--dtype", "float32", "--num-threads", "1", "--fault-points", str(self.folder / f"{name}.faults")]
        return [role, *common, *self.worker_flags, *flags]

    def hold(self, worker: str, **seconds: float) -> None:
        """From now on hold requests of ``worker`` in these states, and in no others."""
        self.faults(worker, *(f"{state}={value}" for state, value in seconds.items()))

    def faults(self, worker: str, *lines: str) -> None:
        """From now on just these faults (``kv_transfer/fault_points.py``) happen on ``worker``, counted anew."""
        self._num_fault_files += 1
        text = "\n".join((*lines, f"# {self._num_fault_files}"))
        target = self.folder / f"{worker}.faults"
        target.with_suffix(".new").write_text(text)
        target.with_suffix(".new").replace(target)

    def kill_worker(self, name: str) -> None:
        self.workers.pop(name).kill()

    def wait_ready(self, *, ready: bool = True, timeout_s: float = START_TIMEOUT_S) -> None:
        wait_for(lambda: (self.client.get("/ready").status_code == 200) == ready, timeout_s, "/ready")

    def close(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
        processes = [*self.workers.values(), *(node for nodes in self.nodes.values() for node in nodes)]
        processes += [self.router] if hasattr(self, "router") else []
        for process in processes:
            process.kill()

    # --- requests ---

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """A completion's body; raises for an error status."""
        body = {"model": "m", "prompt": prompt, "temperature": 0, "ignore_eos": True} | fields
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return cast(dict[str, Any], response.json())

    def token_ids(self, prompt: list[int], **fields: Any) -> list[int]:
        """The ids a completion of ``prompt`` gives."""
        choice = self.complete(prompt, return_token_ids=True, **fields)["choices"][0]
        return cast(list[int], choice["token_ids"])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream, without ``[DONE]``, whose presence is checked unless an error came."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            if response.status_code != 200:
                response.read()
                raise AssertionError(response.text)
            failed = False
            done = False
            for line in _lines(response):
                assert line.startswith("data: "), line
                if line == "data: [DONE]":
                    done = True
                    continue
                assert not done, "an event after [DONE]"
                event = cast(dict[str, Any], json.loads(line.removeprefix("data: ")))
                failed = failed or "error" in event
                yield event
                if failed:  # the connection ends without the end of the body, so that no client takes it for whole
                    return
            assert done, "the stream ended without [DONE] or an error"

    # --- figures ---

    def metrics(self) -> dict[str, float]:
        """Every sample of the router's /metrics by its full name with labels."""
        samples = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name] = float(value)
        return samples

    def metric_sum(self, name: str) -> float:
        """Sum of a metric over its labels; ``KeyError`` if no such metric is exported, with series or without."""
        text = self.client.get("/metrics").text
        stem = name.removesuffix("_sum").removesuffix("_count")
        if not any(f"# TYPE {family} " in text for family in (name, stem)):
            raise KeyError(name)
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    def wait_metric(self, name: str, value: float, timeout_s: float = 20.0) -> None:
        """Until the sum of ``name`` over its labels is ``value``."""
        wait_for(lambda: self.metric_sum(name) == value, timeout_s, f"{name} = {value}")

    def settled_metric(self, name: str) -> float:
        """The sum of a worker's counter once a heartbeat has reported all that is over."""
        time.sleep(0.7)
        return self.metric_sum(name)

    def wait_metric_above(self, name: str, value: float, timeout_s: float = 5.0) -> float:
        """The sum of ``name`` once it exceeds ``value``: workers report with their heartbeats."""
        wait_for(lambda: self.metric_sum(name) > value, timeout_s, f"{name} > {value}")
        return self.settled_metric(name)

    def blocks(self, worker: str) -> dict[str, int]:
        """A worker's KV blocks by state."""
        pattern = re.compile(rf'twopool_kv_blocks\{{.*worker="{worker}".*\}}')
        found = {}
        for key, value in self.metrics().items():
            if pattern.match(key):
                state = re.search(r'state="(\w+)"', key)
                assert state is not None
                found[state[1]] = int(value)
        return found

    def assert_balanced(self, *, within_s: float = BALANCE_S, stopped: str | None = None) -> None:
        """Within ``within_s`` no worker holds a block for a request, and the states sum to the pool's size.

        While worker ``stopped`` is, nothing is asked of it, and READs from it may keep blocks quarantined elsewhere.
        """
        names = [name for name in self.workers if name != stopped]
        held = [state for state in BLOCK_STATES[2:] if stopped is None or state != "quarantined"]

        def idle() -> bool:
            counts = [self.blocks(name) for name in names]
            return all(set(c) == set(BLOCK_STATES) and not any(c[state] for state in held) for c in counts)

        wait_for(idle, within_s, lambda: f"blocks to balance: { {n: self.blocks(n) for n in self.workers} }")


def _lines(response: httpx.Response) -> Iterator[str]:
    return (line for line in response.iter_lines() if line)


@contextlib.contextmanager
def running_cluster(
    model: Path,
    folder: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    worker_flags: tuple[str, ...] = (),
    router_flags: tuple[str, ...] = (),
    flags: Mapping[str, tuple[str, ...]] | None = None,
    nnodes: Mapping[str, int] | None = None,
) -> Iterator[Cluster]:
    """A started cluster; everything is killed at the end, and the logs are printed when the test fails."""
    cluster = Cluster(model, folder, worker_flags, router_flags)
    try:
        cluster.start(prefill=prefill, decode=decode, flags=flags, nnodes=nnodes)
        yield cluster
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            sys.stderr.write(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}\n")
        raise
    finally:
        cluster.close()


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], object], timeout_s: float, what: str | Callable[[], str]) -> None:
    """Poll until ``condition`` holds; raises ``AssertionError`` naming ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what if isinstance(what, str) else what()}")
        time.sleep(0.05)
