"""Runs a model's own chat template as the Hugging Face libraries do, without importing them.

The text that a template writes here is, character for character, what `apply_chat_template` writes. A
template is foreign code: it runs in Jinja's sandbox and sees plain JSON values only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal_agents.errors import ConfigError, RenderingError
from areal_agents.rendering.tokenization.tokenizer import read_json

Clock = Callable[[], datetime]

# What the caller of a template always gives; everything else that it reads is an option.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template with fixed options. Safe to share between threads.

    Attributes:
        source: the template's text; where a folder has several, all of them.
        option_names: the options that the template reads.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str],
        options: Mapping[str, Any],
    ) -> None:
        """Compile.

        Args:
            sources: "default", and "tool_use" where requests with tools have a template of their own.
            special_tokens: by role, as templates read them: `{"bos_token": "<s>", …}`.
            options: more variables for the template, for example `{"enable_thinking": False}`.

        Raises:
            ConfigError: no "default", a template that is no Jinja, or an option that it does not read.
        """
        if "default" not in sources:
            raise ConfigError(f"a model needs a chat template named 'default', got {sorted(sources)}")
        self.source = "\n".join(sources.values())
        self._variables = {**special_tokens, **options}
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
            trees = [environment.parse(text) for text in sources.values()]
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is no Jinja template: {error}") from error
        read = set().union(*(jinja2.meta.find_undeclared_variables(tree) for tree in trees))
        self.option_names = tuple(sorted(read - _GIVEN - set(environment.globals) - set(special_tokens)))
        unknown = sorted(set(options) - set(self.option_names))
        if unknown:
            has = ", ".join(self.option_names) or "no options"
            raise ConfigError(
                f"renderer option {unknown[0]!r} is not read by this chat template; it has {has}"
            )

    @classmethod
    def from_folder(
        cls, path: str | Path, *, special_tokens: Mapping[str, str], options: Mapping[str, Any]
    ) -> ChatTemplate:
        """The template of a model folder. ConfigError as at construction, or if the folder has none."""
        sources = template_sources(path)
        if not sources:
            raise ConfigError(
                f"{path} has no chat template: no chat_template.jinja, none in tokenizer_config.json"
            )
        return cls(sources, special_tokens=special_tokens, options=options)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool,
        now: Clock = datetime.now,
    ) -> str:
        """The conversation as text.

        Args:
            messages: OpenAI chat messages.
            tools: OpenAI function tools, or None.
            add_generation_prompt: end where the model's reply begins.
            now: the clock of a template that writes the date.

        Raises:
            RenderingError: the template refuses this conversation.
        """
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        try:
            return template.render(
                **self._variables,
                messages=[_with_reasoning_names(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=lambda form: now().strftime(form),
            )
        except Exception as error:  # foreign code may fail in any way on what it does not know
            raise RenderingError(f"the chat template refuses this conversation: {error}") from error


def template_sources(path: str | Path) -> dict[str, str]:
    """The chat templates of a model folder by name, {} if it has none. ConfigError if one is malformed.

    Files stand above tokenizer_config.json, which holds one text or a list of `{"name", "template"}`.
    """
    folder = Path(path)
    if (folder / "chat_template.jinja").is_file():
        files = {"default": folder / "chat_template.jinja"}
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        files.update({file.stem: file for file in more})
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    value = read_json(folder / "tokenizer_config.json").get("chat_template")
    if value is None:
        value = read_json(folder / "chat_template.json").get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"chat_template of {folder} must be a string or a list of objects with name and template"
        ) from error


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks a reply for training code; it writes its inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape <, > and &."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates read reasoning under one of two names."""
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
