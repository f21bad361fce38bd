"""Whole and streamed answers over the real server: shapes, indices, texts, counts."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from twopool.router.interface import RoutedRequest
from twopool.router.model_info import ModelInfo
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import RunningServer, running_server, sse_events

TEXT = "Hello 🙂 world, 日本語 DEF"
END = 2


def ids_of(model: ModelInfo, text: str) -> list[int]:
    ids: list[int] = model.tokenizer.encode(text, add_special_tokens=False).tolist()
    return ids


@pytest.fixture
async def server(tiny_model: ModelInfo) -> AsyncIterator[RunningServer]:
    """Answers every choice with ``TEXT`` and the end token; choice *i* begins *i* tokens later."""

    def script(request: RoutedRequest, choice: int) -> list[int]:
        return [*ids_of(tiny_model, TEXT)[choice:], END]

    async with running_server(tiny_model, FakeDispatcher(script)) as running:
        yield running


def joined(events: list[Any], index: int = 0) -> str:
    """The text a client would show for one choice."""
    text = ""
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] == index:
                text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


def finish_reasons(events: list[Any], index: int = 0) -> list[str]:
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


async def test_a_chat_answer(server: RunningServer, tiny_model: ModelInfo) -> None:
    server.dispatcher.cached_tokens = 16
    answer = (await server.chat()).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    prompt_tokens = len(server.dispatcher.requests[0].routed.prompt_ids)
    completion_tokens = len(ids_of(tiny_model, TEXT)) + 1
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
async def test_a_chat_stream(server: RunningServer, path: str) -> None:
    response = await server.post(path, {"messages": [{"role": "user", "content": "hi"}], "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = sse_events(response.text)
    assert events[-1] == "[DONE]"
    first, *middle, last = events[:-1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert first["object"] == "chat.completion.chunk"
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert joined(events) == TEXT
    assert all(event["choices"][0]["delta"]["content"] for event in middle)
    assert {event["id"] for event in events[:-1]} == {first["id"]}
    assert all("usage" not in event for event in events[:-1])


async def test_a_completion_and_its_stream(server: RunningServer) -> None:
    whole = (await server.complete(max_tokens=100)).json()
    assert whole["object"] == "text_completion"
    assert whole["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    events = sse_events((await server.complete(max_tokens=100, stream=True)).text)
    assert joined(events) == TEXT
    assert finish_reasons(events) == ["stop"]


@pytest.mark.parametrize("max_tokens", range(1, 12))
async def test_every_cut_gives_the_same_text_in_both_modes(server: RunningServer, max_tokens: int) -> None:
    """API-06, X-pd-first-token-nonstream: also inside a character."""
    whole = (await server.chat(max_tokens=max_tokens)).json()
    events = sse_events((await server.chat(max_tokens=max_tokens, stream=True)).text)
    assert joined(events) == whole["choices"][0]["message"]["content"]
    assert finish_reasons(events) == [whole["choices"][0]["finish_reason"]] == ["length"]
    assert whole["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("is_chat", [True, False])
async def test_the_likeliest_of_more_choices(tiny_model: ModelInfo, is_chat: bool, logprobs: int | None) -> None:
    """By the mean: by the sum, "c" would be before "aaaa". Tokens that a stop string cut off count."""
    dispatcher = FakeDispatcher()
    words = [ids_of(tiny_model, text) for text in ("aaaa", "b!", "c", "d")]
    assert len(words[0]) > 1
    means = [-0.5, -0.25, -0.9, -2.0]
    fields: dict[str, Any] = {"n": 2, "best_of": 4, "max_tokens": 9, "stop": "!"}
    if logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": logprobs} if is_chat else {"logprobs": logprobs}
    async with running_server(tiny_model, dispatcher) as server:
        asked = asyncio.create_task(server.chat(**fields) if is_chat else server.complete(**fields))
        fake = await dispatcher.request()
        assert (fake.routed.sampling.n, fake.routed.sampling.logprobs) == (4, 0 if logprobs is None else logprobs)
        for choice in (3, 2, 0, 1):
            fake.logprob = means[choice]
            for token in words[choice][:-1]:
                fake.send(choice, [token])
            fake.send(choice, words[choice][-1:], "length")
        answer = (await asked).json()
    texts = [choice["message"]["content"] if is_chat else choice["text"] for choice in answer["choices"]]
    assert texts == ["b", "aaaa"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    assert [choice["logprobs"] is None for choice in answer["choices"]] == [logprobs is None] * 2
    assert answer["usage"]["completion_tokens"] == sum(map(len, words))


async def test_each_prompt_has_its_best(tiny_model: ModelInfo) -> None:
    dispatcher = FakeDispatcher()
    [a], [b] = ids_of(tiny_model, "a"), ids_of(tiny_model, "b")
    async with running_server(tiny_model, dispatcher) as server:
        asked = asyncio.create_task(server.complete(["x", "y"], best_of=2, max_tokens=1, echo=True))
        for number, better in enumerate((1, 0)):
            fake = await dispatcher.request(number)
            for choice, token in enumerate((a, b)):
                fake.logprob = -0.5 if choice == better else -1.5
                fake.send(choice, [token], "length")
        answer = (await asked).json()
    assert [choice["text"] for choice in answer["choices"]] == ["xb", "ya"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("include", [True, False, None])
async def test_usage_in_streams(server: RunningServer, include: bool | None) -> None:
    """API-07, M-usage-chunk."""
    options = None if include is None else {"include_usage": include}
    events = sse_events((await server.chat(stream=True, stream_options=options)).text)
    whole = (await server.chat()).json()
    if include:
        assert events[-2]["choices"] == []
        assert events[-2]["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in events[:-2])
    else:
        assert all("usage" not in event for event in events[:-1])


async def test_continuous_usage(server: RunningServer) -> None:
    """M-chunked-usage."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = sse_events((await server.chat(stream=True, stream_options=options, max_tokens=3)).text)[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1


