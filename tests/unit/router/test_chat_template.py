"""Templates render as in transformers."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from twopool.protocol.errors import InvalidRequestError, ModelError
from twopool.router.chat_template import ChatTemplate
from twopool_testing.tiny_tokenizers import CHATML, byte_level_tokenizer

SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
LLAMA3_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
<|system|>
Today Date: {{ date_string }}

{{ system_message }}
    {% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
[{{ call.function.name }}({{ call.function.arguments | tojson }})]
        {%- endfor %}
    {%- else %}
<|{{ message['role'] }}|>
{{ message['content'] | trim }}{{ eos_token }}
    {%- endif %}
    {% endfor %}
{%- if add_generation_prompt %}
<|assistant|>
{% endif %}"""
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set ns = namespace(count=0) %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% set ns.count = ns.count + 1 %}"
    "[{{ m['role'] }}]{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] | tojson(indent=2) }}{% endif %}{% endfor %}{{ ns.count }}"
)
TEMPLATES = {"chatml": CHATML, "llama3-like": LLAMA3_LIKE, "strict": STRICT}
USER, ANSWER = {"role": "user", "content": "<b>Hi & 'bye'</b> é"}, {"role": "assistant", "content": " fine \n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "three": [USER, ANSWER, {"role": "user", "content": ""}],
    "system": [{"role": "system", "content": "  be brief "}, USER],
    "null name": [{**USER, "name": None}],
    "tool call": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}],
        },
        {"role": "tool", "content": "42"},
    ],
}


def reference(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer: Tokenizer = byte_level_tokenizer()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    text: str = fast.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    return text


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_equal_to_transformers(template: str, conversation: str, prompt: bool) -> None:
    """TOK-04: special tokens, raise_exception, loop controls, tojson, namespaces, generation blocks."""
    source, messages = TEMPLATES[template], CONVERSATIONS[conversation]
    mine = ChatTemplate(source, SPECIAL)
    if template == "strict" and conversation in ("system", "tool call"):
        with pytest.raises(InvalidRequestError, match=r"not supported|must alternate"):
            mine.render(messages, add_generation_prompt=prompt)
        return
    assert mine.render(messages, add_generation_prompt=prompt) == reference(
        source, messages, add_generation_prompt=prompt
    )


@pytest.mark.parametrize("template", ["chatml", "llama3-like"])
def test_continuing_the_final_message(template: str) -> None:
    messages = [USER, ANSWER]
    mine = ChatTemplate(TEMPLATES[template], SPECIAL).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert mine == reference(TEMPLATES[template], messages, continue_final_message=True)
    assert mine.endswith("fine \n" if template == "chatml" else "fine")


def test_template_kwargs_reach_the_template() -> None:
    mine = ChatTemplate(LLAMA3_LIKE, SPECIAL).render([USER], template_kwargs={"date_string": "1 May"})
    assert mine == reference(LLAMA3_LIKE, [USER], add_generation_prompt=True, date_string="1 May")
    assert "1 May" in mine


def test_strftime_now() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}", {}).render([USER])
    assert len(text) == 4
    assert text.isdecimal()


def test_what_a_template_raises_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequestError, match="Conversation roles must alternate") as caught:
        ChatTemplate(STRICT, SPECIAL).render([USER, USER])
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate("{{ messages[0].content + none }}", {}).render([USER])
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate("{{ messages[0].missing.deeper }}", {}).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.__init__ }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ ''.format.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        rendered = ChatTemplate(source, {}).render([USER])
        assert rendered == ""  # an undefined attribute renders empty: nothing was reached either
        raise InvalidRequestError("nothing reached")


def test_a_broken_template_is_a_startup_error() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for x in %}", {})


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools"])
def test_template_kwargs_may_not_replace_the_conversation(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(CHATML, SPECIAL).render([USER], template_kwargs={name: []})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("messages", [[], [{"role": "assistant"}], [{"role": "assistant", "content": ["x"]}]])
def test_continuing_needs_text_to_continue(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(CHATML, SPECIAL).render(messages, continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(InvalidRequestError, match="does not show"):
        ChatTemplate("fixed", {}).render([ANSWER], continue_final_message=True, add_generation_prompt=False)
