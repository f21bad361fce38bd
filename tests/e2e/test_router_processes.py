"""Several routers, and several processes of one: real processes, workers that compute nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from twopool.scripts.bench_router_control import set_step
from twopool.scripts.bench_router_model import build_model
from twopool_testing.cluster import Process, wait_for
from twopool_testing.http_server import raw_request

pytestmark = pytest.mark.e2e
BODY = {"prompt": "hi", "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("bench") / "model")


@contextmanager
def router(model: Path, folder: Path, name: str, *flags: str) -> Iterator[Process]:
    command = ["router", "--model", str(model), "--served-model-name", "m", "--port", "0", "--control-port", "0"]
    process = Process([*command, *flags], folder / f"{name}.log")
    try:
        process.wait_announced()
        yield process
    finally:
        process.kill()


@contextmanager
def workers(model: Path, *controls: str, max_running: int | None = None) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-P", "-m", "twopool.scripts.bench_router_workers", "--model", str(model)]
    for control in controls:
        command += ["--router", control]
    if max_running is not None:
        command += ["--max-running", str(max_running)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until_ready(url: str) -> None:
    wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 20, f"{url}/ready")


def stream(url: str) -> str:
    """A whole stream's text; raises when it is cut."""
    return httpx.post(f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=30).raise_for_status().text


def test_several_routers_share_the_workers(model: Path, tmp_path: Path) -> None:
    with (
        router(model, tmp_path, "a") as one,
        router(model, tmp_path, "b") as other,
        workers(model, one.announced["control"], other.announced["control"]) as process,
    ):
        set_step(process, 1.0)
        urls = [one.announced["http"], other.announced["http"]]
        for url in urls:
            until_ready(url)
        answers = [httpx.post(f"{url}/v1/completions", json=BODY, timeout=30).json() for url in urls]
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"] != ""
        one.kill()
        assert stream(urls[1]).endswith("data: [DONE]\n\n")


def test_a_process_is_renewed_without_a_lost_stream(model: Path, tmp_path: Path) -> None:
    """SIGTERM of one of several: its streams finish, the others take the new ones, and another takes its place."""
    with router(model, tmp_path, "router", "--router-processes", "3") as parent:
        url = parent.announced["http"]
        controls = parent.announced["control"].split(",")
        assert len(controls) == 3
        with workers(model, *controls) as process, ThreadPoolExecutor(24) as pool:
            set_step(process, 75.0)  # long enough that all streams are open at once on a busy machine
            children = [child.pid for child in psutil.Process(parent.pid).children()]
            assert len(children) == 3
            wait_for(lambda: ready_processes(url) == 3, 20, "three ready processes")
            streams = [pool.submit(stream, url) for _ in range(24)]
            wait_for(lambda: in_flight(url) == 24, 10, "all streams open")
            os.kill(children[0], signal.SIGTERM)
            for _ in range(10):
                assert httpx.post(f"{url}/v1/completions", json=BODY | {"max_tokens": 2}).status_code == 200
            assert all(answer.result().endswith("data: [DONE]\n\n") for answer in streams)
            wait_for(lambda: not psutil.pid_exists(children[0]), 20, "the end of the old process")
            wait_for(lambda: ready_processes(url) == 3, 20, "a replacement")
            now = {child.pid for child in psutil.Process(parent.pid).children()}
            assert len(now) == 3
        parent.signal(signal.SIGTERM)
        assert parent.wait(20) == 0
        assert not any(psutil.pid_exists(pid) for pid in now)


def test_one_process_may_hold_all_that_waits_and_then_none_takes_more(model: Path, tmp_path: Path) -> None:
    """``--max-queue`` is the router's, not a process's; what waited in one that is killed makes room."""
    flags = ("--router-processes", "3", "--max-queue", "6", "--max-queue-wait-s", "120")
    with router(model, tmp_path, "router", *flags) as parent, ExitStack() as sockets:
        url = parent.announced["http"]
        with workers(model, *parent.announced["control"].split(","), max_running=0):
            wait_for(lambda: ready_processes(url) == 3, 20, "three ready processes")
            holder, *others = (child.pid for child in psutil.Process(parent.pid).children())
            for pid in others:
                os.kill(pid, signal.SIGSTOP)
            try:
                asked = [sockets.enter_context(ask(url)) for _ in range(10)]
                wait_for(lambda: len(answers(asked)) == 4, 10, "four refusals")
            finally:
                for pid in others:
                    os.kill(pid, signal.SIGCONT)
            assert all(b" 429 " in answer and b"requests are waiting" in answer for answer in answers(asked))
            wait_for(lambda: ready_processes(url) == 3, 20, "three ready processes")
            again = [sockets.enter_context(ask(url)) for _ in range(6)]
            wait_for(lambda: len(answers(again)) == 6, 10, "refusals by whichever process")
            assert all(b" 429 " in answer for answer in answers(again))
            assert sorted(samples(url, "twopool_queue_length").values()) == [0, 0, 6]
            os.kill(holder, signal.SIGKILL)
            wait_for(lambda: not psutil.pid_exists(holder), 20, "the end of the killed process")
            wait_for(lambda: ready_processes(url) == 3, 20, "a replacement")
            later = [sockets.enter_context(ask(url)) for _ in range(6)]
            wait_for(lambda: sum(samples(url, "twopool_queue_length").values()) == 6, 10, "six waiting")
            assert answers(later) == []


def test_children_leave_with_a_killed_parent(model: Path, tmp_path: Path) -> None:
    with router(model, tmp_path, "router", "--router-processes", "2") as parent:
        children = psutil.Process(parent.pid).children()
        parent.kill()
        _, alive = psutil.wait_procs(children, timeout=15)
        assert not alive


def test_a_child_that_cannot_start_ends_the_parent_in_words(model: Path, tmp_path: Path) -> None:
    """A control port that is taken."""
    with router(model, tmp_path, "first") as first:
        taken = first.announced["control"].rpartition(":")[2]
        command = ["router", "--model", str(model), "--port", "0", "--control-port", taken, "--router-processes", "2"]
        second = Process(command, tmp_path / "second.log")
        assert second.wait(20) == 2
        assert "--control-port" in second.log_text()


def ask(url: str) -> socket.socket:
    """A connection with a request on it."""
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(raw_request(BODY, "/v1/completions"))
    connection.setblocking(False)
    return connection


def answers(connections: list[socket.socket]) -> list[bytes]:
    """Of those that have one by now; they keep it."""
    heads = []
    for connection in connections:
        with suppress(BlockingIOError):
            heads.append(connection.recv(65536, socket.MSG_PEEK))
    return heads


def samples(url: str, name: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {key: float(value) for key, value in (line.rsplit(" ", 1) for line in lines) if key.startswith(name)}


def in_flight(url: str) -> float:
    return sum(samples(url, "twopool_router_requests_in_flight{").values())


def ready_processes(url: str) -> int:
    ready = samples(url, "twopool_workers_ready{")
    by_process = {json.dumps(key.partition("router_process=")[2]) for key, value in ready.items() if value == 1}
    return len(by_process)
