"""Renders a conversation with a checkpoint's chat template, as transformers does.

Templates come with checkpoints and are not trusted: they run in jinja2's immutable sandbox. The environment (trimming,
extensions, filters and globals) is that of transformers' `utils/chat_template_utils.py`, so that both render alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cann_runtime.errors import CheckpointError, RequestError

Message = Mapping[str, Any]


class _Generation(Extension):
    """`{% generation %}` marks an assistant's tokens for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """A compiled template; CheckpointError, naming `where` it came from, where its syntax is wrong."""

    def __init__(self, source: str, where: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{where}: the chat template is not valid: {error}") from error

    def render(
        self, messages: Sequence[Message], *, special_tokens: Mapping[str, str], add_generation_prompt: bool
    ) -> str:
        """The conversation as one text. RequestError where the template refuses it (roles out of order ...)."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestError(f"the chat template refuses this conversation: {error}") from error
