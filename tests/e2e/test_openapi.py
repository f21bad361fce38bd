"""schemathesis sends what the OpenAPI document allows, and much of what it does not, to a router process."""

import copy
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi import checks as openapi_checks

from twopool.router import openapi
from twopool.scripts.bench_router_model import build_model
from twopool_testing.cluster import Process, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

NUM_EXAMPLES = 25
"""Drawn for each operation, beside the hundreds that go through the document's fields and types one by one."""

CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
    openapi_checks.unsupported_method,
    openapi_checks.allow_header_conformance,
]
CONFIG: dict[str, Any] = {
    "generation": {"mode": "all", "max-examples": NUM_EXAMPLES, "deterministic": True},
    "phases": {"stateful": {"enabled": False}},
}

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_SHARED: dict[str, list[Any]] = {
    "model": ["m"],
    "stream": [True, False],
    "max_tokens": [1, 5, 40],
    "n": [1, 3],
    "temperature": [0, 0.7],
    "top_p": [0.5],
    "top_k": [-1, 5],
    "min_p": [0.1],
    "seed": [-1, 7],
    "presence_penalty": [-2, 2],
    "repetition_penalty": [1.1],
    "logit_bias": [{}, {"5": -100}],
    "stop": [" the", ["x", "y"]],
    "stop_token_ids": [[], [6]],
    "min_tokens": [1],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "include_stop_str_in_output": [True],
    "return_token_ids": [True],
    "timings": [True],
    "user": ["\U0001f600"],
}
USABLE: dict[str, dict[str, list[Any]]] = {
    "/v1/chat/completions": {
        **_SHARED,
        "messages": [
            [{"role": "user", "content": "Hi"}],
            [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "é"}]}],
        ],
        "logprobs": [True],
        "tools": [[], [_TOOL]],
        "tool_choice": ["none", "auto"],
        "response_format": [{"type": "text"}],
        "max_completion_tokens": [3],
        "chat_template_kwargs": [{"enable_thinking": False}],
    },
    "/v1/completions": {
        **_SHARED,
        "prompt": ["Once", ["a", "b"], [5, 6, 7], [[5], [6, 7]]],
        "logprobs": [0, 2],
        "echo": [True],
    },
    "/tokenize": {"prompt": ["a b", ""], "add_special_tokens": [True, False], "return_token_strs": [True]},
    "/detokenize": {"tokens": [[], [5, 6]], "skip_special_tokens": [True]},
}
"""Values that the server takes, for the fields that change what it answers."""


def _usable_document() -> dict[str, Any]:
    """The document with no field but those of ``USABLE``: whatever it allows, the whole one allows, too."""
    document = copy.deepcopy(openapi.document())
    document["paths"] = {path: document["paths"][path] for path in USABLE}
    for path, fields in USABLE.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        known = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        assert set(fields) <= set(known["properties"])
        required = sorted({*known.get("required", ()), *({"prompt"} & set(fields))})
        properties = {name: {"enum": values} for name, values in fields.items()}
        content["schema"] = {"type": "object", "properties": properties, "required": required}
        content["schema"]["additionalProperties"] = False
    return document


whole = schemathesis.openapi.from_dict(openapi.document(), config=SchemathesisConfig.from_dict(CONFIG))
usable = schemathesis.openapi.from_dict(_usable_document(), config=SchemathesisConfig.from_dict(CONFIG))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a router whose workers answer anything at once, 64 tokens at most."""
    folder = tmp_path_factory.mktemp("openapi")
    model = build_model(folder / "model")
    command = ["router", "--model", str(model), "--served-model-name", "m", "--port", "0", "--control-port", "0"]
    router = Process([*command, "--max-model-len", "64"], folder / "router.log")
    try:
        announced = router.wait_announced()
        module = [sys.executable, "-P", "-m", "twopool.scripts.bench_router_workers", "--model", str(model)]
        workers = subprocess.Popen([*module, "--router", announced["control"]], stdin=subprocess.PIPE)
        try:
            wait_for(lambda: httpx.get(announced["http"] + "/ready").status_code == 200, 20, "/ready")
            yield announced["http"]
            assert router.is_running()
            assert "Traceback" not in router.log_text()
        finally:
            workers.kill()
            workers.communicate()
    finally:
        router.kill()


def test_the_document_is_served(server: str) -> None:
    assert httpx.get(server + "/openapi.json").json() == openapi.document()


@whole.parametrize()
def test_the_document_holds(case: Any, server: str) -> None:
    """No 5xx, no status or content type it does not name, no body of another shape, no wrong type taken."""
    _call(case, server)


@pytest.mark.parametrize("path", USABLE)
def test_what_can_be_answered_is(server: str, path: str) -> None:
    """Of requests with values that make sense most get their answer, and it has the shape the document says."""
    statuses: Counter[int] = Counter()
    num_streams = 0

    @hypothesis.given(case=usable[path]["post"].as_strategy())
    @hypothesis.settings(max_examples=2 * NUM_EXAMPLES, deadline=None, derandomize=True, database=None)
    def check(case: Any) -> None:
        nonlocal num_streams
        response = _call(case, server)
        statuses[response.status_code] += 1
        num_streams += _is_stream(response)

    check()
    assert set(statuses) <= {200, 400}
    assert statuses[200] > statuses[400], statuses
    assert num_streams > 0 or "stream" not in USABLE[path]


def _call(case: Any, server: str) -> Any:
    """The answer to ``case``, checked."""
    response = case.call(base_url=server, timeout=20)
    if _is_stream(response):
        # The document says what the whole stream is, schemathesis would hold every event of it against that.
        checks = [check for check in CHECKS if check is not openapi_checks.response_schema_conformance]
        case.validate_response(response, checks=checks)
        _check_events(response.content.decode())
    else:
        case.validate_response(response, checks=CHECKS)
    return response


def _is_stream(response: Any) -> bool:
    return any(value.startswith("text/event-stream") for value in response.headers.get("content-type", ()))


def _check_events(text: str) -> None:
    """Every event is a chunk of OpenAI's, and ``[DONE]`` the last."""
    *events, last, rest = text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    for event in events:
        chunk = json.loads(event.removeprefix("data: "))
        assert {"id", "object", "created", "model", "choices"} <= set(chunk), event
