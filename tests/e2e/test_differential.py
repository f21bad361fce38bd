"""Every request shape answers with the text that transformers, in this process, gives for it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LogitsProcessor, LogitsProcessorList

from twopool.router.timings import BEFORE_FIRST
from twopool_testing.cluster import Cluster
from twopool_testing.socket_timing import check_ttft
from twopool_testing.tiny_model import Reference

pytestmark = pytest.mark.e2e
EOS = 2
TOKENS = 24
PROMPTS = ["The quick brown fox", "def main(): return [", "日本語 é 🙂", " leading space", "x" * 200]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


class Expected:
    """What a single-process server would answer."""

    def __init__(self, reference: Reference, tokenizer: Tokenizer) -> None:
        self._reference = reference
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def ids(self, prompt: str | list[int], num_tokens: int = TOKENS) -> list[int]:
        return self._reference.greedy(self.encode(prompt) if isinstance(prompt, str) else prompt, num_tokens)

    def text(self, prompt: str | list[int], num_tokens: int = TOKENS) -> str:
        text: str = self._tokenizer.decode(self.ids(prompt, num_tokens), skip_special_tokens=True)
        return text


@pytest.fixture(scope="module")
def expected(reference: Reference, tokenizer: Tokenizer) -> Expected:
    return Expected(reference, tokenizer)


def fields(**extra: Any) -> dict[str, Any]:
    return {"model": "m", "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, **extra}


def streamed(pair: Cluster, path: str, body: dict[str, Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in pair.stream(path, body):
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions_of_text_and_of_ids(pair: Cluster, expected: Expected, prompt: str) -> None:
    whole = expected.text(prompt)
    for form in (prompt, expected.encode(prompt)):
        body = pair.complete(form, max_tokens=TOKENS)
        assert body["choices"][0]["text"] == whole
        assert body["usage"]["prompt_tokens"] == len(expected.encode(prompt))
        assert body["usage"]["completion_tokens"] == TOKENS
        assert streamed(pair, "/v1/completions", fields(prompt=form)) == {0: whole}
    echoed = pair.complete(prompt, max_tokens=TOKENS, echo=True)
    assert echoed["choices"][0]["text"] == prompt + whole


def test_several_prompts_and_choices(pair: Cluster, expected: Expected) -> None:
    wanted = [expected.text(prompt) for prompt in PROMPTS[:3] for _ in range(2)]
    prompts: Any = PROMPTS[:3]
    body = pair.complete(prompts, max_tokens=TOKENS, n=2)
    assert [choice["text"] for choice in body["choices"]] == wanted
    assert streamed(pair, "/v1/completions", fields(prompt=PROMPTS[:3], n=2)) == dict(enumerate(wanted))


@pytest.mark.parametrize("turns", [1, 3])
def test_chat(pair: Cluster, expected: Expected, tiny_model: Path, turns: int) -> None:
    """Rendered by transformers' own template engine."""
    from transformers import AutoTokenizer

    messages = [{"role": ("user", "assistant")[i % 2], "content": PROMPTS[i]} for i in range(turns)]
    rendered = AutoTokenizer.from_pretrained(tiny_model).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    whole = expected.text(expected.encode(rendered))
    response = pair.client.post("/v1/chat/completions", json=fields(messages=messages))
    assert response.json()["choices"][0]["message"]["content"] == whole
    assert response.json()["usage"]["prompt_tokens"] == len(expected.encode(rendered))
    assert streamed(pair, "/v1/chat/completions", fields(messages=messages)) == {0: whole}


