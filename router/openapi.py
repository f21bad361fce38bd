"""The OpenAPI document, made from the structs that decode requests, and a page that shows it without any network."""

import html
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from twopool.router.schema import ChatBody, CompletionBody
from twopool.router.text_api import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody

_REF = "#/components/schemas/{name}"

_POSTS: tuple[tuple[str, str, type, type | None, bool], ...] = (
    ("/v1/chat/completions", "Continue a conversation", ChatBody, None, True),
    ("/v1/completions", "Continue a text or token ids", CompletionBody, None, True),
    ("/tokenize", "Token ids of a text or a conversation", TokenizeBody, TokenizeAnswer, False),
    ("/detokenize", "Text of token ids", DetokenizeBody, DetokenizeAnswer, False),
)
_GETS = (
    ("/v1/models", "The served names", "application/json"),
    ("/v1/models/{model}", "One served name", "application/json"),
    ("/health", "The process answers", "application/json"),
    ("/ready", "Whether a request could be served now", "application/json"),
    ("/version", "Version, and what the workers are made of", "application/json"),
    ("/metrics", "Prometheus metrics", "text/plain"),
    ("/openapi.json", "This document", "application/json"),
)
_NEED_KEY = ("/v1/", "/tokenize", "/detokenize")
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
    structs = [ChatBody, CompletionBody, TokenizeBody, TokenizeAnswer, DetokenizeBody, DetokenizeAnswer]
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REF)
    schemas["Error"] = _error_schema()
    schemas["Answer"] = {
        "type": "object",
        "description": "OpenAI's object of the endpoint, or with `stream` its chunks.",
        "required": ["id", "object", "created", "model", "choices"],
    }
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
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{operation['summary']}.</p>")
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(_fields(shown["components"]["schemas"][name]))
    parts.append("<h2>Errors</h2><table>")
    parts += [f"<tr><td>{status}</td><td>{html.escape(text)}</td></tr>" for status, text in _ERRORS.items()]
    parts.append("</table><p><a href='/openapi.json'>openapi.json</a></p>")
    return "".join(parts).encode()


_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>twopool API</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse}td,th{border-bottom:1px solid #ddd;padding:.2rem .8rem;text-align:left}
code{font-size:.95em}h2{margin-top:2rem}</style><h1>twopool API</h1>
<p><code>null</code> means absent, and fields that are not listed are ignored.</p>"""


def _paths() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for path, summary, body, answer, streams in _POSTS:
        schema = {"$ref": _REF.format(name=answer.__name__ if answer is not None else "Answer")}
        content: dict[str, Any] = {"application/json": {"schema": schema}}
        if streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        operation = _operation(path, summary, content)
        request = {"application/json": {"schema": {"$ref": _REF.format(name=body.__name__)}}}
        operation["requestBody"] = {"required": True, "content": request}
        paths[path] = {"post": operation}
    for path, summary, media_type in _GETS:
        operation = _operation(path, summary, {media_type: {"schema": {}}})
        if "{model}" in path:
            name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        paths[path] = {"get": operation}
    return paths


def _operation(path: str, summary: str, content: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    responses |= {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if path.startswith(_NEED_KEY):
        operation["security"] = [{"key": []}, {}]
    return operation


def _error_schema() -> dict[str, Any]:
    text = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text}
    detail = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "properties": {"error": detail}, "required": ["error"]}


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
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"] if option.get("type") != "null")
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "anything"))
