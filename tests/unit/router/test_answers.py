"""Answers are what the OpenAPI document says: each one, read as its type and written again, is the same."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from twopool.router import answers
from twopool.router.interface import RoutedRequest
from twopool.router.model_info import ModelInfo
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import MODEL, RunningServer, running_server, sse_events

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
ALL: dict[str, Any] = {"n": 2, "return_token_ids": True, "timings": True, "max_tokens": 60}


def assert_is(answer: Any, kind: type) -> None:
    assert msgspec.to_builtins(msgspec.convert(answer, kind)) == answer


@pytest.fixture
async def server(tiny_model: ModelInfo) -> AsyncIterator[RunningServer]:
    """Thinks, answers or calls, whatever was asked."""

    def script(request: RoutedRequest, choice: int) -> list[int]:
        text = f"<think>hm</think>Well. {CALL}" if choice else "é 🙂"
        ids: list[int] = tiny_model.tokenizer.encode(text, add_special_tokens=False).tolist()
        return [*ids, 2]

    model = replace(tiny_model, reasoning_format="qwen3")
    async with running_server(model, FakeDispatcher(script)) as running:
        yield running


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**ALL, "stop": "🙂"},
        {**ALL, "logprobs": True, "top_logprobs": 2, "tools": TOOLS},
        {**ALL, "tools": TOOLS, "skip_special_tokens": False},
    ],
)
async def test_chats(server: RunningServer, fields: dict[str, Any]) -> None:
    whole = (await server.chat(**fields)).json()
    assert_is(whole, answers.ChatAnswer)
    assert ("tool_calls" in whole["choices"][-1]["message"]) == ("tools" in fields)
    options = {"include_usage": bool(fields), "continuous_usage_stats": "tools" in fields}
    events = sse_events((await server.chat(stream=True, stream_options=options, **fields)).text)
    for event in events[:-1]:
        assert_is(event, answers.ChatChunk)
    told = {key for event in events[:-1] for choice in event["choices"] for key in choice["delta"]}
    assert ("tool_calls" in told) == ("tools" in fields)


@pytest.mark.parametrize("fields", [{}, {**ALL, "stop": "🙂"}, {**ALL, "logprobs": 2, "echo": True}])
async def test_completions(server: RunningServer, fields: dict[str, Any]) -> None:
    assert_is((await server.complete(["a", "b"], **fields)).json(), answers.CompletionAnswer)
    options = {"include_usage": bool(fields), "continuous_usage_stats": "logprobs" in fields}
    events = sse_events((await server.complete(stream=True, stream_options=options, **fields)).text)
    for event in events[:-1]:
        assert_is(event, answers.CompletionChunk)


async def test_what_generates_nothing(server: RunningServer) -> None:
    for path, kind in (
        ("/v1/models", answers.ModelList),
        (f"/models/{MODEL}", answers.ModelCard),
        ("/health", answers.Health),
        ("/ready", answers.Readiness),
        ("/nope", answers.Error),
        ("/v1/models/nope", answers.Error),
    ):
        assert_is((await server.client.get(path)).json(), kind)
    msgspec.convert((await server.client.get("/version")).json(), answers.Version)  # the workers' part is free
    for body in ({}, {"messages": [], "n": 0}, {"model": "nope", "messages": []}):
        assert_is((await server.post("/v1/chat/completions", body)).json(), answers.Error)


def test_an_answer_of_another_shape_is_found_out() -> None:
    error = {"message": "m", "type": "t", "param": None, "code": None}
    assert_is({"error": error}, answers.Error)
    for wrong in ({"error": {**error, "more": 1}}, json.loads('{"error": {"message": "m"}}')):
        with pytest.raises((AssertionError, msgspec.ValidationError)):
            assert_is(wrong, answers.Error)
