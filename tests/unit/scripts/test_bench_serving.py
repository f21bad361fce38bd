"""The serving benchmark: arrivals, traces, figures, and the same load on our server and on a stub of another's."""

import asyncio
import gzip
import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from twopool.scripts import bench_serving, bench_serving_load, bench_serving_report
from twopool.scripts.bench_serving_load import (
    Outcome,
    Planned,
    Target,
    arrivals,
    prompt_text,
    read_trace,
    run_load,
)
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import MODEL, running_server
from twopool_testing.tiny_tokenizers import byte_level_tokenizer, write_model_folder


class _Stub(BaseHTTPRequestHandler):
    """The smallest OpenAI server: as many tokens as asked for, one event each; refuses prompts that say so."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["model"] == "refuse":
            self.send_error(429)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for index in range(0 if body["model"] == "silent" else body["max_tokens"]):
            self._event({"choices": [{"index": 0, "delta": {"content": f"t{index}"}}]})
        if body["model"] == "cut":
            self.close_connection = True
            return
        if body["model"] == "silent":
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True
            return
        words = len(body["messages"][0]["content"].split())
        usage = {"prompt_tokens": words, "completion_tokens": body["max_tokens"]}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, value: object) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def stub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Stub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_arrivals() -> None:
    assert arrivals(4, 3, "constant", 0) == [0.0, 0.25, 0.5]
    assert arrivals(math.inf, 2, "poisson", 0) == [0.0, 0.0]
    drawn = arrivals(10, 4000, "poisson", 1)
    assert drawn == sorted(drawn) and drawn == arrivals(10, 4000, "poisson", 1)
    assert drawn[-1] == pytest.approx(400, rel=0.1)


def test_a_mooncake_trace_keeps_its_shared_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [1, 3]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_trace(path, speed=2)
    assert (first.at_s, second.at_s, second.num_output) == (0, 1.0, 6)
    words = [prompt_text(item, index).split() for index, item in enumerate((first, second))]
    assert [len(text) for text in words] == [600, 700]
    assert words[0][:512] == words[1][:512] and words[0][512:600] != words[1][512:600]
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(packed, limit=1) == [Planned(0.0, 600, 5, (1, 2))]


def test_an_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808,10"]
    path.write_text("\n".join([*lines, "2023-11-16 18:17:04.0319600,3,8"]))
    first, second = read_trace(path)
    assert (first.num_input, second.num_output) == (4808, 8)
    assert second.at_s == pytest.approx(0.052)
    path.write_text("TIMESTAMP,ContextTokens\nsoon,3\n")
    with pytest.raises(ValueError, match="line 2"):
        read_trace(path)


def test_figures_of_known_outcomes() -> None:
    fast = Outcome(0, ttft_s=0.1, e2e_s=0.5, itl_s=[0.1, 0.1, 0.2], num_input=10, num_output=5)
    slow = Outcome(0, ttft_s=0.9, e2e_s=1.3, itl_s=[0.2, 0.2], num_input=10, num_output=3)
    failed = Outcome(0, ttft_s=0.01, error="cut")
    result = bench_serving_report.report([fast, slow, failed], seconds=2.0, slos={"ttft_ms": 500}, setting={})
    assert (result["num_requests"], result["num_failed"], result["num_good"]) == (3, 1, 1)
    assert (result["goodput_per_s"], result["output_tokens_per_s"]) == (0.5, 4.0)
    assert result["percentiles"]["ttft_ms"]["p50"] == pytest.approx(500)
    assert result["percentiles"]["tpot_ms"]["mean"] == pytest.approx((100 + 200) / 2)
    assert bench_serving_report.percentile([], 50) != bench_serving_report.percentile([], 50)


def test_tokens_without_text_meet_no_ttft_slo() -> None:
    """The server counted a token, but there was nothing to read: a good answer only for who asks for no first token."""
    bare = Outcome(0, e2e_s=0.5, num_input=10, num_output=1)
    for slos, num_good in (({"e2e_ms": 600.0}, 1), ({"itl_ms": 1.0}, 1), ({"ttft_ms": 1e9}, 0)):
        assert bench_serving_report.report([bare], seconds=1.0, slos=slos, setting={})["num_good"] == num_good


async def test_bodies_are_made_while_requests_run(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making all of them takes a second here; the first request leaves at once, the last is made when it is due."""
    monkeypatch.setattr(bench_serving_load, "BUILD_AHEAD_S", 0.2)
    made_s: list[float] = []
    sent: list[Outcome] = []

    def slow_text(planned: Planned, seed: int) -> str:
        time.sleep(0.025)
        made_s.append(time.perf_counter())
        return "word " * planned.num_input

    monkeypatch.setattr(bench_serving_load, "prompt_text", slow_text)
    planned = [Planned(0.05 * index, 5, 2) for index in reversed(range(40))]
    target = Target(stub, "stub", True, None, 20.0, {})
    outcomes = await run_load(target, planned, seed=0, on_done=sent.append)
    assert [outcome.at_s for outcome in outcomes] == [item.at_s for item in planned]
    assert [outcome.error for outcome in outcomes] == [None] * 40
    assert max(outcome.late_s for outcome in outcomes) < 0.5
    assert sent[0].at_s < 0.5
    assert made_s[-1] - made_s[0] > 0.05 * 39 - 0.5  # all at once, they are made within the first second