@pytest.mark.parametrize("chat", [True, False])
async def test_several_choices_stream(server: RunningServer, tiny_model: ModelInfo, chat: bool) -> None:
    """API-17, X-pd-n2-hang."""
    send = server.chat if chat else server.complete
    events = sse_events((await send(n=3, stream=True, max_tokens=100)).text)
    assert events.count("[DONE]") == 1
    ids = ids_of(tiny_model, TEXT)
    seen_finish: set[int] = set()
    roles = []
    for event in events[:-1]:
        [choice] = event["choices"]
        assert choice["index"] not in seen_finish
        if choice["finish_reason"] is not None:
            seen_finish.add(choice["index"])
        if choice.get("delta", {}).get("role"):
            roles.append(choice["index"])
    assert seen_finish == {0, 1, 2}
    assert sorted(roles) == ([0, 1, 2] if chat else [])
    for index in range(3):
        assert joined(events, index) == tiny_model.tokenizer.table.decode(ids[index:], skip_special_tokens=True)


async def test_several_prompts_and_choices(server: RunningServer, tiny_model: ModelInfo) -> None:
    """X-prompt-forms: index = prompt * n + sample, prompt tokens count once a prompt."""
    a, b, c, x, y = (ids_of(tiny_model, letter)[0] for letter in "abcxy")
    server.dispatcher.script = lambda request, choice: [int(request.prompt_ids[-1]), (x, y)[choice], END]
    body = {"prompt": [[a, b], [c]], "n": 2, "echo": True}
    whole = (await server.complete(**body)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == ["abbx", "abby", "ccx", "ccy"]
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == 12
    events = sse_events((await server.complete(**body, stream=True)).text)
    assert [joined(events, index) for index in range(4)] == texts
    assert events.count("[DONE]") == 1


async def test_echo(server: RunningServer) -> None:
    """X-echo-max-tokens-0, X-prompt-forms."""
    whole = (await server.complete("Your answer: Yes", echo=True, max_tokens=0)).json()
    assert whole["choices"][0]["text"] == "Your answer: Yes"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 0
    assert server.dispatcher.requests == []
    events = sse_events((await server.complete("Your answer: Yes", echo=True, max_tokens=0, stream=True)).text)
    assert (joined(events), finish_reasons(events)) == ("Your answer: Yes", ["length"])
    assert (await server.complete("hi", max_tokens=0)).json()["choices"][0]["text"] == ""
    both = (await server.complete("Say: ", echo=True, max_tokens=100)).json()
    assert both["choices"][0]["text"] == "Say: " + TEXT
    prompt = server.dispatcher.requests[-1].routed.prompt_ids.tolist()
    assert (await server.complete(prompt, echo=True, max_tokens=100)).json()["choices"][0]["text"] == "Say: " + TEXT


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_inside_a_token(server: RunningServer, tiny_model: ModelInfo, stream: bool) -> None:
    """API-02."""
    table, ids = tiny_model.tokenizer.table, ids_of(tiny_model, TEXT)
    stop = "orl"
    length = next(i for i in range(len(ids)) if stop in table.decode(ids[:i], skip_special_tokens=True))
    response = await server.chat(stop=[stop, "never"], stream=stream)
    if stream:
        events = sse_events(response.text)
        text, reasons = joined(events), finish_reasons(events)
    else:
        [choice] = response.json()["choices"]
        text, reasons = choice["message"]["content"], [choice["finish_reason"]]
        assert choice["stop_reason"] == stop
        assert response.json()["usage"]["completion_tokens"] == length
    assert text == TEXT[: TEXT.index(stop)]
    assert reasons == ["stop"]
    request = server.dispatcher.requests[0].routed
    assert server.dispatcher.finished_choices == [(request.request_id, 0)]


async def test_stop_token_and_end_token_options(server: RunningServer, tiny_model: ModelInfo) -> None:
    ids = ids_of(tiny_model, TEXT)
    answer = (await server.chat(stop_token_ids=[ids[1]])).json()
    assert answer["choices"][0]["stop_reason"] == ids[1]
    assert answer["choices"][0]["message"]["content"] == "Hello"
    answer = (await server.chat(ignore_eos=True, max_tokens=len(ids) + 2)).json()
    assert answer["usage"]["completion_tokens"] == len(ids) + 2
    assert answer["choices"][0]["message"]["content"] == TEXT + "Hello"
    answer = (await server.chat(ignore_eos=True, max_tokens=len(ids) + 1, skip_special_tokens=False)).json()
    assert answer["choices"][0]["message"]["content"] == TEXT + "<|im_end|>"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("top", [None, 0, 1, 3])
async def test_chat_logprobs(server: RunningServer, stream: bool, top: int | None) -> None:
    """API-12, X-logprobs-chat-shape, X-pd-first-logprob."""
    response = await server.chat(logprobs=True, top_logprobs=top, stream=stream, max_tokens=6)
    if stream:
        events = sse_events(response.text)[:-1]
        choices = [event["choices"][0] for event in events]
        entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        text = joined([*events, "[DONE]"])
    else:
        [choice] = response.json()["choices"]
        entries, text = choice["logprobs"]["content"], choice["message"]["content"]
    assert len(entries) == 6
    assert bytes([byte for entry in entries for byte in entry["bytes"]]).decode() == text
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == (top or 0)
        assert entry["logprob"] <= 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [0, 1, 5])
