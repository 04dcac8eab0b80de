"""Chat templates: messages to prompt text, as the checkpoint's author wrote it.  No jax here.

A template is a program from a downloaded file.  It runs in Jinja's immutable sandbox, which hides Python's internals
and forbids changes to its arguments.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from rlt_jax.errors import CheckpointError, InvalidRequest
from rlt_jax.models.json_file import read_text

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """One compiled template.  Immutable; `render` may be called from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None, where: str = "template") -> None:
        """Compile.

        Args:
            source: the Jinja source.
            special_tokens: variables that it may use, such as {"eos_token": "<|im_end|>"}.
            where: what to call it in errors.

        Raises:
            CheckpointError: the source does not parse.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"{where}: chat template does not compile: {error}") from error

    @classmethod
    def from_directory(cls, path: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """The template of a model directory, None if it has none.

        chat_template.jinja wins over tokenizer_config.json's field, which is a string or a list of named templates, of
        which "default" is taken.

        Raises:
            CheckpointError: names the file and field at fault.
        """
        config_file = path / "tokenizer_config.json"
        tokens = {
            name: text
            for name in _SPECIAL_TOKENS
            if (text := special_token_text(tokenizer_config, name, str(config_file))) is not None
        }
        file = path / "chat_template.jinja"
        if file.exists():
            return cls(read_text(file), tokens, str(file))
        where = f"{config_file}: field 'chat_template'"
        found = tokenizer_config.get("chat_template")
        if isinstance(found, list):
            found = _named_templates(found, where)
        if found is None:
            return None
        if not isinstance(found, str):
            raise CheckpointError(f"{where} must be a string or a list of named templates, found {found!r:.80}")
        return cls(found, tokens, where)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text for `messages`.  Encode it with add_special_tokens=False: it spells them out.

        Args:
            messages: mappings with a string "role" and, usually, "content".
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: anything else the template knows (tools, enable_thinking, …); wins over the special tokens.

        Raises:
            InvalidRequest: field "messages": malformed, or refused by the template.
        """
        _check_messages(messages)
        given: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **variables}
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(given)
        except _Refused as error:
            raise InvalidRequest("messages", f"refused by the chat template: {error}") from error
        except Exception as error:  # a template is a program of its own: any error in it is about these messages
            raise InvalidRequest(
                "messages", f"the chat template failed on them: {type(error).__name__}: {error}"
            ) from error


def special_token_text(tokenizer_config: Mapping[str, Any], field: str, where: str) -> str | None:
    """Text of a special token in tokenizer_config.json: a string, an object with "content", or absent.

    Raises:
        CheckpointError: it is anything else.
    """
    value = tokenizer_config.get(field)
    text = value.get("content") if isinstance(value, dict) else value
    if (value is not None or text is not None) and not isinstance(text, str):
        raise CheckpointError(
            f"{where}: field '{field}' must be a string or have a string 'content', found {value!r:.80}"
        )
    return text


class _Refused(jinja2.TemplateError):
    """A template called raise_exception."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes <, > and & for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _named_templates(entries: list[Any], where: str) -> str | None:
    templates: dict[str, str] = {}
    for entry in entries:
        ok = isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        if not ok:
            raise CheckpointError(f"{where}: each entry must have string 'name' and 'template', found {entry!r:.80}")
        templates[entry["name"]] = entry["template"]
    if templates and "default" not in templates:
        raise CheckpointError(f"{where}: no template is named 'default', found {', '.join(templates)}")
    return templates.get("default")


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages", f"must be a list of objects, found {type(messages).__name__}")
    if not messages:
        raise InvalidRequest("messages", "is empty; at least one message is needed")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest("messages", f"entry {i} must be an object, found {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise InvalidRequest("messages", f"entry {i} must have a string 'role', found {message.get('role')!r:.80}")
