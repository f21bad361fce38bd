"""Structured output, tool calls and prompts' log-probabilities over a prefill and a decode worker."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
import torch
from tokenizers import Tokenizer

from twopool_testing.cluster import Cluster, running_cluster
from twopool_testing.tiny_model import Reference, build_tiny_llama

pytestmark = pytest.mark.e2e

FLAGS = ("--max-num-batched-tokens", "64", "--block-size", "16", "--kv-cache-memory", str(32 * 1024 * 1024))
NUM_TOKENS = 400
"""What the tiny model's tokenizer has."""
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99},
        "who": {"enum": ["x", "👩‍👩‍👧 日本語 é"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["id", "who", "flags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "pick",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 50}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
]
NAMED = {"type": "function", "function": {"name": "pick"}}


@pytest.fixture(scope="module")
def padded_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 rows of logits more than the tokenizer has tokens."""
    folder = tmp_path_factory.mktemp("padded") / "model"
    return build_tiny_llama(folder, vocab_size=NUM_TOKENS + 37)


@pytest.fixture(scope="module")
def cluster(padded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(padded_model, tmp_path_factory.mktemp("structured"), worker_flags=FLAGS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(padded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One decode worker that prefills for itself; its calls begin with a brace and nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    router_flags = ("--min-prefill", "0", "--tool-call-parser", "llama3_json")
    cluster = Cluster(padded_model, folder, worker_flags=FLAGS, router_flags=router_flags)
    try:
        cluster.start(prefill=0, decode=1)
        yield cluster
    finally:
        cluster.close()


def chat_body(seed: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"hi {seed}"}]
    return {"model": "m", "messages": messages, "seed": seed, "max_tokens": 200, **fields}


def chat(cluster: Cluster, seed: int = 1, **fields: Any) -> dict[str, Any]:
    response = cluster.client.post("/v1/chat/completions", json=chat_body(seed, **fields))
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def is_whole(text: str) -> bool:
    try:
        return bool(json.loads(text))
    except ValueError:
        return False


def is_conforming(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"id", "who", "flags"}
        and 0 <= value["id"] <= 99
        and value["who"] in ("x", "👩‍👩‍👧 日本語 é")
        and 1 <= len(value["flags"]) <= 2
    )


def test_sixteen_at_once_conform_and_equal_the_aggregated_answers(cluster: Cluster, alone: Cluster) -> None:
    """X-schema-whitespace-loop, NUM-05, API-06: the grammar's state, first token included, goes over the handover."""

    def run(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        fields = {"response_format": FORMAT, "temperature": 1.5, "logprobs": True, "top_logprobs": 20}
        return chat(cluster, seed, **fields), chat(alone, seed, **fields)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(run, range(16)))
    for apart, together in answers:
        assert (apart["message"], apart["finish_reason"]) == (together["message"], together["finish_reason"])
        entries = [[entry["logprob"] for entry in one["logprobs"]["content"]] for one in (apart, together)]
        assert entries[0] == pytest.approx(entries[1], abs=1e-3)
        text = apart["message"]["content"]
        assert apart["finish_reason"] == "length" or is_conforming(text)
        tops = [top["token"] for entry in apart["logprobs"]["content"] for top in entry["top_logprobs"]]
        assert tops and all(tops)
    assert sum(apart["finish_reason"] == "stop" for apart, _ in answers) > 8
    assert {apart["message"]["content"] for apart, _ in answers if "日本語 é" in apart["message"]["content"]}
    cluster.assert_balanced()


def test_streams_carry_the_same_text(cluster: Cluster) -> None:
    for max_tokens in (1, 2, 7, 200):
        whole = chat(cluster, 3, response_format=FORMAT, max_tokens=max_tokens)
        body = chat_body(3, response_format=FORMAT, max_tokens=max_tokens)
        events = [event["choices"][0] for event in cluster.stream("/v1/chat/completions", body)]
        assert "".join(e["delta"].get("content") or "" for e in events) == whole["message"]["content"]
        assert events[-1]["finish_reason"] == whole["finish_reason"]


def test_other_grammars_and_their_ends(cluster: Cluster) -> None:
    """min_tokens and ignore_eos do not outlive a grammar's end; several choices have a state each."""
    fields: dict[str, Any] = {"guided_regex": "[a-c]{3}[0-9]{1,2}", "min_tokens": 100, "ignore_eos": True}
    choice = chat(cluster, **fields)
    assert choice["finish_reason"] == "stop"
    assert len(choice["message"]["content"]) in (4, 5)
    assert chat(cluster, guided_choice=["yes", "no"])["message"]["content"] in ("yes", "no")
    body = cluster.complete("a", max_tokens=60, n=4, temperature=1.0, seed=2, guided_regex="(ab|cd){2}[0-9]")
    texts = [one["text"] for one in body["choices"]]
    assert all(text[:2] in ("ab", "cd") and len(text) == 5 for text in texts)
    assert len(set(texts)) > 1


class Thing(pydantic.BaseModel):
    kind: Literal["large", "small"]
    is_ok: bool


class Pick(pydantic.BaseModel):
    thing: Thing


def test_the_openai_client_parses_answers_and_calls(cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.client.base_url}/v1", api_key="none")
    messages: Any = [{"role": "user", "content": "hi"}]
    parsed = client.chat.completions.parse(
        model="m", messages=messages, response_format=Thing, seed=1, max_tokens=150
    ).choices[0]
    assert isinstance(parsed.message.parsed, Thing)
    tools: Any = [openai.pydantic_function_tool(Pick)]
    options: Any = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 1, "max_tokens": 300}
    with client.chat.completions.stream(model="m", messages=messages, tools=tools, **options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert isinstance(final.message.tool_calls[0].function.parsed_arguments, Pick)


def test_bad_schemas_do_no_harm(cluster: Cluster) -> None:
    """API-27."""
    schemas: list[Any] = ["x", {"type": "hiccup"}, {"$ref": "#/nope"}, {"pattern": "("}, {"enum": []}]
    for schema in schemas:
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for _ in range(20):
            response = cluster.client.post("/v1/chat/completions", json=chat_body(1, response_format=bad))
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "response_format.json_schema.schema"
    assert is_conforming(chat(cluster, 3, response_format=FORMAT)["message"]["content"])


@pytest.mark.parametrize("choice", ["required", NAMED, "auto", "none"], ids=["required", "named", "auto", "none"])
def test_tool_calls(cluster: Cluster, choice: Any) -> None:
    """API-28, X-tool-finish-reason."""
    for max_tokens in (1, 2, 5, 12, 20, 30, 40, 200):
        fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": max_tokens}
        whole = chat(cluster, 1, **fields)
        events = [e["choices"][0] for e in cluster.stream("/v1/chat/completions", chat_body(1, **fields))]
        deltas = [call for e in events for call in e["delta"].get("tool_calls", ())]
        calls = whole["message"].get("tool_calls", [])
        arguments = "".join(delta["function"]["arguments"] for delta in deltas)
        assert events[-1]["finish_reason"] == whole["finish_reason"]
        assert "".join(e["delta"].get("content") or "" for e in events) == (whole["message"]["content"] or "")
        if choice in ("auto", "none"):
            assert not calls
            assert whole["finish_reason"] in ("length", "stop")
            continue
        assert [call["function"]["arguments"] for call in calls] == ([arguments] if deltas else [])
        assert [(d["index"], d["function"]["name"]) for d in deltas if "id" in d] == [(0, "pick")] * len(calls)
        assert all(delta["index"] == 0 for delta in deltas)
        if whole["finish_reason"] == "length":
            assert max_tokens < 200
        else:
            assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
            assert 0 <= json.loads(arguments)["x"] <= 50
    if choice in ("required", NAMED):
        assert whole["finish_reason"] != "length"


def test_strict_tools_bind_who_begins_to_call(cluster: Cluster, alone: Cluster) -> None:
    """Under ``auto`` text is free; a model that is made to begin with a brace writes a whole call."""
    tool = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}  # type: ignore[dict-item]
    for seed, one in enumerate((cluster, alone, cluster, alone)):
        fields = {"tools": [tool], "temperature": 1.0, "max_tokens": 30}
        whole = chat(one, seed, **fields)
        events = [e["choices"][0] for e in one.stream("/v1/chat/completions", chat_body(seed, **fields))]
        assert whole["message"]["content"] and whole["finish_reason"] in ("length", "stop")
        assert "".join(e["delta"].get("content") or "" for e in events) == whole["message"]["content"]
    brace = Tokenizer.from_file(str(alone.model / "tokenizer.json")).token_to_id("{")
    fields = {"tools": [tool], "logit_bias": {str(brace): 100}, "temperature": 0, "parallel_tool_calls": False}
    called = chat(alone, 1, **fields)
    assert called["finish_reason"] == "tool_calls"
    [call] = called["message"]["tool_calls"]
    assert call["function"]["name"] == "pick" and 0 <= json.loads(call["function"]["arguments"])["x"] <= 50
    loose = {**fields, "tools": TOOLS, "max_tokens": 30}
    assert "tool_calls" not in chat(alone, 1, **loose)["message"]


def test_a_lost_decode_worker_leaves_the_grammar_whole(cluster: Cluster) -> None:
    """A resumed request goes on where its ids say the grammar stands."""
    expected = chat(cluster, 5, response_format=FORMAT)
    cluster.hold("decode-0", running=0.03)
    events = cluster.stream("/v1/chat/completions", chat_body(5, response_format=FORMAT))
    text = ""
    for number, event in enumerate(events):
        text += event["choices"][0]["delta"].get("content") or ""
        if number == 8:
            assert not is_whole(text)
            cluster.kill_worker("decode-0")
            cluster.start_worker("decode-1")
    assert text == expected["message"]["content"]


def reference_logprobs(reference: Reference, ids: list[int]) -> list[float]:
    """Among the tokens there are: rows of logits that no token stands for are never drawn and have no share."""
    with torch.inference_mode():
        logits = reference._model(torch.tensor([ids])).logits[0][:, :NUM_TOKENS]
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    return [float(log_probs[at - 1, ids[at]]) for at in range(1, len(ids))]


@pytest.mark.parametrize("length", [1, 2, 16, 150])
def test_echoed_prompts_have_their_logprobs(cluster: Cluster, padded_model: Path, length: int) -> None:
    """API-10, NUM-08, X-echo-max-tokens-0, X-prompt-logprob-shift: cold, cached and longer than a chunk."""
    reference = Reference(padded_model)
    ids = [(37 * i + 5 + length) % 390 + 3 for i in range(length)]
    expected = reference_logprobs(reference, ids)
    for max_tokens in (0, None, 1, 3):
        if max_tokens is None:  # leaves the prompt in both caches
            cluster.complete(ids, max_tokens=2)
            continue
        body = cluster.complete(ids, echo=True, logprobs=1, max_tokens=max_tokens)
        choice, usage = body["choices"][0], body["usage"]
        logprobs = choice["logprobs"]
        assert usage["completion_tokens"] == max_tokens
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert len(logprobs["tokens"]) == length + max_tokens
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:length] == pytest.approx(expected, abs=1e-3)
        assert all(max(tops.values()) <= 0 for tops in logprobs["top_logprobs"][1:])
        offsets = logprobs["text_offset"]
        assert offsets[0] == 0
        assert offsets == sorted(offsets)
        assert choice["finish_reason"] == "length"
    cluster.assert_balanced()