async def test_completion_logprobs(server: RunningServer, tiny_model: ModelInfo, stream: bool, count: int) -> None:
    """API-11."""
    response = await server.complete(logprobs=count, stream=stream, max_tokens=100)
    parts = [event["choices"][0] for event in sse_events(response.text)[:-1]] if stream else response.json()["choices"]
    merged: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in (part["logprobs"] or {}).items():
            merged[name] += values
    lengths = {len(values) for values in merged.values()}
    assert len(lengths) == 1
    assert "".join(part["text"] for part in parts) == TEXT
    table, before = tiny_model.tokenizer.table, b""
    for token_id, offset in zip([*ids_of(tiny_model, TEXT), END], merged["text_offset"], strict=True):
        assert offset == len(before.decode(errors="ignore"))
        before += table.token_bytes(token_id)
    for token, tops in zip(merged["tokens"], merged["top_logprobs"], strict=True):
        assert token in tops
        assert len(tops) == max(count, 1)


async def test_padding_ids_are_empty_text_and_no_alternatives(server: RunningServer, tiny_model: ModelInfo) -> None:
    """NUM-05."""
    padding = tiny_model.vocab_size - 1
    letter = ids_of(tiny_model, "a")[0]
    server.dispatcher.script = lambda request, choice: [padding, letter, END]
    [choice] = (await server.chat(logprobs=True, top_logprobs=2)).json()["choices"]
    assert choice["message"]["content"] == "a"
    assert choice["logprobs"]["content"][0]["bytes"] == []
    assert all(top["token"] for entry in choice["logprobs"]["content"] for top in entry["top_logprobs"])


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan")])
async def test_logprobs_that_json_cannot_say(server: RunningServer, logprob: float) -> None:
    server.dispatcher.logprob = logprob
    [choice] = (await server.chat(logprobs=True, max_tokens=1)).json()["choices"]
    assert choice["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_steps_that_pile_up_merge_into_one_event(tiny_model: ModelInfo) -> None:
    a, b, c, d = (ids_of(tiny_model, letter)[0] for letter in "abcd")
    async with running_server(tiny_model, FakeDispatcher()) as server:
        request = server.client.build_request("POST", "/v1/completions", json={"prompt": "hi", "stream": True})
        answering = asyncio.create_task(server.client.send(request, stream=True))
        fake = await server.dispatcher.request()
        fake.send(0, [a])
        response = await answering
        lines = response.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == "a"
        fake.send(0, [b])  # opens the short way for those that follow
        await asyncio.sleep(0.01)
        assert await anext(lines) == ""
        assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == "b"
        for token_id in (c, d, a):
            fake.send(0, [token_id])
        assert await anext(lines) == ""
        assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == "cda"
        fake.send(0, [], "length")
        assert [line async for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("in_one_turn", [True, False])
async def test_both_ways_of_a_token_keep_their_order(tiny_model: ModelInfo, chat: bool, in_one_turn: bool) -> None:
    """Alone, several at once, within a character: whatever a turn of the loop mixes, each is written once, in order."""
    steps = [[i] for i in ids_of(tiny_model, "a日b🙂c")]
    steps += [ids_of(tiny_model, "def"), *([i] for i in ids_of(tiny_model, 'g"\\é')), ids_of(tiny_model, "hi")]
    async with running_server(tiny_model, FakeDispatcher()) as server:
        path = "chat/completions" if chat else "completions"
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
        body = {**prompt, "stream": True, "stream_options": {"include_usage": True}}
        answering = asyncio.create_task(server.post(f"/v1/{path}", body))
        fake = await server.dispatcher.request()
        fake.send(0, steps[0])
        await asyncio.sleep(0.01)
        for step in steps[1:]:
            fake.send(0, step)
            if not in_one_turn:
                await asyncio.sleep(0)
        assert fake.lane is not None or len(steps[-1]) > 1
        fake.send(0, ids_of(tiny_model, "!"), "length")
        events = sse_events((await answering).text)[:-1]
    choices = [event["choices"][0] for event in events[:-1]]
    texts = [choice["delta"].get("content") if chat else choice["text"] for choice in choices]
    assert "".join(text or "" for text in texts) == 'a日b🙂cdefg"\\éhi!'
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert events[-1]["usage"]["completion_tokens"] == sum(map(len, steps)) + 1
    assert server.metric("twopool_generation_tokens_total") == sum(map(len, steps)) + 1


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stop", [None, "orl"])
async def test_token_ids_on_request(
    server: RunningServer, tiny_model: ModelInfo, is_chat: bool, stream: bool, stop: str | None
) -> None:
    """Every token that counts is told, the one that ended the choice and those without text among them; the prompt's
    once, where vLLM has them.
    """
    fields: dict[str, Any] = {"return_token_ids": True, "stream": stream, "stop": stop, "max_tokens": 100, "n": 2}
    response = await (server.chat(**fields) if is_chat else server.complete(["hi", "yo!"], **fields))
    events = sse_events(response.text)[:-1] if stream else [response.json()]
    prompts = [request.routed.prompt_ids.tolist() for request in server.dispatcher.requests]
    told: dict[int, list[int]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        if not is_chat and choice["index"] not in told:
            assert choice["prompt_token_ids"] == prompts[choice["index"] // 2]
        else:
            assert "prompt_token_ids" not in choice
        told.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    assert [event.get("prompt_token_ids") for event in events[:2]] == [prompts[0] if is_chat else None, None][
        : len(events)
    ]
    assert all("prompt_token_ids" not in event for event in events[1:])
    assert sorted(told) == list(range(2 * len(prompts)))
    for index, mine in told.items():
        ids = [*ids_of(tiny_model, TEXT)[index % 2 :], END]
        assert mine == (ids if stop is None else ids[: len(mine)])
        assert stop is None or "orl" in tiny_model.tokenizer.table.decode(mine, skip_special_tokens=True)
    assert stream or sum(map(len, told.values())) == events[0]["usage"]["completion_tokens"]


async def test_a_prompt_s_ids_are_told_where_nothing_follows(server: RunningServer) -> None:
    for echo in (True, False):
        fields: dict[str, Any] = {"return_token_ids": True, "max_tokens": 0, "echo": echo}
        events = sse_events((await server.complete([5, 6, 7], stream=True, **fields)).text)[:-1]
        [whole] = (await server.complete([5, 6, 7], **fields)).json()["choices"]
        assert events[0]["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"] == [5, 6, 7]
        assert sum("prompt_token_ids" in event["choices"][0] for event in events) == 1
        assert joined([*events, "[DONE]"]) == whole["text"]
