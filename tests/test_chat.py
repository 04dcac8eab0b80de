"""Chat templates.  PROTECTS: the prompt is what the checkpoint's author meant, and a template cannot reach Python."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from rlt_jax.chat import ChatTemplate, special_token_text
from rlt_jax.errors import CheckpointError, InvalidRequest

# The form that Ouro's tokenizer ships: ChatML with a default system turn.
CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
USER = [{"role": "user", "content": "2 + 2?"}]


def test_chatml() -> None:
    template = ChatTemplate(CHATML)
    expected = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render(USER) == expected
    assert template.render(USER, add_generation_prompt=False) == expected.removesuffix("<|im_start|>assistant\n")
    system = [{"role": "system", "content": "Short."}, *USER]
    assert template.render(system).startswith("<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),  # trim and lstrip blocks
        ("{{ {'a': '<é&>'} | tojson }}", '{"a": "<é&>"}'),  # not escaped for HTML or ASCII
        ("{{ [1, {'b': 2}] | tojson(indent=1) }}", json.dumps([1, {"b": 2}], indent=1)),
        (
            "{% for i in [0, 1, 2, 3] %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}"
            "{{ i }}{% endfor %}",
            "02",
        ),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "2 + 2?!"),
        ("{% if tools %}tools{% else %}none{% endif %}{{ undefined_name }}", "none"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ '<b>' }}{{ messages[0]['content'].strip().split(' ')[1] }}", "<b>+"),
    ],
)
def test_what_templates_rely_on(source: str, expected: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(USER) == expected


def test_variables_win_over_special_tokens_but_not_over_the_messages() -> None:
    template = ChatTemplate("{{ eos_token }}{{ enable_thinking }}{{ tools }}", {"eos_token": "a"})
    assert template.render(USER, eos_token="b", enable_thinking=False, tools=[1]) == "bFalse[1]"


def test_strftime_now() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}").render(USER)
    assert abs(int(rendered) - datetime.datetime.now().year) <= 1


def test_refusal_by_the_template_is_about_the_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="refused by the chat template: roles must alternate") as caught:
        template.render(USER)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[3]['content'] + 'x' }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # the sandbox
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include 'other' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_an_invalid_request(source: str) -> None:
    messages = [dict(USER[0])]
    with pytest.raises(InvalidRequest, match="the chat template failed on them") as caught:
        ChatTemplate(source).render(messages)
    assert caught.value.field == "messages"
    assert messages == USER


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "is empty"),
        ("hi", "must be a list of objects, found str"),
        ({"role": "user"}, "must be a list of objects, found dict"),
        (None, "must be a list of objects, found NoneType"),
        ([*USER, "hi"], "entry 1 must be an object, found str"),
        ([{"content": "x"}], "entry 0 must have a string 'role', found None"),
        ([{"role": 3}], "entry 0 must have a string 'role', found 3"),
    ],
)
def test_malformed_messages(messages: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% endfor %}", "{{ x | no_such_filter }}"])
def test_source_that_does_not_compile(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"^here: chat template does not compile"):
        ChatTemplate(source, where="here")


def test_from_directory(tmp_path: Path) -> None:
    def text(config: dict[str, Any]) -> str | None:
        template = ChatTemplate.from_directory(tmp_path, config)
        return None if template is None else template.render(USER)

    assert text({}) is None
    assert text({"chat_template": None}) is None
    assert text({"chat_template": []}) is None
    assert text({"chat_template": "a{{ eos_token }}", "eos_token": {"content": "E"}}) == "aE"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert text({"chat_template": named}) == "d"
    (tmp_path / "chat_template.jinja").write_text("file{{ bos_token }}")
    assert text({"chat_template": "a", "bos_token": "B"}) == "fileB"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"chat_template": 3}, "field 'chat_template' must be a string or a list of named templates, found 3"),
        ({"chat_template": [{"name": "default"}]}, "each entry must have string 'name' and 'template'"),
        ({"chat_template": ["x"]}, "each entry must have string 'name' and 'template'"),
        ({"chat_template": [{"name": "rag", "template": ""}]}, "no template is named 'default', found rag"),
        ({"chat_template": "{%"}, "field 'chat_template': chat template does not compile"),
        ({"eos_token": 2}, "field 'eos_token' must be a string or have a string 'content', found 2"),
        ({"bos_token": {"text": "x"}}, "field 'bos_token' must be a string"),
    ],
)
def test_from_directory_errors(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        ChatTemplate.from_directory(tmp_path, config)
    assert "tokenizer_config.json" in str(caught.value)


def test_unreadable_template_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
        ChatTemplate.from_directory(tmp_path, {})


def test_special_token_forms() -> None:
    assert special_token_text({}, "eos_token", "f") is None
    assert special_token_text({"eos_token": None}, "eos_token", "f") is None
    assert special_token_text({"eos_token": "x"}, "eos_token", "f") == "x"
    assert special_token_text({"eos_token": {"content": "x", "lstrip": False}}, "eos_token", "f") == "x"