def test_echo_shows_the_clients_text(cluster: Cluster, alone: Cluster) -> None:
    prompt = "Your answer: Yes"
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0, "n": 2}
    body = cluster.complete(prompt, **fields)
    assert [choice["text"] for choice in body["choices"]] == [prompt, prompt]
    assert body["choices"][0]["logprobs"] == body["choices"][1]["logprobs"]
    assert "".join(body["choices"][0]["logprobs"]["tokens"]) == prompt
    assert body["choices"] == alone.complete(prompt, **fields)["choices"]
    stream = {"model": "m", "prompt": prompt, "temperature": 0, "ignore_eos": True} | fields | {"n": 1, "max_tokens": 2}
    events = [event["choices"][0] for event in cluster.stream("/v1/completions", stream)]
    whole = cluster.complete(prompt, **(fields | {"n": 1, "max_tokens": 2}))["choices"][0]
    assert "".join(event["text"] for event in events) == whole["text"]
    streamed = [value for event in events if event["logprobs"] for value in event["logprobs"]["token_logprobs"]]
    assert streamed == whole["logprobs"]["token_logprobs"]


def test_prompt_logprobs_as_vllm_tells_them(cluster: Cluster) -> None:
    echoed = cluster.complete("Yes sir", echo=True, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    told = cluster.complete("Yes sir", prompt_logprobs=2, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert told[0] is None
    own = [next(iter(entry.values())) for entry in told[1:]]
    assert [entry["logprob"] for entry in own] == echoed["token_logprobs"][1 : len(told)]
    assert all(1 <= len(entry) <= 3 for entry in told[1:])
    assert all(entry["rank"] >= 1 and entry["logprob"] <= 0 for entry in own)
    body = cluster.client.post("/v1/chat/completions", json=chat_body(1, prompt_logprobs=0, max_tokens=1)).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