def test_stop_strings_cut_the_same_text(pair: Cluster, expected: Expected) -> None:
    """At every length of string found in the answer, also across tokens."""
    whole = expected.text(PROMPTS[0])
    for start, length in ((3, 1), (5, 2), (8, 4), (1, 7)):
        stop = whole[start : start + length]
        if not stop or "\ufffd" in stop:
            continue
        cut = whole[: whole.index(stop)]
        choice = pair.complete(PROMPTS[0], max_tokens=TOKENS, stop=[stop])["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
        assert streamed(pair, "/v1/completions", fields(prompt=PROMPTS[0], stop=[stop])) == {0: cut}
        kept = pair.complete(PROMPTS[0], max_tokens=TOKENS, stop=[stop], include_stop_str_in_output=True)
        assert kept["choices"][0]["text"] == cut + stop


def test_stop_ids_and_lengths(pair: Cluster, expected: Expected, tokenizer: Tokenizer) -> None:
    ids = expected.ids(PROMPTS[1])
    stop = ids[7]
    before = ids[: ids.index(stop)]
    choice = pair.complete(PROMPTS[1], max_tokens=TOKENS, stop_token_ids=[stop])["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (tokenizer.decode(before), stop)
    for length in (1, 2, 7):
        choice = pair.complete(PROMPTS[1], max_tokens=length)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected.text(PROMPTS[1], length), "length")


class OutputPenalties(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's two penalties, as its documentation defines them: over the tokens drawn so far."""

    def __init__(self, num_prompt: int, frequency: float, presence: float) -> None:
        self._num_prompt = num_prompt
        self._frequency = frequency
        self._presence = presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids: [1, length], scores: [1, vocab_size]."""
        counts = torch.bincount(input_ids[0, self._num_prompt :], minlength=scores.shape[1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


LOGIT_FIELDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"frequency_penalty": 1.5},
    {"presence_penalty": 1.2},
    {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"logit_bias": {"70": 6.5, "71": -100, "5": 4}},
]


@pytest.mark.parametrize("changes", LOGIT_FIELDS, ids=lambda changes: "+".join(changes) or "none")
def test_what_changes_logits_and_the_logprobs_thereafter(
    pair: Cluster, expected: Expected, reference: Reference, changes: dict[str, Any]
) -> None:
    """The tokens, and the log-probabilities of each and of its five best rivals, are those of transformers' logits."""
    for prompt in (PROMPTS[0], "x x x x x x"):
        ids = expected.encode(prompt)
        processors = LogitsProcessorList()
        processors.append(
            OutputPenalties(len(ids), changes.get("frequency_penalty", 0), changes.get("presence_penalty", 0))
        )
        options: dict[str, Any] = {"repetition_penalty": changes.get("repetition_penalty", 1.0)}
        if "logit_bias" in changes:
            options["sequence_bias"] = {(int(token),): float(bias) for token, bias in changes["logit_bias"].items()}
        tokens, rows = reference.scored(ids, TOKENS, logits_processor=processors, **options)
        body = pair.complete(prompt, max_tokens=TOKENS, logprobs=5, return_token_ids=True, **changes)
        choice = body["choices"][0]
        assert choice["token_ids"] == tokens
        told = choice["logprobs"]
        assert told["token_logprobs"] == pytest.approx(rows[range(TOKENS), tokens].tolist(), abs=2e-3)
        for best, row in zip(told["top_logprobs"], rows, strict=True):
            assert sorted(best.values(), reverse=True) == pytest.approx(row.topk(5).values.tolist(), abs=2e-3)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}],
    ids=lambda fields: next(iter(fields)),
)
def test_draws_follow_the_distribution(
    pair: Cluster, expected: Expected, reference: Reference, fields: dict[str, Any]
) -> None:
    """Frequencies of 1,024 first tokens, whose seeds are fixed, against transformers' probabilities."""
    prompt, num_draws = PROMPTS[1], 1024
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **fields}
    _, rows = reference.scored(expected.encode(prompt), 1, do_sample=True, **options)
    probabilities = rows[0].exp()
    drawn: Counter[int] = Counter()
    for seed in range(num_draws // 128):
        body = pair.complete(
            prompt, n=128, max_tokens=1, seed=seed, return_token_ids=True, **{"temperature": 1.0} | fields
        )
        drawn.update(choice["token_ids"][0] for choice in body["choices"])
    assert drawn.total() == num_draws and len(drawn) > 1
    assert all(probabilities[token] > 0 for token in drawn)
    for token, probability in enumerate(probabilities.tolist()):
        deviation = (num_draws * probability * (1 - probability)) ** 0.5
        assert abs(drawn[token] - num_draws * probability) <= 5 * deviation + 1, token


def test_timings_and_fingerprint_of_a_real_pair(pair: Cluster) -> None:
    """The parts sum to the TTFT within 1 ms, bytes and workers are named, and metrics saw the same request."""
    body = pair.complete(list(range(3, 203)), max_tokens=8, timings=True)
    timings = body["timings"]
    assert sum(timings.get(f"{name}_ms", 0) for name in BEFORE_FIRST) == pytest.approx(timings["ttft_ms"], abs=1)
    assert 0 < timings["ttft_ms"] < timings["total_ms"]
    assert (timings["prefill_worker"], timings["decode_worker"]) == ("prefill-0", "decode-0")
    assert timings["kv_bytes_moved"] > 0 and timings["prefill_ms"] > 0 and "transfer_exposed_ms" in timings
    events = list(pair.stream("/v1/completions", fields(prompt=list(range(3, 203)), timings=True)))
    timings = events[-1]["timings"]
    assert sum(timings.get(f"{name}_ms", 0) for name in BEFORE_FIRST) == pytest.approx(timings["ttft_ms"], abs=1)
    version = pair.client.get("/version").json()
    address = pair.client.base_url
    tries = check_ttft(address.host, address.port or 80, fields(prompt=list(range(3, 203))))
    assert all(timings["first_token_delivery_ms"] > 0 for timings in tries)
    [(fingerprint, stack)] = version["system_fingerprints"].items()
    assert fingerprint == body["system_fingerprint"] == events[0]["system_fingerprint"]
    assert stack["prefill"] == stack["decode"] != {}
    assert pair.metrics()['twopool_request_phase_seconds_count{phase="handover"}'] >= 2
    json.dumps(version)
