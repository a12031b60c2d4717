"""Runs a model's own chat template as the Hugging Face libraries do, without importing them.

The rendered text is, character for character, that of `apply_chat_template`. A template is untrusted code: it
runs in Jinja's sandbox and sees only plain JSON values.
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
from areal_agents.model_folder import read_object

Clock = Callable[[], datetime]

# Variables that every template gets; any other variable that it reads is an option.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template with fixed options. Safe to share between threads.

    Attributes:
        source: the source of the template; if a folder has several, all of them.
        option_names: the options that the template reads.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str],
        options: Mapping[str, Any],
    ) -> None:
        """Compile the templates.

        Args:
            sources: the template "default", and "tool_use" if requests with tools have a separate template.
            special_tokens: the special tokens by the name that templates use: `{"bos_token": "<s>", …}`.
            options: more variables for the template, for example `{"enable_thinking": False}`.

        Raises:
            ConfigError: there is no "default", a template is not valid Jinja, or it does not read an option.
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
            raise ConfigError(f"the chat template is not a valid Jinja template: {error}") from error
        read = set().union(*(jinja2.meta.find_undeclared_variables(tree) for tree in trees))
        self.option_names = tuple(sorted(read - _GIVEN - set(environment.globals) - set(special_tokens)))
        unknown = sorted(set(options) - set(self.option_names))
        if unknown:
            known = ", ".join(self.option_names) or "no options"
            raise ConfigError(
                f"renderer option {unknown[0]!r} is not read by this chat template; it reads {known}"
            )

    @classmethod
    def from_folder(
        cls, path: str | Path, *, special_tokens: Mapping[str, str], options: Mapping[str, Any]
    ) -> ChatTemplate:
        """Compile the template of a model folder. ConfigError as for construction, or if there is none."""
        sources = template_sources(path)
        if not sources:
            raise ConfigError(
                f"{path} has no chat template: expected chat_template.jinja, or chat_template in "
                "tokenizer_config.json or chat_template.json"
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
            add_generation_prompt: whether to end with the header of the model's reply.
            now: the clock for templates that write the date.

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
        except Exception as error:  # a template can raise anything on input that it does not support
            raise RenderingError(f"the chat template refuses this conversation: {error}") from error


def template_sources(path: str | Path) -> dict[str, str]:
    """The chat templates of a model folder by name, {} if it has none. ConfigError if one is malformed.

    Jinja files take precedence over tokenizer_config.json, which holds a string or a list of
    `{"name", "template"}`.
    """
    folder = Path(path)
    if (folder / "chat_template.jinja").is_file():
        files = {"default": folder / "chat_template.jinja"}
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        files.update({file.stem: file for file in more})
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    value = read_object(folder / "tokenizer_config.json").get("chat_template")
    if value is None:
        value = read_object(folder / "chat_template.json").get("chat_template")
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


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks a reply for training code; only its content is written."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
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
    """Serialise a value as JSON; unlike Jinja's own filter, <, > and & are not escaped."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under both names that templates read."""
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
