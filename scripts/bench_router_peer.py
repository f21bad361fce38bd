"""sglang-router for the router benchmark: its own virtual environment, and SGLang's two kinds of workers, mocked.

The mocks answer over HTTP what SGLang's servers answer: the prefill server a body nobody reads, the decode server one
event a token, each its own write. The router parses no token and no text of it, exactly as in production.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any, cast

import httptools
import uvloop

from twopool.scripts.bench_router_control import follow_stdin
from twopool.scripts.bench_router_model import read_answer

REQUIREMENT = "sglang-router==0.3.2"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


def installed_python(folder: Path) -> Path:
    """The Python of a virtual environment with sglang-router; made when it is not there."""
    python = folder / "bin" / "python"
    probe = [str(python), "-c", "import sglang_router"]
    if python.exists() and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return python
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", REQUIREMENT]
    subprocess.run(install, check=True)
    return python


def router_command(python: Path, port: int, metrics_port: int, prefill: str, decode: str) -> list[str]:
    """One pair of workers and the cheapest policy: what is left is moving bytes."""
    command = [str(python), "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--prefill", prefill, "--decode", decode, "--policy", "round_robin"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    return [*command, "--log-level", "error"]


class MockServers:
    """State shared by the connections of both servers."""

    def __init__(self, texts: list[str]) -> None:
        self.step_ms = 0.0
        self._texts = [json.dumps(text).encode() for text in texts]
        self._streams: dict[MockConnection, _Stream] = {}
        self._has_work = asyncio.Event()

    def begin(self, connection: "MockConnection", body: dict[str, Any]) -> None:
        """Answer a decode request; its first token leaves at once."""
        stream = _Stream(body, int(time.time()))
        self._streams[connection] = stream
        connection.transport.write(_HEAD + self._chunk(stream))
        self._has_work.set()

    def forget(self, connection: "MockConnection") -> None:
        self._streams.pop(connection, None)

    async def run(self) -> None:
        """Step for ever, as ``MockDecode`` does."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._has_work.clear()
            if not self._streams:
                await self._has_work.wait()
                due = loop.time()
            due = max(due + self.step_ms / 1e3, loop.time() - 0.1)
            await asyncio.sleep(max(0.0, due - loop.time()))
            for connection, stream in list(self._streams.items()):
                if stream.index < stream.max_tokens:
                    connection.transport.write(self._chunk(stream))
                if stream.index >= stream.max_tokens:
                    connection.transport.write(stream.ending)
                    del self._streams[connection]

    def _chunk(self, stream: "_Stream") -> bytes:
        text = self._texts[stream.index % len(self._texts)]
        stream.index += 1
        event = b"".join((stream.before, text, stream.after))
        return b"%x\r\n%b\r\n" % (len(event), event)


class _Stream:
    def __init__(self, body: dict[str, Any], created: int) -> None:
        # The router renames ``max_tokens``; a client that comes without one does not.
        self.max_tokens = int(body.get("max_completion_tokens") or body["max_tokens"])
        self.index = 0
        head = {"id": "0" * 32, "object": "chat.completion.chunk", "created": created, "model": body["model"]}
        start = json.dumps(head, separators=(",", ":"))[:-1]
        self.before = f'data: {start},"choices":[{{"index":0,"delta":{{"content":'.encode()
        self.after = b'},"logprobs":null,"finish_reason":null,"matched_stop":null}]}\n\n'
        last = f'data: {start},"choices":[{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"length"}}]}}\n\n'
        ending = last.encode() + b"data: [DONE]\n\n"
        self.ending = b"%x\r\n%b\r\n" % (len(ending), ending) + _END


class MockConnection(asyncio.Protocol):
    """One HTTP connection of either server."""

    transport: asyncio.Transport

    def __init__(self, servers: MockServers, *, is_decode: bool) -> None:
        self._servers = servers
        self._is_decode = is_decode
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._servers.forget(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"POST" and self._is_decode:
            self._servers.begin(self, json.loads(self._body))
            return
        body = b'{"status":"ok","model_path":"bench","choices":[]}'
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)


async def _serve(texts: list[str]) -> None:
    loop = asyncio.get_running_loop()
    servers = MockServers(texts)
    prefill = await loop.create_server(lambda: MockConnection(servers, is_decode=False), "127.0.0.1", 0)
    decode = await loop.create_server(lambda: MockConnection(servers, is_decode=True), "127.0.0.1", 0)
    listening = (prefill, decode)
    print(json.dumps([server.sockets[0].getsockname()[1] for server in listening]), flush=True)
    stepping = asyncio.ensure_future(servers.run())
    try:
        await follow_stdin(servers)
    finally:
        stepping.cancel()
        for server in listening:
            server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the benchmark's model")
    args = parser.parse_args()
    _, texts = read_answer(args.model)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
