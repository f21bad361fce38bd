"""Rendering a model's chat template as transformers does, in a sandbox, without transformers."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from twopool.protocol.errors import InvalidRequestError, ModelError

ChatMessage = dict[str, Any]

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A model's compiled template and the special tokens it may name (``bos_token``, ``eos_token`` ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None) -> None:
        """``tool_source`` is used instead of ``source`` for requests with tools.

        Raises ``ModelError`` for a template that does not compile.
        """
        self._special_tokens = dict(special_tokens)
        self._template = _compiled(source)
        self._tool_template = self._template if tool_source is None else _compiled(tool_source)
        sources = source if tool_source is None else source + tool_source
        self._reads = jinja2.meta.find_undeclared_variables(_environment().parse(sources))

    def reads(self, name: str) -> bool:
        """Whether the template looks at a variable of that name."""
        return name in self._reads

    def render(
        self,
        messages: list[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The prompt text; whatever the template objects to is an ``InvalidRequestError``."""
        extra = dict(template_kwargs or {})
        if reserved := sorted(_RESERVED & extra.keys()):
            raise InvalidRequestError(f"{reserved[0]} cannot be set here", param=f"chat_template_kwargs.{reserved[0]}")
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if continue_final_message:
            messages = self._tagged(messages)
        template = self._template if tools is None else self._tool_template
        variables: dict[str, Any] = {
            **template.globals,
            **self._special_tokens,
            **extra,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # What ``Template.render`` does, without walking through the globals, which are a chain of maps, each time.
            context = template.new_context(variables, shared=True)
            text = template.environment.concat(template.root_render_func(context))
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refused: {error.message}", param="messages") from error
        # A template runs arbitrary expressions over the client's messages: whatever Python error it trips over
        # (a missing key, a str added to None, an overflow) is about this request, not about this server.
        except Exception as error:
            raise InvalidRequestError(f"the chat template failed: {error}", param="messages") from error
        return _cut_at_tag(text, messages) if continue_final_message else text

    def _tagged(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str):
            raise InvalidRequestError(
                "continue_final_message needs a final message with text content", param="continue_final_message"
            )
        return [*messages[:-1], {**messages[-1], "content": content + _CONTINUE_TAG}]


def _compiled(source: str) -> jinja2.Template:
    try:
        template = _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"the model's chat template does not compile: {error}") from error
    # As a plain dictionary: a context walks through all of them, and they are a chain of maps.
    template.globals = dict(template.globals)
    return template


def _cut_at_tag(text: str, messages: list[ChatMessage]) -> str:
    """The rendered text up to the end of the final message's content."""
    content: str = messages[-1]["content"].removesuffix(_CONTINUE_TAG)
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or content.strip() not in text:
        raise InvalidRequestError(
            "the chat template does not show the final message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    if text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:at]
    return text[:at].rstrip()  # the template trims contents


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks assistant text for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A macro scope of its own, so that assignments inside stay inside, as in transformers.
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


class _TemplateDict:
    """``dict(...)`` for templates, without the type object and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    """``namespace(...)`` that takes no underscore-prefixed attributes: they could reach Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot store the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes: templates write prompts, not pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
