"""SmolLM2-135M-Instruct through the whole system: chat as clients speak it, text as transformers generates it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from twopool.models.store import resolve_model
from twopool_testing.cluster import Cluster, running_cluster
from twopool_testing.tiny_model import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.real_model, pytest.mark.timeout(300)]

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You are a terse assistant."},
        {"role": "user", "content": "Name three colours 🙂 and count to 12."},
    ],
]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model("smollm2-135m-instruct", progress=False)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ("--kv-cache-memory", str(256 * 1024 * 1024))
    with running_cluster(model, tmp_path_factory.mktemp("real"), worker_flags=flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def expected(model: Path, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, greedy ids) of each chat, from transformers in fp32."""
    reference = Reference(model)
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in CHATS
    ]
    return [(ids, reference.greedy(ids, NUM_TOKENS)) for ids in prompts]


def test_greedy_ids_equal_transformers(served: Cluster, expected: list[tuple[list[int], list[int]]]) -> None:
    before = served.metric_sum("twopool_nixl_bytes_transferred_sum")
    for prompt_ids, greedy_ids in expected:
        assert served.token_ids(prompt_ids, max_tokens=NUM_TOKENS) == greedy_ids
        assert served.token_ids(prompt_ids, max_tokens=NUM_TOKENS) == greedy_ids
    assert served.wait_metric_above("twopool_nixl_bytes_transferred_sum", before) > before


def test_the_openai_client_gets_the_same_text(
    served: Cluster, tokenizer: Any, expected: list[tuple[list[int], list[int]]]
) -> None:
    """TOK-01: the prompt is transformers' rendering, no BOS twice; streams and whole answers agree."""
    with openai.OpenAI(base_url=f"{served.router.announced['http']}/v1", api_key="none") as client:
        for chat, (prompt_ids, greedy_ids) in zip(CHATS, expected, strict=True):
            fields: dict[str, Any] = {"model": "m", "messages": chat, "temperature": 0, "max_tokens": NUM_TOKENS}
            answer = client.chat.completions.create(**fields)
            ended = greedy_ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in greedy_ids else None
            text = tokenizer.decode(greedy_ids[:ended], skip_special_tokens=True)
            assert answer.choices[0].message.content == text
            assert answer.choices[0].finish_reason == ("length" if ended is None else "stop")
            assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt_ids)
            assert answer.usage.completion_tokens == (NUM_TOKENS if ended is None else ended + 1)
            stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
            chunks = list(stream)
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
            usage = chunks[-1].usage
            assert usage is not None and usage.total_tokens == answer.usage.total_tokens
            assert chunks[0].choices[0].delta.role == "assistant"


def test_a_long_prompt_in_chunks(served: Cluster, model: Path, tokenizer: Any) -> None:
    ids = tokenizer("The history of computing is long. " * 120)["input_ids"]
    assert len(ids) > 512
    assert served.token_ids(ids, max_tokens=8) == Reference(model).greedy(ids, 8)
