"""The official Python client, unmodified."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from twopool.protocol.errors import OverloadedError, WorkerFailedError
from twopool.router.model_info import ModelInfo
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import RunningServer, running_server

TEXT = "Hello 🙂 world"


@pytest.fixture
async def server(tiny_model: ModelInfo) -> AsyncIterator[RunningServer]:
    ids = tiny_model.tokenizer.encode(TEXT, add_special_tokens=False).tolist()
    async with running_server(tiny_model, FakeDispatcher(lambda request, choice: [*ids, 2]), keys=["sk-x"]) as running:
        yield running


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"http://127.0.0.1:{server.server.port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="sk-x", max_retries=0) as made:
        yield made


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, max_tokens=50
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


async def test_streaming_helper(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="tiny", messages=[{"role": "user", "content": "hi"}]) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert "".join(deltas) == TEXT
    assert final.choices[0].message.content == TEXT


async def test_completions_and_models(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=50, logprobs=1)
    assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
    assert [model.id async for model in client.models.list()] == ["tiny", "alias"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_errors_are_the_client_s_own_classes(client: openai.AsyncOpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=[], temperature=0)
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="nope", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="sk-wrong").models.list()
    server.dispatcher.submit_error = OverloadedError("full")
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="tiny", prompt="a")


async def test_a_failed_stream_raises(client: openai.AsyncOpenAI, server: RunningServer) -> None:
    """RT-08: the client does not take a broken stream for a whole answer."""
    server.dispatcher.script = None
    creating = client.completions.create(model="tiny", prompt="a", stream=True)

    async def break_it() -> None:
        fake = await server.dispatcher.request()
        fake.send(0, [70])
        fake.fail(WorkerFailedError("lost"))

    stream, _ = await asyncio.gather(creating, break_it())
    with pytest.raises(openai.APIError, match="lost"):
        [chunk async for chunk in stream]
