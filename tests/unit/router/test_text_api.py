"""/tokenize, /detokenize, /openapi.json and /docs."""

from typing import Any

import pytest

from twopool.router import openapi
from twopool.router.model_info import ModelInfo
from twopool.router.schema import ChatBody, CompletionBody, _Unsupported
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import MODEL, running_server


async def test_a_text_and_back(tiny_model: ModelInfo) -> None:
    text = "Hello été 🙂"
    async with running_server(tiny_model, FakeDispatcher()) as server:
        tokens = (await server.post("/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True})).json()
        assert tokens["tokens"] == tiny_model.tokenizer.encode(text, add_special_tokens=True).tolist()
        assert (tokens["count"], len(tokens["token_strs"])) == (len(tokens["tokens"]),) * 2
        back = await server.post("/v1/detokenize", {"tokens": tokens["tokens"]})
        assert back.json() == {"prompt": text}


async def test_messages_are_tokenized_as_chat_would(tiny_model: ModelInfo) -> None:
    dispatcher = FakeDispatcher(lambda request, choice: [60])
    messages = [{"role": "user", "content": "hi"}]
    async with running_server(tiny_model, dispatcher) as server:
        answer = (await server.post("/tokenize", {"messages": messages})).json()
        await server.chat("hi", max_tokens=1)
        assert answer["tokens"] == dispatcher.requests[0].routed.prompt_ids.tolist()


async def test_long_texts_leave_the_event_loop(tiny_model: ModelInfo) -> None:
    async with running_server(tiny_model, FakeDispatcher()) as server:
        answer = (await server.post("/tokenize", {"prompt": "ab " * 20_000})).json()
        back = await server.post("/detokenize", {"tokens": answer["tokens"]})
        assert back.json()["prompt"] == "ab " * 20_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[...]"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
    ],
)
async def test_wrong_bodies_name_the_field(tiny_model: ModelInfo, path: str, body: dict[str, Any], param: str) -> None:
    async with running_server(tiny_model, FakeDispatcher()) as server:
        response = await server.post(path, body)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith(param.split("[")[0])


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/tokenize", {"prompt": "a"}), ("/v1/tokenize", {"messages": []}), ("/detokenize", {"tokens": [5]})],
)
async def test_unknown_models(tiny_model: ModelInfo, path: str, fields: dict[str, Any]) -> None:
    async with running_server(tiny_model, FakeDispatcher()) as server:
        response = await server.post(path, {"model": "nope", **fields})
        assert response.status_code == 404
        assert response.json()["error"] == {
            "message": "the model 'nope' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }


async def test_the_document_lists_every_field_and_the_page_loads_nothing(tiny_model: ModelInfo) -> None:
    async with running_server(tiny_model, FakeDispatcher(), keys=["k"]) as server:
        document = (await server.client.get("/openapi.json")).json()
        schemas = document["components"]["schemas"]
        assert set(schemas["ChatBody"]["properties"]) == set(ChatBody.__struct_fields__)
        assert set(schemas["CompletionBody"]["properties"]) == set(CompletionBody.__struct_fields__)
        page = await server.client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "http://" not in page.text and "https://" not in page.text and "<script" not in page.text
        assert "max_completion_tokens" in page.text
        assert "<code>logits_processors</code></td><td>not supported</td>" in page.text


def test_the_document_tells_refused_fields_from_others() -> None:
    schemas = openapi.document()["components"]["schemas"]

    def values(kind: str, name: str) -> Any:
        return schemas[kind]["properties"][name].get("enum")

    assert values("ChatBody", "logits_processors") == [None, False, "", []]
    assert values("ChatBody", "modalities") == [None, [], ["text"]]
    assert values("ChatBody", "length_penalty") == [None, 1.0]
    assert (values("ChatBody", "echo"), values("CompletionBody", "echo")) == ([None, False], None)
    assert (values("ChatBody", "top_logprobs"), values("CompletionBody", "top_logprobs")) == (None, [None, 0])
    assert values("CompletionBody", "max_completion_tokens") == [None]
    for kind in (ChatBody, CompletionBody):
        described = [name for name, field in schemas[kind.__name__]["properties"].items() if "description" in field]
        assert set(_Unsupported.__struct_fields__) < set(described)


async def test_every_path_of_the_document_is_served(tiny_model: ModelInfo) -> None:
    async with running_server(tiny_model, FakeDispatcher()) as server:
        paths = openapi.document()["paths"]
        assert {"/v1/chat/completions", "/chat/completions", "/models/{model}", "/v1/tokenize", "/docs"} <= set(paths)
        for path, methods in paths.items():
            for method in methods:
                response = await server.client.request(method, path.replace("{model}", MODEL), content=b"{}")
                assert response.status_code not in (404, 405), path
