"""Renders a conversation as the exact prompt of a model, and reads a completion as a message.

The one promise that training rests on: what `bridge` returns, appended to the previous prompt and
completion, is a prompt in which every earlier token stands unchanged.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from areal_agents.core.completion import Grammar, TokenIds, as_token_ids
from areal_agents.core.messages import Message
from areal_agents.errors import ConfigError, PromptTooLong, RenderingError
from areal_agents.rendering.families import make_format, renderer_config
from areal_agents.rendering.forcing import Forcing
from areal_agents.rendering.formats import ChatFormat
from areal_agents.rendering.replies import ReplyReader
from areal_agents.rendering.special_text import SpecialText, strings_in
from areal_agents.rendering.streaming import ReplyStream
from areal_agents.rendering.templates.tails import tail_start
from areal_agents.rendering.tokenization.tokenizer import Tokenizer

# Nearly all calls of an agent have the same tools, so these are marked once.
_TOOLS_KEPT = 16
_TOOLS_BYTES = 65_536  # larger lists are marked at every call
SpecialTokensInContent = Literal["text", "parse"]


class ChatRenderer:
    """One model's chat format. Stateless after construction, so threads may share it.

    Rendering is CPU-bound: the cost of a bridge or a parse follows the new text and the last reply, not
    the history; a full render follows the whole conversation. An event loop hands long ones to a thread.

    Attributes:
        tokenizer: of the model folder.
        family: the name of the chat format.
        stop_token_ids: the tokens that end the model's turn.
        vocab_size: ids at or above it do not exist.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        *,
        family: str,
        special_text: SpecialText | None = None,
    ) -> None:
        """Wrap a format that is already made; `from_folder` and `from_config` make one.

        With `special_text`, which the format must have been made for, special tokens in content stay text.
        """
        self.tokenizer = tokenizer
        self.family = family
        self.stop_token_ids: tuple[int, ...] = tuple(chat_format.get_stop_token_ids())
        self.vocab_size = tokenizer.vocab_size
        self._format = chat_format
        self._special_text = special_text
        self._reader = ReplyReader(tokenizer, chat_format, family=family)
        self._forcing = Forcing(self._reader)
        self._marked_tools = functools.lru_cache(_TOOLS_KEPT)(self._mark_tools)
        self._source: tuple[Path, str, dict[str, Any]] | None = None

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        family: str = "auto",
        options: Mapping[str, Any] | None = None,
        special_tokens_in_content: SpecialTokensInContent = "text",
    ) -> ChatRenderer:
        """The renderer of a model folder.

        Args:
            path: a folder with config.json and tokenizer.json.
            family: "auto" (by config.json's model_type), or a family's name.
            options: the family's template options, for example `{"enable_thinking": False}`.
            special_tokens_in_content: what a special token that messages or tools spell out becomes: "text",
                the tokens of its characters; "parse", the special token itself, as on plain servers.

        Raises:
            ConfigError: no such folder, unknown family, an option that the family does not have, or a
                tokenizer that cannot write its special tokens as text.
        """
        # The config first: of a folder that is no model's, it gives the clearer error.
        config = renderer_config(path, family=family, options=options or {})
        tokenizer = Tokenizer.from_folder(path)
        return cls._made(tokenizer, config, Path(path), family, options or {}, special_tokens_in_content)

    @classmethod
    def from_config(
        cls, tokenizer: Tokenizer, config: Any, *, special_tokens_in_content: SpecialTokensInContent = "text"
    ) -> ChatRenderer:
        """The format that a config represents: see `families.make_format`. ConfigError as `from_folder`."""
        special_text = None
        if special_tokens_in_content == "text":
            special_text = SpecialText(tokenizer.token_text(i) for i in tokenizer.special_token_ids)
            tokenizer.check_marks()
        made = make_format(tokenizer, config, marked=special_text is not None)
        return cls(tokenizer, made, family=config.name, special_text=special_text)

    @classmethod
    def _made(
        cls,
        tokenizer: Tokenizer,
        config: Any,
        path: Path,
        family: str,
        options: Mapping[str, Any],
        special_tokens_in_content: SpecialTokensInContent,
    ) -> ChatRenderer:
        renderer = cls.from_config(tokenizer, config, special_tokens_in_content=special_tokens_in_content)
        renderer._source = (path, family, dict(options))
        return renderer

    def with_options(self, options: Mapping[str, Any]) -> ChatRenderer:
        """The same model with other template options on top of this renderer's. It shares the tokenizer.

        Raises:
            ConfigError: an option that the family does not have, or a renderer without a model folder.
        """
        if self._source is None:
            raise ConfigError("only a renderer that was made from a model folder takes other options")
        path, family, given = self._source
        merged = {**given, **options}
        config = renderer_config(path, family=family, options=merged)
        content: SpecialTokensInContent = "parse" if self._special_text is None else "text"
        return self._made(self.tokenizer, config, path, family, merged, content)

    def describe(self) -> str:
        """The chat format, and for a template that was proven here, after which messages it is extended."""
        describe = getattr(self._format, "describe", None)
        return f"{self.family} of the renderers library" if describe is None else describe()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        generation_prompt: bool = True,
        most_tokens: int | None = None,
    ) -> TokenIds:
        """[P] the whole prompt, up to where the model's reply begins.

        Args:
            messages: at least one.
            tools: OpenAI chat function tools.
            generation_prompt: False ends after the last message, for example to compare renderings.
            most_tokens: a limit; a longer prompt may be refused before it is encoded.

        Raises:
            PromptTooLong: it is longer than `most_tokens`. Short prompts are never refused.
            RenderingError: no message, or a conversation that the family cannot express.
        """
        if not messages:
            raise RenderingError("a conversation needs at least one message")
        try:
            plain, specs = self._content(messages, tools)
            with self._limited(most_tokens):
                ids = self._format.render_ids(plain, tools=specs, add_generation_prompt=generation_prompt)
        except PromptTooLong:
            raise
        except Exception as error:  # a template may fail in any way on what it does not know
            raise RenderingError(f"family {self.family} cannot express this conversation: {error}") from error
        return as_token_ids(ids)

    def bridge(
        self,
        prompt_ids: TokenIds,
        completion_ids: TokenIds,
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        most_tokens: int | None = None,
    ) -> TokenIds | None:
        """[N] the ids to append to prompt + completion for the next turn, earlier tokens untouched.

        A completion that was cut off gets the end of its turn here, as prompt, not as sampled.
        None where this template cannot extend: it would strip or rewrite earlier tokens (reasoning
        before a new user turn), or the completion continues after the end of its turn.

        Args:
            most_tokens: a limit of the new tokens; more may be refused with PromptTooLong, as by `render`.
        """
        prompt = self._tail(prompt_ids)
        completion = np.asarray(completion_ids).tolist()
        try:
            plain, specs = self._content(new_messages, tools)
            with self._limited(most_tokens):
                rendered = self._format.bridge_to_next_turn(prompt, completion, plain, tools=specs)
        except PromptTooLong:
            raise
        except Exception as error:  # a template may fail in any way on what it does not know
            raise RenderingError(f"family {self.family} cannot extend this conversation: {error}") from error
        if rendered is None:
            return None
        ids = rendered.token_ids if hasattr(rendered, "token_ids") else list(rendered)
        before = [*prompt, *completion]
        # The library drops, without a word, tokens sampled after the end of the turn.
        if len(ids) <= len(before) or ids[: len(before)] != before:
            return None
        return as_token_ids(ids[len(before) :])

    def parse(
        self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[dict[str, Any]] = ()
    ) -> Message:
        """The assistant message that a completion means.

        Reasoning and content come without the whitespace around them. Tool calls get ids minted here.
        A call that is malformed (no JSON, no name, arguments that are no object, unclosed) stays in the
        content as sampled, so that agent and reward see it.
        """
        ids = np.asarray(completion_ids).tolist()
        return self._reader.read(self._tail(prompt_ids), ids, tools).message()

    def reply_stream(self, prompt_ids: TokenIds, tools: Sequence[dict[str, Any]] = ()) -> ReplyStream:
        """A reader of the reply to this prompt that takes tokens as they are sampled."""
        return ReplyStream(self._reader, self._tail(prompt_ids), tools)

    def reply_grammar(
        self,
        tools: Sequence[dict[str, Any]],
        *,
        calls: Literal["auto", "none", "required"] = "auto",
        named: str | None = None,
        parallel: bool = True,
        output: Grammar | None = None,
    ) -> Grammar | None:
        """What a reply must match, after the reasoning that the template allows; None for anything.

        Args:
            tools: OpenAI chat function tools.
            calls: "required": tool calls and nothing else, so that `output` plays no part; "auto": `output`,
                or tool calls beside it where there are tools.
            named: with "required", the one tool that must be called; None for any of them.
            parallel: whether several calls may follow each other; False is exactly one.
            output: the JSON schema that the content must fit, or None.

        Raises:
            RenderingError: this family's calls cannot be forced, its content cannot be JSON, or a keyword of
                the schema cannot be enforced.
            ValueError: a forced call without a tool, or `named` is none of them.
        """
        return self._forcing.grammar(tools, calls=calls, named=named, parallel=parallel, output=output)

    def special_tokens_as_text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> int:
        """The number of special tokens that messages and tools spell out and that are rendered as text."""
        found = self._special_text
        if found is None:
            return 0
        count = sum(found.count(text) for tool in tools for text in strings_in(tool))
        for message in messages:
            count += found.count(message.content) + found.count(message.reasoning)
            for call in message.tool_calls:
                count += found.count(call.name) + found.count_json(call.arguments)
        return count

    def _content(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools in the form of a `ChatFormat`. RenderingError for a lone surrogate."""
        if self._special_text is None:
            return [_to_library(message) for message in messages], list(tools) or None
        plain = [_marked(_to_library(message), self._special_text) for message in messages]
        if not tools:
            return plain, None
        written = orjson.dumps([*tools])
        mark = self._marked_tools if len(written) <= _TOOLS_BYTES else self._mark_tools
        return plain, mark(written)

    def _mark_tools(self, tools: bytes) -> list[dict[str, Any]]:
        """The marked tools of a JSON array."""
        assert self._special_text is not None
        return self._special_text.mark_value(orjson.loads(tools))

    def _limited(self, most_tokens: int | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if most_tokens is None else self.tokenizer.limited(most_tokens)

    def _tail(self, prompt_ids: TokenIds) -> list[int]:
        """The end of the prompt, as far back as this format looks."""
        prompt = np.asarray(prompt_ids)
        start = tail_start(prompt, self._format, self.family, self.stop_token_ids)
        return prompt[start:].tolist()


def _to_library(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def _marked(message: dict[str, Any], special_text: SpecialText) -> dict[str, Any]:
    """A message with marks in all its strings but the role, which the client does not choose freely."""
    for key in ("content", "reasoning_content", "tool_call_id", "name"):
        if key in message:
            message[key] = special_text.mark(message[key])
    for call in message.get("tool_calls", ()):
        function = call["function"]
        call["id"] = special_text.mark(call["id"])
        function["name"] = special_text.mark(function["name"])
        function["arguments"] = special_text.mark_json(function["arguments"])
    return message