def test_the_command_against_another_server(stub: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command: load, table, JSON, picture, comparison of two files."""
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    common = ["run", "--base-url", stub, "--model", "stub", "--rate", "inf", "--input-tokens", "20"]
    for path in files:
        flags = ["--num-requests", "5", "--output-tokens", "4", "--slo", "e2e_ms=60000", "--json", str(path)]
        assert bench_serving.main([*common, *flags]) == 0
    result = json.loads(files[0].read_text())
    assert (result["num_good"], result["num_failed"], len(result["requests"])) == (5, 0, 5)
    assert {request["num_output"] for request in result["requests"]} == {4}
    assert {request["num_input"] for request in result["requests"]} == {20}
    picture = tmp_path / "both.png"
    assert bench_serving.main(["compare", *map(str, files), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "two" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "reason"), [("refuse", "429"), ("cut", "cut"), ("silent", "without a token")])
def test_refused_and_cut_answers_fail(stub: str, model: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-requests", "2", "--rate", "inf", "--output-tokens", "3"]
    assert bench_serving.main(["run", "--base-url", stub, "--model", model, *flags]) == 1
    assert reason in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-requests", "1", "--rate", "inf"]
    assert bench_serving.main(["run", "--base-url", "http://127.0.0.1:9/v1", "--model", "m", *flags]) == 1
    assert "failed" in capsys.readouterr().err


@pytest.mark.parametrize("chat", [False, True])
async def test_against_our_server(tmp_path: Path, chat: bool) -> None:
    from twopool.router.model_info import load_model_info

    model = load_model_info(write_model_folder(tmp_path / "model", byte_level_tokenizer()))
    done: list[Outcome] = []
    async with running_server(model, FakeDispatcher(lambda request, choice: [60, 61, 62])) as server:
        url = f"http://127.0.0.1:{server.server.port}/v1"
        target = Target(url, MODEL, chat, None, 20.0, {"ignore_eos": True})
        planned = [Planned(0.0, 5, 7), Planned(0.01, 5, 3)]
        outcomes = await run_load(target, planned, seed=0, on_done=done.append)
        wrong = await run_load(Target(url, "no", chat, None, 20.0, {}), planned[:1], seed=0, on_done=done.append)
    assert [(outcome.error, outcome.num_output) for outcome in outcomes] == [(None, 7), (None, 3)]
    assert all(outcome.ttft_s and outcome.e2e_s and outcome.num_input for outcome in outcomes)
    assert wrong[0].error is not None and "404" in wrong[0].error
    assert len(done) == 3


async def test_a_server_that_says_nothing() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        target = Target(f"http://127.0.0.1:{port}/v1", "m", True, None, 0.2, {})
        [outcome] = await run_load(target, [Planned(0.0, 1, 1)], seed=0, on_done=lambda outcome: None)
        await asyncio.sleep(0.05)
    assert outcome.error == "timeout"
