"""The OpenAPI document, made from the structs that decode requests, and a page that shows it without any network."""

import html
import json
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from twopool.router import answers
from twopool.router.http_edge import OPEN_PATHS
from twopool.router.schema import ChatBody, CompletionBody, refused_fields
from twopool.router.text_api import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody

_REF = "#/components/schemas/{name}"

_POSTS: tuple[tuple[str, str, type, type, type | None], ...] = (
    ("/v1/chat/completions", "Continue a conversation", ChatBody, answers.ChatAnswer, answers.ChatChunk),
    (
        "/v1/completions",
        "Continue a text or token ids",
        CompletionBody,
        answers.CompletionAnswer,
        answers.CompletionChunk,
    ),
    ("/tokenize", "Token ids of a text or a conversation", TokenizeBody, TokenizeAnswer, None),
    ("/detokenize", "Text of token ids", DetokenizeBody, DetokenizeAnswer, None),
)
"""Path, summary, body, answer, and an event of its stream."""
_GETS: tuple[tuple[str, str, type | str], ...] = (
    ("/v1/models", "The served names", answers.ModelList),
    ("/v1/models/{model}", "One served name", answers.ModelCard),
    ("/health", "The process answers", answers.Health),
    ("/ready", "Whether a request could be served now", answers.Readiness),
    ("/version", "Version, and what the workers are made of", answers.Version),
    ("/metrics", "Prometheus metrics", "text/plain"),
    ("/openapi.json", "This document", "application/json"),
    ("/docs", "This document as a page", "text/html"),
)
"""Path, summary, and the answer or its media type."""
_ALIAS = "alias"
"""Tag of the second path of an endpoint."""
_ERRORS = {
    "400": "The request is wrong; `param` names the field",
    "401": "No valid API key",
    "404": "No such model or path",
    "408": "The request did not arrive in time",
    "413": "The body is too large",
    "429": "No room; `Retry-After` says when to come back",
    "431": "Request line and headers are too large",
    "500": "A worker failed for good",
    "503": "No worker can serve the request; `Retry-After` says when to come back",
    "504": "The request's deadline passed",
}


@cache
def document() -> dict[str, Any]:
    """The whole document."""
    structs: list[type] = [answers.Error]
    structs += [kind for _, _, *kinds in _POSTS for kind in kinds if kind is not None]
    structs += [answer for _, _, answer in _GETS if not isinstance(answer, str)]
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REF)
    for body in (ChatBody, CompletionBody):
        for name, values in refused_fields(body).items():
            schemas[body.__name__]["properties"][name] = {"enum": values, "description": _REFUSED}
    return {
        "openapi": "3.1.0",
        "info": {"title": "twopool", "version": version("twopool"), "description": "OpenAI's API over two pools."},
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


@cache
def page() -> bytes:
    """``document`` as one HTML page that loads nothing else."""
    parts = [_HEAD]
    shown = document()
    for path, methods in shown["paths"].items():
        for method, operation in methods.items():
            if _ALIAS in operation.get("tags", ()):
                continue
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{operation['summary']}.</p>")
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(_fields(shown["components"]["schemas"][name]))
    parts.append("<h2>Errors</h2><table>")
    parts += [f"<tr><td>{status}</td><td>{html.escape(text)}</td></tr>" for status, text in _ERRORS.items()]
    parts.append("</table><p>Generation, models and tokenizing answer with and without <code>/v1</code>. ")
    parts.append("<a href='/openapi.json'>openapi.json</a></p>")
    return "".join(parts).encode()


_REFUSED = "Not supported: the values listed ask for nothing, any other is answered with 400."

_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>twopool API</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse}td,th{border-bottom:1px solid #ddd;padding:.2rem .8rem;text-align:left}
code{font-size:.95em}h2{margin-top:2rem}</style><h1>twopool API</h1>
<p><code>null</code> means absent, and fields that are not listed are ignored.</p>"""


def _paths() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for path, summary, body, answer, event in _POSTS:
        content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
        if event is not None:
            stream = f"With `stream`: events `data: {{...}}`, each a {event.__name__}, and `data: [DONE]` in the end."
            content["text/event-stream"] = {"schema": {"type": "string", "description": stream}}
        operation = _operation(path, summary, content)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
        _add(paths, path, "post", operation)
    for path, summary, got in _GETS:
        content = {got: {"schema": {}}} if isinstance(got, str) else {"application/json": {"schema": _ref(got)}}
        operation = _operation(path, summary, content)
        if "{model}" in path:
            name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        _add(paths, path, "get", operation)
    return paths


def _add(paths: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> None:
    """The endpoint, and where it also answers: without ``/v1``, or with it."""
    paths[path] = {method: operation}
    if path not in OPEN_PATHS:
        alias = path.removeprefix("/v1") if path.startswith("/v1/") else f"/v1{path}"
        paths[alias] = {method: {**operation, "tags": [_ALIAS], "description": f"The same as `{path}`."}}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _operation(path: str, summary: str, content: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": _ref(answers.Error)}}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    responses |= {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if path not in OPEN_PATHS:
        operation["security"] = [{"key": []}, {}]
    return operation


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_type(field))}</td>"
        f"<td>{'required' if name in required else ''}</td></tr>"
        for name, field in schema["properties"].items()
    ]
    return f"<table><tr><th>field</th><th>type</th><th></th></tr>{''.join(rows)}</table>"


def _type(field: dict[str, Any]) -> str:
    """A schema in a few words; ``null`` goes without saying."""
    if field.get("description") == _REFUSED:
        return "not supported"
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"] if option.get("type") != "null")
    if "enum" in field:
        return " or ".join(json.dumps(value) for value in field["enum"])
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "anything"))
