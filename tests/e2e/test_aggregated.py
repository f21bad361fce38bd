"""A prefill and a decode worker answer what one worker that does both answers, whatever is asked and however."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twopool_testing.cluster import Cluster, running_cluster
from twopool_testing.tiny_model import Reference

pytestmark = pytest.mark.e2e

WORKER_FLAGS = ("--max-num-batched-tokens", "64", "--block-size", "16", "--kv-cache-memory", str(32 * 1024 * 1024))
LONG = "The quick brown fox jumps over the lazy dog. " * 6
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TURNS = [
    {"role": "user", "content": "Hello world, hello there!"},
    {"role": "assistant", "content": "été 日本語 🙂"},
    {"role": "user", "content": LONG},
]
SAMPLED = {"temperature": 1.0, "seed": 11}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "min-tokens": {"min_tokens": 5, "max_tokens": 10, "ignore_eos": False},
    "usage": {"stream_options": {"include_usage": True}},
    "two-choices": {"n": 2, **SAMPLED},
    "best-of": {"n": 2, "best_of": 4, **SAMPLED},
    "echo": {"echo": True},
    "echo-and-logprobs": {"echo": True, "logprobs": 2},
    "echo-and-nothing-else": {"echo": True, "max_tokens": 0},
    "logprobs": {"logprobs": 3, **SAMPLED},
    "prompt-logprobs": {"prompt_logprobs": 2},
    "one-token": {"max_tokens": 1},
    "several-prompts": {"prompt": ["a", LONG, "日本語 é"], "n": 2, **SAMPLED},
    "ids": {"prompt": list(range(3, 120)), "return_token_ids": True},
    "stop": {"stop": ["e", "\ufffd"], "include_stop_str_in_output": True, "max_tokens": 40},
    "stop-ids": {"stop_token_ids": list(range(200, 320)), "max_tokens": 40},
    "penalties": {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {"70": 5, "71": 4.5}, **SAMPLED},
    "truncated": {"top_k": 7, "top_p": 0.8, "min_p": 0.05, "skip_special_tokens": False, **SAMPLED},
    "regex": {"guided_regex": "[ab]{3,9}", "ignore_eos": False},
    "choice": {"structured_outputs": {"choice": ["yes", "no, never"]}, "ignore_eos": False},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two-choices-and-logprobs": {"n": 2, "logprobs": True, "top_logprobs": 2, **SAMPLED},
    "continued": {"messages": TURNS[:2], "continue_final_message": True},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        "ignore_eos": False,
        "max_tokens": 60,
    },
    "tool": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "ignore_eos": False,
        "max_tokens": 80,
    },
}
SHAPES = [("/v1/completions", name) for name in COMPLETIONS] + [("/v1/chat/completions", name) for name in CHATS]


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker that prefills and decodes."""
    folder = tmp_path_factory.mktemp("alone")
    flags = ("--min-prefill", "0")
    with running_cluster(tiny_model, folder, prefill=0, worker_flags=WORKER_FLAGS, router_flags=flags) as cluster:
        yield cluster


def body_of(path: str, name: str) -> dict[str, Any]:
    common = {"model": "m", "temperature": 0, "ignore_eos": True, "max_tokens": 20}
    if path == "/v1/completions":
        return common | {"prompt": LONG} | COMPLETIONS[name]
    return common | {"messages": TURNS} | CHATS[name]


def whole(cluster: Cluster, path: str, body: dict[str, Any]) -> Any:
    """All of an answer but what names it."""
    response = cluster.client.post(path, json={key: value for key, value in body.items() if key != "stream_options"})
    assert response.status_code == 200, response.text
    answer = response.json()
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    return {key: value for key, value in answer.items() if key not in ("id", "created", "system_fingerprint")}


def joined(cluster: Cluster, path: str, body: dict[str, Any]) -> tuple[Any, ...]:
    """A stream's texts, arguments, tokens and endings by choice, and its usage, however it was cut into events."""
    texts: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    endings: dict[int, Any] = {}
    usages = []
    for event in cluster.stream(path, body):
        assert "error" not in event, event
        usages += [event["usage"]] if event.get("usage") else []
        for choice in event["choices"]:
            index = choice["index"]
            delta = choice.get("delta", {"content": choice.get("text")})
            arguments = "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
            texts[index] = texts.get(index, "") + (delta.get("content") or "") + arguments
            if choice["logprobs"]:
                entries = choice["logprobs"].get("content", choice["logprobs"].get("token_logprobs"))
                logprobs.setdefault(index, []).extend(entries)
            if choice["finish_reason"]:
                endings[index] = (choice["finish_reason"], choice.get("stop_reason"))
    return texts, logprobs, endings, usages


@pytest.mark.parametrize(("path", "name"), SHAPES, ids=[f"{path[4:8]}-{name}" for path, name in SHAPES])
def test_answers_are_those_of_one_worker(pair: Cluster, alone: Cluster, path: str, name: str) -> None:
    """X-pd-prefill-body-sanitize: and no prefill fails on the way. Asked twice: cold, and with the prompt cached."""
    body = body_of(path, name)
    for _ in range(2):
        ours, theirs = whole(pair, path, body), whole(alone, path, body)
        for answer in (ours, theirs):
            cached = answer["usage"].pop("prompt_tokens_details")
            assert 0 <= cached["cached_tokens"] <= answer["usage"]["prompt_tokens"]
        assert ours == theirs
        if name in ("prompt-logprobs", "best-of"):
            continue  # not available in streams
        streams = [joined(cluster, path, body) for cluster in (pair, alone)]
        for *_, usages in streams:
            for usage in usages:
                del usage["prompt_tokens_details"]
        assert streams[0] == streams[1]
        texts, _, endings, usages = streams[0]
        if name != "tool":
            shown = {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in ours["choices"]}
            assert texts == shown
        assert endings == {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in ours["choices"]}
        assert usages == ([ours["usage"]] if name == "usage" else [])
    for worker in pair.workers.values():
        assert '"level":"error"' not in json.dumps(worker.log_text()) and "ERROR" not in worker.log_text()


def test_penalties_do_not_depend_on_what_is_cached(pair: Cluster, alone: Cluster, reference: Reference) -> None:
    """API-21: cold, found whole and found in part, on two workers and on one, it is transformers' own processor's."""
    ids = [(7 * index) % 23 + 40 for index in range(90)]
    for prompt in (ids, ids[:64], [*ids[:50], 300, 301]):
        expected, _ = reference.scored(prompt, 30, repetition_penalty=1.3)
        assert expected != reference.greedy(prompt, 30), "the penalty changes nothing here"
        for cluster in (pair, alone):
            for _ in range(3):
                assert cluster.token_ids(prompt, max_tokens=30, repetition_penalty=1.3) == expected


def test_the_best_are_those_of_all_that_were_drawn(pair: Cluster) -> None:
    body = {key: value for key, value in body_of("/v1/completions", "best-of").items() if key not in ("n", "best_of")}
    drawn = whole(pair, "/v1/completions", body | {"n": 4, "logprobs": 0})
    means = {c["text"]: sum(c["logprobs"]["token_logprobs"]) / 20 for c in drawn["choices"]}
    assert len(means) == 4
    best = whole(pair, "/v1/completions", body | {"n": 2, "best_of": 4})
    assert [c["text"] for c in best["choices"]] == sorted(means, key=means.__getitem__, reverse=True)[:2]
    assert best["usage"]["completion_tokens"] == drawn["usage"]["completion_tokens"] == 80
