"""The real HTTP server in a test's own event loop, and raw ways to talk to it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from twopool.protocol.config import RouterConfig
from twopool.router.app import RouterApp
from twopool.router.auth import ApiKeys
from twopool.router.model_info import ModelInfo
from twopool.router.server import HttpServer, build_server
from twopool_testing.fake_dispatcher import FakeDispatcher

MODEL = "tiny"


@dataclass
class RunningServer:
    app: RouterApp
    server: HttpServer
    client: httpx.AsyncClient
    dispatcher: FakeDispatcher

    async def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post(path, content=content, headers={"content-type": "application/json", **headers})

    async def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        return await self.post(
            "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        )

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw connection."""
        return await asyncio.open_connection("127.0.0.1", self.server.port)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of ``/metrics``."""
        for family in self.app.metrics.collect():
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        raise AssertionError(f"no sample {name} {labels}")


def sse_events(text: str) -> list[Any]:
    """The events of a stream: JSON objects, and ``"[DONE]"`` as it is."""
    assert text.endswith("\n\n")
    payloads = [block.removeprefix("data: ") for block in text[:-2].split("\n\n")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def raw_request(body: dict[str, Any], path: str = "/v1/chat/completions", extra: str = "") -> bytes:
    """A whole HTTP request as bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(data)}\r\n{extra}\r\n"
    return head.encode() + data


@asynccontextmanager
async def running_server(
    model: ModelInfo, dispatcher: FakeDispatcher, *, keys: list[str] | None = None, **flags: Any
) -> AsyncIterator[RunningServer]:
    """Serve ``model`` on a free port for the time of the block."""
    config = RouterConfig(model="local/tiny", served_model_name=(MODEL, "alias"), **{"port": 0, **flags})
    app = RouterApp(config, dispatcher, model, registry=CollectorRegistry(), api_keys=ApiKeys(keys or []))
    server = build_server(config, app)
    serving = asyncio.get_running_loop().create_task(server.serve())
    base_url = f"http://127.0.0.1:{server.port}"
    try:
        async with httpx.AsyncClient(base_url=base_url, timeout=20, trust_env=False) as client:
            yield RunningServer(app, server, client, dispatcher)
    finally:
        server.stop()
        await asyncio.wait_for(serving, 20)
